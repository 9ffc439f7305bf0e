"""attach: this package's checkpoints in Lightning's Trainer; fabric_manager: in a loop of Lightning Fabric.

Both work with the packages lightning, pytorch_lightning and lightning_fabric, and import none of them: the objects that
they are given tell which one it is.
"""

from titan_ckpt.integrations.lightning.fabric import fabric_manager
from titan_ckpt.integrations.lightning.trainer import TitanCheckpoint, attach

__all__ = ["TitanCheckpoint", "attach", "fabric_manager"]
