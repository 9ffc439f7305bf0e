"""The arguments of `titan-ckpt`, a class for each command. Its help comes from here, so nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class Shared:
    """The argument that every command has."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object in place of tables."""


@dataclass(frozen=True)
class Ls(Shared):
    """List the steps and exports of a run, and why any folder is not a step."""

    folder: tyro.conf.Positional[Path]
    """The run's folder, or its checkpoint folder; or its place in a bucket: s3://bucket/key, gs://, az://."""


@dataclass(frozen=True)
class Inspect(Shared):
    """Show what a checkpoint of any format holds: native step, Hugging Face folder, PEFT adapter, DCP."""

    path: tyro.conf.Positional[Path]
    """Folder, file, or bucket's URL."""
    tensor: tyro.conf.Positional[str | None] = None
    """Show figures and a histogram of this tensor."""
    all: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """List every tensor, not one line for equal layers; and the state of the run."""


@dataclass(frozen=True)
class Verify(Shared):
    """Read a checkpoint whole: digests of a native step; files, index and config of the other formats."""

    path: tyro.conf.Positional[Path]
    """Folder, file, or bucket's URL."""


@dataclass(frozen=True)
class Diff(Shared):
    """Compare two checkpoints of any formats and sharding: exit code 0 if they are the same, 1 if not."""

    left: tyro.conf.Positional[Path]
    right: tyro.conf.Positional[Path]
    weights: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Compare the model's weights alone, and neither optimizer, state nor settings."""
    top: int = 10
    """Number of differences of each kind that are shown."""
    config: Path | None = None
    """Folder of the model's config.json, if neither checkpoint has one."""


@dataclass(frozen=True)
class Convert(Shared):
    """Write the model weights of a checkpoint, or its adapter, in another format."""

    source: tyro.conf.Positional[Path]
    target: tyro.conf.Positional[Path]
    """The folder, or with --to torch the file, to be written; it must not exist."""
    to: Literal["native", "dcp", "hf", "torch", "peft"]
    """hf for a model, peft for an adapter, the others for both; torch is one torch.save file."""
    config: Path | None = None
    """Folder of the model's config.json, if the source has none."""
    model: str | None = None
    """The native side has the names of this model: llama3, qwen3, qwen3_moe, hf, or your own "package.module:Name".
    Absent: found from config.json."""
    dtype: Dtype | None = None
    """Dtype of floating-point tensors in the target; absent: each keeps its own."""
    max_shard_bytes: int = 5_000_000_000
    """Maximum size of one safetensors file."""
    settings: Path | None = None
    """PEFT folder or native step with rank and alpha of the adapter, if it is in a DCP folder, which says none."""


@dataclass(frozen=True)
class Merge(Shared):
    """Write a Hugging Face folder of a base with adapters merged into it, one after the other."""

    paths: tyro.conf.Positional[tuple[Path, ...]]
    """The base, one adapter or several (PEFT folders or steps), and the folder to be written."""
    config: Path | None = None
    """Folder of the model's config.json, if the base has none."""
    model: str | None = None
    """Architecture of the base: llama3, qwen3, qwen3_moe, hf, or your own "package.module:Name". Absent: found from
    config.json."""
    dtype: Dtype | None = None
    """Dtype of floating-point tensors in the target; absent: each keeps its own."""
    max_shard_bytes: int = 5_000_000_000
    """Maximum size of one safetensors file."""


@dataclass(frozen=True)
class Prune(Shared):
    """Delete the steps of a run that a policy no longer keeps; refused while a run writes there."""

    folder: tyro.conf.Positional[Path]
    """The run's folder, or its checkpoint folder; or its place in a bucket."""
    keep: str | None = None
    """The policy, as in [checkpoint.save]: --keep "latest = 2, every = 1000"."""
    set_aside: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Also delete the steps and exports that the run set aside when it went back to an earlier step; no policy counts
    them."""
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Delete nothing and say what would be deleted."""
    take_lease: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """The writer that the folder names, on another machine, has ended."""


@dataclass(frozen=True)
class Pin(Shared):
    """Keep steps, whatever the run's policy says."""

    steps: tyro.conf.Positional[tuple[Path, ...]]
    """Steps, such as run/checkpoints/step-500; or URLs of theirs in a bucket."""


@dataclass(frozen=True)
class Unpin(Shared):
    """Let the policy decide about pinned steps again."""

    steps: tyro.conf.Positional[tuple[Path, ...]]
    """Steps, such as run/checkpoints/step-500; or URLs of theirs in a bucket."""


@dataclass(frozen=True)
class Save(Shared):
    """Ask a running job for a save after its step under way, and wait until it is committed."""

    run_folder: Annotated[Path, tyro.conf.arg(name="run")]
    """The folder that the run writes into: train.py's output_folder, a manager's base_folder."""
    pin: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Pin the step, so that retention never deletes it."""
    timeout_seconds: float = 600.0
    """Longest time to wait for the answer."""


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
    """The Hugging Face folder of the model to start from, or the id of one that `hf download` has fetched."""
    data: Path | None = None
    """Your texts or conversations: a .txt, .md, .jsonl or .parquet file, or a folder. Absent: a small built-in text."""


@dataclass(frozen=True)
class Plan(Shared):
    """Say what a run with this TOML file would load, source by source. No tensor is read."""

    config: tyro.conf.Positional[Path]
    settings: tyro.conf.Positional[tuple[str, ...]] = ()
    """Settings in place of those in the file: training.steps=100."""


@dataclass(frozen=True)
class Report(Shared):
    """Write one HTML page about a run: loss, saves, kills and resumes, sizes, exports. It needs no network."""

    folder: tyro.conf.Positional[Path]
    """The run's folder."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """The file to be written; absent: report.html in the run's folder. A file that is there is replaced."""


Command = Train | Init | Ls | Inspect | Verify | Diff | Convert | Merge | Prune | Pin | Unpin | Save | Plan | Report
