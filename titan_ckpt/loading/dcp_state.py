"""Reading the training state of a torchtitan run out of its DCP folder. Attaches nothing before everything is read.

Owns torchtitan's flat names: `optimizer.state.<fqn>.<name>`, `optimizer.param_groups.<fqn>.<key>`, `lr_scheduler.`,
`dataloader.dp_rank_<n>`, and `<name>.` of a state. Source: torchtitan 0.3, components/checkpointer/dcp.py and
components/optimizer/utils.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from titan_ckpt.components.optimizer import PREFIX as OPTIMIZER
from titan_ckpt.components.optimizer import misfit
from titan_ckpt.components.optimizer_split import NOT_STORED, Group
from titan_ckpt.components.run_state import RankState, RunState
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.encoding.strict_json import Json
from titan_ckpt.errors import CorruptCheckpointError, LoadMismatchError, listed
from titan_ckpt.formats.dcp.dcp import DcpReader
from titan_ckpt.geometry.chunks import blocks_of
from titan_ckpt.geometry.requests import ReadRequest
from titan_ckpt.loading.training_state import ResumeState, trained_nowhere
from titan_ckpt.stores.store import Place
from titan_ckpt.types import StateDict

_STATE = "optimizer.state."
_GROUPS = "optimizer.param_groups."
_DATA_RANK = "dp_rank_"


def has_training_state(reader: DcpReader) -> bool:
    """Return whether a DCP folder holds more than a model."""
    return any(name.startswith((OPTIMIZER, "lr_scheduler.")) for name in (*reader.items, *reader.tensors))


def step_of_folder(reader: DcpReader, path: Place) -> int:
    """Return the step that a folder says it is of. Raises: CorruptCheckpointError if it says none."""
    step = reader.item("train_state.step") if "train_state.step" in reader.items else None
    if step is None and path.name.startswith("step-") and path.name[5:].isdecimal():
        step = int(path.name[5:])
    if type(step) is not int or step < 0:
        raise CorruptCheckpointError(
            f"{path}: neither train_state.step nor the folder's name, step-N, says which step it is of; name it so",
            str(path),
        )
    return step


def open_dcp_state(
    path: Place,
    step: int,
    run_state: RunState,
    exclude: frozenset[str],
    coordinator: Coordinator,
    values: Sequence[str] = (),
) -> ResumeState:
    """Read the values and plan the tensors; all ranks succeed or all raise. Collective.

    `values`: names of the values beside tensors that the model's own state_dict() returns.
    Raises: CorruptCheckpointError; LoadMismatchError for state that the folder lacks, and for what does not fit.
    """
    made: list[ResumeState] = []

    def plan() -> list[Json]:
        reader = DcpReader(path)
        run, tensors, keys = _run_state(reader, run_state, exclude, step)
        rank = RankState(None, _positions(reader) if "dataloader" not in exclude else ())
        run["model"] = {n: reader.item(n) for n in (*run_state.model.extra_state_names(), *values) if n in reader.items}
        run_state.check(run, rank, exclude, values)
        requests = [ReadRequest(keys[key], b.chunk, b.data) for key, t in tensors.items() for b in blocks_of(t)]
        made.append(ResumeState(run, rank, tensors, reader.plan(requests)))
        return _strangers(reader, run, exclude)

    if nowhere := trained_nowhere("dcp-plan", run_state, coordinator, plan):
        raise misfit([f"{OPTIMIZER}{fqn}.state" for fqn in nowhere])
    return made[0]


def _run_state(
    reader: DcpReader, run_state: RunState, exclude: frozenset[str], step: int
) -> tuple[dict[str, Any], StateDict, dict[str, str]]:
    """Return the run's state in our form, tensors to fill by our names, and the folder's name of each."""
    run: dict[str, Any] = {"step": step}
    tensors: StateDict = {}
    keys: dict[str, str] = {}
    optimizer = run_state.optimizer
    if optimizer is not None and "optimizer" not in exclude:
        keys = {OPTIMIZER + k.removeprefix(_STATE): k for k in reader.tensors if k.startswith(_STATE)}
        tensors, _ = optimizer.destinations({ours: reader.tensors[key] for ours, key in keys.items()})
        run["optimizer"] = _groups(reader, run_state, tensors)
    if run_state.lr_schedulers and "lr_scheduler" not in exclude:
        stored = _nested(reader, "lr_scheduler")
        live = run_state.lr_schedulers[0].state_dict()
        if stored and live.keys() != stored.keys():
            raise LoadMismatchError(
                f"{reader.path}: lr_scheduler has {', '.join(stored)}, this run's has {', '.join(live)}: give the "
                'manager the container that saved it, or checkpoint.resume.exclude = ["lr_scheduler"]'
            )
        run["lr_scheduler"] = [stored] if stored else []
    if run_state.states and "states" not in exclude:
        found = {name: _nested(reader, name) for name in run_state.states}
        run["states"] = {name: state for name, state in found.items() if state}
    return run, tensors, keys


def _groups(reader: DcpReader, run_state: RunState, tensors: StateDict) -> list[list[Group]]:
    """Return the parameter groups of this run's optimizers with the stored hyperparameters of their parameters.

    A folder stores hyperparameters by parameter, so a live group is one stored group for each set of values in it.
    """
    names = run_state.model.parameter_names()
    of_fqn: dict[str, dict[str, Any]] = {}
    own: dict[str, dict[str, Any]] = {}
    fqns = {
        fqn
        for optimizer in run_state.optimizers
        for g in optimizer.param_groups
        for fqn in (names[p] for p in g["params"])
    }
    for item in reader.items:
        prefix, table = (_GROUPS, of_fqn) if item.startswith(_GROUPS) else (_STATE, own)
        fqn, _, key = item.removeprefix(prefix).rpartition(".")
        if item.startswith(prefix) and fqn in fqns and key not in NOT_STORED:
            table.setdefault(fqn, {})[key] = reader.item(item)
    stateful = {fqn for fqn in fqns if any(key.startswith(f"{OPTIMIZER}{fqn}.") for key in tensors)} | {*own}
    out: list[list[Group]] = []
    for optimizer in run_state.optimizers:
        groups: dict[str, Group] = {}
        for index, group in enumerate(optimizer.param_groups):
            for fqn in (names[p] for p in group["params"]):
                if fqn not in of_fqn:
                    continue
                same = f"{index} {sorted(of_fqn[fqn].items())!r}"
                made = groups.setdefault(same, _empty_group(of_fqn[fqn]))
                made["fqns"].append(fqn)
                if fqn not in stateful:
                    made["stateless"].append(fqn)
                if fqn in own:
                    made["own"][fqn] = own[fqn]
        out.append(list(groups.values()))
    return out


def _empty_group(hyperparameters: dict[str, Any]) -> Group:
    return {"hyperparameters": hyperparameters, "shared": {}, "fqns": [], "stateless": [], "own": {}}


def _strangers(reader: DcpReader, run: Mapping[str, Any], exclude: frozenset[str]) -> list[Json]:
    """Return the parameters whose optimizer state is stored and that this rank does not train."""
    if "optimizer" in exclude:
        return []
    trained = {fqn for optimizer in run.get("optimizer", []) for group in optimizer for fqn in group["fqns"]}
    stored = {name.removeprefix(_GROUPS).rpartition(".")[0] for name in reader.items if name.startswith(_GROUPS)}
    return [*sorted(stored - trained)]


def _positions(reader: DcpReader) -> list[Any]:
    """Return each data-parallel rank's state of torchtitan's dataloader, its bytes as they are; none without it.

    Raises: CorruptCheckpointError if a rank's is missing.
    """
    state = _nested(reader, "dataloader")
    if not state:
        return []
    size = state.get("world_size")
    ranks = [f"{_DATA_RANK}{rank}" for rank in range(size if type(size) is int and size < 1 << 20 else 0)]
    lost = [f"dataloader.{name}" for name in ranks if name not in state]
    if lost or not ranks:
        raise CorruptCheckpointError(
            f"{reader.path}: its data position lacks {listed(lost or ['dataloader.world_size'], ', ')}. "
            'To start the data afresh: checkpoint.resume.exclude = ["dataloader"]',
            str(reader.path),
        )
    return [{name: state[name], "world_size": size} for name in ranks]


def _nested(reader: DcpReader, component: str) -> dict[str, Any]:
    """Return a component's state, nested as it was saved. Raises: LoadMismatchError if it holds tensors."""
    if tensors := [name for name in reader.tensors if name.startswith(f"{component}.")]:
        raise LoadMismatchError(
            f"{reader.path}: {component} holds tensors, such as {tensors[0]}, which cannot be taken over: leave it out "
            f"with checkpoint.resume.exclude = {json.dumps([component])}"
        )
    state: dict[str, Any] = {}
    for name in reader.items:
        path = reader.paths.get(name, ())
        if len(path) < 2:  # it was saved under its flat name
            path = tuple(name.split("."))
        if path[0] == component and len(path) > 1:
            inner = state
            for part in path[1:-1]:
                inner = inner.setdefault(part, {})
            inner[path[-1]] = reader.item(name)
    return state
