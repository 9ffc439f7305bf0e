"""Find the weights of a model that can have an adapter, the reasons why one cannot, and the adapters in a step.

Owns the inspection of a model before it is changed. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from titan_ckpt.converters.lora.config import LoRAConfig
from titan_ckpt.converters.lora.copies import TrainedCopy
from titan_ckpt.converters.lora.layers import AdaptedStacks, LoRAEmbedding, LowRankPath
from titan_ckpt.converters.qat.converter import quantized_forward
from titan_ckpt.errors import ConverterError, listed
from titan_ckpt.geometry.chunks import TensorInfo
from titan_ckpt.geometry.keymap import KeyMap
from titan_ckpt.weights.lora import COPY, ROWS, A, LoRARecord, fused_rows, is_conv1d, lora_tensor, matches
from titan_ckpt.weights.low_rank import LowRank, Operation, StoredUpdates, WeightUpdate
from titan_ckpt.weights.names import clean_fqn

_OUT = "leave it out of target_modules"
_ADAPTED = (LowRankPath, LoRAEmbedding, TrainedCopy)


@dataclass(frozen=True, slots=True)
class Site:
    """A weight that could have an adapter, and the update that it would be."""

    module: nn.Module
    update: LowRank

    @property
    def fqn(self) -> str:
        """Return the fqn of the module; for a stack of experts that of the parameter."""
        return self.update.site

    @property
    def parameter(self) -> str:
        return self.update.weight.rpartition(".")[2]

    @property
    def weight(self) -> torch.Tensor:
        return self.module.get_parameter(self.parameter)

    def misfits(self, config: LoRAConfig) -> Iterator[str]:
        """Yield the reasons why this weight cannot have the adapter that `config` gives it."""
        kind = type(self.module).__name__
        stacks = self.module.adapters if isinstance(self.module, AdaptedStacks) else {}
        if isinstance(self.module, _ADAPTED) or self.parameter in stacks:
            yield f"{self.fqn}: has an adapter already"
        elif self.parameter not in dict(self.module.named_parameters(recurse=False)):
            yield f"{self.fqn}: {kind} computes its {self.parameter} from others (weight_norm, parametrize); {_OUT}"
        elif is_lazy(self.weight):
            yield f"{self.fqn}: {kind} has no shape before its first forward; run one batch through the model first"
        elif reason := _replaced_forward(self.module):
            yield f"{self.fqn}: {reason}"
        else:
            yield from self._misfits_of_weight(config)

    def _misfits_of_weight(self, config: LoRAConfig) -> Iterator[str]:
        rank, operation, weight = self.update.rank, self.update.operation, self.weight
        capacity = min(*weight.shape[-2:], *self.update.rows)
        if isinstance(weight, DTensor):
            yield f"{self.fqn}: is sharded already; convert the model first, then parallelize it"
        elif not weight.is_floating_point():
            yield f"{self.fqn}: its weight is {weight.dtype}, and an adapter needs a floating-point base"
        elif rank > capacity:
            yield f"{self.fqn}: rank {rank} is more than its {list(weight.shape)} can hold"
        elif config.use_dora and operation not in ("linear", "conv1d"):
            yield f"{self.fqn}: DoRA is for linear modules; leave this {operation} out, or set use_dora = false"
        elif config.use_dora and type(weight.data) is not torch.Tensor:
            yield f"{self.fqn}: DoRA needs plain weights in the forward, and this is a {type(weight.data).__name__}"
        elif config.lora_bias and operation not in ("linear", "conv1d"):
            yield f"{self.fqn}: lora_bias is for linear modules; leave this {operation} out, or set lora_bias = false"
        elif isinstance(self.module, NonDynamicallyQuantizableLinear):
            yield f"{self.fqn}: MultiheadAttention uses this weight itself, and an adapter would do nothing; {_OUT}"
        elif getattr(self.module, "max_norm", None) is not None:
            yield f"{self.fqn}: max_norm changes the rows of the frozen table in each forward; {_OUT}"
        elif config.dropout and (operation == "stack" or quantized_forward(self.module) is not None):
            why = "an adapter's input" if operation == "stack" else "an adapter's input, and QAT quantizes"
            yield f"{self.fqn}: dropout acts on {why} the merged weight; set dropout = 0"


def find_sites(model: nn.Module, config: LoRAConfig) -> dict[str, Site]:
    """Return linear and embedding modules, and 3-D parameters of other modules, by fqn, in the model's order."""
    sites: list[Site] = []
    record = LoRARecord.of(asdict(config))
    key_map = getattr(model, "key_map", None)
    table: KeyMap = key_map() if callable(key_map) else KeyMap()
    for name, module in model.named_modules():
        fqn, operation = clean_fqn(name), _operation(module)
        if operation == "linear" and not isinstance(module, nn.Linear):
            stacks = [n for n, p in module.named_parameters(recurse=False) if p.dim() == 3]
            sites += [Site(module, record.low_rank(f"{fqn}.{n}", "stack")) for n in stacks]
        else:
            rows = fused_rows(f"{fqn}.weight", table) if operation == "linear" else ()
            sites.append(Site(module, record.low_rank(fqn, operation, rows)))
    return {site.fqn: site for site in sites}


def _operation(module: nn.Module | None) -> Operation:
    """Return how a module uses its weight."""
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "conv1d" if is_conv1d(module) else "linear"


def stored_updates(
    record: LoRARecord, tensors: Mapping[str, TensorInfo], modules: Mapping[str, nn.Module], table: KeyMap
) -> StoredUpdates:
    """Return the adapters and the trained copies among the tensors of a step."""
    updates: list[WeightUpdate] = []
    copies: dict[str, str] = {}
    following = followers(modules)
    frozen = {following.get(fqn, fqn) for fqn in modules if any(matches(fqn, n) for n in record.frozen_copies)}
    for name, info in tensors.items():
        part = lora_tensor(name)
        if part is not None and part.role == COPY:
            copies[name] = part.weight
        elif part is not None and part.role == A:
            operation = "stack" if part.site == part.weight else _operation(modules.get(part.site))
            update = record.low_rank(part.site, operation)
            rows = fused_rows(part.weight, table)  # A and B follow them if each part has its own
            b = tensors[update.b].shape if update.b in tensors else ()
            of_parts = len(info.shape) == len(b) == 2 and info.shape[0] != b[1] and info.shape[0] == len(rows) * b[1]
            updates.append(replace(update, rows=rows if of_parts else ()))
            updates += [update.added_bias] if update.added_bias else []
        elif part is not None and part.role == ROWS and (rows_of := record.trained_rows(part.site)):
            updates.append(rows_of)
    of_base = frozenset(name for name, weight in copies.items() if weight.rpartition(".")[0] in frozen)
    return StoredUpdates(updates, copies, of_base, tied=record.ensure_weight_tying)


def leaf_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with parameters and without child modules, by fqn."""
    return {
        clean_fqn(name): module
        for name, module in model.named_modules()
        if [*module.parameters(recurse=False)] and not [*module.children()]
    }


def tied_modules(model: nn.Module) -> set[str]:
    """Return the modules whose weight is used elsewhere: by shared parameters, or by tie_word_embeddings."""
    users: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), []).append(clean_fqn(name).rpartition(".")[0])
    tied = {fqn for names in users.values() if len(names) > 1 for fqn in names}
    hf_config = getattr(model, "hf_config", None)
    if callable(hf_config) and hf_config().get("tie_word_embeddings"):
        tied |= {clean_fqn(name) for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    return tied


def _replaced_forward(module: nn.Module) -> str:
    """Return why a module's forward would not be that of its class; empty if it is."""
    if "forward" not in vars(module):
        return ""
    return "its forward was replaced on the module itself, as accelerate does; convert the model before that"


def copy_misfits(copied: Mapping[str, nn.Module], adapted: Sequence[str]) -> Iterator[str]:
    """Yield the reasons why modules cannot be trained as copies."""
    for fqn, module in copied.items():
        if reason := _replaced_forward(module):
            yield f"{fqn}: {reason}"
        if fqn in adapted:
            yield f"{fqn}: is in target_modules and in modules_to_save"


def followers(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the linear modules that share the weight of a table -> that table."""
    tables = {id(m.weight): fqn for fqn, m in modules.items() if isinstance(m, nn.Embedding)}
    return {
        fqn: tables[id(module.weight)]
        for fqn, module in modules.items()
        if isinstance(module, nn.Linear) and id(module.weight) in tables
    }


def biases_of(model: nn.Module, chosen: str, adapted: Collection[str], copied: Collection[str]) -> dict[str, nn.Module]:
    """Return the modules of which the biases are trained, by fqn. `copied`: those that are trained in full.

    Raises: ConverterError for parameters that PEFT takes for biases and that have a name of their own.
    """
    if chosen == "none":
        return {}
    found: dict[str, nn.Module] = {}
    others: list[str] = []
    for name, module in model.named_modules():
        fqn = clean_fqn(name)
        if fqn in copied or (chosen == "lora_only" and fqn not in adapted):
            continue
        names = [name for name, _ in module.named_parameters(recurse=False) if "bias" in name]
        others += [f"{fqn}.{name}" for name in names if name != "bias"]
        if "bias" in names:
            found[fqn] = module
    if others:
        raise ConverterError(
            f"LoRA: bias = {chosen!r} trains parameters called bias, and PEFT would also train {listed(others, ', ')}: "
            "name their modules in modules_to_save, and set bias to none or lora_only"
        )
    return found


def row_misfits(
    rows: Mapping[str, Sequence[int]], modules: Mapping[str, nn.Module], taken: Collection[str]
) -> Iterator[str]:
    """Yield the reasons why rows of tables cannot be trained. `taken`: modules with an adapter or a copy."""
    for fqn, indices in rows.items():
        weight = getattr(modules[fqn], "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or is_conv1d(modules[fqn]):
            yield f"{fqn}: trainable_token_indices is for embeddings and output matrices"
        elif max(indices) >= len(weight):
            yield f"{fqn}: trainable_token_indices has row {max(indices)}, and the table has {len(weight)}"
        elif isinstance(weight, DTensor):
            yield f"{fqn}: is sharded already; convert the model first, then parallelize it"
        elif fqn in taken:
            yield f"{fqn}: its rows are in trainable_token_indices, and it has an adapter or a copy; choose one of them"
        elif reason := _replaced_forward(modules[fqn]):
            yield f"{fqn}: {reason}"


def unused_patterns(config: LoRAConfig, adapted: Sequence[str]) -> Iterator[str]:
    """Yield the patterns that match no adapted module."""
    for field, table in (("rank_pattern", config.rank_pattern), ("alpha_pattern", config.alpha_pattern)):
        for name in table:
            if not any(matches(fqn, name) for fqn in adapted):
                yield f"{field}: {name!r} matches none of the adapted weights"
