"""Worker threads: what stops them."""

from __future__ import annotations

import _thread
import signal
import threading
import time

import pytest

from titan_ckpt.disk.direct import meanwhile, run_workers
from titan_ckpt.saving.handle import SaveHandle


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
        _thread.interrupt_main()
        time.sleep(1)
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
