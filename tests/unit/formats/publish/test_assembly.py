"""Rows put together by several ranks: which rows, in which order, and what becomes of a rank that fails or is gone."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from titan_ckpt.errors import PeerError
from titan_ckpt.formats.publish import assembly as module
from titan_ckpt.formats.publish.assembly import NUM_SLOTS, SLOT_BYTES, Assembly, GaveUp, Rows, whole_rows
from titan_ckpt.geometry.chunks import Chunk

Tables = dict[int, dict[str, list[Chunk]]]


def grid(rows: list[int], columns: list[int], depth: int) -> list[Chunk]:
    """Cut (sum(rows), sum(columns), depth) into boxes."""
    return [
        Chunk((sum(rows[:i]), sum(columns[:j]), 0), (n, m, depth))
        for i, n in enumerate(rows)
        for j, m in enumerate(columns)
    ]


def test_rows_are_put_together_once_and_fit_a_slot() -> None:
    """Any grid of boxes on any ranks: what comes out tiles the tensor, in order; each rank is asked for its own."""
    chance = random.Random(0)
    for _ in range(50):
        rows = [chance.randint(1, 700) for _ in range(chance.randint(1, 3))]
        columns = [chance.randint(1, 600) for _ in range(chance.randint(2, 3))]
        boxes = grid(rows, columns, depth := chance.randint(1, 3))
        tables: Tables = {rank: {"x": []} for rank in range(3)}
        owner = {box: chance.randrange(3) for box in boxes}
        for box, rank in owner.items():
            tables[rank]["x"].append(box)
        shape = (sum(rows), sum(columns), depth)
        made = list(whole_rows(tables, {"x": (shape, 4)}, ["x"]))
        assert [one.number for one in made] == list(range(len(made)))
        assert [one.chunk.offsets[0] for one in made] == sorted(one.chunk.offsets[0] for one in made)
        assert sum(one.chunk.numel for one in made) == Chunk.whole(shape).numel
        for one in made:
            assert one.chunk.numel * 4 <= SLOT_BYTES - 4096
            assert one.chunk.sizes[1:] == shape[1:]
            assert sum(box.numel for _, box in one.parts) == one.chunk.numel
            assert one.writer in {rank for rank, _ in one.parts}
            for rank, box in one.parts:
                (whole,) = [b for b in boxes if b.intersect(box) is not None]
                assert owner[whole] == rank
                assert whole.intersect(box) == box
                assert whole.offsets[0] == one.first


def test_rows_with_a_part_elsewhere_and_rows_too_long_are_left_out() -> None:
    """What another machine's rank holds, or what fits no slot, is not waited for; the other bands are."""
    boxes = grid([10, 20], [3, 4], 1)
    tables: Tables = {0: {"x": boxes[:1]}, 1: {"x": boxes[2:]}}
    made = list(whole_rows(tables, {"x": ((30, 7, 1), 2)}, ["x"]))
    assert [(one.chunk.offsets[0], one.chunk.sizes[0]) for one in made] == [(10, 20)]
    wide = grid([2], [SLOT_BYTES // 2, SLOT_BYTES // 2], 1)
    assert list(whole_rows({0: {"x": wide}}, {"x": ((2, SLOT_BYTES, 1), 1)}, ["x"])) == []


@pytest.fixture
def pair() -> Iterator[list[Assembly]]:
    """Two ranks' sides, connected, in one process."""
    with ExitStack() as stack:
        yield connected(stack, 5.0)


def connected(stack: ExitStack, timeout: float) -> list[Assembly]:
    sides = [stack.enter_context(Assembly(rank, {f"k{rank}": [Chunk((rank,), (2,))]}, timeout)) for rank in (0, 1)]
    addresses: list[Any] = [None, None]
    for side in sides:
        addresses[side.rank] = side.address
    for side in sides:
        assert side.connect(addresses) == {rank: {f"k{rank}": [Chunk((rank,), (2,))]} for rank in (0, 1)}
    return sides


def rows(number: int) -> Rows:
    """Rows of which each rank has a byte column; rank 0 writes."""
    boxes = [(rank, Chunk((number, rank), (1, 1))) for rank in (0, 1)]
    return Rows(number, "x", Chunk((number, 0), (1, 2)), tuple(boxes), 0, number)


def test_parts_of_two_ranks_become_whole_rows_again_and_again(pair: list[Assembly]) -> None:
    """Many more rows than slots: each is complete when it is written, with the digests of its parts."""
    seen: list[bytes] = []

    def fill(side: Assembly) -> None:
        for number in range(10 * NUM_SLOTS):
            slot = side.slot(rows(number))
            slot.view[side.rank] = (number + 100 * side.rank) % 256
            side.put(rows(number), side.rank, bytes([number % 256]) * 16)
            if side.rank == 0:
                parts = side.complete(rows(number))
                assert parts == tuple((box, bytes([number % 256]) * 16) for _, box in rows(number).parts)
                seen.append(bytes(slot.view[:2]))
                side.written(rows(number))

    other = threading.Thread(target=fill, args=(pair[1],))
    other.start()
    fill(pair[0])
    other.join()
    assert seen == [bytes([n % 256, (n + 100) % 256]) for n in range(10 * NUM_SLOTS)]


def test_a_rank_that_fails_lets_the_others_go(pair: list[Assembly]) -> None:
    """Whatever the other waits for, a free slot or a part, it stops at once."""
    caught: list[str] = []

    def wait() -> None:
        for what in (lambda: pair[0].complete(rows(0)), lambda: pair[0].slot(rows(NUM_SLOTS))):
            try:
                what()
            except GaveUp:
                caught.append("gave up")

    waiting = threading.Thread(target=wait)
    waiting.start()
    pair[1].give_up()
    waiting.join(5)
    assert caught == ["gave up", "gave up"]


def test_a_rank_that_is_gone_or_silent_is_not_waited_for_forever() -> None:
    """A closed pipe is a rank that has ended; without one the wait ends in time and names who is missing."""
    with ExitStack() as stack:
        sides = connected(stack, 0.2)
        sides[0].put(rows(0), 0, bytes(16))
        with pytest.raises(PeerError, match=r"rank 1 has not put its part of x within 0\.2 s"):
            sides[0].complete(rows(0))
        sides[1].close()
        sides[0].written(rows(0))
        with pytest.raises(GaveUp):
            sides[0].slot(rows(1))


def test_another_process_under_the_same_number_is_not_taken_for_a_rank() -> None:
    """Where processes number each other differently, what is opened does not begin with the token that was posted."""
    with Assembly(0, {"x": []}, 1.0) as one, Assembly(1, {"x": []}, 1.0) as other, Assembly(2, {}, 1.0) as third:
        address = [*other.address]
        address[2] = third.address[2]
        with pytest.raises(ValueError, match="is not rank 1"):
            one.connect([one.address, address])
    with Assembly(0, {"x": []}, 1.0) as one, pytest.raises(OSError, match="No such file"):
        one.connect([one.address, [one.address[0], 2**22 + 1, 3, 4, "00", 2]])


def test_ranks_of_another_boot_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their numbers mean nothing here, and nothing of them is opened."""
    with Assembly(0, {"x": []}, 1.0) as one:
        assert one.connect([one.address, ["another boot", 1, 2, 3, "00", 4], None]) == {0: {"x": []}}
    monkeypatch.setattr(module, "BOOT_ID", Path("/nowhere/boot_id"))
    with pytest.raises(OSError, match="nowhere"):
        Assembly(0, {}, 1.0)


def test_nothing_is_left_open() -> None:
    """Descriptors and threads are gone when both sides are closed, however often."""
    before = sorted(os.listdir("/proc/self/fd")), threading.active_count()
    with ExitStack() as stack:
        for side in connected(stack, 1.0):
            side.close()
    assert (sorted(os.listdir("/proc/self/fd")), threading.active_count()) == before
