"""RunGuard: saves a run that is interrupted by a signal, a time limit, a request, an exception or a dead rank.

Owns when to save out of turn and when to stop. CheckpointManager saves; notices.py makes the ranks agree.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any, Self

from titan_ckpt.config import StopConfig
from titan_ckpt.encoding.strict_json import Json
from titan_ckpt.errors import CheckpointError, DataError
from titan_ckpt.guard.notices import Kind, Notice, NoticeBoard
from titan_ckpt.guard.requests import Requests
from titan_ckpt.manager import CheckpointManager
from titan_ckpt.saving.step import step_number

logger = logging.getLogger(__name__)

_JOB_END = "SLURM_JOB_END_TIME"
"""The end of a job of Slurm, in seconds since 1970, in its environment."""
SAME_SIGNAL_SECONDS = 2.0
"""Two signals within this time count as one: a launcher forwards a signal that its ranks receive as well."""
ANSWER_SECONDS = 60.0
"""Time in which a rank's watcher must answer. It does nothing else, but waits while C code keeps the interpreter."""
_MOST_SECONDS_AFTER_EXCEPTION = 20.0
"""Time for which a rank that has raised waits for the others, if they get so much grace."""
TIME_IS_UP = "the time of [checkpoint.stop] is up"


class StopRun(BaseException):
    """Raised by `RunGuard.check`, or your own code, on all ranks to stop the run; the guard's `with` catches it.

    The last completed step is saved. `except Exception` does not catch it.
    """


class RunGuard:
    """Saves a run's progress when it is interrupted. A context manager within CheckpointManager's; collective.

    with CheckpointManager(config, ...) as manager, RunGuard(manager) as guard:
        for step in range(manager.load().step + 1, steps + 1):
            for micro_batch in ...:
                loss(...).backward()
                guard.check()  # optional, in long steps: abandons the step, and the guard saves the one before
            optimizer.step()
            manager.save(step, last_step=step == steps)
            if guard.step_ended(step):
                break
    """

    def __init__(self, manager: CheckpointManager, *, fault: Callable[[], str | None] | None = None) -> None:
        """Take [checkpoint.stop] from the manager's config. The guard has no effect before the `with`.

        `fault` returns why what this rank has in memory must not be saved, or None. It is asked on all ranks before
        each save of the guard, which is left out if any rank has a fault.
        """
        self._manager = manager
        self._fault = fault
        self._completed = manager.completed
        self._config: StopConfig = manager.config.stop
        self._line = self._completed.coordinator.background()
        self._requests = Requests(manager, lambda: self._board.post("save", "a request in the run's folder"))
        self._board = NoticeBoard(
            self._completed.coordinator.background(),
            answer_seconds=self._answer_seconds,
            hang_seconds=None if self._config.hang_seconds == "off" else self._config.hang_seconds,
            on_signal=self._signalled,
            on_idle=self._requests.look if self._line.rank == 0 else lambda: None,
        )
        self._handlers: dict[signal.Signals, Any] = {}
        self._wakeup_fd = -1
        self._has_ended = False
        self._first_signal: float | None = None
        self._posted = False
        self._limit: float | None = None
        """The end of the run's time, on this rank's monotonic clock."""
        self._step_seconds: deque[float] = deque(maxlen=8)
        self._step_began = 0.0
        self._save_pending = False
        self._stop: Notice | None = None

    # in the loop

    def step_ended(self, step: int, metrics: Mapping[str, float] | None = None) -> bool:
        """Call it when a step is complete, after manager.save(). Return True on all ranks if the loop must end.

        The step has been saved then, if there was time.
        Raises: SaveError for a requested save; PeerError for ranks that no longer answer; CheckpointError for no step.
        """
        step = step_number(step)
        if self._completed.marked != step:
            self._completed.complete(step)
        now = time.monotonic()
        self._step_seconds.append(now - self._step_began)
        self._step_began = now
        self._look_at_the_clock(max(self._step_seconds))
        self._take(self._board.tick())
        if self._stop is not None:
            self._finish(lambda: self._manager.save(step, last_step=True, force=True, metrics=metrics, export=False))
            return True
        if self._save_pending:
            self._save_pending = False
            if (fault := self._found_fault()) is None:
                self._manager.save(step, force=True, metrics=metrics, export=False)
            self._requests.saved(step, fault)
        return False

    def check(self) -> None:
        """Raise StopRun if the run must stop. Call it inside long steps, equally often on every rank."""
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
        if self._line.rank == 0:  # all ranks have the same notice
            logger.warning("stopping: %s", notice.reason)

    def _finish(self, save: Any) -> None:
        """Finish the save in flight, and call `save` if there is time for it: rank 0 decides for all. Collective."""
        self._end_save_in_flight()
        need, left = self._completed.save_seconds(), self._seconds_left()
        if self._line.broadcast("last save", need <= left):
            if self._found_fault() is None:
                save()
                self._manager.wait()
        elif (last := self._completed.saved) != self._completed.marked:
            logger.warning("no last save: %.0f s are left and one takes %.0f s; the last is step %s", left, need, last)

    def _end_save_in_flight(self) -> None:
        """Wait for the save in flight; its failure must not cost the last save. Collective."""
        try:
            self._manager.wait()
        except Exception as error:  # of any kind: the other ranks have a PeerError, and go on to the last save
            logger.warning("the save in flight has failed: %s", error)

    def _found_fault(self) -> str | None:
        """Return why the guard must not save, the same on all ranks, or None; rank 0 logs it. Collective."""
        if self._fault is None:
            return None
        found: list[Any] = self._line.gather_results("fault", self._fault)
        fault = next(filter(None, found), None)
        if fault is not None and self._line.rank == 0:
            logger.error("nothing is saved: %s", fault)
        return fault

    def _seconds_left(self) -> float:
        """Return the time until this process is killed, at the latest."""
        assert self._stop is not None
        ends = [self._limit] if self._limit is not None else []
        if self._stop.reason != TIME_IS_UP:
            ends.append(self._stop.seconds + self._config.grace_seconds)
        return min(ends) - time.monotonic()

    def _answer_seconds(self, kind: Kind) -> float:
        """Return how long to wait for all watchers: for a stop the whole grace, because every save needs all ranks."""
        most = max(ANSWER_SECONDS, self._config.grace_seconds) if kind == "stop" else ANSWER_SECONDS
        return min(most, self._line.timeout_seconds)

    # signals and time limits

    def _signalled(self, number: int, since: float) -> None:
        """Act on a signal, in the listener's thread, so that it works while the main thread waits in a collective."""
        if number in self._handlers:  # others have Python handlers, too, and need not have a name
            self.stop_if_second(number, since)
            if not self._posted:
                self._posted = True
                self._board.post("stop", f"{signal.Signals(number).name} to rank {self._line.rank}")

    def stop_if_second(self, number: int, since: float) -> None:
        """End the process at a second signal. `since`: the earliest time at which it may have come.

        A thread meets a signal late if another one is in C and keeps the interpreter.
        """
        if self._first_signal is None:
            self._first_signal = time.monotonic()
        elif since - self._first_signal >= SAME_SIGNAL_SECONDS:
            os.write(2, f"titan_ckpt: second signal ({signal.Signals(number).name}): stopping at once\n".encode())
            os._exit(128 + number)

    def _look_at_the_clock(self, step_seconds: float) -> None:
        """Post a stop while there is time for one more step, as long as the longest of the last ones, and for a save.

        Rank 0's clock counts.
        """
        if self._limit is None or self._line.rank != 0 or self._posted:
            return
        if time.monotonic() + 1.5 * (step_seconds + self._completed.save_seconds()) + 1.0 >= self._limit:
            self._posted = True
            self._board.post("stop", TIME_IS_UP)

    # the context manager

    def __enter__(self) -> Self:
        now = self._step_began = time.monotonic()
        hours, job_ends = self._config.after_hours, os.environ.get(_JOB_END, "")
        left = [hours * 3600] if hours is not None else []
        left += [int(job_ends) - time.time()] if job_ends.isdecimal() else []
        self._limit = now + min(left) if left else None
        if self._line.rank == 0:
            self._requests.announce()
        self._board.start()
        self._install()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> bool:
        try:
            if isinstance(value, StopRun):
                if self._stop is None:
                    self._take(Notice("stop", "the run's own code has raised StopRun", self._line.rank, math.inf))
                if self._manager.config.save is not None:
                    marked = self._line.gather("stopped within a step", self._completed.marked)
                    if self._is_whole(marked):
                        self._finish(self._completed.save)
                return True
            own = isinstance(value, CheckpointError) and not isinstance(value, DataError)
            wanted = isinstance(value, (Exception, KeyboardInterrupt)) and not own
            if wanted and "exception" in self._config.on and self._manager.config.save is not None:
                assert value is not None
                self._save_after(value)
        finally:
            self._restore()
            self._board.close()
            self._requests.close()
        return False

    def _is_whole(self, marked: list[Json]) -> bool:
        """Return whether all ranks have the same completed step in memory; log if they do not."""
        whole = None not in marked and len(set(map(str, marked))) == 1
        if not whole:
            last = "the start" if self._completed.saved is None else f"step {self._completed.saved}"
            what = "no step was completed, or one is partly applied, or a load failed"
            logger.warning(f"nothing newer to save: since {last} {what}")
        return whole

    def _save_after(self, value: BaseException) -> None:
        """Save the last completed step, if all ranks have raised with the same one in memory, whole. Never raises."""
        bound = min(_MOST_SECONDS_AFTER_EXCEPTION, self._config.grace_seconds)
        if self._line.world_size > 1:
            logger.warning(
                f"rank {self._line.rank} has raised {type(value).__name__}: it waits up to {bound:g} s for the other "
                "ranks, to save the last completed step"
            )
        try:
            marked = self._line.gather("exception", self._completed.marked, timeout_seconds=bound)
            if not self._is_whole(marked):
                return
            # a rank that raised long before the others has posted its mark, and may be gone
            self._line.barrier("exception, on all ranks", timeout_seconds=bound)
            if self._found_fault() is not None:
                return
            self._end_save_in_flight()
            logger.warning("%s: saving step %s, the last that was completed", type(value).__name__, marked[0])
            self._completed.save()
        except Exception as error:  # the run's own error must reach the user
            logger.warning("%s: the last completed step is not saved: %s", type(value).__name__, error)

    def _install(self) -> None:
        """Install signal handlers. C writes signals to the listener's pipe; the handlers themselves do nothing."""
        if threading.current_thread() is not threading.main_thread():
            logger.warning("signals are not noticed: a RunGuard was entered outside the main thread")
            return
        for guard in [guard for guard in _guards if guard._has_ended]:  # noqa: SLF001
            guard.put_back()
        _guards.append(self)
        self._wakeup_fd = signal.set_wakeup_fd(self._board.signal_fd, warn_on_full_buffer=False)
        for number in [signal.Signals[name] for name in self._config.on if name != "exception"]:
            if (before := signal.getsignal(number)) is not None:  # None: C code handles it, such as faulthandler
                self._handlers[number] = before  # first: the listener passes over signals that are not there
                signal.signal(number, _noticed_elsewhere)

    def _restore(self) -> None:
        """Restore earlier handlers, unless a signal has ended the run: a late second one must not kill the process.

        The guard of the process's next run does it then.
        """
        if self not in _guards:
            return
        signal.set_wakeup_fd(self._wakeup_fd, warn_on_full_buffer=False)
        self._has_ended = True
        if self._first_signal is None:
            self.put_back()

    def put_back(self) -> None:
        """Restore the handlers that signals had before this guard's `with`."""
        _guards.remove(self)
        for number, before in self._handlers.items():
            signal.signal(number, before)


_guards: list[RunGuard] = []


def _noticed_elsewhere(number: int, frame: FrameType | None) -> None:
    """Handle a signal in the main thread, where it may come late; without a handler it would end the process."""
    for guard in _guards:
        if guard._has_ended:  # noqa: SLF001  # nobody else listens
            guard.stop_if_second(number, time.monotonic())


def _forget_in_child() -> None:
    """Remove the guards from a forked process, such as a dataloader's worker: signals end it as any other."""
    if _guards:  # also if none has a handler: a guard that stops at exceptions alone has a listener, too
        signal.set_wakeup_fd(-1)
    for number in {number for guard in _guards for number in guard._handlers}:  # noqa: SLF001
        signal.signal(number, signal.SIG_DFL)
    _guards.clear()


os.register_at_fork(after_in_child=_forget_in_child)
