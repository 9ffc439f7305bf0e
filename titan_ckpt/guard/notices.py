"""Notices: all ranks act on an event that one rank notices, at the same point of their loops.

Owns the agreement and the threads that listen for it and for signals. Knows no checkpoint and no step, and decides
nothing.

Every rank calls `tick` at the same points of its loop: after a step, after a micro-batch, after a batch of an
evaluation. A tick exchanges nothing. A rank that notices an event posts it to the job's store. The watcher thread of
every rank reads the post and holds its own rank's ticks, and all exchange how many ticks they have made: the notice
takes effect at the first tick that no rank has made yet.
Source: JAX, coordination service, preemption_sync_manager, for the idea to agree on a later call.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch.distributed as dist

from titan_ckpt.disk import kernel
from titan_ckpt.distributed.coordinator import HAS_LEFT, Coordinator
from titan_ckpt.errors import PeerError

logger = logging.getLogger(__name__)

Kind = Literal["stop", "save", "roll call"]

_LISTEN_SECONDS = 0.25


class _Pipe:
    """Wakes a thread; no lock, which an interrupt might leave locked."""

    def __init__(self) -> None:
        self._read_fd, self.write_fd = map(kernel.keep_from_children, os.pipe())
        os.set_blocking(self.write_fd, False)
        self._poll = select.poll()  # select() knows no descriptor above 1023
        self._poll.register(self._read_fd, select.POLLIN)

    def wake(self) -> None:
        """Write a byte, unless the pipe is full or closed."""
        with contextlib.suppress(OSError):
            os.write(self.write_fd, b"\0")

    def read(self, seconds: float) -> bytes:
        """Return what has been written; b"" if nothing is within this time."""
        return os.read(self._read_fd, 512) if self._poll.poll(1000 * seconds) else b""

    def close(self) -> None:
        fds, self.write_fd = (self._read_fd, self.write_fd), -1
        for fd in fds:
            kernel.close(fd)


@dataclass(frozen=True, slots=True)
class Notice:
    """An event that a rank has noticed. A "roll call" asks every rank's watcher to answer, and never reaches a tick."""

    kind: Kind
    reason: str
    rank: int
    seconds: float = 0.0
    """The earliest time at which it was noticed, on this rank's monotonic clock: the hosts' clocks may differ."""


class NoticeBoard:
    """One rank's view of the notices. Only the training thread calls `tick`; any thread may call the other methods."""

    def __init__(
        self,
        line: Coordinator,
        *,
        answer_seconds: Callable[[Kind], float],
        hang_seconds: float | None,
        on_signal: Callable[[int, float], None],
        on_idle: Callable[[], None],
    ) -> None:
        """Take an exclusive line to the other ranks.

        `answer_seconds`: how long to wait for all watchers to answer a notice of a kind. `hang_seconds`: after this
        time without a tick, a rank starts a roll call. `on_idle` is called repeatedly in the watcher's thread.
        `on_signal` gets the number of every signal in a thread of its own, because the watcher waits for other ranks,
        and a time since which the signal has come for certain.
        """
        self._wake, self._signals = _Pipe(), _Pipe()
        self._line = line
        self._answer_seconds = answer_seconds
        self._hang_seconds = hang_seconds
        self._on_signal = on_signal
        self._on_idle = on_idle
        # All ranks poll one store: together at most some thousand times a second.
        self._interval = max(0.25, line.world_size / 4000)
        self._posts: deque[Notice] = deque()
        self._lock = threading.RLock()  # entered itself: an interrupt in `Condition.__enter__` leaves it taken
        self._changed = threading.Condition(self._lock)
        self._closing = False
        self._ticks = 0
        self._last_tick = time.monotonic()
        self._held = False
        self._due: deque[tuple[int, Notice]] = deque()
        self._error: PeerError | None = None
        self._threads = [
            threading.Thread(target=self._watch, name="titan_ckpt notices", daemon=True),
            threading.Thread(target=self._listen, name="titan_ckpt signals", daemon=True),
        ]

    @property
    def signal_fd(self) -> int:
        """File descriptor for `signal.set_wakeup_fd`: a signal is noticed even while the main thread is in C++."""
        return self._signals.write_fd

    def start(self) -> None:
        self._last_tick = time.monotonic()
        for thread in self._threads:
            thread.start()

    def post(self, kind: Kind, reason: str) -> None:
        """Post a notice to all ranks. The first notice of a kind counts, until it has taken effect."""
        self._posts.append(Notice(kind, reason, self._line.rank))
        self._wake.wake()

    def tick(self) -> Notice | None:
        """Return the notice that takes effect at this tick, the same on all ranks; usually None.

        Raises: PeerError naming the ranks whose watchers do not answer.
        """
        with self._lock:
            self._ticks += 1
            self._last_tick = time.monotonic()
            while self._held:
                self._changed.wait()
            if self._error is not None:
                raise self._error
            if self._due and self._ticks >= self._due[0][0]:
                return self._due.popleft()[1]
            return None

    def close(self) -> None:
        """Stop listening, without waiting for other ranks."""
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        for pipe, thread in zip((self._wake, self._signals), self._threads, strict=True):
            pipe.wake()
            if thread.ident is not None:
                thread.join(2.0)
            if not thread.is_alive():  # otherwise it waits for dead ranks, and ends with this process
                pipe.close()

    def _listen(self) -> None:
        empty = time.monotonic()
        while not self._closing:
            looked = time.monotonic()
            numbers = self._signals.read(_LISTEN_SECONDS)
            if not numbers:
                empty = looked
            for number in numbers.replace(b"\0", b""):
                self._on_signal(number, empty)

    def _watch(self) -> None:
        number = 0
        try:
            while not self._closing:
                self._wake.read(self._interval)
                self._on_idle()
                self._ask_if_hung()
                if (notice := self._next(number)) is not None:
                    number += 1
                    self._act(notice)
        except dist.DistError as error:
            self._fail(PeerError(f"lost the store of the process group, which rank 0 or its launcher serves: {error}"))
        except Exception as error:
            self._fail(PeerError(f"the watcher of this rank failed: {type(error).__name__}: {error}"))
            logger.exception("the watcher for signals, time limits and requests has failed")

    def _next(self, number: int) -> Notice | None:
        """Post this rank's first notice, and return the notice of this number if any rank has posted one."""
        text = self._line.first_post(f"notice/{number}", json.dumps(asdict(self._posts[0])) if self._posts else None)
        if text is None:
            return None
        notice = Notice(**json.loads(text) | {"seconds": time.monotonic() - self._interval})
        while self._posts and self._posts[0].kind == notice.kind:
            self._posts.popleft()  # several ranks have noticed the same event
        return notice

    def _act(self, notice: Notice) -> None:
        """Agree on the tick at which a notice takes effect. Collective.

        1 Hold this rank's ticks. 2 Exchange how many ticks every rank has made. 3 Release the ticks: the first that no
        rank has made yet returns the notice.
        """
        with self._lock:
            self._held = notice.kind != "roll call"
            made = self._ticks
        tag = f"{notice.kind} after {notice.reason}"
        try:
            ticks: list[Any] = self._line.gather(tag, made, timeout_seconds=self._answer_seconds(notice.kind))
        except PeerError as error:
            if not self._closing:
                in_order = str(error).endswith(HAS_LEFT)  # and this one does what comes after training
                self._fail(error, ends=notice.kind == "roll call" and not in_order)
            return
        if notice.kind == "roll call":
            self._report(notice.reason, ticks)
            return
        with self._lock:
            self._due.append((max(ticks) + 1, notice))
            self._held = False
            self._changed.notify_all()

    def _ask_if_hung(self) -> None:
        silent = time.monotonic() - self._last_tick
        if self._hang_seconds is not None and silent > self._hang_seconds and not self._held:
            with self._lock:
                self._last_tick = time.monotonic()  # ask again after the same time
            self.post("roll call", f"no progress for {silent:.0f} s")

    def _report(self, reason: str, ticks: list[int]) -> None:
        behind = [str(rank) for rank, number in enumerate(ticks) if number == min(ticks)]
        names = ", ".join(behind[:16]) if len(behind) < len(ticks) else "none"
        if self._line.rank == 0:
            logger.warning("%s; every process answers. Furthest behind: rank %s", reason, names)

    def _fail(self, error: PeerError, ends: bool = False) -> None:
        """Let the next tick raise `error`. `ends`: end the process, which waits in a collective for a dead rank."""
        with self._lock:
            self._error, self._held = error, False
            self._changed.notify_all()
        if ends:
            logger.critical("no progress, and not every process answers: %s. This process ends", error)
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            logging.shutdown()
            os._exit(1)
