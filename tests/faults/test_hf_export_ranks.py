"""A rank is killed while two put shards of columns together: the other stops in time, and nothing has the name."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.faults.forked_ranks import Ranks, outcome
from tests.faults.scenarios import quick_folder
from tests.faults.shim import Counter, KillAt, intercepted
from titan_ckpt.distributed import Coordinator
from titan_ckpt.storage.huggingface_export import export_huggingface
from titan_ckpt.transforms import StateDictTransforms

BOUND = 5.0
"""For a silent rank."""
HEALTHY = 60.0
"""Where no rank is silent."""


def export(root: Path, line: Coordinator) -> None:
    """Export three tensors in two files, of which each rank has half of the columns."""
    if not dist.is_initialized():  # a mesh needs a group; nothing is sent through it
        dist.init_process_group("fake", rank=line.rank, world_size=line.world_size, store=FakeStore())
    mesh = init_device_mesh("cpu", (line.world_size,))
    whole = torch.arange(3 * 1000 * 70).float().view(3, 1000, 70)
    half = whole[:, :, 35 * line.rank : 35 * (line.rank + 1)].contiguous()
    state: dict[str, Any] = {
        f"w{i}": DTensor.from_local(
            half[i], mesh, [Shard(1)], run_check=False, shape=torch.Size((1000, 70)), stride=(70, 1)
        )
        for i in range(3)
    }
    config = {"model_type": "x", "architectures": ["X"]}
    groups = StateDictTransforms().to_file(state, None, None)
    export_huggingface(
        root / "out", groups, config=config, assets=None, max_shard_bytes=600_000, coordinator=line
    )  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def world(root: Path, victim: int | None, shim: Counter) -> Ranks:
    def body(line: Coordinator) -> Any:
        root.mkdir(exist_ok=True)
        line.timeout_seconds = HEALTHY if victim is None else BOUND
        start = time.monotonic()
        if victim not in (None, line.rank):
            result = outcome(lambda: export(root, line))
        else:
            with intercepted(shim):
                result = outcome(lambda: export(root, line))
        return [result, shim.names, time.monotonic() - start]

    return Ranks(2, body, HEALTHY, False)


def results(ranks: Ranks, who: list[int]) -> list[Any]:
    try:
        return [ranks.result(rank) for rank in who]
    finally:
        ranks.stop()


def test_a_killed_rank_leaves_no_folder_or_a_proved_one() -> None:
    """While rows are written, made durable or published: the survivor ends in time, and the next export succeeds."""
    with quick_folder() as folder:
        whole = results(world(folder / "whole", None, Counter()), [0, 1])
        assert [one[0] for one in whole] == [["ok", None]] * 2, whole
        names = [one[1] for one in whole]
        assert not any("map_shared" in one for one in names), "the ranks do not put anything together"
        complete = contents(folder / "whole" / "out")
        cases = [(0, names[0].index("rename_noreplace"))]
        for rank, operations in enumerate(names):
            writes = [i for i, name in enumerate(operations) if name == "pwrite_all"]
            cases += [(rank, writes[len(writes) // 2]), (rank, operations.index("fsync"))]
        worlds = [world(folder / f"{rank}-{n}", rank, KillAt(ordinal=n)) for rank, n in cases]  # they mostly wait
        answers = [results(one, [1 - rank])[0] for one, (rank, _) in zip(worlds, cases, strict=True)]
        for (victim, ordinal), answer in zip(cases, answers, strict=True):
            root = folder / f"{victim}-{ordinal}"
            where = (victim, ordinal, names[victim][ordinal], answer)
            assert answer is not None, where
            assert "crash" not in answer, where
            (kind, *_), _, seconds = answer
            assert kind in ("ok", "ExportError"), where
            assert seconds < HEALTHY, where
            if (root / "out").exists():
                assert contents(root / "out") == complete, where
            else:
                assert kind == "ExportError", where
        again = folder / f"{cases[0][0]}-{cases[0][1]}"
        assert not (again / "out").exists()
        assert results(world(again, None, Counter()), [0, 1])[0][0] == ["ok", None]
        assert sorted(path.name for path in again.iterdir()) == ["out"]
