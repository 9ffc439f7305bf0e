"""Finds what has converted a torchtitan Trainer's model: this package's LoRA, QAT and Float8, or torchtitan's own LoRA.

Those of this package change the model that its config builds. Owns what torchtitan wants of every module of a model:
initial values, and placements under tensor parallelism; and the discovery of the modules that its own LoRA has adapted,
of which the arithmetic and the names are those of converters/lora, whose tensors have the same names.
Source: torchtitan 0.3, protocols/module.py and components/lora.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

from torch import nn
from torchtitan.components.lora import _lora_adapter_sharding
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from titan_ckpt.converters import (
    ConverterConfig,
    Float8Config,
    LoRAConfig,
    LoRAConverter,
    ModelConvertersContainer,
    QATConfig,
    build,
)
from titan_ckpt.converters.lora.layers import LoRALinear
from titan_ckpt.converters.lora.sites import tied_modules
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import ConfigError, ConverterError
from titan_ckpt.geometry.chunks import dtype_name
from titan_ckpt.weights.lora import LoRARecord, common_settings
from titan_ckpt.weights.names import clean_fqn
from titan_ckpt.weights.wrapper import ModelWrapper

CONVERTERS = "_titan_converters"
"""Attribute of a converted model: its ModelConvertersContainer."""
_SCALING = "_lora_scaling"
"""Attribute of torchtitan's adapted modules: alpha / rank."""


class TitanConverters(ModelConfigConverter):  # type: ignore[misc]  # torchtitan is not there when mypy runs
    """Converters of this package as one of torchtitan's, for the `converters` of its model registries.

    model_registry("8B", converters=[TitanConverters.Config(converters=[LoRAConfig(target_modules=("wo",))])])
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):  # type: ignore[misc]  # torchtitan is not there when mypy runs
        """The settings of each converter, in the order in which they are applied."""

        converters: list[ConverterConfig] = field(default_factory=list)
        """LoRAConfig, QATConfig and Float8Config; QAT or Float8 before LoRA."""

    def __init__(self, config: Config) -> None:
        """Check the combination. Raises: ConverterError."""
        build(config.converters)
        if any(isinstance(c, Float8Config) and c.fsdp_all_gather for c in config.converters):
            raise ConverterError("float8: torchtitan gathers weights itself; leave out fsdp_all_gather")
        if any(isinstance(c, QATConfig) and c.embeddings for c in config.converters):
            raise ConverterError("qat: torchtitan's embeddings have a forward of their own; leave out embeddings")
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Return a config that builds the same model, converted. Raises: ConverterError if it has converters."""
        kind, settings = type(model_config), tuple(self.config.converters)
        if hasattr(kind, CONVERTERS):
            raise ConverterError("the model has converters already: name them in one TitanConverters.Config")

        class Converted(kind):  # type: ignore[misc, valid-type]  # a class that is known at run time alone
            def build(self, **kwargs: Any) -> nn.Module:
                """Build the model and convert it; a config may build several."""
                model: nn.Module = kind.build(self, **kwargs)
                _convert(model, build(settings))
                return model

        setattr(Converted, CONVERTERS, settings)
        Converted.__name__, Converted.__qualname__ = f"Converted{kind.__name__}", f"Converted{kind.__qualname__}"
        return Converted(**{f.name: getattr(model_config, f.name) for f in fields(model_config) if f.init})


def _convert(model: Any, converters: ModelConvertersContainer) -> None:
    """Convert the model in place, and make torchtitan's modules of what is new in it. Raises: ConverterError."""
    if any(_is_adapted(module) for module in model.modules()):
        raise ConverterError(
            "the model has torchtitan's LoRA already: name LoRAConfig in TitanConverters instead, after QAT or Float8"
        )
    before: dict[str, nn.Module] = dict(model.named_modules())
    plain = [module for module in before.values() if type(module) is Linear]
    for module in plain:  # its computation is that of nn.Linear, which QAT and Float8 replace
        module.__class__ = nn.Linear
    converters.convert(model)
    for module in plain:
        if type(module) is nn.Linear:
            module.__class__ = Linear
    for name, module in model.named_modules():
        if not isinstance(module, Module):
            kind: Any = type(module)
            module.__class__ = _joined(kind)
        origin: Any = before.get(name)
        if origin is not None and origin is not module:
            vars(module).update(_param_init=origin._param_init, _sharding_config=origin._sharding_config)  # noqa: SLF001
        if isinstance(module, LoRALinear):
            _place(module)
    root: Any = type(model)
    model.__class__ = _initialized(root)
    setattr(model, CONVERTERS, converters)


def _place(module: Any) -> None:
    """Cut an adapter as torchtitan cuts its own: A with the input of a weight, B and DoRA's lengths with its rows."""
    of_a, of_b = _lora_adapter_sharding(module._sharding_config)  # noqa: SLF001
    for name, placed in (("lora_a", of_a), ("lora_b", of_b), ("lora_magnitude", of_b)):
        if hasattr(module, name):
            getattr(module, name)._sharding_config = placed  # noqa: SLF001


@cache
def _joined(kind: Any) -> type:
    """Return a subclass that is one of torchtitan's modules too; reset_parameters() gives its initial values."""
    return type(kind.__name__, (kind, _Added, Module), {})


class _Added(nn.Module):
    """A module that a converter has put into the model."""

    _sharding_config: ShardingConfig | None

    def parallelize(self, parallel_dims: Any) -> None:
        """Place the parameters. Raises: ConverterError under tensor parallelism, if nothing says where they belong."""
        if self._sharding_config is None and parallel_dims.tp_enabled and [*self.parameters(recurse=False)]:
            raise ConverterError(
                f"tensor parallelism in torchtitan has no placement for a {type(self).__name__}: leave embeddings, "
                "stacked experts and modules_to_save out of the converters, or leave tensor parallelism out"
            )
        super().parallelize(parallel_dims)  # type: ignore[misc]  # torchtitan's Module comes after it


@cache
def _initialized(kind: Any) -> type:
    """Return a subclass of a model's class that gives the converters' tensors their own initial values."""

    def init_states(self: Any, **options: Any) -> None:
        kind.init_states(self, **options)
        getattr(self, CONVERTERS).initialize([self])

    return type(kind.__name__, (kind,), {"init_states": init_states})


def find_converters(model_parts: Sequence[nn.Module]) -> ModelConvertersContainer | None:
    """Return the converters that changed the model; None without any. Collective.

    Raises: ConfigError; ConverterError if both have put LoRA into it.
    """
    own: Any = next((vars(part)[CONVERTERS] for part in model_parts if CONVERTERS in vars(part)), None)
    lora = _find_lora(model_parts)
    return own if lora is None else ModelConvertersContainer([*(own or ()), lora])


def adapted_modules(converters: ModelConvertersContainer | None) -> dict[str, bool]:
    """Return fqn -> whether its weight is tied, of each module with an adapter."""
    loras = [converter for converter in converters or () if isinstance(converter, LoRAConverter)]
    return {fqn: fqn in lora.tied for lora in loras for fqn in lora.adapted}


def trained_beside_adapters(model_parts: Sequence[nn.Module], converters: ModelConvertersContainer | None) -> list[str]:
    """Return the parameters that are trained and that no adapter owns; none for a model without adapters."""
    if not adapted_modules(converters):
        return []
    wrapper = ModelWrapper(model_parts, converters)
    trained = (clean_fqn(name) for part in model_parts for name, p in part.named_parameters() if p.requires_grad)
    return [fqn for fqn in trained if not wrapper.owns(fqn)]


def _find_lora(model_parts: Sequence[nn.Module]) -> TorchtitanLoRA | None:
    """Return torchtitan's LoRA as a converter; None in a model without it. Collective: stages hold parts of a model.

    Raises: ConfigError if the ranks disagree on the adapter of a module.
    """
    line = Coordinator.current()
    of_ranks = line.gather_distinct("torchtitan-lora", lambda: {"adapted": _adapted(model_parts)})["adapted"].values()
    adapted = {fqn: values for of_rank in of_ranks for fqn, values in of_rank.items()}
    if not adapted:
        return None
    if differing := [f for f, values in adapted.items() if any(r.get(f, values) != values for r in of_ranks)]:
        raise ConfigError([f"LoRA: the ranks disagree on the adapter of {fqn}" for fqn in differing])
    own = [clean_fqn(name) for part in model_parts for name in part.state_dict()]
    names = line.gather_distinct("torchtitan-names", lambda: {"names": own})["names"].values()
    return TorchtitanLoRA(adapted, [*dict.fromkeys(name for of_rank in names for name in of_rank)])


def _is_adapted(module: nn.Module) -> bool:
    """Return whether this is a module with torchtitan's adapter."""
    return hasattr(module, _SCALING)


def _adapted(model_parts: Sequence[nn.Module]) -> dict[str, Any]:
    """Return the adapted modules of this rank: fqn -> rank, scaling, whether its weight is tied, dtype."""
    found: dict[str, Any] = {}
    for part in model_parts:
        modules: list[tuple[str, Any]] = [(name, m) for name, m in part.named_modules() if _is_adapted(m)]
        tied = tied_modules(part) if modules else ()
        for name, module in modules:
            fqn, dtype = clean_fqn(name), dtype_name(module.lora_a.weight.dtype)
            found[fqn] = [module.lora_a.out_features, getattr(module, _SCALING), fqn in tied, dtype]
    return found


class TorchtitanLoRA(LoRAConverter):
    """The adapters that torchtitan's LoRAConverter has put into a model."""

    def __init__(self, adapted: Mapping[str, Sequence[Any]], names: Sequence[str]) -> None:
        """Keep what `_find_lora` found. `names`: those of the model's state dict."""
        updates = {  # with alpha without the error of its division by the rank
            fqn: LoRARecord(rank, float(f"{rank * scaling:.12g}"), False, False, {}, {}).low_rank(fqn)
            for fqn, (rank, scaling, *_) in adapted.items()
        }
        super().__init__(
            LoRAConfig(
                target_modules=tuple(dict.fromkeys(map(over_layers, updates))),
                dtype=next(iter(adapted.values()))[3],
                **common_settings([*updates.values()]),
            )
        )
        self.adapted = {fqn: replace(update, scaling=adapted[fqn][1]) for fqn, update in updates.items()}
        self.tied = {fqn for fqn, (_, _, tied, _) in adapted.items() if tied}
        self._owned = {name for update in updates.values() for name in update.tensors}
        hidden = {update.weight for update in updates.values()} | self._owned
        self.others = [name for name in names if name not in hidden]

    def convert(self, model: nn.Module) -> None:
        """Refuse: torchtitan has converted the model's config. Raises: ConverterError."""
        raise ConverterError("torchtitan's LoRAConverter has converted this model already")

    def initialize(self, model_parts: Sequence[nn.Module], fqns: Collection[str] | None = None) -> None:
        """Leave the values that torchtitan's init_states() has drawn: A at random, B zero."""


def over_layers(fqn: str) -> str:
    """Return a name as a pattern over the layers."""
    return ".".join("*" if part.isdecimal() else part for part in fqn.split("."))
