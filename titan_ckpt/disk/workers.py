"""Threads: workers that do I/O, their devices and bounce buffers, and a call that no interrupt of a waiter loses.

Signal handlers, that of Ctrl-C among them, run between any two instructions of the main thread and may raise there. So
nothing here relies on the line after a call: one atomic operation decides who makes the call, its end is a plain flag,
and waiting changes nothing. threading.Event and Thread.join do not suffice: an interrupt can leave the lock of the one
taken, and makes the other say of a thread that runs that it has ended.

A new thread has device 0 as its current device, on every rank. Its first call of CUDA would take some hundred MiB of
device 0, which belongs to another rank. So each thread of this package that may call CUDA starts with `as_here`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from titan_ckpt.disk.files import IO_BYTES, NUM_WORKERS
from titan_ckpt.disk.kernel import Buffer
from titan_ckpt.errors import SaveError

if TYPE_CHECKING:
    import torch

_LOOK_SECONDS = 1.0
"""Longest time between two looks at the flag, if an interrupt has left the lock taken."""


def num_copy_workers() -> int:
    """Return the number of threads that copy memory: this rank's share of the processors, at most NUM_WORKERS.

    Copying, unlike waiting for a disk, uses a processor, so more threads would only slow each other and the other ranks
    of this machine (LOCAL_WORLD_SIZE, which torchrun sets).
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(NUM_WORKERS, len(os.sched_getaffinity(0)) // max(1, ranks)))


def as_here() -> Callable[[], None]:
    """Return the first call for a new thread, which gives it the current device and stream of this one.

    The copies of such a thread follow the work that this thread has enqueued, also on a stream of the user's own.
    Nothing is done without CUDA, and in a forked child, which cannot use it.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # the writer process has none; another thread may import it
    if cuda is not None and cuda.is_initialized():
        return partial(cuda.set_stream, cuda.current_stream())
    return lambda: None


_Item = TypeVar("_Item")


def run_workers(items: Iterable[_Item], function: Callable[[_Item], None], num_workers: int = NUM_WORKERS) -> None:
    """Call the function with every item, in order, on several threads; the caller's thread is one of them.

    The first error, or an interrupt of the caller's thread, stops all threads at their next item, and is raised when
    all have stopped. If no thread can be started, as at the exit of Python 3.12 and later while it waits for a save,
    the caller's thread does all the work.
    """
    todo, end = iter(items), object()
    begin = as_here()
    errors: list[BaseException] = []
    busy: set[int] = set()
    lock = threading.RLock()  # entered itself: an interrupt in `Condition.__enter__` leaves it taken
    changed = threading.Condition(lock)

    def work() -> None:
        thread = threading.get_ident()
        try:
            begin()
            while True:
                with lock:
                    item = end if errors else next(todo, end)
                    if item is end:
                        return
                    busy.add(thread)
                function(item)  # type: ignore[arg-type]
        except BaseException as error:
            errors.append(error)
        finally:
            with lock:
                busy.discard(thread)
                changed.notify_all()

    threads: list[threading.Thread] = []
    try:
        for _ in range(num_workers - 1):
            thread = threading.Thread(target=work, name="titan_ckpt-io", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                break
            threads.append(thread)
        work()
        for thread in threads:
            thread.join()
    except BaseException as error:  # an interrupt, after which `join` takes threads for ended that still run
        errors.append(error)
        while busy - {threading.get_ident()}:  # whatever interrupts this: they use what the caller then closes
            with suppress(BaseException), lock:
                changed.wait(1.0)
    if errors:
        raise errors[0]


def batches(
    items: Iterable[_Item], num_bytes: Callable[[_Item], int], most_bytes: int, most_items: int = 1 << 62
) -> Iterator[list[_Item]]:
    """Gather neighbours for one read or one call, so many bytes and items at most; an item that is larger is alone."""
    batch: list[_Item] = []
    total = 0
    for item in items:
        size = num_bytes(item)
        if batch and (total + size > most_bytes or len(batch) == most_items):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch


@contextmanager
def meanwhile(action: Callable[[], None], *, patience: float | None = None) -> Iterator[None]:
    """Run the action in a second thread while the block runs; leaving waits for it and raises its error.

    `patience`: an error of the block waits so many seconds for the thread, which then is left to end by itself. If no
    thread can be started, the action comes first, in this thread.
    """
    errors: list[BaseException] = []
    begin = as_here()

    def run() -> None:
        try:
            begin()
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="titan_ckpt-meanwhile", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        action()
        yield
        return
    try:
        yield
    except BaseException:
        thread.join(patience)
        raise
    thread.join()
    if errors:
        raise errors[0]


@dataclass(slots=True, eq=False)
class _Bounce:
    buffer: Buffer
    pinned: bool | None = None
    """Whether the memory is page-locked; None until CUDA was asked."""
    copies: Sequence[torch.cuda.Event] = ()
    """Ends of the copies to devices that still read the buffer."""

    def await_copies(self) -> None:
        for event in self.copies:
            event.synchronize()


class _Uploads(threading.local):
    events: tuple[torch.cuda.Event, ...] = ()


_uploads = _Uploads()
"""This thread's copies to devices from the bounce buffer that it has."""


def upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on the device of a part of a bounce buffer, without waiting: the buffer is lent again after it."""
    import torch

    is_cuda = device.type == "cuda"
    copied = values.to(device, non_blocking=is_cuda)
    if is_cuda:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        _uploads.events += (event,)
    return copied


_bounces: deque[_Bounce] = deque()
"""Buffers that nobody uses; the one used last, which the processor's cache may hold, is the last one."""

os.register_at_fork(after_in_child=lambda: _bounces.clear())  # a child does not inherit page-locked memory


@contextmanager
def bounce_buffer() -> Iterator[Buffer]:
    """Lend an aligned buffer of IO_BYTES, page-locked if CUDA is in use. Buffers stay for later saves and loads.

    There is at most one per worker, and two while devices read them: a worker fills one while the other is copied.
    """
    import torch

    from titan_ckpt.disk import cuda

    bounce = _take_bounce()
    if bounce.pinned is None and torch.cuda.is_initialized():
        bounce.buffer.tensor.zero_()
        bounce.pinned = cuda.pin(bounce.buffer)
    outer, _uploads.events = _uploads.events, ()  # from a buffer that this thread holds meanwhile
    try:
        yield bounce.buffer
    finally:
        bounce.copies, _uploads.events = _uploads.events, outer
        _bounces.append(bounce)


def _take_bounce() -> _Bounce:
    with suppress(IndexError):  # `if _bounces` first would race with other threads
        bounce = _bounces.pop()
        if all(event.query() for event in bounce.copies):
            return bounce
        _bounces.append(bounce)
        if len(_bounces) >= NUM_WORKERS:
            bounce = _bounces.popleft()
            bounce.await_copies()
            return bounce
    return _Bounce(Buffer.allocate(IO_BYTES))


def finish_uploads() -> None:
    """Wait for all copies from bounce buffers to devices. Called when no thread uses one."""
    for bounce in tuple(_bounces):
        bounce.await_copies()


class Latch:
    """A mark that one thread sets and others wait for."""

    def __init__(self) -> None:
        self.is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Set the mark. One thread alone calls it."""
        if not self.is_set:
            self.is_set = True
            self._lock.release()

    def wait(self) -> None:
        """Block until the mark is set."""
        while not self.is_set:
            if self._lock.acquire(timeout=_LOOK_SECONDS):
                self._lock.release()


class BackgroundCall:
    """A call that is made once: by `start` in a thread, or by `run` in this one. Keeps its error."""

    def __init__(self, act: Callable[[], object], name: str, *, late: bool = True, daemon: bool = False) -> None:
        """`late`: if an interrupt kept the thread from starting, whoever waits makes the call; otherwise it fails."""
        self._error: BaseException | None = None
        self._has_succeeded = False
        self._act, self._name, self._late, self._daemon = act, name, late, daemon
        self._as_here = as_here()
        self._makers: dict[str, int] = {}
        """The thread that makes the call, under one key."""
        self._is_started = False
        self._ended = Latch()

    @property
    def error(self) -> BaseException | None:
        """Return why the call has not succeeded; None if it has."""
        if self._error is None and not self._has_succeeded:
            return SaveError(f"{self._name}: an interrupt came before it had ended")
        return self._error

    @property
    def done(self) -> bool:
        return self._ended.is_set

    @property
    def is_running(self) -> bool:
        """Return whether a thread makes the call now. False after an interrupted start, which `wait` sees to."""
        return self._is_started and not self.done

    def start(self) -> None:
        """Make the call in a thread, whose device is this thread's; here, if there can be no more threads.

        Raises: RuntimeError for a call that cannot be made here.
        """
        try:
            threading.Thread(target=self.run, name=self._name, daemon=self._daemon).start()
        except RuntimeError as error:
            if not self._late or "new thread" not in str(error):  # the handler of a signal may raise one, too
                raise
            self.run()
        self._is_started = True

    def run(self, *, make: bool = True) -> None:
        """Make the call in this thread, unless another one does. `make`: False ends a call that nobody makes."""
        me = threading.get_ident()
        was_left = self._makers.get("is") == me
        if self._makers.setdefault("is", me) != me or self.done:
            return
        try:
            if make and not was_left:  # this thread was interrupted in it before, and the error stands
                self._as_here()
                self._act()
                self._has_succeeded = True
        except BaseException as error:
            self._error = error
        self._act = lambda: None  # what it holds is not needed any more
        self._ended.set()

    def see_to_start(self) -> None:
        """Make the call here, or end it, if an interrupt kept its thread from starting."""
        if not self._is_started:
            self.run(make=self._late)

    def wait(self) -> None:
        """Block until the call has ended. It may be left by an interrupt and called again; `error` has the outcome."""
        self.see_to_start()
        self._ended.wait()
