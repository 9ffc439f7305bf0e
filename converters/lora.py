"""LoRA as a model converter: low-rank adapters over a frozen base.

Owns what is adapted and which keys that adds. The modules are in lora_layers.py, merging in lora_merge.py, the form of
other tools in lora_peft.py.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from converters.lora_config import LoRAConfig
from converters.lora_layers import (
    Adapter,
    LoRAEmbedding,
    LoRALinear,
    TrainedCopy,
    attach,
    attach_copy,
    initialize_adapter,
)
from converters.lora_merge import AdaptedModule, check_adapters, merged, rounded
from converters.lora_peft import PeftAdapter
from converters.protocol import ModelConverter, Stage
from converters.qat import quantised_forward
from converters.targets import matches, select
from titan_ckpt.errors import ConverterError, ExportError
from titan_ckpt.model_wrapper import clean_fqn
from titan_ckpt.tensors import info_of
from titan_ckpt.types import StateDict, StateDictAdapter

logger = logging.getLogger(__name__)


class LoRAConverter(ModelConverter):
    """Adds `lora_a` and `lora_b` (and what DoRA and modules_to_save need) beside weights that keep their names."""

    stage: ClassVar[Stage] = "adapt"
    config: LoRAConfig

    def __init__(self, config: LoRAConfig) -> None:
        super().__init__(config)
        self._adapted: dict[str, AdaptedModule] = {}
        """By fqn of the module, over all model parts."""
        self._copied: dict[str, str] = {}
        """fqn of a trained copy's tensor -> fqn of the base's."""
        self._others: list[str] = []
        """Modules with a weight that have no adapter: they decide how short a list of adapted names may be."""

    def convert(self, model: nn.Module) -> None:
        """Freeze the model and attach adapters, in place.

        Raises: ConverterError listing unmatched names, modules that cannot be adapted, and ranks that do not fit.
        """
        modules = {clean_fqn(name): module for name, module in model.named_modules()}
        linear = {n: m for n, m in modules.items() if isinstance(m, nn.Linear | nn.Embedding)}
        chosen = select(list(linear), self.config.target_modules, "linear or embedding module")
        leaves = [n for n, m in modules.items() if [*m.parameters(recurse=False)] and not [*m.children()]]
        copied = select(leaves, self.config.modules_to_save, "module with parameters of its own")
        tied = _tied_modules(model)
        problems = [p for fqn in chosen for p in self._misfits(fqn, linear[fqn])]
        problems += [f"{fqn}: is in target_modules and in modules_to_save" for fqn in copied if fqn in chosen]
        problems += [f"{fqn}: shares its weight, so no copy can stand for it" for fqn in copied if fqn in tied]
        problems += self._unused_patterns(chosen)
        if problems:
            raise ConverterError(f"LoRA: {len(problems)} problem(s)\n  " + "\n  ".join(problems))
        if shared := [fqn for fqn in chosen if fqn in tied]:
            logger.warning("LoRA: %s shares its weight with another module: it cannot be merged", ", ".join(shared))
        model.requires_grad_(False)
        for fqn in chosen:
            self._adapt(fqn, linear[fqn], tied=fqn in tied)
        for fqn in copied:
            names = [*modules[fqn].state_dict()]
            attach_copy(modules[fqn], self.config.torch_dtype)
            self._copied |= {f"{fqn}.trained.{name}": f"{fqn}.{name}" for name in names}
        self._others += [fqn for fqn in linear if fqn not in self._adapted]
        self.initialize([model])
        logger.info("LoRA: %d modules adapted, %d trained in full", len(chosen), len(copied))

    def key_filter(self, fqn: str) -> bool:
        """Say whether the key is an adapter's or a trained copy's; a base key that merely looks like one is not."""
        module = self._adapted.get(fqn.removesuffix(".weight").rpartition(".")[0])
        return fqn in self._copied or (module is not None and fqn in module.owned)

    def state_dict_transform(self, state_dict: StateDict, last_step: bool) -> StateDict:
        """Return the same keys, or on the last step the base's keys with merged, lazy weights. Collective then.

        Raises: ExportError for adapters with no effect or with NaN, and where merging would change another module too.
        """
        if not last_step:
            return dict(state_dict)
        here = [m for m in self._adapted.values() if m.lora_a in state_dict]
        if tied := [m.fqn for m in here if m.tied]:
            raise ExportError(
                f"{', '.join(tied)} shares its weight with another module, and merging the adapter would change both. "
                "Export the adapter alone (format = \"peft\"), or train without this target"
            )
        check_adapters(self._adapted, state_dict, copies=self._copied)
        by_weight = {m.weight: m for m in here}
        by_copy = {base: trained for trained, base in self._copied.items() if trained in state_dict}
        out: StateDict = {}
        for fqn, value in state_dict.items():
            if fqn in by_weight:
                out[fqn] = merged(by_weight[fqn], state_dict)
            elif fqn in by_copy:
                out[fqn] = rounded(state_dict[by_copy[fqn]], info_of(value).dtype)
            elif not self.key_filter(fqn):
                out[fqn] = value
        return out

    def state_dict_adapter(self) -> StateDictAdapter:
        """Return the names of PEFT."""
        return PeftAdapter(self.config, self._adapted, self._copied, tuple(self._others))

    def initialize(self, model_parts: Sequence[nn.Module], fqns: Collection[str] | None = None) -> None:
        """Set A, B, magnitudes and trained copies among `fqns`; magnitudes and copies take over the base's values."""
        wanted = self.key_filter if fqns is None else set(fqns).__contains__
        for fqn, module in self._converted(model_parts):
            initialize_adapter(module, fqn, wanted, self.config.seed)

    def _converted(self, model_parts: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
        for part in model_parts:
            for name, module in part.named_modules():
                if isinstance(module, LoRALinear | LoRAEmbedding | TrainedCopy):
                    yield clean_fqn(name), module

    def _adapt(self, fqn: str, module: nn.Linear | nn.Embedding, *, tied: bool) -> None:
        config = self.config
        rank, scaling = config.rank_of(fqn), config.scaling_of(fqn)
        attach(
            module,
            Adapter(rank, scaling, config.dropout, config.use_dora, config.torch_dtype),
            quantised_forward(module),
        )
        embedding = isinstance(module, nn.Embedding)
        self._adapted[fqn] = AdaptedModule(fqn, rank, config.alpha_of(fqn), scaling, config.use_dora, embedding, tied)

    def _misfits(self, fqn: str, module: nn.Linear | nn.Embedding) -> Iterator[str]:
        rank, weight = self.config.rank_of(fqn), module.weight
        if isinstance(module, LoRALinear | LoRAEmbedding | TrainedCopy):
            yield f"{fqn}: has an adapter already"
        elif isinstance(weight, DTensor):
            yield f"{fqn}: is sharded already; convert the model first, then parallelise it"
        elif not weight.is_floating_point():
            yield f"{fqn}: its weight is {weight.dtype}, and an adapter needs a floating-point base"
        elif rank > min(weight.shape):
            yield f"{fqn}: rank {rank} is more than its {list(weight.shape)} can hold"
        elif self.config.use_dora and isinstance(module, nn.Embedding):
            yield f"{fqn}: DoRA on an embedding is not supported; leave it out, or set use_dora = false"
        elif self.config.use_dora and type(weight.data) is not torch.Tensor:
            yield f"{fqn}: DoRA needs plain weights in the forward, and this is a {type(weight.data).__name__}"
        elif self.config.dropout and quantised_forward(module) is not None:
            yield f"{fqn}: dropout acts on an adapter's input, and QAT quantises the merged weight; set dropout = 0"

    def _unused_patterns(self, chosen: Sequence[str]) -> list[str]:
        patterns = {"rank_pattern": self.config.rank_pattern, "alpha_pattern": self.config.alpha_pattern}
        return [
            f"{field}: {name!r} matches none of the adapted modules"
            for field, table in patterns.items()
            for name in table
            if not any(matches(fqn, name) for fqn in chosen)
        ]


def _tied_modules(model: nn.Module) -> set[str]:
    """Return the modules whose weight is used elsewhere: shared parameters, and a model's own word for it."""
    users: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), []).append(clean_fqn(name).rpartition(".")[0])
    tied = {fqn for names in users.values() if len(names) > 1 for fqn in names}
    hf_config = getattr(model, "hf_config", None)
    if callable(hf_config) and hf_config().get("tie_word_embeddings"):
        tied |= {clean_fqn(name) for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    return tied
