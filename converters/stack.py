"""Stack several PEFT adapters of one base into one adapter whose effect is exactly the sum of theirs.

Owns the arithmetic on adapter folders. Needs no model and no PEFT; formats/huggingface/peft.py does the I/O.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from titan_ckpt.converters.lora.peft import json_number
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import BaseMismatchError, ConverterError
from titan_ckpt.formats.huggingface.peft import PeftFormat, PeftReader, unselected
from titan_ckpt.formats.publish.run import FolderExport
from titan_ckpt.weights.identity import BASE_RECORD
from titan_ckpt.weights.low_rank import PARTS, LowRank
from titan_ckpt.weights.transforms import StateDictTransforms


def stack_adapters(folders: Sequence[Path], out: Path) -> None:
    """Write one adapter with the combined effect of `folders`: A matrices are stacked by rows, B matrices by columns.

    Shape: A (r1 + r2, in), B (out, r1 + r2). If scales differ, B is multiplied by their quotient in float32. The pairs
    of a module stay block diagonal (converters/lora/fused.py) if all of them are.
    Raises: ConverterError for fewer than two folders, DoRA, no effect, or two trained copies of one module;
        BaseMismatchError.
    """
    if len(folders) < 2:
        raise ConverterError(f"{len(folders)} adapter(s) cannot be stacked: name two or more folders")
    adapters = [_read(folder) for folder in folders]
    base = _common_base(adapters)
    if dora := [str(a.folder) for a in adapters if a.config.get("use_dora")]:
        raise ConverterError(f"{', '.join(dora)}: DoRA scales whole rows by its own norm, so its effects do not add up")
    scale = next((u.scaling for adapter in adapters for u in adapter.updates.values() if u.scaling), None)
    if scale is None:
        raise ConverterError(f"{', '.join(map(str, folders))}: every pair is scaled by 0, or there is none")
    tensors: dict[str, torch.Tensor] = {}
    ranks: dict[str, int] = {}
    blocks: dict[str, list[int]] = {}
    for name in dict.fromkeys(name for adapter in adapters for name in adapter.updates):
        parts = [adapter for adapter in adapters if name in adapter.updates]
        first = parts[0].updates[name]
        a, b = first.a, first.b
        order = _order([adapter.blocks_of(name) for adapter in parts])
        tensors[a] = torch.cat([adapter.tensors[a] for adapter in parts])
        tensors[b] = torch.cat([_scaled(p.tensors[b], p.updates[name].scaling / scale) for p in parts], dim=1)
        ranks[name] = tensors[b].shape[1]
        if order:
            by_part = torch.tensor([rank for of_part in order for rank in of_part], dtype=torch.long)
            tensors[a], tensors[b] = tensors[a][by_part], tensors[b][:, by_part]
            blocks[name] = [len(of_part) for of_part in order]
    tensors |= _copies(adapters)
    rank = max(ranks.values())
    config = {
        **base,
        "r": rank,
        "lora_alpha": json_number(scale * rank),
        "target_modules": sorted(ranks),
        "rank_pattern": {re.escape(name): r for name, r in ranks.items() if r != rank},
        "alpha_pattern": {re.escape(name): json_number(scale * r) for name, r in ranks.items() if r != rank},
        "modules_to_save": sorted({name for a in adapters for name in a.config.get("modules_to_save") or ()}) or None,
        **({PARTS: blocks} if blocks else {}),
    }
    groups = StateDictTransforms().to_file(dict(tensors), None, None)
    FolderExport(groups, PeftFormat(config)).write(out, Coordinator.current())


@dataclass(frozen=True, slots=True)
class _Folder:
    folder: Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    updates: dict[str, LowRank]
    """By module."""
    copies: dict[str, str]

    def blocks_of(self, module: str) -> Sequence[int]:
        """Return the ranks of the diagonal blocks of a module's pair; empty if the pair is one block."""
        ranks: Sequence[int] = (self.config.get(PARTS) or {}).get(module, ())
        return ranks if sum(ranks) == self.tensors[self.updates[module].a].shape[0] else ()


def _read(folder: Path) -> _Folder:
    with PeftReader(folder) as reader:
        tensors = {key: reader.whole(key) for key in reader.tensors}
        if strangers := unselected(reader):
            raise ConverterError(f"{folder}: target_modules does not select {strangers[0]}, so PEFT would ignore it")
        updates = {update.site: update for update in reader.updates()}
        return _Folder(folder, reader.metadata(), tensors, updates, reader.copies())


def _order(adapters: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return, for each part of the weight, the indices along the stacked rank that belong to it, in order.

    `adapters`: the block ranks of each adapter. The result is empty unless all have the same number of blocks.
    """
    if len({len(ranks) for ranks in adapters}) != 1:
        return []
    out: list[list[int]] = [[] for _ in adapters[0]]
    start = 0
    for ranks in adapters:
        for of_part, rank in zip(out, ranks, strict=True):
            of_part += range(start, start + rank)
            start += rank
    return out


def _common_base(adapters: Sequence[_Folder]) -> dict[str, Any]:
    """Return the config keys that name the base. Raises: BaseMismatchError if two adapters name different bases."""
    first = adapters[0]
    for other in adapters[1:]:
        record, other_record = (a.config.get(BASE_RECORD) or {} for a in (first, other))
        names = [a.config.get("base_model_name_or_path") for a in (first, other)]
        digests = [r.get("digest") for r in (record, other_record)]
        if (digests[0] != digests[1]) if all(digests) else (all(names) and names[0] != names[1]):
            raise BaseMismatchError(
                f"{first.folder} and {other.folder} were trained on different bases: "
                f"{names[0]} ({digests[0]}) and {names[1]} ({digests[1]})",
                {"path": names[0], **record},
                {"path": names[1], **other_record},
            )
    kept = ("base_model_name_or_path", "revision", "task_type", BASE_RECORD)
    return {name: first.config[name] for name in kept if name in first.config}


def _copies(adapters: Sequence[_Folder]) -> dict[str, torch.Tensor]:
    """Return the tensors of modules trained in full. Raises: ConverterError if two adapters trained the same module."""
    out: dict[str, torch.Tensor] = {}
    for adapter in adapters:
        copies = {key: adapter.tensors[key] for key in adapter.copies}
        if twice := sorted(set(copies) & set(out)):
            raise ConverterError(f"{twice[0]} was trained in full by two of the adapters, and copies do not add up")
        out |= copies
    return out


def _scaled(b: torch.Tensor, factor: float) -> torch.Tensor:
    return b if factor == 1.0 else (b.float() * factor).to(b.dtype)
