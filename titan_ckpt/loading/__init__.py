"""Loading: the sources that a run starts from, and the way of their values into the model and the training state."""

__all__ = ["adapters", "external", "merge", "origin", "plan", "restore", "sources"]
