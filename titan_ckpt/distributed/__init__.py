"""Agreement between ranks, and the division of tensors that several ranks hold."""
