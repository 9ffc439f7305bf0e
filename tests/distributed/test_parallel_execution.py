"""How layers run, compiled or in bfloat16, beside every kind of parallelism: the loss of one process in float32."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch

from tests.distributed.trainer_layouts import LAYOUTS, SHAPES, built, next_step, settings
from tests.faults.scenarios import SOAK
from tests.world import on_ranks

COMPILED = ("1f1b", "context", "experts", *(["interleaved"] if SOAK else []))
IN_BFLOAT16 = ("fsdp", "tensor", "gpipe", "experts")
"""FSDP2 computes in bfloat16 by itself; without it autocast does, over weights in float32."""
LAYERS = {"interleaved": 4}
"""The other layouts have two layers, one of them with experts, which compile in half the time."""


def step_in(
    layout: str, root: Path, layers: int, compute_dtype: Literal["float32", "bfloat16"] = "float32", **table: Any
) -> tuple[float, float]:
    """Return loss and gradient norm of a mixture of experts."""
    config = settings(root / str(layers), "qwen3_moe", {**LAYOUTS[layout][1], **table}, {}, root / "nothing")
    training = replace(config.training, compute_dtype=compute_dtype)
    with built(replace(config, training=training), load=True) as trainer:
        return next_step(trainer)


def in_every_layout(root: Path, expected: dict[int, tuple[float, float]]) -> None:
    for layout in IN_BFLOAT16:
        assert step_in(layout, root, 2, "bfloat16") == pytest.approx(expected[2], rel=2e-2), layout
    for layout in COMPILED:
        layers = LAYERS.get(layout, 2)
        quick = partial(torch.compile, backend="aot_eager")  # traces layers without generating code
        with mock.patch.object(torch, "compile", quick):
            found = step_in(layout, root, layers, compile=True)
        assert found == pytest.approx(expected[layers], rel=1e-4), layout


@pytest.mark.timeout(600)  # the compiler is slow where cores are few
@pytest.mark.filterwarnings("default")  # the compiler imports and reads what torch itself warns about
@pytest.mark.filterwarnings("error:Mismatch dtype between input and weight")
def test_layers_compute_the_same_compiled_and_in_bfloat16(tmp_path: Path) -> None:
    """Loss and gradient norm agree, to rounding, and norms take inputs of another dtype than their weights."""
    expected = {}
    for layers in {2, *LAYERS.values()} if SOAK else {2}:
        folder = tmp_path / str(layers) / "qwen3_moe"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(replace(SHAPES["qwen3_moe"], num_layers=layers).to_hf()))
        expected[layers] = step_in("single", tmp_path, layers)
    assert step_in("single", tmp_path, 2, "bfloat16") == pytest.approx(expected[2], rel=2e-2)
    on_ranks(2, in_every_layout, tmp_path, expected, timeout_seconds=240)
