"""LoRA, QAT and Float8 of this package in torchtitan's Trainer: they change the model that its config builds.

Owns what torchtitan wants of every module of a model: initial values, and placements under tensor parallelism.
Source: torchtitan 0.3, protocols/module.py and components/lora.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from torch import nn
from torchtitan.components.lora import _lora_adapter_sharding
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from titan_ckpt.converters import ConverterConfig, Float8Config, ModelConvertersContainer, QATConfig, build
from titan_ckpt.converters.lora.layers import LoRALinear
from titan_ckpt.errors import ConverterError
from titan_ckpt.integrations.torchtitan.lora import is_adapted

CONVERTERS = "_titan_converters"
"""Attribute of a converted model: its ModelConvertersContainer."""


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
    if any(is_adapted(module) for module in model.modules()):
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


def converters_of(model_parts: Sequence[nn.Module]) -> ModelConvertersContainer | None:
    """Return the converters of this package that changed the model; None without any."""
    return next((vars(part)[CONVERTERS] for part in model_parts if CONVERTERS in vars(part)), None)
