"""One engine reads any slices of any file: with digests and without, cached or not, into memory of any kind."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import closing
from math import prod
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_ckpt.disk import files
from titan_ckpt.disk.files import FileReader
from titan_ckpt.formats.reading import engine
from titan_ckpt.formats.reading.engine import Blocks, SliceFill
from titan_ckpt.formats.reading.slices import Slice
from titan_ckpt.geometry.chunks import Chunk

BLOCK = 4096


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of bytes that are small numbers in every dtype, and no NaN."""
    path = tmp_path_factory.mktemp("engine") / "a.bin"
    path.write_bytes(torch.randint(0, 60, (5 * BLOCK + 100,), dtype=torch.uint8).numpy().tobytes())
    return path


def targets(box: Chunk, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield memory for a box, and the view of it that has the box's elements in its shape."""
    plain = torch.zeros(box.sizes, dtype=dtype)
    yield plain, plain
    strided = torch.zeros((*box.sizes, 2), dtype=dtype)[..., 0]
    yield strided, strided
    cast = torch.zeros(box.sizes, dtype=torch.float64)
    yield cast, cast
    column = torch.zeros(box.numel, 1, 2, dtype=dtype)[..., 1]  # of another shape, and no view has the box's
    yield column, column


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_slices_are_read_in_any_way(path: Path, data: st.DataObject) -> None:
    """Windows of 64 bytes cut everything; tensors at odd offsets, as others write them, have no digests."""
    content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    has_digests, cached = data.draw(st.booleans()), data.draw(st.booleans())
    wanted: list[tuple[Slice, torch.Tensor, torch.Tensor]] = []
    for number in range(data.draw(st.integers(1, 5))):
        dtype = data.draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]))
        sizes = tuple(data.draw(st.lists(st.integers(1, 9), max_size=3)))
        room = len(content) - prod(sizes) * dtype.itemsize
        start = data.draw(st.integers(BLOCK, room))
        if has_digests:
            start -= start % dtype.itemsize
        offsets = tuple(data.draw(st.integers(0, size - 1)) for size in sizes)
        counts = tuple(data.draw(st.integers(1, n - o)) for n, o in zip(sizes, offsets, strict=True))
        box = Chunk(offsets, counts)
        into, seen = data.draw(st.sampled_from([*targets(box, dtype)]))
        values = content[start : start + prod(sizes) * dtype.itemsize].clone().view(dtype).view(sizes)
        expected = values[box.within(Chunk.whole(sizes))].reshape(seen.shape).to(into.dtype)
        part = Slice(f"t{number}", start, sizes, dtype, None if counts == sizes else box, into)
        wanted.append((part, seen, expected))

    def digest(number: int) -> str:
        return xxhash.xxh3_128_hexdigest(content[BLOCK * (number + 1) :][:BLOCK].numpy().data)

    blocks = Blocks(BLOCK, len(content), BLOCK, digest) if has_digests else None
    with (
        closing(FileReader(path)) as file,
        patch.multiple(engine, RUN_BYTES=64, _MAPPED_BYTES=data.draw(st.sampled_from([48, 160]))),
        patch.multiple(engine, _MOST_GAP_BYTES=data.draw(st.integers(0, 40)), _MIN_DIRECT_BYTES=20),
        patch.object(FileReader, "cached_bytes", lambda _self, _offset, num_bytes: num_bytes * cached),
        patch.object(engine, "_MIN_STRAIGHT_BYTES", data.draw(st.sampled_from([1, 1 << 20]))),
    ):
        SliceFill([(file, blocks, [part for part, _, _ in wanted])])()
    for part, seen, expected in wanted:
        assert torch.equal(seen, expected), part.name


def test_a_part_of_a_chunk_goes_to_memory_that_is_no_box(path: Path) -> None:
    """Two stored halves, cut by columns, fill memory of another shape, which neither has a view of."""
    content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    into = torch.zeros(24, 1, 2, dtype=torch.uint8)[..., 0]
    halves = [
        Slice("x", start, (4, 3), torch.uint8, None, into, Chunk((0, -offset), (4, 6)))
        for start, offset in ((100, 0), (7000, 3))
    ]
    file = FileReader(path)
    SliceFill([(file, None, halves)])()
    file.close()
    stored = [content[start : start + 12].view(4, 3) for start in (100, 7000)]
    assert torch.equal(into.reshape(4, 6), torch.cat(stored, 1))


def test_a_mapping_that_fails_once_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a bounce buffer holds, piece by piece and around the page cache."""
    value = torch.randn(3 << 19)
    (tmp_path / "a.bin").write_bytes(value.numpy().tobytes())
    file, view, failed = FileReader(tmp_path / "a.bin"), FileReader.view, list[int]()

    def once(self: FileReader, offset: int, num_bytes: int) -> memoryview:
        failed.append(num_bytes)
        if len(failed) == 1:
            raise OSError(errno.EIO, "input/output error")
        return view(self, offset, num_bytes)

    monkeypatch.setattr(FileReader, "view", once)
    into = torch.zeros(value.shape, dtype=torch.float64)
    assert file.cached_bytes(0, file.num_bytes) > 0
    SliceFill([(file, None, [Slice("x", 0, value.shape, value.dtype, None, into)])])()
    file.close()
    assert torch.equal(into, value.double()) and failed == [value.nbytes]


def test_a_disk_that_fails_under_a_mapping_has_not_cut_the_file_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says EFAULT for both; the bytes are read again, as those are whose read fails."""
    value = torch.randn(1 << 16)
    (tmp_path / "a.bin").write_bytes(value.numpy().tobytes())

    def fails(_mapping: memoryview, _advice: int) -> None:
        raise OSError(errno.EFAULT, "bad address")

    monkeypatch.setattr(files, "advise", fails)
    monkeypatch.setattr(FileReader, "cached_bytes", lambda _self, _offset, num_bytes: num_bytes)
    file, into = FileReader(tmp_path / "a.bin"), torch.zeros(value.shape, dtype=torch.float64)
    SliceFill([(file, None, [Slice("x", 0, value.shape, value.dtype, None, into)])])()
    file.close()
    assert torch.equal(into, value.double())
