"""ModelWrapper: the state dict of model parts and their converter, in one of three modes. Knows no files, no steps."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from titan_ckpt.distributed.replicas import digest_of
from titan_ckpt.errors import ConverterError, LoadMismatchError, StateEncodingError, counted, listed
from titan_ckpt.geometry.chunks import Shape, is_made_of_others, local_tensor
from titan_ckpt.types import ModelConverter, StateDict, StateDictMode
from titan_ckpt.weights.live_memory import is_same, with_inner_tensors
from titan_ckpt.weights.names import WRAPPER_SEGMENTS, extra_state_modules, is_compiled, named_modules, read_state
from titan_ckpt.weights.own_state import HookedSubtree, refuse_lossy, takes_shape

_PLAIN = frozenset({torch.Tensor, nn.Parameter})
"""Types of tensors that are never made of others."""


@dataclass(frozen=True, slots=True)
class ModelState:
    """The whole state of a model, as its own code returns it."""

    tensors: StateDict
    """fqn -> live tensor, or a tensor that the model's own code has made."""
    values: dict[str, Any]
    """fqn -> value that is no tensor, beside the extra state of modules."""
    own: Sequence[HookedSubtree]
    """The subtrees that make their own state."""

    @property
    def made(self) -> set[str]:
        """Return the names of all values that are no live memory."""
        return {fqn for own in self.own for fqn in own.made}

    def with_room(self, shapes: Mapping[str, Shape]) -> ModelState:
        """Return the state with new tensors of other shapes for buffers that their modules will load."""
        own = [subtree.with_room(shapes) for subtree in self.own]
        room = {fqn: value for subtree in own for fqn, value in subtree if fqn in shapes}
        return replace(self, tensors=self.tensors | room, own=own)

    def made_of_parameters(self) -> set[str]:
        """Return the names of made values that show parameters: only an optimizer changes them, as it does those."""
        of_parameters = (own for own in self.own if any(isinstance(v, nn.Parameter) for v in own.hidden.values()))
        return {fqn for own in of_parameters for fqn in own.made}

    def give_back(
        self, loaded: Collection[str], values: Mapping[str, Any], made: Collection[str] | None = None
    ) -> list[str]:
        """Hand the loaded tensors and `values` to the code of their subtrees; return the names of what it filled.

        `made`: the values that are no live memory on any rank. Live tensors have their values already; code that runs
        after a load must see them. Collective if a hook is.
        Raises: LoadMismatchError naming each tensor that did not get what was loaded.
        """
        everywhere = self.made if made is None else made
        known = {*loaded, *values}
        chosen = [
            own
            for own in self.own
            if (names := known.intersection(fqn for fqn, _ in own)) and (own.loads or names.intersection(everywhere))
        ]
        refuse_lossy(fault for own in chosen for fault in own.give_back(values))
        return [fqn for own in chosen for fqn in own.hidden]

    def check_whole(self, loaded: Collection[str], empty: Collection[str]) -> None:
        """Check that no parameter without values is made of a loaded part and of one that nothing was loaded into.

        `empty`: the fqns of tensors without values. Raises: LoadMismatchError.
        """
        known, lacking = set(loaded), set(empty)
        for own in self.own:
            parts = [fqn for fqn, value in own.made.items() if isinstance(value, torch.Tensor)]
            absent = [fqn for fqn in parts if fqn not in known]
            if absent and len(absent) < len(parts) and (hidden := lacking.intersection(own.hidden)):
                raise LoadMismatchError(
                    f"{own}: {listed(sorted(hidden), ', ')} would be put together of loaded values and of none: no "
                    f"source holds {listed(absent, ', ')}. Load all of its parts, or initialize all of them"
                )

    @torch.no_grad()
    def prove(self, made: Collection[str]) -> None:
        """Check before training that the model's own code loads what it returns, without any loss.

        `made`: see `give_back`. `self` was read with room, and nothing has changed since. Collective if the model's own
        code is.
        Raises: LoadMismatchError naming each tensor that another load would leave with other values.
        """
        hidden = [(f"{own}: {fqn}", value) for own in self.own for fqn, value in own.hidden.items()]
        before = [local_tensor(value).clone() for _, value in hidden]
        with torch.enable_grad():
            self.give_back(made, {}, made)
        lossy = []
        for (name, value), values in zip(hidden, before, strict=True):
            if not is_same(value, values):
                lossy.append(f"{name} has other values after a load of its own values")
                local_tensor(value).copy_(values)
        refuse_lossy(lossy)


class ModelWrapper:
    """One or more model parts (pipeline stages, or one module) seen as a single state dict.

    Nothing is cached, not even names: every value aliases the live parameter, even if it was replaced or tied since.
    """

    def __init__(self, model_parts: Sequence[nn.Module], converter: ModelConverter | None = None) -> None:
        if isinstance(model_parts, nn.Module):
            raise TypeError(f"model_parts is one {type(model_parts).__name__}: put it in a list, [model]")
        self.parts = [unwrapped(part) for part in model_parts]
        self.converter = converter

    @property
    def tied(self) -> dict[str, str]:
        """Return alias -> the fqn that is saved for it."""
        first: dict[int, str] = {}
        owners = {fqn: first.setdefault(id(value), fqn) for fqn, value in self._live().items()}
        return {fqn: owner for fqn, owner in owners.items() if owner != fqn}

    def state_dict(self, mode: StateDictMode = "full", last_step: bool = False) -> StateDict:
        """Return fqn -> tensor, in the order of the modules; tied aliases appear once, under their first name.

        full: everything persistent. base: without converter-owned keys. export: for other programs, after the
        converters' last-step transforms; its values may be lazy. Collective if a converter's transform is.
        """
        return self.state(mode, last_step=last_step).tensors

    def state(self, mode: StateDictMode = "full", *, last_step: bool = False, room: bool = False) -> ModelState:
        """Return the tensors of `state_dict(mode)`, and the other values that the model's own code returns.

        `room`: tensors made by the model's own code are copies that own their memory, so that a load can read into
        them and `ModelState.give_back` can hand them to that code. Collective if that code or a converter is.
        Raises: StateEncodingError for trained parameters that the model's own code leaves out.
        """
        tensors, values, own = self._read(room=room)
        if self.converter is not None and (last_step or mode == "export"):
            tensors = self._exported(tensors, own, self.converter)
        elif self.converter is not None:
            tensors = self.converter.state_dict_transform(tensors, last_step=False)
        made = {fqn for subtree in own for fqn in subtree.made}
        if odd := [fqn for fqn in made if is_made_of_others(tensors.get(fqn))]:
            raise StateEncodingError(
                f"the model's own state_dict() makes tensors of torchao's kinds, which no load could hand back: "
                f"{listed(odd, ', ')}. Return the weights themselves, or plain tensors",
                odd[0],
            )
        if mode != "export" and {*map(type, tensors.values())} - _PLAIN:
            tensors = with_inner_tensors(tensors)
        if mode == "base":
            tensors = {fqn: value for fqn, value in tensors.items() if not self.owns(fqn)}
        return ModelState(tensors, values, own)

    def owned_state_dict(self) -> StateDict:
        """Return the converter-owned part of `full`, which is the content of an adapter-only checkpoint."""
        if self.converter is None:
            return {}
        return {fqn: value for fqn, value in self.state_dict("full").items() if self.owns(fqn)}

    def owns(self, fqn: str) -> bool:
        """Return whether a converter owns this key."""
        return self.converter is not None and self.converter.key_filter(fqn)

    def trained_base(self) -> list[str]:
        """Return the parameters that are trained and that no converter owns; a save of the owned ones loses them."""
        return [fqn for fqn, value in self.base_parameters().items() if value.requires_grad]

    def base_parameters(self) -> dict[str, nn.Parameter]:
        """Return each parameter that no converter owns, by fqn."""
        return {fqn: value for value, fqn in self.parameter_names().items() if not self.owns(fqn)}

    def base_buffers(self) -> dict[str, str]:
        """Return a digest of each persistent buffer that no converter owns, as this rank holds it, by fqn."""
        own = {fqn: value for fqn, value in self.buffers().items() if not self.owns(fqn)}
        return {fqn: digest_of(value) for fqn, value in own.items() if not is_made_of_others(value)}

    def extra_state(self) -> dict[str, Any]:
        """Return the extra state of modules (`get_extra_state`) by fqn."""
        return {fqn: module.get_extra_state() for fqn, module in self._modules_with_extra_state()}

    def extra_state_names(self) -> list[str]:
        """Return the fqns of `extra_state`, without the state itself."""
        return [fqn for fqn, _ in self._modules_with_extra_state()]

    def load_extra_state(self, extra: dict[str, Any]) -> None:
        """Set the extra state of modules to the result of `extra_state`."""
        for fqn, module in self._modules_with_extra_state():
            if fqn in extra:
                module.set_extra_state(extra[fqn])

    def parameter_names(self) -> dict[nn.Parameter, str]:
        """Return each live parameter's fqn (its first name, when tied)."""
        names: dict[nn.Parameter, str] = {}
        for fqn, value in self._live(("_parameters",)).items():
            names.setdefault(cast("nn.Parameter", value), fqn)
        return names

    def linear_weights(self) -> set[str]:
        """Return the fqns of the weights of linear modules, tied aliases included."""
        modules = (pair for part in self.parts for pair in named_modules(part))
        return {f"{prefix}weight" for prefix, module in modules if isinstance(module, nn.Linear)}

    def buffers(self) -> StateDict:
        """Return the persistent buffers, which a forward pass may change, by fqn, aliases included."""
        return {
            prefix + name: value
            for part in self.parts
            for prefix, module in named_modules(part)
            for name, value in module._buffers.items()  # noqa: SLF001 - torch has no public name for what persists
            if value is not None and name not in module._non_persistent_buffers_set  # noqa: SLF001
        }

    def shaped_by_loading(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return those of these buffers that their own modules' code gives such a shape when it loads them."""
        own = [(prefix, module) for part in self.parts for prefix, module in named_modules(part)]
        pairs = [(prefix + name, module, name) for prefix, module in own for name in module._buffers]  # noqa: SLF001
        return {f: shapes[f] for f, module, name in pairs if f in shapes and takes_shape(module, name, shapes[f])}

    def check_tensors(self) -> None:
        """Check that a checkpoint can hold the model's tensors, and that a load can fill them.

        Raises: StateEncodingError listing those that are sparse, nested, quantized or show one value several times.
        """
        faults = {fqn: fault for fqn, value in self.memory().items() if (fault := _unfit(value)) is not None}
        if faults:
            raise StateEncodingError(
                f"{counted(len(faults), 'tensor')} of the model cannot be saved and loaded: "
                f"{listed([f'{fqn} ({fault})' for fqn, fault in faults.items()])}. Keep them dense and with memory of "
                "their own (to_dense(), contiguous()), register buffers that the model computes with persistent=False, "
                "or keep such state in get_extra_state()",
                next(iter(faults)),
            )

    def memory(self) -> StateDict:
        """Return every parameter and persistent buffer once, by fqn, without the converters' transforms."""
        return {fqn: parameter for parameter, fqn in self.parameter_names().items()} | self.buffers()

    def num_bytes(self, *, owned: bool) -> int:
        """Return the bytes that this rank holds of `memory`; `owned`: of what converters own alone."""
        return sum(local_tensor(v).nbytes for fqn, v in self.memory().items() if not owned or self.owns(fqn))

    def _live(self, kinds: Sequence[str] = ("_parameters", "_buffers")) -> StateDict:
        """Return every parameter and buffer by fqn, aliases included. FSDP2 modules hold their shards afterwards."""
        live: StateDict = {}
        for part in self.parts:
            of_part: StateDict = {}
            for prefix, module in named_modules(part):
                if isinstance(module, FSDPModule):
                    module.reshard()  # after a forward without a backward it holds gathered parameters
                for kind in kinds:
                    for name, value in getattr(module, kind).items():  # named_parameters takes several times as long
                        if value is not None and of_part.setdefault(prefix + name, value) is not value:
                            raise StateEncodingError(
                                f"two tensors of the model are both named {prefix + name!r} without the parts "
                                f"{', '.join(sorted(WRAPPER_SEGMENTS))}, which wrappers of torch put into names: give "
                                "a module of your own another name",
                                prefix + name,
                            )
            if twice := [fqn for fqn in of_part if fqn in live and isinstance(of_part[fqn], nn.Parameter)]:
                raise _held_by_two_parts(twice)
            live |= of_part
        return live

    def _modules_with_extra_state(self) -> Iterator[tuple[str, nn.Module]]:
        return chain.from_iterable(map(extra_state_modules, self.parts))

    def _exported(self, tensors: StateDict, subtrees: Sequence[HookedSubtree], converter: ModelConverter) -> StateDict:
        """Return the tensors after the converters' last-step transforms.

        A parameter that the model's own code stores in another form, and that a converter changes (a fused weight with
        an adapter), is stored by that code from the changed values.
        """
        hidden = {fqn: value.detach() for subtree in subtrees for fqn, value in subtree.hidden.items()}
        exported = converter.state_dict_transform(tensors | hidden, last_step=True)
        changed = {fqn: exported[fqn] for fqn, value in hidden.items() if exported.get(fqn, value) is not value}
        again: StateDict = {}
        for subtree in subtrees:
            own = {fqn: changed[fqn] for fqn in subtree.hidden if fqn in changed}
            again |= subtree.with_values(own).made if own else {}
        kept = {fqn: tensors.get(fqn) if fqn in hidden else value for fqn, value in exported.items()}
        return {fqn: again.get(fqn, value) for fqn, value in kept.items() if value is not None}

    def _read(self, *, room: bool) -> tuple[StateDict, dict[str, Any], list[HookedSubtree]]:
        """Return tensors, other values, and the subtrees that make their own state; a live alias is left out."""
        tensors: StateDict = {}
        values: dict[str, Any] = {}
        subtrees: list[HookedSubtree] = []
        tied = self.tied
        for part in self.parts:
            for name, found in read_state(part):
                if isinstance(found, nn.Module):
                    subtrees.append(subtree := HookedSubtree.take(name, found, room=room))
                    made = subtree.made
                    pairs = [(fqn, value) for fqn, value in subtree if fqn not in tied or fqn in made]
                else:
                    pairs = [] if name in tied else [(name, found)]
                for fqn, value in pairs:
                    if fqn in tensors or fqn in values:
                        raise _held_by_two_parts([fqn])
                    (tensors if isinstance(value, torch.Tensor) else values)[fqn] = value
        if dropped := [f"{fqn} ({subtree})" for subtree in subtrees for fqn in subtree.dropped()]:
            raise StateEncodingError(
                f"the model's own state_dict() leaves out {len(dropped)} trained parameters, so that a resumed run "
                f"would start with other values: {listed(dropped, ', ')}. Keep them in state_dict(), or freeze them",
                dropped[0],
            )
        return tensors, values, subtrees


def _unfit(value: torch.Tensor) -> str | None:
    """Return why a tensor of a model cannot be saved or filled; None if it can, or may be able to later."""
    if is_lazy(value):
        return None
    if value.is_nested or value.layout != torch.strided:
        return "nested" if value.is_nested else str(value.layout)
    if value.is_quantized:
        return str(value.dtype)
    if any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True)):
        return f"expanded to {list(value.shape)}"
    return None


def without_memory(tensors: StateDict) -> list[str]:
    """Return the names of tensors without memory: on meta, or in a lazy module before its first forward."""
    return [fqn for fqn, value in tensors.items() if is_lazy(value) or value.is_meta]


def require_memory(tensors: StateDict) -> None:
    """Raises: StateEncodingError for tensors of a model that hold no values."""
    if names := without_memory(tensors):
        raise StateEncodingError(
            f"no memory yet for {counted(len(names), 'tensor')} of the model, such as {names[0]}: materialize a "
            "model that was built on meta (to_empty), and run a lazy one once, before it is loaded or saved",
            names[0],
        )


def _held_by_two_parts(fqns: Sequence[str]) -> ConverterError:
    return ConverterError(
        f"two model parts both hold {listed([*map(repr, fqns)], ', ', ' ')}: their parameter names must be disjoint, "
        "as those of the stages of one model are. Put the parts into one nn.ModuleDict, and pass that"
    )


def unwrapped(part: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel and torch.compile, applied in any order."""
    while True:
        if isinstance(part, DistributedDataParallel):
            part = part.module
        elif is_compiled(part):
            part = part._orig_mod  # type: ignore[assignment]  # noqa: SLF001 - torch has no public name for it
        else:
            return part
