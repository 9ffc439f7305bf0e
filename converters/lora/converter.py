"""LoRA as a model converter: low-rank adapters over a frozen base.

Owns the choice of modules and the keys that adapters add. layers.py has the modules, peft.py the form of other tools,
weights/low_rank.py the merging. Initial values are equal for any number of ranks, and drawn without the run's
generators. Source of their distributions: peft, tuners/lora/layer.py reset_lora_parameters.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import nn

from titan_ckpt.converters.lora import sites
from titan_ckpt.converters.lora.config import LoRAConfig
from titan_ckpt.converters.lora.copies import SomeCopied, TrainedCopy, attach_copy, copy_parameters, copy_rows, follow
from titan_ckpt.converters.lora.layers import AdaptedStacks, LoRAEmbedding, LowRankPath, attach
from titan_ckpt.converters.lora.peft import PeftAdapter
from titan_ckpt.converters.lora.proof import prove
from titan_ckpt.converters.lora.watch import FirstForward
from titan_ckpt.converters.qat.converter import quantized_forward
from titan_ckpt.converters.targets import in_lines, select
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import ConverterError, ExportError, counted, listed
from titan_ckpt.geometry.chunks import LazyTensor, TensorInfo, blocks_of, cast, fill, info_of
from titan_ckpt.geometry.keymap import KeyMap
from titan_ckpt.types import ModelConverter, Stage, StateDict, StateDictAdapter
from titan_ckpt.weights.lora import BIAS, ROWS, LoRARecord, TrainedRows
from titan_ckpt.weights.low_rank import LowRank, StoredUpdates, WeightUpdate, merged, stack_of, whole
from titan_ckpt.weights.names import clean_fqn

logger = logging.getLogger(__name__)
_ADAPTED = (LowRankPath, LoRAEmbedding, AdaptedStacks)
_LATER = ("frozen_copies", "bias", "lora_bias", "trainable_token_indices", "ensure_weight_tying")
"""Settings that an earlier version does not have."""


class LoRAConverter(ModelConverter, PeftAdapter):
    """Adds A and B, DoRA's magnitudes and trained copies of modules; base weights keep their names."""

    stage: ClassVar[Stage] = "adapt"
    config_class: ClassVar[type[Any]] = LoRAConfig
    config: LoRAConfig

    def __init__(self, config: LoRAConfig) -> None:
        super().__init__(config)
        PeftAdapter.__init__(self)
        self.tied: set[str] = set()
        """The adapted modules that share their weight with another one, which merging would change too."""
        self._owned: set[str] = set()

    def convert(self, model: nn.Module) -> None:
        """Freeze the model and attach adapters, in place.

        Raises: ConverterError listing unmatched names, weights that cannot be adapted, and ranks that are too large.
        """
        config, found, leaves = self.config, sites.find_sites(model, self.config), sites.leaf_modules(model)
        modules = {clean_fqn(name): module for name, module in model.named_modules(remove_duplicate=False)}
        tied, following = sites.tied_modules(model), sites.followers(modules)
        dtype, record = config.torch_dtype, LoRARecord.of(asdict(config))
        leaders = following if config.ensure_weight_tying else {}

        def names(among: Mapping[str, Any], targets: Sequence[str], what: str) -> list[str]:
            return list(dict.fromkeys(leaders.get(fqn, fqn) for fqn in select(list(among), targets, what)))

        chosen = [found[fqn] for fqn in names(found, config.target_modules, "weight to adapt")]
        copied = names(leaves, config.modules_to_save, "module with parameters and without parts")
        frozen = select(list(leaves), config.frozen_copies, "module with parameters and without parts")
        frozen = list(dict.fromkeys(following.get(fqn, fqn) for fqn in frozen))  # PEFT has them for all that share one
        adapted = [site.fqn for site in chosen]
        rows = {
            fqn: update.indices
            for fqn in select(list(leaves), [*config.trainable_token_indices], "table")
            if (update := record.trained_rows(fqn)) is not None
        }
        rows = {fqn: indices for fqn, indices in rows.items() if rows.get(following.get(fqn, "")) != indices}
        biased = sites.biases_of(model, config.bias, adapted, copied)
        misfits = {site.fqn: [*site.misfits(config)] for site in chosen}
        proof = prove([site for site in chosen if not misfits[site.fqn]], config)
        problems = [problem for problems in misfits.values() for problem in problems] + proof.problems
        problems += sites.copy_misfits({fqn: leaves[fqn] for fqn in copied}, adapted)
        problems += sites.copy_misfits({fqn: leaves[fqn] for fqn in frozen} | biased, [])
        problems += [f"{fqn}: is in frozen_copies and is trained in full" for fqn in frozen if fqn in copied]
        problems += sites.row_misfits(rows, leaves, [*adapted, *copied])
        problems += sites.unused_patterns(config, adapted)
        acting = {*adapted, *copied} if config.ensure_weight_tying else set[str]()
        if lost := (tied & {*acting, *frozen, *rows}) - {*following, *following.values()}:
            problems.append(f"{', '.join(sorted(lost))}: shares its weight, and no module was found that could follow")
        if problems:
            raise ConverterError(f"LoRA: {len(problems)} problem(s){in_lines(problems)}")
        both = {
            table for fqn, table in following.items() if config.ensure_weight_tying or (table in rows) > (fqn in rows)
        }
        self.frozen = frozen
        self.shares = bool(tied & {*adapted, *copied})
        self.tied |= (tied & {*adapted, *copied, *rows}) - both
        if self.tied:
            shared = ", ".join(sorted(self.tied))
            logger.warning("LoRA: %s shares its weight with another module: it cannot be merged", shared)
        if lacking := [s.fqn for s in chosen if s.update.bias and getattr(s.module, "bias", None) is None]:
            logger.warning("LoRA: %s: no bias to merge that of B into: export format = peft", listed(lacking, ", "))
        model.requires_grad_(False)
        for site in chosen:
            self.adapted[site.fqn] = site.update
            if site.update.operation == "stack":
                self.stacks[site.fqn] = stack_of(site.module, site.parameter)
            attach(
                site.module,
                site.update,
                dtype,
                dropout=config.dropout,
                scaled_by=proof.scaled_by.get(site.fqn, ""),
                quantized=quantized_forward(site.module),
            )
            self.added += [site.update.added_bias] if site.update.added_bias else []
        for fqn in copied:
            self.copied |= {f"{fqn}.trained.{name}": f"{fqn}.{name}" for name in leaves[fqn].state_dict()}
            attach_copy(leaves[fqn], dtype)
        for fqn, leader in following.items():  # before its own rows, which act on the table that it follows
            if leader in both:
                self.following[fqn] = leader
            if leader in both or leader in frozen:
                follow(modules[fqn], modules[leader], adapter=leader in both)
        for fqn, module in {**biased, **{fqn: leaves[fqn] for fqn in frozen}}.items():
            own = [name for name, _ in module.named_parameters(recurse=False)] if fqn in frozen else ["bias"]
            self.copied |= {f"{fqn}.trained.{name}": f"{fqn}.{name}" for name in own}
            copy_parameters(module, own, dtype, trained=fqn not in frozen)
        for fqn, indices in rows.items():
            self.added.append(TrainedRows(f"{fqn}.weight", f"{fqn}.{ROWS}.weight", indices))
            copy_rows(leaves[fqn], indices, dtype)
        updates = [*self.adapted.values(), *self.added]
        self._owned = {name for update in updates for name in update.tensors} | set(self.copied)
        weights = {update.weight for update in self.adapted.values()} | self._owned
        self.others += [fqn for name in model.state_dict() if (fqn := clean_fqn(name)) not in weights]
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
        updates: dict[str, list[WeightUpdate]] = {}
        for update in (*self.adapted.values(), *self.added):
            if update.tensors[0] in state_dict:
                updates.setdefault(update.weight, []).append(update)
        copies = {base: trained for trained, base in self.copied.items() if trained in state_dict}
        changed = {*updates, *copies}
        if tied := sorted(self.tied & {fqn.rpartition(".")[0] for fqn in changed}):
            raise ExportError(
                f"{', '.join(tied)} shares its weight with another module, and merging the adapter would change both. "
                'Export the adapter alone (format = "peft"), or train without this target'
            )
        if absent := sorted(changed - state_dict.keys()):
            raise ExportError(
                f"{', '.join(absent)}: the model has no such tensor to merge the adapter into, such as a bias for that "
                'of B. Export the adapter alone (format = "peft")'
            )
        check_adapters(self.adapted, state_dict, copies=[*self.copied, *(n for u in self.added for n in u.tensors)])
        out: StateDict = {}
        for fqn, value in state_dict.items():
            if fqn in self._owned:
                continue
            out[fqn] = _rounded(state_dict[copies[fqn]], info_of(value).dtype, fqn) if fqn in copies else value
            for update in updates.get(fqn, ()):
                out[fqn] = merged(update, {**state_dict, fqn: out[fqn]})
        return out

    def state_dict_adapter(self) -> StateDictAdapter:
        """Return the adapter that names the keys as PEFT does."""
        return self

    def describe(self) -> list[dict[str, Any]]:
        """Return the settings; those of later versions only where they have an effect, so that old steps are equal."""
        plain = LoRAConfig(self.config.target_modules)
        settings, unset = (json.loads(json.dumps(asdict(config))) for config in (self.config, plain))
        return [{name: v for name, v in settings.items() if name not in _LATER or v != unset[name]}]

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
                if isinstance(module, (*_ADAPTED, TrainedCopy, SomeCopied)):
                    initialize_adapter(module, clean_fqn(name), wanted, self.config.seed)


def check_adapters(adapters: Mapping[str, LowRank], tensors: StateDict, copies: Collection[str]) -> None:
    """Check, before adapters are merged, that they are finite and have an effect. Collective over all ranks.

    `copies`: fqns of trained copies; if there are any, the adapters may be without effect.
    Raises: ExportError, the same on every rank, for NaN or infinite values, and if no adapter has any effect.
    """
    broken: list[Any] = [name for name in copies if name in tensors and not _finite(tensors[name])]
    effective: list[Any] = []
    for update in adapters.values():
        if update.a not in tensors:
            continue
        broken += [name for name in update.tensors if not _finite(tensors[name])]
        # a shard of A may be on this rank and the matching shard of B on a different one: judge all ranks together
        pair = (update.a, update.b)
        effective += [name for name in pair if any(bool(block.data.any()) for block in blocks_of(tensors[name]))]
    everywhere: Any = Coordinator.current().gather("adapter-check", {"broken": broken, "effective": effective})
    broken = sorted({name for rank in everywhere for name in rank["broken"]})
    union = {name for rank in everywhere for name in rank["effective"]}
    if broken:
        raise ExportError(
            f"{len(broken)} adapter tensor(s) hold NaN or infinite values: {listed(broken, ', ', ' ', most=4)}"
        )
    if not copies and not any({m.a, m.b} <= union for m in adapters.values()):
        raise ExportError(
            f"none of the {len(adapters)} adapters has any effect (A or B is zero everywhere): "
            "what would be exported is the base. Was anything trained, or was the adapter's source loaded?"
        )


def _finite(value: torch.Tensor | LazyTensor) -> bool:
    return all(bool(torch.isfinite(block.data).all()) for block in blocks_of(value))


def _rounded(value: torch.Tensor | LazyTensor, dtype: torch.dtype, fqn: str) -> torch.Tensor | LazyTensor:
    """Return the tensor in `dtype`, cast chunk by chunk when it is written."""
    return value if info_of(value).dtype == dtype else cast(value, dtype, fqn)


@torch.no_grad()
def initialize_adapter(module: nn.Module, fqn: str, wanted: Callable[[str], bool], seed: int) -> None:
    """Set the tensors of an adapted module whose fqn is `wanted` to their initial values, under any sharding."""
    if trained := dict(module.named_children()).get("trained"):
        base = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        for name, value in (*trained.named_parameters(), *trained.named_buffers()):
            if wanted(f"{fqn}.trained.{name}"):
                fill(value, whole(base[name]))
    if isinstance(module, SomeCopied) and module.copied_rows and wanted(f"{fqn}.trained_rows.weight"):
        fill(module.get_parameter("trained_rows.weight"), whole(module.get_parameter("weight"))[[*module.copied_rows]])
    if not isinstance(module, _ADAPTED):
        return
    for adapter in module.adapters.values() if isinstance(module, AdaptedStacks) else [module.adapter]:
        adapted = adapter.site.rpartition(".")[0] if adapter.operation == "stack" else adapter.site
        a, b, *lengths = (name.removeprefix(f"{adapted}.") for name in adapter.tensors)
        embedding = adapter.operation == "embedding"
        random, zero = (b, a) if embedding else (a, b)
        if wanted(name := f"{fqn}.{random}"):
            weight, generator = module.get_parameter(random), _generator(name, seed)
            draw = torch.randn if embedding else _linear_values
            fill(weight, draw(weight.shape, generator=generator))
        for name in (zero, *([BIAS] if adapter.bias else [])):
            for block in blocks_of(module.get_parameter(name)) if wanted(f"{fqn}.{name}") else ():
                block.data.zero_()
        if lengths and wanted(f"{fqn}.{lengths[0]}"):
            rows = torch.linalg.vector_norm(
                whole(module.get_parameter("weight")).float(), dim=int(not adapter.transposed)
            )
            fill(module.get_parameter(lengths[0]), rows)


def _linear_values(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Return values of kaiming_uniform(a=sqrt(5)), as for a linear module."""
    return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[-1])


def _generator(name: str, seed: int) -> torch.Generator:
    """Return a generator that depends only on the name and the seed, so it is equal on every rank."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
