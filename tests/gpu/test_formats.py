"""Files written from, and read into, the memory of a device: the bytes are those of the same values on the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import world
from tests.gpu.run import raw
from titan_ckpt import ExportConfig, InitialLoadConfig
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.formats.native.reader import NativeReader
from titan_ckpt.formats.native.writer import WritePlan
from titan_ckpt.geometry.chunks import Block, Chunk
from titan_ckpt.models.llama3 import FLAVORS, Llama3
from titan_ckpt.weights.digest import logical_digests

pytestmark = pytest.mark.gpu

CONFIG = replace(FLAVORS["debug-0.5m"], vocab_size=160, num_layers=2, max_seq_len=64)


def same_model(device: torch.device) -> Llama3:
    torch.manual_seed(0)
    model = Llama3(CONFIG)
    return model.to(device)


def test_digests_of_a_devices_tensors_are_those_of_the_hosts(device: torch.device) -> None:
    """In every dtype that is trained or exported, with and without strides."""
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8):
        value = torch.randn(77, 130).to(dtype)
        here = {"plain": value, "strided": value.t()}
        there = {name: tensor.to(device) for name, tensor in here.items()}
        assert logical_digests(there, Coordinator.current()) == logical_digests(here, Coordinator.current())


def test_a_file_written_from_a_device_is_that_of_the_host_and_loads_into_both(
    tmp_path: Path, device: torch.device
) -> None:
    """From live memory, byte for byte; into plain, transposed and narrower memory of the device."""
    value = torch.randn(1501, 700)
    for name, where in (("host", torch.device("cpu")), ("device", device)):
        tensors = {"x": value.to(where), **{f"small.{i}": torch.full((3,), i, device=where) for i in range(99)}}
        (tmp_path / name).mkdir()
        WritePlan.of(tensors, Coordinator.current()).write(tmp_path / name, tensors)
    files = [next((tmp_path / name).iterdir()).read_bytes() for name in ("host", "device")]
    assert files[0] == files[1]
    columns = torch.zeros(1501, 5, device=device)
    transposed = torch.zeros(700, 1501, device=device).t()
    half = torch.zeros(1501, 700, device=device, dtype=torch.bfloat16)
    whole = Chunk.whole((1501, 700))
    with NativeReader(tmp_path / "device") as reader:
        reader.read([Block(whole, transposed, "x"), Block(Chunk((0, 9), (1501, 5)), columns, "x")])
        reader.read([Block(whole, half, "x")])
    assert torch.equal(transposed.cpu(), value) and torch.equal(columns.cpu(), value[:, 9:14])
    assert torch.equal(half.cpu(), value.bfloat16())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_from_a_device_is_that_of_the_host(tmp_path: Path, device: torch.device, dtype: str) -> None:
    """Casts are made on the device; the files are the same, byte for byte, and load into a device's memory."""
    for name, where in (("host", torch.device("cpu")), ("device", device)):
        model = same_model(where)
        export = ExportConfig("hf", dtype=dtype)  # type: ignore[arg-type]
        world.finish(world.manager(tmp_path / name, model, interval=9, export=(export,)))
    exports = [tmp_path / name / "exports" / "step-1" for name in ("host", "device")]
    names = sorted(path.name for path in exports[0].glob("*.safetensors"))
    assert names
    for name in names:
        assert (exports[0] / name).read_bytes() == (exports[1] / name).read_bytes()
    torch.manual_seed(5)
    model = Llama3(CONFIG).to(device)
    source = InitialLoadConfig(str(exports[1]), cast=True)
    world.load(world.manager(tmp_path, model, save=None, initial_load=[source]))
    expected = dict(same_model(device).named_parameters())
    for fqn, parameter in model.named_parameters():
        rounded = expected[fqn].detach().to(getattr(torch, dtype)).float()
        assert raw(parameter) == raw(rounded), fqn
