"""Each rank computes something for all of them: where one fails, all raise its error at once, and none waits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import tests.memory_store  # noqa: F401 - it names the scheme
from tests.faults.forked_ranks import outcome, run
from titan_ckpt import progress
from titan_ckpt.config import CheckpointConfig, ExportConfig
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.exporting.exporter import Exporter, ExportJob
from titan_ckpt.formats.dcp.writer import DcpExport
from titan_ckpt.formats.native import writer
from titan_ckpt.formats.publish import exchange
from titan_ckpt.formats.publish import run as publishing
from titan_ckpt.formats.publish.plan import OutputFiles, plan_export
from titan_ckpt.formats.publish.write import ExportWriter
from titan_ckpt.geometry.chunks import Block, Chunk, LazyTensor, TensorInfo
from titan_ckpt.geometry.keymap import KeyMap
from titan_ckpt.saving.step import ModelContent
from titan_ckpt.stores.store import StoreConfig, open_location
from titan_ckpt.weights import digest
from titan_ckpt.weights.transforms import file_group

INFO = TensorInfo((4,), torch.float32)
STORE = StoreConfig()


def of_rank_1(line: Coordinator, value: Any) -> Any:
    """Return the value, which rank 1 has no memory for."""
    if line.rank == 1:
        raise MemoryError("no room")
    return value


def digests(line: Coordinator, folder: Path) -> None:
    """Take the digests of several tensors, of which every rank reads some."""
    real = digest.partial_digest
    digest.partial_digest = lambda *given: of_rank_1(line, real(*given))
    digest.logical_digests({str(number): torch.ones(4) for number in range(4)}, line)


def chunks_of_an_export(line: Coordinator, folder: Path) -> None:
    """Export a tensor whose layout is known when it is computed."""
    value = LazyTensor(INFO, lambda: of_rank_1(line, [Block(Chunk.whole(INFO.shape), torch.ones(4))]))
    DcpExport({"weight": value}, {}).write(folder / "out", line)


def a_converters_keys(line: Coordinator, folder: Path) -> None:
    """Ask the model which of its tensors a converter owns."""
    model: Any = SimpleNamespace(owned_state_dict=lambda: of_rank_1(line, {}))
    ModelContent(CheckpointConfig(), model, line).record_current()


def the_plan_of_a_save(line: Coordinator, folder: Path) -> None:
    """Lay out the file of each rank."""
    module: Any = writer
    real = module.lay_out
    module.lay_out = lambda *given: of_rank_1(line, real(*given))
    writer.WritePlan.of({"weight": torch.ones(4)}, line)


def the_peers_of_an_export_of_staged_copies(line: Coordinator, folder: Path) -> None:
    """Ask an export in the background which ranks exchange bytes for it."""
    module: Any = publishing
    module.row_peers = lambda groups: of_rank_1(line, {})
    nothing: Any = None
    exporter: Any = Exporter(folder, cast("Any", SimpleNamespace(model=None)), nothing, line, line, (), STORE, nothing)
    export, config = publishing.FolderExport((), cast("Any", None)), ExportConfig("hf", interval=1)
    exporter._tensors = exporter._constant = lambda _: {}
    exporter._stage_of = lambda *_: None
    exporter._job = lambda *_: ExportJob(config, 1, folder / "step-1", export, exporter.made(config))
    exporter.stage([config], 1, None, {}, {})


def the_memory_of_an_exchange(line: Coordinator, folder: Path) -> None:
    """Export to a bucket, for which all ranks send and receive values."""
    module: Any = exchange
    buffers = module.Buffer
    module.Buffer = SimpleNamespace(allocate=lambda size: of_rank_1(line, buffers.allocate(size)))
    group = file_group(KeyMap(identity=True).group_of_fqn("weight"), [torch.ones(4)], None)
    plan = plan_export([group], lambda infos: {"file": [*infos]}, lambda *_: {}, line)
    outputs = OutputFiles(open_location("ram://box/out"), plan.layouts, line)
    with closing(ExportWriter(outputs, plan, line, progress.uncounted)) as writer:
        writer.connect([group])
        writer.create()


ACTS = [
    digests, chunks_of_an_export, a_converters_keys, the_plan_of_a_save, the_peers_of_an_export_of_staged_copies,
    the_memory_of_an_exchange,
]  # fmt: skip


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_the_error_of_one_rank_is_that_of_all(tmp_path: Path, act: Callable[[Coordinator, Path], None]) -> None:
    """The other rank names it and its error, and has not waited for the timeout."""
    first, second = run(2, lambda line: outcome(lambda: act(line, tmp_path)))
    assert second == ["MemoryError", "no room"]
    assert first[0] == "PeerError"
    assert "rank 1 failed: MemoryError: no room" in first[-1]
    assert list(tmp_path.iterdir()) == []
