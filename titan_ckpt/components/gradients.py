"""Gradients that no step of their optimizer has used: no checkpoint holds them, and a resumed run would lose them.

Owns the mark on a gradient that a step has used, which is the version that it had then: a new gradient has no mark, and
one that backward() has added to has another version.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from titan_ckpt.components.optimizer_content import innermost, parameters_of
from titan_ckpt.errors import SaveError, counted
from titan_ckpt.geometry.chunks import local_tensor

logger = logging.getLogger(__name__)

_USED = "_titan_ckpt_version_at_step"


@dataclass(frozen=True, slots=True)
class Unused:
    """The gradients that no step had used at one moment."""

    parameters: Sequence[nn.Parameter] = ()
    everywhere: bool = False
    """Whether no optimizer had used all of its gradients; one may get gradients that it clears, as a GAN's do."""
    largest: torch.Tensor | None = None
    """Their largest value, on the device; of those that zero_grad(set_to_none=False) has cleared it is 0."""
    unreduced: bool = False
    """Whether FSDP2 has not reduced some of them, which no optimizer and no zero_grad() sees."""

    @property
    def count(self) -> bool:
        """Return whether they would change weights: a GradScaler leaves a step out for those that are not finite."""
        return self.largest is not None and 0.0 < float(self.largest) < math.inf


class Gradients:
    """Watches the steps of optimizers, and says what they have not used."""

    def __init__(self, optimizers: Sequence[Any], modules: Sequence[nn.Module] = ()) -> None:
        """Gradients that are there now count as used. An optimizer without hooks is not watched.

        `modules`: all that are trained; FSDP2's keep gradients to themselves until they reduce them.
        """
        inner = [innermost(optimizer) for optimizer in optimizers]
        self._optimizers = [optimizer for optimizer in inner if hasattr(optimizer, "_optimizer_step_post_hooks")]
        within = [own for o in self._optimizers for own in vars(o).values() if isinstance(own, Optimizer)]
        # SAM's loop calls methods of its own in place of step(), and these the step() of the optimizer that it holds
        stepping = {id(o): o for o in (*self._optimizers, *within)}.values()
        self.hooks: list[RemovableHandle] = [o.register_step_post_hook(note_used) for o in stepping]
        self._sharded = [module for module in modules if isinstance(module, FSDPModule)]
        self._told = False
        for optimizer in self._optimizers:
            note_used(optimizer)

    def unused(self) -> Unused:
        """Return the gradients that no step has used; waits for no device."""
        of_optimizers = [[p for p in parameters_of(o) if p.grad is not None] for o in self._optimizers]
        unused = [[p for p in parameters if not is_used(p.grad)] for parameters in of_optimizers]
        unreduced = dict(_unreduced(self._sharded))
        if not (every := [p for parameters in unused for p in parameters] + [*unreduced]):
            return Unused()
        everywhere = bool(unreduced) or all(new for has, new in zip(of_optimizers, unused, strict=True) if has)
        values = [v for p in every if (v := _values(unreduced.get(p, p.grad))).numel()]
        return Unused(every, everywhere, nn.utils.get_total_norm(values, math.inf), bool(unreduced))

    def refuse(self, unused: Unused, step: int, names: Mapping[nn.Parameter, str]) -> None:
        """Raises: SaveError if these gradients would be lost; if an optimizer has used its own, warn, once."""
        if not unused.count or (self._told and not unused.everywhere):
            return
        first = next((names[p] for p in unused.parameters if p in names), "a parameter beside the model")
        what = (
            f"{counted(len(unused.parameters), 'gradient')}, such as that of {first}, came after the last step of the "
            "optimizer, and no checkpoint holds gradients"
        )
        if unused.everywhere:
            raise SaveError(
                f"step {step} is not saved: {what}. Save after optimizer.step(), or call optimizer.zero_grad() "
                "first if they are not to count"
            )
        self._told = True
        logger.warning(
            f"step {step}: {what}. That is right if zero_grad() clears them before they are used; otherwise save at a "
            "step of that optimizer"
        )


def note_used(optimizer: Optimizer, *_: Any) -> None:
    """Mark the gradients of an optimizer as used by the step that has ended."""
    _mark(parameters_of(optimizer))


@contextmanager
def still_used(module: nn.Module) -> Iterator[None]:
    """Keep the marks through a block that puts equal gradients in place of a module's, as new buckets of DDP do."""
    used = [p for p in module.parameters() if p.grad is not None and is_used(p.grad)]
    yield
    _mark(used)


def _mark(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            setattr(grad, _USED, _version(grad))


def is_used(grad: Any) -> bool:
    """Return whether a step has used a gradient, and nothing has changed it since."""
    return bool(getattr(grad, _USED, None) == _version(grad))


def _version(grad: Any) -> int:
    """Return a number that each change counts up; FSDP2 changes only the part on this rank, inside of a DTensor."""
    return int(grad._version + local_tensor(grad)._version)  # noqa: SLF001 - torch has no other name for it


def _unreduced(modules: Sequence[FSDPModule]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Yield the gradients that FSDP2 keeps while set_requires_gradient_sync(False) or set_requires_all_reduce(False).

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, post_backward.
    """
    for module in modules:
        state: Any = module._get_fsdp_state()  # noqa: SLF001 - torch has no public name for these
        for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]):  # noqa: SLF001
            partly = group._partial_reduce_output  # noqa: SLF001 - as above
            for parameter in group.fsdp_params:
                whole = getattr(parameter, "_unsharded_param", None)  # absent before the first forward
                for grad in (parameter.unsharded_accumulated_grad, getattr(whole, "grad", None), partly):
                    if grad is not None:
                        yield parameter.sharded_param, grad


def _values(grad: Any) -> torch.Tensor:
    local = local_tensor(grad).detach()
    return local if local.layout is torch.strided else local.coalesce().values()
