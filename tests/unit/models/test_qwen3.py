"""Qwen3 without any other library: what test_own_models.py has not for every model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from titan_ckpt.errors import ConfigError
from titan_ckpt.models.qwen3 import FLAVORS, Qwen3

TINY = replace(FLAVORS["debug-0.5m"], vocab_size=64, max_seq_len=32)


def test_a_heads_width_does_not_follow_from_the_models() -> None:
    """The projections and the per-head norms have the width that the config says."""
    attention = Qwen3(replace(TINY, head_dim=10)).layers["0"].get_submodule("attention")
    shapes = {name: tuple(p.shape) for name, p in attention.named_parameters()}
    assert shapes["wq.weight"] == (40, 96)
    assert shapes["wo.weight"] == (96, 40)
    assert shapes["q_norm.weight"] == shapes["k_norm.weight"] == (10,)


def test_queries_and_keys_are_normalised_per_head() -> None:
    """Scaling the projections of queries and keys changes nothing but rounding; of values it does."""
    torch.manual_seed(0)
    model = Qwen3(TINY)
    model.init_weights()
    tokens = torch.randint(0, 64, (1, 20))
    with torch.no_grad():
        before = model(tokens)
        for layer in model.layers.children():
            layer.get_parameter("attention.wq.weight").mul_(1000)
            layer.get_parameter("attention.wk.weight").mul_(1000)
        scaled = model(tokens)
        model.layers["0"].get_parameter("attention.wv.weight").mul_(1000)
        other = model(tokens)
    assert (scaled - before).abs().max() < 1e-2 * before.abs().max()
    assert (other - before).abs().max() > 1e-1 * before.abs().max()


def test_a_shape_that_cannot_be_is_refused_with_every_reason() -> None:
    """Heads that do not divide into groups, and rotary pairs of an odd width, are found before anything is built."""
    with pytest.raises(ConfigError) as caught:
        replace(TINY, num_kv_heads=3, head_dim=7)
    assert {p.split(":")[0] for p in caught.value.problems} == {"num_kv_heads", "head_dim"}
