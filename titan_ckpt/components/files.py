"""The names of a step's state files, and how run state is divided between them.

State that is equal on all ranks is stored once, in state.json; the rest in each rank's own file (docs/format.md). The
writer (saving.py) and the reader (loading/training_state.py) both use this module. It opens no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import xxhash

from titan_ckpt.components.optimizer import merge_groups
from titan_ckpt.encoding import typed_json
from titan_ckpt.encoding.strict_json import Json

STATES = "states."
"""Prefix of a user state's name."""
RUN_STATE = "state.json"


def rank_state_name(rank: int) -> str:
    """Return the name of the file that holds one rank's state."""
    return f"rank-{rank:05d}.json"


def run_parts(run: dict[str, Any]) -> dict[str, Json]:
    """Return the parts of a run state that ranks compare one by one, as JSON; each user state is a part.

    A part that can be merged is its content, or None if it is absent; of any other part a digest is enough.
    """
    parts = {name: value for name, value in run.items() if name != "states"}
    parts |= {f"{STATES}{name}": value for name, value in run.get("states", {}).items()}
    digests = {n: xxhash.xxh3_128_hexdigest(typed_json.dumps(v, n)) for n, v in parts.items() if n not in MERGE}
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
