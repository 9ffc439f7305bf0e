"""BackgroundCall: a call in a thread that no interrupt makes unknown."""

from __future__ import annotations

import threading

import pytest

from titan_ckpt.disk.background import BackgroundCall


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


def test_a_call_is_made_here_if_there_can_be_no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    made: list[int] = []
    call = BackgroundCall(lambda: made.append(threading.get_ident()), "call")
    call.start()
    assert made == [threading.get_ident()]
    assert call.done
