"""DCP folders: ours open with plain dcp, theirs open here, hostile ones execute nothing."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.formats.dcp.dcp import DcpReader
from titan_ckpt.geometry.chunks import Block, Chunk

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # dcp in one process, as meant here


def values() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "layers.0.weight": torch.randn(6, 4),
        "layers.0.bias": torch.randn(6).bfloat16(),
        "count": torch.tensor(7),
        "flags": torch.tensor([True, False]),
    }


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (open, (self.marker, "w"))


def test_hostile_metadata_executes_nothing(tmp_path: Path) -> None:
    """A metadata that names a callable is refused before it is called."""
    marker, folder = tmp_path / "marker", tmp_path / "checkpoint"
    dcp.save(values(), checkpoint_id=folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data["x"] = Evil(str(marker))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError, match=r"may be hostile.*_?io\.open"):
        DcpReader(folder)
    assert not marker.exists()


def test_a_hostile_item_executes_nothing(tmp_path: Path) -> None:
    """A pickled item that is more than plain data is refused before it is called."""
    marker, folder = tmp_path / "marker", tmp_path / "checkpoint"
    dcp.save({**values(), "item": Evil(str(marker))}, checkpoint_id=folder)
    marker.unlink(missing_ok=True)
    with pytest.raises(CorruptCheckpointError, match="cannot be read as plain data"):
        DcpReader(folder).item("item")
    assert not marker.exists()


def test_a_hostile_tensor_executes_nothing(tmp_path: Path) -> None:
    """A pickle where a tensor should be is refused before it is called."""
    marker, folder = tmp_path / "marker", tmp_path / "checkpoint"
    dcp.save({"w": torch.ones(3)}, checkpoint_id=folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    payload = io.BytesIO()
    torch.save(Evil(str(marker)), payload)
    for info in metadata.storage_data.values():
        path = folder / info.relative_path
        info.offset, info.length = os.path.getsize(path), len(payload.getvalue())
        path.write_bytes(path.read_bytes() + payload.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError):
        DcpReader(folder).read([Block(Chunk.whole((3,)), torch.zeros(3), "w")])
    assert not marker.exists()


@pytest.mark.parametrize("target", ["../outside.distcp", "/etc/hostname", "link.distcp"])
def test_a_path_that_leaves_the_folder_is_refused(tmp_path: Path, target: str) -> None:
    """Neither a relative path, nor an absolute one, nor a link leads out of the folder."""
    folder = tmp_path / "checkpoint"
    dcp.save({"w": torch.ones(3)}, checkpoint_id=folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        (tmp_path / "outside.distcp").write_bytes((folder / info.relative_path).read_bytes())
        info.relative_path = target
    (folder / "link.distcp").symlink_to(tmp_path / "outside.distcp")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError, match="outside the folder"):
        DcpReader(folder)


def test_cut_files_and_missing_files_are_named(tmp_path: Path) -> None:
    """A truncated or missing data file is an error that names it."""
    dcp.save({"w": torch.ones(300)}, checkpoint_id=tmp_path)
    [data] = tmp_path.glob("*.distcp")
    request = Block(Chunk.whole((300,)), torch.zeros(300), "w")
    data.write_bytes(data.read_bytes()[:-10])
    with pytest.raises(CorruptCheckpointError, match=rf"{data.name}.*is cut off"):
        DcpReader(tmp_path).read([request])
    data.unlink()
    with pytest.raises(CorruptCheckpointError, match=rf"{data.name}.*is missing"):
        DcpReader(tmp_path).read([request])


@pytest.mark.parametrize("damage", [b"", b"\x80\x04", b"garbage", b"\x80\x04K\x01."])
def test_malformed_metadata_is_one_typed_error(tmp_path: Path, damage: bytes) -> None:
    """Anything but a Metadata pickle is a CorruptCheckpointError."""
    (tmp_path / ".metadata").write_bytes(damage)
    with pytest.raises(CorruptCheckpointError):
        DcpReader(tmp_path)
