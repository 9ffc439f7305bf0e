"""TitanCheckpointer and Converters: this package's checkpoints and converters in torchtitan's Trainer."""

from titan_ckpt.integrations.torchtitan.checkpointer import TitanCheckpointer
from titan_ckpt.integrations.torchtitan.converters import Converters

__all__ = ["Converters", "TitanCheckpointer"]
