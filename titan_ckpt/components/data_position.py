"""The position of a run in its data, by data-parallel rank, also when their number has changed.

Owns the rule which rank continues from which position. Only the dataloader knows what a position is.

Ranks that read the same data (tensor-parallel and pipeline peers) are one data-parallel rank. A dataloader names its
data-parallel rank by the attributes `dp_rank` and `dp_world_size`, as torchtitan's do; without them every rank reads
data of its own. A dataloader that can divide its data among a new number of ranks has, beside `load_state_dict`, a
method

    def load_state_dicts(self, state_dicts: Sequence[dict[str, Any]]) -> None

which gets the results of `state_dict()` on each of the old data-parallel ranks, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titan_ckpt.components.known.loaders import is_of_torchdata
from titan_ckpt.components.known.streams import begin_once
from titan_ckpt.errors import CorruptCheckpointError, LoadMismatchError
from titan_ckpt.types import Stateful


@dataclass(frozen=True, slots=True)
class DataRank:
    """The share of the data that a process reads: number `rank` of `size`."""

    rank: int
    size: int

    @staticmethod
    def of(dataloader: Stateful | None, rank: int, world_size: int) -> DataRank:
        """Return the dataloader's data-parallel rank; without its attributes, the rank itself."""
        own, size = getattr(dataloader, "dp_rank", None), getattr(dataloader, "dp_world_size", None)
        return DataRank(own, size) if isinstance(own, int) and isinstance(size, int) else DataRank(rank, world_size)


def in_order(stored: Sequence[tuple[DataRank, Any]], where: str) -> list[Any]:
    """Return one position for each data-parallel rank out of those that all ranks stored; peers stored equal ones.

    Raises: CorruptCheckpointError if a data-parallel rank has none.
    """
    sizes = {data_rank.size for data_rank, _ in stored}
    positions = {data_rank.rank: position for data_rank, position in reversed(stored)}
    if len(sizes) != 1 or sorted(positions) != list(range(max(sizes))):
        raise CorruptCheckpointError(
            f"{where}: it holds data positions of data-parallel ranks {sorted(positions)} of {sorted(sizes)}; expected "
            "one of each. Did every rank's dataloader have its own dp_rank, and all the same dp_world_size?"
        )
    return [positions[rank] for rank in range(len(positions))]


def restorer(dataloader: Stateful, data_rank: DataRank, positions: Sequence[Any]) -> Callable[[], None]:
    """Return a function that sets the dataloader to the stored `positions`, one of each old data-parallel rank.

    Raises: LoadMismatchError if their number is not this run's and the dataloader cannot divide them anew.
    """
    if len(positions) == data_rank.size:

        def restore() -> None:
            dataloader.load_state_dict(positions[data_rank.rank])
            if is_of_torchdata(dataloader):
                dataloader.state_dict()  # it makes its iterator now, which draws a seed, and not after the load
            begin_once(dataloader)

        return restore
    divide = getattr(dataloader, "load_state_dicts", None)
    if callable(divide):
        return lambda: divide(positions)
    raise LoadMismatchError(
        f"the checkpoint has the data positions of {len(positions)} data-parallel ranks, this run has "
        f"{data_rank.size}, and {type(dataloader).__name__} cannot divide them anew: give it "
        f"load_state_dicts(state_dicts), which gets the old ranks' states in their order; resume with {len(positions)} "
        'data-parallel ranks; or start the data afresh: checkpoint.resume.exclude = ["dataloader"]'
    )


def stored_position(rank_state: Mapping[str, Any]) -> tuple[DataRank, Any] | None:
    """Return the data-parallel rank and position that one rank stored; None if it had no dataloader."""
    if "dataloader" not in rank_state:
        return None
    rank, size = rank_state["data_parallel"]
    return DataRank(rank, size), rank_state["dataloader"]
