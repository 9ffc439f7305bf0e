"""ReaderTests: the laws of TensorReader, for the native format, Hugging Face folders and those of DCP."""

from __future__ import annotations

import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.unit.formats.native.test_native import drop_from_page_cache
from tests.unit.formats.native.test_native import save as save_native
from titan_ckpt.disk.files import IO_BYTES
from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.formats.open import open_reader
from titan_ckpt.geometry.chunks import Block, Chunk, TensorInfo
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.types import Format

Tensors = dict[str, torch.Tensor]


def memory(sizes: tuple[int, ...], dtype: torch.dtype, kind: str) -> torch.Tensor:
    """Return a destination of these sizes: contiguous, transposed, or with gaps between its elements."""
    if kind == "transposed":
        return torch.zeros(sizes[::-1], dtype=dtype).permute(list(range(len(sizes)))[::-1])
    if kind == "gaps":
        return torch.zeros([2 * n for n in sizes], dtype=dtype)[tuple(slice(None, None, 2) for _ in sizes)]
    return torch.zeros(sizes, dtype=dtype)


class ReaderTests(ABC):
    """The laws; a subclass says how a folder of its format is written."""

    format: Format

    @abstractmethod
    def write(self, folder: Path, tensors: Tensors) -> None: ...

    @contextmanager
    def opened(self, folder: Path, tensors: Tensors, *, cold: bool = False) -> Iterator[TensorReader]:
        folder.mkdir(exist_ok=True)
        self.write(folder, tensors)
        if cold:
            drop_from_page_cache(folder)
        with open_reader(folder, self.format) as reader:
            assert dict(reader.tensors) == {name: TensorInfo(tuple(v.shape), v.dtype) for name, v in tensors.items()}
            yield reader

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def test_any_box_lands_in_any_memory(self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
        """A random box of a random tensor, in memory of any strides and of the same or another dtype, is exact."""
        shape = tuple(data.draw(st.lists(st.integers(1, 12), max_size=4)))
        dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]))
        value = torch.randint(0, 2 if dtype is torch.bool else 100, shape).to(dtype)
        starts = [data.draw(st.integers(0, n - 1)) for n in shape]
        sizes = tuple(data.draw(st.integers(1, n - a)) for n, a in zip(shape, starts, strict=True))
        chunk = Chunk(tuple(starts), sizes)
        kind = data.draw(st.sampled_from(["plain", "transposed", "gaps"]))
        into = memory(sizes, data.draw(st.sampled_from([dtype, torch.float64])), kind)
        tensors = {"before": torch.zeros(3, dtype=torch.uint8), "x": value, "z after": torch.ones(100)}
        with self.opened(tmp_path_factory.mktemp("box"), tensors) as reader:
            reader.read([Block(chunk, into, "x")])
        assert torch.equal(into, value[chunk.within(Chunk.whole(shape))].to(into.dtype))

    @pytest.mark.parametrize("cold", [False, True], ids=["cached", "cold"])
    def test_a_tensor_larger_than_every_buffer(self, tmp_path: Path, cold: bool) -> None:
        """Long runs, columns, far-apart rows and casts of one tensor at once come together, past the page cache too."""
        value = torch.arange(900_001 * 7, dtype=torch.int32).view(-1, 7)
        assert value.nbytes > 3 * IO_BYTES
        rows = value.shape[0]
        whole, cast = torch.zeros_like(value), torch.zeros(value.shape, dtype=torch.float64)
        strided = torch.zeros(7, rows, dtype=torch.int32).t()
        columns = [torch.zeros(rows, 3, dtype=dtype) for dtype in (torch.int32, torch.int64)]
        ends, small = torch.zeros(2, 2, 7).int(), torch.zeros(10)
        with self.opened(tmp_path, {"x": value, "y": torch.arange(1000.0)}, cold=cold) as reader:
            requests = [Block(Chunk.whole(value.shape), into, "x") for into in (whole, cast, strided)]
            requests += [Block(Chunk((0, 2), (rows, 3)), into, "x") for into in columns]
            requests += [Block(Chunk((start, 0), (2, 7)), ends[i], "x") for i, start in enumerate((0, rows - 2))]
            reader.read([*requests, Block(Chunk((990,), (10,)), small, "y")])
        assert torch.equal(whole, value) and torch.equal(cast, value.double()) and torch.equal(strided, value)
        assert all(torch.equal(found, value[:, 2:5].to(found.dtype)) for found in columns)
        assert torch.equal(small, torch.arange(990.0, 1000.0))
        assert torch.equal(torch.cat([*ends]), torch.cat([value[:2], value[-2:]]))

    def test_a_target_of_another_shape_takes_the_elements_in_row_major_order(self, tmp_path: Path) -> None:
        """As rotary permutations of a key map ask for, viewed where strides allow, arranged afterwards where not."""
        value = torch.arange(24.0).view(4, 6)
        viewed, arranged = torch.zeros(2, 2, 6), torch.zeros(6, 2, 2).permute(1, 2, 0)
        with self.opened(tmp_path, {"x": value}) as reader:
            reader.read([Block(Chunk.whole((4, 6)), into, "x") for into in (viewed, arranged)])
        assert torch.equal(viewed.reshape(4, 6), value) and torch.equal(arranged.reshape(4, 6), value)

    def test_a_name_that_is_not_stored_is_an_error(self, tmp_path: Path) -> None:
        """Planning should have found it; it is never skipped in silence."""
        with self.opened(tmp_path, {"a": torch.ones(3)}) as reader, pytest.raises((KeyError, CorruptCheckpointError)):
            reader.read([Block(Chunk.whole((3,)), torch.zeros(3), "b")])

    def test_a_file_that_is_cut_short_is_refused_and_close_can_be_called_again(self, tmp_path: Path) -> None:
        """When it is opened or when it is read; no value of it is taken."""
        with self.opened(tmp_path, {"a": torch.ones(3000)}) as reader:
            reader.close()
        largest = max(tmp_path.iterdir(), key=lambda path: path.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:-8])
        with pytest.raises(CorruptCheckpointError, match=largest.name), open_reader(tmp_path, self.format) as reader:
            reader.whole("a")


class SafetensorsTests(ReaderTests):
    """The laws of formats whose files are safetensors; the planner gives readers of others detached memory."""

    def test_parameters_that_need_gradients_are_filled_in_place(self, tmp_path: Path) -> None:
        """Strided or contiguous, cast or not, without autograd noticing."""
        a, b = torch.nn.Parameter(torch.zeros(4, 4)), torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.float64).t())
        with self.opened(tmp_path, {"a": torch.ones(4, 4), "b": torch.ones(4, 4)}) as reader:
            reader.read([Block(Chunk.whole((4, 4)), into, name) for name, into in (("a", a), ("b", b))])
        assert torch.equal(a.detach(), torch.ones(4, 4)) and torch.equal(b.detach(), torch.ones(4, 4).double())
        assert a.grad_fn is None and b.grad_fn is None


class TestNative(SafetensorsTests):
    format = "native"

    def write(self, folder: Path, tensors: Tensors) -> None:
        save_native(folder, tensors)


class TestHuggingFace(SafetensorsTests):
    format = "hf"

    def write(self, folder: Path, tensors: Tensors) -> None:
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"model_type": "x"}))


class TestDcp(ReaderTests):
    format = "dcp"

    def write(self, folder: Path, tensors: Tensors) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # dcp in one process, as meant here
            dcp.save(dict(tensors), checkpoint_id=folder, no_dist=True)
