"""The types that flow between the layers: state dicts, modes, hook protocols, load reports. No logic, no I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import nn

    from titan_ckpt.keymap import KeyMap
    from titan_ckpt.tensors import TensorInfo

StateDict = dict[str, Any]
"""fqn -> Tensor | DTensor (aliases live memory) | LazyTensor (export only)."""

StateDictMode = Literal["full", "base", "export"]
"""full = every tensor; base = full without converter-owned keys; export = what the outside world should see."""

Format = Literal["native", "dcp", "hf", "peft"]


class Stateful(Protocol):
    """Anything with a state to save: an LR scheduler, a dataloader, counters."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class StateDictAdapter(Protocol):
    """How converter-owned keys are named in files: a table derived from the model's own."""

    def key_map(self, base: KeyMap, found: Mapping[str, TensorInfo] | None = None) -> KeyMap:
        """Return the table for the owned keys, given the model's.

        `found`: what a folder holds that is being read, for forms that are read in several ways; None: to write.
        """

    def file_config(self, base: KeyMap) -> dict[str, Any]:
        """Return the JSON that goes beside the tensors (PEFT: adapter_config.json), without the base identity."""

    def misfits(self, base: KeyMap, found: Mapping[str, Any]) -> list[str]:
        """Return how another file's config would compute something else with tensors of the same names and shapes."""


@runtime_checkable
class ModelHooks(Protocol):
    """What the core knows of a converter, or of a container of converters."""

    def key_filter(self, fqn: str) -> bool:
        """Say whether this converter owns the key; pure in its name."""

    def state_dict_transform(self, state_dict: StateDict, last_step: bool) -> StateDict:
        """Return a new state dict as files should see it; never mutates, runs on every rank, may be collective.

        last_step=False: same keys, plain tensors that alias the live ones. last_step=True: the export.
        """

    def state_dict_adapter(self) -> StateDictAdapter | None:
        """Return how owned keys are named in files, or None where the converter owns none."""

    def initialize(self, model_parts: Sequence[nn.Module], fqns: Collection[str] | None = None) -> None:
        """Give the owned tensors among `fqns` (None: all) their initial values; the base weights are in place."""

    def describe(self) -> list[dict[str, Any]]:
        """Return one JSON object per converter, for the manifest: `{"kind": "lora", "rank": 8, ...}`."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One tensor whose shape or dtype is not the model's."""

    key: str
    expected: str
    found: str


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did with every key; all tuples hold native fqns, except `unexpected` (names as in the source)."""

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[Mismatch, ...] = ()
    initialised: tuple[str, ...] = ()
    """Converter-owned or non-checkpointed keys that no source provided and that have their initial values."""
    cast: Mapping[str, str] = field(default_factory=dict)
    """fqn -> "float32 -> bfloat16" for each tensor whose dtype was changed on the way in, by request."""

    @property
    def ok(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)
