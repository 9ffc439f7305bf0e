"""attach: this package's checkpoints in transformers' Trainer, and in TRL's trainers, which are Trainers."""

from titan_ckpt.integrations.transformers.attach import TitanCheckpoint, attach

__all__ = ["TitanCheckpoint", "attach"]
