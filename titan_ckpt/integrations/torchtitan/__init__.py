"""TitanCheckpointer and TitanConverters: this package's checkpoints and converters in torchtitan's Trainer."""

from titan_ckpt.integrations.torchtitan.checkpointer import TitanCheckpointer
from titan_ckpt.integrations.torchtitan.converters import TitanConverters

__all__ = ["TitanCheckpointer", "TitanConverters"]
