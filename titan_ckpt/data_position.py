"""Where a run is in its data, by data-parallel rank, and how another number of them takes that over.

Owns the rule who goes on from which position. What a position is, is the dataloader's own business.

Ranks that share their data (tensor-parallel and pipeline peers) are one data-parallel rank. A loader says which it
serves by the attributes `dp_rank` and `dp_world_size`, as torchtitan's do; without them every rank reads data of its
own. One whose position can be divided anew has, beside `load_state_dict`, a method

    def load_state_dicts(self, state_dicts: Sequence[dict[str, Any]]) -> None

which gets what `state_dict()` returned on each of the old data-parallel ranks, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titan_ckpt.errors import CorruptCheckpointError, LoadMismatchError
from titan_ckpt.types import Stateful


@dataclass(frozen=True, slots=True)
class DataRank:
    """Which share of the data a process reads."""

    rank: int
    size: int

    @staticmethod
    def of(dataloader: Stateful | None, rank: int, world_size: int) -> DataRank:
        """Ask the loader; one that says nothing reads a share of its own on every rank."""
        own, size = getattr(dataloader, "dp_rank", None), getattr(dataloader, "dp_world_size", None)
        return DataRank(own, size) if isinstance(own, int) and isinstance(size, int) else DataRank(rank, world_size)


def in_order(stored: Sequence[tuple[DataRank, Any]], where: str) -> list[Any]:
    """Return one position for each data-parallel rank, of those that all ranks stored; peers' are alike.

    Raises: CorruptCheckpointError if a data-parallel rank has none.
    """
    sizes = {at.size for at, _ in stored}
    positions = {at.rank: position for at, position in reversed(stored)}
    if len(sizes) != 1 or sorted(positions) != list(range(max(sizes))):
        raise CorruptCheckpointError(
            f"{where}: it holds data positions of data-parallel ranks {sorted(positions)} of {sorted(sizes)}; expected "
            "one of each. Did every rank's dataloader have its own dp_rank, and all the same dp_world_size?"
        )
    return [positions[rank] for rank in range(len(positions))]


def restorer(dataloader: Stateful, at: DataRank, positions: Sequence[Any]) -> Callable[[], None]:
    """Return what brings the loader to where data-parallel ranks at `positions`, one each, have stopped.

    Raises: LoadMismatchError for another number of them than this run's, where the loader cannot divide them anew.
    """
    if len(positions) == at.size:
        return lambda: dataloader.load_state_dict(positions[at.rank])
    divide = getattr(dataloader, "load_state_dicts", None)
    if callable(divide):
        return lambda: divide(positions)
    raise LoadMismatchError(
        f"the checkpoint has the data positions of {len(positions)} data-parallel ranks, this run has {at.size}, and "
        f"{type(dataloader).__name__} cannot divide them anew: give it load_state_dicts(state_dicts), which gets the "
        f"old ranks' states in their order; resume with {len(positions)} data-parallel ranks; or start the data "
        'afresh: checkpoint.resume.exclude = ["dataloader"]'
    )


def stored_position(rank_state: Mapping[str, Any]) -> tuple[DataRank, Any] | None:
    """Return what one rank stored of its data, None where it had no dataloader."""
    if "dataloader" not in rank_state:
        return None
    rank, size = rank_state["data_parallel"]
    return DataRank(rank, size), rank_state["dataloader"]
