"""Weights that come from outside: the event in which a handler fills the model, and the check that it did.

Owns which tensors were filled. The handler knows where the weights come from, such as a parameter server or a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from titan_ckpt.config import CheckpointConfig
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import ConfigError, LoadMismatchError, listed
from titan_ckpt.geometry.chunks import fill
from titan_ckpt.loading.plan import LoadPlan
from titan_ckpt.types import LoadReport
from titan_ckpt.weights.initialize import flag_loaded
from titan_ckpt.weights.wrapper import ModelState, ModelWrapper

_LISTED = 12
_MISSING = (
    'checkpoint.components: "model" is left out, so the weights come from outside, and nothing delivers them: give the '
    "manager external_weights=, a subclass of Trainer a method external_weights, or a callback of the run the event "
    'on_external_load, or add "model"'
)
_UNUSED = (
    "delivers weights, and checkpoint.components holds the model: every weight has one source. Name the components "
    'without "model", or leave the handler out'
)


@dataclass(frozen=True, slots=True)
class ExternalLoad:
    """The point of a load at which a handler must give values to every persistent tensor of the model.

    The handler runs on every rank, before anything is initialized and before training state is attached.
    """

    step: int
    """The step that is resumed; 0 for a new run."""
    tensors: Mapping[str, torch.Tensor]
    """Live tensors by name; sharded ones are DTensors."""
    filled: set[str] = field(default_factory=set)

    def fill(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copy whole tensors into the model and mark them; each rank keeps its part, and dtypes may differ.

        Raises: LoadMismatchError listing names that the model does not have and shapes that differ; nothing is copied
        then.
        """
        problems = [f"{name}: the model has no such tensor" for name in values if name not in self.tensors]
        problems += [
            f"{name}: expected shape {list(self.tensors[name].shape)}, found {list(value.shape)}"
            for name, value in values.items()
            if name in self.tensors and self.tensors[name].shape != value.shape
        ]
        if problems:
            lines = listed(problems, "\n  ", most=_LISTED)
            raise LoadMismatchError(f"weights from outside do not fit the model\n  {lines}")
        for name, value in values.items():
            fill(self.tensors[name], value)
        self.mark(values)

    def mark(self, names: Iterable[str]) -> None:
        """Mark these tensors as filled, after the handler has written into `tensors` itself.

        Raises: LoadMismatchError for names that the model does not have.
        """
        marked = set(names)
        if unknown := sorted(marked - self.tensors.keys()):
            lines = listed(unknown, "\n  ", most=_LISTED)
            raise LoadMismatchError(f"the handler marks tensors that the model does not have\n  {lines}")
        self.filled.update(marked)

    def verify(self, may_lack: Collection[str]) -> None:
        """Check that all tensors except `may_lack` were filled. Raises: LoadMismatchError listing those that lack."""
        if lacking := [name for name in self.tensors if name not in self.filled and name not in may_lack]:
            raise LoadMismatchError(
                f"weights from outside: {len(lacking)} of {len(self.tensors)} tensors were not filled; nothing was "
                "initialized in their place. Fill them in the handler (fill), or mark what it has written (mark)\n  "
                + listed(lacking, "\n  ", most=_LISTED)
            )


ExternalWeights = Callable[[ExternalLoad], None]
"""A handler that fills and marks every tensor of the event. An exception in it ends the load on all ranks."""


def check_handler(config: CheckpointConfig, handlers: Sequence[str]) -> None:
    """Check that a run has a handler if its components leave the model out, and only then. `handlers`: their names.

    Raises: ConfigError.
    """
    if config.external and not handlers:
        raise ConfigError([_MISSING])
    if handlers and not config.external:
        raise ConfigError([f"{', '.join(handlers)} {_UNUSED}"])


def take_from_outside(
    handler: ExternalWeights, load_plan: LoadPlan, model: ModelWrapper, coordinator: Coordinator
) -> LoadReport:
    """Let the handler fill the model. Collective.

    Raises: LoadMismatchError unless it filled all of it; the handler's error.
    """

    def fill_model() -> tuple[ModelState, ExternalLoad, frozenset[str]]:
        state = model.state("full", room=True)
        event = ExternalLoad(load_plan.resume.step if load_plan.resume else 0, state.tensors)
        # in a new run converters may initialize their own tensors, as after any initial load
        may_lack = frozenset() if load_plan.resume else frozenset(filter(model.owns, event.tensors))
        handler(event)
        event.verify(may_lack)
        return state, event, may_lack

    state, event, may_lack = coordinator.together("load-external", fill_model)
    coordinator.together("load-own", lambda: flag_loaded(model, state.give_back(event.filled, {})))
    return LoadReport(tuple(event.filled), initialized=tuple(may_lack - event.filled))
