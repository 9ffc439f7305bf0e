"""The container's header: laid out byte for byte as upstream does, and read as if an enemy had written it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.formats.safetensors.container import DTYPES, lay_out, read_header
from titan_ckpt.geometry.chunks import TensorInfo

GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def of_every_dtype() -> dict[str, torch.Tensor]:
    """Two tensors of each dtype, one of them perhaps empty, with names that need escapes."""
    tensors = {}
    for i, dtype in enumerate([*DTYPES.values()] * 2):
        tensors[f'layer.{i}.wé"\n'] = torch.zeros(i % 4, 3, dtype=dtype)
    return tensors | {"scalar": torch.tensor(1.0)}


def write(path: Path, header: bytes, num_bytes: int = 16) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(num_bytes))
    return path


def test_a_layout_is_what_upstream_writes(tmp_path: Path) -> None:
    """Header bytes, order, offsets and size equal those of safetensors' own writer, for every dtype."""
    tensors = of_every_dtype()
    save_file(tensors, tmp_path / "a", metadata={"format": "pt"})
    layout = lay_out({k: TensorInfo(tuple(t.shape), t.dtype) for k, t in tensors.items()}, {"format": "pt"})
    raw = (tmp_path / "a").read_bytes()
    assert raw.startswith(layout.header)
    assert layout.num_bytes == len(raw)
    assert dict(read_header(tmp_path / "a").entries) == dict(layout.entries)


def test_a_dtype_without_a_name_is_refused() -> None:
    """A dtype that the format cannot hold is named with its tensor."""
    with pytest.raises(ValueError, match=r"x: torch\.complex128"):
        lay_out({"x": TensorInfo((1,), torch.complex128)}, {})


def named(**changes: Any) -> bytes:
    return json.dumps({"x": GOOD | changes}).encode()


@pytest.mark.parametrize(
    ("header", "num_bytes", "cause"),
    [
        (b"", 16, "does not start with"),
        (b"[]", 16, "does not start with"),
        (b"{", 16, "JSON"),
        (b"\xff\xfe{}", 16, "does not start with"),
        (b'{"\xff": 1}', 16, "JSON"),
        (b'{"a":' * 100_000, 16, "JSON"),
        (b'{"x": NaN}', 16, "JSON"),
        (b'{"x": ' + b"9" * 5000 + b"}", 16, "JSON"),
        (b'{"x": {"dtype":"F32","shape":[4],"data_offsets":[0,16]}, "x": {}}', 16, "twice"),
        (b'{"x": 5}', 16, "exactly dtype, shape and data_offsets"),
        (named(extra=1), 16, "exactly dtype, shape and data_offsets"),
        (named(dtype="F31"), 16, "'F31'"),
        (named(dtype=["F32"]), 16, "dtype"),
        (named(shape=[2, -2]), 16, "shape"),
        (named(shape=[2.0, 2]), 16, "shape"),
        (named(shape=[True, 4]), 16, "shape"),
        (named(shape=[1] * 65), 16, "shape"),
        (named(shape=[2**62, 2**62]), 16, "more elements"),
        (named(shape=[2, 3]), 16, "24 bytes, but has 16"),
        (named(data_offsets=[16, 0]), 16, "data_offsets"),
        (named(data_offsets=[0]), 16, "data_offsets"),
        (named(data_offsets=[0, 2**63]), 16, "data_offsets"),
        (named(data_offsets=[4, 20]), 20, "a hole or an overlap"),
        (json.dumps({"x": GOOD, "y": GOOD}).encode(), 16, "a hole or an overlap"),
        (named(), 15, "cut short"),
        (named(), 17, "appended"),
        (json.dumps({"__metadata__": {"a": 1}, "x": GOOD}).encode(), 16, "strings to strings"),
        (json.dumps({"__metadata__": [], "x": GOOD}).encode(), 16, "strings to strings"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: bytes, num_bytes: int, cause: str) -> None:
    """Each lie raises one typed error that names the file and the cause."""
    path = write(tmp_path / "model.safetensors", header, num_bytes)
    with pytest.raises(CorruptCheckpointError, match=cause) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("raw", [b"", b"abc", struct.pack("<Q", 100), struct.pack("<Q", 2**40), b"\xff" * 8])
def test_a_file_that_is_no_file_is_refused(tmp_path: Path, raw: bytes) -> None:
    """Too short, or a length that cannot be: nothing of the claimed size is read."""
    (tmp_path / "a").write_bytes(raw)
    with pytest.raises(CorruptCheckpointError):
        read_header(tmp_path / "a")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_header_is_refused_or_still_tiles_the_file(data: st.DataObject) -> None:
    """Whatever bytes are changed, the answer is a typed error or entries that cover the file without holes."""
    import tempfile

    infos = {"a.b": TensorInfo((3, 2), torch.bfloat16), "c": TensorInfo((), torch.float32)}
    layout = lay_out(infos, {"format": "pt"})
    raw = bytearray(layout.header + bytes(layout.num_bytes - len(layout.header)))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(layout.header) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    with tempfile.NamedTemporaryFile() as file:
        path = Path(file.name)
        path.write_bytes(raw[:cut] if data.draw(st.booleans()) else raw)
        try:
            header = read_header(path)
        except CorruptCheckpointError:
            return
        assert sum(entry.info.nbytes for entry in header.entries.values()) <= header.num_bytes
        position = header.num_bytes - sum(entry.info.nbytes for entry in header.entries.values())
        for entry in header.entries.values():
            assert entry.at == position
            position += entry.info.nbytes


def test_a_pointer_of_git_lfs_says_how_to_get_the_file(tmp_path: Path) -> None:
    """It is no huge header, and nothing is damaged."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(CorruptCheckpointError, match="pointer of a file in Git LFS; run `git lfs pull`"):
        read_header(tmp_path / "model.safetensors")
