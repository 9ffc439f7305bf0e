"""Decide what a run would load, as a load does (loading/origin.py), from the config and the folders alone.

Opens headers and manifests, and reads no tensor. The model is not built: whether the weights fit it shows at the load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from titan_ckpt.config import CheckpointConfig
from titan_ckpt.directory.manifest import Manifest
from titan_ckpt.directory.names import Survey, step_name, users_name
from titan_ckpt.directory.steps import open_steps
from titan_ckpt.encoding.named import is_import_name
from titan_ckpt.encoding.overrides import apply_overrides
from titan_ckpt.encoding.toml import from_dict, read_toml
from titan_ckpt.errors import CheckpointError, CheckpointNotFoundError, ConfigError, collected
from titan_ckpt.formats.open import open_reader
from titan_ckpt.loading.origin import CommittedStep, Origin, TorchtitanFolder, check_run, look_at_run
from titan_ckpt.loading.plan import LoadPlan, LoadSource
from titan_ckpt.models.registry import read_config
from titan_ckpt.stores.store import Place, open_location, split_url
from titan_ckpt.training.config import RunConfig
from titan_ckpt.training.model_folder import checkpoint_settings


@dataclass(frozen=True, slots=True)
class PlannedSource:
    """One folder that a load reads weights from."""

    role: str
    path: str
    format: str
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The sources that a run with a config would load."""

    config: str
    action: str
    """Resume step N; load initial weights; or start from step 0."""
    step: int
    """The step after which training would go on."""
    sources: tuple[PlannedSource, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...]
    """Reasons for which the load, or the run before it, would fail."""


def plan_load(config: Path, overrides: Sequence[str] = ()) -> Plan:
    """Return what a run would load. `overrides`: settings such as "training.steps=100". Raises: ConfigError."""
    changes: list[str] = []
    for text in overrides:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError([f"{text!r}: expected a setting such as training.steps=100"])
        changes += [f"--{name.removeprefix('--')}", value]
    raw = apply_overrides(read_toml(str(config)), changes)
    given = raw.pop("converters", [])
    tables = given if isinstance(given, list) else [given]
    run = from_dict(RunConfig, raw, str(config))
    settings = checkpoint_settings(run)
    folder = open_location(settings.folder, run.output_folder, settings.store)
    found = open_steps(folder).survey()
    notes = [f"{name} cannot be loaded and is skipped: {reason}" for name, reason in found.rejected]
    problems: list[str] = []
    sources: list[PlannedSource] = []
    origin, plan = Origin(), LoadPlan()
    try:
        origin = _origin(settings, found, folder, notes)
        plan = origin.plan(settings)
    except CheckpointError as error:
        problems.append(" ".join(str(error).split()))
    for source in plan.sources:
        try:
            sources.append(_opened(source))
        except (CheckpointError, OSError) as error:
            problems.append(f"{source.path}: {' '.join(str(error).split())}")
    action = _action(plan, problems)
    if not is_import_name(run.model.name):  # the code of a model of one's own is not run
        with collected(problems):
            read_config(run.model.name, flavor=run.model.flavor, folder=run.model.folder)
    problems += _not_installed(run, tables)
    notes += _about(settings, plan, origin.manifest, tables)
    return Plan(str(config), action, origin.step, tuple(sources), tuple(notes), tuple(problems))


def _origin(settings: CheckpointConfig, found: Survey, folder: Place, notes: list[str]) -> Origin:
    """Return what a run loads: the step asked for, or the newest that holds more than weights, or the sources.

    Raises: CheckpointNotFoundError for a step that is asked for and not there, or if no step can be resumed.
    """
    steps: dict[int, Origin] = {s.step: CommittedStep(s.path, s.manifest) for s in found.steps}
    steps |= {n: TorchtitanFolder(folder / step_name(n), n) for n in found.dcp}
    wanted = settings.resume.step
    if wanted is not None:
        if wanted not in steps:
            listed = ", ".join(map(str, sorted(steps))) or "none"
            raise CheckpointNotFoundError(f"checkpoint.resume.step: step {wanted} is not in {folder}; steps: {listed}")
        return steps[wanted]
    for number in sorted(steps, reverse=True):
        if steps[number].is_whole:
            return steps[number]
        notes.append(f"step {number} holds the model alone, and no run resumes from it")
    if steps:
        raise CheckpointNotFoundError(f"{folder}: no step there can be resumed from; choose another folder")
    if found.rejected:
        raise CheckpointNotFoundError(
            f"{folder} holds no checkpoint that can be loaded, but content that looks like one; the run would stop"
        )
    if settings.initial_load and settings.initial_load[-1].load == "training_state":
        path, run = look_at_run(settings)
        origin = run if isinstance(run, TorchtitanFolder) else _step(path, run)
        check_run(settings, path, origin)
        return origin
    return Origin()


def _step(path: Place, number: int) -> CommittedStep:
    found = open_steps(path.parent).survey()
    for step in found.steps:
        if step.step == number:
            return CommittedStep(step.path, step.manifest)
    raise CheckpointNotFoundError(f"{path} is no committed step{found.explain()}")


def _opened(source: LoadSource) -> PlannedSource:
    with open_reader(source.path, source.format) as reader:
        role = "adapter" if source.adapter else "adapter to be merged" if source.merge else "weights"
        total = sum(info.nbytes for info in reader.tensors.values())
        return PlannedSource(role, users_name(source.path), source.format, len(reader.tensors), total)


def _action(plan: LoadPlan, problems: Sequence[str]) -> str:
    if problems:
        return "the load would fail"
    if plan.resume is not None:
        return f"resume step {plan.resume.step} ({plan.resume.kind})"
    if plan.external:
        return "take the weights from outside (external_weights)"
    return "load initial weights" if plan.sources else "start from step 0 with initial values"


def _not_installed(run: RunConfig, tables: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each extra of which the run needs packages that are not installed."""
    quantizes = not {table.get("kind") for table in tables}.isdisjoint(("float8", "qat"))
    needed = {
        "train": ["datasets", "tokenizers", "torchdata", *["torchao"] * quantizes],
        "hf": ["transformers"] * (run.model.name == "hf" or run.data.messages is not None),
        "remote": ["obstore"] * any(split_url(export.folder) for export in run.checkpoint.export),
        "tensorboard": ["tensorboard"] * (run.tensorboard is not None),
        "wandb": ["wandb"] * (run.wandb is not None),
    }
    for extra, packages in needed.items():
        if absent := [package for package in packages if find_spec(package) is None]:
            yield f'the run needs {", ".join(absent)}, not installed here: pip install "titan-ckpt[{extra}]"'


def _about(
    settings: CheckpointConfig, plan: LoadPlan, manifest: Manifest | None, tables: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return remarks about what else a load does with a step."""
    lines: list[str] = []
    if plan.exclude:
        lines.append(f"not loaded: {', '.join(sorted(plan.exclude))}")
    if manifest is not None:
        there = [str(c.get("kind")) for c in manifest.converters]
        here = [str(table.get("kind")) for table in tables]
        if sorted(there) != sorted(here):
            lines.append(
                f"converters: {', '.join(here) or 'none'} in the config, {', '.join(there) or 'none'} in the step"
            )
        loaded = [name for name in manifest.components if name not in plan.exclude]
        lines.append(f"loaded: {', '.join(loaded)}")
    if settings.save is None:
        lines.append("without [checkpoint.save] nothing is written")
    return lines
