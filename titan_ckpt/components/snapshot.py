"""The state of a run at one step, as a save takes it: now, or at a step that was marked; and as state files hold it.

Owns which tensors a step has and which of them a save must copy at once; the names of the state files, and how values
are divided between them: one that is equal on all ranks is stored once, in state.json, the rest in each rank's own file
(docs/format.md). A load asks the same functions. Opens no file; run_state.py has the objects, and gives back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from titan_ckpt.components.gradients import Unused
from titan_ckpt.components.items.item import STATES, Item
from titan_ckpt.components.items.states import OWN_BUFFERS, place_of
from titan_ckpt.components.optimizer_content import innermost
from titan_ckpt.components.optimizer_split import frozen
from titan_ckpt.components.run_state import RunState
from titan_ckpt.distributed.replicas import digest_of
from titan_ckpt.encoding import typed_json
from titan_ckpt.encoding.strict_json import Json
from titan_ckpt.errors import SaveError, StateEncodingError, listed
from titan_ckpt.geometry.chunks import local_tensor, require_range
from titan_ckpt.geometry.nested import names_of, rename_tensors, take_tensors
from titan_ckpt.types import StateDict
from titan_ckpt.weights.live_memory import Watched
from titan_ckpt.weights.names import MODEL, prefix_in
from titan_ckpt.weights.own_state import plain_attributes
from titan_ckpt.weights.wrapper import ModelState, require_memory

_COPIED_BYTES = 1 << 20
DATA_RANK = "data_parallel"
"""Key of a rank's share of the data, beside the values of share items."""
RUN_STATE = "state.json"
LAYOUT = "layout"
"""Key of a digest of the facts that decide what the values of rank items mean."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one step: live tensors by file name, and the state that is stored as typed JSON."""

    tensors: StateDict
    run: dict[str, Any]
    """Once per checkpoint: the step, and the values of run items by their keys."""
    rank: dict[str, Any]
    """Per rank: its layout, its share of the data, and the values of rank and share items by their keys."""
    components: tuple[str, ...] = ()
    merge: Mapping[str, Callable[[Sequence[Any]], Any]] = field(default_factory=dict)
    """Keys of the items whose values are merged over the ranks, and how."""
    volatile: frozenset[str] = frozenset()
    """Tensors that a forward pass may change: buffers and user states. Only an optimizer changes the others."""
    made: frozenset[str] = frozenset()
    """Tensors that the model's own code has made, perhaps in memory that it uses again. A save stages them at once."""
    casts: Mapping[torch.dtype, torch.dtype] = field(default_factory=dict)
    """Dtypes of the tensors that files hold in another one -> that one. They are cast when they are copied."""
    watched: Watched = field(default_factory=lambda: Watched({}))
    """Weights and optimizer state, which must not change before they are copied or written."""

    @property
    def buffers(self) -> frozenset[str]:
        """Return the names of the model's buffers."""
        return frozenset(name for name in self.volatile if name.startswith(MODEL))

    @property
    def own_buffers(self) -> frozenset[str]:
        """Return the names of those that may be each rank's own."""
        return frozenset(n for n in self.buffers - self.made if type(self.tensors[n]) in (torch.Tensor, DTensor))

    @property
    def has_own(self) -> bool:
        """Return whether ranks store values of their own; a step of the model alone has those of the lowest rank."""
        return self.components != ("model",)

    def frozen_tensors(self) -> StateDict:
        """Return the tensors with copies of the volatile ones; the others do not change until an optimizer steps."""
        return {name: value.clone() if name in self.volatile else value for name, value in self.tensors.items()}


@dataclass(frozen=True, slots=True)
class Mark:
    """A copy of the state that the next step overwrites before `optimizer.step()`."""

    step: int
    counters: Snapshot
    """The state besides weights and optimizer state, and small buffers."""
    large: dict[str, tuple[torch.Tensor, int]]
    """Tensors too large to copy at every step, each with its version counter, to show whether it has changed since."""
    trained: tuple[list[torch.Tensor], list[int], list[int], list[int]]
    """The optimizers' parameters; their version counters; the addresses of their values, or the counters of their
    shards; the version counters of the optimizers' state."""
    groups: list[tuple[Any, list[tuple[dict[str, Any], dict[str, Any]]]]]
    """The optimizers, each with its groups and what these held: a hook may add groups, or set a rate, before a step."""
    attributes: dict[str, tuple[Any, ...]]
    """Plain attributes of modules with state-dict code of their own, to show whether that code would return more."""
    unused: Unused
    """Gradients that no step of an optimizer had used."""


def take_snapshot(
    run_state: RunState,
    step: int,
    model: ModelState,
    items: Sequence[Item] | None = None,
    casts: Mapping[torch.dtype, torch.dtype] = MappingProxyType({}),
) -> Snapshot:
    """Return the run at `step`. Tensors alias live memory; everything else has the values of this moment.

    `items`: what of the training state it has; by default all of it. `casts`: as in Snapshot.
    Raises: StateEncodingError for tensors that hold no values; ExportError for values beyond the range of a cast.
    """
    require_memory(model.tensors)
    tensors: StateDict = _named(model)
    for name, value in tensors.items() if casts else ():
        require_range(name, local_tensor(value).detach(), casts.get(value.dtype, value.dtype))
    state: StateDict = {}
    run, rank = _values(run_state, run_state.items if items is None else items, state)
    tensors |= state
    if extra := run.pop("model", {}) | model.values:
        run["model"] = extra
    components = run_state.components() if items is None else tuple(item.component for item in items)
    merge = {kind.component: kind.merge for kind in run_state.kinds if kind.is_merged}
    volatile = _volatile(tensors, run_state, model)
    made = frozenset(MODEL + fqn for fqn in model.made)
    watched = Watched({name: value for name, value in tensors.items() if name not in volatile})
    return Snapshot(tensors, {"step": step} | run, rank, components, merge, volatile, made, casts, watched)


def large_tensors(run_state: RunState, model: ModelState) -> Snapshot:
    """Return the tensors of the model and the optimizers, as `take_snapshot` does; asks nothing else of the run."""
    tensors = _named(model)
    _values(run_state, _stepped(run_state), tensors)
    return Snapshot(tensors, {}, {}, volatile=_volatile(tensors, run_state, model))


def _values(run_state: RunState, items: Sequence[Item], tensors: StateDict) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of items that a run stores once, and those of each rank; move their tensors to `tensors`."""
    values = {item.key: item.value(tensors) for item in items}
    own: dict[str, Any] = {LAYOUT: run_state.layout}
    if any(item.scope == "share" for item in items):
        own[DATA_RANK] = [run_state.data_rank.rank, run_state.data_rank.size]
    own |= {item.key: values.pop(item.key) for item in items if item.scope != "run"}
    return values, own


def _stepped(run_state: RunState) -> list[Item]:
    return [item for item in run_state.items if item.is_stepped]


def _volatile(tensors: Collection[str], run_state: RunState, model: ModelState) -> frozenset[str]:
    """Return the tensors that belong to no optimizer and are no parameters."""
    parameters = {MODEL + fqn for fqn in run_state.model.parameter_names().values()}
    parameters |= {MODEL + fqn for fqn in model.made_of_parameters()}
    stepped = tuple(f"{item.key}." for item in _stepped(run_state))
    others = (n for n in tensors if n not in parameters and not n.startswith(stepped))
    return frozenset(n for n in others if prefix_in(n, parameters) is None)


def take_mark(run_state: RunState, step: int, unused: Unused) -> Mark:
    """Record the state that the next step changes before `optimizer.step()`, so that this step can still be saved.

    Cheap: it copies generators, counters, buffers and small state, and takes the version counters of large state.
    """
    volatile: StateDict = {}
    run, rank = _values(run_state, run_state.counters, volatile)
    # State dicts may alias live state; generator states are copies already, and large.
    rank = {name: value if name == "rng" else copy.deepcopy(value) for name, value in rank.items()}
    marked = Snapshot({}, copy.deepcopy(run), rank)
    volatile |= {MODEL + fqn: value for fqn, value in run_state.model.buffers().items()}
    large = {}
    for name, value in volatile.items():
        if value.nbytes <= _COPIED_BYTES or value.is_inference():
            marked.tensors[name] = value.clone()
        else:
            large[name] = value, value._version  # noqa: SLF001 - torch has no other name for it
    optimizers = [innermost(optimizer) for optimizer in run_state.optimizers]
    groups = [(o, [(group, {k: frozen(v) for k, v in group.items()}) for group in o.param_groups]) for o in optimizers]
    attributes = plain_attributes(run_state.model.parts)
    return Mark(step, marked, large, _trained(run_state), groups, attributes, unused)


def _set_groups(of_optimizers: list[tuple[Any, list[tuple[dict[str, Any], dict[str, Any]]]]]) -> None:
    for optimizer, groups in of_optimizers:
        optimizer.param_groups[:] = [group for group, _ in groups]
        for group, held in groups:
            group.clear()
            group.update(held)


def _trained(run_state: RunState) -> tuple[list[torch.Tensor], list[int], list[int], list[int]]:
    """Return what an optimizer's step changes, as `Mark.trained` has it. Every step calls it: it makes no names."""
    optimizers = [innermost(optimizer) for optimizer in run_state.optimizers]
    parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    states = chain.from_iterable(s.values() for o in optimizers for s in o.state.values() if isinstance(s, dict))
    moments = [value for value in states if isinstance(value, torch.Tensor)]
    if all(type(p) is nn.Parameter for p in parameters):
        places = [p.data_ptr() for p in parameters]
    else:
        places = _versions([local_tensor(p) for p in parameters])
    return parameters, _versions(parameters), places, _versions(moments)


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the version counters of tensors; those made in inference mode have none, and then none is returned."""
    try:
        return [tensor._version for tensor in tensors]  # noqa: SLF001 - torch has no other name for it
    except RuntimeError:
        return []


@contextmanager
def as_marked(run_state: RunState, mark: Mark) -> Iterator[None]:
    """Let the marked values be in the live buffers and in the optimizers' groups: all code returns the marked step."""
    copies = mark.counters.tensors
    pairs = [(v, copies[MODEL + fqn]) for fqn, v in run_state.model.buffers().items() if MODEL + fqn in copies]
    now = [value.clone() for value, _ in pairs]
    groups = [(o, [(group, dict(group)) for group in o.param_groups]) for o, _ in mark.groups]
    with torch.no_grad():
        for value, marked in pairs:
            value.copy_(marked)
        try:
            _set_groups(mark.groups)
            yield
        finally:
            _set_groups(groups)
            for (value, _), own in zip(pairs, now, strict=True):
                value.copy_(own)


def snapshot_of_mark(run_state: RunState, mark: Mark, model: ModelState) -> Snapshot:
    """Return the run at a marked step, if no optimizer has stepped since. Call it `as_marked`. `model`: read so, too.

    Raises: SaveError for large state that has changed since.
    """
    items = [item for item in run_state.items if item.is_stepped or item is run_state.extra]
    now, trained = take_snapshot(run_state, mark.step, model, items), _trained(run_state)
    hidden = {MODEL + fqn: value for own in model.own for fqn, value in own.hidden.items()}
    changed = [n for n, (value, version) in mark.large.items() if value._version != version]  # noqa: SLF001
    changed += [n for n, (value, _) in mark.large.items() if hidden.get(n, value) is not value]
    if trained[1:] != mark.trained[1:]:
        names = {id(parameter): MODEL + fqn for parameter, fqn in run_state.model.parameter_names().items()}
        pairs = zip(trained[0], zip(*trained[1:3], strict=False), zip(*mark.trained[1:3], strict=False), strict=False)
        moved = [p for p, trace, marked in pairs if trace != marked]
        changed += [names.get(id(p), "a parameter beside the model") for p in moved] or ["the optimizer's state"]
    attributes = plain_attributes(run_state.model.parts)
    within = tuple(own.prefix for own in model.own if own.made)
    changed += [n for n, marked in mark.attributes.items() if n.startswith(within) and attributes.get(n) != marked]
    if changed:
        raise SaveError(f"step {mark.step} can no longer be saved: {listed(changed, ', ', ' ')} changed after its end")
    marked = mark.counters.tensors | {name: value for name, (value, _) in mark.large.items()}
    stored = now.tensors.keys() - now.made
    of_run = {name: value for name, value in marked.items() if name in stored or not name.startswith(MODEL)}
    run = now.run | mark.counters.run
    if extra := now.run.get("model", {}) | mark.counters.run.get("model", {}):
        run["model"] = extra
    return replace(
        now,
        tensors=now.tensors | of_run,
        run=run,
        rank=mark.counters.rank,
        components=run_state.components(),
        volatile=now.volatile | of_run.keys(),
    )


def _named(model: ModelState) -> StateDict:
    return {MODEL + fqn: value for fqn, value in model.tensors.items()}


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
