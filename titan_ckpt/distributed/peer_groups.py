"""Gloo groups of some of the ranks, through which they exchange bytes in lockstep.

Owns the connections. Knows no tensors. The groups are not registered with torch.distributed, so any thread may use them
beside training traffic, and an export that has failed throws them away without a trace in the job's process groups.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    import torch

    from titan_ckpt.distributed.coordinator import Coordinator

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 60.0
"""At most this long, and no longer than half a save's timeout, ranks wait until they are connected."""

Ranks = tuple[int, ...]


class ExchangeBroken(Exception):  # noqa: N818 - no error of this rank: another one is gone or silent, or the network is
    """The exchange between some ranks broke off. Carries the `seconds` for which this one has waited, if it counts."""

    def __init__(self, message: str, seconds: float = 0.0) -> None:
        self.seconds = seconds
        super().__init__(message)


class PeerGroups:
    """The groups of this rank, which are kept until an exchange fails. For one thread at a time."""

    def __init__(self, prefix: str) -> None:
        """`prefix`: the same on all ranks, and no other PeerGroups of the job has it."""
        self._prefix = prefix
        self._groups: dict[Ranks, Any] = {}
        self._numbers = itertools.count()
        self._is_impossible = False

    def connect(self, coordinator: Coordinator, wanted: Callable[[], Collection[Ranks]]) -> list[Ranks]:
        """Connect the groups that all of their ranks want; return those of this rank. Collective over all ranks.

        Returns none if any rank cannot connect, such as behind a firewall; this is logged once and not tried again.
        Raises: PeerError; the errors of `wanted`.
        """
        own: dict[str, Ranks] = {}

        def ready() -> dict[str, bool]:
            own.update({xxhash.xxh3_64_hexdigest(repr(ranks).encode()): ranks for ranks in sorted(wanted())})
            return {name: ranks in self._groups for name, ranks in own.items()}

        of_ranks = coordinator.gather_results("groups", ready)
        agreed = {name: ranks for name, ranks in own.items() if all(name in of_ranks[rank] for rank in ranks)}
        if not self._is_impossible and not all(is_ready for of_rank in of_ranks for is_ready in of_rank.values()):
            number = next(self._numbers)
            stale = {n: ranks for n, ranks in agreed.items() if not all(of_ranks[rank][n] for rank in ranks)}

            def connect() -> bool:
                try:
                    for name, ranks in stale.items():  # in the same order on all ranks
                        unique = f"{self._prefix}/groups-{number}/{name}"
                        self._groups[ranks] = coordinator.gloo_group(ranks, unique, CONNECT_SECONDS)
                except RuntimeError as error:
                    logger.warning(
                        "gloo cannot connect the ranks, so each reads and writes by itself: %s",
                        error,
                    )
                    return False
                return True

            self._is_impossible = not all(coordinator.gather_results("groups/connected", connect))
        if self._is_impossible:
            self.discard()
            return []
        return list(agreed.values())

    def exchange(
        self,
        ranks: Ranks,
        send: torch.Tensor,
        send_sizes: Sequence[int],
        receive: torch.Tensor,
        receive_sizes: Sequence[int],
        timeout_seconds: float,
    ) -> Any:
        """Start to send bytes to every rank of a group and to receive bytes from it; return torch's Work.

        Sizes are in the order of `ranks`. The buffers must not be touched before `wait` of the result has returned.
        """
        from torch.distributed import AllToAllOptions

        options = AllToAllOptions()
        options.timeout = timedelta(seconds=timeout_seconds)
        return self._groups[ranks].alltoall_base(receive, send, list(receive_sizes), list(send_sizes), options)

    def broadcast(self, ranks: Ranks, sender: int, memory: torch.Tensor, timeout_seconds: float) -> Any:
        """Start to send memory from a rank of a group to that of all others; return torch's Work.

        The memory must not be touched before `wait` of the result has returned.
        """
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.timeout = ranks.index(sender), timedelta(seconds=timeout_seconds)
        return self._groups[ranks].broadcast([memory], options)

    def discard(self) -> None:
        """Close all connections; the next `connect` makes them anew."""
        self._groups.clear()
