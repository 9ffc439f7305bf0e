"""Runs code written for one device on a model whose tensors are sharded, already have values, or are elsewhere.

Owns the illusion: code that touches a tensor of the model computes on the whole tensor, one at a time, and this rank
keeps its part of the result. Knows no files and no order of loading (initialize.py).
Source: autoparallel, init_weights.py, for assignments that keep a placement and for refusing `.data =`. Its random
fills run on shards and differ from one device's; these run on whole tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from titan_ckpt.geometry.chunks import fill
from titan_ckpt.weights.names import named_modules

Place = tuple[nn.Module, str]
"""A module, and the name of a parameter or buffer of its own."""
Resolve = Callable[[str, Place], tuple[tuple[Place, ...], bool]]
"""(name, place) of a watched tensor -> (places that get its values, whether these keep the values they have)."""

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
"""Functions that need no values, so they run without the whole tensor."""
_LIKE = frozenset({
    *(getattr(_T, name) for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")),
    *(getattr(torch, f"{name}_like") for name in ("empty", "zeros", "ones", "full", "rand", "randn")),
})  # fmt: skip
"""Functions that make a new tensor of the same kind."""
_SAME = frozenset({_GET_DATA, _T.detach})
RANDOM = frozenset({
    "normal_", "uniform_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_", "bernoulli_",
})  # fmt: skip
CONSTANT = frozenset({"fill_", "zero_"})
_OVERWRITES = RANDOM | CONSTANT | {"copy_", "constant_", "ones_", "zeros_", "kaiming_uniform_"}
"""Functions that fill their first argument and ignore its values: methods of tensors, functions of nn.init and their
replacements by transformers."""


class ValuesGoneError(RuntimeError):
    """Raised if code reads values that were dropped, because this rank does not hold the tensor."""


@dataclass(slots=True, eq=False)
class Seen:
    """The record of one tensor of the model that code works on."""

    name: str
    seen: torch.Tensor
    places: tuple[Place, ...] = ()
    """Places that get its values; none for a tensor that this rank does not hold."""
    kept: bool = False
    """The live tensor keeps its values: the results of the code are dropped."""
    whole: torch.Tensor | None = None
    in_place: bool = False
    """`whole` is no copy: it is the memory of the live tensor, or of a tensor that was made with values."""
    version: int = 0
    written: bool = False
    gone: bool = False
    """It had values, and they are lost."""
    fill: Any = None
    """The values that it is to have, a Fill of shard_fills.py."""

    def targets(self) -> list[torch.Tensor]:
        """Return the live tensors, each once."""
        return list({id(value): value for value in map(tensor_at, self.places)}.values())


class WholeTensors(TorchFunctionMode):
    """A context in which single-device code works on the whole tensors of a model that `watch` was called for.

    `device`: the device of whole tensors; None: that of each live tensor. `building`: empty tensors that the code makes
    have memory only while it works on them. Filling a tensor that keeps its values draws no random numbers.
    Collective if the code reads a sharded tensor: every rank runs the same code.
    """

    def __init__(self, device: torch.device | None = None, *, building: bool = False) -> None:
        super().__init__()
        self.building = building
        self._device = device
        self._seen: dict[int, Seen] = {}
        self._at: dict[tuple[int, str], Seen] = {}
        self._open: list[Seen] = []
        self._watched: list[tuple[nn.Module, str]] = []
        self._warned = False

    def watch(self, model: nn.Module, resolve: Resolve) -> None:
        """Take over a model's tensors; `resolve` decides where the values of each go and whether it keeps its own."""
        with torch._C.DisableTorchFunction():
            for made in [*self._open]:
                self._close(made)
            for fqn, place, value in named_tensors(model):
                places, kept = resolve(fqn, place)
                record = self._seen.get(key_of(value))
                if record is None or not record.name:
                    gone, fill = (record.gone, record.fill) if record is not None else (False, None)
                    record = self._seen[key_of(value)] = Seen(fqn, value, gone=gone, fill=fill)
                    if not value.is_meta and places != (place,):  # made with values, to be copied to `places`
                        record.whole, record.in_place, record.written = value.detach(), True, True
                        self._open.append(record)
                record.places += tuple(p for p in places if p not in record.places)
                record.kept = record.kept or kept
                self._at[id(place[0]), place[1]] = record
        for module in model.modules():
            for kind in ("_parameters", "_buffers"):
                module.__dict__[kind] = _Watched(module.__dict__[kind], module, self)
                self._watched.append((module, kind))

    def written(self) -> set[tuple[int, str]]:
        """Return (id of the module, name) of every place that was given values; after the context."""
        records = (*self._seen.values(), *self._at.values())
        return {(id(module), name) for record in records if record.written for module, name in record.places}

    def assign(self, module: nn.Module, name: str, value: torch.Tensor) -> torch.Tensor:
        """Give the tensor at a place the values of `value`; return the tensor that code finds there from now on."""
        with torch._C.DisableTorchFunction():  # real values, not the illusion
            record = self._at.get((id(module), name))
            if record is None:
                return value
            if (other := self._seen.get(key_of(value))) is not None:
                return self._tie(module, name, record, other)
            if record.kept:
                return record.seen
            return self._store(record, value.full_tensor() if isinstance(value, DTensor) else value.detach())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        for module, attribute in self._watched:
            module.__dict__[attribute] = dict(module.__dict__[attribute])
        self._watched.clear()
        if error is None:
            for record in [*self._open]:
                self._close(record)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.building and func is torch.empty and torch.device(kwargs.get("device") or "cpu").type == "cpu":
            made: torch.Tensor = func(*args, **{**kwargs, "device": "meta"})
            self._seen[key_of(made)] = Seen("", made)
            return made
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        records = {id(value): record for value in given if (record := self._seen.get(key_of(value))) is not None}
        if not records or func in _ABOUT:
            return func(*args, **kwargs)
        into = args[0] if args else kwargs.get("tensor")
        first = records.get(id(into))
        if func in _WHERE and first is not None:
            return func(torch.empty(0, device=self._device_of(first)))
        if func == _SET_DATA and first is not None:
            return self._set_data(first, args[1])
        if func in _LIKE and first is not None:
            blank = torch.empty(first.seen.shape, dtype=first.seen.dtype, device=self._device_of(first))
            return func(blank, *args[1:], **kwargs)
        if func in _SAME and first is not None and first.seen.is_meta:
            return torch.Tensor.detach(args[0])  # identified by its memory: nothing needs values yet
        fresh = func.__name__ in _OVERWRITES and sum(value is into for value in given) == 1
        if fresh and first is not None and first.kept:
            return into
        for record in records.values():
            self._open_whole(record, [*records.values()], fresh=fresh and record is first)

        def whole(value: torch.Tensor) -> Any:
            return records[id(value)].whole if id(value) in records else value

        if func == _GET_DATA:  # changes of a view of `data` would not count in the tensor's version
            func = torch.Tensor.detach
        args, kwargs = tree_map_only(torch.Tensor, whole, (args, kwargs))
        result = func(*args, **kwargs)
        return next((value for value in given if id(value) in records and whole(value) is result), result)

    def _set_data(self, record: Seen, value: torch.Tensor) -> None:
        if isinstance(record.seen, DTensor):
            raise RuntimeError(  # noqa: TRY004 - the type is right, the statement is not
                f"{record.name}.data = ... on a sharded tensor would be lost: write self.<name> = nn.Parameter(value), "
                "or fill it in place, such as self.<name>.data.copy_(value)"
            )
        if not record.kept:
            self._store(record, value.detach())

    def _tie(self, module: nn.Module, name: str, record: Seen, other: Seen) -> torch.Tensor:
        """Let a place share a second tensor of the model, as `self.a = self.b` does."""
        if record is not other:
            self._open_whole(other, [record, other], fresh=False)
            assert other.whole is not None
            if not record.kept:
                self._store(record, other.whole)
            if (module, name) in record.places:  # the live model itself
                other.places += ((module, name),)
                record.places = tuple(place for place in record.places if place != (module, name))
            self._at[id(module), name] = other
        return other.seen

    def _store(self, record: Seen, value: torch.Tensor) -> torch.Tensor:
        """Copy a whole value to the live tensors, in their placement."""
        self._forget(record)
        record.written = True
        if not record.places:  # a tensor of other ranks; code may still read it
            return record.seen
        is_parameter = isinstance(record.seen, nn.Parameter)
        for target in record.targets():
            if target.shape != value.shape and (is_parameter or isinstance(target, DTensor)):
                raise ValueError(
                    f"{record.name}: initialization assigns shape {list(value.shape)} where the model has shape "
                    f"{list(target.shape)}"
                )
            if isinstance(target, DTensor) and isinstance(record.seen, DTensor):
                self._warn_of_waste(record, target)
            alike = (target.shape, target.dtype) == (value.shape, value.dtype)
            if alike or is_parameter or isinstance(target, DTensor):
                fill(target, value)
            else:
                moved = value.to(target.device)
                for module, name in [place for place in record.places if tensor_at(place) is target]:
                    dict.__setitem__(module.__dict__["_buffers"], name, moved)
                if target is record.seen:
                    record.seen = moved
                    self._seen[key_of(moved)] = record
        return record.seen

    def _warn_of_waste(self, record: Seen, target: DTensor) -> None:
        if not self._warned and any(not isinstance(p, Replicate) for p in target.placements):
            self._warned = True
            warnings.warn(
                f"initialization assigns a whole tensor to {record.name}, which is sharded ({target.placements}): "
                "every rank makes all of it to keep its part. Fill it in place instead, such as "
                "nn.init.normal_(self.weight)",
                stacklevel=5,
            )

    def _device_of(self, record: Seen) -> torch.device:
        if self._device is not None:
            return self._device
        targets = record.targets()
        return targets[0].device if targets else torch.device("cpu")

    def _open_whole(self, record: Seen, in_use: Sequence[Seen], *, fresh: bool) -> None:
        """Give a record its whole tensor and close others that nothing refers to. `fresh`: its values do not matter."""
        if record.whole is not None:
            return
        for other in [*self._open]:
            if other not in in_use and not other.in_place and not _has_views(other):
                self._close(other)
        targets = record.targets()
        device, dtype = self._device_of(record), record.seen.dtype
        stored = len(targets) > 0 and (record.kept or record.written or record.seen is targets[0])
        if record.gone and not fresh:
            raise ValuesGoneError(f"{record.name or 'a temporary tensor'}: its values are read after others were made")
        record.in_place = False
        if len(targets) == 1 and not record.kept and _is_plain(targets[0], device, record.seen):
            record.whole, record.in_place = targets[0].detach(), True
        elif fresh or not stored:
            record.whole = torch.empty(record.seen.shape, device=device, dtype=dtype)
        else:
            target = targets[0]
            values = target.full_tensor() if isinstance(target, DTensor) else target
            record.whole = values.detach().to(device, dtype, copy=True)
        record.version = record.whole._version
        self._open.append(record)

    def _close(self, record: Seen) -> None:
        """Copy a whole tensor's values to the live tensors, and drop it."""
        assert record.whole is not None
        changed = record.whole._version != record.version
        record.written = record.written or changed
        record.gone = record.written and not record.places
        whole = record.whole
        self._forget(record)
        if record.kept:
            return
        if record.in_place and not record.seen.is_meta and all(t is not record.seen for t in record.targets()):
            self._store(record, whole)
        elif changed and not record.in_place:
            for target in record.targets():
                fill(target, whole)

    def _forget(self, record: Seen) -> None:
        record.whole = None
        if record in self._open:
            self._open.remove(record)


class _Watched(dict[str, Any]):
    """A module's parameters or buffers; assignments to them go through the illusion."""

    def __init__(self, content: dict[str, Any], module: nn.Module, mode: WholeTensors) -> None:
        super().__init__(content)
        self.module = module
        self.mode = mode

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, self.mode.assign(self.module, name, value) if value is not None else value)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Place, torch.Tensor]]:
    """Yield (name, place, tensor) of every parameter and buffer, aliases and shared modules included."""
    for prefix, module in named_modules(model):
        for own in (module._parameters, module._buffers):
            for name, value in [*own.items()]:
                if value is not None:
                    yield prefix + name, (module, name), value


def tensor_at(place: Place) -> torch.Tensor:
    """Return the parameter or buffer at a place."""
    module, name = place
    parameter = module._parameters.get(name)
    value = module._buffers[name] if parameter is None else parameter
    assert value is not None
    return value


def key_of(value: torch.Tensor) -> int:
    """Return a key of a tensor: its identity, or on meta its memory, which a Parameter shares with its source."""
    if value.is_meta and not isinstance(value, DTensor):
        return int(value.untyped_storage()._cdata)
    return id(value)


def _has_views(record: Seen) -> bool:
    """Return whether code still holds a view of the whole tensor, through which it may change."""
    assert record.whole is not None
    storage = record.whole.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)  # `whole` and `storage` are two


def _is_plain(target: torch.Tensor, device: torch.device, seen: torch.Tensor) -> bool:
    """Return whether a live tensor can be the whole: a plain tensor of this device, with dtype and shape of `seen`."""
    alike = (target.device, target.dtype, target.shape) == (device, seen.dtype, seen.shape)
    return alike and type(target.detach()) is torch.Tensor
