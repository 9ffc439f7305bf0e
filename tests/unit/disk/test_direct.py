"""Reading files: worker threads, what stops them, what is left open, and work beside other work."""

from __future__ import annotations

import _thread
import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from titan_ckpt.disk import files, posix, workers
from titan_ckpt.disk.files import FileWriter
from titan_ckpt.disk.workers import BackgroundCall, meanwhile, run_workers
from titan_ckpt.guard import outside_request
from titan_ckpt.saving.saver import SaveHandle
from titan_ckpt.training.outcome import STOPPED, Outcome, record_stop


def test_an_interrupt_waits_for_all_threads() -> None:
    """Once it has been raised, no thread goes on to the next item, and none still writes to memory.

    Python loses an interrupt that comes while it runs the callback of a weak reference, as that of an ended thread is.
    """
    written: list[int] = []
    caller = threading.get_ident()

    def work(item: int) -> None:
        if threading.get_ident() == caller:
            while not written:  # let the other thread begin
                time.sleep(0.001)
            return
        written.append(item)
        for _ in range(2):  # the second one comes while the caller waits for this thread
            _thread.interrupt_main()
            time.sleep(0.5)
        written.append(-item)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        for _ in range(5):
            written.clear()
            try:
                run_workers(range(1, 100), work, 2)
            except KeyboardInterrupt:
                break
        else:
            pytest.fail("no interrupt was raised")
    finally:
        signal.signal(signal.SIGINT, before)
    after = list(written)
    time.sleep(0.3)
    assert written == after and after[-1] == -after[0] and len(after) <= 4


def test_an_interrupt_leaves_no_lock_taken() -> None:
    """Wherever one comes in Python's own code of a lock that was just taken, the other threads end."""
    raised: list[str] = []

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        is_ours = frame.f_back is not None and frame.f_back.f_code.co_filename == workers.__file__
        if event == "return" and is_ours and frame.f_code is threading.Condition.__enter__.__code__ and not raised:
            raised.append("interrupt")
            raise KeyboardInterrupt
        return trace

    def call() -> None:
        sys.settrace(trace)
        with contextlib.suppress(KeyboardInterrupt):
            run_workers(range(100), lambda _: time.sleep(0.001), 4)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(20)
    assert not caller.is_alive()


def test_a_save_for_which_no_thread_can_be_started_is_made_before_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks save in threads, and wait for this one; what is done beside something else comes before it."""

    def cannot_start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", cannot_start)
    done: list[str] = []
    handle = SaveHandle(1, lambda: done.append("save"), "save")
    handle.start()
    handle.wait()
    with meanwhile(lambda: done.append("beside")):
        done.append("block")
    assert done == ["save", "beside", "block"]

    def fail() -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"), meanwhile(fail):
        done.append("after an error")
    assert done[-1] == "block"


_FORKED_WITHOUT_DESCRIPTORS = """
import os, resource, sys
from titan_ckpt.disk import kernel

fd, limits = kernel.open_file(sys.argv[1], os.O_RDONLY), resource.getrlimit(resource.RLIMIT_NOFILE)
view = kernel.map_memory(4096, fd)
resource.setrlimit(resource.RLIMIT_NOFILE, (fd + 1, limits[1]))
try:
    while True:
        os.dup(fd)
except OSError:
    pid = os.fork()
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
is_mapped = sys.argv[1] in open("/proc/self/maps").read()
os._exit(is_mapped if pid == 0 else 2 * (not is_mapped) + os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_forked_process_has_no_file_mapped_even_if_it_may_open_none(tmp_path: Path) -> None:
    """A DataLoader's worker would keep a deleted file on the disk. Other packages may abort such a fork."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    done = subprocess.run([sys.executable, "-c", _FORKED_WITHOUT_DESCRIPTORS, path], check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("refuses", ["nothing", "the open", "the read"])
def test_threads_that_read_around_the_page_cache_leave_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    """A descriptor that nobody closes keeps the bytes of a deleted file on the disk."""
    path, both_open = tmp_path / "file", threading.Barrier(2)
    path.write_bytes(bytes(range(256)) * 16 * 8)
    open_direct, preadv = files.open_direct, os.preadv

    def slowly(path: Path, flags: int) -> int:
        fd = -1 if refuses == "the open" else open_direct(path, flags)
        with contextlib.suppress(threading.BrokenBarrierError):
            both_open.wait(0.5)
        return fd

    def refuse(fd: int, views: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct reads")
        return preadv(fd, views, offset)

    def read(start: int) -> None:
        with workers.bounce_buffer() as buffer:
            file.read_aligned(buffer.view, start, 4096)
            assert bytes(buffer.view[:4096]) == bytes(range(256)) * 16

    monkeypatch.setattr(files, "open_direct", slowly)
    if refuses == "the read":
        monkeypatch.setattr(os, "preadv", refuse)
    file = files.FileReader(path)
    run_workers(range(0, 8 * 4096, 4096), read, 4)
    file.close()
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if os.path.islink(entry)]
    assert str(path) not in links


def test_threads_whose_direct_writes_are_refused_at_the_same_time_write_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of them takes O_DIRECT away; the others find it gone, and write again, too."""
    pwrite, all_refused = os.pwrite, threading.Barrier(4)

    def refuse(fd: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            all_refused.wait(10)
            raise OSError(errno.EINVAL, "no direct writes")
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", refuse)
    with FileWriter.create(tmp_path / "file", 4 * 4096) as file, workers.bounce_buffer() as buffer:
        buffer.view[:4096] = bytes([7]) * 4096
        run_workers(range(0, 4 * 4096, 4096), lambda start: file.write(buffer.view[:4096], start), 4)
        file.finish(4 * 4096)
    assert (tmp_path / "file").read_bytes() == bytes([7]) * 4 * 4096


@pytest.mark.parametrize("broken", ["pwrite_all", "fsync", "rename_noreplace"])
def test_a_file_that_cannot_replace_another_leaves_nothing_of_itself(
    tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk under the file of a stopped run, and under an answer: an error, and no draft beside them."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(posix, broken, full)
        with pytest.raises(OSError, match="full"):
            record_stop(tmp_path, Outcome(2, 4, 2, "SIGTERM to rank 0"))
        with pytest.raises(OSError, match="full"):
            outside_request.answer(tmp_path, outside_request.Answer("a", 2))
    assert list(tmp_path.iterdir()) == []
    for step in (2, 3):
        record_stop(tmp_path, Outcome(step, 4, step, "SIGTERM to rank 0"))
    assert [path.name for path in tmp_path.iterdir()] == [STOPPED]
    assert '"step": 3' in (tmp_path / STOPPED).read_text()


def test_an_error_of_a_signals_handler_while_the_thread_starts_reaches_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is no lack of threads, whatever its class; the call is made once, and its end is known."""
    start, made = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise RuntimeError("stop now, says the handler")

    call = BackgroundCall(lambda: made.append(1), "call")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(RuntimeError, match="stop now"):
            call.start()
    call.wait()
    assert made == [1]
    assert call.error is None
