"""The commands of `titan-ckpt`. A new one is one module here, see cli/command.py; it imports torch in `run` alone."""
