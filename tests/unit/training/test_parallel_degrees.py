"""Degrees of parallelism: what fits is laid out as expected, what does not is all named; ranks; how layers run."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.tiny_run import losses, settings
from titan_ckpt.config import from_dict
from titan_ckpt.errors import ConfigError
from titan_ckpt.formats.open import open_reader
from titan_ckpt.models import llama3, qwen3_moe
from titan_ckpt.training.parallel import ranks
from titan_ckpt.training.parallel.context_parallel import positions
from titan_ckpt.training.parallel.degrees import AXES, Degrees, find_degrees, micro_batches
from titan_ckpt.training.parallel.pipeline import cut
from titan_ckpt.training.parallel.ranks import Ranks, find_device
from titan_ckpt.training.tables import ParallelConfig
from titan_ckpt.training.trainer import Trainer

DENSE = llama3.FLAVORS["8B"]
SPARSE = qwen3_moe.FLAVORS["30B-A3B"]


def find(
    world_size: int,
    model: Any = DENSE,
    batch_size: int = 8,
    length: int = 8192,
    global_batch_size: int | None = None,
    **table: Any,
) -> Degrees:
    config: Any = SimpleNamespace(
        parallel=ParallelConfig(**table),
        training=training(batch_size, 1, global_batch_size),
        data=SimpleNamespace(sequence_length=length),
    )
    return find_degrees(config, world_size, model)


def training(batch_size: int, accumulation: int, global_batch_size: int | None) -> Any:
    return SimpleNamespace(batch_size=batch_size, accumulation=accumulation, global_batch_size=global_batch_size)


@pytest.mark.parametrize(
    ("world_size", "table", "expected"),
    [
        (1, {}, Degrees()),
        (8, {}, Degrees(dp_shard=8)),
        (8, {"data_parallel_replicate": 2}, Degrees(dp_replicate=2, dp_shard=4)),
        (8, {"tensor_parallel": 8}, Degrees(tp=8)),
        (64, {"tensor_parallel": 4, "pipeline_parallel": 2, "context_parallel": 2}, Degrees(2, 1, 4, 1, 2, 4)),
        (16, {"data_parallel_shard": 4, "data_parallel_replicate": 4}, Degrees(dp_replicate=4, dp_shard=4)),
    ],
)
def test_ranks_that_are_left_shard(world_size: int, table: dict[str, Any], expected: Degrees) -> None:
    """data_parallel_shard takes the ranks that no other axis has, unless it is given."""
    assert find(world_size, **table) == expected


def test_experts_are_dealt_out_within_the_sharded_axis() -> None:
    """Expert parallelism takes no rank of its own, and every rank sees its own data."""
    degrees = find(16, SPARSE, expert_parallel=4, tensor_parallel=2)
    assert degrees == Degrees(dp_shard=2, ep=4, tp=2)
    assert (prod(map(degrees.of, AXES)), degrees.data_size, degrees.of("fsdp")) == (16, 8, 8)


def test_every_rank_is_at_one_place() -> None:
    """Places are all different, neighbours share matrices, and the ranks of a data rank are one model."""
    degrees = Degrees(pp=2, dp_replicate=2, dp_shard=2, ep=2, cp=2, tp=2)
    places = [degrees.place(rank) for rank in range(64)]
    assert len(set(places)) == 64
    assert (places[1].tp, places[2].cp, places[4].ep, places[32].pp) == (1, 1, 1, 1)
    assert [degrees.data_rank(rank) for rank in range(0, 64, 4)] == [*range(8)] * 2


@pytest.mark.parametrize(
    ("world_size", "model", "table", "expected"),
    [
        (
            6,
            DENSE,
            {"tensor_parallel": 4},
            r"tensor_parallel 4 needs a multiple of 4 ranks, and this run has 6: .* torchrun --nproc-per-node 8",
        ),
        (
            2,
            DENSE,
            {"tensor_parallel": 4},
            r"tensor_parallel 4 needs a multiple of 4 ranks, and this run has 2: .* --nproc-per-node 4",
        ),
        (
            8,
            DENSE,
            {"data_parallel_shard": 2, "tensor_parallel": 2},
            r"data_parallel_shard 2 = 4 ranks.*this run has 8",
        ),
        (16, DENSE, {"tensor_parallel": 16}, r"tensor_parallel: 16 does not divide the 8 key-value heads"),
        (
            3,
            DENSE,
            {"tensor_parallel": 3},
            r"3 does not divide the 32 heads; choose .*\n.*8 key-value heads;.*\n.*14336 hidden rows;",
        ),
        (8, DENSE, {"expert_parallel": 2}, r"expert_parallel: the model has no experts"),
        (8, SPARSE, {"expert_parallel": 16}, r"expert_parallel: 16 does not divide data_parallel_shard 8"),
        (5, SPARSE, {"expert_parallel": 5}, r"expert_parallel: 5 does not divide the 128 experts"),
        (4, replace(SPARSE, expert_dim=6), {"tensor_parallel": 4}, r"4 does not divide the 6 hidden rows of an expert"),
        (4, replace(DENSE, vocab_size=3), {"tensor_parallel": 4}, r"4 ranks are more than the vocabulary's 3 tokens"),
        (64, DENSE, {"pipeline_parallel": 64}, r"64 stages are more than the 32 layers"),
        (2, llama3.FLAVORS["1B"], {"pipeline_parallel": 2}, r"output is its embedding matrix \(tie_word_embeddings\)"),
        (2, DENSE, {"pipeline_parallel": 2, "pipeline_microbatches": 3}, r"3 do not divide training\.batch_size 8"),
        (
            4,
            DENSE,
            {"pipeline_parallel": 4, "pipeline_microbatches": 2},
            r"1F1B needs one for each of 4 stages, found 2",
        ),
        (
            4,
            DENSE,
            {"pipeline_parallel": 4, "pipeline_schedule": "Interleaved1F1B", "pipeline_microbatches": 2},
            r"Interleaved1F1B needs a multiple of pipeline_parallel 4, found 2 in a step; raise pipeline_microbatches",
        ),
        (3, DENSE, {"context_parallel": 3}, r"context_parallel: twice 3 does not divide data\.sequence_length 8192"),
        (
            2,
            {"model_type": "gpt2"},
            {"tensor_parallel": 2},
            r"tensor_parallel: a model of transformers, or of your own, is sharded by",
        ),
    ],
)
def test_d7_what_does_not_fit_is_named(world_size: int, model: Any, table: dict[str, Any], expected: str) -> None:
    """The setting, what it is, and what it should divide."""
    with pytest.raises(ConfigError, match=r"(?s)parallel\..*" + expected):
        find(world_size, model, **table)


def test_d7_everything_that_does_not_fit_is_in_one_error() -> None:
    """World, batch, sequence and model faults come together."""
    with pytest.raises(ConfigError) as caught:
        find(7, batch_size=3, length=1001, tensor_parallel=3, pipeline_parallel=2, expert_parallel=2)
    named = [problem.split(":")[0].removeprefix("parallel.") for problem in caught.value.problems]
    assert set(named) == {
        "data_parallel_shard", "sequence_parallel", "pipeline_microbatches", "tensor_parallel", "expert_parallel"
    }  # fmt: skip


def test_d9_a_global_batch_that_does_not_divide_is_named_with_its_neighbours() -> None:
    """Beside what else does not fit; one that divides is what a pipeline's schedule is judged by."""
    with pytest.raises(ConfigError) as caught:
        find(4, global_batch_size=40, batch_size=3, tensor_parallel=2, expert_parallel=2)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "parallel.expert_parallel", "training.global_batch_size"
    ]  # fmt: skip
    assert "on each of 2 ranks with different data; expected a multiple of 6, such as 36 or 42" in str(caught.value)
    assert (micro_batches(training(3, 1, 42), 2), micro_batches(training(3, 5, None), 2)) == (7, 5)
    with pytest.raises(ConfigError, match="on one rank; expected a multiple of 8, such as 8"):
        micro_batches(training(8, 1, 4), 1)


def test_combinations_that_do_not_work_are_refused_where_the_table_is_read() -> None:
    """The interleaved schedule has two stages on each rank, and matrices are shared or compiled."""
    with pytest.raises(ConfigError, match=r"compile: torch\.compile cannot differentiate"):
        from_dict(ParallelConfig, {"tensor_parallel": 2, "compile": True})
    table = {"pipeline_parallel": 2, "pipeline_schedule": "Interleaved1F1B"}
    assert from_dict(ParallelConfig, table).num_stages == 4


def test_stages_are_as_even_as_can_be() -> None:
    """Every layer is in one stage, in order; sizes differ by one at most."""
    assert cut(7, 3) == [[0, 1, 2], [3, 4], [5, 6]]
    assert cut(4, 4) == [[i] for i in range(4)]


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_share_a_sequence_have_every_token_once_and_equal_work(size: int) -> None:
    """Each query sees all positions up to its own: the sum of positions is the work."""
    shares = [positions(32, rank, size) for rank in range(size)]
    assert sorted(token for share in shares for token in share.tolist()) == [*range(32)]
    assert len({int(share.sum()) for share in shares}) == 1


def test_each_rank_of_a_host_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its number, or the only one that its launcher lets it see; never device 0 for want of another."""
    visible = [4]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible[0])
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert find_device("auto") == torch.device("cuda", 3)
    visible[0] = 1
    assert find_device("cuda") == torch.device("cuda", 0)
    visible[0] = 2
    with pytest.raises(ConfigError, match="at most 2 ranks"):
        find_device("auto")


def test_one_rank_of_a_host_is_the_first_in_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run of the same processes says its error again; without a store each rank says it."""
    store = dist.HashStore()
    monkeypatch.setattr(ranks, "_get_default_store", lambda: store)
    cpu = torch.device("cpu")
    asked = [Ranks(rank, 2, cpu, run=run).is_first("wrong") for run in (0, 1) for rank in (1, 0)]
    assert asked == [True, False, True, False]
    monkeypatch.undo()
    assert Ranks(1, 2, cpu).is_first("wrong")


def train_with(folder: Path, table: dict[str, Any]) -> tuple[list[float], list[str]]:
    """Return the losses of three steps and the names of what was saved."""
    Trainer(settings(folder, parallel=table)).run()
    with open_reader(folder / "run" / "checkpoints" / "step-3") as reader:
        return losses(folder), sorted(reader.tensors)


@pytest.mark.filterwarnings("default")  # the compiler imports and reads what torch itself warns about
def test_losses_and_names_stay_the_same(tmp_path: Path) -> None:
    """Full and selective recomputation give the same bits, compiled layers the same losses to rounding."""
    plain, names = train_with(tmp_path / "plain", {})
    for mode in ("full", "selective"):
        assert train_with(tmp_path / mode, {"activation_checkpoint": mode}) == (plain, names)
    compiled, compiled_names = train_with(tmp_path / "compiled", {"compile": True})
    assert compiled == pytest.approx(plain, abs=1e-4)
    assert compiled_names == names
