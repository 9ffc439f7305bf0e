"""`make zoo`, or `python -m tests.zoo optimizers modules`: see page.py."""

from __future__ import annotations

import os
import sys

# Before torch or transformers are imported, also in the processes that rows() starts.
os.environ.update(
    TITAN_CKPT_ZOO="1",
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
)

from tests.zoo.page import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
