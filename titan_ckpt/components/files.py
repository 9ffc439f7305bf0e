"""The names of a step's state files and of the tensors in them, and how run state is divided between the files.

State that is equal on all ranks is stored once, in state.json; the rest in each rank's own file (docs/format.md). The
writer (saving.py) and the reader (loading/training_state.py) both use this module. It opens no file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import xxhash

from titan_ckpt.components.optimizer import merge_groups
from titan_ckpt.encoding import typed_json
from titan_ckpt.encoding.strict_json import Json
from titan_ckpt.errors import LoadMismatchError, listed
from titan_ckpt.geometry.chunks import TensorInfo

MODEL = "model."
"""Prefix of a model tensor's name."""
STATES = "states."
"""Prefix of a user state's name."""
OTHER_COMPONENTS = ("optimizer.", "optim.", "lr_scheduler", "dataloader", "train_state", "states.")
"""Prefixes of the names that are not the model's, in checkpoints that keep the model at the top level."""
RUN_STATE = "state.json"


def rank_state_name(rank: int) -> str:
    """Return the name of the file that holds one rank's state."""
    return f"rank-{rank:05d}.json"


def model_tensors(
    stored: Mapping[str, TensorInfo],
    format_: str,
    wanted: Collection[str] | None = None,
    prefix: str | None = None,
) -> tuple[str, dict[str, TensorInfo]]:
    """Return the prefix of the model in a native or DCP checkpoint, and its tensors by name without the prefix.

    A DCP checkpoint may nest the model. `prefix` names the place; without it, the place with the most of the `wanted`
    names is taken, and the top level if that has as many; without `wanted`, `model.` if the top level has nothing else.
    Raises: LoadMismatchError for several places with as many of the names, and for a `prefix` that nothing has.
    Source of the names at the top: torchtitan, components/checkpoint.py, which flattens the model there.
    """
    if format_ == "native":
        prefix = MODEL
    elif prefix is None and wanted is None:
        top = _under(stored, "")
        prefix = MODEL if len(_under(stored, MODEL)) == len(top) else ""
    elif prefix is None:
        assert wanted is not None
        prefix = _find_prefix(stored, wanted)
    elif prefix and not any(key.startswith(prefix) for key in stored):
        first = listed(sorted({key.partition(".")[0] + "." for key in stored}), ", ", " ")
        raise LoadMismatchError(f"no tensor has the prefix {prefix!r}; the names there begin with {first}")
    return prefix, _under(stored, prefix)


def _under(stored: Mapping[str, TensorInfo], prefix: str) -> dict[str, TensorInfo]:
    inside = {key.removeprefix(prefix): info for key, info in stored.items() if key.startswith(prefix)}
    return inside if prefix == MODEL else {k: info for k, info in inside.items() if not k.startswith(OTHER_COMPONENTS)}


def _find_prefix(stored: Mapping[str, TensorInfo], wanted: Collection[str]) -> str:
    found: Counter[str] = Counter()
    for key in stored:
        if key.startswith(OTHER_COMPONENTS):
            continue
        name = key
        while True:
            if name in wanted:
                found[key[: len(key) - len(name)]] += 1
            _, dot, name = name.partition(".")
            if not dot:
                break
    most = max(found.values(), default=0)
    best = [prefix for prefix, count in found.items() if count == most]
    if not best or "" in best:
        return ""
    if len(best) > 1:
        raise LoadMismatchError(
            f"the model may be in {len(best)} places, each with {most} of its tensors: "
            f'{", ".join(sorted(best))}. Name one: checkpoint.initial_load.prefix = "{min(best)}"'
        )
    return best[0]


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
