"""The parts of a checkpoint besides the weights, and the names of the files that hold them."""

__all__ = [
    "classes",
    "gradients",
    "items",
    "known",
    "optimizer",
    "optimizer_content",
    "run_state",
    "snapshot",
    "unsaved_state",
    "watched",
]
