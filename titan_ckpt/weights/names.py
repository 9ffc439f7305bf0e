"""Names of a model's tensors: in its modules, without the segments that wrappers add, and in a native or DCP folder.

Owns the walk over modules and which of them have code of their own that saves or loads their state (own_state.py asks
that code); and which stored tensor is which of the model, if a folder nests the model, has torchtitan's names or a tied
tensor twice. Reads no value but those of tensors that a folder has twice.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from titan_ckpt.errors import LoadMismatchError, listed
from titan_ckpt.geometry.chunks import Block, TensorInfo, blocks_of
from titan_ckpt.geometry.keymap import selected
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.types import StateDict
from titan_ckpt.weights.live_memory import is_same

EXTRA_STATE = "_extra_state"
"""Last segment of the name of a module's extra state. Source: torch.nn.modules.module."""
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes that every module has: their content is the model's state."""
WRAPPER_SEGMENTS = frozenset({"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"})

LOADING = ("load_state_dict", "_load_from_state_dict", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
SAVING = ("state_dict", "_save_to_state_dict", "_state_dict_hooks")
_HARMLESS = (
    "torch.nn.modules.",
    "torch.distributed.fsdp._fully_shard.",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
)
"""Modules of torch whose hooks and methods make no values and give no names that `clean_fqn` would not give."""
MODEL = "model."
"""Prefix of a model tensor's name."""
OTHER_COMPONENTS = ("optimizer.", "optim.", "lr_scheduler", "dataloader", "train_state", "states.")
"""Prefixes of the names that are not the model's, in checkpoints that keep the model at the top level."""


def clean_fqn(name: str) -> str:
    """Drop the segments that activation checkpointing, torch.compile and FSDP put into parameter names."""
    if "_wrapped_module" not in name and "_orig_mod" not in name:  # the usual case, and a hot path
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPER_SEGMENTS)


def prefix_in(name: str, names: Collection[str]) -> str | None:
    """Return the name or the longest dotted prefix of it that is among others; None without one."""
    while name not in names:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return name


def class_named(home: str, name: str, value: object) -> Any:
    """Return the class of an object, or a base of it, that has this name in this module; None without one.

    So an object of a library is known without an import of it.
    """
    return next((kind for kind in type(value).__mro__ if (kind.__module__, kind.__name__) == (home, name)), None)


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is torch.compile's wrapper; a module of the user's own may be called as what is in it."""
    return class_named("torch._dynamo.eval_frame", "OptimizedModule", module) is not None


def named_modules(part: nn.Module, leaves: Collection[int] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Yield (clean prefix of its tensors' names, module) in `nn.Module.named_modules`' order, aliases included.

    `leaves`: ids of modules whose children are left out; the caller may add the one that it has just got.
    """
    todo = [("", part)]
    while todo:
        prefix, module = todo.pop()
        yield prefix, module
        if module._modules and id(module) not in leaves:  # noqa: SLF001 - most have none, and this is a hot path
            children = reversed(module._modules.items())  # noqa: SLF001 - named_children leaves aliases out
            own = WRAPPER_SEGMENTS
            todo += [(prefix if n in own else f"{prefix}{n}.", child) for n, child in children if child is not None]


def hidden_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the module's own buffers that no state dict holds."""
    hidden = module._non_persistent_buffers_set  # noqa: SLF001 - torch has no public name for what persists
    return {name: value for name, value in module.named_buffers(recurse=False) if name in hidden} if hidden else {}


def read_state(part: nn.Module) -> Iterator[tuple[str, torch.Tensor | nn.Module]]:
    """Yield (fqn, live tensor), aliases included, and (prefix, module) of each subtree that makes its own state.

    The order is that of `part.state_dict()`, which would hold the same values. Collective if a hook is.
    """
    whole: set[int] = set()
    for prefix, module in named_modules(part, whole):
        if has_code(module):
            whole.add(id(module))
            yield prefix, module
            continue
        for hook in module._state_dict_pre_hooks.values():  # noqa: SLF001 - as nn.Module.state_dict does
            hook(module, prefix, False)
        for fqn, value in own_tensors(prefix, module):
            yield fqn, value if is_lazy(value) else value.detach()


def own_tensors(prefix: str, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return (fqn, tensor) of a module's own parameters and persistent buffers, without its children's."""
    own: list[tuple[str, torch.Tensor]]
    own = [(prefix + n, v) for n, v in module._parameters.items() if v is not None]  # noqa: SLF001
    if not module._buffers:  # noqa: SLF001 - the usual case, and a hot path
        return own
    hidden = module._non_persistent_buffers_set  # noqa: SLF001 - torch has no public name for what persists
    kept = ((prefix + n, v) for n, v in module._buffers.items() if v is not None and n not in hidden)  # noqa: SLF001
    return [*own, *kept]


def parts_of(root: Any) -> Iterator[Any]:
    """Yield an object; of a module also every module in it, and their parameters and buffers."""
    yield root
    if isinstance(root, nn.Module):
        for module in root.modules():  # one walk: parameters() and buffers() are a walk each
            tensors = (*module._parameters.values(), *module._buffers.values())  # noqa: SLF001 - the names cost time
            yield from (module, *(value for value in tensors if value is not None))


def has_code(module: nn.Module, names: tuple[str, ...] = SAVING + LOADING) -> bool:
    """Return whether a module has code of its own that saves or loads it, which `nn.Module` would do otherwise.

    `names`: methods that it may override, and the dicts of its hooks.
    """
    own = module.__dict__
    kind: Any = type(module)  # mypy takes a class of modules for one that cannot be hashed
    codes = [own[name] for name in names if own.get(name)]
    return overrides(kind, names) or any(callable(c) or any(map(_is_foreign, c.values())) for c in codes)


@functools.lru_cache(maxsize=4096)  # a hot path, and modules by the ten thousand have few classes
def overrides(kind: type, names: tuple[str, ...]) -> bool:
    """Return whether a class of modules has methods of its own of these names."""
    return any(_is_foreign(getattr(kind, name)) for name in names if hasattr(nn.Module, name))


def _is_foreign(code: Any) -> bool:
    return not str(getattr(code, "__module__", "")).startswith(_HARMLESS)


def extra_state_modules(part: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (fqn of its extra state, module) once for each module that overrides `get_extra_state`."""
    met: set[nn.Module] = set()
    for prefix, module in named_modules(part):
        if type(module).get_extra_state is not nn.Module.get_extra_state and module not in met:
            met.add(module)
            yield prefix + EXTRA_STATE, module


@dataclass(frozen=True, slots=True)
class StoredNames:
    """The tensors of a folder by native name, and the way back to its own names."""

    available: Mapping[str, TensorInfo]
    _prefix: str
    _theirs: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def find(
        cls,
        reader: TensorReader,
        wanted: StateDict,
        theirs: Mapping[str, Sequence[str]],
        tied: Mapping[str, str],
        prefix: str | None,
        ignore: Sequence[str] = (),
    ) -> StoredNames:
        """Find the names of the wanted tensors. Reads the tensors that the folder has twice, this rank's parts of them.

        `theirs`: native name -> torchtitan's names, taken if the folder has more of them. `tied`: alias -> name of the
        same tensor of the model. `prefix`, `ignore`: the prefix, and patterns of unused tensors, that settings name.
        Raises: LoadMismatchError for an ambiguous or unknown prefix, and for tied tensors that differ in the folder.
        """
        names = {*wanted, *(name for names in theirs.values() for name in names)}
        prefix, available = model_tensors(reader, names, prefix)
        theirs = theirs if _count(available, (n[0] for n in theirs.values())) > _count(available, wanted) else {}
        own = {name: fqn for fqn, names in theirs.items() for name in names[:1]}
        repeats = {name: fqn for fqn, names in theirs.items() for name in names[1:]} | dict(tied)
        if ignore:
            repeats = {name: repeats[name] for name in repeats.keys() - selected(repeats, ignore)}
        once = {own.get(k, k): info for k, info in available.items() if k not in repeats or k in wanted}
        found = cls(once, prefix, theirs)
        twice = [(alias, fqn) for alias, fqn in repeats.items() if alias in available and alias not in once]
        live = [pair for pair in twice if pair[1] in wanted]
        differing = [pair for pair in live if not found._is_one(reader, *pair, wanted[pair[1]])]
        if differing and once.keys() >= wanted.keys():
            raise LoadMismatchError(
                f"{reader.path}: {' and '.join(differing[0])} are one tensor in this model and differ there: untie "
                "them, take a checkpoint of a tied model, or name the one that is not used in "
                "checkpoint.initial_load.ignore"
            )
        once |= {alias: available[alias] for alias, _ in differing}  # another model's is listed with all that differs
        return found

    def to_file_names(self, requests: Sequence[Block]) -> list[Block]:
        """Return the requests by the names in the folder."""
        return [Block(chunk, into, self._key(key)) for chunk, into, key in requests]

    def _key(self, name: str) -> str:
        return self._prefix + self._theirs.get(name, (name,))[0]

    def _is_one(self, reader: TensorReader, alias: str, fqn: str, live: torch.Tensor) -> bool:
        """Return whether the folder has the same bits under both names, as far as this rank holds the live tensor."""
        first, second = reader.tensors.get(self._key(fqn)), reader.tensors[self._prefix + alias]
        if first != second or second.shape != tuple(live.shape):
            return False
        for block in blocks_of(live):
            parts = [torch.empty(block.chunk.sizes, dtype=second.dtype) for _ in range(2)]
            keys = (self._key(fqn), self._prefix + alias)
            reader.read([Block(block.chunk, part, key) for key, part in zip(keys, parts, strict=True)])
            if not is_same(*parts):
                return False
        return True


def model_tensors(
    reader: TensorReader, wanted: Collection[str] | None = None, prefix: str | None = None
) -> tuple[str, dict[str, TensorInfo]]:
    """Return the prefix of the model in a native or DCP checkpoint, and its tensors by name without the prefix.

    A DCP checkpoint may nest the model. `prefix` names the place; without it, the place with the most of the `wanted`
    names is taken, and the top level if that has as many; without `wanted`, `model.` if the top level has nothing else.
    Raises: LoadMismatchError for several places with as many of the names, and for a `prefix` that nothing has.
    Source of the names at the top: torchtitan, components/checkpoint.py, which flattens the model there.
    """
    stored = reader.tensors
    if reader.format == "native":
        prefix = MODEL
    elif prefix is None and wanted is not None:
        prefix = _find_prefix(stored, wanted)
    elif prefix is None:
        top = _under(stored, "")
        prefix = MODEL if len(_under(stored, MODEL)) == len(top) else ""
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
        parts = key.split(".")
        names = (".".join(parts[start:]) for start in range(len(parts)))
        found.update(key.removesuffix(name) for name in names if name in wanted)
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


def _count(available: Mapping[str, TensorInfo], names: Iterable[str]) -> int:
    return sum(name in available for name in names)
