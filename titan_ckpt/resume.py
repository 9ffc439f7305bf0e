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
from titan_ckpt.errors import CorruptCheckpointError, LoadMismatchError
from titan_ckpt.manifest import Manifest
from titan_ckpt.saving import RUN_STATE, rank_state_name
from titan_ckpt.storage.base import ReadRequest, TensorReader
from titan_ckpt.storage.native import NativeReader
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

        Raises: CorruptCheckpointError naming the file; LoadMismatchError where the optimizer does not fit.
        """
        error: BaseException | None = None
        made: Self | None = None
        try:
            run = _read_state(path, RUN_STATE, manifest)
            same_world = manifest.world_size == coordinator.world_size
            rank = _read_state(path, rank_state_name(coordinator.rank), manifest) if same_world else None
            reader = NativeReader(path, files=[f for f in manifest.files if f.name.endswith(".safetensors")])
            available = {key: info for key, info in reader.tensors.items() if not key.startswith(MODEL)}
            tensors = run_state.destinations(available, exclude)
            plan = StateDictTransforms().from_file(tensors, available, None, cast=False)
            if plan.report.missing or plan.report.mismatched:
                lines = [f"{m.key}: expected {m.expected}, found {m.found}" for m in plan.report.mismatched]
                raise LoadMismatchError(f"{path}: training state does not fit: {', '.join(lines)}", plan.report)
            made = cls(run, rank, tensors, reader, plan.requests)
        except Exception as e:
            error = e
        coordinator.barrier("resume-plan", error)
        assert made is not None
        return made

    def read(self) -> None:
        """Fill the destinations. Raises: CorruptCheckpointError; OSError."""
        self._reader.read(self._requests)

    def apply(self, run_state: RunState, exclude: frozenset[str]) -> None:
        """Hand everything to its owner. Raises: LoadMismatchError for what the checkpoint lacks."""
        run_state.apply(self.run, self.rank, self.tensors, exclude)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._reader.close()


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
