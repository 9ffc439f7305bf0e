"""Values on their way to the rank that writes their run: which runs, and between which ranks."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.faults.forked_ranks import outcome
from tests.faults.forked_ranks import run as run_ranks
from titan_ckpt.disk.files import IO_BYTES
from titan_ckpt.disk.kernel import ALIGNMENT, Buffer
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.formats.publish import exchange as module
from titan_ckpt.formats.publish.exchange import Exchange, Marks, part_of, row_peers, runs_of
from titan_ckpt.formats.publish.proof import digest
from titan_ckpt.geometry.boxes import element_span, hull, is_run, overlap
from titan_ckpt.geometry.chunks import Block, Chunk, TensorInfo
from titan_ckpt.geometry.keymap import KeyMap, KeyRule, PermuteRotary, Transpose
from titan_ckpt.testing import distributed
from titan_ckpt.weights.transforms import StateDictTransforms


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3_000_000,), (4101, 512), (40, 4096), (2, 3, 3_000_000), (1, 9)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.complex128])
def test_runs_make_up_a_tensor_and_fit_a_write(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Also those of rows that fit no write. Rows of several heads are cut between heads."""
    runs = runs_of(TensorInfo(shape, dtype))
    assert sum(run.numel for run in runs) == Chunk.whole(shape).numel
    assert overlap(runs) is None
    for run in runs:
        assert is_run(shape, run) and run.numel * dtype.itemsize <= IO_BYTES - ALIGNMENT
    if shape == (4101, 512):
        assert {run.offsets[0] % 128 for run in runs} == {0}


def test_any_part_of_a_piece_is_found(permuted: Block) -> None:
    """Also one that begins or ends inside of a head, or has some of its columns."""
    whole = permuted.data.reshape(24, 6)
    for box in (Chunk((8, 2), (16, 6)), Chunk((9, 3), (5, 4)), Chunk((31, 7), (1, 1)), Chunk((8, 2), (24, 6))):
        part = part_of(permuted, box)
        assert torch.equal(part.reshape(box.sizes), whole[box.within(permuted.chunk)])


@pytest.mark.parametrize(
    ("view", "chunk", "box"),
    [
        (torch.arange(24).view(12, 2), Chunk((1, 0, 0), (3, 4, 2)), Chunk((2, 1, 0), (2, 3, 2))),
        (torch.arange(24).view(4, 6), Chunk((0, 0), (6, 4)), Chunk((1, 1), (4, 2))),
        (torch.tensor(7), Chunk((3,), (1,)), Chunk((3,), (1,))),
        (torch.tensor([7]), Chunk((), ()), Chunk((), ())),
    ],
)
def test_a_piece_whose_view_has_other_rows_than_the_file_is_cut(view: torch.Tensor, chunk: Chunk, box: Chunk) -> None:
    """As an operation of the user's own may make it: its elements are the chunk's, in any shape."""
    part = part_of(Block(chunk, view, "x"), box)
    assert torch.equal(part, view.reshape(chunk.sizes)[box.within(chunk)])


@pytest.fixture
def permuted() -> Block:
    """Rows 8 to 31 and columns 2 to 7 of heads of 8 rows, which are mixed in memory."""
    block = torch.arange(24 * 6).view(24, 6)
    (piece,) = PermuteRotary(5).pieces(0, [(40, 9)], Block(Chunk((8, 2), (24, 6)), block), "x")
    return piece


class Sent:
    """An exchange of some tensors among ranks, each in a thread, and what each has written of them."""

    def __init__(self, infos: Mapping[str, TensorInfo], num_ranks: int, round_bytes: int) -> None:
        self.infos, self.ranks, self.round_bytes = infos, tuple(range(num_ranks)), round_bytes
        self.written: list[list[tuple[Block, Marks]]] = [[] for _ in self.ranks]

    def exchange(self, line: Coordinator) -> Exchange:
        numbers = {key: number for number, key in enumerate(self.infos)}

        def place_of(key: str, chunk: Chunk) -> tuple[int, int]:
            first = element_span(self.infos[key].shape, chunk)[0] * self.infos[key].dtype.itemsize
            return (numbers[key] << 30) + first, first

        assert line.peers.connect(line, lambda: {self.ranks}) == [self.ranks]
        made = Exchange(
            line,
            self.ranks,
            self.infos,
            place_of,
            lambda key, number: (numbers[key] + number) % len(self.ranks),
            lambda part, marks: self.note(line.rank, part, marks),
            self.round_bytes,
            8 << 20,
        )
        assert made.start() is None
        line.barrier("started")
        made.begin()
        return made

    def note(self, rank: int, part: Block, marks: Marks) -> None:
        self.written[rank].append((part._replace(data=part.data.clone()), marks))  # the memory is used again

    def run(self, act: Callable[[Exchange], None]) -> list[str | None]:
        """Call `act` on every rank; return the error of each."""
        store = dist.HashStore()

        def on_rank(rank: int) -> str | None:
            made = self.exchange(Coordinator(rank, len(self.ranks), store, "exchange", 20.0))
            try:
                act(made)
            except Exception as error:
                return str(error)
            finally:
                made.close()
            return None

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return [*pool.map(on_rank, self.ranks)]


def put_all(exchange: Exchange, pieces: Sequence[Block]) -> None:
    """Send pieces in the order of the files."""
    items = [(at, number, piece) for piece in pieces for at, number in exchange.runs_in(piece)]
    for position, number, piece in sorted(items, key=lambda item: item[:2]):
        exchange.reach(position)
        exchange.put(piece, number)
    exchange.finish()


@pytest.mark.parametrize("seed", range(4))
def test_values_come_to_the_rank_that_writes_their_run(seed: int) -> None:
    """Of any boxes on any ranks each run is written once, whole, by its owner, with the digest of each part."""
    chance = random.Random(seed)
    infos: dict[str, TensorInfo] = {}
    pieces: list[list[Block]] = [[] for _ in range(3)]
    values: dict[str, torch.Tensor] = {}
    for key in "abc":
        heights = [chance.randint(1, 900) for _ in range(chance.randint(1, 3))]
        widths = [chance.randint(1, 600) for _ in range(chance.randint(1, 3))]
        values[key] = torch.randn(sum(heights), sum(widths))
        infos[key] = TensorInfo(tuple(values[key].shape), torch.float32)
        for i, j in itertools.product(range(len(heights)), range(len(widths))):
            box = Chunk((sum(heights[:i]), sum(widths[:j])), (heights[i], widths[j]))
            pieces[chance.randrange(3)].append(Block(box, values[key][box.within(Chunk.whole(infos[key].shape))], key))
    sent = Sent(infos, 3, 1 << 20)
    assert sent.run(lambda exchange: put_all(exchange, pieces[exchange._coordinator.rank])) == [None] * 3
    for number, key in enumerate(infos):
        for i, run in enumerate(runs_of(infos[key])):
            of_ranks = [[f for f in of_rank if f[0].key == key and f[0].chunk == run] for of_rank in sent.written]
            assert [len(found) for found in of_ranks] == [int(rank == (number + i) % 3) for rank in range(3)]
            (((found, marks),),) = filter(None, of_ranks)
            expected = values[key][run.within(Chunk.whole(infos[key].shape))]
            assert torch.equal(found.data, expected)
            assert all(mark == digest(memory_of(expected[box.within(run)])) for box, mark in marks)
    assert sum(map(len, sent.written)) == sum(len(runs_of(info)) for info in infos.values())


def memory_of(values: torch.Tensor) -> memoryview:
    return values.contiguous().numpy().data.cast("B")


def test_what_makes_up_no_run_and_what_comes_twice_is_written_as_it_is() -> None:
    """A part that no rank has, as of ranks whose replicas are divided otherwise, is not waited for."""
    value = torch.randn(6, 8)
    left, right = (Block(Chunk((0, at), (6, 4)), value[:, at : at + 4], "x") for at in (0, 4))
    infos = {"x": TensorInfo((6, 8), torch.float32), "y": TensorInfo((6, 8), torch.float32)}
    sent = Sent(infos, 2, 1 << 20)
    pieces = [[left, left, Block(left.chunk, left.data, "y")], [right]]
    assert sent.run(lambda exchange: put_all(exchange, pieces[exchange._coordinator.rank])) == [None] * 2
    boxes = sorted((part.key, part.chunk.offsets, part.chunk.sizes) for of_rank in sent.written for part, _ in of_rank)
    assert boxes == [("x", (0, 0), (6, 4)), ("x", (0, 0), (6, 8)), ("y", (0, 0), (6, 4))]
    for part, _ in itertools.chain.from_iterable(sent.written):
        assert torch.equal(part.data, value[part.chunk.within(Chunk.whole((6, 8)))])


def test_rows_of_a_run_whose_rest_other_ranks_write_are_one_write() -> None:
    """As of ranks that have other rows, in a group of their own."""
    value = torch.randn(600, 1000)
    pieces = [Block(Chunk((50, at), (500, 500)), value[50:550, at : at + 500], "x") for at in (0, 500)]
    sent = Sent({"x": TensorInfo((600, 1000), torch.float32)}, 2, 1 << 20)
    assert sent.run(lambda exchange: put_all(exchange, [pieces[exchange._coordinator.rank]])) == [None] * 2
    (((found, marks),),) = filter(None, sent.written)
    assert found.chunk == Chunk((50, 0), (500, 1000)) and torch.equal(found.data, value[50:550])
    assert min(box.offsets for box, _ in marks) == (50, 0)


def test_a_rank_that_cannot_write_goes_on_exchanging() -> None:
    """It raises its error, and the other one writes what it gets and waits for nothing."""
    value = torch.randn(4096, 1024)
    infos = {"x": TensorInfo((4096, 1024), torch.float32)}
    halves = [Block(Chunk((0, at), (4096, 512)), value[:, at : at + 512], "x") for at in (0, 512)]
    sent = Sent(infos, 2, 1 << 20)
    note = sent.note

    def full(rank: int, part: Block, marks: Marks) -> None:
        if rank == 0 and sent.written[0]:
            raise OSError("full")
        note(rank, part, marks)

    sent.note = full  # type: ignore[method-assign]
    errors = sent.run(lambda exchange: put_all(exchange, [halves[exchange._coordinator.rank]]))
    assert errors == ["full", None]


def test_a_rank_that_has_no_memory_for_a_run_that_is_not_whole_goes_on_exchanging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It raises its error, and the other one writes what it gets and waits for nothing."""
    value, is_full = torch.randn(6, 8), threading.Event()
    infos = dict.fromkeys("xy", TensorInfo((6, 8), torch.float32))

    def put(exchange: Exchange) -> None:
        at = 3 * exchange._coordinator.rank
        corner, rows = Chunk((at, at), (3, 4)), Chunk((at, 0), (3, 8))
        exchange.put(Block(corner, value[corner.within(Chunk.whole((6, 8)))], "x"), 0)
        exchange.reach(1 << 30)
        assert is_full.wait(20)
        put_all(exchange, [Block(rows, value[at : at + 3], "y")])

    def full(chunks: Sequence[Chunk]) -> Chunk:
        if is_full.is_set():
            return hull(chunks)
        is_full.set()
        raise MemoryError("no memory")

    monkeypatch.setattr(module, "hull", full)
    sent = Sent(infos, 2, 1 << 20)
    assert sent.run(put) == ["no memory", None]
    assert {part.key for part, _ in sent.written[1]} <= {"y"}


def test_many_small_runs_that_are_not_whole_yet_take_no_more_memory_than_their_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of thousands of vectors, or of adapters, of which all ranks have parts: one rank is ahead of the other."""
    value, names = torch.randn(16, 32), [str(number) for number in range(1000)]
    allocate, made, is_ahead = Buffer.allocate, list[int](), threading.Event()

    def counted(num_bytes: int) -> Buffer:
        made.append(num_bytes)
        return allocate(num_bytes)

    def put(exchange: Exchange) -> None:
        rank = exchange._coordinator.rank
        if rank == 1:
            assert is_ahead.wait(20)
        half = Chunk((0, 16 * rank), (16, 16))
        for name in names:
            exchange.put(Block(half, value[half.within(Chunk.whole((16, 32)))], name), 0)
        is_ahead.set()
        exchange.finish()

    sent = Sent(dict.fromkeys(names, TensorInfo((16, 32), torch.float32)), 2, 32 << 20)
    monkeypatch.setattr(Buffer, "allocate", counted)
    assert sent.run(put) == [None, None]
    assert sum(map(len, sent.written)) == len(names)
    assert len(made) >= len(names)
    assert sum(size for size in made if size <= IO_BYTES) < len(names) * (value.nbytes + ALIGNMENT)


@pytest.mark.parametrize("moment", ["reserved", "filled"])
def test_an_interrupt_while_values_are_put_holds_up_no_rank(moment: str) -> None:
    """The interrupted rank closes the exchange at once, and the other one does not wait for more of its values."""
    value = torch.randn(600, 1000)
    halves = [Block(Chunk((0, at), (600, 500)), value[:, at : at + 500], "x") for at in (0, 500)]

    def put(exchange: Exchange) -> None:
        if exchange._coordinator.rank == 1:
            put_all(exchange, halves[1:])
            return
        reserve, lock, own = exchange._reserve, exchange._lock, threading.get_ident()

        class Taken:
            def __enter__(self) -> None:
                if threading.get_ident() == own:
                    raise KeyboardInterrupt
                lock.acquire()

            def __exit__(self, *_: object) -> None:
                lock.release()

        def interrupted(*given: Any) -> Any:
            reserved = reserve(*given)
            if moment == "reserved":
                raise KeyboardInterrupt
            exchange._lock = Taken()  # type: ignore[assignment]
            return reserved

        exchange._reserve = interrupted  # type: ignore[assignment, method-assign]
        with pytest.raises(KeyboardInterrupt):
            exchange.put(halves[0], 0)
        exchange._lock = lock
        exchange.end()

    started = time.monotonic()
    sent = Sent({"x": TensorInfo((600, 1000), torch.float32)}, 2, 1 << 20)
    assert sent.run(put) == [None, None]
    assert time.monotonic() - started < 10  # half the timeout


def test_a_thread_whose_start_was_interrupted_ends() -> None:
    """Also if it has not run yet when the exchange is closed."""
    line = Coordinator(0, 1, None, "", 1.0)
    made = Exchange(line, (0,), {}, lambda *_: (0, 0), lambda *_: 0, lambda *_: None, 1 << 20, 1 << 20)
    is_closed, thread = threading.Event(), made._thread
    begin = thread._bootstrap_inner  # type: ignore[attr-defined]
    thread._bootstrap_inner = lambda: is_closed.wait(20) and begin()  # type: ignore[attr-defined]
    waits = mock.patch.object(thread._started, "wait", side_effect=KeyboardInterrupt)  # type: ignore[attr-defined]
    with waits, pytest.raises(KeyboardInterrupt):
        made.start()
    made.close()
    is_closed.set()
    assert thread._started.wait(20)  # type: ignore[attr-defined]
    thread.join(5)
    assert not thread.is_alive()


@distributed(nproc=4)
def test_the_ranks_that_share_rows_are_known_from_the_mesh() -> None:
    """Along an axis that cuts columns of the file, not of the model, and not along copies or rows."""
    mesh = init_device_mesh("cpu", (2, 2))
    row, column = divmod(dist.get_rank(), 2)

    def tensor(height: int, width: int, *placements: Any) -> DTensor:
        return DTensor.from_local(torch.zeros(height, width), mesh, placements, run_check=False)

    state = {
        "rows": tensor(2, 4, Shard(0), Replicate()),
        "columns": tensor(4, 2, Replicate(), Shard(1)),
        "both": tensor(2, 2, Shard(0), Shard(1)),
        "turned": tensor(2, 2, Shard(0), Shard(1)),
        "all": tensor(4, 1, Shard(1), Shard(1)),
    }
    table = KeyMap(tuple(KeyRule.of(n, n, *([Transpose()] if n == "turned" else [])) for n in state))
    peers = row_peers(StateDictTransforms(table).to_file(dict(state), None, None))
    across, down = (2 * row, 2 * row + 1), (column, column + 2)
    assert peers == {"columns": across, "both": across, "turned": down, "all": (0, 1, 2, 3)}


def test_groups_are_connected_once_and_anew_after_an_error() -> None:
    """Only groups that all of their ranks want; one that is thrown away on one rank is made anew on both."""

    def body(line: Coordinator) -> Any:
        made = [line.peers.connect(line, lambda: {(0, 1), (0, 1, 2)} if line.rank < 2 else {(1, 2)})]
        values = []
        for number in range(3):
            if line.rank < 2:
                send = torch.full((2000 * number,), line.rank, dtype=torch.uint8)
                sizes, received = [1000 * number] * 2, torch.empty_like(send)
                line.peers.exchange((0, 1), send, sizes, received, sizes, 10.0).wait()
                values.append(received.tolist())
            if number == 1 and line.rank == 0:
                line.peers.discard()
            made.append(line.peers.connect(line, lambda: {(0, 1)} if line.rank < 2 else set()))
        return [made, values]

    first, second, third = run_ranks(3, body)
    assert first == second == [[[[0, 1]]] * 4, [[0] * n + [1] * n for n in (0, 1000, 2000)]]
    assert third == [[[]] * 4, []]


def test_ranks_that_gloo_cannot_connect_are_not_tried_again() -> None:
    """One rank cannot: all go without, at once, and so they do the next time."""

    def body(line: Coordinator) -> Any:
        tried = []

        def refused(*arguments: Any) -> None:
            tried.append(arguments)
            raise RuntimeError("no route to host")

        line.timeout_seconds = 3.0
        if line.rank == 0:
            line.gloo_group = refused  # type: ignore[assignment, method-assign]
        made = [outcome(lambda: line.peers.connect(line, lambda: {(0, 1)})) for _ in range(2)]
        return [made, len(tried)]

    first, second = run_ranks(2, body, timeout=30.0)
    assert first == [[["ok", []]] * 2, 1]
    assert second[0] == [["ok", []]] * 2


def test_a_connection_that_gloo_never_ends_leaves_the_line_to_the_store_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a rank was killed while it was connected: gloo may wait for longer than it was told to."""
    made = dist.ProcessGroupGloo

    def body(line: Coordinator) -> Any:
        line.timeout_seconds = 6.0
        never = lambda *_: time.sleep(600)  # noqa: E731
        monkeypatch.setattr(dist, "ProcessGroupGloo", never if line.rank == 0 else made)
        begin = time.monotonic()
        found = outcome(lambda: line.peers.connect(line, lambda: {(0, 1)}))
        return [found, line.gather("later", line.rank), time.monotonic() - begin < 6.0]

    assert run_ranks(2, body, timeout=30.0) == [[["ok", []], [0, 1], True]] * 2
