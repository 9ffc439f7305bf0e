"""Check that replicas are equal: their digests are compared before a save divides the writing among ranks.

Owns the comparison. sharing.py decides which ranks are replicas of each other.

A save writes each replicated byte once, some from one rank and some from another. If replicas have drifted apart (a
rank that missed a gradient, a flipped bit, shards that are no DTensors and look like copies), the checkpoint would be
a mixture that no rank has trained, and nobody would know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Literal

import torch
import xxhash

from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import ReplicaMismatchError, counted, listed
from titan_ckpt.geometry.chunks import as_bytes, local_tensor

SAMPLED_BYTES = 16 << 20
"""About this many bytes of each rank are sampled per save; the part of each tensor changes with the step."""
SAMPLED_TENSORS = 1 << 10
"""At most about this many tensors of each rank are sampled per save; the selection changes with the step."""
_LEAST_BYTES = 1 << 12
_PIECE_BYTES = 32 << 20

Groups = Mapping[tuple[int, ...], tuple[str, ...]]
"""Ranks that are replicas of each other -> the names of the tensors that this rank holds as one of them."""


def check_replicas(
    tensors: Mapping[str, torch.Tensor],
    groups: Groups,
    coordinator: Coordinator,
    mode: Literal["sampled", "full"],
    step: int,
) -> None:
    """Compare replicas of the same tensors. Collective.

    1. Every rank posts one digest for each group it is in. 2. If members of a group differ, they post one for each
    tensor. What differs and is each rank's own, such as statistics in buffers, is no replica.
    Raises: ReplicaMismatchError naming tensors and ranks.
    """
    total = max(1, sum(map(len, groups.values())))
    budget = SAMPLED_BYTES // min(total, SAMPLED_TENSORS) if mode == "sampled" else None

    def digests() -> dict[str, dict[str, str]]:
        chosen = {
            ranks: names if budget is None else _some(names, SAMPLED_TENSORS * len(names) // total, step)
            for ranks, names in groups.items()
        }
        return {
            xxhash.xxh3_64_hexdigest(repr(ranks).encode()): {
                name: digest_of(tensors[name], name, budget, step) for name in names
            }
            for ranks, names in chosen.items()
        }

    of_groups = coordinator.gather_distinct("replicas", digests)
    lines: dict[str, str] = {}
    for posted in of_groups.values():
        if len(posted) > 1:
            lines |= _differences({rank: of_names for ranks, of_names in posted.items() for rank in ranks})
    if lines:
        _refuse(lines, step)


def _differences(of_ranks: Mapping[int, Mapping[str, str]]) -> dict[str, str]:
    """Return a line for each tensor that is not equal on all ranks of a group. `of_ranks`: digests by name."""
    lines: dict[str, str] = {}
    for name in dict.fromkeys(name for of_names in of_ranks.values() for name in of_names):
        by_rank = {rank: of_names[name] for rank, of_names in sorted(of_ranks.items()) if name in of_names}
        usual, count = Counter(by_rank.values()).most_common(1)[0]
        if count < len(by_rank):
            odd = [str(rank) for rank, digest in by_rank.items() if digest != usual]
            lines[name] = f"{name}: rank {listed(odd, ', ', ' ')} of {len(by_rank)} ranks"
    return lines


def _refuse(lines: Mapping[str, str], step: int) -> None:
    what = counted(
        len(lines),
        "tensor that ranks hold as copies of each other is not the same",
        "tensors that ranks hold as copies of each other are not the same",
    )
    raise ReplicaMismatchError(
        f"step {step} is not saved: {what}: {listed([*lines.values()])}. Shards must be "
        "DTensors; copies drift apart where a gradient is not reduced; and a buffer can be each rank's own only if the "
        "model's own state_dict() returns it as it is. To save all the same, some from one rank and some from another: "
        'checkpoint.save.check_replicas = "off"',
        [*lines],
    )


def _some(names: tuple[str, ...], count: int, step: int) -> tuple[str, ...]:
    """Return about `count` consecutive names, starting at one that depends on the step; all if there are no more."""
    if len(names) <= count:
        return names
    first = xxhash.xxh3_64_intdigest(str(step).encode()) % len(names)
    return (names + names[:count])[first : first + max(count, 1)]


def digest_of(value: torch.Tensor, name: str = "", budget: int | None = None, step: int = 0) -> str:
    """Return a digest of this rank's values of a tensor, or of about `budget` bytes of them, as `_pieces` chooses."""
    hasher = xxhash.xxh3_128()
    for piece in _pieces(name, local_tensor(value).detach(), budget, step):
        hasher.update(as_bytes(piece).cpu().numpy().data)
    return hasher.hexdigest()


def _pieces(name: str, local: torch.Tensor, budget: int | None, step: int) -> Iterator[torch.Tensor]:
    """Yield rows of a tensor: all, or about `budget` bytes starting at a row that depends on name and step."""
    if not local.numel():
        return
    rows = local.reshape(1) if local.dim() == 0 else local
    row_bytes = rows[:1].nbytes
    if budget is not None and rows.nbytes > max(budget, _LEAST_BYTES):
        count = max(1, max(budget, _LEAST_BYTES) // row_bytes)
        first = xxhash.xxh3_64_intdigest(f"{name}@{step}".encode()) % (len(rows) - count + 1)
        yield rows[first : first + count]
        return
    count = max(1, _PIECE_BYTES // row_bytes)
    for first in range(0, len(rows), count):
        yield rows[first : first + count]
