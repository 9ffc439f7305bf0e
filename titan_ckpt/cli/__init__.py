"""The `titan-ckpt` command: looks at checkpoints without a process group and without unpickling."""

__all__ = ["main"]
