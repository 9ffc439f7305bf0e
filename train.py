"""Train a model from a TOML file: `python train.py configs/debug_pretrain.toml [--table.key VALUE ...]`.

Under torchrun every process is a rank, and parameters are sharded over all ranks. `titan-ckpt train` is the same.
"""

from __future__ import annotations

import sys

from titan_ckpt.training.launch.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="train.py"))
