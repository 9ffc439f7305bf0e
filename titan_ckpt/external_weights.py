"""Weights that come from outside: the event in which a handler fills the model, and the proof that it did.

Owns which tensors were filled. Where the weights come from, a parameter server or a shared folder, is the handler's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from titan_ckpt.errors import LoadMismatchError
from titan_ckpt.tensors import fill

_LISTED = 12


@dataclass(frozen=True, slots=True)
class ExternalLoad:
    """The point of a load at which every persistent tensor of the model is to be given its values.

    The handler runs on every rank, before anything is initialised and before training state is attached.
    """

    step: int
    """The step that is resumed; 0 for a new run."""
    tensors: Mapping[str, torch.Tensor]
    """Live tensors by name; what is sharded is a DTensor."""
    filled: set[str] = field(default_factory=set)

    def fill(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copy whole tensors into the model, of which each rank keeps its part, and mark them; dtypes may differ.

        Raises: LoadMismatchError listing names that the model has not, and other shapes; nothing is copied then.
        """
        problems = [f"{name}: the model has no such tensor" for name in values if name not in self.tensors]
        problems += [
            f"{name}: expected shape {list(self.tensors[name].shape)}, found {list(value.shape)}"
            for name, value in values.items()
            if name in self.tensors and self.tensors[name].shape != value.shape
        ]
        if problems:
            raise LoadMismatchError(_listed("weights from outside do not fit the model", problems))
        for name, value in values.items():
            fill(self.tensors[name], value)
        self.mark(values)

    def mark(self, names: Iterable[str]) -> None:
        """Note that these tensors have their values: the handler has written into `tensors` itself.

        Raises: LoadMismatchError for names that the model has not.
        """
        marked = set(names)
        if unknown := sorted(marked - self.tensors.keys()):
            raise LoadMismatchError(_listed("the handler marks tensors that the model does not have", unknown))
        self.filled.update(marked)

    def verify(self, may_lack: Collection[str]) -> None:
        """Make sure that everything was filled. Raises: LoadMismatchError listing what was not."""
        if lacking := [name for name in self.tensors if name not in self.filled and name not in may_lack]:
            raise LoadMismatchError(
                _listed(
                    f"weights from outside: {len(lacking)} of {len(self.tensors)} tensors were not filled; nothing was "
                    "initialised in their place. Fill them in the handler (fill), or mark what it has written (mark)",
                    lacking,
                )
            )


ExternalWeights = Callable[[ExternalLoad], None]
"""Fills and marks every tensor of the event. What it raises ends the load, on all ranks."""


def _listed(what: str, lines: list[str]) -> str:
    more = [f"and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return what + "\n  " + "\n  ".join([*lines[:_LISTED], *more])
