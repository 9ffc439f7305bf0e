"""The exchange of bytes between ranks for files in a bucket, where another rank misbehaves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
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
from titan_ckpt.errors import ExportError
from titan_ckpt.exporting.exporter import ExportJob
from titan_ckpt.formats.dcp.writer import DcpExport
from titan_ckpt.formats.publish.exchange import Exchange
from titan_ckpt.formats.publish.plan import ExportPlan, OutputFiles, pack_model_files, plan_export
from titan_ckpt.formats.publish.write import ExportWriter
from titan_ckpt.geometry.chunks import Block, Chunk, LazyTensor, TensorInfo
from titan_ckpt.geometry.keymap import Concat, KeyMap, KeyRule, Split, Unstack
from titan_ckpt.stores.answers import StoreError
from titan_ckpt.stores.bucket import Bucket
from titan_ckpt.stores.object_files import ObjectWriter
from titan_ckpt.stores.objects import BucketPath
from titan_ckpt.stores.store import StoreConfig
from titan_ckpt.weights.transforms import FileGroup, StateDictTransforms


def exchange_with(other: int, at: int, told: int) -> Exchange:
    """Begin one of rank 0, which writes nothing, with a rank that sends nothing and tells this at that place."""

    def exchange(ranks: object, send: torch.Tensor, sizes: object, into: torch.Tensor, *_: object) -> Any:
        into.copy_(send)
        if into.dtype == torch.int64:
            into[1, at] = told
        return SimpleNamespace(wait=lambda: None)

    line: Any = SimpleNamespace(rank=0, timeout_seconds=0.1, peers=SimpleNamespace(exchange=exchange))
    made = Exchange(line, (0, other), {}, lambda *_: (0, 0), lambda *_: 0, lambda *_: None, 32 << 20, 128 << 20)
    made.start()
    made.begin()
    return made


def test_a_rank_whose_writing_is_stuck_holds_up_no_other_for_longer_than_the_timeout() -> None:
    """Its exchange goes on with the rounds and never says that it has ended."""
    closing = threading.Thread(target=exchange_with(1, 1, 0).close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_rank_that_can_start_no_thread_is_known_to_all_ranks_at_once(
    monkeypatch: pytest.MonkeyPatch, is_shared: bool, tmp_path: Path
) -> None:
    """Rank 1 has no thread for the exchange; the one of rank 0 has sent nothing and ends.

    A bucket needs the exchange. On a disk, as at the exit of a process, each rank writes what it has.
    """
    start, started = threading.Thread.start, list[threading.Thread]()

    def start_but_not_of_rank_1(thread: threading.Thread) -> None:
        if thread.name == "titan_ckpt-exchange":
            if refused and threading.current_thread() is refused[0]:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        start(thread)

    refused: list[threading.Thread] = []
    place: Any = tmp_path if is_shared else BucketPath(Bucket("s3", "box", StoreConfig()), "e")

    def connect(coordinator: Coordinator) -> None:
        if coordinator.rank == 1:
            refused.append(threading.current_thread())
        coordinator.peers = cast("Any", SimpleNamespace(connect=lambda *_: [(0, 1)], discard=lambda: None))
        outputs = OutputFiles(place, {}, coordinator)
        plan = ExportPlan({}, {}, {}, {}, {}, {})
        writer = ExportWriter(outputs, plan, coordinator, progress.uncounted)
        writer.connect([])
        try:
            writer.create()
        finally:
            writer.close()

    monkeypatch.setattr(threading.Thread, "start", start_but_not_of_rank_1)
    errors = on_two_ranks(connect)
    if is_shared:
        assert not errors
    else:
        assert isinstance(errors[1], ExportError) and isinstance(errors[0], ExportError)
        assert "can't start new thread. Raise the limit of processes" in str(errors[0]), errors
    (thread,) = started
    thread.join(100.0)
    assert not thread.is_alive()


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
    made = exchange_with(3, 2, 5)
    with pytest.raises(ExportError, match=r"rank 3 has not gone on .* 0\.1 s, .* 1,073,741,819 bytes ahead"):
        made.reach(1 << 30)
    made.close()


def fail(*_: object) -> None:
    raise OSError("full")


def fake_exchange(writer: ExportWriter, **verbs: Callable[..., object]) -> None:
    """Give a writer an exchange of all tensors with another rank."""
    keys = writer._plan.infos
    verbs = {"reach": lambda _: None, "put": lambda *_: None, "end": lambda: None, "finish": lambda: None, **verbs}
    made: Any = SimpleNamespace(runs_in=lambda piece: [(0, 0)], **verbs)
    writer._exchanges[0, 1] = made
    writer._exchange_of.update(dict.fromkeys(keys, made))


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()], ids=["OSError", "interrupt"])
def test_a_rank_whose_last_write_fails_holds_up_no_other(error: BaseException) -> None:
    """It says that it writes nothing more; else ranks that are far ahead of it would wait until the timeout."""
    groups = StateDictTransforms(KeyMap((KeyRule.of("w", "w.weight"),)), {}).to_file({"w": torch.ones(4)}, None, None)
    writer = writer_of(groups)
    told: list[str] = []

    def put(*_: object) -> None:
        raise error

    fake_exchange(writer, put=put, end=lambda: told.append("end"))
    with pytest.raises(type(error)):
        writer.write(groups)
    assert told == ["end"]


def writer_of(groups: Sequence[FileGroup], write: Callable[[memoryview, int], object] = fail) -> ExportWriter:
    """Return the writer of one rank, to a bucket, whose files have this `write`."""
    alone = Coordinator(0, 1, None, "", 1.0)
    plan = plan_export(groups, lambda infos: pack_model_files(infos, 1 << 20), lambda *_: {}, alone)
    outputs = OutputFiles(BucketPath(Bucket("s3", "box", StoreConfig()), "e"), plan.layouts, alone)
    file: Any = SimpleNamespace(write=write, is_direct=False, is_reserved=False, flush=lambda: None)
    outputs._files = dict.fromkeys(plan.layouts, file)
    return ExportWriter(outputs, plan, alone, progress.uncounted)


@pytest.mark.parametrize("failing", ["reach", "put", "write"])
def test_a_rank_whose_write_fails_still_takes_part_in_all_collectives(failing: str) -> None:
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
    writer = writer_of(groups)
    if failing != "write":
        fake_exchange(writer, **{failing: fail})
    with pytest.raises(OSError, match="full"):
        writer.write(groups)
    assert resolved == ["q", "k", "z"]


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
    written: list[int] = []
    writer = writer_of(groups, lambda view, offset: written.append(offset))
    writer.write(groups)
    (layout,) = writer._plan.layouts.values()
    at = {entry.at: key for key, entry in layout.entries.items()}
    assert [at[offset] for offset in written] == [
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
