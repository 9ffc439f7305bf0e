"""Regions of files land where they belong: any box, any destination, any dtype, warm and cold."""

from __future__ import annotations

import json
import os
import struct
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.unit.formats.native.test_native import drop_from_page_cache
from titan_ckpt.disk.files import FileReader
from titan_ckpt.disk.kernel import Buffer
from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.formats.reading import engine
from titan_ckpt.formats.reading.slices import windows
from titan_ckpt.formats.safetensors.container import SafetensorsFiles, read_header
from titan_ckpt.geometry.boxes import boxes
from titan_ckpt.geometry.chunks import Block, Chunk
from titan_ckpt.geometry.keymap import PermuteRotary


def opened(*paths: Path) -> closing[SafetensorsFiles]:
    return closing(SafetensorsFiles([read_header(path) for path in paths]))


def test_neighbours_in_file_and_memory_are_one_direct_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes that make up a run, into memory aligned as the file is, need no copy; edges come through the page cache."""
    value = torch.randint(0, 100, (301, 1000), dtype=torch.int32)
    path = tmp_path / "a.safetensors"
    save_file({"x": value}, path)
    start = read_header(path).entries["x"].at + 4 * 500
    buffer = Buffer.allocate(2 << 20)
    boxes = [Chunk((0, 500), (1, 500)), Chunk((1, 0), (299, 1000)), Chunk((300, 0), (1, 7))]
    requests, at = [], start % 4096
    for box in boxes:
        requests.append(Block(box, buffer.tensor[at : at + 4 * box.numel].view(torch.int32), "x"))
        at += 4 * box.numel
    reads: list[int] = []
    true = FileReader.read_blocks

    def counted(self: FileReader, view: memoryview, offset: int) -> None:
        reads.append(len(view))
        true(self, view, offset)

    monkeypatch.setattr(FileReader, "read_blocks", counted)
    drop_from_page_cache(path.parent)
    with opened(path) as files:
        files.read(requests)
    assert reads == [at - start % 4096]
    assert torch.equal(torch.cat([r.data.view(-1) for r in requests]), value.view(-1)[500 : 300 * 1000 + 7])


def test_columns_of_permuted_heads_in_small_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard of columns whose memory is split into heads is read map by map, every map whole heads."""
    monkeypatch.setattr(engine, "RUN_BYTES", 256)
    value = torch.randn(24, 10)
    save_file({"x": value}, tmp_path / "a.safetensors")
    native = torch.zeros(24, 4)
    pieces = list(PermuteRotary(3).pieces(0, [(24, 10)], Block(Chunk((0, 3), (24, 4)), native), "x"))
    with opened(tmp_path / "a.safetensors") as files:
        files.read(pieces)
    expected = value[:, 3:7].view(3, 2, 4, 4).transpose(1, 2).reshape(24, 4)
    assert torch.equal(native, expected)


@pytest.mark.parametrize("shape", [(6, 5), (300, 200)], ids=["small", "mapped"])
def test_tensors_at_odd_offsets_are_read(tmp_path: Path, shape: tuple[int, int]) -> None:
    """Other writers need not align: runs and strided boxes from odd bytes are exact."""
    value = torch.randn(shape)
    header = {
        "b": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "x": {"dtype": "F32", "shape": list(shape), "data_offsets": [3, 3 + value.nbytes]},
    }
    text = json.dumps(header).encode()
    raw = struct.pack("<Q", len(text)) + text + bytes(3) + value.numpy().tobytes()
    (tmp_path / "a.safetensors").write_bytes(raw)
    run, box = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape[0], 2)
    for cold in (False, True):
        if cold:
            drop_from_page_cache(tmp_path)
        with opened(tmp_path / "a.safetensors") as files:
            files.read([Block(Chunk.whole(shape), run, "x"), Block(Chunk((0, 1), (shape[0], 2)), box, "x")])
        assert torch.equal(run, value.double())
        assert torch.equal(box, value[:, 1:3])


def test_tensors_in_two_files_are_refused(tmp_path: Path) -> None:
    """Nobody can know which value counts: the message lists eight of ten keys, and that there are two more."""
    paths = [tmp_path / name for name in ("a.safetensors", "b.safetensors")]
    for path in paths:
        save_file({f"x{i}": torch.zeros(1) for i in range(10)}, path)
    with (
        pytest.raises(CorruptCheckpointError, match=r"10 tensor\(s\) twice: x0 is in a.*b\.safe.*; and 2 more$"),
        opened(*paths),
    ):
        pass


def test_a_file_that_changed_since_it_was_checked_is_refused(tmp_path: Path) -> None:
    """A file replaced between the check and the read is not read by the old header."""
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.ones(3)}, path)
    with opened(path) as files:
        save_file({"x": torch.ones(5)}, path)
        with pytest.raises(CorruptCheckpointError, match="changed"):
            files.read([Block(Chunk.whole((3,)), torch.zeros(3), "x")])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["read", "mapped"])
def test_a_file_that_is_cut_short_while_it_is_open_is_named(tmp_path: Path, dtype: torch.dtype) -> None:
    """The read says so, and the process does not end, whether the bytes are read or cast from a mapping."""
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.ones(1 << 20)}, path)
    with opened(path) as files:
        fill = files.plan([Block(Chunk.whole((1 << 20,)), torch.zeros(1 << 20, dtype=dtype), "x")])
        os.truncate(path, 1 << 20)
        with pytest.raises(CorruptCheckpointError, match=r"a\.safetensors ends .* cut short"):
            fill()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 6), max_size=4), st.integers(1, 40))
def test_windows_and_boxes_cut_alike_in_row_major_order(sizes: list[int], limit: int) -> None:
    """Windows of memory and boxes of a region are the same cuts: bounded, in order, complete."""
    value = torch.arange(torch.Size(sizes).numel()).view(sizes)
    cut = list(windows(value, limit))
    assert all(part.numel() <= limit for part in cut)
    assert torch.equal(torch.cat([part.reshape(-1) for part in cut]), value.reshape(-1))
    whole = Chunk.whole(tuple(sizes))
    parts = [value[box.within(whole)] for box in boxes(whole, limit)]
    assert all(part.numel() <= limit for part in parts)
    assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), value.reshape(-1))
