"""Ranks of one host verify for each other before a load: all raise together, and nothing live is touched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from titan_ckpt import CheckpointConfig, CheckpointManager, SaveConfig
from titan_ckpt.disk import kernel as running_kernel
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import CorruptCheckpointError, PeerError
from titan_ckpt.formats.native.layout import BLOCK_BYTES
from titan_ckpt.formats.native.reader import NativeReader
from titan_ckpt.formats.native.shared_check import check_together
from titan_ckpt.formats.native.transfers import BlockReader
from titan_ckpt.formats.native.writer import NativeWriter
from titan_ckpt.geometry.chunks import Chunk
from titan_ckpt.geometry.requests import ReadRequest
from titan_ckpt.testing import distributed

BLOCKS = 24


def requests_of(columns: slice) -> tuple[torch.Tensor, list[ReadRequest]]:
    """Return a zeroed target for some columns of the tensor, one row of which is a block."""
    into = torch.zeros(BLOCKS, columns.stop - columns.start, dtype=torch.uint8)
    return into, [ReadRequest("w", Chunk((0, columns.start), tuple(into.shape)), into)]


def checked(folder: Path, requests: list[ReadRequest], coordinator: Coordinator) -> tuple[int, BaseException | None]:
    """Return how many bytes this rank verified beforehand, and what was raised."""
    verified: list[int] = []
    real = BlockReader.check_window

    def counted(self: BlockReader, window: tuple[int, int]) -> None:
        verified.append(window[1] - window[0])
        real(self, window)

    BlockReader.check_window = counted  # type: ignore[method-assign]
    try:
        with NativeReader(folder) as reader:
            try:
                check_together([(reader, requests)], coordinator)
                reader.read(requests)
            except Exception as error:
                return sum(verified), error
        return sum(verified), None
    finally:
        BlockReader.check_window = real  # type: ignore[method-assign]


@distributed(nproc=2)
def ranks_of_one_host(root: Path) -> None:
    rank, coordinator = dist.get_rank(), Coordinator.current(60.0)
    values = torch.randint(0, 256, (BLOCKS, BLOCK_BYTES), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    if rank == 0:
        writer = NativeWriter()
        writer.plan({"w": values}, Coordinator(0, 1, None, "", 60.0))
        writer.write(root, {"w": values})
    coordinator.barrier("written")
    path = root / "rank-00000.safetensors"
    path.read_bytes()
    half = BLOCK_BYTES // 2
    columns = slice(rank * half, (rank + 1) * half)

    # both touch every block: each verifies half of them
    into, requests = requests_of(columns)
    num_bytes, error = checked(root, requests, coordinator)
    assert error is None and torch.equal(into, values[:, columns])
    assert num_bytes == BLOCKS * BLOCK_BYTES // 2

    # under two kernels nobody verifies for the other
    real = running_kernel.boot_id
    running_kernel.boot_id = lambda: f"host of {rank}"
    apart = Coordinator.current(60.0)
    num_bytes, error = checked(root, requests, apart)
    running_kernel.boot_id = real
    assert error is None and num_bytes == BLOCKS * BLOCK_BYTES
    assert apart.on_host().world_size == 1 and coordinator.on_host().world_size == 2

    # a rank that needs nothing leaves all to the other
    num_bytes, error = checked(root, requests if rank else [], coordinator)
    assert error is None and num_bytes == rank * BLOCKS * BLOCK_BYTES

    # a rank that cannot even plan: the other hears of it, and both go on to the next exchange
    wrong = [ReadRequest("absent", Chunk((1,), (1,)), torch.zeros(1))]
    num_bytes, error = checked(root, requests if rank else wrong, coordinator)
    assert isinstance(error, PeerError if rank else KeyError)
    assert not rank or (isinstance(error, PeerError) and error.ranks == (0,))

    # a damaged block of either rank's part: one names it, both raise, nothing is touched
    for block in (1, 5):
        coordinator.barrier("undamaged")
        if rank == 0:
            flip(path, block)
        coordinator.barrier("damaged")
        into, requests = requests_of(columns)
        _, error = checked(root, requests, coordinator)
        assert isinstance(error, CorruptCheckpointError | PeerError) and not into.any()
        found = coordinator.gather("who", isinstance(error, CorruptCheckpointError))
        assert sum(map(bool, found)) == 1 and "1 tensor(s): w" in str(error)
        coordinator.barrier("seen")
        if rank == 0:
            flip(path, block)
    coordinator.close()


@distributed(nproc=2)
def managers_of_replicas(root: Path) -> None:
    model = torch.nn.Linear(512, 2048)
    with CheckpointManager(
        CheckpointConfig(save=SaveConfig(interval=1)), model_parts=[model], base_folder=root
    ) as manager:
        for step in (1, 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(step)
            manager.save(step)
            manager.wait()
        for rank in range(2):  # each holds half of what both load
            path = next(root.rglob(f"step-2/rank-{rank:05d}.safetensors"))
            if dist.get_rank() == 0:
                with path.open("r+b") as file:
                    file.seek(-7, 2)
                    file.write(b"\1")
                path.read_bytes()
            dist.barrier()
            with pytest.raises((CorruptCheckpointError, PeerError), match=path.name):
                manager.load(2)
            assert all((parameter == 2).all() for parameter in model.parameters())
            dist.barrier()
            if dist.get_rank() == 0:
                with path.open("r+b") as file:
                    file.seek(-7, 2)
                    file.write(b"\0")
            dist.barrier()
        assert manager.load(1).step == 1
        assert all((parameter == 1).all() for parameter in model.parameters())
        assert manager.load(2).step == 2
        assert all((parameter == 2).all() for parameter in model.parameters())


def flip(path: Path, block: int) -> None:
    """Flip a bit in the middle of a block, where the page cache sees it."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - (BLOCKS - block) * BLOCK_BYTES + 12345)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))


def test_ranks_of_one_host_verify_for_each_other(tmp_path: Path) -> None:
    """They divide what both need, and hear of each other's errors before anything is filled."""
    ranks_of_one_host(tmp_path)


def test_damage_in_either_ranks_file_stops_both_managers(tmp_path: Path) -> None:
    """Both name the file, and their live parameters are as they were."""
    managers_of_replicas(tmp_path)


@pytest.mark.parametrize("kernel", ["", "0123"])
def test_one_process_is_its_own_host(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a process group, and where the kernel has no name."""
    monkeypatch.setattr(running_kernel, "boot_id", lambda: kernel)
    host = Coordinator.current().on_host()
    assert (host.rank, host.world_size, host.gather("x", 1)) == (0, 1, [1])
