"""The exchange of bytes between ranks for files in a bucket, where another rank misbehaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed import HashStore

from titan_ckpt import progress
from titan_ckpt.config import ExportConfig
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import ExportError, PeerError
from titan_ckpt.exporting.exporter import ExportJob
from titan_ckpt.formats.dcp.writer import DcpExport
from titan_ckpt.formats.publish.plan import pack_model_files, plan_export
from titan_ckpt.formats.publish.upload import Courier, UploadedFile, Uploads
from titan_ckpt.formats.publish.write import ExportWriter
from titan_ckpt.geometry.chunks import Block, Chunk, LazyTensor, TensorInfo
from titan_ckpt.geometry.keymap import Concat, KeyMap, KeyRule, Split, Unstack
from titan_ckpt.stores.bucket import Bucket, BucketPath, StoreError
from titan_ckpt.stores.object_writer import ObjectWriter
from titan_ckpt.stores.settings import StoreConfig
from titan_ckpt.weights.transforms import StateDictTransforms


def test_a_rank_whose_writing_is_stuck_holds_up_no_other_for_longer_than_the_timeout() -> None:
    """Its courier goes on with the rounds and never says that it has finished."""

    def exchange(ranks: object, send: torch.Tensor, sizes: object, into: torch.Tensor, *_: object) -> Any:
        into.copy_(send)  # the other rank sends empty frames, too
        if into.dtype == torch.int64:
            into[1, 1] = 0
        return SimpleNamespace(wait=lambda: None)

    coordinator: Any = SimpleNamespace(timeout_seconds=0.1, peers=SimpleNamespace(exchange=exchange))
    courier = Courier(coordinator, (0, 1), lambda number, offset, view: None)
    courier.start()
    courier.begin()
    closing = threading.Thread(target=courier.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()


def test_a_rank_that_can_start_no_thread_stops_the_export_on_all_ranks_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 has no thread for the exchange; rank 0 hears of it, and its own thread has sent nothing and ends."""
    start, couriers = threading.Thread.start, list[threading.Thread]()

    def start_but_not_of_rank_1(thread: threading.Thread) -> None:
        if thread.name == "titan_ckpt-courier":
            if refused and threading.current_thread() is refused[0]:
                raise RuntimeError("can't start new thread")
            couriers.append(thread)
        start(thread)

    refused: list[threading.Thread] = []

    def connect(coordinator: Coordinator) -> None:
        if coordinator.rank == 1:
            refused.append(threading.current_thread())
        coordinator.peers = cast("Any", SimpleNamespace(connect=lambda *_: [(0, 1)], discard=lambda: None))
        Uploads(BucketPath(Bucket("s3", "box", StoreConfig()), "e"), {}, coordinator).connect()

    monkeypatch.setattr(threading.Thread, "start", start_but_not_of_rank_1)
    errors = on_two_ranks(connect)
    assert isinstance(errors[1], ExportError) and isinstance(errors[0], PeerError)
    assert "can't start new thread. Raise the limit of processes" in str(errors[0]), errors
    (courier,) = couriers
    courier.join(100.0)
    assert not courier.is_alive()


def test_an_object_for_which_no_thread_can_be_started_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its bytes would have to stay in memory until it is whole."""
    writer = ObjectWriter(BucketPath(Bucket("s3", "box", StoreConfig()), "e/a"), 10)

    def cannot_start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", cannot_start)
    acts: list[Callable[[], None]] = [lambda: writer.write(memoryview(b"x"), 0), lambda: writer.finish(1)]
    for act in acts:
        with pytest.raises(StoreError, match=r"s3://box/e/a: .* can't start new thread\. Raise the limit of processes"):
            act()
    writer.close()


def test_a_rank_that_does_not_go_on_is_named_after_the_timeout() -> None:
    """A rank that is far ahead of it waits no longer, and says which one to look at."""

    def exchange(ranks: object, send: torch.Tensor, sizes: object, into: torch.Tensor, *_: object) -> Any:
        into.copy_(send)
        if into.dtype == torch.int64:
            into[1, 2] = 5
        return SimpleNamespace(wait=lambda: None)

    coordinator: Any = SimpleNamespace(timeout_seconds=0.1, peers=SimpleNamespace(exchange=exchange))
    courier = Courier(coordinator, (0, 3), lambda number, offset, view: None)
    courier.start()
    courier.begin()
    assert courier.is_ahead(1 << 30)
    while courier._slowest_rank != 3:
        time.sleep(0.001)
    with pytest.raises(ExportError, match=r"rank 3 has not gone on .* 0\.1 s, .* 1,073,741,819 bytes ahead"):
        courier.wait_for_others()
    courier.close()


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()], ids=["OSError", "interrupt"])
def test_a_rank_whose_last_write_fails_holds_up_no_other(error: BaseException) -> None:
    """It says that it writes nothing more; else ranks that are far ahead of it would wait until the timeout."""
    groups = StateDictTransforms(KeyMap((KeyRule.of("w", "w.weight"),)), {}).to_file({"w": torch.ones(4)}, None, None)
    alone = Coordinator(0, 1, None, "", 1.0)
    plan = plan_export(groups, lambda infos: pack_model_files(infos, 256), lambda *_: {}, alone)
    told: list[str] = []

    def fail(*_: object) -> None:
        raise error

    uploads: Any = SimpleNamespace(
        is_sequential=True,
        position=lambda *_: 0,
        is_ahead=lambda _: False,
        file=lambda name: UploadedFile(uploads, name),
        write=fail,
        end=lambda: told.append("end"),
    )
    with pytest.raises(type(error)):
        ExportWriter(uploads, plan, progress.uncounted).write(groups)
    assert told == ["end"]


def test_a_rank_whose_write_fails_still_takes_part_in_all_collectives() -> None:
    """Also in those of the group that comes next in the file, and of what is left of the one that it is in."""
    rules = KeyRule.of("a", "a"), KeyRule.of(["q", "k"], "qk", Concat((4, 4))), KeyRule.of("z", "z")
    resolved: list[str] = []

    def computed(name: str) -> LazyTensor:
        def blocks() -> list[Block]:
            resolved.append(name)
            return [Block(Chunk.whole((4,)), torch.ones(4))]

        return LazyTensor(TensorInfo((4,), torch.float32), blocks, collective=True, like=torch.empty(4))

    groups = StateDictTransforms(KeyMap(rules), {}).to_file(
        {"a": torch.ones(4), **{name: computed(name) for name in "qkz"}}, None, None
    )
    alone = Coordinator(0, 1, None, "", 1.0)
    plan = plan_export(groups, lambda infos: pack_model_files(infos, 1 << 20), lambda *_: {}, alone)

    def fail(*_: object) -> None:
        raise OSError("full")

    for is_ahead in (True, False):  # what lies before the first one is written before it, or with it
        uploads: Any = Uploads(BucketPath(Bucket("s3", "box", StoreConfig()), "e"), plan.files.layouts, alone)
        uploads.is_ahead, uploads.wait_for_others, uploads.write = lambda _, ahead=is_ahead: ahead, fail, fail
        with pytest.raises(OSError, match="full"):
            ExportWriter(uploads, plan, progress.uncounted).write(groups)
        assert resolved == ["q", "k", "z"]
        del resolved[:]


def test_tensors_in_memory_are_written_in_the_order_of_the_files() -> None:
    """Also those that one stack of experts gives; a computed one comes where its first tensor lies."""
    table = KeyMap(
        (
            *(KeyRule.of(f"{name}s", [f"e.{i}.{name}" for i in range(3)], Unstack(3)) for name in ("up", "down")),
            KeyRule.of("qkv", [f"attention.{name}" for name in "qvk"], Split((4, 4, 4))),
            KeyRule.of("o", "attention.o"),
        )
    )
    stacks = {name: torch.ones(3, 4, 4) for name in ("ups", "downs")}
    whole = torch.ones(12, 4)
    computed = LazyTensor(TensorInfo((12, 4), torch.float32), lambda: [Block(Chunk.whole((12, 4)), whole)])
    groups = StateDictTransforms(table, {}).to_file({**stacks, "qkv": computed, "o": torch.ones(4, 4)}, None, None)
    alone = Coordinator(0, 1, None, "", 1.0)
    plan = plan_export(groups, lambda infos: pack_model_files(infos, 1 << 20), lambda *_: {}, alone)
    (layout,) = plan.files.layouts.values()
    at = {entry.start: key for key, entry in layout.entries.items()}
    written: list[str] = []
    uploads = Uploads(BucketPath(Bucket("s3", "box", StoreConfig()), "e"), plan.files.layouts, alone)
    uploads.write = lambda name, view, offset: written.append(at[offset])  # type: ignore[method-assign]
    in_turn = sorted(groups, key=lambda group: min(layout.entries[key].start for key in group.infos))
    ExportWriter(uploads, plan, progress.uncounted).write(in_turn)
    assert written == [
        *("attention.q", "attention.v", "attention.k", "attention.o"),
        *(f"e.{i}.{name}" for i in range(3) for name in ("down", "up")),
    ]


def on_two_ranks(act: Callable[[Coordinator], None]) -> dict[int, BaseException]:
    """Run a function as two ranks; return the errors by rank."""
    store, errors = HashStore(), dict[int, BaseException]()

    def run(rank: int) -> None:
        try:
            act(Coordinator(rank, 2, store, "ranks", 3.0))
        except BaseException as error:
            errors[rank] = error

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(run, range(2))]
    return errors


def test_a_retention_that_fails_on_rank_0_is_told_to_all_ranks() -> None:
    """Whatever the error; no rank waits for another until the timeout."""

    def expire(*_: object) -> None:
        raise RuntimeError("no record")

    made: Any = SimpleNamespace(record=lambda *_: None, expire=expire)
    writer: Any = SimpleNamespace(write=lambda *_: None)
    errors = on_two_ranks(ExportJob(ExportConfig("hf"), 1, Path("e"), writer, made).run)
    assert "no record" in str(errors[0])
    assert "rank 0 failed: RuntimeError: no record" in str(errors[1])


def test_a_layout_that_one_rank_cannot_compute_is_told_to_all_ranks(tmp_path: Path) -> None:
    """A computed tensor without a layout is computed before a DCP folder is written."""

    def export(coordinator: Coordinator) -> None:
        def blocks() -> list[Block]:
            if coordinator.rank == 1:
                raise RuntimeError("no memory")
            return [Block(Chunk.whole((4,)), torch.ones(4))]

        DcpExport({"w": LazyTensor(TensorInfo((4,), torch.float32), blocks)}, {}).write(tmp_path / "e", coordinator)

    errors = on_two_ranks(export)
    assert "no memory" in str(errors[1]) and "rank 1 failed: RuntimeError: no memory" in str(errors[0])
