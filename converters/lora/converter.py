"""LoRA as a model converter: low-rank adapters over a frozen base.

Owns the choice of modules and the keys that adapters add. layers.py has the modules, peft.py the form of other tools,
converters/merge.py the merging. Initial values are equal for any number of ranks, and drawn without the run's
generators. Source of their distributions: peft, tuners/lora/layer.py reset_lora_parameters.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from titan_ckpt.converters.lora import sites
from titan_ckpt.converters.lora.config import LoRAConfig
from titan_ckpt.converters.lora.copies import TrainedCopy, attach_copy
from titan_ckpt.converters.lora.layers import AdaptedStacks, LoRAConv1D, LoRAEmbedding, LoRALinear, attach
from titan_ckpt.converters.lora.peft import PeftAdapter
from titan_ckpt.converters.lora.proof import prove
from titan_ckpt.converters.lora.watch import FirstForward
from titan_ckpt.converters.merge import check_adapters, merged, rounded, whole
from titan_ckpt.converters.protocol import ModelConverter, Stage
from titan_ckpt.converters.qat.converter import quantized_forward
from titan_ckpt.converters.targets import in_lines, select
from titan_ckpt.errors import ConverterError, ExportError, counted
from titan_ckpt.geometry.chunks import TensorInfo, blocks_of, fill, info_of
from titan_ckpt.geometry.keymap import KeyMap
from titan_ckpt.types import StateDict, StateDictAdapter
from titan_ckpt.weights.low_rank import LoRARecord, LowRank, StoredUpdates
from titan_ckpt.weights.names import clean_fqn

logger = logging.getLogger(__name__)


class LoRAConverter(ModelConverter):
    """Adds A and B, DoRA's magnitudes and trained copies of modules; base weights keep their names."""

    stage: ClassVar[Stage] = "adapt"
    config_class: ClassVar[type[Any]] = LoRAConfig
    config: LoRAConfig

    def __init__(self, config: LoRAConfig) -> None:
        super().__init__(config)
        self.adapted: dict[str, LowRank] = {}
        """The adapter of each adapted module, by the module's fqn."""
        self.tied: set[str] = set()
        """The adapted modules that share their weight with another one, which merging would change too."""
        self._copied: dict[str, str] = {}
        """The fqn of a trained copy's tensor -> the fqn of the base's tensor."""
        self._owned: set[str] = set()
        self._others: list[str] = []
        """The base's tensors without an adapter; target_modules of a PEFT export must not select their modules."""

    def convert(self, model: nn.Module) -> None:
        """Freeze the model and attach adapters, in place.

        Raises: ConverterError listing unmatched names, weights that cannot be adapted, and ranks that are too large.
        """
        found = sites.find_sites(model, self.config)
        chosen = [found[fqn] for fqn in select(list(found), self.config.target_modules, "weight to adapt")]
        leaves = sites.leaf_modules(model)
        copied = select(list(leaves), self.config.modules_to_save, "module with parameters and without parts")
        tied, adapted = sites.tied_modules(model), [site.fqn for site in chosen]
        misfits = {site.fqn: [*site.misfits(self.config)] for site in chosen}
        proof = prove([site for site in chosen if not misfits[site.fqn]], self.config)
        problems = [problem for problems in misfits.values() for problem in problems] + proof.problems
        problems += sites.copy_misfits({fqn: leaves[fqn] for fqn in copied}, adapted, tied)
        problems += sites.unused_patterns(self.config, adapted)
        if problems:
            raise ConverterError(f"LoRA: {len(problems)} problem(s){in_lines(problems)}")
        self.tied |= tied & {*adapted}
        if shared := [fqn for fqn in adapted if fqn in tied]:
            logger.warning("LoRA: %s shares its weight with another module: it cannot be merged", ", ".join(shared))
        model.requires_grad_(False)
        for site in chosen:
            self.adapted[site.fqn] = site.update
            attach(
                site.module,
                site.update,
                self.config.torch_dtype,
                dropout=self.config.dropout,
                scaled_by=proof.scaled_by.get(site.fqn, ""),
                quantized=quantized_forward(site.module),
            )
        for fqn in copied:
            names = [*leaves[fqn].state_dict()]
            attach_copy(leaves[fqn], self.config.torch_dtype)
            self._copied |= {f"{fqn}.trained.{name}": f"{fqn}.{name}" for name in names}
        self._owned = {name for adapted in self.adapted.values() for name in adapted.tensors} | set(self._copied)
        weights = {adapted.weight for adapted in self.adapted.values()} | self._owned
        self._others += [fqn for name in model.state_dict() if (fqn := clean_fqn(name)) not in weights]
        self.initialize([model])
        FirstForward(model, tied)
        logger.info(
            "LoRA: %s adapted, %s trained in full", counted(len(chosen), "weight"), counted(len(copied), "module")
        )

    def key_filter(self, fqn: str) -> bool:
        """Return whether the key belongs to an adapter or a trained copy; a base key with a similar name does not."""
        return fqn in self._owned

    def state_dict_transform(self, state_dict: StateDict, last_step: bool) -> StateDict:
        """Return the same keys, or on the last step the base's keys with lazily merged weights (then collective).

        Raises: ExportError for adapters without effect or with NaN, and if merging would also change another module.
        """
        if not last_step:
            return dict(state_dict)
        adapters = {a.weight: a for a in self.adapted.values() if a.a in state_dict}
        if tied := [a.site for a in adapters.values() if a.site in self.tied]:
            raise ExportError(
                f"{', '.join(tied)} shares its weight with another module, and merging the adapter would change both. "
                'Export the adapter alone (format = "peft"), or train without this target'
            )
        check_adapters(self.adapted, state_dict, copies=self._copied)
        copies = {base: trained for trained, base in self._copied.items() if trained in state_dict}
        out: StateDict = {}
        for fqn, value in state_dict.items():
            if fqn in adapters:
                out[fqn] = merged(adapters[fqn], state_dict)
            elif fqn in copies:
                out[fqn] = rounded(state_dict[copies[fqn]], info_of(value).dtype)
            elif fqn not in self._owned:
                out[fqn] = value
        return out

    def state_dict_adapter(self) -> StateDictAdapter:
        """Return the adapter that names the keys as PEFT does."""
        return PeftAdapter(self.config, self.adapted, self._copied, tuple(self._others))

    @classmethod
    def updates(
        cls,
        description: Mapping[str, Any],
        tensors: Mapping[str, TensorInfo],
        modules: Mapping[str, nn.Module],
        table: KeyMap,
    ) -> StoredUpdates:
        """Return the updates of the tensors that LoRA names so, and the trained copies."""
        return sites.stored_updates(LoRARecord.of(description), tensors, modules, table)

    def initialize(self, model_parts: Sequence[nn.Module], fqns: Collection[str] | None = None) -> None:
        """Initialize A, B, magnitudes and trained copies among `fqns`; the last two from the base's values."""
        wanted = self.key_filter if fqns is None else set(fqns).__contains__
        for part in model_parts:
            for name, module in part.named_modules():
                if isinstance(module, LoRALinear | LoRAEmbedding | LoRAConv1D | AdaptedStacks | TrainedCopy):
                    initialize_adapter(module, clean_fqn(name), wanted, self.config.seed)


@torch.no_grad()
def initialize_adapter(module: nn.Module, fqn: str, wanted: Callable[[str], bool], seed: int) -> None:
    """Set the tensors of an adapted module whose fqn is `wanted` to their initial values, under any sharding."""
    if isinstance(module, TrainedCopy):
        base = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        for name, value in (*module.trained.named_parameters(), *module.trained.named_buffers()):
            if wanted(f"{fqn}.trained.{name}"):
                fill(value, whole(base[name]))
        return
    assert isinstance(module, LoRALinear | LoRAEmbedding | LoRAConv1D | AdaptedStacks)
    for adapter in module.adapters.values() if isinstance(module, AdaptedStacks) else [module.adapter]:
        adapted = adapter.site.rpartition(".")[0] if adapter.operation == "stack" else adapter.site
        a, b, *lengths = (name.removeprefix(f"{adapted}.") for name in adapter.tensors)
        embedding = adapter.operation == "embedding"
        random, zero = (b, a) if embedding else (a, b)
        if wanted(name := f"{fqn}.{random}"):
            weight, generator = module.get_parameter(random), _generator(name, seed)
            draw = torch.randn if embedding else _linear_values
            fill(weight, draw(weight.shape, generator=generator))
        if wanted(f"{fqn}.{zero}"):
            for block in blocks_of(module.get_parameter(zero)):
                block.data.zero_()
        if lengths and wanted(f"{fqn}.{lengths[0]}"):
            rows = torch.linalg.vector_norm(whole(module.get_parameter("weight")).float(), dim=1)
            fill(module.get_parameter(lengths[0]), rows)


def _linear_values(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Return values of kaiming_uniform(a=sqrt(5)), as for a linear module."""
    return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[-1])


def _generator(name: str, seed: int) -> torch.Generator:
    """Return a generator that depends only on the name and the seed, so it is equal on every rank."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
