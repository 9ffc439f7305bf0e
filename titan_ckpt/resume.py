"""Reading back what a committed step holds besides model weights. Attaches nothing before everything is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import xxhash

from titan_ckpt import posix, typed_json
from titan_ckpt.components import MODEL, RunState
from titan_ckpt.distributed import Coordinator
from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.manifest import Manifest
from titan_ckpt.optimizer_state import misfit
from titan_ckpt.saving import RUN_STATE, rank_state_name, with_rank_parts
from titan_ckpt.storage.base import ReadRequest, TensorReader
from titan_ckpt.storage.native import NativeReader
from titan_ckpt.strict_json import Json
from titan_ckpt.transforms import StateDictTransforms
from titan_ckpt.types import StateDict


@dataclass(frozen=True, slots=True)
class ResumeState:
    """A step's training state: decoded, its tensors' destinations planned, nothing attached yet."""

    run: dict[str, Any]
    rank: dict[str, Any] | None
    tensors: StateDict
    _reader: TensorReader
    _requests: list[ReadRequest]

    @classmethod
    def open(
        cls, path: Path, manifest: Manifest, run_state: RunState, exclude: frozenset[str], coordinator: Coordinator
    ) -> Self:
        """Read the JSON and plan the tensors; all ranks succeed or all raise. Collective.

        Raises: CorruptCheckpointError naming the file; LoadMismatchError for what the checkpoint lacks, and where the
        optimizer does not fit.
        """
        error: BaseException | None = None
        made: Self | None = None
        strangers: list[Json] = []
        try:
            made, strangers = cls._open(path, manifest, run_state, exclude, coordinator)
        except Exception as e:
            error = e
        try:
            mine: Json = {"trains": bool(run_state.optimizers), "strangers": strangers}
            of_ranks: list[Any] = coordinator.gather("resume-plan", mine, error)
            nowhere = set.intersection(*(set(one["strangers"]) for one in of_ranks))
            if nowhere and any(one["trains"] for one in of_ranks):  # a run that trains nothing takes no such state
                raise misfit(sorted(nowhere))
        except BaseException:
            if made is not None:
                made.close()
            raise
        assert made is not None
        return made

    @classmethod
    def _open(
        cls, path: Path, manifest: Manifest, run_state: RunState, exclude: frozenset[str], coordinator: Coordinator
    ) -> tuple[Self, list[Json]]:
        """Return this rank's state, and the optimizer's tensors that are for no parameter of this rank."""
        run = _read_state(path, RUN_STATE, manifest)
        same_world = manifest.world_size == coordinator.world_size
        rank = _read_state(path, rank_state_name(coordinator.rank), manifest) if same_world else None
        run = with_rank_parts(run, rank)
        run_state.check(run, rank, exclude)
        reader = NativeReader(path, files=[f for f in manifest.files if f.name.endswith(".safetensors")])
        try:
            available = {key: info for key, info in reader.tensors.items() if not key.startswith(MODEL)}
            tensors, strangers = run_state.destinations(available, run, exclude)
            plan = StateDictTransforms().from_file(tensors, available, None, cast=False)
            assert not plan.report.missing and not plan.report.mismatched, "destinations follow what is available"
        except BaseException:
            reader.close()
            raise
        return cls(run, rank, tensors, reader, plan.requests), [*strangers]

    def read(self) -> None:
        """Fill the destinations. Raises: CorruptCheckpointError; OSError."""
        self._reader.read(self._requests)

    def apply(self, run_state: RunState, exclude: frozenset[str]) -> None:
        """Hand everything to its owner. Raises: what an owner raises."""
        run_state.apply(self.run, self.rank, self.tensors, exclude)

    def close(self) -> None:
        """Close the files."""
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _read_state(path: Path, name: str, manifest: Manifest) -> dict[str, Any]:
    record = next((f for f in manifest.files if f.name == name), None)
    if record is None:
        raise CorruptCheckpointError(f"{path}: the manifest lists no {name}. Take another checkpoint", str(path / name))
    data = posix.read_whole(path / name, typed_json.MAX_BYTES)
    if xxhash.xxh3_128_hexdigest(data) != record.digest:
        raise CorruptCheckpointError(
            f"{path / name}: its bytes are not those that were committed. Take another checkpoint", str(path / name)
        )
    state: dict[str, Any] = typed_json.loads(data, str(path / name))
    return state
