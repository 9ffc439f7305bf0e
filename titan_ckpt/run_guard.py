"""RunGuard: what a run keeps when it is interrupted by a signal, a time limit, a request, an exception or a dead rank.

Owns when to save out of turn and when to stop. How is CheckpointManager's, agreement between ranks notices.py's.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import Any, Self

from titan_ckpt import save_request
from titan_ckpt.config import StopConfig
from titan_ckpt.errors import CheckpointError
from titan_ckpt.manager import CheckpointManager
from titan_ckpt.notices import Notice, NoticeBoard
from titan_ckpt.saving import SaveHandle
from titan_ckpt.strict_json import Json

logger = logging.getLogger(__name__)

SAME_SIGNAL_SECONDS = 2.0
"""A launcher passes on a signal that its ranks got as well: what follows so quickly is no second one."""
ANSWER_SECONDS = 60.0
"""How long a rank's watcher, which does nothing else, may take to answer."""


class StopRun(BaseException):
    """The run stops here, on all ranks: raised by `RunGuard.check`, taken by its `with`. Not for `except Exception`."""


class RunGuard:
    """Saves a run's progress when it is interrupted. A context manager within CheckpointManager's; collective.

    with CheckpointManager(config, ...) as manager, RunGuard(manager) as guard:
        for step in range(manager.load().step + 1, steps + 1):
            for micro_batch in ...:
                loss(...).backward()
                guard.check()  # optional, inside what takes long: leaves a step half done, and saves the one before
            optimizer.step()
            manager.save(step, last_step=step == steps)
            if guard.step_ended(step):
                break
    """

    def __init__(self, manager: CheckpointManager) -> None:
        """Take [checkpoint.stop] from the manager's config. Nothing is guarded before the `with`."""
        self._manager = manager
        self._config: StopConfig = manager.config.stop
        self._line = manager.run_line()
        self._board = NoticeBoard(
            manager.run_line(),
            answer_seconds=min(ANSWER_SECONDS, self._line.timeout_seconds),
            hang_seconds=self._config.hang_seconds,
            on_signal=self._signalled,
            on_idle=self._look_for_requests if self._line.rank == 0 else lambda: None,
        )
        self._handlers: dict[signal.Signals, Any] = {}
        self._wakeup_fd = -1
        self._first_signal: float | None = None
        self._posted = False
        self._limit: float | None = None
        self._step_seconds: deque[float] = deque(maxlen=8)
        self._step_began = 0.0
        self._asked: str | None = None
        self._answering: tuple[str, int, SaveHandle | None] | None = None
        self._save_pending = False
        self._stop: Notice | None = None

    # in the loop

    def step_ended(self, step: int, metrics: Mapping[str, float] | None = None) -> bool:
        """Call when a step is complete, after manager.save(). True on all ranks if the loop must end: it is saved.

        Raises: SaveError for a save that was asked for; PeerError for ranks that no longer answer.
        """
        if self._manager.marked_step != step:
            self._manager.mark_step(step)
        now = time.monotonic()
        self._step_seconds.append(now - self._step_began)
        self._step_began = now
        self._look_at_the_clock(max(self._step_seconds))
        self._take(self._board.tick())
        if self._stop is not None:
            self._finish(lambda: self._manager.save(step, force=True, metrics=metrics, export=False))
            return True
        if self._save_pending:
            self._save_pending = False
            self._manager.save(step, force=True, metrics=metrics, export=False)
            if self._line.rank == 0 and self._asked is not None:
                self._answering, self._asked = (self._asked, step, self._manager.in_flight), None
        return False

    def check(self) -> None:
        """Call inside what takes long, equally often on every rank: raises StopRun there if the run is to stop."""
        self._look_at_the_clock(0.0)
        self._take(self._board.tick())
        if self._stop is not None:
            raise StopRun

    @property
    def stopped(self) -> str | None:
        """Return why the run was stopped before its last step, or None."""
        return None if self._stop is None else self._stop.reason

    def _take(self, notice: Notice | None) -> None:
        if notice is None:
            return
        if notice.kind == "save":
            self._save_pending = True
            return
        self._stop = notice
        logger.warning("stopping: %s", notice.reason)

    def _finish(self, save: Any) -> None:
        """Finish the save in flight, and make a last one if there is time: rank 0 decides for all. Collective."""
        assert self._stop is not None
        try:
            self._manager.wait()
        except CheckpointError as error:
            logger.warning("the save in flight has failed: %s", error)  # the last one may still succeed
        need, left = self._manager.save_seconds(), self._seconds_left()
        if self._line.broadcast("last save", need <= left):
            save()
            self._manager.wait()
        elif self._manager.saved_step != self._manager.marked_step:
            logger.warning(
                "no last save: %.0f s are left and one takes %.0f s; the last is step %s",
                left,
                need,
                self._manager.saved_step,
            )

    def _seconds_left(self) -> float:
        assert self._stop is not None
        if self._limit is not None and self._limit - time.time() < self._config.grace_seconds:
            return self._limit - time.time()
        return self._stop.unix_seconds + self._config.grace_seconds - time.time()

    # what is noticed

    def _signalled(self, number: int) -> None:
        """In the watcher's thread, so that it works while the main one waits in a collective."""
        if signal.Signals(number) in self._handlers:
            self.stop_if_second(number)
            if not self._posted:
                self._posted = True
                self._board.post("stop", f"{signal.Signals(number).name} to rank {self._line.rank}")

    def stop_if_second(self, number: int) -> None:
        """End the process where a signal was noticed before; in either thread, for each may be waiting for ranks."""
        now = time.monotonic()
        if self._first_signal is None:
            self._first_signal = now
        elif now - self._first_signal >= SAME_SIGNAL_SECONDS:
            os.write(2, f"titan_ckpt: second signal ({signal.Signals(number).name}): stopping at once\n".encode())
            os._exit(128 + number)

    def forget(self) -> None:
        """Let signals be what they are by default: in a forked process."""
        signal.set_wakeup_fd(-1)
        for number in self._handlers:
            signal.signal(number, signal.SIG_DFL)

    def _look_at_the_clock(self, step_seconds: float) -> None:
        """Stop in time for one more step like the longest of the last ones, and for a save: rank 0's clock counts."""
        if self._limit is None or self._line.rank != 0 or self._posted:
            return
        if time.time() + 1.5 * (step_seconds + self._manager.save_seconds()) + 1.0 >= self._limit:
            self._posted = True
            self._board.post("stop", "the time of [checkpoint.stop] is up")

    def _look_for_requests(self) -> None:
        """In rank 0's watcher: take a request to save, and answer the one before when its save has ended."""
        run = self._manager.base_folder
        if self._answering is not None:
            name, step, handle = self._answering
            if handle is not None and not handle.done:
                return
            error = None if handle is None or handle.succeeded() else str(handle.error or "see the log of the run")
            save_request.answer(run, save_request.Answer(name, step, error))
            self._answering = None
        elif self._asked is None and (asked := save_request.pending(run)) is not None:
            save_request.withdraw(run)
            if self._manager.config.save is None:
                why = "this run saves nothing: its config has no [checkpoint.save]"
                save_request.answer(run, save_request.Answer(asked, 0, why))
                return
            self._asked = asked
            self._board.post("save", "a request in the run's folder")

    # the with

    def __enter__(self) -> Self:
        now = time.time()
        hours = self._config.after_hours
        limits = [self._config.at_unix_seconds, now + hours * 3600 if hours is not None else None]
        self._limit = min((limit for limit in limits if limit is not None), default=None)
        self._step_began = time.monotonic()
        self._board.start()
        self._install()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> bool:
        try:
            if isinstance(value, StopRun):
                self._finish_at_mark()
                return True
            wanted = isinstance(value, (Exception, KeyboardInterrupt)) and not isinstance(value, CheckpointError)
            if wanted and self._config.save_on_exception and self._manager.config.save is not None:
                assert value is not None
                self._save_after(value)
        finally:
            self._restore()
            self._board.close()
            if self._line.rank == 0 and self._asked is not None:
                why = "the run ended before it could save"
                save_request.answer(self._manager.base_folder, save_request.Answer(self._asked, 0, why))
            elif self._line.rank == 0 and self._answering is not None:
                self._answer_last()
        return False

    def _finish_at_mark(self) -> None:
        if self._manager.config.save is None:
            return
        if self._is_whole(self._line.gather("stopped within a step", self._manager.marked_step)):
            self._finish(self._manager.save_marked)

    def _is_whole(self, marked: list[Json]) -> bool:
        """Say whether all ranks have the same completed step in memory; log it where not."""
        whole = None not in marked and len(set(map(str, marked))) == 1
        if not whole:
            logger.warning(
                "nothing newer to save: since %s no step was completed, or one is partly applied",
                "the start" if self._manager.saved_step is None else f"step {self._manager.saved_step}",
            )
        return whole

    def _save_after(self, value: BaseException) -> None:
        """Save the last completed step, if all ranks have raised with the same one in memory, whole. Never raises."""
        bound = self._config.exception_seconds
        if self._line.world_size > 1:
            logger.warning(
                "rank %d has raised %s: it waits up to %g s for the other ranks, to save the last completed step",
                self._line.rank,
                type(value).__name__,
                bound,
            )
        try:
            marked = self._line.gather("exception", self._manager.marked_step, timeout_seconds=bound)
            if not self._is_whole(marked):
                return
            # one that raised long before the others has left its mark, and may be gone
            self._line.barrier("exception, on all ranks", timeout_seconds=bound)
            logger.warning("%s: saving step %s, the last that was completed", type(value).__name__, marked[0])
            self._manager.save_marked()
        except Exception as error:  # the run's own error is the one to be seen
            logger.warning("%s: the last completed step is not saved: %s", type(value).__name__, error)

    def _answer_last(self) -> None:
        assert self._answering is not None
        handle = self._answering[2]
        if handle is not None:
            while not handle.done:
                time.sleep(0.05)
        self._look_for_requests()

    def _install(self) -> None:
        """Have signals noticed: what C writes to the watcher's pipe counts, the handlers only look for a second one."""
        if threading.current_thread() is not threading.main_thread():
            logger.warning("signals are not noticed: a RunGuard was entered outside the main thread")
            return
        _guards[:] = [guard for guard in _guards if guard._first_signal is None]  # noqa: SLF001 - not of a run that ended
        _guards.append(self)
        self._wakeup_fd = signal.set_wakeup_fd(self._board.signal_fd, warn_on_full_buffer=False)
        for name in self._config.signals:
            number = signal.Signals[name]
            if signal.getsignal(number) is not None:  # None: something in C waits for it, such as faulthandler
                self._handlers[number] = signal.signal(number, _noticed_elsewhere)

    def _restore(self) -> None:
        """Let signals be what they were, unless one has ended the run: passed on late, it kills nothing."""
        if self not in _guards:
            return
        signal.set_wakeup_fd(self._wakeup_fd, warn_on_full_buffer=False)
        if self._first_signal is not None:
            return
        _guards.remove(self)
        for number, before in self._handlers.items():
            signal.signal(number, before)


_guards: list[RunGuard] = []


def _noticed_elsewhere(number: int, frame: FrameType | None) -> None:
    """Stand in for a handler, without which the signal would end the process."""
    for guard in _guards:
        guard.stop_if_second(number)


def _forget_in_child() -> None:
    """A forked process, such as a dataloader's worker, ends on signals as any other, and tells us nothing."""
    for guard in _guards:
        guard.forget()
    _guards.clear()


os.register_at_fork(after_in_child=_forget_in_child)
