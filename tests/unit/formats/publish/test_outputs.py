"""The files of an export on a disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from tests.faults.shim import intercepted
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.formats.publish.plan import OutputFiles
from titan_ckpt.formats.safetensors.container import lay_out
from titan_ckpt.geometry.chunks import TensorInfo


def test_a_rank_makes_the_header_durable_of_a_file_to_which_only_others_write(tmp_path: Path) -> None:
    """Or nobody, as where its tensors have no elements: the rank that has created the file has written its header."""
    layouts = {name: lay_out({name: TensorInfo((0, 3), torch.float32)}, {}) for name in ("a", "b", "c")}
    synced: list[str] = []

    def note(name: str, operation: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if name == "fsync":
            synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{arguments[0]}")))
        return operation(*arguments)

    with intercepted(note), closing(OutputFiles(tmp_path, layouts, Coordinator(0, 2, None, "", 60.0))) as files:
        files.begin()
        files.sync()
    assert synced == ["a", "c"]
