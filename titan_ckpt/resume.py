"""Reading back what a committed step holds besides model weights. Attaches nothing before everything is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import xxhash

from titan_ckpt import posix, typed_json
from titan_ckpt.components import MODEL, RankState, RunState
from titan_ckpt.data_position import DataRank, in_order, stored_position
from titan_ckpt.distributed import Coordinator
from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.manifest import Manifest
from titan_ckpt.optimizer_state import misfit
from titan_ckpt.saving import RUN_STATE, rank_state_name, with_rank_parts
from titan_ckpt.storage.base import ReadRequest, TensorReader
from titan_ckpt.storage.engine import collector_held
from titan_ckpt.storage.native import NativeReader
from titan_ckpt.strict_json import Json
from titan_ckpt.tensors import blocks_of
from titan_ckpt.types import StateDict

_TYPES: dict[str, type] = {
    "step": int, "model": dict, "optimizer": list, "lr_scheduler": list, "states": dict, "rng": dict,
}  # fmt: skip
_GENERATORS = frozenset({"python", "numpy", "torch"})


@dataclass(frozen=True, slots=True)
class ResumeState:
    """A step's training state: decoded, its tensors' destinations planned, nothing attached yet."""

    run: dict[str, Any]
    rank: RankState
    tensors: StateDict
    _reader: TensorReader
    _requests: list[ReadRequest]

    @classmethod
    @collector_held()
    def open(
        cls,
        path: Path,
        manifest: Manifest,
        run_state: RunState,
        exclude: frozenset[str],
        coordinator: Coordinator,
        opened: NativeReader | None = None,
    ) -> Self:
        """Read the JSON and plan the tensors; all ranks succeed or all raise. Collective.

        `opened`: a reader of the same step, which outlives this: no header is read twice.
        Raises: CorruptCheckpointError naming the file; LoadMismatchError for what the checkpoint lacks, and where the
        optimizer does not fit.
        """
        run, rank = _read_states(path, manifest, run_state, exclude, coordinator)
        error: BaseException | None = None
        made: Self | None = None
        strangers: list[Json] = []
        try:
            run_state.check(run, rank, exclude)
            files = [f for f in manifest.files if f.name.endswith(".safetensors")]
            reader = NativeReader(path, files=files) if opened is None else opened.another()
            made, strangers = cls._plan(reader, run_state, exclude, run, rank)
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
    def _plan(
        cls, reader: NativeReader, run_state: RunState, exclude: frozenset[str], run: dict[str, Any], rank: RankState
    ) -> tuple[Self, list[Json]]:
        """Return this rank's state, and the optimizer's tensors that are for no parameter of this rank."""
        try:
            available = {key: info for key, info in reader.tensors.items() if not key.startswith(MODEL)}
            tensors, strangers = run_state.destinations(available, run, exclude)
            requests = [ReadRequest(key, b.chunk, b.data) for key, value in tensors.items() for b in blocks_of(value)]
        except BaseException:
            reader.close()
            raise
        return cls(run, rank, tensors, reader, requests), [*strangers]

    @property
    def parts(self) -> list[tuple[TensorReader, Sequence[ReadRequest]]]:
        """Return what `read` will take, to be verified first."""
        return [(self._reader, self._requests)]

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


def _read_states(
    path: Path, manifest: Manifest, run_state: RunState, exclude: frozenset[str], coordinator: Coordinator
) -> tuple[dict[str, Any], RankState]:
    """Return what is to be taken over of the run's state and of the ranks' own. Collective.

    1 Every rank reads the run's state, and of the same number of ranks its own. 2 All tell whether those are of the
    layout they have now. 3 Where any data-parallel rank has changed, all share out the stored ranks' data positions.
    """
    error: BaseException | None = None
    run: dict[str, Any] = {}
    own: dict[str, Any] | None = None
    try:
        run = _read_state(path, RUN_STATE, manifest)
        if manifest.world_size == coordinator.world_size:
            own = _read_state(path, rank_state_name(coordinator.rank), manifest)
        run = with_rank_parts(run, own)
    except Exception as e:
        error = e
    position = stored_position(own) if own else None
    mine: Json = {
        "layout": own is not None and own.get("layout") == run_state.layout,
        "data": own is not None and (position is None or position[0] == run_state.data_rank),
    }
    of_ranks: list[Any] = coordinator.gather("resume-layout", mine, error)
    rng = own.get("rng") if own is not None and all(one["layout"] for one in of_ranks) else None
    if "dataloader" not in manifest.components or "dataloader" in exclude:
        return run, RankState(rng)
    if position is not None and all(one["data"] for one in of_ranks):
        return run, RankState(rng, _only(position))
    return run, RankState(rng, _all_positions(path, manifest, coordinator))


def _only(position: tuple[DataRank, Any]) -> list[Any]:
    """Return positions of all data-parallel ranks of which only the own one is looked at, and known."""
    at, state = position
    return [state if rank == at.rank else None for rank in range(at.size)]


def _all_positions(path: Path, manifest: Manifest, coordinator: Coordinator) -> list[Any]:
    """Return the data position of every data-parallel rank that saved; each rank reads some of their files."""
    error: BaseException | None = None
    mine: list[Json] = []
    try:
        for rank in range(coordinator.rank, manifest.world_size, coordinator.world_size):
            stored = stored_position(_read_state(path, rank_state_name(rank), manifest))
            if stored is not None:
                mine.append([stored[0].rank, stored[0].size, typed_json.encode(stored[1])])
    except Exception as e:
        error = e
    gathered: list[Any] = coordinator.gather("data positions", mine, error)
    found = [(DataRank(rank, size), state) for of_rank in gathered for rank, size, state in of_rank]
    return [typed_json.decode(state, str(path)) for state in in_order(found, str(path))]


def _read_state(path: Path, name: str, manifest: Manifest) -> dict[str, Any]:
    record = next((f for f in manifest.files if f.name == name), None)
    if record is None:
        raise CorruptCheckpointError(f"{path}: the manifest lists no {name}. Take another checkpoint", str(path / name))
    data = posix.read_whole(path / name, typed_json.MAX_BYTES)
    if xxhash.xxh3_128_hexdigest(data) != record.digest:
        raise CorruptCheckpointError(
            f"{path / name}: its bytes are not those that were committed. Take another checkpoint", str(path / name)
        )
    state = typed_json.loads(data, str(path / name))
    if wrong := _misshapen(state):
        raise CorruptCheckpointError(
            f"{path / name}: not the state of a run: {', '.join(wrong)}. Take another checkpoint", str(path / name)
        )
    assert isinstance(state, dict)
    return state


def _misshapen(state: Any) -> list[str]:
    """Return what of a state file is not of the type that runs write: a foreign writer's digests may well hold."""
    if not isinstance(state, dict):
        return [f"a {type(state).__name__}, expected an object"]
    found = [(name, state[name], kind) for name, kind in _TYPES.items() if name in state]
    if isinstance(optimizers := state.get("optimizer"), list):
        found += [(f"optimizer[{index}]", groups, list) for index, groups in enumerate(optimizers)]
        found += [("a parameter group", g, dict) for groups in optimizers if isinstance(groups, list) for g in groups]
    wrong = [
        f"{name} is a {type(value).__name__}, not a {kind.__name__}"
        for name, value, kind in found
        if not isinstance(value, kind)
    ]
    if isinstance(rng := state.get("rng"), dict) and (missing := _GENERATORS - rng.keys()):
        wrong.append(f"rng without {', '.join(sorted(missing))}")
    return wrong
