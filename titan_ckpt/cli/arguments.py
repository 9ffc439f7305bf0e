"""The arguments of `titan-ckpt`, a class for each command. Its help comes from here, so nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

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


@dataclass(frozen=True)
class Train:
    """Train a model as a TOML file says: titan-ckpt train run.toml [--table.key VALUE ...]."""

    config: tyro.conf.Positional[Path]
    """The TOML file; `titan-ckpt init` writes one, `titan-ckpt train --list` lists every setting."""


@dataclass(frozen=True)
class Init:
    """Write a commented run file to start from."""

    kind: tyro.conf.Positional[Literal["pretrain", "finetune", "lora", "qat", "ranks"]]
    """pretrain: from random values; finetune: all weights of a model; lora: an adapter; qat: fake quantisation; ranks:
    pretraining on several GPUs."""
    file: Path = Path("run.toml")
    """The file to write; it must not exist."""
    model: Path | None = None
    """The Hugging Face folder of the model to start from."""
    data: Path | None = None
    """Your text: a .txt file, or a .jsonl file whose lines have a "text". Absent: a small built-in one."""


Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Init, tyro.conf.subcommand("init")]
    | Annotated[Ls, tyro.conf.subcommand("ls")]
    | Annotated[Inspect, tyro.conf.subcommand("inspect")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Save, tyro.conf.subcommand("save")]
)
