"""The names of a step's state files, and how run state is divided between them.

State that is equal on all ranks is stored once, in state.json; the rest in each rank's own file (docs/format.md). The
writer (saving.py) and the reader (loading/training_state.py) both use this module. It opens no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import xxhash

from titan_ckpt.components.optimizer import merge_groups
from titan_ckpt.distributed.replicas import digest_of
from titan_ckpt.encoding import typed_json
from titan_ckpt.encoding.strict_json import Json
from titan_ckpt.geometry.nested import names_of
from titan_ckpt.types import StateDict

STATES = "states."
"""Prefix of a user state's name."""
RUN_STATE = "state.json"


def rank_state_name(rank: int) -> str:
    """Return the name of the file that holds one rank's state."""
    return f"rank-{rank:05d}.json"


def run_parts(run: dict[str, Any], tensors: StateDict) -> dict[str, Json]:
    """Return the parts of a run state that ranks compare one by one, as JSON; each user state is a part.

    The digest of a user state covers the values of its tensors, except of DTensors, of which each rank has a shard. A
    part that can be merged is its content, or None if it is absent; of any other part a digest is enough.
    """
    parts = {name: value for name, value in run.items() if name != "states"}
    parts |= {f"{STATES}{name}": value for name, value in run.get("states", {}).items()}
    digests: dict[str, Json] = {}
    for name, value in parts.items():
        if name not in MERGE:
            plain = _plain_tensors(value, tensors) if name.startswith(STATES) else {}
            of_tensors = [digest_of(tensor) for tensor in plain.values()]
            digests[name] = xxhash.xxh3_128_hexdigest(typed_json.dumps(value, name) + "".join(of_tensors).encode())
    return {**digests, **{name: typed_json.encode(parts[name]) if name in parts else None for name in MERGE}}


def divide(
    run: dict[str, Any], rank: dict[str, Any], differing: Mapping[str, Sequence[Json]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (run state, rank state); each differing part is merged over the ranks or moved to the rank's state.

    `differing`: name -> the distinct values of `run_parts`, those of lower ranks first.
    """
    run, rank = dict(run), dict(rank)
    states = dict(run.get("states", {}))
    for name, values in differing.items():
        if name in MERGE:
            run[name] = MERGE[name]([typed_json.decode(value, name) for value in values if value is not None])
        elif name.startswith(STATES):
            key = name.removeprefix(STATES)
            if key in states:
                rank.setdefault("states", {})[key] = states.pop(key)
        elif name in run:
            rank[name] = run.pop(name)
    if "states" in run:
        run["states"] = states
    return run, rank


def own_names(states: dict[str, Any], tensors: StateDict, rank: int) -> dict[str, str]:
    """Return the names under which a rank stores the tensors of states that are its own, by the names they have."""
    names: dict[str, str] = {}
    for key, value in states.items():
        prefix = f"{STATES}{key}."
        for name in _plain_tensors(value, tensors):
            own = f"{prefix}rank-{rank}.{name.removeprefix(prefix)}"
            while own in tensors or own in names.values():
                own += "'"
            names[name] = own
    return names


def _plain_tensors(state: Any, tensors: StateDict) -> StateDict:
    """Return the tensors of one user state that are not sharded, and that a checkpoint can hold."""
    values = {name: tensors[name] for name in names_of(state)}
    return {n: v for n, v in values.items() if type(v) is torch.Tensor and v.layout is torch.strided and not v.is_meta}


def with_rank_parts(run: dict[str, Any], rank: dict[str, Any] | None) -> dict[str, Any]:
    """Undo `divide` for one rank: return the run state with the parts that its own file holds."""
    if rank is None:
        return run
    own = {"lr_scheduler": rank["lr_scheduler"]} if "lr_scheduler" in rank else {}
    return {**run, **own, "states": run.get("states", {}) | rank.get("states", {})}


def _joined(of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {fqn: value for state in reversed(of_ranks) for fqn, value in state.items()}


MERGE: dict[str, Callable[[Sequence[Any]], Any]] = {"optimizer": merge_groups, "model": _joined}
"""Merge functions of the parts that are keyed by parameter or module, of which each pipeline stage has its own."""
