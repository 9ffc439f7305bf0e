"""Types that pass between the layers: state dicts, modes, what a converter is, load reports. No I/O."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.tensor.parallel import ParallelStyle

    from titan_ckpt.geometry.chunks import TensorInfo
    from titan_ckpt.geometry.keymap import KeyMap
    from titan_ckpt.weights.low_rank import StoredUpdates
    from titan_ckpt.weights.quantize import WeightQuantizer

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


Stage = Literal["replace", "adapt"]
"""replace: replaces modules by others with the same parameters (quantization). Such converters come first, because a
replacement drops what an earlier converter attached. adapt: attaches parameters to existing modules (LoRA)."""


class ModelConverter(ABC):
    """Changes a model in place before it is sharded, and tells checkpoints which keys it added.

    Several of them are one ModelConvertersContainer. Every converter keeps these laws, which `ConverterTests` checks:
    it may add keys but never renames or drops one; it claims exactly the keys that it added, by name; its transforms
    change neither their input nor the live model.
    Source: torchtitan, `protocols/model_converter.py` and the review of its pull request 2898.
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
        """Return a JSON object per converter for manifests: `kind` and every setting; constant, equal on all ranks."""
        return [{name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self.config).items()}]

    def key_filter(self, fqn: str) -> bool:
        """Return whether `convert` added the key; decided by its whole name alone."""
        return False

    def state_dict_transform(self, state_dict: StateDict, last_step: bool) -> StateDict:
        """Return a new state dict as files should hold it; never mutates. Every rank calls it; it may be collective.

        last_step=False: same keys, plain tensors that alias the live ones. last_step=True: the export. The default
        changes nothing.
        """
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
        """Return how a quantized export stores this converter's weights; None if it quantizes none.

        Raises: ConverterError if there are two ways.
        """
        return None

    def parallel_plan(self, plan: Mapping[str, ParallelStyle]) -> Mapping[str, ParallelStyle]:
        """Return the tensor-parallel plan for the modules as `convert` changed them, which a container knows.

        Raises: NotImplementedError for a converter that is in none.
        """
        raise NotImplementedError(
            f"{self.kind}: tensor parallelism needs the plan of a container: pass ModelConvertersContainer([converter])"
        )

    def initialize(  # noqa: B027 - most converters add nothing
        self, model_parts: Sequence[nn.Module], fqns: Collection[str] | None = None
    ) -> None:
        """Set the added tensors among `fqns` (None: all) to their initial values.

        The load calls this after the base weights are read, with the fqns that no source provided
        (LoadReport.initialized).
        """

    def post_optimizer_hook(self, model_parts: Sequence[nn.Module]) -> None:  # noqa: B027 - as above
        """Do what is needed after an optimizer step. Called on every rank; may be collective."""


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
