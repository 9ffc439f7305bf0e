"""Exports: which rank packs what, and rows put together of several ranks' columns."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.faults.forked_ranks import outcome, run
from titan_ckpt.disk.direct import IO_BYTES
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import StateEncodingError
from titan_ckpt.formats.publish.columns import Rows, rounds_of, row_peers, whole_rows
from titan_ckpt.formats.publish.plan import pack_model_files, plan_export
from titan_ckpt.geometry.chunks import Chunk
from titan_ckpt.geometry.keymap import KeyMap, KeyRule, Transpose
from titan_ckpt.testing import distributed
from titan_ckpt.weights.transforms import StateDictTransforms

Tables = dict[int, dict[str, list[Chunk]]]


def grid(rows: list[int], columns: list[int], depth: int) -> list[Chunk]:
    """Cut (sum(rows), sum(columns), depth) into boxes."""
    return [
        Chunk((sum(rows[:i]), sum(columns[:j]), 0), (n, m, depth))
        for i, n in enumerate(rows)
        for j, m in enumerate(columns)
    ]


def test_rows_are_put_together_once_and_fit_a_write() -> None:
    """For any grid of boxes on any ranks, the rows tile the tensor in order, and each rank is asked for its own."""
    chance = random.Random(0)
    for _ in range(50):
        heights = [chance.randint(1, 700) for _ in range(chance.randint(1, 3))]
        widths = [chance.randint(1, 600) for _ in range(chance.randint(2, 3))]
        boxes = grid(heights, widths, depth := chance.randint(1, 3))
        tables: Tables = {rank: {"x": []} for rank in range(3)}
        owner = {box: chance.randrange(3) for box in boxes}
        for box, rank in owner.items():
            tables[rank]["x"].append(box)
        shape = (sum(heights), sum(widths), depth)
        placed = list(whole_rows(tables, {"x": (shape, 4)}, ["x"]))
        made = [rows for _, rows in placed]
        assert [place for place, _ in placed] == sorted((0, rows.chunk.offsets[0]) for rows in made)
        assert sum(rows.chunk.numel for rows in made) == Chunk.whole(shape).numel
        for rows in made:
            assert rows.chunk.numel * 4 <= IO_BYTES - 4096
            assert rows.chunk.sizes[1:] == shape[1:]
            assert sum(box.numel for _, box in rows.parts) == rows.chunk.numel
            assert rows.writer in {rank for rank, _ in rows.parts}
            for rank, box in rows.parts:
                (whole,) = [b for b in boxes if b.intersect(box) is not None]
                assert owner[whole] == rank
                assert whole.intersect(box) == box
                assert whole.offsets[0] == rows.first


def test_rows_with_a_part_elsewhere_and_rows_too_long_are_left_out() -> None:
    """A band of which no rank of the group holds a part is not waited for, nor a row that fits no write."""
    boxes = grid([10, 20], [3, 4], 1)
    tables: Tables = {0: {"x": boxes[:1]}, 1: {"x": boxes[2:]}}
    made = [rows for _, rows in whole_rows(tables, {"x": ((30, 7, 1), 2)}, ["x"])]
    assert [(rows.chunk.offsets[0], rows.chunk.sizes[0]) for rows in made] == [(10, 20)]
    wide = grid([2], [IO_BYTES // 2, IO_BYTES // 2], 1)
    assert list(whole_rows({0: {"x": wide}}, {"x": ((2, IO_BYTES, 1), 1)}, ["x"])) == []


def test_no_rank_sends_or_receives_much_more_than_a_write_at_once() -> None:
    """Small rows share an exchange, large ones have their own, and their order is kept."""
    shapes = {"large": ((3000, 1500), 4), "small": ((40, 8), 4), "other": ((40, 8), 4)}
    tables: Tables = {0: {}, 1: {}, 2: {}}
    for key, ((height, width), _) in shapes.items():
        for rank in range(3):
            left, right = width * rank // 3, width * (rank + 1) // 3
            tables[rank][key] = [Chunk((0, left), (height, right - left))]
    placed = list(whole_rows(tables, shapes, list(shapes)))
    rounds = list(rounds_of((0, 1, 2), placed, dict.fromkeys(shapes, 4)))
    assert [rows for one in rounds for rows in one.rows] == [rows for _, rows in placed]
    assert [one.place for one in rounds] == sorted(one.place for one in rounds)
    assert {rows.key for rows in rounds[-1].rows} >= {"small", "other"}
    assert len(rounds) < len(placed)
    for one in rounds:
        for me in range(3):
            sent = sum(_bytes(rows, rank == me) for rows in one.rows for rank in [r for r, _ in rows.parts])
            received = sum(rows.chunk.numel * 4 for rows in one.rows if rows.writer == me)
            assert max(sent, received) <= IO_BYTES


def _bytes(rows: Rows, is_own: bool) -> int:
    return rows.chunk.numel * 4 // len(rows.parts) if is_own else 0


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
                values.append([*line.peers.gather((0, 1), [line.rank] * number * 1000, 10.0).items()])
            if number == 1 and line.rank == 0:
                line.peers.discard()
            made.append(line.peers.connect(line, lambda: {(0, 1)} if line.rank < 2 else set()))
        return [made, [[rank, len(value)] for value in values for rank, value in value]]

    first, second, third = run(3, body)
    assert first == second == [[[[0, 1]]] * 4, [[r, n] for n in (0, 1000, 2000) for r in (0, 1)]]
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

    first, second = run(2, body, timeout=30.0)
    assert first == [[["ok", []]] * 2, 1]
    assert second[0] == [["ok", []]] * 2


def test_a_shard_that_one_rank_exports_alone_is_refused() -> None:
    """The rows of the other ranks would be zeros in the file, which no digest of what was written can see."""
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        half = DTensor.from_local(torch.ones(2, 3), init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)
        alone = Coordinator(0, 1, None, "", 1.0)
        groups = StateDictTransforms().to_file({"w": half}, None, None)
        with pytest.raises(StateEncodingError, match="shards of all ranks hold 24 bytes, their tensors 48"):
            plan_export(groups, lambda infos: pack_model_files(infos, 256), lambda *_: {}, alone)
    finally:
        dist.destroy_process_group()


def test_the_buffers_of_a_module_are_exported_from_one_rank() -> None:
    """Each rank has statistics of its own, and the mean and variance of two ranks do not fit together."""
    store, names = dist.HashStore(), [f"{i}.norm.running_{kind}" for i in range(4) for kind in ("mean", "var")]
    written: list[list[str]] = [[], []]

    def plan(rank: int) -> None:
        groups = StateDictTransforms().to_file({name: torch.full((3,), rank) for name in names}, None, None)
        line = Coordinator(rank, 2, store, "plan", 60.0)
        made = plan_export(groups, lambda infos: pack_model_files(infos, 256), lambda *_: {}, line, names)
        written[rank] = [group.fqns[0] for group in groups if made.writes(group)]

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(plan, range(2))]
    modules = [{name.rpartition(".")[0] for name in of_rank} for of_rank in written]
    assert sorted(written[0] + written[1]) == sorted(names)
    assert all(modules) and not set.intersection(*modules)
