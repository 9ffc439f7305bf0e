"""State dicts that modules make themselves, by hooks and overrides: taken from them, and given back through them.

Owns which of their values are live memory, and the proof that a load through their own code reached every tensor.
names.py finds them; a model without any never comes here. Reads and writes no files.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from titan_ckpt.errors import LoadMismatchError, StateEncodingError, listed
from titan_ckpt.geometry.chunks import LazyTensor, Shape, computed, local_tensor
from titan_ckpt.geometry.nested import MAX_DEPTH
from titan_ckpt.types import StateDict
from titan_ckpt.weights.live_memory import WriteRecorder, is_live, is_same
from titan_ckpt.weights.names import (
    LOADING,
    OF_EVERY_MODULE,
    SAVING,
    clean_fqn,
    extra_state_modules,
    has_code,
    named_modules,
    overrides,
    own_tensors,
)

GATHERED_BYTES = 1 << 20
"""Each rank keeps only its part of larger tensors that hooks have gathered."""


@dataclass(frozen=True, slots=True)
class HookedSubtree:
    """The state dict of the smallest subtree that contains all hooks and overrides which see its values."""

    prefix: str
    module: nn.Module
    entries: dict[str, Any]
    """As `module.state_dict()` returned it."""
    live: StateDict
    """fqn -> each parameter and persistent buffer of the subtree."""
    shown: frozenset[str]
    """The fqns of entries that are the live tensor of the same name."""
    gathered: dict[str, Sequence[Placement]]
    """Entry of which this rank keeps a shard -> the placements with which the module's own code returned it."""

    @classmethod
    def take(cls, prefix: str, module: nn.Module, *, room: bool) -> Self:
        """Call the module's own `state_dict`.

        `room`: replace the tensors that it made by copies that own their memory, so that a load can read into them.
        """
        live = {fqn: value for path, m in named_modules(module) for fqn, value in own_tensors(prefix + path, m)}
        try:
            entries = module.state_dict()
        except Exception as error:
            raise StateEncodingError(
                f"{_title(prefix, module)}: its own state_dict() failed with {type(error).__name__}: {error}. Mend the "
                "module's hooks and overrides",
                prefix,
            ) from error
        names = {name: clean_fqn(prefix + name) for name in entries}
        shown = frozenset(fqn for name, fqn in names.items() if is_live(entries[name], live.get(fqn)))
        self = cls(prefix, module, entries, live, shown, {})
        for name, value in entries.items():
            if isinstance(value, torch.Tensor) and names[name] not in shown:
                settled = entries[name] = _settled(value)
                if (shards := _shards(settled, live.values())) is not None:
                    assert isinstance(settled, DTensor)
                    self.gathered[name] = settled.placements
                    entries[name] = settled.redistribute(placements=shards).clone()
                elif room:
                    entries[name] = settled.clone(memory_format=torch.contiguous_format)
        return self

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield (fqn, value) of every entry except the extra state of modules."""
        extra = {self.prefix + name for name, _ in extra_state_modules(self.module)}
        for name, value in self.entries.items():
            if (fqn := clean_fqn(self.prefix + name)) not in extra:
                yield fqn, value

    def with_room(self, shapes: Mapping[str, Shape]) -> Self:
        """Return the state with a new tensor of another shape for each of these buffers, to be loaded by its module."""
        entries, own = copy.copy(self.entries), shapes.keys() & self.shown
        for name in [name for name in entries if clean_fqn(self.prefix + name) in own]:
            entries[name] = entries[name].new_empty(shapes[clean_fqn(self.prefix + name)])
        return replace(self, entries=entries, shown=self.shown - own)

    @property
    def made(self) -> dict[str, Any]:
        """Return the values that are no live memory, by fqn."""
        return {fqn: value for fqn, value in self if fqn not in self.shown}

    @property
    def hidden(self) -> StateDict:
        """Return the live tensors that the state dict does not hold as they are, by fqn."""
        shown = {id(self.live[fqn]) for fqn in self.shown}  # a tied tensor is shown by any of its names
        return {fqn: value for fqn, value in self.live.items() if id(value) not in shown}

    @property
    def loads(self) -> bool:
        """Return whether a module of the subtree has code that torch would run when it loads a state dict."""
        return any(has_code(module, LOADING) for _, module in named_modules(self.module))

    def dropped(self) -> list[str]:
        """Return the trained parameters that neither are in the state dict nor can be part of a value in it."""
        if self.made:
            return []
        return [fqn for fqn, value in self.hidden.items() if value.requires_grad]

    @torch.no_grad()
    def with_values(self, values: Mapping[str, torch.Tensor | LazyTensor]) -> HookedSubtree:
        """Return the state that the module's own code makes of other values of its parameters, which stay as they are.

        `values`: fqn -> values of a hidden parameter. Collective if they or that code are.
        """
        places = [
            (m, name, parameter, values[fqn])
            for path, m in named_modules(self.module)
            for name, parameter in m._parameters.items()  # noqa: SLF001
            if parameter is not None and (fqn := self.prefix + path + name) in values
        ]
        try:
            for m, name, parameter, value in places:
                m._parameters[name] = nn.Parameter(computed(value, parameter), requires_grad=False)  # noqa: SLF001
            return self.take(self.prefix, self.module, room=True)
        finally:
            for m, name, parameter, _ in places:
                m._parameters[name] = parameter  # noqa: SLF001

    def give_back(self, values: Mapping[str, Any]) -> list[str]:
        """Load the entries through the module's own code; return a line for each fault. Collective if a hook is.

        `values`: what replaces the entries that are no tensors, by fqn. The state dict after the load must equal the
        loaded one bit for bit, and every hidden tensor must have been written to.
        """
        for name in self.entries:
            if (fqn := clean_fqn(self.prefix + name)) in values and fqn not in self.shown:
                self.entries[name] = values[fqn]
        entries = copy.copy(self.entries)  # with the versions of modules that torch attaches to it
        for name, placements in self.gathered.items():
            entries[name] = entries[name].redistribute(placements=placements)
        before = {fqn: (value, local_tensor(value).data_ptr()) for fqn, value in self.hidden.items()}
        try:
            with WriteRecorder() as writes:
                # frozen parameters that the state dict leaves out are not missed
                self.module.load_state_dict(entries, **({} if self.made or not self.hidden else {"strict": False}))
        except Exception as error:
            message = " ".join(str(error).split())  # torch's has a line for each fault
            return [f"{self}: its own load_state_dict() failed with {type(error).__name__}: {message}"]
        after = self.take(self.prefix, self.module, room=False)
        faults = []
        if differing := _differing(self, after):
            several = f"{len(differing)} entries are" if len(differing) > 1 else "an entry is"
            faults.append(f"{several} not what was loaded: {listed(differing, ', ', ' ')}")
        for fqn, (value, pointer) in before.items():
            now = after.live.get(fqn)
            if now is not value and value.requires_grad:
                faults.append(f"{fqn} was replaced by another tensor, and an optimizer would train the old one")
            elif value.requires_grad and local_tensor(value).data_ptr() == pointer and not writes.reached(value):
                faults.append(f"{fqn} was left as it was")
        return [f"{self}: {fault}" for fault in faults]

    def __str__(self) -> str:
        return _title(self.prefix, self.module)


@torch.no_grad()
def takes_shape(module: nn.Module, name: str, shape: Shape) -> bool:
    """Return whether a module's own code gives a buffer the shape of a loaded one, as observers of torch.ao do.

    A copy of the module is asked.
    """
    kind: Any = type(module)
    if not overrides(kind, ("_load_from_state_dict",)):
        return False
    try:
        again = copy.deepcopy(module)
        again.load_state_dict({name: again.get_buffer(name).new_zeros(shape)}, strict=False)
    except Exception:  # any error of the module's code: it does not take the shape
        return False
    return tuple(again.get_buffer(name).shape) == shape


def refuse_lossy(faults: Iterable[str]) -> None:
    """Raise LoadMismatchError if there are faults."""
    if lines := [*faults]:
        raise LoadMismatchError(
            "the model's own code does not load what its state_dict() returns, so that a resumed run would not be this "
            f"one\n  {listed(lines, chr(10) + '  ')}\n  Mend the module's state-dict hooks and overrides: "
            "load_state_dict(state_dict()) must change nothing and write every parameter in place"
        )


def plain_attributes(parts: Sequence[nn.Module]) -> dict[str, tuple[Any, ...]]:
    """Return numbers, strings, tensors and containers of them in the attributes of modules with saving code, by path.

    Tensors are represented by their identity and version. Cheap; calls no code of the model.
    """
    out: dict[str, tuple[Any, ...]] = {}
    for part in parts:
        for prefix, module in named_modules(part):
            if has_code(module, SAVING):
                own = ((name, value) for name, value in module.__dict__.items() if name not in OF_EVERY_MODULE)
                out |= {f"{prefix}{name}": _trace(value) for name, value in own}
    return out


def _trace(value: Any, depth: int = 0) -> tuple[Any, ...]:
    """Return what shows whether a value has changed since; for objects of unknown classes their identity."""
    if isinstance(value, torch.Tensor):
        return id(value), value._version  # noqa: SLF001 - torch has no other name for it
    if isinstance(value, int | float | str | bytes | None):
        return (value,)
    if depth < MAX_DEPTH and isinstance(value, Mapping):
        return tuple((_trace(k, depth + 1), _trace(v, depth + 1)) for k, v in value.items())
    if depth < MAX_DEPTH and isinstance(value, (list, tuple, deque, set, frozenset)):
        return tuple(_trace(item, depth + 1) for item in value)
    return (id(value),)


def _settled(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor that can be stored: without autograd and sums that are still pending."""
    value = value.detach()
    if isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements):
        value = value.redistribute(placements=[Replicate() if p.is_partial() else p for p in value.placements])
    return value


def _shards(value: torch.Tensor, live: Collection[torch.Tensor]) -> list[Placement] | None:
    """Return placements that divide a large gathered tensor again, as the live tensors are divided; None for others.

    Along an axis that shards all live tensors, copies are equal because they were gathered, so that each rank needs a
    part only. Along other axes they are copies that each rank has trained, and the check of replicas compares them.
    """
    if not isinstance(value, DTensor) or not value.dim() or value.numel() * value.itemsize < GATHERED_BYTES:
        return None
    sources = [v for v in live if isinstance(v, DTensor) and v.device_mesh == value.device_mesh]
    axes = [
        axis
        for axis, placement in enumerate(value.placements)
        if placement.is_replicate() and sources and not any(v.placements[axis].is_replicate() for v in sources)
    ]
    return [Shard(0) if axis in axes else p for axis, p in enumerate(value.placements)] if axes else None


def _differing(loaded: HookedSubtree, after: HookedSubtree) -> list[str]:
    """Return the names of made values that are not the same, bit for bit, after a load."""
    before, now = loaded.made, dict(after)
    names = [fqn for fqn, value in before.items() if fqn not in now or not is_same(value, now[fqn])]
    return names + [fqn for fqn in after.made if fqn not in before]


def _title(prefix: str, module: nn.Module) -> str:
    return f"{prefix[:-1] or 'the model'} ({type(module).__name__})"
