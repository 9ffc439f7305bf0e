"""The model of the Hugging Face benchmarks: a sharded Llama, its names and files, and the peers' view of it.

A peer gets its tensors under Hugging Face names as they are, so it is spared the turning of rotary rows, which ours
does on the way: this favours the peers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.common import StateDict, rank, world_size
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.formats.huggingface.export import export_huggingface
from titan_ckpt.formats.publish.plan import pack_model_files
from titan_ckpt.geometry.chunks import info_of
from titan_ckpt.models.llama3 import FLAVORS, Llama3, Llama3Config
from titan_ckpt.weights.transforms import FileGroup, StateDictTransforms

NUM_FILES = 4
"""As the folder of Llama 3.1 8B has them; a peer needs several for its ranks to consolidate at the same time."""
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Subject:
    """A model in fp32, sharded over all ranks, and what an export of it in bf16 consists of."""

    state: StateDict
    transforms: StateDictTransforms
    config: dict[str, object]
    num_bytes: int
    """Bytes of the exported tensors, over all ranks."""

    def groups(self) -> list[FileGroup]:
        return self.transforms.to_file(self.state, None, DTYPE)

    def under_file_names(self) -> StateDict:
        """Return the live tensors under Hugging Face names."""
        return {next(iter(g.infos)): self.state[g.fqns[0]] for g in self.groups()}

    @property
    def max_file_bytes(self) -> int:
        return self.num_bytes // NUM_FILES + 1

    def file_numbers(self) -> dict[str, int]:
        """Return each key's file, counted from 1, the same as ours."""
        infos = {key: info for group in self.groups() for key, info in group.infos.items()}
        files = pack_model_files(infos, self.max_file_bytes)
        return {key: i for i, keys in enumerate(files.values(), 1) for key in keys}

    def export(self, folder: Path) -> None:
        """Export as the manager does."""
        export_huggingface(
            folder,
            self.groups(),
            config=self.config,
            assets=None,
            max_shard_bytes=self.max_file_bytes,
            coordinator=Coordinator.current(),
        )


def make_subject(gb: float, dim: int = 0) -> Subject:
    """Return a Llama of about `gb` * 10^9 bytes of fp32 parameters, every matrix sharded along `dim`."""
    config = _config_of(gb)
    with torch.device("meta"):
        model = Llama3(config)
    state = {fqn: _shard(parameter, dim) for fqn, parameter in model.named_parameters()}
    num_bytes = sum(info_of(value).nbytes for value in state.values()) * DTYPE.itemsize // 4
    return Subject(state, StateDictTransforms(model.key_map()), config.to_hf(), num_bytes)


def _config_of(gb: float) -> Llama3Config:
    """Scale the true 1B shape (untied) by its width."""
    shape = replace(FLAVORS["1B"], tie_embeddings=False, max_seq_len=1024, vocab_size=32_000)
    for width in range(2048, 0, -128):
        heads = width // 64
        small = replace(
            shape,
            dim=width,
            ffn_dim=4 * width,
            num_heads=heads,
            num_kv_heads=max(1, heads // 4 if heads % 4 == 0 else 1),
        )
        if _num_parameters(small) * 4 <= gb * 1e9 * 1.02:
            return small
    return small


def _num_parameters(config: Llama3Config) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Llama3(config).parameters())


def _shard(parameter: nn.Parameter, dim: int) -> torch.Tensor:
    """Return this rank's random shard, made without communication."""
    torch.manual_seed(rank())
    if world_size() == 1:
        return torch.randn(parameter.shape)
    mesh = init_device_mesh("cpu", (world_size(),))
    dim = min(dim, parameter.dim() - 1)
    shape = list(parameter.shape)
    step = -(-shape[dim] // world_size())
    shape[dim] = max(0, min(step, shape[dim] - rank() * step))
    return DTensor.from_local(
        torch.randn(shape), mesh, [Shard(dim)], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def fsync_folder(folder: Path) -> None:
    """Make every file of a folder durable, each by one of the ranks."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    for file in files[rank() :: world_size()]:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def highest(value: float) -> float:
    """Return the highest of all ranks' values."""
    values = torch.tensor([value], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(values, dist.ReduceOp.MAX)
    return float(values)
