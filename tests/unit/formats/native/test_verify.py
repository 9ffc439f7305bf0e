"""Verifying a whole step: every byte, every tensor whole, and nothing that no reader looks at."""

from __future__ import annotations

import math
import time
import uuid
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.world import flip_bit
from tests.world import manager as build
from titan_ckpt import progress
from titan_ckpt.cli.main import main
from titan_ckpt.directory.manifest import MANIFEST_NAME, FileRecord, Manifest
from titan_ckpt.directory.names import rank_file_name
from titan_ckpt.disk.kernel import Buffer, round_up
from titan_ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from titan_ckpt.formats.native.rank_file import lay_out
from titan_ckpt.formats.native.reader import NativeReader
from titan_ckpt.formats.native.sealed_file import write_rank_file
from titan_ckpt.geometry.chunks import Chunk, TensorInfo
from titan_ckpt.tools.verifying import verify_step


@pytest.fixture
def step(tmp_path: Path) -> Path:
    with build(tmp_path, nn.Linear(2, 3)) as manager:
        manager.save(1)
    return tmp_path / "checkpoints" / "step-1"


def write_step(folder: Path, *ranks: dict[str, tuple[tuple[int, ...], int, int]], first: float = 0.0) -> Path:
    """Write a step whose digests all hold: for each rank the shape of each tensor and the rows [start, stop) it has.

    Every tensor counts from 1, but for its first element.
    """
    folder.mkdir()
    infos = {fqn: TensorInfo(shape, torch.float32) for tensors in ranks for fqn, (shape, *_) in tensors.items()}
    records = []
    for rank, tensors in enumerate(ranks):
        chunks = [
            (fqn, TensorInfo(shape, torch.float32), Chunk((start, 0), (stop - start, *shape[1:])))
            for fqn, (shape, start, stop) in tensors.items()
        ]
        elsewhere = {fqn: info for fqn, info in infos.items() if rank == 0 and fqn not in tensors}
        layout = lay_out(chunks, rank, len(ranks), elsewhere)
        view = Buffer.allocate(round_up(layout.num_bytes - len(layout.header))).view
        data = b"".join(_rows(*tensor, first) for tensor in tensors.values())
        view[: len(data)] = data
        name = rank_file_name(rank)
        digest = write_rank_file(folder / name, layout, lambda a, b, v=view: nullcontext(v[a : round_up(b)]))  # type: ignore[misc]
        records.append(FileRecord(name, layout.num_bytes, digest))
    manifest = Manifest(
        1, "model", uuid.uuid4().hex, len(ranks), time.time(), ("model",), [], None, None, tuple(records)
    )
    (folder / MANIFEST_NAME).write_bytes(manifest.to_bytes())
    return folder


def _rows(shape: tuple[int, ...], start: int, stop: int, first: float) -> bytes:
    values = torch.arange(math.prod(shape), dtype=torch.float32)
    values[0] = first
    return values.view(shape)[start:stop].numpy().tobytes()


def test_a_step_that_expires_while_it_is_verified_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was whole when its manifest was read; a step that lacks a file and keeps its manifest is damaged."""
    step = write_step(tmp_path / "step-1", {"w": ((4, 2), 0, 2)}, {"w": ((4, 2), 2, 4)})
    other, kept = step / rank_file_name(1), tmp_path / "kept"
    other.rename(kept)
    with pytest.raises(CorruptCheckpointError):
        verify_step(step)
    kept.rename(other)
    verify = NativeReader.verify

    def expired(reader: NativeReader, count: progress.Count) -> None:
        step.rename(tmp_path / "trash")
        verify(reader, count)

    monkeypatch.setattr(NativeReader, "verify", expired)
    with pytest.raises(CheckpointNotFoundError, match="went away while it was verified"):
        verify_step(step)


def test_a_pinned_step_and_a_step_with_a_users_file_are_whole(step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that no reader opens is no damage; the command names it, so that nobody takes it for part of the step."""
    (step / "PINNED").touch()
    (step / "notes.txt").write_text("good one")
    assert main(["verify", str(step)]) == 0
    out = capsys.readouterr().out
    assert "is whole" in out and "cover it exactly once" in out
    assert "no part of the step: PINNED, notes.txt" in out


def test_every_damaged_file_is_listed(step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A state file and a tensor file that differ are both in the one error."""
    for name, at in (("state.json", 3), ("rank-00000.safetensors", -1)):
        flip_bit(step / name, at)
    assert main(["verify", str(step)]) == 1
    error = capsys.readouterr().out
    assert "state.json: digest" in error and "rank-00000.safetensors" in error
    (step / "state.json").unlink()
    assert main(["verify", str(step)]) == 1
    assert "state.json: No such file" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ranks", "fault"),
    [
        ([{"w": ((4, 2), 0, 2)}, {"w": ((4, 2), 3, 4)}], "the stored chunks of w leave a hole: 6 of 8 elements"),
        ([{"w": ((4, 2), 0, 3)}, {"w": ((4, 2), 2, 4)}], "the stored chunks of w overlap: 10 of 8 elements"),
        ([{"w": ((4, 2), 0, 4)}, {"w": ((4, 2), 0, 4)}], "the stored chunks of w overlap: 16 of 8 elements"),
        ([{"w": ((4, 2), 0, 4)}, {"v": ((2, 2), 0, 1)}], "the stored chunks of v leave a hole: 2 of 4 elements"),
        ([{"w": ((4, 2), 0, 2)}, {"w": ((8, 2), 2, 4)}], "w is float32[8, 2], rank 0's file says float32[4, 2]"),
    ],
    ids=["hole", "overlap", "twice", "elsewhere", "another shape"],
)
def test_tensors_that_are_not_whole_are_found(
    tmp_path: Path, ranks: list[dict[str, tuple[tuple[int, ...], int, int]]], fault: str
) -> None:
    """Digests that hold prove each file alone; together the files must have every element of a tensor once."""
    with pytest.raises(CorruptCheckpointError) as raised:
        verify_step(write_step(tmp_path / "step-1", *ranks))
    assert fault in str(raised.value)


def test_a_step_of_two_ranks_is_whole(tmp_path: Path) -> None:
    """The check of tiling accepts what ranks share out, and tensors that only one of them has."""
    folder = write_step(tmp_path / "step-1", {"w": ((4, 2), 0, 2)}, {"w": ((4, 2), 2, 4), "v": ((2, 2), 0, 2)})
    assert verify_step(folder)[0] == 2
