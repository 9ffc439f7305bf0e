"""Laws of every model of ours, without any other library: sizes, table, config.json, learning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.world import same, whole
from titan_ckpt.errors import ConfigError
from titan_ckpt.models import llama3, qwen3, qwen3_moe

FAMILIES: dict[str, tuple[Any, Any, Any]] = {
    "llama3": (llama3, llama3.Llama3, llama3.Llama3Config),
    "qwen3": (qwen3, qwen3.Qwen3, qwen3.Qwen3Config),
    "qwen3_moe": (qwen3_moe, qwen3_moe.Qwen3Moe, qwen3_moe.Qwen3MoeConfig),
}
FLAVORS = [(name, flavor) for name, (family, *_) in FAMILIES.items() for flavor in family.FLAVORS]
TRUE_SIZES = {
    ("llama3", "1B"): 1_235_814_400, ("llama3", "3B"): 3_212_749_824, ("llama3", "8B"): 8_030_261_248,
    ("llama3", "70B"): 70_553_706_496, ("qwen3", "0.6B"): 596_049_920, ("qwen3", "1.7B"): 1_720_574_976,
    ("qwen3", "4B"): 4_022_468_096, ("qwen3", "8B"): 8_190_735_360, ("qwen3_moe", "30B-A3B"): 30_532_122_624,
}  # fmt: skip


def debug(name: str) -> Any:
    """Return the smallest shape of a family."""
    return next(iter(FAMILIES[name][0].FLAVORS.values()))


def built(name: str, config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = FAMILIES[name][1](config)
    model.init_weights()
    return model


@pytest.mark.parametrize(("name", "flavor"), TRUE_SIZES)
def test_the_true_shapes_have_the_published_number_of_parameters(name: str, flavor: str) -> None:
    """A model built on meta counts what was published for this shape."""
    family, kind, _ = FAMILIES[name]
    with torch.device("meta"):
        model = kind(family.FLAVORS[flavor])
    assert sum(p.numel() for p in model.parameters()) == TRUE_SIZES[name, flavor]
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize(("name", "flavor"), FLAVORS)
def test_the_table_knows_every_parameter_and_the_config_survives_hugging_face(name: str, flavor: str) -> None:
    """Every fqn has file keys, one per expert where it is stacked, and config.json gives the same shape again."""
    family, kind, config_of = FAMILIES[name]
    config = family.FLAVORS[flavor]
    with torch.device("meta"):
        model = kind(config)
    table = model.key_map()
    for fqn, value in model.state_dict().items():
        group = table.group_of_fqn(fqn)
        assert len(group.keys) == (config.num_experts if ".experts." in fqn else 1)
        assert group.op.native_shapes(group.op.file_shapes([tuple(value.shape)])) == [tuple(value.shape)]
        assert table.group_of_key(group.keys[-1]) == group
    assert config_of.from_hf(model.hf_config()) == config


@pytest.mark.parametrize("name", FAMILIES)
def test_init_weights_depends_on_the_seed_alone(name: str) -> None:
    """Two models initialized from one seed are the same, from another seed they are not."""
    one, again, other = (built(name, debug(name), seed).state_dict() for seed in (1, 1, 2))
    assert same(one, again)
    assert not torch.equal(one["tok_embeddings.weight"], other["tok_embeddings.weight"])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_few_steps_learn_a_batch_by_heart(name: str) -> None:
    """Gradients reach every parameter, routers included, and the loss of one batch falls by more than half."""
    model = built(name, replace(debug(name), num_layers=2, vocab_size=64, max_seq_len=32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)  # so that only gradients change values
    tokens = torch.randint(0, 64, (4, 17))
    before, losses = whole(model.state_dict()), []
    for _ in range(15):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
    assert losses[-1] < losses[0] / 2
    assert not [fqn for fqn, value in model.state_dict().items() if torch.equal(value, before[fqn])]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_rotary_table_survives_casting_and_materializing_and_is_never_saved(name: str) -> None:
    """Neither `.to(bfloat16)` nor meta -> to_empty leaves a rounded or a garbage table."""
    kind, config = FAMILIES[name][1], debug(name)
    with torch.device("meta"):
        model = kind(config)
    assert not [key for key in model.state_dict() if "rope" in key]
    expected = kind(config).rope_table
    for table in (model.to_empty(device="cpu").rope_table, kind(config).to(torch.bfloat16).rope_table):
        assert table.is_complex() and torch.equal(table, expected)


@pytest.mark.parametrize(
    ("name", "missing", "foreign"),
    [
        ("llama3", "vocab_size", {"attention_bias": True}),
        ("qwen3", "head_dim", {"use_sliding_window": True}),
        ("qwen3_moe", "num_experts", {"use_sliding_window": True}),
    ],
)
def test_a_config_this_model_cannot_represent_lists_every_reason(
    name: str, missing: str, foreign: dict[str, Any]
) -> None:
    """All faults of a foreign config.json come in one error, which names the setting that takes it."""
    config = debug(name).to_hf() | foreign | {"rope_parameters": {"rope_type": "yarn"}}
    del config[missing]
    with pytest.raises(ConfigError, match=r'model\.name = "hf"') as caught:
        FAMILIES[name][2].from_hf(config)
    assert {p.split(":")[0] for p in caught.value.problems} == {*foreign, missing, "rope_parameters.rope_type"}


@pytest.mark.parametrize("key", ["norm_topk_prob", "num_experts_per_tok", "hidden_size"])
def test_a_key_without_a_value_is_missing(key: str) -> None:
    """transformers refuses it too; a default in its place could compute something else."""
    with pytest.raises(ConfigError, match=f"{key}: missing"):
        FAMILIES["qwen3_moe"][2].from_hf(debug("qwen3_moe").to_hf() | {key: None})


@pytest.mark.parametrize(("name", "other", "setting"), [("llama3", "qwen3", "qwen3"), ("qwen3", "qwen2", "hf")])
def test_a_config_of_another_model_names_the_setting_that_takes_it(name: str, other: str, setting: str) -> None:
    """Its other settings are no faults of their own."""
    config = debug(name).to_hf() | {"model_type": other, "attention_bias": True}
    with pytest.raises(ConfigError, match=rf'model\.name = "{setting}"') as caught:
        FAMILIES[name][2].from_hf(config)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(("name", "flavor"), [("llama3", "1B"), ("qwen3", "0.6B")])
def test_the_older_spelling_of_a_config_is_read(name: str, flavor: str) -> None:
    """transformers 4, as in folders on the hub, wrote rope_theta at the top and the scaling beside it, also empty."""
    family, _, config_of = FAMILIES[name]
    old = family.FLAVORS[flavor].to_hf()
    rope = old.pop("rope_parameters")
    old |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope if name == "llama3" else None}
    old |= {} if name == "llama3" else {"sliding_window": None, "max_window_layers": 28}
    assert config_of.from_hf(old) == family.FLAVORS[flavor]


def test_a_shape_that_cannot_be_is_refused_with_every_reason() -> None:
    """Heads that do not divide into groups, and rotary pairs of an odd width, are found before anything is built."""
    with pytest.raises(ConfigError) as caught:
        replace(debug("qwen3"), num_kv_heads=3, head_dim=7)
    assert {p.split(":")[0] for p in caught.value.problems} == {"num_kv_heads", "head_dim"}
