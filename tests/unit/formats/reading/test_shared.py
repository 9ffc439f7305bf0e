"""The deal: which ranks read which bytes together, computed by each rank from the same lists."""

from __future__ import annotations

import random
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from titan_ckpt.disk.files import FileReader
from titan_ckpt.disk.workers import batches
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.formats.reading import shared
from titan_ckpt.formats.reading.engine import Blocks, SliceReader
from titan_ckpt.formats.reading.shared import Deal, awaited, is_dear, said
from titan_ckpt.formats.reading.slices import Slice
from titan_ckpt.geometry.chunks import joined


@pytest.mark.parametrize("seed", range(30))
def test_all_ranks_of_a_run_agree_on_it_and_every_byte_has_one(seed: int) -> None:
    """Each rank cuts its runs of random lists in order, and the holders of each byte are exactly those that want it."""
    draw = random.Random(seed)
    wanted = {rank: {byte for byte in range(60) if draw.random() < 0.6} for rank in range(5)}
    lists: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for rank, its in wanted.items():
        lists[(rank,)] = joined((byte, byte + 1) for byte in its)
    of_ranks = {rank: [*shared._runs(lists, rank)] for rank in wanted}
    for rank, runs in of_ranks.items():
        assert [byte for run, _ in runs for byte in range(*run)] == sorted(wanted[rank])
        for run, holders in runs:
            assert all(tuple(r for r in wanted if byte in wanted[r]) == holders for byte in range(*run))
            assert all((run, holders) in of_ranks[other] for other in holders)


@pytest.mark.parametrize("num_ranks", [2, 15, 16, 17, 40, 1000])
def test_teams_are_neighbours_of_like_size(num_ranks: int) -> None:
    """Each rank is in its own team, and all members name the same one."""
    holders = tuple(range(3, 3 + 2 * num_ranks, 2))
    teams = {rank: shared._team(holders, rank) for rank in holders}
    assert all(rank in team and teams[team[0]] == team for rank, team in teams.items())
    sizes = {len(team) for team in teams.values()}
    assert max(sizes) <= shared.MOST_RANKS and max(sizes) - min(sizes) <= 1


def test_ranks_of_a_team_read_like_shares_in_pieces_that_fit_the_windows() -> None:
    """Also where one run is much longer than the others."""

    class Bytes:
        def cut(self, run: tuple[int, int], most: int) -> Any:
            return ((start, min(start + most, run[1])) for start in range(*run, most))

    source: Any = Bytes()
    for ranks in ((0, 1), (2, 3, 4, 5), tuple(range(16))):
        deal = Deal(Coordinator(ranks[0], 1, None, "", 1.0))
        shared._deal(ranks, [(source, deal, run) for run in ((0, 900 << 20), (1000 << 20, 1007 << 20))])
        (pieces,) = deal.teams.values()
        loads = [sum(piece.num_bytes for piece in pieces if piece.reader == rank) for rank in ranks]
        assert sum(loads) == 907 << 20 and max(loads) - min(loads) <= 16 << 20
        assert deal.num_read == loads[0]
        windows = [*batches(pieces, attrgetter("num_bytes"), len(ranks) * max(p.num_bytes for p in pieces))]
        assert [piece for window in windows for piece in window] == pieces
        assert all(sum(piece.num_bytes for piece in window) <= shared._WINDOW_BYTES for window in windows)


@pytest.mark.parametrize("num_ranks", [9, 10, 11, 12, 14])
def test_no_element_is_cut_whatever_the_number_of_ranks(num_ranks: int, tmp_path: Path) -> None:
    """Values that are cast arrive in their places though the ranks cannot share a window evenly."""
    values = torch.arange(15 << 20, dtype=torch.int32).view(torch.float32)
    values.numpy().tofile(tmp_path / "file")
    into = torch.zeros(values.numel(), dtype=torch.float64)
    part = Slice("x", 0, (values.numel(),), torch.float32, None, into)
    reader: Any = SliceReader(FileReader(tmp_path / "file"), None, [part])
    deal, ranks = Deal(Coordinator(0, 1, None, "", 1.0)), tuple(range(num_ranks))
    shared._deal(ranks, [(reader, deal, run) for run in reader.runs])
    content = memoryview((tmp_path / "file").read_bytes())
    for _, (start, stop), reader_rank in deal.teams[ranks]:
        data = content[start:stop]
        reader.put((start, stop), data, xxhash.xxh3_128_digest(data), reader_rank)
    assert torch.equal(into, values.double())


def test_only_what_is_dear_to_read_is_read_together() -> None:
    """A bucket, and a network's file system that is not in the page cache."""
    on = [
        (is_remote, is_networked, is_cached)
        for is_remote in (False, True)
        for is_networked in (False, True)
        for is_cached in (False, True)
        if is_dear(is_remote=is_remote, is_networked=is_networked, is_cached=is_cached)
    ]
    assert on == [(False, True, False), *((True, a, b) for a in (False, True) for b in (False, True))]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"is_on": False, "dear": 9 << 20}, "because checkpoint.resume.share_reads is false"),
        ({"dear": 0}, "nothing to share is in a bucket"),
        (
            {"dear": 9 << 20},
            "of 9 MB that are in a bucket, or on a network's file system",
        ),
        ({"dear": 90 << 20, "together": 80 << 20, "read": 20 << 20}, "84 MB are read together with other ranks: 21 MB"),
    ],
)
def test_the_log_says_whether_and_why_ranks_read_together(given: dict[str, Any], text: str) -> None:
    assert text in said(**{"is_on": True, "together": 0, "read": 0, **given})


def test_a_rank_that_did_not_wait_is_the_one_that_was_late() -> None:
    """Not where all have waited, as for a network that is gone, or none."""
    assert awaited({0: 2.1, 1: 2.0, 2: 0.0}, 4.0) == [2]
    assert awaited({0: 2.1, 1: 2.0, 3: 1.9}, 4.0) == []
    assert awaited({0: 0.2, 1: 0.0}, 4.0) == []


def test_a_piece_is_a_block_at_least(tmp_path: Path) -> None:
    """Another program's blocks may be larger than what ranks send at a time."""
    (tmp_path / "file").write_bytes(bytes(1 << 18))
    blocks = Blocks(0, 1 << 18, 1 << 16, lambda _: "")
    part = Slice("x", 0, (1 << 18,), torch.uint8, None, torch.empty(1 << 18, dtype=torch.uint8))
    reader = SliceReader(FileReader(tmp_path / "file"), blocks, [part])
    assert [*reader.cut((0, 1 << 18), 1 << 12)] == [(n << 16, (n + 1) << 16) for n in range(4)]
