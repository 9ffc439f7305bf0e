"""How layers run, compiled or in bfloat16, beside every kind of parallelism: the loss of one process in float32."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch

from tests.distributed.trainer_layouts import LAYOUTS, SHAPES, built, depth, next_step, settings, write_shapes
from tests.faults.scenarios import SOAK
from tests.world import on_ranks

COMPILED = ("1f1b", "context", "experts", *(["interleaved"] if SOAK else []))
IN_BFLOAT16 = ("fsdp", "tensor", "gpipe", "experts")
"""FSDP2 computes in bfloat16 by itself; without it autocast does, over weights in float32."""


def step_in(
    layout: str, root: Path, compute_dtype: Literal["float32", "bfloat16"] = "float32", **table: Any
) -> tuple[float, float]:
    """Return loss and gradient norm of a mixture of experts."""
    table = {**LAYOUTS[layout][1], **table}
    config = settings(root, "qwen3_moe", table, {}, root / "nothing", layers=depth(layout))
    training = replace(config.training, compute_dtype=compute_dtype)
    with built(replace(config, training=training), load=True) as trainer:
        return next_step(trainer)


def in_every_layout(root: Path, expected: dict[int, tuple[float, float]]) -> None:
    for layout in IN_BFLOAT16:
        assert step_in(layout, root, "bfloat16") == pytest.approx(expected[2], rel=2e-2), layout
    for layout in COMPILED:
        quick = partial(torch.compile, backend="aot_eager")  # traces layers without generating code
        with mock.patch.object(torch, "compile", quick):
            found = step_in(layout, root, compile=True)
        assert found == pytest.approx(expected[depth(layout)], rel=1e-4), layout


@pytest.mark.timeout(600)  # the compiler is slow where cores are few
@pytest.mark.filterwarnings("default")  # the compiler imports and reads what torch itself warns about
@pytest.mark.filterwarnings("error:Mismatch dtype between input and weight")
def test_layers_compute_the_same_compiled_and_in_bfloat16(tmp_path: Path) -> None:
    """Loss and gradient norm agree, to rounding, and norms take inputs of another dtype than their weights."""
    shape: Any = SHAPES["qwen3_moe"]
    write_shapes(tmp_path, {"qwen3_moe": replace(shape, num_experts=4)})  # their computations are compiled one by one
    expected = {depth(alone): step_in(alone, tmp_path) for alone in ("single", *(["deep"] if SOAK else []))}
    assert step_in("single", tmp_path, "bfloat16") == pytest.approx(expected[2], rel=2e-2)
    on_ranks(2, in_every_layout, tmp_path, expected, timeout_seconds=240)
