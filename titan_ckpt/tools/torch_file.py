"""A plain torch.save file of a state dict, written tensor by tensor in bounded memory.

torch reserves the place of every tensor (`skip_data`), and the values are written there afterwards. The checksums of
the file's zip entries are then not those of the values; torch does not look at them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from titan_ckpt import progress
from titan_ckpt.disk import posix
from titan_ckpt.disk.unpublished_folder import StagedFolder
from titan_ckpt.geometry.chunks import LazyTensor, blocks_of, info_of
from titan_ckpt.types import StateDict


def write_torch_file(target: Path, tensors: StateDict) -> None:
    """Write {name: tensor} so that `torch.load(weights_only=True)` reads it. The file appears complete or not at all.

    The blocks of lazy tensors must be runs of whole rows. Raises: FileExistsError; OSError.
    """
    staged = StagedFolder.begin(target)
    try:
        draft = staged.path / target.name
        offsets = _reserve(draft, tensors)
        total = sum(info_of(value).nbytes for value in tensors.values())
        fd = os.open(draft, os.O_WRONLY | os.O_CLOEXEC)
        try:
            with progress.shown(f"writing {target.name}", total) as count:
                for offset, value in zip(offsets, tensors.values(), strict=True):
                    _fill(fd, offset, value, count)
            posix.fsync(fd)
        finally:
            posix.close(fd)
        posix.rename_noreplace(draft, target)
        posix.fsync_folder(target.parent)
    finally:
        staged.abandon()


def _reserve(path: Path, tensors: StateDict) -> list[int]:
    """Write the file without values; return the place of each tensor's values."""
    infos = {name: info_of(value) for name, value in tensors.items()}
    with FakeTensorMode():
        empty = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in infos.items()}
    with skip_data(materialize_fake_tensors=True):
        torch.save(empty, path)
    reader: Any = torch._C.PyTorchFileReader(str(path))  # noqa: SLF001 - what torch.load itself uses
    return [reader.get_record_offset(f"data/{index}") for index in range(len(tensors))]


def _fill(fd: int, offset: int, value: torch.Tensor | LazyTensor, count: progress.Count) -> None:
    info = info_of(value)
    row_bytes = info.nbytes // info.shape[0] if info.shape and info.shape[0] else info.nbytes
    for block in blocks_of(value):
        if not block.data.numel():
            continue
        start = block.chunk.offsets[0] * row_bytes if info.shape else 0
        data = block.data.contiguous().view(-1).view(torch.uint8).numpy()
        posix.pwrite_all(fd, data, offset + start)
        count(data.nbytes)
