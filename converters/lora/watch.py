"""The first forward of a converted model is watched for weights that are used past their modules.

An adapter acts when its module is called. A parent that computes with `child.weight` itself (Mamba's dt_proj, fused
kernels) passes the adapter by: the model that trains is not the one that is exported. No module can show this about
itself, so the first forward is observed and stopped with one error, before any optimizer step.
Owns the observation. Changes no result. Does not see what torch.compile runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from titan_ckpt.converters.lora.copies import SomeCopied, TrainedCopy
from titan_ckpt.converters.lora.layers import AdaptedStacks, LoRAEmbedding, LowRankPath
from titan_ckpt.converters.targets import in_lines
from titan_ckpt.errors import ConverterError
from titan_ckpt.models.language_model import tensors_in
from titan_ckpt.weights.names import clean_fqn


class FirstForward:
    """Hooks that watch the first forward of a model and then remove themselves."""

    def __init__(self, model: nn.Module, tied: Collection[str]) -> None:
        """Register the hooks. `tied`: modules whose weights other modules use by design."""
        self._tied = tied
        self._uses: _WeightUses | None = None
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._start),
            model.register_forward_hook(self._finish, always_call=True),
        ]

    def _start(self, model: nn.Module, args: object) -> None:
        compiled = [m for m in model.modules() if m._compiled_call_impl is not None]  # noqa: SLF001 - has no public name
        if self._uses is None and not torch.compiler.is_compiling() and not compiled:
            self._uses = _WeightUses(model, self._tied)
            self._uses.__enter__()  # type: ignore[no-untyped-call]

    def _finish(self, model: nn.Module, args: object, output: object) -> None:
        if self._uses is None:
            return
        uses, self._uses = self._uses, None
        uses.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if output is None:  # the forward failed, so the next one is watched; torch is going through the hooks' own dict
            return
        if lines := [f"{fqn}: used by {user}" for fqn, user in uses.users.items()]:
            raise ConverterError(
                f"LoRA: {len(lines)} adapted weight(s) are used past their modules, and the adapters do nothing there; "
                f"leave them out of target_modules and modules_to_save{in_lines(lines)}"
            )
        for handle in self._handles:
            handle.remove()


class _Base(NamedTuple):
    """A base weight: its fqn, its module, and its name there."""

    fqn: str
    module: nn.Module
    name: str


class _WeightUses(TorchFunctionMode):
    """Notes each base weight that a torch function computes with outside of the weight's own module."""

    def __init__(self, model: nn.Module, tied: Collection[str]) -> None:
        super().__init__()
        self.users: dict[str, str] = {}
        """fqn of a weight -> the class that used it, and the function."""
        self._model = model
        self._bases = list(_bases(model, tied))
        self._known: dict[int, tuple[nn.Parameter, _Base | None]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(True for _ in tensors_in(result)):
            for value in tensors_in([args, kwargs or {}]):
                base = self._base(value) if isinstance(value, nn.Parameter) and value is not result else None
                if base is not None and not any(caller is base.module for caller in _callers()):
                    user = next(map(type, _callers()), type(self._model)).__name__
                    self.users.setdefault(base.fqn, f"{user} ({getattr(func, '__name__', func)})")
        return result

    def _base(self, value: nn.Parameter) -> _Base | None:
        """Return which base weight this is. It is asked of the modules, because FSDP2 exchanges their parameters."""
        if id(value) not in self._known:
            owners = (base for base in self._bases if getattr(base.module, base.name) is value)
            self._known[id(value)] = (value, next(owners, None))
        return self._known[id(value)][1]


def _bases(model: nn.Module, tied: Collection[str]) -> Iterator[_Base]:
    """Yield the frozen weights beside which adapters and trained copies stand."""
    for name, module in model.named_modules():
        fqn = clean_fqn(name)
        if isinstance(module, SomeCopied):
            copies = module.get_submodule("trained").named_parameters() if hasattr(module, "trained") else ()
            names = {own for own, _ in copies} | ({"weight"} if module.copied_rows else set())
            yield from (_Base(f"{fqn}.{own}", module, own) for own in names if own != "weight" or fqn not in tied)
        if isinstance(module, AdaptedStacks):
            yield from (_Base(f"{fqn}.{own}", module, own) for own in module.adapters)
        elif isinstance(module, TrainedCopy) and fqn not in tied:
            yield from (_Base(f"{fqn}.{own}", module, own) for own, _ in module.named_parameters(recurse=False))
        elif isinstance(module, LowRankPath | LoRAEmbedding) and fqn not in tied:
            yield _Base(f"{fqn}.weight", module, "weight")


def _callers() -> Iterator[nn.Module]:
    """Yield the modules whose methods are running, the innermost first."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, nn.Module):
            yield caller
        frame = frame.f_back
