"""Failures: whether a run goes on without what a disk refused.

Owns that decision, which all ranks make together, and the count of failures in a row.
"""

from __future__ import annotations

import errno
import logging
from collections import Counter
from collections.abc import Collection
from typing import Any, Literal

from titan_ckpt.config import SaveConfig
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import PeerError, listed

logger = logging.getLogger(__name__)

DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.EACCES})
"""Errors of a disk or a store that may pass. EACCES: credentials or a Kerberos ticket have expired; a right that
was always missing is found before the first step."""

_MOST_IN_ROW = 3
"""Failures in a row after which a run goes on; a disk that refuses more does not get better by itself."""

Outcome = Literal["done", "disk", "peer", "other"]
"""How a save or an export ended on one rank: well, or because of the disk, of another rank, or of anything else."""


class Failures:
    """The failures of one run, counted alike on every rank."""

    def __init__(self, config: SaveConfig | None, coordinator: Coordinator) -> None:
        """Take on_failure; without a config, every failure ends the run."""
        self._config = config
        self._coordinator = coordinator
        self._in_row: Counter[str] = Counter()

    def verdict(
        self, what: Literal["saved", "exported"], step: int, error: BaseException | None, *, is_last: bool
    ) -> BaseException | None:
        """Count how the save or the exports of a step ended; log a failure after which the run goes on. Collective.

        `error`: what was raised on this rank. `is_last`: nothing later makes up for a failure.
        Return what the caller must raise, on all ranks, so that none waits for another: `error`, or PeerError on a rank
        that has no error of its own; None if the run goes on.
        """
        if self._config is None or self._config.on_failure == "raise" or is_last:
            return error
        try:
            of_ranks: list[Any] = self._coordinator.gather(f"is step {step} {what}", outcome_of(error))
        except PeerError as lost:
            return error or lost
        failed = [rank for rank, outcome in enumerate(of_ranks) if outcome != "done"]
        of_peers = PeerError(f"step {step} was not {what} on rank {listed([*map(str, failed)], ', ', ' ')}", failed)
        if not is_disk_failure(of_ranks):
            self._in_row[what] = 0
            return (error or of_peers) if failed else None
        assert error is not None, "all ranks failed"
        self._in_row[what] += 1
        count = self._in_row[what]
        logger.warning("step %d is not %s (%d in a row, %d are accepted): %s", step, what, count, _MOST_IN_ROW, error)
        return error if count > _MOST_IN_ROW else None


def outcome_of(error: BaseException | None) -> Outcome:
    """Return how a save or an export ended that raised this error on this rank; its causes count too."""
    if error is None:
        return "done"
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    if any(isinstance(e, OSError) and e.errno in DISK_ERRORS for e in chain):
        return "disk"
    return "peer" if any(isinstance(e, PeerError) for e in chain) else "other"


def is_disk_failure(of_ranks: Collection[Outcome]) -> bool:
    """Return whether something failed on all ranks, because of the disk alone."""
    return "disk" in of_ranks and set(of_ranks) <= {"disk", "peer"}
