"""The contract of a model converter: how it changes a model, and how checkpoints see the result.

Owns the methods of a converter and their defaults. Knows no particular converter and no files.
Source: torchtitan, `protocols/model_converter.py` and the review of its pull request 2898.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Literal

from torch import nn

from titan_ckpt.geometry.chunks import TensorInfo
from titan_ckpt.geometry.keymap import KeyMap
from titan_ckpt.types import StateDict, StateDictAdapter
from titan_ckpt.weights.low_rank import StoredUpdates
from titan_ckpt.weights.quantize import WeightQuantizer

Stage = Literal["replace", "adapt"]
"""replace: replaces modules by others with the same parameters (quantization). Such converters come first, because a
replacement drops what an earlier converter attached. adapt: attaches parameters to existing modules (LoRA)."""


class ModelConverter(ABC):
    """Changes a model in place before it is sharded, and tells checkpoints which keys it added.

    Satisfies titan_ckpt.types.ModelHooks. Every converter keeps these laws, which `ConverterTests` checks: it may add
    keys but never renames or drops one; it claims exactly the keys that it added, by name; its transforms change
    neither their input nor the live model.
    """

    stage: ClassVar[Stage]
    config_class: ClassVar[type[Any]]
    """The dataclass of the settings, so that a [[converters]] table of TOML can describe the converter."""

    def __init__(self, config: Any) -> None:
        """Keep the settings: a frozen dataclass with a field `kind` and values that JSON can hold."""
        self.config = config

    @abstractmethod
    def convert(self, model: nn.Module) -> None:
        """Change the whole model in place; called once, before pipeline stages and sharding, possibly on meta.

        Raises: ConverterError listing everything that does not fit the model or this machine.
        """

    @property
    def kind(self) -> str:
        """Return the converter's name in TOML and in manifests."""
        kind: str = self.config.kind
        return kind

    def describe(self) -> list[dict[str, Any]]:
        """Return one JSON object for manifests: `kind` and every setting; constant, and equal on all ranks."""
        return [{name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self.config).items()}]

    def key_filter(self, fqn: str) -> bool:
        """Return whether `convert` added the key; decided by its whole name alone."""
        return False

    def state_dict_transform(self, state_dict: StateDict, last_step: bool) -> StateDict:
        """Return a new dict of plain tensors; see ModelHooks. The default changes nothing."""
        return dict(state_dict)

    def state_dict_adapter(self) -> StateDictAdapter | None:
        """Return how other tools' files name the added keys, or None if no other tool has a form for them."""
        return None

    @classmethod
    def updates(
        cls,
        description: Mapping[str, Any],
        tensors: Mapping[str, TensorInfo],
        modules: Mapping[str, nn.Module],
        table: KeyMap,
    ) -> StoredUpdates | None:
        """Return what the tensors of a step do to the base's weights, so that any run can merge them into its base.

        `description`: as `describe` has returned it in the run that saved. `tensors`: those of the step, by native
        name. `modules`, `table`: the model's modules by fqn, and its names in other tools' folders. None: nothing.
        Raises: ValueError for a description that no run would have recorded.
        """
        return None

    def weight_quantizer(self) -> WeightQuantizer | None:
        """Return how a quantized export stores this converter's weights; None if it quantizes none."""
        return None

    def initialize(  # noqa: B027 - most converters add nothing
        self, model_parts: Sequence[nn.Module], fqns: Collection[str] | None = None
    ) -> None:
        """Set the added tensors among `fqns` (None: all) to their initial values.

        The load calls this after the base weights are read, with the fqns that no source provided
        (LoadReport.initialized).
        """

    def post_optimizer_hook(self, model_parts: Sequence[nn.Module]) -> None:  # noqa: B027 - as above
        """Do what is needed after an optimizer step. Called on every rank; may be collective."""
