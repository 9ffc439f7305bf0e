"""Types that pass between the layers: state dicts, modes, hook protocols, load reports. No logic, no I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import nn

    from titan_ckpt.geometry.chunks import TensorInfo
    from titan_ckpt.geometry.keymap import KeyMap

StateDict = dict[str, Any]
"""fqn -> Tensor | DTensor (aliases live memory) | LazyTensor (export only)."""

StateDictMode = Literal["full", "base", "export"]
"""full = every tensor; base = full without converter-owned keys; export = the weights as other tools read them."""

Format = Literal["native", "dcp", "hf", "peft"]


class Stateful(Protocol):
    """An object with state to save, such as an LR scheduler, a dataloader, or counters."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class StateDictAdapter(Protocol):
    """Names of converter-owned keys in files, as a table derived from the model's."""

    def key_map(self, base: KeyMap, found: Mapping[str, TensorInfo] | None = None) -> KeyMap:
        """Return the table of the owned keys, given the model's table.

        `found`: the tensors of the folder that is read, because some formats are read in several ways; None: to write.
        """

    def file_config(self, base: KeyMap) -> dict[str, Any]:
        """Return the JSON written beside the tensors (PEFT: adapter_config.json), without the base's identity."""

    def misfits(self, base: KeyMap, found: Mapping[str, Any]) -> list[str]:
        """Return the differences by which another file's config would compute something else with the same tensors."""


@runtime_checkable
class PlacesTensors(Protocol):
    """A StateDictAdapter that knows where another tool puts the tensors of an export."""

    def misplaced(
        self, base: KeyMap, shapes: Mapping[str, Sequence[int]], hf_config: Mapping[str, Any] | None
    ) -> list[str]:
        """Return the reasons why the other tool would not put every file tensor where it belongs.

        `shapes`: those of all file tensors. `hf_config`: config.json of the base's model, if it has one.
        """


@runtime_checkable
class ModelHooks(Protocol):
    """Interface of a converter, or of a container of converters, to the core."""

    def key_filter(self, fqn: str) -> bool:
        """Return whether this converter owns the key; depends on the name alone."""

    def state_dict_transform(self, state_dict: StateDict, last_step: bool) -> StateDict:
        """Return a new state dict as files should hold it; never mutates. Every rank calls it; it may be collective.

        last_step=False: same keys, plain tensors that alias the live ones. last_step=True: the export.
        """

    def state_dict_adapter(self) -> StateDictAdapter | None:
        """Return the names of owned keys in files, or None if the converter owns no keys."""

    def initialize(self, model_parts: Sequence[nn.Module], fqns: Collection[str] | None = None) -> None:
        """Initialize the owned tensors among `fqns` (None: all); the base weights are loaded by then."""

    def describe(self) -> list[dict[str, Any]]:
        """Return one JSON object per converter, for the manifest: `{"kind": "lora", "rank": 8, ...}`."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A tensor whose shape or dtype differs from the model's."""

    key: str
    expected: str
    found: str
    kind: Literal["shape", "dtype", "cast"] = "shape"
    """The difference: the shape; the dtype alone; the dtype alone, and `cast` would convert it."""
    shape: tuple[int, ...] | None = field(default=None, compare=False)
    """The other shape, if the source has the whole tensor."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Result of a load for every key. The tuples hold native fqns; `unexpected` holds names as in the source."""

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[Mismatch, ...] = ()
    initialized: tuple[str, ...] = ()
    """Converter-owned or non-checkpointed keys that no source provided and that have their initial values."""
    cast: Mapping[str, str] = field(default_factory=dict)
    """fqn -> "float32 -> bfloat16" for each tensor that was cast, on request, while it was loaded."""
    grown: Mapping[str, int] = field(default_factory=dict)
    """fqn -> number of rows that were loaded of a table that has more here; the others are initialized, on request."""
    ignored: tuple[str, ...] = ()
    """Keys of the sources that the model declares as left over, or that the run's settings ignore."""
