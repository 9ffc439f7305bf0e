"""The training loop that the checkpoints are of. A leaf: nothing of the core imports it."""
