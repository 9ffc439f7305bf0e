"""The content of the model: its tensors in the form of files, their initial values and their identity. No I/O."""
