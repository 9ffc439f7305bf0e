"""The load-balancing loss of a mixture of experts: that of transformers, whatever the layout, or a refusal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from tests import tiny_run
from tests.distributed.trainer_layouts import LENGTH, SEQUENCES, SHAPES, built, fixed_batch, settings, shape_folder
from tests.interop.folders import disturb, load
from tests.world import on_ranks
from titan_ckpt.config import from_dict
from titan_ckpt.errors import ConfigError
from titan_ckpt.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig
from titan_ckpt.training.config import RunConfig
from titan_ckpt.training.loss import balance_coefficient
from titan_ckpt.training.tables import ParallelConfig
from titan_ckpt.training.trainer import Trainer

auto: Any = AutoModelForCausalLM  # its methods have no types
MOE = SHAPES["qwen3_moe"]
assert isinstance(MOE, Qwen3MoeConfig)
SHAPE = replace(MOE, output_router_logits=True, router_aux_loss_coef=0.5)
"""A factor so large that a fault in the load-balancing loss alone shows in every gradient below the router."""
ON_TWO: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "tensor": {"tensor_parallel": 2, "sequence_parallel": False},
    "sequence": {"tensor_parallel": 2},
    "experts": {"expert_parallel": 2, "activation_checkpoint": "full"},
    "context": {"context_parallel": 2, "activation_checkpoint": "selective"},
}


def reference(root: Path) -> None:
    """Leave transformers' model, and its loss, load-balancing loss and gradients of one batch."""
    torch.manual_seed(1)
    twin = auto.from_config(AutoConfig.for_model(**SHAPE.to_hf()), experts_implementation="eager")
    disturb(twin)
    twin.save_pretrained(shape_folder(root, "qwen3_moe"))
    tokens = torch.randint(0, 301, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    out = twin(input_ids=tokens[:, :-1], output_router_logits=True)
    balance: Any = load_balancing_loss_func(out.router_logits, SHAPE.num_experts, SHAPE.experts_per_token)
    loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), tokens[:, 1:].flatten())
    (loss + SHAPE.router_aux_loss_coef * balance).backward()
    (root / "expected.json").write_text(json.dumps([loss.item(), balance.item()]))
    for parameter in twin.parameters():
        parameter.data = parameter.grad
    twin.save_pretrained(root / "gradients")  # which gives them their names here when it is loaded


def check(root: Path, table: Mapping[str, Any]) -> None:
    """Fail unless a step in this layout has the losses and gradients of transformers."""
    expected_loss, expected_balance = json.loads((root / "expected.json").read_text())
    gradients = Qwen3Moe(SHAPE)
    load(gradients, root / "gradients")
    output = root / "-".join(["run", *table])
    with built(settings(root, "qwen3_moe", table, {}, output), load=True) as trainer:
        loss = trainer.ranks.sum(trainer.accumulate_gradients([fixed_batch(trainer)], SEQUENCES * LENGTH))
        assert float(loss) / (SEQUENCES * LENGTH) == pytest.approx(expected_loss, abs=1e-6)
        assert trainer.balance_loss is not None
        assert trainer.balance_loss.take_mean() == pytest.approx(expected_balance, abs=1e-6)
        found = dict(trainer.model.named_parameters())
        for name, expected in gradients.named_parameters():
            grad = found[name].grad
            assert grad is not None, name
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            torch.testing.assert_close(whole, expected.detach(), rtol=0, atol=1e-6, msg=name)


def check_all(root: Path, tables: dict[str, dict[str, Any]]) -> None:
    for layout, table in tables.items():
        try:
            check(root, table)
        except AssertionError as error:
            raise AssertionError(f"{layout}: {error}") from error


def test_d3_the_balance_loss_and_all_gradients_are_those_of_transformers_in_every_layout(tmp_path: Path) -> None:
    """Alone, under FSDP2, tensor, sequence, expert and context parallelism, with layers that are computed again."""
    reference(tmp_path)
    check(tmp_path, {})
    on_ranks(2, check_all, tmp_path, ON_TWO)


def test_d3_a_balance_loss_that_cannot_be_computed_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    """Pipelines, models without experts, and a config.json whose wish only transformers would fulfil."""
    for model, shape in {**SHAPES, "qwen3_moe": SHAPE}.items():
        shape_folder(tmp_path, model).mkdir()
        (shape_folder(tmp_path, model) / "config.json").write_text(json.dumps(shape.to_hf()))

    def refusal(name: str, folder: str, coefficient: float | None = None, **parallel: Any) -> str:
        config = settings(tmp_path, folder, {}, {}, tmp_path / "run")
        config = replace(config, model=replace(config.model, name=name), parallel=ParallelConfig(**parallel))
        trainer = Trainer(replace(config, training=replace(config.training, router_aux_loss_coef=coefficient)))
        with pytest.raises(ConfigError) as caught, trainer.setup():
            pass
        return "\n".join(caught.value.problems)

    assert "pipeline_parallel" in refusal("qwen3_moe", "qwen3_moe", pipeline_parallel=2)
    assert "qwen3_moe" in refusal("llama3", "llama3", 0.01)
    assert "output_router_logits" in refusal("hf", "qwen3_moe")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_d3_the_factor_of_the_balance_loss_is_the_runs_or_that_of_config_json() -> None:
    """A config.json that keeps router logits to itself, as those that were published, asks for no such loss."""
    assert Qwen3MoeConfig.from_hf(SHAPE.to_hf()) == SHAPE
    raw = {"output_folder": "run", "model": {"name": "qwen3_moe", "flavor": "debug-1m"}}
    config = from_dict(RunConfig, raw)
    assert (balance_coefficient(config, MOE), balance_coefficient(config, SHAPE)) == (0.0, 0.5)
    config = from_dict(RunConfig, {**raw, "training": {"router_aux_loss_coef": 0.25}})
    assert balance_coefficient(config, MOE) == balance_coefficient(config, SHAPE) == 0.25
    with pytest.raises(ConfigError, match="needs a sparse layer, and all are dense: set it to 0"):
        balance_coefficient(config, replace(SHAPE, dense_layers=tuple(range(SHAPE.num_layers))))


def test_d3_a_run_reports_the_balance_loss_apart_from_that_of_the_tokens(tmp_path: Path) -> None:
    """The least, which an even load has, is the number of experts per token; the largest, here, that of all experts."""
    config = tiny_run.settings(
        tmp_path,
        model={"name": "qwen3_moe", "flavor": "debug-1m"},
        training={"steps": 2, "router_aux_loss_coef": 10.0, "accumulation": 2, "batch_size": 2},
        checkpoint={"save": None},
    )
    Trainer(config).run()
    assert 7 < tiny_run.losses(tmp_path)[0] < 9, "about log(2048), without the 20 of the balance loss"
    assert all(2 <= row["moe/balance_loss"] <= 8 for row in tiny_run.rows(tmp_path))
