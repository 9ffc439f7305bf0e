"""TitanCheckpointer: a checkpointer for torchtitan's Trainer, in place of torchtitan's own."""

from titan_ckpt.integrations.torchtitan.checkpointer import TitanCheckpointer

__all__ = ["TitanCheckpointer"]
