"""Runs code written for one device on a model whose tensors are sharded, have their values already, or are elsewhere.

Owns the illusion: whatever touches a tensor of the model computes on the whole of it, one at a time, and what this rank
holds of the result is kept. Knows no files and no order of loading (initialize.py).
Source: autoparallel, init_weights.py, for assignments that keep a placement and for refusing `.data =`. Its random
fills run on shards and differ from one device's; these run on whole tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode

from titan_ckpt.tensors import fill

Place = tuple[nn.Module, str]
"""A module, and the name of a parameter or buffer of its own."""
Resolve = Callable[[str, Place], tuple[tuple[Place, ...], bool]]

_T: Any = torch.Tensor
_SET_DATA, _GET_DATA = _T.data.__set__, _T.data.__get__
_WHERE = frozenset(getattr(_T, name).__get__ for name in ("device", "is_meta", "is_cpu", "is_cuda"))
_ABOUT = frozenset({
    *(getattr(_T, name).__get__ for name in (
        "shape", "dtype", "ndim", "layout", "requires_grad", "grad", "grad_fn", "is_leaf", "itemsize", "nbytes",
    )),
    *(getattr(_T, name) for name in (
        "size", "dim", "numel", "nelement", "element_size", "stride", "is_contiguous", "is_floating_point",
        "is_complex", "requires_grad_", "__len__", "__hash__", "untyped_storage", "data_ptr",
    )),
    _T.requires_grad.__set__, _T.grad.__set__, torch.is_floating_point, torch.is_complex, torch.numel,
})  # fmt: skip
"""What asks for no values: answered without the whole."""
_LIKE = frozenset({
    *(getattr(_T, name) for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")),
    *(getattr(torch, f"{name}_like") for name in ("empty", "zeros", "ones", "full", "rand", "randn")),
})  # fmt: skip
"""What makes another tensor of the same kind."""
_SAME = frozenset({_GET_DATA, _T.detach})
_OVERWRITES = frozenset({
    "normal_", "uniform_", "fill_", "zero_", "copy_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_",
    "constant_", "ones_", "zeros_", "kaiming_uniform_",
})  # fmt: skip
"""What fills its first argument, whatever was in it: methods of tensors, functions of nn.init and those that
transformers puts in their place."""


class ValuesGoneError(RuntimeError):
    """Code reads values that were dropped, because this rank does not hold the tensor."""


@dataclass(slots=True, eq=False)
class _Seen:
    """One tensor of the model, as the code sees it."""

    name: str
    seen: torch.Tensor
    places: tuple[Place, ...] = ()
    """Where its values belong; nowhere for what this rank does not hold."""
    kept: bool = False
    """Has its values: whatever the code makes of it is dropped."""
    whole: torch.Tensor | None = None
    in_place: bool = False
    """`whole` is memory that is there anyway: the live tensor's, or that of a tensor which was made with values."""
    version: int = 0
    written: bool = False
    gone: bool = False
    """Had values that are nowhere any more."""

    def targets(self) -> list[torch.Tensor]:
        """Return the live tensors, each once."""
        return list({id(value): value for value in map(tensor_at, self.places)}.values())


class WholeTensors(TorchFunctionMode):
    """A context in which single-device code works on the tensors of a model that it is told to `watch`.

    `device`: where wholes are; None: each where its live tensor is. `skip_kept`: a fill of what keeps its values draws
    nothing. `building`: tensors that are made empty have memory only while something works on them.
    Collective where the code reads a sharded tensor: every rank runs the same code.
    """

    def __init__(self, device: torch.device | None = None, *, skip_kept: bool = True, building: bool = False) -> None:
        super().__init__()
        self.building = building
        self._device = device
        self._skip_kept = skip_kept
        self._seen: dict[int, _Seen] = {}
        self._at: dict[tuple[int, str], _Seen] = {}
        self._open: list[_Seen] = []
        self._watched: list[tuple[nn.Module, str]] = []
        self._warned = False

    def watch(self, model: nn.Module, resolve: Resolve) -> None:
        """Take over a model's tensors; `resolve` says of a tensor where its values go, and whether they are kept."""
        with torch._C.DisableTorchFunction():
            self._watch(model, resolve)

    def _watch(self, model: nn.Module, resolve: Resolve) -> None:
        for made in [*self._open]:
            self._close(made)
        for fqn, place, value in named_tensors(model):
            places, kept = resolve(fqn, place)
            one = self._seen.get(_key(value))
            if one is None or not one.name:
                one = self._seen[_key(value)] = _Seen(fqn, value, gone=one is not None and one.gone)
                if not value.is_meta and places != (place,):  # made with values: they are to be handed over
                    one.whole, one.in_place, one.written = value.detach(), True, True
                    self._open.append(one)
            one.places += tuple(p for p in places if p not in one.places)
            one.kept = one.kept or kept
            self._at[id(place[0]), place[1]] = one
        for module in model.modules():
            for kind in ("_parameters", "_buffers"):
                module.__dict__[kind] = _Watched(module.__dict__[kind], module, self)
                self._watched.append((module, kind))

    def written(self) -> set[tuple[int, str]]:
        """Return (id of the module, name) of every place that was given values; after the context."""
        return {(id(module), name) for one in self._records() if one.written for module, name in one.places}

    def assign(self, module: nn.Module, name: str, value: torch.Tensor) -> torch.Tensor:
        """Give the tensor at a place the values of another one. Returns what is to be found there from now on."""
        with torch._C.DisableTorchFunction():  # its values, not the illusion of them
            one = self._at.get((id(module), name))
            if one is None:
                return value
            if (other := self._seen.get(_key(value))) is not None:
                return self._tie(module, name, one, other)
            if one.kept:
                return one.seen
            return self._store(one, value.full_tensor() if isinstance(value, DTensor) else value.detach())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        for module, attribute in self._watched:
            module.__dict__[attribute] = dict(module.__dict__[attribute])
        self._watched.clear()
        if error is None:
            for one in [*self._open]:
                self._close(one)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.building and func is torch.empty and torch.device(kwargs.get("device") or "cpu").type == "cpu":
            made: torch.Tensor = func(*args, **{**kwargs, "device": "meta"})
            self._seen[_key(made)] = _Seen("", made)
            return made
        given = [value for value in _flat((*args, *kwargs.values())) if isinstance(value, torch.Tensor)]
        found = {id(value): one for value in given if (one := self._seen.get(_key(value))) is not None}
        if not found or func in _ABOUT:
            return func(*args, **kwargs)
        into = args[0] if args else kwargs.get("tensor")
        first = found.get(id(into))
        if func in _WHERE and first is not None:
            return func(torch.empty(0, device=self._device_of(first)))
        if func == _SET_DATA and first is not None:
            return self._set_data(first, args[1])
        if func in _LIKE and first is not None:
            blank = torch.empty(first.seen.shape, dtype=first.seen.dtype, device=self._device_of(first))
            return func(blank, *args[1:], **kwargs)
        if func in _SAME and first is not None and first.seen.is_meta:
            return torch.Tensor.detach(args[0])  # known by its memory: nothing needs values yet
        fresh = func.__name__ in _OVERWRITES and sum(value is into for value in given) == 1
        if fresh and first is not None and first.kept and self._skip_kept:
            return into
        for one in found.values():
            self._open_whole(one, [*found.values()], fresh=fresh and one is first)

        def whole(value: Any) -> Any:
            return found[id(value)].whole if id(value) in found else value

        if func == _GET_DATA:  # not data: a view of it would not count its changes with the tensor's
            func = torch.Tensor.detach
        result = func(*_mapped(args, whole), **{name: _mapped(value, whole) for name, value in kwargs.items()})
        return next((value for value in given if id(value) in found and whole(value) is result), result)

    def _set_data(self, one: _Seen, value: torch.Tensor) -> None:
        if isinstance(one.seen, DTensor):
            raise RuntimeError(  # noqa: TRY004 - the type is right, the statement is not
                f"{one.name}.data = ... on a sharded tensor would be lost: write self.<name> = nn.Parameter(value), or "
                "fill it in place, such as self.<name>.data.copy_(value)"
            )
        if not one.kept:
            self._store(one, value.detach())

    def _tie(self, module: nn.Module, name: str, one: _Seen, other: _Seen) -> torch.Tensor:
        """Let a place share another tensor of the model, as `self.a = self.b` does."""
        if one is not other:
            self._open_whole(other, [one, other], fresh=False)
            assert other.whole is not None
            if not one.kept:
                self._store(one, other.whole)
            if (module, name) in one.places:  # the live model itself
                other.places += ((module, name),)
                one.places = tuple(place for place in one.places if place != (module, name))
            self._at[id(module), name] = other
        return other.seen

    def _store(self, one: _Seen, value: torch.Tensor) -> torch.Tensor:
        """Hand a whole value over to the live tensors, in their placement."""
        self._forget(one)
        one.written = True
        if not one.places:  # another rank's; code may go on to read it here
            return one.seen
        is_parameter = isinstance(one.seen, nn.Parameter)
        for target in one.targets():
            if target.shape != value.shape and (is_parameter or isinstance(target, DTensor)):
                raise ValueError(
                    f"{one.name}: initialisation assigns shape {list(value.shape)} where the model has shape "
                    f"{list(target.shape)}"
                )
            if isinstance(target, DTensor) and isinstance(one.seen, DTensor):
                self._warn_of_waste(one, target)
            alike = (target.shape, target.dtype) == (value.shape, value.dtype)
            if alike or is_parameter or isinstance(target, DTensor):
                fill(target, value)
            else:
                moved = value.to(target.device)
                for module, name in [place for place in one.places if tensor_at(place) is target]:
                    dict.__setitem__(module.__dict__["_buffers"], name, moved)
                if target is one.seen:
                    one.seen = moved
                    self._seen[_key(moved)] = one
        return one.seen

    def _warn_of_waste(self, one: _Seen, target: DTensor) -> None:
        if not self._warned and any(not isinstance(p, Replicate) for p in target.placements):
            self._warned = True
            warnings.warn(
                f"initialisation assigns a whole tensor to {one.name}, which is sharded ({target.placements}): every "
                "rank makes all of it to keep its part. Fill it in place instead, such as nn.init.normal_(self.weight)",
                stacklevel=5,
            )

    def _device_of(self, one: _Seen) -> torch.device:
        if self._device is not None:
            return self._device
        targets = one.targets()
        return targets[0].device if targets else torch.device("cpu")

    def _open_whole(self, one: _Seen, in_use: Sequence[_Seen], *, fresh: bool) -> None:
        """Give a tensor its whole; `fresh`: its values do not matter. Others that nothing refers to are put away."""
        if one.whole is not None:
            return
        for other in [*self._open]:
            if other not in in_use and not other.in_place and not _has_views(other):
                self._close(other)
        targets = one.targets()
        device, dtype = self._device_of(one), one.seen.dtype
        stored = len(targets) > 0 and (one.kept or one.written or one.seen is targets[0])
        if one.gone and not fresh:
            raise ValuesGoneError(f"{one.name or 'a temporary tensor'}: its values are read after others were made")
        one.in_place = False
        if len(targets) == 1 and not one.kept and _is_plain(targets[0], device, one.seen):
            one.whole, one.in_place = targets[0].detach(), True
        elif fresh or not stored:
            one.whole = torch.empty(one.seen.shape, device=device, dtype=dtype)
        else:
            target = targets[0]
            values = target.full_tensor() if isinstance(target, DTensor) else target
            one.whole = values.detach().to(device, dtype, copy=True)
        one.version = one.whole._version
        self._open.append(one)

    def _close(self, one: _Seen) -> None:
        """Keep of a whole what belongs to the live tensors, and drop it."""
        assert one.whole is not None
        changed = one.whole._version != one.version
        one.written = one.written or changed
        one.gone = one.written and not one.places
        whole = one.whole
        self._forget(one)
        if one.kept:
            return
        if one.in_place and not one.seen.is_meta and all(t is not one.seen for t in one.targets()):
            self._store(one, whole)
        elif changed and not one.in_place:
            for target in one.targets():
                fill(target, whole)

    def _forget(self, one: _Seen) -> None:
        one.whole = None
        if one in self._open:
            self._open.remove(one)

    def _records(self) -> list[_Seen]:
        return list({id(one): one for one in (*self._seen.values(), *self._at.values())}.values())


class _Watched(dict[str, Any]):
    """A module's parameters or buffers, whose assignments go through the illusion."""

    def __init__(self, content: dict[str, Any], module: nn.Module, mode: WholeTensors) -> None:
        super().__init__(content)
        self.module = module
        self.mode = mode

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, self.mode.assign(self.module, name, value) if value is not None else value)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Place, torch.Tensor]]:
    """Yield (name, place, tensor) of every parameter and buffer, aliases and shared modules included."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for own in (module._parameters, module._buffers):
            for name, value in [*own.items()]:
                if value is not None:
                    yield (f"{prefix}.{name}" if prefix else name), (module, name), value


def tensor_at(place: Place) -> torch.Tensor:
    """Return the parameter or buffer at a place."""
    module, name = place
    value = module._parameters.get(name)
    found = module._buffers[name] if value is None else value
    assert found is not None
    return found


def _key(value: torch.Tensor) -> int:
    """Tell tensors apart: by identity, or on meta by memory, which a Parameter shares with what it is made of."""
    if value.is_meta and not isinstance(value, DTensor):
        return int(value.untyped_storage()._cdata)
    return id(value)


def _has_views(one: _Seen) -> bool:
    """Say whether code still holds a view of the whole, through which it may change."""
    assert one.whole is not None
    storage = one.whole.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)  # those of the whole, and of `storage`


def _is_plain(target: torch.Tensor, device: torch.device, seen: torch.Tensor) -> bool:
    return type(target.detach()) is torch.Tensor and (target.device, target.dtype, target.shape) == (
        device,
        seen.dtype,
        seen.shape,
    )


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_mapped(item, change) for item in value)
    return change(value)
