"""Models of transformers under their own names: tables found, buffers kept, ties kept, errors."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tests import world
from tests.interop.tasks import made
from titan_ckpt import converters
from titan_ckpt.errors import ConfigError, KeyMapError
from titan_ckpt.geometry.chunks import Block, Chunk
from titan_ckpt.geometry.keymap import IDENTITY, Chain, Concat, KeyMap, Split, Transpose, Unstack
from titan_ckpt.models import hf
from titan_ckpt.models.hf_keys import find_key_map
from titan_ckpt.weights.initialize import construct, initialize_missing, materialize
from titan_ckpt.weights.wrapper import ModelWrapper

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 40,
    "num_experts": 5,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Five experts, so that nothing divides."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma3_text": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "phi3": {},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 40},
    "gpt_neox": {},
    "mamba": {"state_size": 4},
    "gpt_oss": {},
    "qwen3_moe": {},
    "mixtral": {},
    "phimoe": {},
    "granitemoe": {},
    "jamba": {"mamba_d_state": 4, "use_mamba_kernels": False},
    "deepseek_v3": {
        "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "v_head_dim": 8,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "first_k_dense_replace": 1,
    },
    "kimi_linear": {},
    "deepseek_v4": {"n_routed_experts": 8},
}  # fmt: skip
"""Plain, tied, with two kinds of layers, without attention, renamed, stacked, fused, split, and all of it at once."""


def config(family: str) -> dict[str, Any]:
    own = {} if family == "gpt2" else SMALL
    return {"model_type": family, "vocab_size": 64, **own, **FAMILIES[family]}


def on_meta(family: str) -> PreTrainedModel:
    """Return transformers' own model, of which kimi_linear and deepseek_v4 are built in their default sizes."""
    raw = (
        config(family)
        if family not in ("kimi_linear", "deepseek_v4")
        else {"model_type": family, "num_hidden_layers": 4}
    )
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model: PreTrainedModel = make(AutoConfig.for_model(**raw))
    return model


def placed(table: KeyMap, natives: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the file tensors that the table makes, by its views."""
    files: dict[str, torch.Tensor] = {}
    for fqn, value in natives.items():
        group = table.group_of_fqn(fqn)
        shapes = [tuple(natives[name].shape) for name in group.fqns]
        for key, shape in zip(group.keys, group.op.file_shapes(shapes), strict=True):
            files.setdefault(key, torch.full(shape, -1, dtype=value.dtype))
        block = Block(Chunk.whole(value.shape), value)
        for chunk, view, key in group.op.pieces(group.fqns.index(fqn), shapes, block, group.keys):
            files[key][chunk.within(Chunk.whole(files[key].shape))] = view.reshape(chunk.sizes)
    return files


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("kimi_linear", "deepseek_v4")])
def test_the_table_writes_what_save_pretrained_writes(family: str) -> None:
    """True-sized values, arranged by the table, are key by key what transformers' own conversion makes of them."""
    model = on_meta(family)
    natives = {
        fqn: torch.arange(value.numel()).view(value.shape) + 1000 * i
        for i, (fqn, value) in enumerate(ModelWrapper([model]).state_dict().items())
    }
    expected = revert_weight_conversion(model, dict(natives))
    found = placed(find_key_map(model), natives)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_a_parameter_without_elements_is_found_as_any_other(tmp_path: Path) -> None:
    """A DINOv3 has no register tokens unless its config says how many."""
    make: Any = transformers.DINOv3ViTModel
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    models = [make(AutoConfig.for_model("dinov3_vit", **sizes, image_size=32)) for _ in range(2)]
    assert 0 in models[0].embeddings.register_tokens.shape
    models[0].save_pretrained(tmp_path / "base")
    world.load(world.manager(tmp_path / "run", models[1], initial_load=[tmp_path / "base"]))
    assert world.same(dict(models[0].state_dict()), dict(models[1].state_dict()))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_table_has_one_row_for_all_layers_and_leads_back(family: str) -> None:
    """Rows have placeholders for layers, and every file key's group is the one of its parameter."""
    model = on_meta(family)
    table = find_key_map(model)
    assert len(table.rules) < 40
    assert all(name.count("{n0}") == name.count("layers.") for rule in table.rules for name in rule.native)
    for fqn in ModelWrapper([model]).state_dict():
        group = table.group_of_fqn(fqn)
        assert table.group_of_key(group.keys[0]) == table.group_of_key(group.keys[-1]) == group


@pytest.mark.parametrize(
    ("family", "fqn", "kind"),
    [
        ("llama", "model.layers.1.mlp.up_proj.weight", type(IDENTITY)),
        ("qwen3_moe", "model.layers.1.mlp.experts.gate_up_proj", Chain),
        ("mixtral", "model.layers.1.mlp.experts.down_proj", Unstack),
        ("kimi_linear", "model.layers.0.self_attn.conv1d.weight", Split),
    ],
)
def test_what_is_fused_in_memory_is_apart_on_disk(family: str, fqn: str, kind: type) -> None:
    """The operation is found from what transformers' code does, not from names."""
    assert type(find_key_map(on_meta(family)).group_of_fqn(fqn).op) is kind


class Odd(nn.Module):
    """Parameters for conversions that no causal language model has."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"a": (30, 7), "b": (40, 7), "c": (6, 9), "d": (6, 4), "e": (5, 6, 7), "f": (3,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


def odd(monkeypatch: pytest.MonkeyPatch, change: Any) -> KeyMap:
    monkeypatch.setattr(
        "transformers.core_model_loading.revert_weight_conversion", lambda model, tensors: change(tensors)
    )
    model: Any = Odd()
    return find_key_map(model)


def test_concatenated_and_transposed_tensors_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several parameters in one file tensor, a transpose, and transposed experts are told apart by values."""

    def change(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        experts = {f"e.{i}": matrix.T for i, matrix in enumerate(t["e"])}
        return {"ba": torch.cat([t["b"], t["a"]]), "c": t["c"].T, "x.d": t["d"], "f": t["f"], **experts}

    table = odd(monkeypatch, change)
    assert table.group_of_fqn("a") == table.group_of_fqn("b")
    assert table.group_of_fqn("a").fqns == ("b", "a")
    assert table.group_of_fqn("a").op == Concat((40, 30))
    assert isinstance(table.group_of_fqn("c").op, Transpose)
    assert table.group_of_fqn("d").keys == ("x.d",)
    assert table.group_of_fqn("e").op == Unstack(5, transpose=True)
    assert len(table.rules) == 4


def test_layers_that_are_stored_differently_have_rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for all layers is made only where all layers agree; a number that does not recur is not generalised."""

    def change(model: object, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = {"0.weight": "first.weight", "1.weight": "blocks.1.w", "2.weight": "blocks.2.w"}
        return {names.get(fqn, fqn.replace("bias", "b")): value for fqn, value in tensors.items()}

    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", change)
    model: Any = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    table = find_key_map(model)
    assert [table.group_of_fqn(f"{i}.weight").keys[0] for i in range(3)] == ["first.weight", "blocks.1.w", "blocks.2.w"]
    assert sorted(rule.native[0] for rule in table.rules) == ["0.weight", "1.weight", "2.weight", "{n0}.bias"]


def test_an_arrangement_that_no_operation_makes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interleaved rows and mixed columns are refused with all names, never stored in another order."""

    def change(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        mixed = {"c": t["c"].flip(0), "dc": torch.cat([t["d"], t["c"][:, :2]], dim=1)}
        return {**{k: v for k, v in t.items() if k not in "cd"}, **mixed}

    with pytest.raises(KeyMapError) as caught:
        odd(monkeypatch, change)
    assert "c, d as c, dc" in str(caught.value)


RUNNABLE = [f for f in FAMILIES if f not in ("kimi_linear", "deepseek_v4", "jamba", "deepseek_v3")]


@pytest.mark.parametrize("family", RUNNABLE)
def test_a_model_from_meta_computes_what_one_built_here_does(family: str) -> None:
    """Materialized and loaded, a model of any family has right buffers and ties without anything else being called.

    Every parameter gets a gradient.
    """
    here = hf.build(config(family)).eval()
    here.init_weights()
    with torch.device("meta"):
        model = hf.build(config(family))
    assert all(value.is_meta for value in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu").eval()
    own = ModelWrapper([model]).state_dict()
    assert own.keys() == ModelWrapper([here]).state_dict().keys(), "the same weights are tied"
    for fqn, value in ModelWrapper([here]).state_dict().items():
        own[fqn].copy_(value)
    tokens = torch.randint(0, 64, (2, 30))
    with torch.no_grad():
        assert torch.equal(model(tokens), here(tokens))
    logits = model(tokens)
    assert logits.shape == (2, 30, model.vocab_size)
    logits.sum().backward()
    assert not [fqn for fqn, parameter in model.named_parameters() if parameter.grad is None]


def test_initial_values_depend_on_the_seed_alone() -> None:
    """`init_weights` fills everything again, whatever was there, and leaves no mark that would stop it next time."""
    model = hf.build(config("qwen3_moe"))
    states = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        model.init_weights()
        states.append({fqn: value.clone() for fqn, value in model.state_dict().items()})
    first, other, again = states
    assert all(torch.equal(first[fqn], again[fqn]) for fqn in first)
    norms = {fqn for fqn in first if torch.equal(first[fqn], other[fqn])}
    assert norms == {fqn for fqn in first if "norm" in fqn}


def test_reset_buffers_changes_no_weight_and_keeps_others_marks() -> None:
    """Garbage frequencies are recomputed; weights, and the marks of a load under way, stay."""
    model = hf.build(config("llama"))
    weights = {fqn: value.clone() for fqn, value in model.state_dict().items()}
    expected = dict(model.named_buffers())["model.rotary_emb.inv_freq"].clone()
    marked = model.get_parameter("lm_head.weight")
    marked._is_hf_initialized = True  # type: ignore[attr-defined]
    for buffer in model.buffers():
        buffer.fill_(float("nan"))
    model.reset_buffers()
    assert torch.equal(model.get_buffer("model.rotary_emb.inv_freq"), expected)
    assert all(torch.equal(value, weights[fqn]) for fqn, value in model.state_dict().items())
    assert [fqn for fqn, p in model.named_parameters() if hasattr(p, "_is_hf_initialized")] == ["lm_head.weight"]


def test_rotary_frequencies_stay_exact_in_bfloat16() -> None:
    """A cast of the model casts its weights and no buffer that is recomputed in float32."""
    model = hf.build(config("llama"))
    expected = model.get_buffer("model.rotary_emb.inv_freq").clone()
    model.to(torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.get_buffer("model.rotary_emb.inv_freq"), expected)


def test_weights_are_float32_whatever_the_folder_says() -> None:
    """Training keeps float32 weights unless asked otherwise, although published configs say bfloat16."""
    raw = config("llama") | {"dtype": "bfloat16"}
    assert {p.dtype for p in hf.build(raw).parameters()} == {torch.float32}
    assert {p.dtype for p in hf.build(raw, torch.bfloat16).parameters()} == {torch.bfloat16}


def test_layers_are_found_and_are_the_models_own() -> None:
    """`layers` is what FSDP2 shards one at a time, and names nothing twice."""
    for family, fqn in {"llama": "model.layers", "gpt2": "transformer.h", "mixtral": "model.layers"}.items():
        model = hf.build(config(family))
        assert model.layers is model.get_submodule(fqn)
        assert len(list(model.layers.children())) == 3
        assert not [name for name in model.state_dict() if name.startswith("layers.")]
        assert (model.vocab_size, model.max_seq_len) == (64, 40)


def test_a_model_stays_what_transformers_thinks_it_is() -> None:
    """Its class has the old name and module, and its config.json names the class that opens it."""
    model = hf.build(config("llama"))
    assert isinstance(model, PreTrainedModel)
    assert isinstance(model, hf.HuggingFaceModel)
    assert not model.is_custom_code()
    assert model.hf_config()["architectures"] == ["LlamaForCausalLM"]
    assert model.hf_config()["model_type"] == "llama"


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ({"model_type": "no_such_model"}, "has no 'no_such_model'"),
        ({"hidden_size": 8}, "has no None"),
        ({"model_type": "llama", "hidden_size": "wide"}, "hidden_size"),
        (
            {"model_type": "llama", "hidden_size": 30, "num_attention_heads": 7},
            "multiple of the number of attention heads",
        ),
        ({"model_type": "t5"}, "'t5': this config is no causal language model"),
        (
            {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
            r"T5ForConditionalGeneration is no causal .* transformers' Trainer .* or in a loop of your own",
        ),
        ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, "ViTForImageClassification is no"),
        ("no/such/folder", "config.json is not there"),
    ],
)
def test_what_cannot_be_built_is_one_clear_error(source: Any, cause: str) -> None:
    """A wrong folder or config names itself and the reason."""
    with pytest.raises(ConfigError, match=cause):
        hf.build(source)


def test_a_config_that_is_not_json_is_an_error(tmp_path: Path) -> None:
    """The path is in the message."""
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        hf.build(tmp_path)


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module itself imports where the extra is absent, and only building asks for it."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    spec = importlib.util.spec_from_file_location("hf_without_transformers", hf.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(ConfigError, match=r'pip install "titan-ckpt\[hf\]"'):
        module.build({"model_type": "llama"})


def test_a_model_that_exchanges_modules_in_its_first_forward_is_refused() -> None:
    """BigBird draws new modules for short sequences: a resumed run would draw other numbers than the first one."""
    config = AutoConfig.for_model("big_bird", **SMALL, is_decoder=True)
    with pytest.raises(
        ConfigError, match=r"BigBirdForCausalLM exchanges modules .* sequences of 8 tokens.*attention_type"
    ):
        hf.build(config.to_dict())(torch.arange(8)[None])
    config.attention_type = "original_full"
    assert hf.build(config.to_dict())(torch.arange(8)[None]).shape == (1, 8, 64)


def test_the_part_of_a_composite_model_is_the_class_that_it_names() -> None:
    """A causal model whose configuration the Auto class does not list is found by `architectures`."""
    config = {**SMALL, "model_type": "emu3_text_model", "architectures": ["Emu3ForCausalLM"]}
    assert type(hf.build(config)).__name__ == "Emu3ForCausalLM"
    with pytest.raises(ConfigError, match="emu3_text_model"):
        hf.build(config | {"architectures": ["Emu3Model"]})


def test_a_model_that_also_reads_images_is_the_class_that_its_config_names() -> None:
    """It trains on text as any causal language model does; a config that names no class leads to none."""
    config = made("vision-language").config.to_dict() | {"architectures": ["LlavaForConditionalGeneration"]}
    model = hf.build(config)
    tokens = torch.arange(8)[None]
    assert type(model).__name__ == "LlavaForConditionalGeneration"
    assert model(tokens).shape == (1, 8, 64)
    with pytest.raises(ConfigError, match="'llava': this config is no causal language model"):
        hf.build(config | {"architectures": None})


def test_a_single_expert_is_unstacked() -> None:
    """One expert of a stack is one file tensor without the first dim."""
    with torch.device("meta"):
        model = hf.build(
            {**SMALL, "model_type": "hunyuan_v1_moe", "num_experts": 1, "num_local_experts": 1, "moe_topk": 1}
        )
    group = model.key_map().group_of_fqn("model.layers.0.mlp.experts.down_proj")
    assert group.keys == ("model.layers.0.mlp.experts.0.down_proj.weight",)
    assert group.op == Unstack(1)


def test_buffers_are_recomputed_beside_modules_that_a_converter_added() -> None:
    """xLSTM's own initialization recognises gates by their names, and fails on the adapters inside them."""
    shape = {"embedding_dim": 32, "num_heads": 2, "num_blocks": 2, "chunk_size": 8, "weight_mode": "single"}
    model: Any = construct(lambda: hf.build({**SMALL, "model_type": "xlstm", **shape}))
    hooks = converters.from_tables([{"kind": "lora", "rank": 2, "target_modules": ["*igate_preact", "*fgate_preact"]}])
    hooks.convert(model)
    materialize(model, "cpu")
    initialize_missing(ModelWrapper([model], hooks))
    assert torch.isfinite(model(torch.arange(8)[None])).all()
