"""Llama 3 without any other library: shapes, initial values, buffers, table."""

from __future__ import annotations

import pytest
import torch

from titan_ckpt.errors import ConfigError, KeyMapError
from titan_ckpt.models.llama3 import FLAVORS, Llama3, Llama3Config, rotary_table

TRUE_SIZES = {"1B": 1_235_814_400, "3B": 3_212_749_824, "8B": 8_030_261_248, "70B": 70_553_706_496}


@pytest.mark.parametrize("flavor", list(TRUE_SIZES))
def test_the_true_shapes_have_the_published_number_of_parameters(flavor: str) -> None:
    """A model built on meta counts what Meta published for this shape."""
    with torch.device("meta"):
        model = Llama3(FLAVORS[flavor])
    assert sum(p.numel() for p in model.parameters()) == TRUE_SIZES[flavor]
    assert all(p.is_meta for p in model.parameters())


def test_debug_flavors_span_half_a_million_to_twenty_million_parameters() -> None:
    """Small models exist in the sizes that fit a laptop's test run."""
    sizes = {}
    for name, config in FLAVORS.items():
        if name.startswith("debug"):
            sizes[name] = sum(p.numel() for p in Llama3(config).parameters())
    assert list(sizes.values()) == sorted(sizes.values())
    assert 0.4e6 < min(sizes.values()) < 0.6e6
    assert 15e6 < max(sizes.values()) < 21e6


def test_init_weights_depends_on_the_seed_alone() -> None:
    """Two models initialised from one seed are the same, from another seed they are not."""
    models = [Llama3(FLAVORS["debug-0.5m"]) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        torch.manual_seed(seed)
        model.init_weights()
    one, same, other = (m.state_dict() for m in models)
    assert all(torch.equal(one[k], same[k]) for k in one)
    assert not torch.equal(one["tok_embeddings.weight"], other["tok_embeddings.weight"])


def test_the_rotary_table_survives_casting_and_materialising() -> None:
    """Neither `.to(bfloat16)` nor meta -> to_empty leaves a rounded or a garbage table."""
    config = FLAVORS["debug-0.5m"]
    expected = rotary_table(config)
    assert torch.equal(Llama3(config).to(torch.bfloat16).rope_table, expected)
    with torch.device("meta"):
        model = Llama3(config)
    assert torch.equal(model.to_empty(device="cpu").rope_table, expected)


def test_the_rotary_table_is_in_no_state_dict() -> None:
    """The table is recomputed, never saved."""
    assert not [k for k in Llama3(FLAVORS["debug-0.5m"]).state_dict() if "rope" in k]


def test_a_position_sees_nothing_after_it() -> None:
    """Changing the last token leaves every earlier position's logits as they were, bit for bit."""
    model = Llama3(FLAVORS["debug-2m"])
    torch.manual_seed(0)
    model.init_weights()
    tokens = torch.randint(0, 2048, (2, 17))
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 2048
    a, b = model(tokens), model(changed)
    assert torch.equal(a[:, :-1], b[:, :-1])
    assert not torch.equal(a[:, -1], b[:, -1])


def test_a_sequence_longer_than_the_table_is_refused() -> None:
    """The message names both lengths."""
    model = Llama3(FLAVORS["debug-0.5m"])
    with pytest.raises(ValueError, match=r"1025 tokens are longer than max_seq_len 1024"):
        model(torch.zeros(1, 1025, dtype=torch.long))


def test_removed_layers_leave_the_names_of_the_others() -> None:
    """Two stages cut from one model hold disjoint names that together are the whole model's, and compute the same."""
    config = FLAVORS["debug-2m"]
    torch.manual_seed(0)
    whole = Llama3(config)
    whole.init_weights()
    first, second = Llama3(config), Llama3(config)
    for stage in (first, second):
        stage.load_state_dict(whole.state_dict())
    for i in range(4):
        del (second if i < 2 else first).layers[str(i)]
    first.norm = first.output = None
    second.tok_embeddings = None
    assert set(first.state_dict()).isdisjoint(second.state_dict())
    assert set(first.state_dict()) | set(second.state_dict()) == set(whole.state_dict())
    tokens = torch.randint(0, 2048, (1, 9))
    assert torch.equal(second(first(tokens)), whole(tokens))


@pytest.mark.parametrize("flavor", list(FLAVORS))
def test_the_table_knows_every_parameter_and_the_config_survives_hugging_face(flavor: str) -> None:
    """Every fqn has a file key that leads back to it, and config.json gives the same shape again."""
    with torch.device("meta"):
        model = Llama3(FLAVORS[flavor])
    table = model.key_map()
    for fqn in model.state_dict():
        group = table.group_of_fqn(fqn)
        assert table.group_of_key(group.keys[0]) == group
    assert Llama3Config.from_hf(model.hf_config()) == FLAVORS[flavor]


def test_an_unknown_parameter_name_raises_with_the_nearest_known() -> None:
    """A converter that renamed a weight is found out by the table."""
    with pytest.raises(KeyMapError, match=r"attention\.wq\.weight"):
        Llama3(FLAVORS["debug-0.5m"]).key_map().group_of_fqn("layers.0.attention.wq.base.weight")


def test_a_config_this_model_cannot_represent_lists_every_reason() -> None:
    """All faults of a foreign config.json come in one error."""
    config = Llama3(FLAVORS["debug-0.5m"]).hf_config()
    del config["vocab_size"]
    config |= {"attention_bias": True, "rope_parameters": {"rope_type": "yarn"}}
    with pytest.raises(ConfigError) as caught:
        Llama3Config.from_hf(config)
    assert {p.split(":")[0] for p in caught.value.problems} == {
        "attention_bias", "vocab_size", "rope_parameters.rope_type",
    }  # fmt: skip


def test_a_config_of_another_model_names_the_setting_that_takes_it() -> None:
    """Its other settings are no faults of their own."""
    config = Llama3(FLAVORS["debug-0.5m"]).hf_config() | {"model_type": "qwen3", "attention_bias": True}
    with pytest.raises(ConfigError, match=r'model\.name = "qwen3"') as caught:
        Llama3Config.from_hf(config)
    assert len(caught.value.problems) == 1


def test_the_older_spelling_of_a_config_is_read() -> None:
    """transformers 4 wrote rope_theta at the top and the scaling beside it."""
    config = Llama3Config.from_hf(FLAVORS["1B"].to_hf())
    old = FLAVORS["1B"].to_hf()
    rope = old.pop("rope_parameters")
    old |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    assert Llama3Config.from_hf(old) == config
