"""A base and an adapter from outside, loaded straight into the shards of every layout, and trained there."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.distributed.trainer_layouts import LAYOUTS, built, depth, managed, next_step, settings, write_shapes
from tests.world import misplaced, on_ranks, part, same
from titan_ckpt.converters import from_tables
from titan_ckpt.geometry.chunks import blocks_of
from titan_ckpt.testing import distributed
from titan_ckpt.training.trainer import Trainer

LORA = {"kind": "lora", "rank": 3, "target_modules": ["wq", "wk", "wv", "wo"]}
DENSE = {"kind": "lora", "rank": 3, "target_modules": ["wq", "wk", "wv", "wo", "w1", "w2", "output"]}
RUNS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "llama3": (DENSE, [name for name, (_, table) in LAYOUTS.items() if "expert_parallel" not in table]),
    "qwen3_moe": (LORA, [name for name, (_, table) in LAYOUTS.items() if "expert_parallel" in table]),
}
"""Each with what is adapted and the layouts: all there are."""


def place(root: Path, model: str, layers: int = 2) -> Path:
    """Return the folder of the sources of a model, and of its values."""
    return root / f"sources-{model}-{layers}"


def write_sources(root: Path, model: str, alone: str = "single") -> None:
    """Train and export a base, then an adapter on it; leave what a single process makes of both."""
    layers = depth(alone)
    base, adapter = (place(root, model, layers) / name for name in ("base", "adapter"))
    save = {"save": {"interval": 2}}
    first = {**save, "export": {"format": "hf", "folder": "."}}
    with built(settings(root, model, {}, first, base, 2, layers)) as trainer:
        finish(trainer)
    initial = {"initial_load": [{"path": str(base / "step-2")}]}
    lora = from_tables([RUNS[model][0]])
    export = {"format": "peft", "folder": "."}
    with built(settings(root, model, {}, {**save, **initial, "export": export}, adapter, 2, layers), lora) as trainer:
        finish(trainer)
    with loaded(root, model, alone) as trainer:
        torch.save(trainer.model.state_dict(), base.parent / "truth.pt")
        (base.parent / "next.json").write_text(json.dumps(next_step(trainer)))


def finish(trainer: Trainer) -> None:
    with managed(trainer):
        trainer.load()
        trainer.train()


def loaded(root: Path, model: str, layout: str) -> Any:
    folder = place(root, model, depth(layout))
    sources = [{"path": str(folder / "base/step-2")}, {"path": str(folder / "adapter/step-2-peft")}]
    config = settings(
        root, model, LAYOUTS[layout][1], {"initial_load": sources}, root / "nothing", layers=depth(layout)
    )
    return built(config, from_tables([RUNS[model][0]]), load=True)


def merged_into_base(root: Path, layout: str, adapter: Path) -> Any:
    """Build the model without converters, from its base and an adapter that is merged into it."""
    sources = [{"path": str(place(root, "llama3") / "base/step-2")}, {"path": str(adapter), "load": "merge"}]
    return built(settings(root, "llama3", LAYOUTS[layout][1], {"initial_load": sources}, root / "nothing"), load=True)


def tensors_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {fqn: value for stage in trainer.model_parts for fqn, value in stage.state_dict().items()}


def assert_holds_part_of(truth: dict[str, torch.Tensor], trainer: Trainer) -> None:
    held = tensors_of(trainer)
    assert held and misplaced(held, truth) == []


@distributed(nproc=2)
def adapter_steps_on_2(root: Path) -> None:
    """Load, resume and merge the adapter's own step, and load its DCP folder, in each of the layouts."""
    folder = place(root, "llama3")
    truth, merged = (torch.load(folder / name) for name in ("truth.pt", "merged.pt"))
    step = folder / "adapter/checkpoints/step-2"
    for layout in ("fsdp", "tensor", "gpipe"):
        for adapter in (step, root / "dcp") if layout == "fsdp" else (step,):
            sources = [{"path": str(folder / "base/step-2")}, {"path": str(adapter)}]
            checkpoint = {"initial_load": sources, "save": {"interval": 1}}
            config = settings(root, "llama3", LAYOUTS[layout][1], checkpoint, root / f"{layout}-{adapter.name}", 2)
            lora = from_tables([DENSE])
            with built(config, lora, load=True) as trainer:
                assert trainer.state.step == 0
                assert_holds_part_of(truth, trainer)
                trainer.train()
                trained = {name: value.clone() for name, value in tensors_of(trainer).items()}
            with built(config, lora, load=True) as trainer:
                assert trainer.state.step == 2
                assert same(tensors_of(trainer), trained)
        with merged_into_base(root, layout, step) as trainer:
            for fqn, value in tensors_of(trainer).items():
                for block in blocks_of(value):
                    torch.testing.assert_close(block.data, part(merged[fqn], block.chunk), rtol=1e-6, atol=1e-7)


def assert_loads_and_trains(root: Path, model: str, layout: str) -> None:
    folder = place(root, model, depth(layout))
    truth = torch.load(folder / "truth.pt")
    with loaded(root, model, layout) as trainer:
        assert_holds_part_of(truth, trainer)
        trained = set(trainer.trainable())
        named = [one for part in trainer.model_parts for one in part.named_parameters()]
        assert {fqn for fqn, p in named if p in trained} == {fqn for fqn, _ in named if "lora_" in fqn}
        expected = json.loads((folder / "next.json").read_text())
        assert next_step(trainer) == pytest.approx(expected, rel=1e-5), layout


def everywhere(root: Path, num_ranks: int) -> None:
    for model, (_, layouts) in RUNS.items():
        for layout in layouts:
            if LAYOUTS[layout][0] == num_ranks:
                assert_loads_and_trains(root, model, layout)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all sources."""
    root = tmp_path_factory.mktemp("sources")
    write_shapes(root)
    for model in RUNS:
        for alone in ("single", "deep"):
            write_sources(root, model, alone)
    return root


def test_a4_an_adapter_step_loads_resumes_and_merges_on_two_ranks(root: Path) -> None:
    """A native adapter step under FSDP2, tensor and pipeline parallelism, merged too; a DCP folder under FSDP2."""
    folder = place(root, "llama3")
    adapter = {name: value for name, value in torch.load(folder / "truth.pt").items() if "lora_" in name}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # dcp in one process, as meant here
        dcp.save(adapter, checkpoint_id=root / "dcp")
    with merged_into_base(root, "single", folder / "adapter/checkpoints/step-2") as trainer:
        torch.save(trainer.model.state_dict(), folder / "merged.pt")
    adapter_steps_on_2(root)


def test_a4_a_base_and_an_adapter_load_into_every_layout(root: Path) -> None:
    """Every shard has the bits of its place; loss and adapter gradients are those of one process."""
    for num_ranks in (1, 2, 4):
        on_ranks(num_ranks, everywhere, root, num_ranks)
