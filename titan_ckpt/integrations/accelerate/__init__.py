"""accelerate_manager: this package's checkpoints in a loop over what accelerate has prepared."""

from titan_ckpt.integrations.accelerate.manager import accelerate_manager

__all__ = ["accelerate_manager", "known", "loader"]
