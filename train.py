"""Train a model from a TOML file: `python train.py configs/debug_pretrain.toml [--table.key VALUE ...]`.

Under torchrun every process is a rank, and parameters are sharded over all ranks.
Owns only the command line: titan_ckpt/training/config.py and converters/ define the keys of the file.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from rich.logging import RichHandler

from converters import ModelConverters, from_tables
from titan_ckpt.config import apply_overrides, from_dict, read_toml
from titan_ckpt.encoding.local_path import require_local
from titan_ckpt.errors import CheckpointError, ConfigError
from titan_ckpt.progress import CONSOLE
from titan_ckpt.training.config import RunConfig


def main(argv: Sequence[str]) -> None:
    """Run the training that the command line describes. A CheckpointError ends the process with one message."""
    parser = argparse.ArgumentParser(description="Train a model as a TOML file says.", allow_abbrev=False)
    parser.add_argument("config", help="the TOML file")
    parser.epilog = "Any setting of the file can be given: --training.steps 100 --checkpoint.save.interval 10"
    arguments, overrides = parser.parse_known_args(argv)
    configure_logging()
    try:
        config, converters = read_run(arguments.config, overrides)
        from titan_ckpt.training.trainer import Trainer  # needs the extra `train`, and says so

        Trainer(config, converters).run()
    except CheckpointError as error:
        sys.exit(f"{type(error).__name__}: {error}")


def read_run(path: str, overrides: Sequence[str]) -> tuple[RunConfig, ModelConverters]:
    """Return the checked settings from the file and the command line. Raises: ConfigError; ConverterError."""
    require_local({"config": path})
    raw = apply_overrides(read_toml(path), overrides)
    tables = raw.pop("converters", [])
    problems: list[str] = []
    converters, config = None, None
    try:
        converters = from_tables(tables if isinstance(tables, list) else [tables], path)
    except ConfigError as error:
        problems += error.problems
    try:
        config = from_dict(RunConfig, raw, path)
    except ConfigError as error:
        problems += error.problems
    if config is None or converters is None:
        raise ConfigError(problems, path)
    return config, converters


def configure_logging() -> None:
    """Log to the console: rank 0 from level INFO, other ranks only warnings and errors."""
    rank = int(os.environ.get("RANK", "0"))
    handler: logging.Handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s" if rank == 0 else f"rank {rank}: %(message)s"))
    if CONSOLE.is_terminal and rank == 0:
        handler = RichHandler(console=CONSOLE, show_path=False, show_level=False)
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, handlers=[handler])


if __name__ == "__main__":
    main(sys.argv[1:])
