"""Reading the training state of a committed step: all but model weights. Attaches nothing before everything is read."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Self

from titan_ckpt.components.data_position import DataRank, in_order, stored_position
from titan_ckpt.components.files import RUN_STATE, rank_state_name, with_rank_parts
from titan_ckpt.components.optimizer import misfit
from titan_ckpt.components.run_state import RankState, RunState
from titan_ckpt.directory.manifest import Manifest
from titan_ckpt.directory.names import read_committed
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.encoding import typed_json
from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.formats.native.reader import NativeReader
from titan_ckpt.gc_paused import gc_paused
from titan_ckpt.geometry.chunks import blocks_of
from titan_ckpt.geometry.requests import Fill, ReadRequest
from titan_ckpt.stores.store import Place
from titan_ckpt.types import StateDict
from titan_ckpt.weights.stored_names import MODEL

_TYPES: dict[str, type] = {
    "step": int, "model": dict, "optimizer": list, "lr_scheduler": list, "states": dict, "rng": dict,
}  # fmt: skip
_OF_GROUP: dict[str, type] = {"hyperparameters": dict, "shared": dict, "fqns": list, "stateless": list, "own": dict}
_OF_RUN = frozenset({"step", "model", "optimizer", "lr_scheduler", "states"})
_OF_RANK = frozenset({"layout", "rng", "data_parallel", "dataloader", "lr_scheduler", "states"})
"""The parts of a state file: those of the run, and those of a rank."""
_GENERATORS = frozenset({"python", "numpy", "torch"})


@dataclass(frozen=True, slots=True)
class ResumeState:
    """A step's training state, decoded, with destinations for its tensors; nothing is attached yet."""

    run: dict[str, Any]
    rank: RankState
    tensors: StateDict
    fill: Fill
    """Fills `tensors`. Raises: CorruptCheckpointError; OSError."""

    @classmethod
    @gc_paused()
    def open(
        cls,
        path: Place,
        manifest: Manifest,
        run_state: RunState,
        exclude: frozenset[str],
        coordinator: Coordinator,
        open_reader: Callable[[], NativeReader],
        values: Collection[str] = (),
    ) -> Self:
        """Read the JSON and plan the tensors; all ranks succeed or all raise. Collective.

        `open_reader` returns a reader of the step, which the caller closes after the tensors are filled. `values`:
        names of the values beside tensors that the model's own state_dict() returns.
        Raises: CorruptCheckpointError naming the file; LoadMismatchError for state that the checkpoint lacks, and for
        an optimizer that does not fit.
        """
        run, rank = _read_states(path, manifest, run_state, exclude, coordinator)
        made: list[Self] = []

        def plan() -> list[str]:
            run_state.check(run, rank, exclude, values)
            reader = open_reader()
            available = {key: info for key, info in reader.tensors.items() if not key.startswith(MODEL)}
            tensors, strangers = run_state.destinations(available, run, exclude)
            requests = [ReadRequest(key, b.chunk, b.data) for key, t in tensors.items() for b in blocks_of(t)]
            made.append(cls(run, rank, tensors, reader.plan(requests)))
            return [*strangers]

        if nowhere := trained_nowhere("resume-plan", run_state, coordinator, plan):
            raise misfit(nowhere)
        return made[0]

    def apply(self, run_state: RunState, exclude: frozenset[str]) -> list[str]:
        """Give all state to its owners, and return this rank's warnings. Raises: what an owner raises."""
        return run_state.apply(self.run, self.rank, self.tensors, exclude)


def trained_nowhere(
    tag: str, run_state: RunState, coordinator: Coordinator, plan: Callable[[], list[Any]]
) -> list[str]:
    """Call `plan` on every rank, which returns names that are strange to it; return those that are so on every rank.

    None are if no rank trains anything. Collective; fails on all ranks if one fails.
    """
    trains = bool(run_state.optimizers)
    facts = coordinator.gather_distinct(tag, lambda: {"facts": {"trains": trains, "strangers": plan()}})["facts"]
    if not any(of_rank["trains"] for of_rank in facts.values()):  # a run without optimizers needs none of it
        return []
    return sorted(set.intersection(*(set(of_rank["strangers"]) for of_rank in facts.values())))


def _read_states(
    path: Place, manifest: Manifest, run_state: RunState, exclude: frozenset[str], coordinator: Coordinator
) -> tuple[dict[str, Any], RankState]:
    """Return the run's state and the rank state that this rank takes over. Collective.

    1 Every rank reads the run's state and, if the number of ranks is unchanged, its own. 2 All exchange whether the
    layout is unchanged. 3 If any data-parallel rank has changed, all divide the reading of the stored data positions.
    """
    if manifest.kind == "model" and all(file.name != RUN_STATE for file in manifest.files):  # a converted folder
        return {"step": manifest.step}, RankState(None)
    run: dict[str, Any] = {}
    own: dict[str, Any] | None = None
    position: tuple[DataRank, Any] | None = None

    def unchanged() -> dict[str, bool]:
        nonlocal run, own, position
        run = _read_state(path, RUN_STATE, manifest)
        if manifest.world_size == coordinator.world_size:
            own = _read_state(path, rank_state_name(coordinator.rank), manifest)
        run = with_rank_parts(run, own)
        position = stored_position(own) if own else None
        return {
            "layout": own is not None and own.get("layout") == run_state.layout,
            "data": own is not None and (position is None or position[0] == run_state.data_rank),
        }

    of_ranks = coordinator.gather_results("resume-layout", unchanged)
    rng = own.get("rng") if own is not None and all(of_rank["layout"] for of_rank in of_ranks) else None
    if "dataloader" not in manifest.components or "dataloader" in exclude:
        return run, RankState(rng)
    if position is not None and all(of_rank["data"] for of_rank in of_ranks):
        data_rank, state = position  # the only one that this rank will look at
        return run, RankState(rng, [state if rank == data_rank.rank else None for rank in range(data_rank.size)])
    return run, RankState(rng, _all_positions(path, manifest, coordinator))


def _all_positions(path: Place, manifest: Manifest, coordinator: Coordinator) -> list[Any]:
    """Return the data position of every data-parallel rank that saved; each rank reads some of their files."""

    def positions() -> list[Any]:
        ranks = range(coordinator.rank, manifest.world_size, coordinator.world_size)
        stored = (stored_position(_read_state(path, rank_state_name(rank), manifest)) for rank in ranks)
        return [[at.rank, at.size, typed_json.encode(state)] for at, state in filter(None, stored)]

    gathered = coordinator.gather_results("data positions", positions)
    stored_by = [(DataRank(rank, size), state) for of_rank in gathered for rank, size, state in of_rank]
    return [typed_json.decode(state, str(path)) for state in in_order(stored_by, str(path))]


def _read_state(path: Place, name: str, manifest: Manifest) -> dict[str, Any]:
    record = next((f for f in manifest.files if f.name == name), None)
    if record is None:
        raise CorruptCheckpointError(f"{path}: the manifest lists no {name}. Take another checkpoint", str(path / name))
    state = typed_json.loads(read_committed(path / name, record), str(path / name))
    if wrong := _misshapen(state, _OF_RUN if name == RUN_STATE else _OF_RANK, manifest.step):
        raise CorruptCheckpointError(
            f"{path / name}: not the state of a run: {', '.join(wrong)}. Take another checkpoint", str(path / name)
        )
    assert isinstance(state, dict)
    return state


def _misshapen(state: Any, known: frozenset[str], step: int) -> list[str]:
    """Return the parts of a state file that no run writes so: a file by another program may have a valid digest."""
    if not isinstance(state, dict):
        return [f"a {type(state).__name__}, expected an object"]
    unknown = [f"{name!r:.80} is none of {', '.join(sorted(known))}" for name in state if name not in known]
    parts = [(name, state[name], kind) for name, kind in _TYPES.items() if name in state]
    if isinstance(optimizers := state.get("optimizer"), list):
        parts += [(f"optimizer[{index}]", groups, list) for index, groups in enumerate(optimizers)]
        stored = [group for groups in optimizers if isinstance(groups, list) for group in groups]
        parts += [("a parameter group", group, dict) for group in stored]
        dicts = [group for group in stored if isinstance(group, dict)]
        parts += [(f"{name} of a group", group.get(name), kind) for group in dicts for name, kind in _OF_GROUP.items()]
        parts += [("classes of a group", group["classes"], list) for group in dicts if "classes" in group]
    misfits = (
        (name, type(value).__name__, kind.__name__) for name, value, kind in parts if not isinstance(value, kind)
    )
    wrong = [f"{name} is a {actual}, not a {expected}" for name, actual, expected in misfits]
    if isinstance(optimizers, list) and [] in optimizers:
        wrong.append("an optimizer without parameter groups")
    if isinstance(rng := state.get("rng"), dict) and (missing := _GENERATORS - rng.keys()):
        wrong.append(f"rng without {', '.join(sorted(missing))}")
    if "step" in known and state.get("step") != step:
        wrong.append(f"step is {state.get('step')!r:.40}, and the manifest says {step}")
    return unknown + wrong
