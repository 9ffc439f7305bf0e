"""The arguments of `titan-ckpt`, a class for each command. Its help comes from here, so nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Ls:
    """List the committed steps of a run's checkpoint folder, and why any folder is not one."""

    folder: tyro.conf.Positional[Path]
    keep: str | None = None
    """Say what this policy, as in [checkpoint.save], would delete; nothing is: --keep "latest = 2, every = 1000"."""


@dataclass(frozen=True)
class Inspect:
    """List the tensors of a checkpoint of any format: native step, Hugging Face folder, PEFT adapter, DCP."""

    path: tyro.conf.Positional[Path]


@dataclass(frozen=True)
class Verify:
    """Read a native step whole: compare every file with its digest, and check that every tensor is whole."""

    path: tyro.conf.Positional[Path]


@dataclass(frozen=True)
class Save:
    """Ask a running job for a save after its step under way, and wait until it is committed."""

    run_folder: Annotated[Path, tyro.conf.arg(name="run")]
    """The folder that the run writes into: train.py's output_folder, a manager's base_folder."""
    timeout_seconds: float = 600.0
    """How long to wait for the answer."""


Command = (
    Annotated[Ls, tyro.conf.subcommand("ls")]
    | Annotated[Inspect, tyro.conf.subcommand("inspect")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Save, tyro.conf.subcommand("save")]
)
