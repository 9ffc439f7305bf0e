"""The command `titan-ckpt train CONFIG [--table.key VALUE ...]`: from a TOML file to a trained run and an exit code.

Owns the command line, the log and the exit codes. Nothing is imported that needs torch before the arguments are known
to be good. Under torchrun every process is a rank.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titan_ckpt.errors import CheckpointError
    from titan_ckpt.training.trainer import Trainer

DONE, LOST, BAD_CONFIG = 0, 1, 2
EPILOG = "Any setting of the file can be given: --training.steps 100 --checkpoint.save.interval 10"


def main(argv: Sequence[str], program: str = "titan-ckpt train") -> int:
    """Train as the command line says and return the exit code; an error is one message on standard error.

    0: the last step is done. 75: stopped before, everything saved; 0 under
    torchrun. 2: the run cannot start, or go on, as it is configured. 1: another error, or a stop that left no time to
    save. The log says how many steps are lost.
    """
    parser = argparse.ArgumentParser(program, description="Train a model as a TOML file says.", allow_abbrev=False)
    parser.add_argument("config", nargs="?", help="the TOML file; `titan-ckpt init` writes one")
    parser.add_argument("--list", action="store_true", help="list every setting: type, default, what it does")
    parser.epilog = EPILOG
    arguments, overrides = parser.parse_known_args(argv)
    if arguments.list:
        from titan_ckpt.training.launch.reference import as_text

        print(as_text(), end="")  # noqa: T201 - this is what the command is asked for
        return DONE
    if arguments.config is None:
        parser.error("which run? name a TOML file; `titan-ckpt init pretrain` writes one")
    from titan_ckpt.encoding.named import find_names_here
    from titan_ckpt.errors import CheckpointError
    from titan_ckpt.stores.answers import StoreError
    from titan_ckpt.training.launch.terminal import configure_logging, say

    configure_logging()
    find_names_here()
    try:
        trainer = build_trainer(arguments.config, overrides)
        trainer.run()
        return trainer.exit_code
    except CheckpointError as error:
        return _report(error, arguments.config)
    except StoreError as error:  # it names the place, the rank, the answer and the next step
        say(f"StoreError: {error}")
        return BAD_CONFIG if error.says_setting_is_wrong else LOST


def build_trainer(path: str, overrides: Sequence[str]) -> Trainer:
    """Return the trainer of a run file: the built-in one, or the one that its key `trainer` names.

    Raises: ConfigError, also for a trainer that the package does not know, and without the extra `train`.
    """
    from titan_ckpt.encoding.named import import_named
    from titan_ckpt.errors import ConfigError
    from titan_ckpt.training.run_file import read_run

    config, converters = read_run(path, overrides)
    from titan_ckpt.training.trainer import Trainer  # needs the extra `train`, and says so

    kind: Any = Trainer
    if config.trainer is not None:
        kind = import_named(config.trainer, "trainer")
        if not (isinstance(kind, type) and issubclass(kind, Trainer)):
            found = f"{config.trainer!r} is no subclass of titan_ckpt.training.trainer.Trainer"
            raise ConfigError([f"trainer: {found}; name one, or leave it out for the built-in one"])
    trainer: Trainer = kind(config, converters)
    return trainer


def _report(error: CheckpointError, path: str) -> int:
    """Say what went wrong, a wrong setting once for all ranks of a host that have found it; return the exit code."""
    from titan_ckpt.errors import ConfigError, says_setting_is_wrong
    from titan_ckpt.training.launch.terminal import say

    repeats = os.environ.get("LOCAL_RANK", "0") != "0" if error.repeats is None else error.repeats
    if isinstance(error, ConfigError) and error.source not in (path, "command line"):
        error = ConfigError(error.problems, path if error.source == "config" else f"{path}: {error.source}")
    is_setting = says_setting_is_wrong(error)
    if not (is_setting and repeats):
        say(f"{type(error).__name__}: {error}")
    return BAD_CONFIG if is_setting else LOST
