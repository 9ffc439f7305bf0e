"""Loads into the memory of a device: through bounce buffers, verified first, cast and laid out there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.fake_cuda import DEVICE, FakeCuda, OnDevice, on_device
from tests.unit.formats.quantized.test_reading import fp8_folder
from tests.world import flip_bit
from titan_ckpt.disk import workers
from titan_ckpt.disk.files import IO_BYTES, FileReader
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.formats.dcp.writer import DcpExport
from titan_ckpt.formats.native.reader import NativeReader
from titan_ckpt.formats.native.writer import WritePlan
from titan_ckpt.formats.open import open_reader
from titan_ckpt.formats.reading import slices
from titan_ckpt.formats.safetensors.container import SafetensorsFiles, read_header
from titan_ckpt.geometry.chunks import Block, Chunk


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of all uploads: each is one run of host bytes, and what comes back is on the device."""
    sizes: list[int] = []

    def upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
        assert values.is_cpu and values.is_contiguous() and device == DEVICE
        sizes.append(values.nbytes)
        return on_device(values.clone())

    monkeypatch.setattr(slices, "upload", upload)
    copy = torch.Tensor.copy_

    def copy_(into: torch.Tensor, values: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert isinstance(into, OnDevice) <= isinstance(values, OnDevice), "a copy of its own to the device"
        return copy(into, values, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    return sizes


def requests(value: torch.Tensor) -> list[tuple[torch.Tensor, Chunk]]:
    """Return memory on the device for the whole tensor, cast and transposed too, and for some of its columns."""
    rows, columns = value.shape
    whole = Chunk.whole(value.shape)
    return [
        (on_device(torch.zeros_like(value)), whole),
        (on_device(torch.zeros(value.shape, dtype=torch.float64)), whole),
        (on_device(torch.zeros(columns, rows).t()), whole),
        (on_device(torch.zeros(rows, 3)), Chunk((0, 2), (rows, 3))),
    ]


def test_a_native_load_verifies_a_block_and_then_copies_it_to_the_device(tmp_path: Path, uploads: list[int]) -> None:
    """A block is copied once, however many tensors it holds; a damaged one is not copied."""
    value = torch.randn(3000, 500)
    small = {f"small.{i}": torch.full((3,), float(i)) for i in range(100)}
    tensors = {"x": value, **small}
    WritePlan.of(tensors, Coordinator.current()).write(tmp_path, tensors)
    into = {key: on_device(torch.zeros(3)) for key in small}
    with NativeReader(tmp_path) as native:
        native.read([Block(Chunk.whole(value.shape), value, key) for key, value in into.items()])
        assert all(torch.equal(into[key], small[key]) for key in small)
        assert len(uploads) <= 2
        for target, chunk in requests(value):
            native.read([Block(chunk, target, "x")])
            assert torch.equal(target, value[chunk.within(Chunk.whole(value.shape))].to(target.dtype))
    flip_bit(next(tmp_path.iterdir()), -10)
    uploads.clear()
    with NativeReader(tmp_path) as native, pytest.raises(CorruptCheckpointError, match="no tensor"):
        native.read([Block(Chunk.whole((3,)), into["small.99"], "small.99")])
    assert not uploads


def test_columns_leave_the_upload_before_them_with_its_own_buffer(
    tmp_path: Path, uploads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer that a device still reads is not lent again, though columns pass another one meanwhile."""
    FakeCuda(monkeypatch)
    monkeypatch.setattr(workers, "_bounces", deque())
    sources = dict[int, torch.cuda.Event]()
    record: Callable[[torch.Tensor, torch.device], torch.Tensor] = vars(slices)["upload"]

    def upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
        sources[values.untyped_storage().data_ptr()] = event = torch.cuda.Event()
        workers._uploads.events += (event,)
        return record(values, device)

    monkeypatch.setattr(slices, "upload", upload)
    tensors = {"a": torch.randn(1000), "b": torch.randn(100, 100)}
    WritePlan.of(tensors, Coordinator.current()).write(tmp_path, tensors)
    workers._bounces.clear()
    into = {"a": on_device(torch.zeros(1000)), "b": on_device(torch.zeros(100, 50))}
    with NativeReader(tmp_path) as native:
        native.read([Block(Chunk.whole((1000,)), into["a"], "a"), Block(Chunk((0, 3), (100, 50)), into["b"], "b")])
    assert torch.equal(into["a"], tensors["a"]) and torch.equal(into["b"], tensors["b"][:, 3:53])
    copies = {bounce.buffer.address: bounce.copies for bounce in workers._bounces}
    assert len(sources) == 2 and all(event in copies[address] for address, event in sources.items())


@pytest.mark.parametrize("cold", [False, True])
def test_a_safetensors_file_is_read_into_a_device(
    tmp_path: Path, uploads: list[int], cold: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs, casts, strides and columns, from an offset that no dtype is aligned to."""
    if cold:
        monkeypatch.setattr(FileReader, "cached_bytes", lambda *_: 0)
    value = torch.randn(3001, 700)
    assert value.nbytes > 2 * IO_BYTES
    path = tmp_path / "a.safetensors"
    save_file({"odd": torch.zeros(3, dtype=torch.uint8), "x": value}, path)
    files = SafetensorsFiles([read_header(path)])
    for target, chunk in requests(value):
        files.read([Block(chunk, target, "x")])
        assert torch.equal(target, value[chunk.within(Chunk.whole(value.shape))].to(target.dtype))
    files.close()
    assert max(uploads) <= IO_BYTES


def test_folders_of_other_kinds_pass_the_same_buffers(tmp_path: Path, uploads: list[int]) -> None:
    """DCP and quantized values, cast and strided, are copied to the device in pieces of at most a buffer."""
    value = torch.randn(1200, 1000)
    assert value.nbytes > IO_BYTES
    folder = tmp_path / "dcp"
    DcpExport({"a.weight": value}).write(folder, Coordinator.current())
    quantized = tmp_path / "fp8"
    quantized.mkdir()
    computed = fp8_folder(quantized, 1200, 1000)
    for path, expected in ((folder, value), (quantized, computed)):
        for target, chunk in requests(value):
            with open_reader(path) as opened:
                opened.read([Block(chunk, target, "a.weight")])
            assert torch.equal(target, expected[chunk.within(Chunk.whole(value.shape))].to(target.dtype))
    assert uploads and max(uploads) <= IO_BYTES
