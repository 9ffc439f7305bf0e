"""Stack several PEFT adapters of one base into one adapter whose effect is exactly the sum of theirs.

Owns the arithmetic on adapter folders. Needs no model and no PEFT; formats/huggingface/peft.py does the I/O.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from titan_ckpt.converters.lora.peft import json_number
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import BaseMismatchError, ConverterError, listed
from titan_ckpt.formats.huggingface.peft import PeftFormat, PeftReader, unselected
from titan_ckpt.formats.publish.run import FolderExport
from titan_ckpt.weights.identity import BASE_RECORD
from titan_ckpt.weights.lora import PARTS
from titan_ckpt.weights.low_rank import LowRank
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
    with ExitStack() as stack:
        adapters = [stack.enter_context(PeftReader(folder)) for folder in folders]
        for adapter in adapters:
            if strangers := unselected(adapter):
                raise ConverterError(
                    f"{adapter.path}: target_modules does not select {strangers[0]}, so PEFT would ignore it"
                )
        base = _common_base(adapters)
        if dora := [str(a.path) for a in adapters if a.metadata().get("use_dora")]:
            raise ConverterError(
                f"{', '.join(dora)}: DoRA scales whole rows by its own norm, so its effects do not add up"
            )
        for adapter in adapters:
            others = [u.tensors[0] for u in adapter.updates() if not isinstance(u, LowRank)] + [*adapter.beside()]
            if others or any(map(adapter.is_on_parameter, adapter.pairs())):
                raise ConverterError(
                    f"{adapter.path} has more than pairs of modules ({listed(others or ['target_parameters'], ', ')}), "
                    "which do not add up: merge the adapters into their base one after the other"
                )
        found = [adapter.pairs() for adapter in adapters]
        names = {update.site: update.a for updates in found for update in updates}
        if other := next((u.a for updates in found for u in updates if u.a != names[u.site]), None):
            raise ConverterError(
                f"{other} is for a module of another kind than a pair that the adapters have for the same module: they "
                "are not of one model. Name others"
            )
        by_site = [{update.site: update for update in updates} for updates in found]
        scale = next((u.scaling for updates in by_site for u in updates.values() if u.scaling), None)
        if scale is None:
            raise ConverterError(f"{', '.join(map(str, folders))}: every pair is scaled by 0, or there is none")
        tensors = _copies(adapters)
        ranks: dict[str, int] = {}
        blocks: dict[str, list[int]] = {}
        for site in dict.fromkeys(site for updates in by_site for site in updates):
            parts = [(r, updates[site]) for r, updates in zip(adapters, by_site, strict=True) if site in updates]
            first = parts[0][1]
            a = torch.cat([reader.whole(first.a) for reader, _ in parts])
            b = torch.cat([_scaled(reader.whole(first.b), u.scaling / scale) for reader, u in parts], dim=1)
            ranks[site] = b.shape[1]
            if order := _order([_blocks(reader, update) for reader, update in parts]):
                by_part = torch.tensor([rank for of_part in order for rank in of_part], dtype=torch.long)
                a, b = a[by_part], b[:, by_part]
                blocks[site] = [len(of_part) for of_part in order]
            tensors |= {first.a: a, first.b: b}
    rank = max(ranks.values())
    config = {
        **base,
        "r": rank,
        "lora_alpha": json_number(scale * rank),
        "target_modules": sorted(ranks),
        "rank_pattern": {re.escape(name): r for name, r in ranks.items() if r != rank},
        "alpha_pattern": {re.escape(name): json_number(scale * r) for name, r in ranks.items() if r != rank},
        "modules_to_save": sorted({name for a in adapters for name in a.metadata().get("modules_to_save") or ()})
        or None,
        **({PARTS: blocks} if blocks else {}),
    }
    groups = StateDictTransforms().to_file(dict(tensors), None, None)
    FolderExport(groups, PeftFormat(config)).write(out, Coordinator.current())


def _blocks(adapter: PeftReader, update: LowRank) -> Sequence[int]:
    """Return the ranks of the diagonal blocks of a pair; empty if the pair is one block."""
    ranks: Sequence[int] = (adapter.metadata().get(PARTS) or {}).get(update.site, ())
    return ranks if sum(ranks) == update.rank else ()


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


def _common_base(adapters: Sequence[PeftReader]) -> dict[str, Any]:
    """Return the config keys that name the base. Raises: BaseMismatchError if two adapters name different bases."""
    first = adapters[0]
    for other in adapters[1:]:
        record, other_record = (a.metadata().get(BASE_RECORD) or {} for a in (first, other))
        names = [a.metadata().get("base_model_name_or_path") for a in (first, other)]
        digests = [r.get("digest") for r in (record, other_record)]
        if (digests[0] != digests[1]) if all(digests) else (all(names) and names[0] != names[1]):
            raise BaseMismatchError(
                f"{first.path} and {other.path} were trained on different bases: "
                f"{names[0]} ({digests[0]}) and {names[1]} ({digests[1]})",
                {"path": names[0], **record},
                {"path": names[1], **other_record},
            )
    kept = ("base_model_name_or_path", "revision", "task_type", BASE_RECORD)
    return {name: value for name, value in first.metadata().items() if name in kept}


def _copies(adapters: Sequence[PeftReader]) -> dict[str, torch.Tensor]:
    """Return the tensors of modules trained in full. Raises: ConverterError if two adapters trained the same module."""
    out: dict[str, torch.Tensor] = {}
    for adapter in adapters:
        copies = {key: adapter.whole(key) for key in adapter.copies()}
        if twice := sorted(set(copies) & set(out)):
            raise ConverterError(f"{twice[0]} was trained in full by two of the adapters, and copies do not add up")
        out |= copies
    return out


def _scaled(b: torch.Tensor, factor: float) -> torch.Tensor:
    return b if factor == 1.0 else (b.float() * factor).to(b.dtype)
