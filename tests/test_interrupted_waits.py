"""Interrupts in the waits of a manager, at every bytecode of them; then the run goes on, as a notebook does."""

from __future__ import annotations

import copy
import dis
import errno
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import tests.memory_store  # noqa: F401 - it names the scheme
import titan_ckpt
from tests.faults.scenarios import SOAK
from tests.faults.shim import intercepted
from tests.run_folder import Disk, RunFolder
from tests.world import manager as build
from tests.world import step_with_ones
from titan_ckpt.config import ExportConfig
from titan_ckpt.directory.steps import open_steps
from titan_ckpt.disk import posix
from titan_ckpt.disk.workers import run_workers
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import SaveError
from titan_ckpt.formats.native.writer import Segments
from titan_ckpt.formats.publish.exchange import Exchange
from titan_ckpt.geometry.chunks import Block, Chunk, TensorInfo
from titan_ckpt.stores.object_files import ObjectWriter
from titan_ckpt.stores.objects import BucketPath
from titan_ckpt.stores.store import open_location

PACKAGE = str(Path(titan_ckpt.__file__).parent)


UNREACHED = 10**9
"""Nothing has so many bytecodes: this position counts them, once, because a wait that looks again has more."""


def _is_finalizer(frame: Any) -> bool:
    """Return whether Python runs this for memory that has gone: it ignores what is raised there, and prints it."""
    return "_unmap" in (frame.f_code.co_name, frame.f_back.f_code.co_name)


class Interrupt:
    """Raises KeyboardInterrupt in this thread before the n-th bytecode of the package that the block runs.

    RERAISE is left out: Python looks for signals at calls, jumps and the starts of functions. None of them is between
    the end of a handler, after which an exception is in no `__context__`, and this bytecode, which raises it again.
    """

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0
        self.raised: list[KeyboardInterrupt] = []

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE) or _is_finalizer(frame):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_code.co_code[frame.f_lasti] != dis.opmap["RERAISE"]:
            self.seen += 1
            if self.seen == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace

    def around(self, act: Callable[[], object]) -> bool:
        """Return whether `act` was interrupted."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            act()
        except KeyboardInterrupt as error:
            self.raised.append(error)
            return True
        finally:
            sys.settrace(before)
        return False


@contextmanager
def slow() -> Iterator[None]:
    """Let copies and the writes of other threads begin late, so that whoever waits for them does wait."""
    fill = Segments.fill

    def late(*arguments: Any) -> None:
        time.sleep(0.005)
        fill(*arguments)

    def write(name: str, operation: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if name == "pwrite_all" and threading.current_thread() is not threading.main_thread():
            time.sleep(0.005)
        return operation(*arguments)

    with pytest.MonkeyPatch.context() as patch, intercepted(write):
        patch.setattr(Segments, "fill", late)
        yield


class Notebook:
    """A run of which cells are interrupted; it knows the weights of every step that it has saved."""

    def __init__(self, folder: Path, mode: Any, *, exports: bool = False) -> None:
        self.folder = folder
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.manager = build(
            folder,
            self.model,
            self.optimizer,
            async_mode=mode,
            export=(ExportConfig("dcp", interval=1),) if exports else (),
        )
        self.wanted: dict[int, Any] = {}

    def train(self) -> None:
        step_with_ones(self.optimizer)

    def save(self, step: int) -> None:
        self.wanted[step] = copy.deepcopy(self.model.state_dict())
        self.manager.save(step)

    def check(self, steps: set[int]) -> None:
        """Compare the committed steps with what was live when they were saved."""
        names = {*RunFolder(self.folder).steps()}
        assert steps <= names
        other = nn.Linear(3, 2)
        with build(self.folder, other, save=None) as reader:
            for step in names:
                reader.load(step)
                assert all(torch.equal(v, self.wanted[step][n]) for n, v in other.state_dict().items()), step


WAITS: list[Callable[[Notebook], object]] = [
    Notebook.train,
    lambda run: run.manager.maybe_wait_for_staging(),
    lambda run: run.manager.wait(),
]


def interrupts(most: int) -> Iterator[Interrupt]:
    """Yield one that counts the bytecodes; then those at the last ones, which clear away, and at `most` others.

    The others are drawn; in a soak it is all of them.
    """
    yield (counted := Interrupt(UNREACHED))
    every = range(1, counted.seen + 1)
    drawn = random.Random(counted.seen).sample(every, min(counted.seen, most))
    yield from map(Interrupt, every if SOAK else sorted({*drawn, *every[-2:]}))


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_an_interrupt_at_any_bytecode_of_a_wait_leaves_the_save_known(tmp_path: Path, mode: str) -> None:
    """The step in flight is committed with its own weights, and so are those after it, whatever the next cell does."""
    run = Notebook(tmp_path, mode, exports=True)
    steps = count(1)
    with slow():
        for wait in WAITS:
            for interrupt, step in zip(interrupts(3), steps, strict=False):
                run.train()
                run.save(step)
                interrupt.around(partial(wait, run))
                if step % 2:
                    run.train()
        run.manager.close()
    run.check({*range(1, step + 1)})
    assert {path.name for path in (tmp_path / "exports").iterdir()} == {f"step-{n}" for n in range(1, step + 1)}


def test_an_interrupt_in_a_save_or_at_its_end_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    """The step of the interrupted call is whole or not there; every other step is there, and exact."""
    for mode in ("thread", "disabled"):
        run = Notebook(tmp_path / mode, mode)
        sure: set[int] = set()
        for step, interrupt in zip(count(2, 2), interrupts(20), strict=False):
            run.train()
            interrupt.around(partial(run.save, step))
            run.train()
            run.save(step + 1)
            sure.add(step + 1)
        run.manager.close()
        run.check(sure)


def test_an_interrupted_close_can_be_called_again(tmp_path: Path) -> None:
    """Nothing is released while the save is in flight, and all of it afterwards."""
    with slow():
        for number, interrupt in enumerate(interrupts(8)):
            run = Notebook(tmp_path / str(number), "thread")
            run.train()
            run.save(1)
            interrupt.around(run.manager.close)
            run.manager.close()
            run.check({1})


def test_a_close_that_was_interrupted_while_the_writer_process_ends_can_be_called_again(tmp_path: Path) -> None:
    """It closes each pipe once, waits for the process, and gives the folder back."""
    run = Notebook(tmp_path, "process")
    run.train()
    run.save(1)
    run.manager.wait()
    with mock.patch.object(subprocess.Popen, "wait", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        run.manager.close()
    run.manager.close()
    assert run.manager._closed
    run.check({1})


def test_a_failed_save_is_raised_although_the_wait_for_it_was_interrupted(tmp_path: Path) -> None:
    """It is raised by the wait that was interrupted, as the cause of the interrupt, or by the next one."""
    disk = Disk(only="/.staging/")
    run = Notebook(tmp_path, "thread")
    with disk.inserted():
        for step, interrupt in zip(count(2, 2), interrupts(15), strict=False):
            run.train()
            run.save(step)
            run.manager.wait()
            disk.error = errno.ENOSPC
            run.manager.save(step + 1)
            raised: list[BaseException] = []
            interrupt.around(lambda: raised.extend(error_of(run.manager.wait)))  # noqa: B023
            raised += [] if raised else error_of(run.manager.wait)
            raised += [e.__context__ for e in interrupt.raised if e.__context__ is not None]
            assert any("No space left" in str(error) for error in raised), interrupt.at
            disk.error = 0
            assert run.manager.completed.saved == step
        run.manager.close()
    run.check(set(run.wanted))


def error_of(act: Callable[[], object]) -> list[BaseException]:
    try:
        act()
    except SaveError as error:
        return [error]
    return []


def test_a_second_interrupt_leaves_no_worker_behind() -> None:
    """Workers stop at their next item; until then nothing that they use is closed, however often Ctrl-C is hit."""
    go_on, begun, after = threading.Event(), threading.Barrier(3), []
    ended = False

    def work(item: int) -> None:
        begun.wait(60)
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
        go_on.wait(60)
        after.append(ended)

    def press_again() -> None:
        main = threading.main_thread().ident
        assert main is not None
        for _ in range(3):
            time.sleep(0.05)
            signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.05)
        go_on.set()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    presses = threading.Thread(target=press_again)
    try:
        presses.start()
        with pytest.raises(KeyboardInterrupt):
            run_workers(range(3), work, 3)
        ended = True
    finally:
        go_on.set()
        presses.join()
        signal.signal(signal.SIGINT, before)
    assert after == [False, False]


def test_a_rollback_forgets_the_copy_of_the_step_that_is_made_again(tmp_path: Path) -> None:
    """The export of a step after a rollback has the weights of now, not those of the branch that was given up."""
    run = Notebook(tmp_path, "thread")
    export = ExportConfig("dcp")
    run.train()
    run.save(1)
    run.train()
    run.save(2)
    run.manager.load(1)
    assert run.manager._saver is not None and not run.manager._saver.has_staged(2)
    with torch.no_grad():
        run.model.weight.fill_(15.0)
    run.manager.export_step([export], 2, False)
    run.manager.close()
    fresh = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(fresh, checkpoint_id=str(tmp_path / "exports" / "step-2"), no_dist=True)
    assert torch.equal(fresh["weight"], torch.full((2, 3), 15.0))


@pytest.mark.parametrize("scheme", ["", "ram"])
def test_an_interrupt_while_a_folder_is_opened_leaves_it_to_be_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """At any bytecode: no lease stays with an object that nobody has."""
    for name in ("fsync", "fsync_folder"):  # of a thousand folders
        monkeypatch.setattr(posix, name, lambda _: None)
    for at in count(1):
        place = open_location(f"{scheme}://box/{uuid.uuid4().hex}") if scheme else tmp_path / str(at)
        steps = open_steps(place)
        was_interrupted = Interrupt(at).around(steps.open)
        steps.close()
        other = open_steps(place)
        other.open()
        other.close()
        if not was_interrupted:
            break
    assert at > 300


def put(place: BucketPath) -> Any:
    """Return an exchange, of this rank alone, that has values to send."""
    line = Coordinator(0, 1, dist.HashStore(), "interrupted", 20.0)
    line.peers.connect(line, lambda: {(0,)})
    info = TensorInfo((4,), torch.float32)
    made = Exchange(line, (0,), {"x": info}, lambda *_: (0, 0), lambda *_: 0, lambda *_: None, 1 << 20, 1 << 20)
    made.start()
    made.begin()
    return made, lambda: made.put(Block(Chunk((0,), (4,)), torch.ones(4), "x"), 0)


def upload(place: BucketPath) -> Any:
    writer = ObjectWriter(place, 4)
    return writer, lambda: writer.write(memoryview(b"1234"), 0)


@pytest.mark.parametrize("make", [put, upload])
def test_an_interrupt_leaves_no_lock_that_another_thread_waits_for(make: Callable[[BucketPath], Any]) -> None:
    """Python looks for signals when it begins a function: that which would give the lock back is none of Python's."""
    one, act = make(open_location(f"ram://box/{uuid.uuid4().hex}"))  # type: ignore[arg-type]

    def interrupt(frame: Any, event: str, _: Any) -> None:
        if frame.f_code is threading.Condition.__exit__.__code__:
            raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with suppress(KeyboardInterrupt):
            act()
    finally:
        sys.settrace(before)
    is_free = threading.Event()

    def take() -> None:
        with one._changed:
            is_free.set()

    threading.Thread(target=take, daemon=True).start()
    assert is_free.wait(10)
    one.close()
