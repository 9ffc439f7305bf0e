"""Ranks that want the same bytes read them together: each byte is read once, sent to the others, and verified by all.

Owns who reads what, and how it is sent. Knows no tensors: a Source reads and verifies bytes of one file, and fills.

Every rank posts the runs of bytes that it wants. The ranks that want a run are a team, of which each reads a like share
of the team's bytes. Teams send one after the other, in the same order on all ranks, so that no two wait for each other.
A rank takes nothing on trust: what arrives is verified, and what is wrong or missing is read from the file.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, runtime_checkable

import xxhash

from titan_ckpt.disk.kernel import ALIGNMENT, Buffer, round_up
from titan_ckpt.disk.workers import as_here, batches, num_copy_workers, run_workers
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.distributed.peer_groups import ExchangeBroken, Ranks
from titan_ckpt.errors import CheckpointError
from titan_ckpt.geometry.chunks import joined
from titan_ckpt.geometry.requests import Fill
from titan_ckpt.process import gc_paused
from titan_ckpt.progress import Count

logger = logging.getLogger(__name__)

MOST_RANKS = 16
"""Ranks of one team. Of more that want the same, neighbours are a team: the store sends each byte once to each."""
LEAST_BYTES = 8 << 20
"""Each rank reads by itself what a team wants if it is less: to connect the team takes longer."""
LEAST_RUN_BYTES = 64 << 10
"""Each rank reads shorter runs by itself."""
_WINDOW_BYTES = 64 << 20
"""Most bytes that a team sends at a time. A rank has memory for two such windows: one arrives, one is verified."""
_PIECE_BYTES = 4 << 20, 8 << 20
"""Least and most bytes that a rank reads and sends at a time, if its team's share is not less."""
_AHEAD_BYTES = 64 << 20
"""Most bytes that a rank reads ahead of what it sends. With more, the first piece would share its bandwidth with later
ones, and all ranks would wait for it."""
_LOOK_SECONDS = 0.001
_DIGEST_BYTES = 16
_NOTHING = bytes(_DIGEST_BYTES)
"""In place of a digest: the rank could not read the piece."""
_IN_THE_FILE = b"\xff" * _DIGEST_BYTES
"""In place of a digest: the file has some of its own."""

Run = tuple[int, int]


class Source(Protocol):
    """Names and reads what one rank wants of one file."""

    @property
    def key(self) -> str:
        """What names the bytes on all ranks. With equal keys, all cut runs at the same places."""

    @property
    def runs(self) -> Sequence[Run]:
        """Bytes [start, stop) that are wanted, in order; no two touch."""

    is_remote: bool
    is_networked: bool
    is_cached: bool
    ahead_bytes: int
    """Bytes that each rank has in flight if it reads by itself."""
    is_verified: bool
    """Whether the file has digests of its bytes."""

    @property
    def windows(self) -> Sequence[Run]:
        """What this rank reads by itself."""

    def keep(self, runs: Sequence[Run]) -> None:
        """Set what this rank reads by itself."""

    def cut(self, run: Run, most: int) -> Iterator[Run]:
        """Cut a run into pieces that can be verified by themselves."""

    def fetch(self, window: Run, into: memoryview) -> None:
        """Read and verify a piece for all; fill no target. Raises: CorruptCheckpointError; EOFError; OSError."""

    def put(self, window: Run, data: memoryview, digest: bytes, sender: int) -> None:
        """Verify a piece and fill with it; read what is wrong. Several threads may call it. Raises: as `read`."""

    def read(self, window: Run) -> None:
        """Read, verify and fill a piece. Raises: CorruptCheckpointError; OSError."""


@runtime_checkable
class Shareable(Protocol):
    """A Fill that can read together with other ranks."""

    def sources(self) -> Sequence[Any]:
        """Return the Source of each file."""

    def fill_after(self, sources: Sequence[Any], deal: Deal) -> int:
        """Fill from what the ranks read together, and from what each reads by itself; return all bytes."""


class _Piece(NamedTuple):
    source: Source
    window: Run
    reader: int
    """The rank that reads it."""

    @property
    def num_bytes(self) -> int:
        return self.window[1] - self.window[0]


@dataclass(slots=True)
class Deal:
    """What one fill reads together with other ranks."""

    coordinator: Coordinator
    teams: dict[Ranks, list[_Piece]] = field(default_factory=dict)
    """This rank's teams, and what each wants, in order."""

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for pieces in self.teams.values() for piece in pieces)

    @property
    def num_read(self) -> int:
        """Return the bytes that this rank reads; it receives the others."""
        pieces = (piece for pieces in self.teams.values() for piece in pieces)
        return sum(piece.num_bytes for piece in pieces if piece.reader == self.coordinator.rank)

    def run(self, count: Count) -> None:
        """Read, send, receive, verify and fill. All ranks of each team call it.

        Raises: ExchangeBroken if another rank is gone or silent; as `Source.read`.
        """
        memories = [Buffer.allocate(0)] * 2
        try:
            for ranks, pieces in sorted(self.teams.items()):
                most = len(ranks) * max(piece.num_bytes for piece in pieces)  # about one piece of each rank
                windows = [*batches(pieces, attrgetter("num_bytes"), most)]
                num_bytes = max(sum(map(_slot, window)) for window in windows)
                if num_bytes > len(memories[0].view):
                    memories = [Buffer.allocate(num_bytes) for _ in memories]
                self._run_team(ranks, windows, memories, count)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # what is under way holds the connections open
            raise

    def _run_team(self, ranks: Ranks, windows: Sequence[list[_Piece]], memories: list[Buffer], count: Count) -> None:
        own = iter([piece for window in windows for piece in window if piece.reader == self.coordinator.rank])
        most = min(_AHEAD_BYTES, max(piece.source.ahead_bytes for window in windows for piece in window))
        num_ahead = max(1, most // max(piece.num_bytes for window in windows for piece in window))
        ahead: deque[Future[Buffer]] = deque()
        with ThreadPoolExecutor(num_ahead, "titan_ckpt-ahead", as_here()) as pool:

            def next_own() -> Buffer:
                while len(ahead) < num_ahead and (piece := next(own, None)) is not None:
                    ahead.append(pool.submit(_fetched, piece))
                return ahead.popleft().result()

            try:
                before: list[_Sent] = []
                for number, window in enumerate(windows):
                    sent = [*self._send(ranks, window, memories[number % 2], next_own)]
                    self._receive(ranks, before, count)
                    before = sent
                self._receive(ranks, before, count)
            finally:
                for future in ahead:
                    future.cancel()

    def _send(
        self, ranks: Ranks, window: Sequence[_Piece], memory: Buffer, next_own: Callable[[], Buffer]
    ) -> Iterator[_Sent]:
        """Start to send the pieces of a window from their readers to all."""
        at = 0
        for piece in window:
            size = piece.num_bytes + _DIGEST_BYTES
            if piece.reader == self.coordinator.rank:
                own = next_own()
                view, tensor = own.view, own.tensor
            else:
                view, tensor = memory.view[at : at + size], memory.tensor[at : at + size]
                at += _slot(piece)
            seconds = self.coordinator.timeout_seconds / 2
            with _unbroken(ranks):
                work = self.coordinator.peers.broadcast(ranks, piece.reader, tensor, seconds)
            yield _Sent(piece, view, work)

    def _receive(self, ranks: Ranks, sent: Sequence[_Sent], count: Count) -> None:
        with _unbroken(ranks):
            for piece in sent:
                while not piece.work.is_completed():  # unlike in `wait`, signals are heard
                    time.sleep(_LOOK_SECONDS)
                piece.work.wait()
        if sent:
            run_workers(sent, lambda piece: piece.fill(count), min(num_copy_workers(), len(sent)))


@contextmanager
def _unbroken(ranks: Ranks) -> Iterator[None]:
    """Say of an error of gloo which ranks were connected, and how long this one has waited."""
    began = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        what = f"reading together with ranks {', '.join(map(str, ranks))} broke off: {error}"
        raise ExchangeBroken(what, time.monotonic() - began) from error


def awaited(waited: Mapping[int, float], timeout_seconds: float) -> list[int]:
    """Return for which ranks the others have waited until the exchange broke off.

    `waited`: by rank the seconds after which it broke off there. A rank that was late did not wait for anybody.
    """
    if max(waited.values()) < timeout_seconds / 4:
        return []
    return [rank for rank, seconds in waited.items() if seconds < max(waited.values()) / 2]


class _Sent(NamedTuple):
    """A piece that is under way, in memory that holds its bytes and its digest."""

    piece: _Piece
    view: memoryview
    work: Any

    def fill(self, count: Count) -> None:
        source, window, reader = self.piece
        digest = bytes(self.view[-_DIGEST_BYTES:])
        count(self.piece.num_bytes)
        if digest == _NOTHING:
            source.read(window)
        else:
            source.put(window, self.view[:-_DIGEST_BYTES], digest, reader)


def _fetched(piece: _Piece) -> Buffer:
    """Return the bytes of a piece and their digest; without one if they cannot be read, which every rank then tries."""
    buffer = Buffer.allocate(piece.num_bytes + _DIGEST_BYTES)
    data = buffer.view[:-_DIGEST_BYTES]
    try:
        piece.source.fetch(piece.window, data)
        buffer.view[-_DIGEST_BYTES:] = _IN_THE_FILE if piece.source.is_verified else xxhash.xxh3_128_digest(data)
    except (CheckpointError, EOFError, OSError) as error:
        logger.warning("%s; bytes %d-%d are read again, by every rank that wants them", error, *piece.window)
        buffer.view[-_DIGEST_BYTES:] = _NOTHING
    return buffer


def _slot(piece: _Piece) -> int:
    return round_up(piece.num_bytes + _DIGEST_BYTES, ALIGNMENT)


def is_dear(*, is_remote: bool, is_networked: bool, is_cached: bool) -> bool:
    """Return whether ranks read a file together: where reading takes longer than receiving what another rank has read.

    That is in a bucket, and on a network's file system unless the bytes are in this host's page cache. A disk of the
    host itself sends faster than gloo.
    """
    return is_remote or (is_networked and not is_cached)


def said(*, is_on: bool, dear: int, together: int, read: int) -> str:
    """Return the log's line: how many bytes of those that are dear ranks read together, this one how many; or why not.

    `is_on`: the setting.
    """
    alone = "load: each rank reads by itself what it wants"
    if not is_on:
        return f"{alone}, because checkpoint.resume.share_reads is false"
    if not dear:
        return f"{alone}: nothing to share is in a bucket, or on a network's file system and not in the page cache"
    store = f"{dear / 1e6:.0f} MB that are in a bucket, or on a network's file system and not in the page cache"
    if not together:
        return f"{alone}: of {store}, it wants less than {LEAST_BYTES >> 20} MiB together with the same ranks"
    return (
        f"load: of {store}, {together / 1e6:.0f} MB are read together with other ranks: {read / 1e6:.0f} MB by this "
        f"one, and {(together - read) / 1e6:.0f} MB are received"
    )


def warn_of(sender: int, path: str, window: Run) -> None:
    """Warn of bytes that did not arrive as they were read."""
    logger.warning(
        "%s: bytes %d-%d arrived wrong from rank %d, and are read from the file; if this comes again, look at the "
        "memory and the network of its host",
        path,
        *window,
        sender,
    )


@dataclass(frozen=True, slots=True)
class _SharedFill:
    """A fill whose sources are made, and its part of the deal, which may be nothing."""

    fill: Shareable
    sources: Sequence[Source]
    deal: Deal

    def __call__(self) -> tuple[int, int]:
        received = self.deal.num_bytes - self.deal.num_read
        return self.fill.fill_after(self.sources, self.deal) - received, received


def share_reads(tag: str, fills: Sequence[Fill], coordinator: Coordinator, *, is_on: bool) -> list[Fill]:
    """Return fills that read together what several ranks want. Collective, also for ranks that want nothing.

    1. All ranks post the runs that they want of each file that is dear to read. 2. Those of each team connect.
    Raises: PeerError; OSError.
    """
    found: list[Fill] = [*fills]
    named: dict[str, tuple[Source, Deal]] = {}

    def post() -> tuple[None, dict[str, Any]]:
        for number, fill in enumerate(fills):
            if isinstance(fill, Shareable):
                with gc_paused():
                    found[number] = made = _SharedFill(fill, fill.sources(), Deal(coordinator))
                for source in made.sources if is_on else ():
                    facts = {"is_remote": source.is_remote, "is_networked": source.is_networked}
                    if is_dear(**facts, is_cached=source.is_cached):
                        named.setdefault(f"{number} {source.key}", (source, made.deal))
        return None, {"": bool(named)} | {name: source.runs for name, (source, _) in named.items()}

    _, distinct = coordinator.exchange_distinct(tag, post)
    if any(distinct.pop("").values()):
        _share(coordinator, named, distinct)
    dear = sum(stop - start for source, _ in named.values() for start, stop in source.runs)
    deals = {id(deal): deal for _, deal in named.values()}.values()
    together, read = (sum(getattr(deal, name) for deal in deals) for name in ("num_bytes", "num_read"))
    logger.info("%s", said(is_on=is_on, dear=dear, together=together, read=read))
    return found


def _share(
    coordinator: Coordinator,
    named: Mapping[str, tuple[Source, Deal]],
    distinct: Mapping[str, Mapping[Ranks, Sequence[Run]]],
) -> None:
    """Deal what several ranks want among those that can connect. Collective."""
    alone: dict[str, list[Run]] = {name: [] for name in named}
    teams: dict[Ranks, list[tuple[str, Run]]] = {}
    for name in sorted(named):
        for run, holders in _runs(distinct[name], coordinator.rank):
            if len(holders) > 1 and run[1] - run[0] >= LEAST_RUN_BYTES:
                teams.setdefault(_team(holders, coordinator.rank), []).append((name, run))
            else:
                alone[name].append(run)
    enough = {ranks for ranks, runs in teams.items() if sum(stop - start for _, (start, stop) in runs) >= LEAST_BYTES}
    connected = coordinator.peers.connect(coordinator, lambda: enough)
    for ranks, runs in teams.items():
        if ranks in connected:
            _deal(ranks, [(*named[name], run) for name, run in runs])
        else:
            for name, run in runs:
                alone[name].append(run)
    for name, runs_alone in alone.items():
        named[name][0].keep(joined(runs_alone))


def _runs(of_ranks: Mapping[Ranks, Sequence[Run]], rank: int) -> Iterator[tuple[Run, Ranks]]:
    """Cut the runs that a rank wants where the ranks that want them change; yield each with all ranks that do."""
    edges: dict[int, list[tuple[bool, Ranks]]] = {}
    for ranks, runs in of_ranks.items():
        for start, stop in runs:
            edges.setdefault(start, []).append((True, ranks))
            edges.setdefault(stop, []).append((False, ranks))
    holders: set[int] = set()
    before = 0
    for edge, changes in sorted(edges.items()):
        if rank in holders:
            yield (before, edge), tuple(sorted(holders))
        for begins, ranks in sorted(changes):
            holders = holders.union(ranks) if begins else holders.difference(ranks)
        before = edge


def _team(holders: Ranks, rank: int) -> Ranks:
    """Return a rank's team: all holders, or of many those near it."""
    num_teams = -(-len(holders) // MOST_RANKS)
    number = holders.index(rank) * num_teams // len(holders)
    bounds = [-(-len(holders) * n // num_teams) for n in (number, number + 1)]
    return holders[bounds[0] : bounds[1]]


def _deal(ranks: Ranks, runs: Sequence[tuple[Source, Deal, Run]]) -> None:
    """Cut a team's runs into pieces, and give each to the rank that has least to read."""
    least, most = _PIECE_BYTES
    share = sum(stop - start for _, _, (start, stop) in runs) // len(ranks)
    whole = _WINDOW_BYTES // len(ranks) // ALIGNMENT * ALIGNMENT  # no piece ends within an element
    size = min(most, whole, max(least, round_up(share, least)))
    loads = dict.fromkeys(ranks, 0)
    for source, deal, run in runs:
        for window in source.cut(run, size):
            reader = min(loads, key=loads.__getitem__)
            loads[reader] += window[1] - window[0]
            deal.teams.setdefault(ranks, []).append(_Piece(source, window, reader))
