"""LoRA as a model converter: low-rank adapters over a frozen base.

Owns what is adapted and which keys that adds. The modules are in lora_layers.py, merging in lora_merge.py, the form of
other tools in lora_peft.py.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import ClassVar

from torch import nn

from converters.lora_config import LoRAConfig
from converters.lora_init import initialize_adapter
from converters.lora_layers import (
    AdaptedStacks,
    Adapter,
    LoRAEmbedding,
    LoRALinear,
    TrainedCopy,
    attach,
    attach_copy,
    attach_to_stack,
)
from converters.lora_merge import AdaptedWeight, check_adapters, merged, rounded
from converters.lora_peft import PeftAdapter
from converters.lora_sites import Site, copy_misfits, find_sites, leaf_modules, tied_modules, unused_patterns
from converters.protocol import ModelConverter, Stage
from converters.qat import quantised_forward
from converters.targets import in_lines, select
from titan_ckpt.errors import ConverterError, ExportError
from titan_ckpt.model_wrapper import clean_fqn
from titan_ckpt.tensors import info_of
from titan_ckpt.types import StateDict, StateDictAdapter

logger = logging.getLogger(__name__)


class LoRAConverter(ModelConverter):
    """Adds A and B (and what DoRA and modules_to_save need) beside weights that keep their names."""

    stage: ClassVar[Stage] = "adapt"
    config: LoRAConfig

    def __init__(self, config: LoRAConfig) -> None:
        super().__init__(config)
        self._adapted: dict[str, AdaptedWeight] = {}
        self._copied: dict[str, str] = {}
        """fqn of a trained copy's tensor -> fqn of the base's."""
        self._owned: set[str] = set()
        self._others: list[str] = []
        """Weights that could have an adapter and have none: they decide how short a list of adapted names may be."""

    def convert(self, model: nn.Module) -> None:
        """Freeze the model and attach adapters, in place.

        Raises: ConverterError listing unmatched names, weights that cannot be adapted, and ranks that do not fit.
        """
        sites = find_sites(model)
        chosen = [sites[fqn] for fqn in select(list(sites), self.config.target_modules, "weight to adapt")]
        leaves = leaf_modules(model)
        copied = select(list(leaves), self.config.modules_to_save, "module with parameters and without parts")
        tied, adapted = tied_modules(model), [site.fqn for site in chosen]
        problems = [problem for site in chosen for problem in site.misfits(self.config)]
        problems += [*copy_misfits(copied, adapted, tied), *unused_patterns(self.config, adapted)]
        if problems:
            raise ConverterError(f"LoRA: {len(problems)} problem(s){in_lines(problems)}")
        if shared := [fqn for fqn in adapted if fqn in tied]:
            logger.warning("LoRA: %s shares its weight with another module: it cannot be merged", ", ".join(shared))
        model.requires_grad_(False)
        for site in chosen:
            self._adapt(site, tied=site.fqn in tied)
        for fqn in copied:
            names = [*leaves[fqn].state_dict()]
            attach_copy(leaves[fqn], self.config.torch_dtype)
            self._copied |= {f"{fqn}.trained.{name}": f"{fqn}.{name}" for name in names}
        self._owned = {name for adapted in self._adapted.values() for name in adapted.owned} | set(self._copied)
        self._others += [site.weight_fqn for fqn, site in sites.items() if fqn not in self._adapted]
        self.initialize([model])
        logger.info("LoRA: %d weights adapted, %d modules trained in full", len(chosen), len(copied))

    def key_filter(self, fqn: str) -> bool:
        """Say whether the key is an adapter's or a trained copy's; a base key that merely looks like one is not."""
        return fqn in self._owned

    def state_dict_transform(self, state_dict: StateDict, last_step: bool) -> StateDict:
        """Return the same keys, or on the last step the base's keys with merged, lazy weights. Collective then.

        Raises: ExportError for adapters with no effect or with NaN, and where merging would change another module too.
        """
        if not last_step:
            return dict(state_dict)
        here = {a.weight: a for a in self._adapted.values() if a.lora_a in state_dict}
        if tied := [a.fqn for a in here.values() if a.tied]:
            raise ExportError(
                f"{', '.join(tied)} shares its weight with another module, and merging the adapter would change both. "
                'Export the adapter alone (format = "peft"), or train without this target'
            )
        check_adapters(self._adapted, state_dict, copies=self._copied)
        copies = {base: trained for trained, base in self._copied.items() if trained in state_dict}
        out: StateDict = {}
        for fqn, value in state_dict.items():
            if fqn in here:
                out[fqn] = merged(here[fqn], state_dict)
            elif fqn in copies:
                out[fqn] = rounded(state_dict[copies[fqn]], info_of(value).dtype)
            elif fqn not in self._owned:
                out[fqn] = value
        return out

    def state_dict_adapter(self) -> StateDictAdapter:
        """Return the names of PEFT."""
        return PeftAdapter(self.config, self._adapted, self._copied, tuple(self._others))

    def initialize(self, model_parts: Sequence[nn.Module], fqns: Collection[str] | None = None) -> None:
        """Set A, B, magnitudes and trained copies among `fqns`; magnitudes and copies take over the base's values."""
        wanted = self.key_filter if fqns is None else set(fqns).__contains__
        for part in model_parts:
            for name, module in part.named_modules():
                if isinstance(module, LoRALinear | LoRAEmbedding | AdaptedStacks | TrainedCopy):
                    initialize_adapter(module, clean_fqn(name), wanted, self.config.seed)

    def _adapt(self, site: Site, *, tied: bool) -> None:
        config, fqn = self.config, site.fqn
        rank, scaling = config.rank_of(fqn), config.scaling_of(fqn)
        adapter = Adapter(rank, scaling, config.dropout, config.use_dora, config.torch_dtype, site.rows)
        if site.form == "stack":
            attach_to_stack(site.module, site.parameter, adapter)
        else:
            attach(site.module, adapter, quantised_forward(site.module))
        alpha = config.alpha_of(fqn)
        self._adapted[fqn] = AdaptedWeight(fqn, site.form, rank, alpha, scaling, site.rows, config.use_dora, tied)
