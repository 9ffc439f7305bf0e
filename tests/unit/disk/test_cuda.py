"""The order in which CUDA is called, and the threads that call it, against a runtime that writes it down."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.fake_cuda import DEVICE, FakeCuda, on_device
from tests.forked import answer
from titan_ckpt.disk import cuda, workers
from titan_ckpt.disk.kernel import Buffer
from titan_ckpt.disk.workers import bounce_buffer, finish_uploads, meanwhile, run_workers
from titan_ckpt.formats.native import arena
from titan_ckpt.formats.native.arena import Arena
from titan_ckpt.formats.native.writer import Places, Segments, lay_end_to_end
from titan_ckpt.saving.saver import SaveHandle

MIB = 1 << 20


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A runtime that registers 1 MiB at a time; what it has registered is forgotten afterwards."""
    monkeypatch.setattr(cuda, "REGISTERED_BYTES", MIB)
    cuda.stream_of.cache_clear()
    monkeypatch.setattr(workers, "_bounces", type(workers._bounces)())
    made = FakeCuda(monkeypatch)
    yield made
    made.gate.set()
    cuda.stream_of.cache_clear()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_an_arena_is_touched_by_threads_then_registered_in_pieces(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registering starts when all of it is touched, on the rank's own device, in a thread that is then over."""
    touch = Arena._touch

    def touched(self: Arena, start: int) -> None:
        touch(self, start)
        fake.log.append("touch")

    monkeypatch.setattr(Arena, "_touch", touched)
    made = Arena(9 * MIB + MIB // 2, pinned=True)
    assert made.buffer.view.nbytes == 9 * MIB + MIB // 2
    assert fake.log[:3] == ["touch"] * 3
    assert [line.partition(" in ")[0] for line in fake.log[3:]] == [f"register {MIB} on {DEVICE}"] * 9 + [
        f"register {MIB // 2} on {DEVICE}"
    ]
    assert all(" in titan_ckpt-pin" in line for line in fake.log[3:])
    assert fake.registered == {made.buffer.address + i * MIB: MIB if i < 9 else MIB // 2 for i in range(10)}
    made.close()
    assert not fake.registered


def test_a_refused_registration_leaves_nothing_registered(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CUDA's own memory takes its place; memory that another process maps stays, and copies are slower."""
    fake.refused_at = 2
    own = Buffer.allocate(4 * MIB)
    monkeypatch.setattr(cuda, "allocate_pinned", lambda num_bytes: own if num_bytes == 4 * MIB else None)
    for shared in (False, True):
        fake.log.clear()
        made = Arena(4 * MIB, pinned=True, shared=shared)
        with caplog.at_level(logging.WARNING):
            assert (made.buffer is own) is not shared
        assert [line.split()[0] for line in fake.log] == ["register"] * 3 + ["unregister"] * 2
        made.close()
        assert not fake.registered
    assert "CUDA error 2" in caplog.text


def test_memory_without_a_device_for_it_is_used_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """CUDA registers nothing and has no memory of its own to give."""
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    with caplog.at_level(logging.WARNING):
        assert cuda.allocate_pinned(MIB) is None
    assert "slower" in caplog.text


def test_every_thread_uses_the_device_and_the_stream_of_its_caller(fake: FakeCuda) -> None:
    """A thread that would be left on device 0 takes memory of another rank's device, and overtakes a user's stream."""
    seen: dict[int, str] = {}
    barrier = threading.Barrier(3)

    def work(_: int) -> None:
        barrier.wait(60)
        seen[threading.get_ident()] = fake.stream.name

    run_workers(range(3), work, 3)
    assert list(seen.values()) == ["training"] * 3
    seen.clear()
    with meanwhile(lambda: seen.update({0: fake.stream.name})):
        pass
    handle = SaveHandle(1, lambda: seen.update({1: fake.stream.name}), "save")
    handle.start()
    handle.wait()
    assert seen == {0: "training", 1: "training"}


def test_workers_start_while_another_thread_imports_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is known from the begin of its import, and has its parts later."""
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    done: list[int] = []
    run_workers(range(2), done.append, 2)
    assert sorted(done) == [0, 1]


def staged(num_bytes: int) -> tuple[Arena, Places, list[torch.Tensor]]:
    tensors = [torch.arange(num_bytes // 4, dtype=torch.int32)]
    return Arena(num_bytes, pinned=True), lay_end_to_end([(t.dtype, t.shape) for t in tensors]), tensors


def test_few_pieces_are_in_flight_until_training_waits_for_them(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of training's own waits behind two of ours; when training waits for ours, the rest is enqueued at once."""
    monkeypatch.setattr(arena, "COPY_BYTES", 4096)
    made, places, tensors = staged(10 * 4096)
    assert made.buffer.view.nbytes
    fake.log.clear()
    fake.gate.clear()
    handle = made.stage(places, [on_device(t) for t in tensors])
    assert fake.log[0] == "side waits for training"
    eventually(lambda: len(fake.events) == 2)
    time.sleep(0.05)
    assert len(fake.events) == 2
    threading.Timer(0.05, fake.gate.set).start()
    handle.wait()
    assert len(fake.events) == 10
    assert "training waits for an event" in fake.log
    handle.finish()
    assert "the host waits for side" in fake.log
    assert bytes(made.buffer.view) == tensors[0].numpy().tobytes()
    made.close()


def test_what_training_waits_for_is_enqueued_without_waiting(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that is waited for from the start: the thread that trains goes on while the device still copies."""
    monkeypatch.setattr(arena, "COPY_BYTES", 4096)
    made, places, tensors = staged(10 * 4096)
    fake.gate.clear()
    enqueue = Segments.enqueue

    def when_waited_for(*arguments: Any) -> None:
        eventually(lambda: handles[0]._is_waited_for if handles else False)
        enqueue(*arguments)

    monkeypatch.setattr(Segments, "enqueue", when_waited_for)
    handles: list[arena.StagingHandle] = []
    handles.append(made.stage(places, [on_device(t) for t in tensors]))
    handles[0].wait()
    assert len(fake.events) == 10
    fake.gate.set()
    made.close()


def test_temporaries_live_until_the_device_has_copied_them(fake: FakeCuda) -> None:
    """Nobody else holds what a hook has made; its memory must not be used again before, nor the arena's be unlocked."""
    made, places, tensors = staged(4096)
    assert made.buffer.view.nbytes
    fake.gate.clear()
    temporary = on_device(tensors.pop())
    gone = weakref.ref(temporary)
    handle = made.stage(places, [temporary])
    del temporary
    handle.wait()
    gc.collect()
    assert gone() is not None
    closing = threading.Thread(target=made.close)
    closing.start()
    time.sleep(0.05)
    assert fake.registered
    fake.gate.set()
    closing.join(60)
    handle.finish()
    gc.collect()
    assert gone() is None and not fake.registered


def test_a_copy_begins_when_the_one_before_has_ended(fake: FakeCuda) -> None:
    """Also when the save that asked for the one before has failed and never waited for it."""
    made, places, tensors = staged(4096)
    fake.gate.clear()
    made.stage(places, [on_device(t) for t in tensors]).wait()
    threading.Timer(0.05, fake.gate.set).start()
    made.stage(places, [on_device(t) for t in tensors]).finish()
    calls = [line for line in fake.log if line.endswith(("the host waits for side", "side waits for training"))]
    assert calls == ["side waits for training", "the host waits for side"] * 2
    made.close()


def test_an_error_of_a_copy_is_raised_where_the_save_waits_and_not_where_training_does(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the copies before it have ended; an error in the step of one rank would leave the others alone."""
    made, places, tensors = staged(4096)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(Segments, "enqueue", fail)
    handle = made.stage(places, [on_device(t) for t in tensors])
    handle.wait()
    with pytest.raises(RuntimeError, match="gone"):
        handle.finish()
    assert fake.log[-1] == "the host waits for side"
    made.close()


def test_a_bounce_buffer_is_lent_again_when_no_device_reads_it(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile a second one is filled; one that is older than CUDA's first use is page-locked, too."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with bounce_buffer() as first:
        assert not fake.registered
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    fake.gate.clear()
    with bounce_buffer() as again:
        assert again is first and first.address in fake.registered
        upload(fake, again.tensor[:100])
    with bounce_buffer() as second:
        assert second is not first and second.address in fake.registered
    with bounce_buffer() as third:
        assert third is second
    threading.Timer(0.05, fake.gate.set).start()
    finish_uploads()
    assert fake.gate.is_set()


def upload(fake: FakeCuda, values: torch.Tensor) -> None:
    """Do what `workers.upload` does, but for the copy, which needs a device."""
    event = torch.cuda.Event()
    event.record(fake.stream)
    workers._uploads.events += (event,)


def test_a_forked_child_inherits_neither_arena_nor_bounce_buffers(fake: FakeCuda) -> None:
    """A fork would share the pages, and the next write would part them from what the device writes to."""
    made = Arena(MIB, pinned=True)
    with bounce_buffer() as bounce:
        pass
    for buffer in (made.buffer, bounce):
        assert "dc" in flags_of(buffer.address)
    assert answer(lambda: bool(workers._bounces)) == (False, 0)
    assert workers._bounces
    made.close()


def flags_of(address: int) -> list[str]:
    """Return the kernel's flags of the mapping that holds an address; dc: a fork does not copy it."""
    inside = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            start, dash, rest = line.partition("-")
            if dash and " " in rest and all(c in "0123456789abcdef" for c in start):
                inside = int(start, 16) <= address < int(rest.split()[0], 16)
            elif inside and line.startswith("VmFlags:"):
                return line.split()[1:]
    raise AssertionError("no mapping holds the address")
