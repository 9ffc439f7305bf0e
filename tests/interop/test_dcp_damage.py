"""DCP folders that lie: chunks that overlap or lack, sizes and types that are not so, pickles that want memory."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from titan_ckpt.disk import posix
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import CheckpointError, CorruptCheckpointError, ExportError
from titan_ckpt.formats.dcp.dcp import DcpReader
from titan_ckpt.formats.dcp.writer import DcpExport
from titan_ckpt.geometry.boxes import overlap
from titan_ckpt.geometry.chunks import Block, Chunk, LazyTensor, TensorInfo
from titan_ckpt.geometry.requests import ReadRequest, StoredValue

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # dcp in one process, as meant here


def saved(folder: Path) -> Any:
    """Save one tensor and return its metadata for damage."""
    dcp.save({"w": torch.arange(12.0).view(4, 3)}, checkpoint_id=folder)
    return pickle.loads((folder / ".metadata").read_bytes())


def read(folder: Path, metadata: Any) -> torch.Tensor:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    out = torch.full((4, 3), -1.0)
    DcpReader(folder).read([ReadRequest("w", Chunk.whole((4, 3)), out)])
    return out


def _chunks(metadata: Any, *boxes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    [info] = metadata.storage_data.values()
    entry = metadata.state_dict_metadata["w"]
    entry.chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in boxes]
    metadata.storage_data = {MetadataIndex("w", torch.Size(o), i): info for i, (o, _) in enumerate(boxes)}


def overlapping_with_a_hole(m: Any) -> None:
    _chunks(m, ((0, 0), (2, 3)), ((1, 0), (2, 3)))


def hole(m: Any) -> None:
    _chunks(m, ((0, 0), (3, 3)))


def outside_the_shape(m: Any) -> None:
    _chunks(m, ((0, 0), (4, 3)), ((4, 0), (4, 3)))


def negative_offset(m: Any) -> None:
    _chunks(m, ((-1, 0), (4, 3)))


def twice_at_one_place(m: Any) -> None:
    _chunks(m, ((0, 0), (4, 3)), ((0, 0), (4, 3)))


def huge_size(m: Any) -> None:
    _chunks(m, ((0, 0), (2**62, 2**62)))


def sizes_that_are_no_numbers(m: Any) -> None:
    m.state_dict_metadata["w"].size = ["a", None]


def another_number_of_dims(m: Any) -> None:
    m.state_dict_metadata["w"].chunks = [ChunkStorageMetadata(torch.Size((0,)), torch.Size((12,)))]


def another_dtype(m: Any) -> None:
    m.state_dict_metadata["w"].properties.dtype = torch.int32


def no_dtype(m: Any) -> None:
    m.state_dict_metadata["w"].properties.dtype = "float32"


def names_that_are_numbers(m: Any) -> None:
    m.state_dict_metadata[5] = m.state_dict_metadata["w"]


def no_fields(m: Any) -> None:
    m.state_dict_metadata["w"].__dict__.clear()


def no_table(m: Any) -> None:
    m.storage_data = ["w"]


def negative_length(m: Any) -> None:
    for info in m.storage_data.values():
        info.length = -1


def huge_length(m: Any) -> None:
    for info in m.storage_data.values():
        info.length = 2**60


def shifted_offset(m: Any) -> None:
    for info in m.storage_data.values():
        info.offset += 1
        info.length -= 1


def a_name_with_a_null(m: Any) -> None:
    for info in m.storage_data.values():
        info.relative_path = "a\0b"


def a_folder(m: Any) -> None:
    for info in m.storage_data.values():
        info.relative_path = "."


DAMAGES = [
    value
    for value in list(globals().values())
    if callable(value) and getattr(value, "__annotations__", {}).get("m") == "Any"
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_metadata_that_lies_is_one_typed_error(tmp_path: Path, damage: Callable[[Any], None]) -> None:
    """Never a value in silence, never a traceback from deep inside."""
    metadata = saved(tmp_path)
    damage(metadata)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        read(tmp_path, metadata)


def test_overlapping_chunks_with_a_hole_of_the_same_size_are_refused(tmp_path: Path) -> None:
    """As many elements as the tensor has, and one row that nobody wrote; here no such folder is written either."""
    metadata = saved(tmp_path)
    overlapping_with_a_hole(metadata)
    with pytest.raises(CorruptCheckpointError, match=r"w is stored twice at \[0, 0\]\+\[2, 3\] and \[1, 0\]"):
        read(tmp_path, metadata)
    blocks = [Block(Chunk((i, 0), (2, 3)), torch.ones(2, 3)) for i in (0, 1)]
    value = LazyTensor(TensorInfo((4, 3), torch.float32), lambda: blocks)
    with pytest.raises(ExportError, match="w: 12 elements in 2 parts were written of 12"):
        DcpExport({"w": value}).write(tmp_path / "ours", Coordinator.current())


@pytest.mark.parametrize("damage", ["bits", "end", "metadata"])
def test_nothing_is_published_that_differs_from_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """Flipped bits of each item, a lost byte and a flipped bit of the metadata are found; each item is named."""
    big = torch.arange(2_100_000.0)  # its bytes lie in three blocks of a file
    tensors = {"big": big, "empty": torch.ones(0, 3), "half": torch.ones(3, 5).bfloat16(), "one": torch.tensor(1)}
    values = {"lr": StoredValue(("lr",), b"0.125", "")}
    folder = tmp_path / "step-1"
    write_file = posix.write_file

    def damaged(path: Path, data: bytes) -> None:
        """Damage the folder when its last file is written."""
        write_file(path, data)
        [file] = path.parent.glob("*.distcp")
        if damage == "bits":
            content = bytearray(file.read_bytes())
            for info in pickle.loads(data).storage_data.values():
                content[info.offset + info.length // 2] ^= 1
            file.write_bytes(content)
        elif damage == "end":
            os.truncate(file, file.stat().st_size - 1)
        else:
            path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])

    monkeypatch.setattr(posix, "write_file", damaged)
    complaint = {
        "bits": r"5 item\(s\) of __0_0.distcp read back differ .*: big, empty, half, lr, one",
        "end": r"__0_0.distcp has \d+ bytes, and \d+ were written",
        "metadata": "metadata read back differs",
    }
    with pytest.raises(ExportError, match=f"step-1 failed, nothing was published: .*{complaint[damage]}"):
        DcpExport(tensors, values).write(folder, Coordinator.current())
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    DcpExport(tensors, values).write(folder, Coordinator.current())
    with DcpReader(folder) as reader:
        assert reader.tensors["big"].shape == big.shape


def test_a_data_file_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    """Opening it must not wait for a writer."""
    metadata = saved(tmp_path)
    [data] = tmp_path.glob("*.distcp")
    data.unlink()
    os.mkfifo(data)
    with pytest.raises(CorruptCheckpointError, match=data.name):
        read(tmp_path, metadata)


def test_a_pickle_cannot_ask_for_memory(tmp_path: Path) -> None:
    """A memo index of 4 billion makes the C unpickler fill 64 GiB; here it is one entry of a table."""
    bomb = b"\x80\x02K\x01r\xff\xff\xff\x7f."
    (tmp_path / ".metadata").write_bytes(bomb)
    begin = time.perf_counter()
    with pytest.raises(CorruptCheckpointError, match="it holds a int"):
        DcpReader(tmp_path)
    assert time.perf_counter() - begin < 60


@pytest.mark.parametrize("depth", [10**5])
def test_deep_nesting_is_a_typed_error(tmp_path: Path, depth: int) -> None:
    """A pickle nested a hundred thousand times is not the metadata of anything."""
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + b"(" * depth + b"t" * depth + b".")
    with pytest.raises(CorruptCheckpointError):
        DcpReader(tmp_path)


EXOTIC = {
    "bf16": torch.randn(3, 5).bfloat16(),
    "fp8": torch.randn(3, 5).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "int": torch.arange(6).view(2, 3),
    "bool": torch.tensor([True, False]),
    "complex": torch.randn(4, dtype=torch.complex64),
    "strided": torch.randn(4, 6).t(),
    "part": torch.randn(100, 100)[3:5, ::2],
}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [t.contiguous().reshape(-1).view(torch.uint8) if t.numel() else t for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


@pytest.mark.parametrize("writer", ["ours", "theirs"])
@pytest.mark.parametrize("name", EXOTIC)
def test_every_kind_of_tensor_goes_round(tmp_path: Path, name: str, writer: str) -> None:
    """Written here and by dcp.save, read here and by dcp.load: the same bits; a view takes no more than its values."""
    value = EXOTIC[name]
    folder = tmp_path / writer
    if writer == "ours":
        DcpExport({"model.w": value}).write(folder, Coordinator.current())
        assert sum(p.stat().st_size for p in folder.glob("*.distcp")) < 4096
    else:
        dcp.save({"model.w": value}, checkpoint_id=folder)
    found = torch.zeros(value.numel(), dtype=value.dtype).view(value.shape)
    DcpReader(folder).read([ReadRequest("model.w", Chunk.whole(value.shape), found)])
    assert same(found, value)
    loaded = {"model.w": torch.zeros(value.numel(), dtype=value.dtype).view(value.shape)}
    dcp.load(loaded, checkpoint_id=folder)
    assert same(loaded["model.w"], value)


def test_lazy_tensors_are_computed_once(tmp_path: Path) -> None:
    """A merged weight is made when it is written, and not to find out where it lies."""
    calls = []

    def blocks() -> list[Block]:
        calls.append(1)
        return [Block(Chunk.whole((2, 2)), torch.ones(2, 2))]

    lazy = LazyTensor(TensorInfo((2, 2), torch.float32), blocks, like=torch.empty(2, 2))
    DcpExport({"w": lazy}).write(tmp_path / "ours", Coordinator.current())
    assert len(calls) == 1


def test_overlap_finds_a_pair_wherever_it_is() -> None:
    """Cut along any dim, touching is no overlap, empty chunks overlap nothing."""
    rows = [Chunk((i, 0), (1, 4)) for i in range(50)]
    columns = [Chunk((0, i), (4, 1)) for i in range(50)]
    assert overlap(rows) is None and overlap(columns) is None
    assert overlap([*rows, Chunk((50, 0), (0, 4)), Chunk((50, 0), (0, 4))]) is None
    assert overlap([*rows, Chunk((30, 3), (1, 1))]) is not None
    assert overlap([*columns, Chunk((3, 10), (1, 2))]) is not None
    assert overlap([Chunk((), ()), Chunk((), ())]) is not None
