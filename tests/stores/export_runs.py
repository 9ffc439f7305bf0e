"""Exports to a bucket by two ranks, which import this file and not the libraries that open the exports.

`tests/stores/test_exports_in_bucket.py` looks at what they leave.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests import world
from titan_ckpt.config import ExportConfig, StoreConfig
from titan_ckpt.converters import from_tables
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import ExportError
from titan_ckpt.models.llama3 import FLAVORS, Llama3
from titan_ckpt.testing import distributed
from titan_ckpt.types import ModelConverter

CONFIG = replace(FLAVORS["debug-0.5m"], vocab_size=160, num_layers=2, max_seq_len=64, tie_embeddings=False)
SHARD_BYTES = 400_000


def of_two_ranks(url: str) -> tuple[ExportConfig, ...]:
    """Return the exports that two ranks make: in the background, in one file per rank, and at once."""
    return (
        ExportConfig("hf", folder=url, interval=1, max_shard_bytes=SHARD_BYTES),
        ExportConfig("dcp", folder=f"{url}/dcp", interval=1),
        ExportConfig("hf_quantized", folder=url, interval=1, max_shard_bytes=SHARD_BYTES),
    )


def quantizing_model() -> tuple[Llama3, ModelConverter]:
    """Return a model whose weights can be stored quantized."""
    torch.manual_seed(0)
    model = Llama3(CONFIG)
    converter = from_tables([{"kind": "qat", "scheme": "int8_weight_only"}])
    converter.convert(model)
    return model, converter


@distributed(nproc=2)
def export_from_two_ranks(url: str, store: StoreConfig, broken: StoreConfig, folder: Path) -> None:
    """Export shards of rows and of columns, and replicas; then where the second file cannot be written."""
    model, converter = quantizing_model()
    mesh = init_device_mesh("cpu", (2,))
    layouts = (Shard(0), Shard(1), Replicate())
    for number, (name, value) in enumerate(list(model.named_parameters())):
        layout = layouts[number % 3] if value.dim() > 1 else layouts[number % 2 * 2]
        owner, _, own = name.rpartition(".")
        shard = distribute_tensor(value.detach(), mesh, [layout])
        setattr(model.get_submodule(owner), own, torch.nn.Parameter(shard))
    connecting: list[str] = []
    connect = Coordinator.gloo_group

    def connected(line: Coordinator, ranks: Sequence[int], name: str, most_seconds: float) -> object:
        connecting.append(threading.current_thread().name)
        return connect(line, ranks, name, most_seconds)

    given = {"model_converters": converter, "folder": f"{url}/run", "store": store, "export": of_two_ranks(url)}
    with world.manager(folder, model, **given) as manager, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Coordinator, "gloo_group", connected)
        manager.load()
        manager.save(1)
        manager.wait()
    assert connecting and {*connecting} == {threading.main_thread().name}
    exports = (replace(of_two_ranks(f"{url}/broken")[0], interval=None),)
    given = {"save": None, "model_converters": converter, "store": broken, "export": exports}
    with world.manager(folder, model, **given) as manager:
        manager.load()
        with pytest.raises(ExportError, match=r"00002-of-00003\.safetensors: rank 1 could not write it"):
            manager.save(1, last_step=True)
