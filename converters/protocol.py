"""The contract of a model converter: what it does to a model, and what of that a checkpoint may see.

Owns the four methods every converter answers, and their defaults. Knows no particular converter and no files.
The shape of the protocol is torchtitan's (`protocols/model_converter.py` and the review of its pull request 2898).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Literal

from torch import nn

from titan_ckpt.quantising import WeightQuantiser
from titan_ckpt.types import StateDict, StateDictAdapter

Stage = Literal["replace", "adapt"]
"""replace = exchanges modules for others of the same parameters (quantisation); comes first, because it would drop
what another converter has attached. adapt = attaches parameters to modules that are there (LoRA); comes last."""


class ModelConverter(ABC):
    """Changes a model in place before it is sharded, and tells checkpoints which keys are its own.

    Satisfies titan_ckpt.types.ModelHooks. The laws that every converter keeps, which `ConverterTests` proves:
    it adds keys or leaves them alone, never renames or drops one; it claims exactly what it added, by name;
    its transforms change neither their input nor the live model.
    """

    stage: ClassVar[Stage]

    def __init__(self, config: Any) -> None:
        """Keep the settings: a frozen dataclass with a field `kind`, whose values JSON can hold."""
        self.config = config

    @abstractmethod
    def convert(self, model: nn.Module) -> None:
        """Change the whole model in place; called once, before it is cut into stages and sharded, perhaps on meta.

        Raises: ConverterError listing everything that does not fit the model or this machine.
        """

    @property
    def kind(self) -> str:
        """The name in TOML and in manifests."""
        kind: str = self.config.kind
        return kind

    def describe(self) -> list[dict[str, Any]]:
        """Return one JSON object, for manifests: `kind` and every setting; the same on all ranks, at all times."""
        return [{name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self.config).items()}]

    def key_filter(self, fqn: str) -> bool:
        """Say whether this converter added the key; decided by name alone, from what `convert` added."""
        return False

    def state_dict_transform(self, state_dict: StateDict, last_step: bool) -> StateDict:
        """Return a new dict of plain tensors; see ModelHooks. The default is for converters that need no change."""
        return dict(state_dict)

    def state_dict_adapter(self) -> StateDictAdapter | None:
        """Return how the added keys are named in files of other tools, or None where there is no such form."""
        return None

    def weight_quantiser(self) -> WeightQuantiser | None:
        """Return how an export with `quantised = true` stores this converter's weights; None where it has no part."""
        return None

    def initialize(  # noqa: B027 - most converters add nothing
        self, model_parts: Sequence[nn.Module], fqns: Collection[str] | None = None
    ) -> None:
        """Give the added tensors among `fqns` (None: all) their initial values; the base weights are in place by now.

        Called by the load, once everything is read, with what no source provided (LoadReport.initialised).
        """

    def post_optimizer_hook(self, model_parts: Sequence[nn.Module]) -> None:  # noqa: B027 - as above
        """Run after every optimizer step, on every rank; may be collective."""
