"""Where other trainers meet CheckpointManager: one folder for each, which alone imports it."""

__all__ = ["loader_position"]
