"""Qwen3 without any other library: shapes, initial values, table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from titan_ckpt.errors import ConfigError
from titan_ckpt.models.qwen3 import FLAVORS, Qwen3, Qwen3Config

TRUE_SIZES = {"0.6B": 596_049_920, "1.7B": 1_720_574_976, "4B": 4_022_468_096, "8B": 8_190_735_360}
TINY = replace(FLAVORS["debug-0.5m"], vocab_size=64, max_seq_len=32)


@pytest.mark.parametrize("flavor", list(TRUE_SIZES))
def test_the_true_shapes_have_the_published_number_of_parameters(flavor: str) -> None:
    """A model built on meta counts what was published for this shape."""
    with torch.device("meta"):
        model = Qwen3(FLAVORS[flavor])
    assert sum(p.numel() for p in model.parameters()) == TRUE_SIZES[flavor]


@pytest.mark.parametrize("flavor", list(FLAVORS))
def test_the_table_knows_every_parameter_and_the_config_survives_hugging_face(flavor: str) -> None:
    """Every fqn has a file key that leads back to it, and config.json gives the same shape again."""
    with torch.device("meta"):
        model = Qwen3(FLAVORS[flavor])
    table = model.key_map()
    for fqn in model.state_dict():
        group = table.group_of_fqn(fqn)
        assert table.group_of_key(group.keys[0]) == group
    assert Qwen3Config.from_hf(model.hf_config()) == FLAVORS[flavor]


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


def test_a_few_steps_learn_a_batch_by_heart() -> None:
    """Gradients reach every parameter, and the loss of one batch falls by more than half."""
    torch.manual_seed(0)
    model = Qwen3(TINY)
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 64, (4, 17))
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
        optimizer.step()
    assert losses[-1] < losses[0] / 2


def test_a_shape_that_cannot_be_is_refused_with_every_reason() -> None:
    """Heads that do not divide into groups, and rotary pairs of an odd width, are found before anything is built."""
    with pytest.raises(ConfigError) as caught:
        replace(TINY, num_kv_heads=3, head_dim=7)
    assert {p.split(":")[0] for p in caught.value.problems} == {"num_kv_heads", "head_dim"}


def test_a_config_this_model_cannot_represent_lists_every_reason() -> None:
    """All faults of a foreign config.json come in one error."""
    config = TINY.to_hf()
    del config["head_dim"]
    config |= {"use_sliding_window": True, "rope_parameters": {"rope_type": "yarn"}}
    with pytest.raises(ConfigError) as caught:
        Qwen3Config.from_hf(config)
    assert {p.split(":")[0] for p in caught.value.problems} == {
        "use_sliding_window", "head_dim", "rope_parameters.rope_type",
    }  # fmt: skip
    assert 'model.name = "hf"' in str(caught.value), "it takes the rotary embedding that this one lacks"


def test_a_config_of_another_model_names_the_setting_that_takes_it() -> None:
    """Its other settings are no faults of their own."""
    config = TINY.to_hf() | {"model_type": "qwen2", "attention_bias": True}
    with pytest.raises(ConfigError, match=r'model\.name = "hf"') as caught:
        Qwen3Config.from_hf(config)
    assert len(caught.value.problems) == 1


def test_the_published_spelling_of_a_config_is_read() -> None:
    """The folders on the hub were written by transformers 4: rope_theta at the top, an empty scaling beside it."""
    old = FLAVORS["0.6B"].to_hf()
    del old["rope_parameters"]
    old |= {"rope_theta": 1000000, "rope_scaling": None, "sliding_window": None, "max_window_layers": 28}
    assert Qwen3Config.from_hf(old) == FLAVORS["0.6B"]
