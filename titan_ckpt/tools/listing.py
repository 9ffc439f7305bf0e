"""The steps and exports in a run's folder, as facts. Imports no torch, so that `titan-ckpt ls` answers at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from titan_ckpt.directory.lease import LEASE_NAME, LEASE_OBJECT
from titan_ckpt.directory.manifest import MANIFEST_NAME, Manifest
from titan_ckpt.directory.names import COMMITS, PIN_NAME, STAGING, CommittedStep, inspect, step_of
from titan_ckpt.directory.steps import steps_at
from titan_ckpt.disk import posix
from titan_ckpt.encoding.strict_json import MAX_BYTES_BY_HAND, loads_by_hand
from titan_ckpt.errors import CheckpointNotFoundError, NotACheckpointError, size
from titan_ckpt.formats.publish.bucket_record import LOADABLE, BucketExports
from titan_ckpt.formats.publish.record import RECORDS, MadeExports
from titan_ckpt.stores.store import Place, local_path, store_of

METADATA = ".metadata"
_CHECKPOINTS, _EXPORTS = "checkpoints", "exports"
"""Default folders of a run; that of exports is for runs that left no record of theirs."""
_FORMATS = dict(zip(LOADABLE, ("hf", "peft", "dcp"), strict=True))


@dataclass(frozen=True, slots=True)
class ListedStep:
    """Facts about one committed step, or about a step that torchtitan saved (`kind` "dcp")."""

    step: int
    path: str
    kind: str
    num_bytes: int
    created_unix_seconds: float
    world_size: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    components: tuple[str, ...] = ()
    converters: tuple[str, ...] = ()
    pinned: bool = False
    foreign: tuple[str, ...] = ()
    """Names in the folder that are not part of the step, without the pin."""
    best: bool = False
    """It has the smallest loss of all steps that have one."""
    resumed_from: bool = False
    """The run that saved last went on from it, so that run does not delete it."""

    @property
    def cells(self) -> tuple[str, ...]:
        """Return kind, loss, size, ranks and remarks, as a table shows them."""
        loss, flags = self.metrics.get("loss"), ("pinned", "best", "resumed_from")
        remarks = [flag.replace("_", " ") for flag in flags if getattr(self, flag)] + [*self.converters]
        remarks += [f"holds {', '.join(self.foreign)}"] * bool(self.foreign)
        ranks = "" if self.world_size is None else str(self.world_size)
        return self.kind, "" if loss is None else f"{loss:.4f}", size(self.num_bytes), ranks, ", ".join(remarks)


@dataclass(frozen=True, slots=True)
class ListedExport:
    """Facts about one exported folder."""

    path: str
    format: str
    num_bytes: int
    created_unix_seconds: float
    changed: str | None
    """Why the folder is not as the run published it, with its proof; None if it is."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The content of a run's folder."""

    folder: str
    checkpoints: str
    steps: tuple[ListedStep, ...]
    rejected: tuple[tuple[str, str], ...]
    """(name, reason) of every entry that looks like a checkpoint and cannot be loaded."""
    exports: tuple[ListedExport, ...]
    writer: str | None
    """The process that holds the folder, if the lease names one; it may have been killed."""
    writer_lives: bool


def list_run(folder: Place) -> Listing:
    """List a run's folder, or its checkpoint folder.

    Raises: CheckpointNotFoundError; NotACheckpointError for a folder without any checkpoint; StoreError.
    """
    on_disk = local_path(folder)
    if on_disk is not None:
        checkpoints: Place = _find_on_disk(on_disk)
        exports = [*_exports(on_disk)]
    else:
        checkpoints, names = _steps_below(folder)
        made = folder if RECORDS in names else folder / _EXPORTS if _EXPORTS in names else None
        exports = [] if made is None else [*_exports_in_bucket(made)]
    store = steps_at(checkpoints)
    found, holder = store.survey(), store.holder()
    if on_disk is None and made is None and checkpoints == folder and not (_has_commits(names) or found.rejected):
        raise NotACheckpointError(f"{folder} holds no checkpoints, only {', '.join(names[:6])}; name a run's place")
    resumed = resumed_from(step.manifest for step in found.steps)
    losses = {s.step: loss for s in found.steps if (loss := s.manifest.metrics.get("loss")) is not None}
    best = min(losses, key=lambda step: (losses[step], -step), default=None)
    steps = [
        _native(s, str(store.step_path(s.step)), is_best=s.step == best, is_source=s.step in resumed)
        for s in found.steps
    ]
    steps += [facts for step in found.dcp if (facts := _dcp(store.step_path(step), step)) is not None]
    return Listing(
        str(folder),
        str(checkpoints),
        tuple(sorted(steps, key=lambda facts: facts.step)),
        found.rejected,
        tuple(exports),
        None if holder is None else str(holder),
        holder is not None and holder.lives_here(),
    )


def _steps_below(place: Place) -> tuple[Place, list[str]]:
    """Return a run's checkpoint folder in a bucket, and the names right below the run's place.

    Raises: CheckpointNotFoundError; NotACheckpointError; StoreError.
    """
    names = store_of(place).names_in(place)
    if not names:
        raise CheckpointNotFoundError(f"{place}: nothing is there; name a run's place, or its checkpoint folder")
    if {*LOADABLE, MANIFEST_NAME} & {*names}:
        raise NotACheckpointError(f"{place} is one checkpoint; name the run's place, or look at it with `inspect`")
    is_inside = _CHECKPOINTS in names and not _has_commits(names)
    return place / _CHECKPOINTS if is_inside else place, names


def _has_commits(names: Sequence[str]) -> bool:
    return COMMITS in names or LEASE_OBJECT in names


def _exports_in_bucket(root: Place) -> Iterator[ListedExport]:
    """Yield the exports that are published below a place."""
    records, store = BucketExports(root), store_of(root)
    for path in store.seen(root).iterdir():
        format_ = next((_FORMATS[name] for name in LOADABLE if (path / name).is_file()), None)
        if format_ is not None:
            created = records.published_unix_seconds(path.name)
            yield ListedExport(str(path), format_, store.folder_bytes(path), created, records.why_foreign(path.name))
        elif (path / RECORDS).is_dir():  # exports/dcp, beside hf exports
            yield from _exports_in_bucket(root / path.name)


def find_checkpoints(folder: Place) -> Place:
    """Return the checkpoint folder of a run's folder, or the folder itself if it is one.

    Raises: CheckpointNotFoundError; NotACheckpointError, also for a run with several; StoreError.
    """
    if (path := local_path(folder)) is not None:
        return _find_on_disk(path)
    checkpoints, _ = _steps_below(folder)
    names = store_of(checkpoints).names_in(checkpoints)
    if not _has_commits(names):
        raise NotACheckpointError(
            f"{checkpoints} holds no checkpoints, only {', '.join(names[:6])}; name a run's place"
        )
    return checkpoints


def _find_on_disk(folder: Path) -> Path:
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"{folder} is no folder; name a run's folder or its checkpoint folder")
    if (folder / MANIFEST_NAME).exists() or (folder / METADATA).exists():
        raise NotACheckpointError(f"{folder} is one checkpoint; name the run's folder, or look at it with `inspect`")
    if _has_steps(folder):
        return folder
    exports = {Path(name).parts[0] for name in MadeExports(folder).recorded()} | {_EXPORTS}
    inside = [folder / name for name in posix.list_folder(folder) if not name.startswith(".") and name not in exports]
    found = [path for path in inside if path.is_dir() and _has_steps(path)]
    if not found:
        names = ", ".join(posix.list_folder(folder)[:6])
        what = f"holds no checkpoints, only {names}" if names else "is empty"
        raise NotACheckpointError(f"{folder} {what}; name a run's folder")
    if len(found) > 1:
        raise NotACheckpointError(
            f"{folder} holds several checkpoint folders; name one of {', '.join(map(str, found))}"
        )
    return found[0]


def committed_step(path: Path) -> CommittedStep:
    """Return the committed step at a path.

    Raises: CheckpointNotFoundError; NotACheckpointError; CorruptCheckpointError.
    """
    step = step_of(Path(os.path.abspath(path)).name)
    if not path.is_dir():
        state = "no folder" if os.path.lexists(path) else "not there"
        raise CheckpointNotFoundError(f"{path} is {state}; name the folder of a step, such as run/checkpoints/step-100")
    if step is None or not (path / MANIFEST_NAME).exists():
        raise NotACheckpointError(f"{path} is no step of titan_ckpt; name a folder step-N that holds {MANIFEST_NAME}")
    return inspect(path, step)


def resumed_from(manifests: Iterable[Manifest]) -> set[int]:
    """Return the step that the run which saved last went on from; that run does not delete it."""
    last = max(manifests, key=lambda m: m.step, default=None)  # no run saves below a step: clocks may jump
    step = last.resumed_from.get("step") if last is not None and last.resumed_from else None
    return {step} if isinstance(step, int) else set()


def _native(step: CommittedStep, path: str, *, is_best: bool, is_source: bool) -> ListedStep:
    manifest = step.manifest
    return ListedStep(
        step.step,
        path,
        manifest.kind,
        sum(file.num_bytes for file in manifest.files),
        manifest.created_unix_seconds,
        manifest.world_size,
        manifest.metrics,
        manifest.components,
        tuple(str(converter.get("kind")) for converter in manifest.converters),
        PIN_NAME in step.foreign,
        tuple(name for name in step.foreign if name != PIN_NAME),
        is_best,
        is_source,
    )


def _dcp(path: Place, step: int) -> ListedStep | None:
    """Return what can be told of torchtitan's step without reading its pickle; None if it is deleted meanwhile."""
    try:
        created = Path(str(path / METADATA)).stat().st_mtime
    except FileNotFoundError:
        return None
    return ListedStep(step, str(path), "dcp", store_of(path).folder_bytes(path), created)


def _has_steps(folder: Path) -> bool:
    """Return whether this is a checkpoint folder: of a run that saves into it, or with a step of either format."""
    names = posix.list_folder(folder)
    if LEASE_NAME in names or STAGING in names:
        return True
    steps = [folder / name for name in names if step_of(name) is not None]
    return any(os.path.exists(step / name) for step in steps for name in (MANIFEST_NAME, METADATA))


def _exports(run: Path) -> Iterator[ListedExport]:
    exports = MadeExports(run)
    recorded = exports.recorded()
    names = posix.list_folder(run / _EXPORTS) if (run / _EXPORTS).is_dir() else []
    beside = {f"{_EXPORTS}/{name}" for name in names if not name.startswith(".")}
    holders = {str(folder) for name in recorded for folder in PurePath(name).parents}  # exports/dcp, beside hf exports
    for name in sorted({*recorded, *(beside - holders)}, key=_by_step):
        path = run / name
        with contextlib.suppress(FileNotFoundError):  # its run removes it meanwhile
            if path.is_dir():
                changed = exports.why_foreign(name) if name in recorded else "there is no record that a run made it"
                num_bytes = store_of(path).folder_bytes(path)
                yield ListedExport(str(path), _format(path), num_bytes, path.stat().st_mtime, changed)


def _by_step(name: str) -> tuple[str, int, str]:
    folder, _, last = name.rpartition("/")
    number = "".join(c for c in last if c.isdigit())
    return folder, int(number or 0), last


def _format(path: Path) -> str:
    """Return the format of an exported folder, by the names of its files."""
    if (path / METADATA).exists():
        return "dcp"
    if (path / "adapter_config.json").exists():
        return "peft"
    with contextlib.suppress(OSError, ValueError):
        config = loads_by_hand(posix.read_whole(os.path.realpath(path / "config.json"), MAX_BYTES_BY_HAND))
        if isinstance(config, dict) and "quantization_config" in config:
            return "hf, quantized"
    return "hf"
