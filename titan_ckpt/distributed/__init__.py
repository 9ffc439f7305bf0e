"""Agreement between ranks, and the division of tensors that several ranks hold."""

__all__ = ["coordinator", "peer_groups", "replicas", "sharing"]
