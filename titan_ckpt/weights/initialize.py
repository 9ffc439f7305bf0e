"""Construct on meta, materialize, load, and only then initialize what the load did not provide.

Owns the mark of tensors that have no values yet, and how they get them: from the model's own code, with the results
that it has on one device, whatever the sharding. Loads nothing (loading/) and computes no values of its own.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from titan_ckpt.errors import CheckpointError, ConfigError, LoadMismatchError, counted, listed, refuse
from titan_ckpt.geometry.chunks import fill
from titan_ckpt.process import RandomState, generators_kept
from titan_ckpt.weights.names import class_named, clean_fqn, named_modules, own_tensors
from titan_ckpt.weights.shard_fills import ShardFills
from titan_ckpt.weights.single_device import Place, ValuesGoneError, WholeTensors, named_tensors, tensor_at
from titan_ckpt.weights.wrapper import ModelWrapper

logger = logging.getLogger(__name__)
ModelT = TypeVar("ModelT", bound=nn.Module)

_EMPTY = "_titan_ckpt_empty"
"""Attribute of a module: names of its own parameters and buffers that have memory and no values. Marks by name outlive
the replacement of a tensor by a cast, a wrapper or FSDP2."""
_ORIGIN = "_titan_ckpt_origin"
"""Attribute of a constructed model: its _Origin."""
_HF_MARK = "_is_hf_initialized"
"""transformers' own mark of tensors and modules that keep their values. Source: transformers, initialization.py."""
_LISTED = 12
_CPU = torch.device("cpu")


InitialValues = Literal["default", "meta", "device"]
"""Where the values come from that no source provides.

- "default": those that one CPU would give, bit for bit. Skips nothing; every rank makes all values, tensor by tensor.
- "device": the same distributions, drawn on the device, by each rank for its own shards. Skips the values of one CPU.
- "meta": nowhere. Skips initialization: it is an error if a source lacks a tensor that checkpoints hold.
"""
_SKIPS = {
    "default": "as one CPU would; every rank makes all values, tensor by tensor",
    "device": "on the device, in shards: they are not those of one CPU",
}


@dataclass(frozen=True, slots=True)
class NamePattern:
    """Gives the tensors whose whole name matches `names`, a regular expression, their values by `function(tensor)`."""

    names: str
    function: Callable[[torch.Tensor], object]


@dataclass(frozen=True, slots=True)
class _Origin:
    """The construction of a model, by which its values can be made as if on one device."""

    build: Callable[[], nn.Module]
    random: dict[str, Any]
    values: InitialValues
    patterns: Sequence[NamePattern]

    def fill(self, model: nn.Module) -> None:
        """Give a rebuilt model its values."""
        if not self.patterns:
            if (run := _initializer(model)) is not None:
                run()
            return
        parameters = dict(model.named_parameters())
        for fqn, pattern in match_patterns(parameters, self.patterns).items():
            pattern.function(parameters[fqn])
        if callable(reset := getattr(model, "reset_buffers", None)):
            reset()


def construct(
    build: Callable[[], ModelT], values: InitialValues = "default", patterns: Sequence[NamePattern] = ()
) -> ModelT:
    """Build a model on meta: shapes without memory. It gets memory by `materialize` and values by the manager's `load`.

    `values`: where those come from that no source provides. With "default" they are those that `build()` on the CPU and
    the model's `init_weights()` would give now, with the present state of the generators, at any number of ranks.
    `patterns`: fill the parameters instead of `init_weights()`, each by the first pattern that matches its name.
    A model that needs values to be built (it calls `.item()`, say) is built whole on the CPU instead, with a warning;
    with other `values` than "default" it is refused.
    Raises: ConfigError for parameters that no pattern matches, and for patterns that match none.
    """
    origin = _Origin(build, RandomState().state_dict(), values, patterns)
    try:
        with torch.device("meta"):
            model = build()
        if any(value.is_meta for _, _, value in named_tensors(model)):
            match_patterns(dict(model.named_parameters()), patterns)
            model.__dict__[_ORIGIN] = origin
            return model
    except CheckpointError:
        raise
    except Exception as error:  # code may fail for lack of values; a real fault raises again below
        if values != "default":
            cause = f"{values!r} needs a model that can be built on meta, and this one cannot: {error}"
            raise ConfigError([f'model.construct: {cause}. Use "default"']) from error
        logger.warning("the model cannot be built on meta, so every rank builds all of it on the CPU: %s", error)
    RandomState().load_state_dict(origin.random)
    model = build()
    origin.fill(model)
    return model


def match_patterns(parameters: Collection[str], patterns: Sequence[NamePattern]) -> dict[str, NamePattern]:
    """Return the first pattern that matches each name. Raises: ConfigError listing names and patterns without one."""
    matching = {
        fqn: [pattern for pattern in patterns if re.fullmatch(pattern.names, clean_fqn(fqn))]
        for fqn in (parameters if patterns else ())
    }
    bare = [fqn for fqn, own in matching.items() if not own]
    problems = [f"model.initial_values: no pattern matches {listed(bare, ', ', ' ', _LISTED)}"] if bare else []
    problems += [
        f"model.initial_values: {pattern.names!r} matches no parameter; names look like {fqn}"
        for pattern in patterns
        for fqn in [*parameters][:1]
        if not any(pattern is each for own in matching.values() for each in own)
    ]
    refuse(*problems)
    return {fqn: own[0] for fqn, own in matching.items()}


def materialize(model: nn.Module, device: torch.device | str) -> None:
    """Give a model memory on a device, in place. Tensors on meta stay without values, others are moved.

    Call it on each model part, after conversion, cutting into stages and sharding. Tied tensors are tied again.
    """
    tied: dict[int, list[Place]] = {}
    empty: list[Place] = []
    for _, place, value in named_tensors(model):
        tied.setdefault(id(value), []).append(place)
        if value.is_meta:
            empty.append(place)
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    for first, *others in tied.values():
        value = tensor_at(first)
        for module, name in others:
            kind = "_parameters" if isinstance(value, nn.Parameter) else "_buffers"
            module.__dict__[kind][name] = value
    for module, name in empty:
        module.__dict__.setdefault(_EMPTY, set()).add(name)


def empty_tensors(parts: Sequence[nn.Module]) -> list[str]:
    """Return the names of the tensors that have no values yet, aliases included."""
    return [fqn for part in parts for fqn, _ in _empty_places(part)]


def flag_loaded(wrapper: ModelWrapper, fqns: Collection[str]) -> None:
    """Flag tensors that have their values now, so that nothing initializes them; once per load, not once per source."""
    names = set(fqns)
    for part in wrapper.parts:
        empty = [*_empty_places(part)]
        tensors = named_tensors(part) if empty else ()
        filled = {id(value) for fqn, _, value in tensors if fqn in names}
        for _, place in empty:
            if id(tensor_at(place)) in filled:
                _unmark(place)


@torch.no_grad()
def initialize_missing(wrapper: ModelWrapper, owned: Collection[str] = ()) -> None:
    """Give values to every tensor that has none, and change no other; converter-owned ones last. Follows every load.

    `owned`: converter-owned tensors that no source provided; they are derived from the base even if they have values.
    Collective over the ranks of each part.
    Raises: LoadMismatchError naming tensors that nothing gives values to.
    """
    for part in wrapper.parts:
        own = [(fqn, place) for fqn, place in _empty_places(part) if not wrapper.owns(fqn)]
        origin: _Origin | None = part.__dict__.pop(_ORIGIN, None)
        if not own:
            continue
        kept = {fqn for prefix, module in named_modules(part) for fqn, _ in own_tensors(prefix, module)}
        persistent = any(fqn in kept for fqn, _ in own)
        values = origin.values if origin is not None and persistent else "default"
        if values == "meta":
            lacking = [fqn for fqn, _ in own if fqn in kept]
            raise LoadMismatchError(
                f"{counted(len(lacking), 'tensor was', 'tensors were')} not loaded: "
                f"{listed(lacking, ', ', ' ', _LISTED)}. The model was constructed for a load "
                '(model.construct = "meta"), which skips initial values: name a source that has them in '
                '[[checkpoint.initial_load]], or use "default" or "device"'
            )
        how = f" ({_SKIPS[values]})" if persistent else ""
        names = listed([fqn for fqn, _ in own], ", ", " ", 3)
        logger.info("initializing what is not in the checkpoint: %s%s", names, how)
        if origin is not None and persistent:
            _replay(part, origin, own)
        else:
            _run_in_place(part, own, only_buffers=not persistent)
        if origin is not None and (left := [(fqn, place) for fqn, place in own if _is_empty(place)]):
            _copy_from_rebuilt(origin, left)
    if bare := [fqn for fqn in empty_tensors(wrapper.parts) if not wrapper.owns(fqn)]:
        raise LoadMismatchError(
            f"{counted(len(bare), 'tensor has', 'tensors have')} no values: nothing was loaded into them, and no "
            f"code of the model initializes them: {listed(bare, ', ', ' ', _LISTED)}. Give the model init_weights() "
            "or reset_buffers(), or build it by titan_ckpt.weights.initialize.construct"
        )
    if wrapper.converter is not None and (due := {*empty_tensors(wrapper.parts), *filter(wrapper.owns, owned)}):
        wrapper.converter.initialize(wrapper.parts, due)
        flag_loaded(wrapper, due)


@contextmanager
def single_device(model: nn.Module) -> Iterator[None]:
    """Run code that was written for one device on a sharded model: `with single_device(model): model.init_weights()`.

    In-place fills, `self.buffer = value` and `self.weight = nn.Parameter(...)` work on whole tensors, one at a time,
    and every rank keeps its part; random fills have the values they have on one device. Collective; all ranks run the
    same code from the same state of the generators. Assigning to a sharded parameter warns once.
    Raises: RuntimeError for `sharded.data = value`, which would be lost.
    """
    with torch.no_grad(), WholeTensors() as mode:
        mode.watch(model, lambda fqn, place: ((place,), False))
        yield
    for module in model.modules():
        module.__dict__.pop(_EMPTY, None)


def _initializer(model: nn.Module) -> Callable[[], object] | None:
    """Return the model's function that fills all of its parameters; None if its constructor, or nothing, does it."""
    own: Any = getattr(type(model), "init_weights", None)
    base = _pretrained_class(model)
    return None if own is None or (base is not None and own is base.init_weights) else partial(own, model)


def _replay(part: nn.Module, origin: _Origin, own: Sequence[tuple[str, Place]]) -> None:
    """Build the model again from the same generators, as on one device, and keep this rank's part of its tensors.

    Takes memory for one tensor at a time, and does not fill tensors that only the constructor fills; with the values
    of "device" it takes memory for one tile, and the constructor's fills count.
    """
    places: dict[str, list[Place]] = {}
    for fqn, place in own:
        places.setdefault(fqn, []).append(place)
    in_shards = origin.values == "device"
    if not in_shards and not origin.patterns and _pretrained_class(part) is None and _initializer(part) is None:
        return
    device = tensor_at(own[0][1]).device
    with generators_kept(origin.random), ShardFills(device) if in_shards else WholeTensors(_CPU, building=True) as mode:
        try:
            again = origin.build()
            mode.building = False
            mode.watch(again, lambda fqn, _: (tuple(places.get(fqn, ())), False))
            origin.fill(again)
        except ValuesGoneError as error:
            logger.debug("%s", error)
            return
    _unmark_written(mode, own)


def _run_in_place(part: nn.Module, own: Sequence[tuple[str, Place]], *, only_buffers: bool) -> None:
    """Run the part's own initialization; tensors that have values keep them, whatever that code does."""
    empty = {(id(module), name) for _, (module, name) in own}
    with WholeTensors() as mode:
        mode.watch(part, lambda _, place: ((place,), (id(place[0]), place[1]) not in empty))
        whole_model = getattr(part, "reset_buffers", None) if only_buffers else _initializer(part)
        if whole_model is not None:
            whole_model()
        elif _pretrained_class(part) is not None:
            _initialize_pretrained(part, empty)
        else:
            _reset_modules(part)
    _unmark_written(mode, own)


def _initialize_pretrained(part: Any, empty: set[tuple[int, str]]) -> None:
    """Let transformers fill the empty tensors; it skips modules and tensors that carry its mark."""
    marked: list[Any] = []
    for module in part.modules():
        own = [*module._parameters.items(), *module._buffers.items()]
        has = [value for name, value in own if value is not None and (id(module), name) not in empty]
        marked += has if len(has) < len(own) else [*has, module]
    before = [(thing, thing.__dict__.get(_HF_MARK)) for thing in [*part.modules(), *marked]]
    try:
        for module in part.modules():
            module.__dict__.pop(_HF_MARK, None)
        for thing in marked:
            thing.__dict__[_HF_MARK] = True
        part.initialize_weights()
    finally:
        for thing, mark in before:
            thing.__dict__.pop(_HF_MARK, None)
            if mark is not None:
                thing.__dict__[_HF_MARK] = mark


def _reset_modules(part: nn.Module) -> None:
    """Reset modules with empty tensors one by one, if a part, such as a pipeline stage, cannot initialize itself."""
    for module in [*part.modules()]:
        names = module.__dict__.get(_EMPTY)
        if not names:
            continue
        buffers = all(name in module._buffers for name in names)
        for method in ("reset_buffers", "reset_parameters", "reset_running_stats"):
            if (method != "reset_parameters" or not buffers) and callable(reset := getattr(module, method, None)):
                reset()
                break
        else:
            if buffers and hasattr(module, "original_inv_freq") and hasattr(module, "config"):
                from transformers import PreTrainedModel

                fill_buffers: Any = PreTrainedModel._init_weights  # fills a rotary module's frequencies
                fill_buffers(SimpleNamespace(config=module.config), module)


def _copy_from_rebuilt(origin: _Origin, left: Sequence[tuple[str, Place]]) -> None:
    """Copy the values that only the constructor fills from the model built whole on the CPU."""
    logger.warning(
        "initialize: only the constructor gives values to %s, so every rank builds the whole model once. An "
        "init_weights() that fills them in place takes one tensor's memory",
        listed([fqn for fqn, _ in left], ", ", " ", _LISTED),
    )
    with generators_kept(origin.random):
        again = origin.build()
        origin.fill(again)
    values = {fqn: value for fqn, _, value in named_tensors(again)}
    for fqn, place in left:
        if fqn in values:
            fill(tensor_at(place), values[fqn].detach())
            _unmark(place)


_pretrained_class = partial(class_named, "transformers.modeling_utils", "PreTrainedModel")
"""Returns transformers' base class if a model derives from it."""


def _empty_places(part: nn.Module) -> Iterator[tuple[str, Place]]:
    """Yield (fqn, place) as `named_tensors` does; only of modules with a mark, because most loads meet none."""
    for prefix, module in named_modules(part):
        if module.__dict__.get(_EMPTY):
            names = [name for own in (module._parameters, module._buffers) for name, v in own.items() if v is not None]
            yield from ((prefix + name, (module, name)) for name in names if _is_empty((module, name)))


def _is_empty(place: Place) -> bool:
    return place[1] in place[0].__dict__.get(_EMPTY, ())


def _unmark(place: Place) -> None:
    place[0].__dict__.get(_EMPTY, set()).discard(place[1])


def _unmark_written(mode: WholeTensors, own: Sequence[tuple[str, Place]]) -> None:
    written = mode.written()
    for _, place in own:
        if (id(place[0]), place[1]) in written:
            _unmark(place)
