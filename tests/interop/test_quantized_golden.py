"""Weights stored by bitsandbytes and compressed-tensors are, bit for bit, what those libraries dequantize them to.

The folders and the digests are made by the libraries themselves: tests/golden/quantised/generate.py.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.interop.folders import a_box, read
from tests.world import bits
from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.formats.open import open_reader
from titan_ckpt.geometry.chunks import Chunk

GOLDEN = Path(__file__).parents[1] / "golden" / "quantised"
NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.json"))


def test_every_format_has_its_folder() -> None:
    """The golden folders are there: both libraries, every packing."""
    assert len(NAMES) == 24
    assert {name.split("-")[0] for name in NAMES} == {"bnb", "ct"}


@pytest.mark.parametrize("name", NAMES)
def test_the_values_are_the_librarys_own(name: str) -> None:
    """A dequantized weight has the library's bits; nothing but the weight and the bias is listed."""
    expected = json.loads((GOLDEN / name / "expected.json").read_text())["a.weight"]
    with open_reader(GOLDEN / name) as reader:
        info = reader.tensors["a.weight"]
        assert set(reader.tensors) <= {"a.weight", "a.bias"}
        value = read(reader)
    assert (list(info.shape), info.dtype) == (expected["shape"], torch.float32)
    assert hashlib.sha256(bits(value)).hexdigest() == expected["sha256"]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12)
@given(data=st.data())
def test_any_region_is_that_region_of_the_whole(name: str, data: st.DataObject) -> None:
    """Rows and columns that start and end anywhere are the same values, also when they are cast on the way."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    with open_reader(GOLDEN / name) as reader:
        value = read(reader)
        chunk = a_box(data, value.shape)
        part = value[chunk.within(Chunk.whole(value.shape))].to(dtype)
        assert torch.equal(read(reader, chunk=chunk, dtype=dtype), part)


@pytest.mark.parametrize("name", NAMES)
def test_each_companion_is_needed(name: str, tmp_path: Path) -> None:
    """Without any one of the tensors beside a weight, or with one of another shape, the error names the weight."""
    stored = load_file(GOLDEN / name / "model.safetensors")
    companions = [key for key in stored if key not in ("a.weight", "a.bias", "a.weight_format", "a.weight_packed")]
    assert companions
    for key in companions:
        for wrong in (None, torch.cat([stored[key].reshape(-1)] * 2)):
            folder = tmp_path / f"{companions.index(key)}-{wrong is None}"
            folder.mkdir()
            shutil.copy(GOLDEN / name / "config.json", folder)
            tensors = {k: v for k, v in stored.items() if k != key} | ({} if wrong is None else {key: wrong})
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
            with pytest.raises(CorruptCheckpointError, match=r"a\.weight") as error:
                open_reader(folder)
            assert "quant_method = " in str(error.value)
