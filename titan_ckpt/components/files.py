"""The names of a step's state files, and how the values of a run's items are divided between them.

A value that is equal on all ranks is stored once, in state.json; the rest in each rank's own file (docs/format.md). The
writer (saving) and the reader (loading/origin.py) both use this module. It opens no file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import xxhash

from titan_ckpt.components.items.item import STATES, Item
from titan_ckpt.components.items.states import OWN_BUFFERS, place_of
from titan_ckpt.components.snapshot import DATA_RANK, LAYOUT, Snapshot
from titan_ckpt.distributed.replicas import digest_of
from titan_ckpt.encoding import typed_json
from titan_ckpt.encoding.strict_json import Json
from titan_ckpt.errors import StateEncodingError, listed
from titan_ckpt.geometry.chunks import local_tensor
from titan_ckpt.geometry.nested import names_of, rename_tensors, take_tensors
from titan_ckpt.types import StateDict
from titan_ckpt.weights.stored_names import MODEL

RUN_STATE = "state.json"


def rank_state_name(rank: int) -> str:
    """Return the name of the file that holds one rank's state."""
    return f"rank-{rank:05d}.json"


def as_stored(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a state file, in which user states are one entry. `values`: by keys of items."""
    content = {key: value for key, value in values.items() if not key.startswith(STATES)}
    states = {key.removeprefix(STATES): value for key, value in values.items() if key.startswith(STATES)}
    return content | ({"states": states} if states else {})


def by_key(content: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `as_stored`."""
    states = {f"{STATES}{name}": value for name, value in content.get("states", {}).items()}
    return {key: value for key, value in content.items() if key != "states"} | states


def misshapen(content: Any, of_rank: bool, step: int, kinds: Sequence[type[Item]]) -> list[str]:
    """Return the parts of a state file that no run writes so: a file by another program may have a valid digest."""
    if not isinstance(content, dict):
        return [f"a {type(content).__name__}, expected an object"]
    known = {kind.component: kind for kind in kinds if (not kind.is_merged if of_rank else kind.scope == "run")}
    names = {*known, *((DATA_RANK, LAYOUT) if of_rank else ("step",))}
    wrong = [f"{name!r:.80} is none of {', '.join(sorted(names))}" for name in content if name not in names]
    wrong += [fault for name in content if name in known for fault in known[name].misshapen(content[name])]
    stored = content.get("step")
    if not of_rank and (type(stored) is not int or stored != step):
        wrong.append(f"step is {stored!r:.40}, and the manifest says {step}")
    return wrong


def run_parts(snapshot: Snapshot) -> dict[str, Json]:
    """Return the values of a run that ranks compare one by one, as JSON.

    The digest of a value covers its tensors, except DTensors, of which each rank has a shard. A value that can be
    merged is its content, or None if it is absent; of any other value a digest is enough, and of buffers one for each.
    """
    parts: dict[str, Json] = {
        key: typed_json.encode(snapshot.run[key]) if key in snapshot.run else None for key in snapshot.merge
    }
    for key, value in snapshot.run.items():
        if key not in parts:
            of_tensors = [digest_of(tensor) for tensor in _plain_tensors(value, snapshot.tensors).values()]
            parts[key] = xxhash.xxh3_128_hexdigest(typed_json.dumps(value, key) + "".join(of_tensors).encode())
    own = sorted(snapshot.own_buffers) if snapshot.has_own else ()
    parts[OWN_BUFFERS] = {place_of(n, snapshot.tensors[n]): digest_of(snapshot.tensors[n]) for n in own}
    return parts


def divided(snapshot: Snapshot, differing: Mapping[str, Sequence[Json]], rank: int) -> Snapshot:
    """Return the snapshot with each differing value merged over the ranks or moved to the rank's own values.

    Buffers and extra state of modules that differ are there once more, as the rank's own. The tensors of a value that
    is moved get names of this rank. `differing`: key -> the distinct values of `run_parts`, those of lower ranks first.
    Raises: StateEncodingError for other values of the model that differ.
    """
    run, own = dict(snapshot.run), dict(snapshot.rank)
    names: dict[str, str] = {}
    more: StateDict = {}
    apart: dict[str, Any] = {}
    for key, values in differing.items():
        of_ranks: Any = values
        if key == OWN_BUFFERS:
            held = {place_of(name, snapshot.tensors[name]): name for name in sorted(snapshot.own_buffers)}
            moved = {place: snapshot.tensors[held[place]] for place in held if place in _apart(of_ranks)}
            apart |= {place.removeprefix(MODEL): local_tensor(value) for place, value in moved.items()}
        elif key in snapshot.merge:
            if key == "model" and snapshot.has_own:
                apart |= _own_extra_state(run.get(key, {}), _apart(of_ranks))
            run[key] = snapshot.merge[key]([typed_json.decode(value, key) for value in values if value is not None])
        elif key in run:
            for name in _plain_tensors(run[key], snapshot.tensors):
                renamed = f"{key}.rank-{rank}.{name.removeprefix(f'{key}.')}"
                while renamed in snapshot.tensors or renamed in names.values():
                    renamed += "'"
                names[name] = renamed
            own[key] = rename_tensors(run.pop(key), names)
    if apart:
        own[OWN_BUFFERS] = take_tensors(apart, f"{OWN_BUFFERS}.rank-{rank}", more)
    tensors = {names.get(name, name): value for name, value in snapshot.tensors.items()} | more
    volatile = frozenset(names.get(name, name) for name in snapshot.volatile) | more.keys()
    return replace(snapshot, run=run, rank=own, tensors=tensors, volatile=volatile)


def _apart(of_ranks: Sequence[Mapping[str, Any] | None]) -> set[str]:
    """Return the names whose values are not equal on all ranks that have them."""
    first: dict[str, Any] = {}
    held = ((name, value) for of_rank in of_ranks for name, value in (of_rank or {}).items())
    return {name for name, value in held if first.setdefault(name, value) != value}


def _own_extra_state(values: Mapping[str, Any], apart: Collection[str]) -> dict[str, Any]:
    """Return this rank's extra state of modules, of what differs. Raises: StateEncodingError for other values."""
    if others := sorted(name for name in apart if name.rpartition(".")[2] != "_extra_state"):
        raise StateEncodingError(
            f"values of the model's own state_dict() are not equal on all ranks: {listed(others, ', ', ' ')}. A step "
            "holds those of one rank: return them by get_extra_state()",
            others[0],
        )
    return {name: value for name, value in values.items() if name in apart}


def _plain_tensors(value: Any, tensors: StateDict) -> StateDict:
    """Return the tensors of one value that are not sharded, and that a checkpoint can hold."""
    values = {name: tensors[name] for name in names_of(value) if name in tensors}
    return {n: v for n, v in values.items() if type(v) is torch.Tensor and v.layout is torch.strided and not v.is_meta}
