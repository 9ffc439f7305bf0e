"""Folders of torch.distributed.checkpoint."""

__all__ = ["dcp", "torch_checkpointing", "writer"]
