"""`python -m titan_ckpt` is the command titan-ckpt; torchrun starts ranks with `-m titan_ckpt train run.toml`."""

from __future__ import annotations

import sys

from titan_ckpt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
