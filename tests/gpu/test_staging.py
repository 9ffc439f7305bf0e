"""The copy of a device's tensors to the host, and what may change meanwhile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import world
from tests.forked import fork
from tests.gpu.run import raw
from titan_ckpt.disk.cuda import stream_of
from titan_ckpt.formats.native.arena import COPY_BYTES, Arena
from titan_ckpt.formats.native.writer import lay_end_to_end

pytestmark = pytest.mark.gpu


def tensors_on(device: torch.device) -> list[torch.Tensor]:
    """Return tensors of every shape of memory, wider elements first, the largest in several pieces."""
    base = torch.randn(37, 21, device=device)
    large = COPY_BYTES // 4 + 5 if device.type == "cuda" else 100_000
    return [
        torch.complex(base, base).conj(),
        torch.complex(base, base).conj().imag,
        base.t(),
        base[::2, 1::3],
        torch.tensor(4.0, device=device),
        torch.randn(large, device=device),
        torch.randn(2, large // 7, 3, device=device).permute(1, 0, 2),
        torch.randn(11),  # a step counter on the host
        *torch.arange(50.0, device=device).view(10, 5),
        base.bfloat16(),
        torch.arange(11, dtype=torch.uint8, device=device),
    ]


def make_arena(num_bytes: int, device: torch.device, **settings: Any) -> Arena:
    return Arena(num_bytes, pinned=device.type == "cuda", **settings)


@pytest.mark.parametrize("shared", [False, True])
def test_tensors_may_change_as_soon_as_the_stream_has_passed_the_copy(device: torch.device, shared: bool) -> None:
    """Tensors of every shape are copied in pieces, while the device still computes them when the copy is asked for."""
    tensors = tensors_on(device)
    places = lay_end_to_end([(t.dtype, t.shape) for t in tensors])
    arena = make_arena(sum(places[1]), device, shared=shared)
    try:
        assert arena._pinned is (device.type == "cuda")
        for _ in range(2):
            for tensor in tensors:
                tensor.add_(1)
            expected = b"".join(map(raw, tensors))
            handle = arena.stage(places, tensors)
            handle.wait()
            for tensor in tensors:
                tensor.zero_()
            handle.finish()
            assert bytes(arena.buffer.view[: len(expected)]) == expected
            for tensor in tensors:
                tensor.copy_(torch.randn(tensor.shape))
    finally:
        arena.close()


def test_a_fork_while_memory_is_page_locked_changes_nothing(device: torch.device) -> None:
    """Data loaders fork workers; the pages that the device writes to stay this process's own."""
    tensors = [torch.randn(1 << 16, device=device)]
    places = lay_end_to_end([(t.dtype, t.shape) for t in tensors])
    arena = make_arena(sum(places[1]), device)
    arena.stage(places, tensors).finish()
    read, write = os.pipe()

    def wait() -> None:
        os.close(write)
        os.read(read, 1)

    child = fork(wait)
    arena.buffer.tensor.zero_()
    tensors[0].add_(1)
    arena.stage(places, tensors).finish()
    assert bytes(arena.buffer.view) == raw(tensors[0])
    for end in (read, write):
        os.close(end)
    os.waitpid(child, 0)
    arena.close()


def test_what_hooks_make_on_the_device_is_saved_though_its_memory_is_used_again(
    tmp_path: Path, device: torch.device
) -> None:
    """A fused weight is split by a hook into temporaries, which nobody but the save holds."""

    def split(module: nn.Module, entries: dict[str, Any], prefix: str, *_: object) -> None:
        fused = entries.pop(prefix + "weight")
        entries[prefix + "q"], entries[prefix + "k"] = (part.clone() for part in fused.chunk(2))

    def fuse(module: nn.Module, entries: dict[str, Any], prefix: str, *_: object) -> None:
        entries[prefix + "weight"] = torch.cat([entries.pop(prefix + "q"), entries.pop(prefix + "k")])

    def made() -> nn.Linear:
        model = nn.Linear(256, 512, bias=False, device=device)
        model.register_state_dict_post_hook(split)
        model.register_load_state_dict_pre_hook(fuse)
        return model

    model = made()
    with world.manager(tmp_path, model, async_mode="thread") as manager:
        manager.save(1)
        expected = raw(model.weight)
        for _ in range(20):  # what the allocator gives away again
            torch.full((256, 256), float("nan"), device=device)
        with torch.no_grad():
            model.weight.zero_()
    other = made()
    world.load(world.manager(tmp_path, other))
    assert raw(other.weight) == expected


def test_a_generator_of_the_device_is_restored(tmp_path: Path, device: torch.device) -> None:
    """A resumed run draws the numbers that the run would have drawn."""
    world.save(world.manager(tmp_path, nn.Linear(2, 2, device=device)))
    drawn = torch.rand(8, device=device)
    torch.manual_seed(99)
    world.load(world.manager(tmp_path, nn.Linear(2, 2, device=device)))
    assert torch.equal(torch.rand(8, device=device), drawn)


@pytest.mark.gpu(only=True)
def test_no_other_device_is_touched(tmp_path: Path, device: torch.device) -> None:
    """A rank that trains on the last device has no memory on the first one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    free, _ = torch.cuda.mem_get_info(0)
    with (
        torch.cuda.device(last),
        world.manager(tmp_path, nn.Linear(9, 9, device=last), async_mode="thread") as manager,
    ):
        manager.save(1)
        manager.wait()
        manager.load()
    assert stream_of(last).device == last
    assert torch.cuda.mem_get_info(0)[0] >= free - (64 << 20)
