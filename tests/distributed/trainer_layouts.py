"""The trainer in every layout: which there are, how one is built, and what a save and a load in each must show."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.world import misplaced, on_ranks, read_all
from titan_ckpt.components.snapshot import take_snapshot
from titan_ckpt.config import CheckpointConfig, ResumeConfig, from_dict
from titan_ckpt.guard.run_guard import RunGuard
from titan_ckpt.models.llama3 import Llama3Config
from titan_ckpt.models.qwen3_moe import Qwen3MoeConfig
from titan_ckpt.training.config import RunConfig
from titan_ckpt.training.data.batch import Batch
from titan_ckpt.training.parallel.data_parallel import clip_gradients
from titan_ckpt.training.trainer import Trainer
from titan_ckpt.types import ModelConverter

SIZES: dict[str, Any] = {
    "dim": 30, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_dim": 44, "vocab_size": 301,
    "max_seq_len": 32, "rope_theta": 10_000.0,
}  # fmt: skip
SHAPES: dict[str, Llama3Config | Qwen3MoeConfig] = {
    "llama3": Llama3Config(**SIZES),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=6, experts_per_token=2, expert_dim=12, dense_layers=(0,)),
}
"""Rows that neither 2 nor 4 ranks share evenly: 301 tokens, 30 columns; 6 experts leave one of 4 ranks with none."""

SEQUENCES, LENGTH, STEPS = 4, 16, 1
"""Sizes of one optimizer step, over all ranks, and how many are trained before a save."""


def pipelined(schedule: str, **more: Any) -> dict[str, Any]:
    return {"pipeline_parallel": 2, "pipeline_schedule": schedule, **more}


MATRIX: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "fsdp": (2, {}),
    "tensor": (2, {"tensor_parallel": 2, "sequence_parallel": False}),
    "gpipe": (2, pipelined("GPipe")),
    "experts": (2, {"expert_parallel": 2}),
    "hsdp": (4, {"data_parallel_replicate": 2}),
    "fsdp_and_tensor": (4, {"tensor_parallel": 2}),
    "pipeline_and_fsdp": (4, pipelined("1F1B")),
}
"""Each with its number of ranks and its [parallel] table. Each loads what any of them has saved."""

DEEP: dict[str, tuple[int, dict[str, Any]]] = {
    "deep": (1, {}),
    "interleaved": (2, pipelined("Interleaved1F1B")),
    "pipeline_and_tensor": (4, pipelined("Interleaved1F1B", tensor_parallel=2)),
    "experts_in_pipeline": (4, pipelined("GPipe", expert_parallel=2)),
}
"""Layouts of four layers, where ranks have two stages each, or each stage has experts; all others have two layers."""

OTHERS: dict[str, tuple[int, dict[str, Any]]] = {
    "1f1b": (2, pipelined("1F1B", pipeline_microbatches=4)),
    "context": (2, {"context_parallel": 2, "activation_checkpoint": "full"}),
    "copies": (2, {"data_parallel_replicate": 2, "activation_checkpoint": "selective"}),
    "fsdp_4": (4, {}),
    "context_and_tensor": (4, {"context_parallel": 2, "tensor_parallel": 2, "activation_checkpoint": "selective"}),
    "experts_and_fsdp": (4, {"expert_parallel": 2}),
    "experts_and_tensor": (4, {"expert_parallel": 2, "tensor_parallel": 2}),
    "experts_and_context": (4, {"expert_parallel": 2, "context_parallel": 2}),
    "experts_of_copies": (4, {"expert_parallel": 2, "data_parallel_replicate": 2}),
}
"""Layouts that load what they, and a single process, have saved."""

LAYOUTS = MATRIX | DEEP | OTHERS


def depth(layout: str) -> int:
    """Return how many layers the model has in a layout."""
    return 4 if layout in DEEP else 2


def layouts_of(num_ranks: int) -> list[str]:
    return [name for name, (ranks, _) in LAYOUTS.items() if ranks == num_ranks]


def saves_for(layout: str) -> list[str]:
    """Return the layouts whose saves this one loads."""
    return next(([*alike] for alike in (MATRIX, DEEP) if layout in alike), ["single", layout])


def shape_folder(root: Path, model: str, layers: int = 2) -> Path:
    """Return the folder of a model's config.json."""
    return root / f"{model}-{layers}"


def settings(
    root: Path,
    model: str,
    table: Mapping[str, Any],
    checkpoint: Mapping[str, Any],
    output: Path,
    steps: int = STEPS,
    layers: int = 2,
) -> RunConfig:
    world = dist.get_world_size() if dist.is_initialized() else 1
    share = world // prod(table.get(f"{axis}_parallel", 1) for axis in ("tensor", "pipeline", "context"))
    # Fused AdamW is one operation, where FSDP2 takes long for one of each parameter; it needs parameters of one mesh.
    is_mixed = bool({"tensor_parallel", "expert_parallel"} & table.keys())
    return from_dict(
        RunConfig,
        {
            "output_folder": str(output),
            "model": {"name": model, "folder": str(shape_folder(root, model, layers))},
            "data": {"sequence_length": LENGTH, "cache_folder": str(root / "cache"), "tokenizer": 300},
            "training": {"steps": steps, "batch_size": SEQUENCES // share, "device": "cpu", "max_grad_norm": 1.0},
            "optimizer": {"lr": 3e-3, **({} if is_mixed else {"implementation": "fused"})},
            "schedule": {"warmup_ratio": 0.0},
            "parallel": dict(table),
            "checkpoint": dict(checkpoint),
        },
    )


def write_shapes(root: Path, shapes: Mapping[str, Any] = SHAPES) -> None:
    """Leave a config.json of every model, of two layers and of four."""
    for model, shape in shapes.items():
        for layers in (2, 4):
            folder = shape_folder(root, model, layers)
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(replace(shape, num_layers=layers).to_hf()))


@contextmanager
def built(config: RunConfig, converters: ModelConverter | None = None, *, load: bool = False) -> Iterator[Trainer]:
    trainer = Trainer(config, converters)
    with trainer.setup() as trainer.ranks:
        trainer.build()
        if load:
            with managed(trainer):
                trainer.load()
                yield trainer
        else:
            yield trainer


@contextmanager
def managed(trainer: Trainer) -> Iterator[None]:
    with trainer.build_manager() as trainer.manager, RunGuard(trainer.manager) as trainer.guard:
        yield


def fixed_batch(trainer: Trainer) -> Batch:
    """Return this rank's share of sequences that are the same in every layout."""
    tokens = torch.randint(0, 301, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    share = SEQUENCES // trainer.ranks.data_size
    mine = tokens[trainer.ranks.data_rank * share :][:share]
    return {"tokens": mine[:, :-1], "labels": mine[:, 1:]}


def next_loss(trainer: Trainer) -> float:
    """Return the loss on fixed sequences."""
    loss = trainer.ranks.sum(trainer.measure_loss(fixed_batch(trainer)))
    return float(loss) / (SEQUENCES * LENGTH)


def next_step(trainer: Trainer) -> tuple[float, float]:
    """Return loss and gradient norm on fixed sequences, without a step."""
    loss = trainer.ranks.sum(trainer.accumulate_gradients([fixed_batch(trainer)], SEQUENCES * LENGTH))
    norm = clip_gradients(trainer.trainable(), None, trainer.ranks)
    trainer.optimizer.zero_grad()
    return float(loss) / (SEQUENCES * LENGTH), norm


read_once = cache(read_all)
"""No step changes, and a rank compares what it loads in several layouts with the same ones."""


def assert_holds(trainer: Trainer, step: Path) -> None:
    """Fail unless all that this rank has, weights and optimizer state, is bit for bit what the files have."""
    manager = trainer.manager
    live = take_snapshot(manager._run, STEPS, manager._model.state("full")).tensors
    assert misplaced(live, read_once(step)) == []


def save_in(layout: str, root: Path) -> None:
    """Train a step, save, and leave what the next step's loss would be."""
    output = root / layout
    checkpoint = {"save": {"interval": STEPS, "timeout_seconds": 60}}
    config = settings(root, "qwen3_moe", LAYOUTS[layout][1], checkpoint, output, layers=depth(layout))
    with built(config) as trainer, managed(trainer):
        trainer.load()
        trainer.train()
        assert_holds(trainer, output / "checkpoints" / f"step-{STEPS}")
        result = next_step(trainer)
        if trainer.ranks.rank == 0:
            (output / "next.json").write_text(json.dumps(result))


def load_in(layout: str, root: Path) -> None:
    """Resume from the saves of other layouts in turn: the same bits, and the loss that their writer would have had.

    The loss is measured after loads of what a single process has saved, and of what this layout has.
    """
    config = settings(root, "qwen3_moe", LAYOUTS[layout][1], {}, root / "nothing", layers=depth(layout))
    with built(config) as trainer:
        for saved in saves_for(layout):
            output = root / saved
            erase(trainer)
            folder = CheckpointConfig(str(output / "checkpoints"), resume=ResumeConfig(exclude=("dataloader",)))
            trainer.config = replace(trainer.config, checkpoint=folder)
            with trainer.build_manager() as trainer.manager:
                trainer.load()
                assert trainer.state.step == STEPS
                assert_holds(trainer, output / "checkpoints" / f"step-{STEPS}")
            if saved in (layout, "single", "deep"):
                expected, _ = json.loads((output / "next.json").read_text())
                assert next_loss(trainer) == pytest.approx(expected, abs=1e-6), (saved, layout)


def erase(trainer: Trainer) -> None:
    trainer.optimizer.state.clear()
    with torch.no_grad():
        for parameter in trainer.trainable():
            parameter.fill_(float("nan"))


def everywhere(act: Callable[[str, Path], None], root: Path) -> None:
    """Do something in all layouts that this number of ranks has."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    for layout in layouts_of(world):
        act(layout, root)


def save_and_load(root: Path) -> None:
    """Save and load in one world, because the first operation of each kind on a DTensor takes long."""
    everywhere(save_in, root)
    dist.barrier()  # rank 0 has written what the next loss would be
    everywhere(load_in, root)


def assert_every_layout_loads_what_every_other_one_saves(root: Path) -> None:
    """Fail unless weights and AdamW state are the same bits, on uneven and empty shards too, and the next loss agrees.

    The next loss after a load is within 1e-6 of what its writer would have had.
    """
    write_shapes(root)
    everywhere(save_in, root)
    on_ranks(2, everywhere, save_in, root, timeout_seconds=240)
    on_ranks(4, save_and_load, root, timeout_seconds=480)
    on_ranks(2, everywhere, load_in, root, timeout_seconds=240)
    everywhere(load_in, root)
    for layers, alone in ((2, "single"), (4, "deep")):
        names = [name for n in (1, 2, 4) for name in layouts_of(n) if depth(name) == layers]
        losses = {name: json.loads((root / name / "next.json").read_text()) for name in names}
        assert all(one == pytest.approx(losses[alone], rel=1e-4) for one in losses.values()), losses
