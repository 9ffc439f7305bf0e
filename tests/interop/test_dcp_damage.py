"""DCP folders that lie: chunks that overlap or lack, sizes and types that are not so, pickles that want memory."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from tests.world import same
from titan_ckpt.disk import posix
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import CheckpointError, CorruptCheckpointError, ExportError
from titan_ckpt.formats.dcp.dcp import DcpReader
from titan_ckpt.formats.dcp.writer import DcpExport, DigestedFile, StoredValue
from titan_ckpt.geometry.chunks import Block, Chunk, LazyTensor, TensorInfo

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # dcp in one process, as meant here


def saved(folder: Path) -> Any:
    """Save one tensor and return its metadata for damage."""
    dcp.save({"w": torch.arange(12.0).view(4, 3)}, checkpoint_id=folder)
    return pickle.loads((folder / ".metadata").read_bytes())


def read(folder: Path, metadata: Any) -> torch.Tensor:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    out = torch.full((4, 3), -1.0)
    DcpReader(folder).read([Block(Chunk.whole((4, 3)), out, "w")])
    return out


def chunks(*boxes: tuple[tuple[int, int], tuple[int, int]]) -> Callable[[Any], None]:
    """Say that the tensor lies in these chunks: (offsets, sizes)."""

    def damage(metadata: Any) -> None:
        [info] = metadata.storage_data.values()
        entry = metadata.state_dict_metadata["w"]
        entry.chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in boxes]
        metadata.storage_data = {MetadataIndex("w", torch.Size(o), i): info for i, (o, _) in enumerate(boxes)}

    return damage


def stored(**fields: Any) -> Callable[[Any], object]:
    """Say something else of where every chunk is stored."""
    return lambda m: [info.__dict__.update(fields) for info in m.storage_data.values()]


def entry(change: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda m: change(m.state_dict_metadata["w"])


OVERLAPPING_WITH_A_HOLE = chunks(((0, 0), (2, 3)), ((1, 0), (2, 3)))
DAMAGES: dict[str, Callable[[Any], object]] = {
    "overlapping with a hole": OVERLAPPING_WITH_A_HOLE,
    "hole": chunks(((0, 0), (3, 3))),
    "outside the shape": chunks(((0, 0), (4, 3)), ((4, 0), (4, 3))),
    "negative offset": chunks(((-1, 0), (4, 3))),
    "twice at one place": chunks(((0, 0), (4, 3)), ((0, 0), (4, 3))),
    "huge size": chunks(((0, 0), (2**62, 2**62))),
    "sizes that are no numbers": entry(lambda e: setattr(e, "size", ["a", None])),
    "another number of dims": entry(
        lambda e: setattr(e, "chunks", [ChunkStorageMetadata(torch.Size((0,)), torch.Size((12,)))])
    ),
    "another dtype": entry(lambda e: setattr(e.properties, "dtype", torch.int32)),
    "no dtype": entry(lambda e: setattr(e.properties, "dtype", "float32")),
    "names that are numbers": lambda m: m.state_dict_metadata.update({5: m.state_dict_metadata["w"]}),
    "no fields": entry(lambda e: e.__dict__.clear()),
    "no table": lambda m: setattr(m, "storage_data", ["w"]),
    "negative length": stored(length=-1),
    "huge length": stored(length=2**60),
    "shifted offset": lambda m: [
        info.__dict__.update(offset=info.offset + 1, length=info.length - 1) for info in m.storage_data.values()
    ],
    "a name with a null": stored(relative_path="a\0b"),
    "a folder": stored(relative_path="."),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_metadata_that_lies_is_one_typed_error(tmp_path: Path, damage: str) -> None:
    """Never a value in silence, never a traceback from deep inside."""
    metadata = saved(tmp_path)
    DAMAGES[damage](metadata)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        read(tmp_path, metadata)


def test_overlapping_chunks_with_a_hole_of_the_same_size_are_refused(tmp_path: Path) -> None:
    """As many elements as the tensor has, and one row that nobody wrote; here no such folder is written either."""
    metadata = saved(tmp_path)
    OVERLAPPING_WITH_A_HOLE(metadata)
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
    DcpReader(folder).read([Block(Chunk.whole(value.shape), found, "model.w")])
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


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_what_ends_a_write_is_raised_and_not_what_torch_makes_of_it(tmp_path: Path, error: BaseException) -> None:
    """torch.save ends its archive after an error, too, and the error of that hides a full disk or a Ctrl-C."""

    class Refusing(DigestedFile):
        def write(self, data: Any) -> int:
            if self.num_bytes:
                raise error
            return super().write(data)

    with closing(Refusing(tmp_path / "a", 1 << 20)) as file:
        file.open()
        with pytest.raises(type(error)) as raised:
            file.append("w", partial(torch.save, torch.zeros(100_000)))
    assert raised.value is error
