"""config.json of a folder beside the model's own args, and what an adapter's from_hf() checks."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torchtitan.runs import config, distributed, logits_of, near, same_tensors, train
from tests.world import heard
from titan_ckpt.errors import ConfigError, KeyMapError, LoadMismatchError
from titan_ckpt.integrations.torchtitan import model_config
from titan_ckpt.integrations.torchtitan.adapter import check_reads, find_key_map, with_experts
from titan_ckpt.integrations.torchtitan.described import described
from titan_ckpt.integrations.torchtitan.model_config import NO_EFFECT, check_folder, config_json

ROPE_31 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192, "rope_theta": 500000.0}  # fmt: skip
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"num_attention_heads": 8, "num_key_value_heads": 8}, "num_attention_heads: 8 there, 16 here"),
    "key heads": ({"num_key_value_heads": 8}, "num_key_value_heads: 8 there, 16 here"),
    "head_dim": ({"head_dim": 8}, "head_dim: 8 there, 16 here"),
    "eps": ({"rms_norm_eps": 1e-6}, r"rms_norm_eps: 1e-06 there, 1e-05 here; .*allow = \[\"config.json:rms_norm_eps"),
    "no eps": ({"rms_norm_eps": None}, "rms_norm_eps: 1e-06 there, 1e-05 here"),
    "theta": (
        {"rope_parameters": ROPE_31 | {"factor": 8.0, "rope_theta": 1e6}},
        r"rope_parameters.rope_theta: 1000000.0 there, 500000.0 here; .*allow = \[\"config.json:rope_param",
    ),
    "factor": ({"rope_parameters": ROPE_31}, "rope_parameters.factor: 32.0 there, 8.0 here"),
    "no scaling": (
        {"rope_parameters": None, "rope_theta": 500000.0, "rope_scaling": None},
        "rope_parameters.rope_type: 'default' there, 'llama3' here",
    ),
    "half rotary": (
        {"rope_parameters": ROPE_31 | {"factor": 8.0, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor: 0.5 there, 1.0 here",
    ),
    "per layer": ({"rope_parameters": {"full_attention": ROPE_31}}, "rope_parameters.rope_type: {.*} there, 'llama3'"),
    "window": ({"sliding_window": 4096}, "sliding_window: 4096 there, None here"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act: 'gelu' there, 'silu' here"),
    "tied": ({"tie_word_embeddings": True}, "tie_word_embeddings: True there, False here"),
    "bias": ({"attention_bias": True}, "attention_bias: True there, False here"),
    "model": ({"model_type": "mistral"}, "model_type: 'mistral' there, 'llama' here"),
}
"""What a folder's config.json says in place of what its export says, and the complaint."""


@pytest.mark.parametrize("case", CHANGES)
def test_a_config_json_of_another_model_is_refused_by_both_values(case: str) -> None:
    """Heads, rotary embedding, eps and all else that changes logits; what is absent has transformers' default."""
    model = _spec("llama3", "debugmodel").model
    change, complaint = CHANGES[case]
    with pytest.raises(LoadMismatchError, match=f"^there: its config.json(.|\n)*{complaint}"):
        check_folder("there", config_json(model, None) | change, model, ())


def _spec(name: str, flavour: str, **settings: Any) -> Any:
    return importlib.import_module(f"torchtitan.models.{name}").model_registry(flavour, **settings)


MODELS = {
    "llama3": ("llama3", "debugmodel"),
    "qwen3": ("qwen3", "debugmodel"),
    "qwen3-split": ("qwen3", "debugmodel_non_fused_qkv"),
    "qwen3-moe": ("qwen3", "debugmodel_moe"),
    "deepseek": ("deepseek_v3", "debugmodel"),
    "gpt-oss": ("gpt_oss", "debugmodel"),
}


def _small(name: str) -> Any:
    """Return the spec of a model of three layers, with narrow experts."""
    spec = _spec(*MODELS[name], **{"attn_backend": "flex"} if name == "gpt-oss" else {})
    spec.model.layers = spec.model.layers[:3]
    for layer in spec.model.layers:
        if name == "qwen3-moe":
            layer.moe.routed_experts.inner_experts.hidden_dim = 32
        if name == "deepseek":  # transformers has the eps of these as a constant
            layer.attention.kv_norm.eps = layer.attention.q_norm.eps = 1e-6
            if layer.moe is not None:  # as DeepSeek-V3 has it; the debug model chooses experts as V2 does
                layer.moe.router = replace(layer.moe.router, score_func="sigmoid", route_norm=True, route_scale=2.5)
    return spec


@distributed(1)
def _loaded(assets: Path, folder: Path, name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    def made(path: Path, **settings: Any) -> Any:
        run = config(assets, folder / "run", steps=0, exact=True, initial_load_in_hf=True,
                     initial_load_path=str(path), **settings)  # fmt: skip
        run.model_spec = _small(name)
        return run

    torch.manual_seed(0)
    said = config_json(_small(name).model, None)
    build: Any = AutoModelForCausalLM.from_config
    theirs = build(AutoConfig.for_model(said.pop("model_type"), **said)).eval()
    theirs.save_pretrained(folder / "theirs")
    tokens = torch.randint(3, 500, (2, 16))
    logits: list[torch.Tensor] = []
    ours = train(made(folder / "theirs"), then=lambda trainer: logits.append(logits_of(trainer, tokens))).model
    by_torchtitan = train(made(folder / "theirs", titan=False)).model
    lost = {fqn for fqn in ours if "mlp1_" in fqn or "mlp2_" in fqn}  # torchtitan's adapter has gpt_oss's old names
    same_tensors(*({fqn: v for fqn, v in model.items() if fqn not in lost} for model in (ours, by_torchtitan)))
    assert len(lost) == (12 if name == "gpt-oss" else 0)
    with torch.no_grad():
        atol = {"qwen3-moe": 2e-3, "deepseek": 2e-3, "gpt-oss": 5e-2}.get(name)
        if atol is not None:
            near(logits[0], theirs(tokens).logits, atol)
        else:
            torch.testing.assert_close(logits[0], theirs(tokens).logits, rtol=2e-4, atol=2e-5)

    path = folder / "theirs/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1e-3, "num_attention_heads": 48}))
    with pytest.raises(LoadMismatchError, match=r"(?s)/theirs: .*num_attention_heads: 48 there.*rms_norm_eps: 0.001"):
        train(made(folder / "theirs"))
    if name != "llama3":  # what follows is the same for all
        return
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_attention_heads": said["num_attention_heads"]}))
    with pytest.raises(LoadMismatchError, match=r"rms_norm_eps: 0\.001 there"):
        train(made(folder / "theirs"))
    train(made(folder / "theirs", allow=["config.json:rms_norm_eps"]))
    path.unlink()
    with heard() as lines:
        train(made(folder / "theirs"))
    assert any("has no config.json, so nobody can tell" in line for line in lines), lines


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name.startswith("qwen3-s") else ()) for name in MODELS]
)
def test_a_folder_that_fits_has_the_logits_of_transformers(assets: Path, tmp_path: Path, name: str) -> None:
    """config.json made of torchtitan's args builds the same model in transformers; a changed one is not loaded."""
    _loaded(assets, tmp_path, name)


@pytest.mark.parametrize("name", MODELS)
def test_every_key_that_transformers_reads_is_compared_or_changes_no_logits(name: str) -> None:
    """A key that a newer transformers adds to one of these models is found here."""
    from transformers import AutoConfig, PretrainedConfig

    ours = described(_small(name).model)
    theirs = AutoConfig.for_model(ours["model_type"]).to_dict().keys() - PretrainedConfig().to_dict().keys()
    known = {"rope_parameters", "intermediate_size", "qk_head_dim", "num_local_experts"}
    assert theirs - ours.keys() - NO_EFFECT - known == set()


@pytest.mark.parametrize("name", MODELS)
def test_a_key_that_is_not_there_is_what_transformers_takes_for_it(name: str) -> None:
    """Else a folder whose config.json leaves it out would be compared with another value."""
    from transformers import AutoConfig

    said = config_json(_small(name).model, None)
    kind, absent = said["model_type"], said.keys() - NO_EFFECT - {"model_type", "rope_parameters"}
    for key in [*absent & model_config._OWN_DEFAULTS.get(kind, {}).keys(), *absent & model_config._DEFAULTS.keys()]:
        rest = {k: v for k, v in said.items() if k not in (key, "model_type")}
        ours = model_config._flat({"model_type": kind, **rest}).get(key, model_config._DEFAULTS.get(key))
        theirs = getattr(AutoConfig.for_model(kind, **rest), key, None) or model_config._DEFAULTS.get(key)
        assert ours == theirs, key
    bare = AutoConfig.for_model(kind)
    assert model_config._flat({"model_type": kind})["rope_parameters.rope_theta"] == bare.rope_parameters["rope_theta"]


@pytest.mark.parametrize("name", MODELS)
def test_a_head_without_rows_is_refused_by_its_name(name: str) -> None:
    """The adapter's table is made of positions, and an empty tensor has none."""
    spec = _small(name)
    spec.model.lm_head.out_features = 0
    with torch.device("meta"):
        shapes = {fqn: tuple(value.shape) for fqn, value in spec.model.build().state_dict().items()}
    tied = {"tok_embeddings.weight": "lm_head.weight"} if spec.model.enable_weight_tying else {}
    with pytest.raises(KeyMapError, match=r"lm_head.weight: its shape is \[0, \d+\], which has no elements"):
        find_key_map(with_experts(spec.state_dict_adapter(spec.model, None)), shapes, tied, [])


def _swap_rope(name: str) -> Any:
    from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE

    spec = _spec(name, "debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        rope = layer.attention.rope
        kind = CosSinRoPE if isinstance(rope, ComplexRoPE.Config) else ComplexRoPE
        values = {field.name: getattr(rope, field.name) for field in fields(rope) if field.init}
        layer.attention.rope = kind.Config(**values | {"scaling": "none"})
    return spec


@pytest.mark.parametrize("name", ["llama3", "qwen3", "deepseek_v3", "muse_glimmer"])
def test_what_from_hf_of_an_adapter_checks_is_checked(name: str) -> None:
    """torchtitan calls it on the data; here it is called before step 1, on tensors without values."""
    spec = _swap_rope(name)
    with torch.device("meta"):
        shapes = {fqn: tuple(value.shape) for fqn, value in spec.model.build().state_dict().items()}
    tied = {"lm_head.weight": "tok_embeddings.weight"} if spec.model.enable_weight_tying else {}
    shapes = {fqn: shape for fqn, shape in shapes.items() if fqn not in tied}
    with pytest.raises(KeyMapError, match=r"from_hf\(\) does not take this model: ValueError: HF checkpoint con"):
        check_reads(spec.state_dict_adapter(spec.model, None), shapes, tied)


@distributed(1)
def _wrong_rope(assets: Path, folder: Path) -> None:
    made = config(assets, folder / "run", steps=0, initial_load_in_hf=True, initial_load_path=str(assets))
    made.model_spec = _swap_rope("llama3")
    with pytest.raises(KeyMapError) as error:
        made.build()
    first, *_, last = str(error.value).splitlines()
    name = "Llama3StateDictAdapter"
    assert first.startswith(
        f"checkpoint.initial_load_in_hf ({assets}): llama3 debugmodel: {name}.from_hf() does not take"
    )
    assert last.strip() == f"Correct {name}, which the model spec names, or leave checkpoint.initial_load_in_hf out"


def test_an_adapter_that_does_not_take_the_model_names_itself_and_the_model(assets: Path, tmp_path: Path) -> None:
    """The run is refused before step 1, by the setting, the folder and the flavor, with the next step."""
    _wrong_rope(assets, tmp_path)


class _Own:
    """An adapter of a user."""

    def __init__(self, from_hf: Any, to_hf: Any = dict) -> None:
        self.from_hf, self.to_hf = from_hf, to_hf


@pytest.mark.parametrize(
    ("from_hf", "complaint"),
    [
        (lambda s: {"a": s["a"]}, r"from_hf\(\) does not give back what to_hf\(\) took: b"),
        (lambda s: s | {"c": s["a"]}, r"from_hf\(\) does not give back what to_hf\(\) took: c"),
        (lambda s: s["c"], r"_Own.from_hf\(\) does not take this model: KeyError: 'c'; it was given a; b"),
    ],
)
def test_an_adapter_that_does_not_read_what_it_writes_is_refused(from_hf: Any, complaint: str) -> None:
    """An exception in it is one typed error that names the adapter."""
    with pytest.raises(KeyMapError, match=complaint):
        check_reads(_Own(from_hf), {"a": (2, 2), "b": (2,)}, {})
    for to_hf, said in (
        (lambda s: 1 / 0, r"does not take this model: ZeroDivisionError"),
        (lambda s: None, r"returns NoneType, expected a dict of tensors"),
        (lambda s: {"a": 1}, r"returns no tensor, or an empty one, as a"),
        (lambda s: {str(id(s)): torch.zeros(2, 2, dtype=torch.int32)}, r"returns other keys at each call"),
    ):
        with pytest.raises(KeyMapError, match=rf"_Own.to_hf\(\) {said}"):
            find_key_map(_Own(None, to_hf), {"a": (2, 2)}, {})


def test_an_export_says_what_the_model_computes(tmp_path: Path) -> None:
    """hf_assets_path gives what the model does not know; where the two differ the run is refused, or the model's go."""
    model = _spec("llama3", "debugmodel").model
    own = config_json(model, None)
    given = own | {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": None, "bos_token_id": 5, "my_own": 1}
    del given["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(given))
    with pytest.raises(ConfigError, match=r"hf_assets_path: .*rms_norm_eps: 1e-06 there, 1e-05 here") as error:
        config_json(model, str(tmp_path))
    names = [
        f"config.json:{key}" for key in ("rms_norm_eps", "rope_parameters.rope_theta", "rope_parameters.rope_type")
    ]
    names += [f"config.json:rope_parameters.{key}" for key in own["rope_parameters"] if not key.startswith("rope")]
    assert [name for name in names if f'checkpoint.allow = ["{name}"]' not in str(error.value)] == []
    exported = config_json(model, str(tmp_path), names)
    assert exported == own | {"bos_token_id": 5, "my_own": 1}
    model.layers[1].ffn_norm.eps = 1e-6
    with pytest.raises(ConfigError, match=r"rms_norm_eps is 1e-05 and 1e-06 in parts of one model"):
        config_json(model, None)


def _class(name: str) -> Any:
    module, _, kind = f"torchtitan.models.{name}".rpartition(".")
    return getattr(importlib.import_module(module), kind).Config


def _windowed(model: Any, left: int) -> None:
    from torchtitan.models.common.attention import VarlenAttention

    model.layers[0].attention.inner_attention = VarlenAttention.Config(window_size=(left, 0))


ODD: dict[str, tuple[str, Callable[[Any], object], str]] = {
    "no norms of heads": ("qwen3", lambda m: setattr(m.layers[1].attention, "qk_norm", None), "Qwen3Model.Config"),
    "a norm without weights": ("llama3", lambda m: setattr(m.norm, "elementwise_affine", False), "elementwise_affine"),
    "a window": ("llama3", lambda m: _windowed(m, 7), "Attention.Config.inner_attention"),
    "another window": ("gpt-oss", lambda m: _windowed(m, 7), "Attention.Config.inner_attention"),
    "both sides": ("qwen3", lambda m: _windowed(m, -2), "Attention.Config.inner_attention"),
    "a norm of another model": (
        "llama3",
        lambda m: setattr(
            m, "norm", _class("muse_glimmer.model.RMSGainCenterNorm")(normalized_shape=256, gain_center=1)
        ),
        "muse_glimmer.model.RMSGainCenterNorm.Config",
    ),
    "a head of another model": (
        "qwen3",
        lambda m: setattr(
            m, "lm_head", _class("muse_glimmer.model.SoftCappedLinear")(in_features=256, out_features=2048)
        ),
        "muse_glimmer.model.SoftCappedLinear.Config",
    ),
    "any expert": (
        "qwen3-moe",
        lambda m: setattr(m.layers[0].moe.router, "_debug_force_load_balance", True),
        "TokenChoiceTopKRouter.Config._debug_force_load_balance",
    ),
}
"""No config.json says these, and transformers' model would compute without them."""


@pytest.mark.parametrize("case", ODD)
def test_what_a_config_json_does_not_say_is_refused_by_name(case: str) -> None:
    """Weights that are loaded or exported all the same are allowed by that name."""
    name, change, setting = ODD[case]
    model = _small(name).model
    said = config_json(model, None)
    change(model)
    with pytest.raises(LoadMismatchError, match=rf"{setting}: it is not known which keys .*allow = \[") as error:
        check_folder("there", said, model, ())
    with pytest.raises(ConfigError, match=rf"{setting}: it is not known|none can be derived for {setting}"):
        config_json(model, None)
    (allowed,) = re.findall(r'allow = \["(.*)"\]', str(error.value))
    check_folder("there", said, model, (allowed,))


CONTRADICTIONS: dict[str, tuple[str, str, Any, str]] = {
    "vocabulary": ("llama3", "lm_head.out_features", 4096, "vocab_size is 2048 and 4096 in parts of one model"),
    "width": ("qwen3", "dim", 512, "hidden_size is 512 and 256 in parts"),
    "heads": ("llama3", "attention.n_heads", 8, "num_attention_heads is 8 and 16 in parts of one model"),
    "key heads": ("qwen3", "attention.n_kv_heads", 4, "num_key_value_heads is 4 and 8 in parts"),
    "head_dim": ("gpt-oss", "attention.head_dim", 32, "head_dim is 32 and 64 in parts"),
    "rotary": ("llama3", "attention.rope.dim", 17, "head_dim is 16 and 17 in parts"),
    "heads of DeepSeek": ("deepseek", "attention.n_heads", 8, "num_attention_heads is 8 and 16 in parts"),
    "keys of DeepSeek": ("deepseek", "attention.wkv_b.out_features", 2048, "num_attention_heads is 16 and 8 in parts"),
    "queries of DeepSeek": ("deepseek", "attention.wq.out_features", 1536, "num_attention_heads is 16 and 8 in parts"),
    "half a head": ("gpt-oss", "attention.wo.in_features", 4064, "num_attention_heads is 64 and 63.5 in parts"),
    "latent of DeepSeek": ("deepseek", "attention.wkv_a.out_features", 320, "kv_lora_rank is 512 and 256 in parts"),
    "no heads": ("deepseek", "attention.v_head_dim", 0, "DeepSeekV3Model.Config: a number of heads or ex"),
    "no experts": ("deepseek", "moe.routed_experts.inner_experts.hidden_dim", 0, "or the size of one, is 0"),
    "no width of heads": ("llama3", "attention.qkv_linear.head_dim", 0, "or the size of one, is 0"),
    "chosen experts": ("qwen3-moe", "moe.routed_experts.token_dispatcher.top_k", 4, "num_experts_per_tok is 8 and 4"),
    "experts": ("gpt-oss", "moe.num_experts", 4, "num_experts is 4 and 8 in parts"),
    "bias": ("gpt-oss", "attention.wo.bias", False, "attention_bias is False and True in parts"),
    "router": ("gpt-oss", "moe.router.gate.bias", False, "none can be derived for GptOssModel.Config"),
    "shared experts": ("deepseek", "moe.shared_experts.w1.out_features", 100, "none can be derived for DeepSeekV3Mod"),
    "constant eps": (
        "deepseek",
        "attention.kv_norm.eps",
        1e-5,
        "no config.json says q_a.*eps: 1e-06 there, 1e-05 here",
    ),
    "no eps": ("llama3", "ffn_norm.eps", None, "RMSNorm.Config.eps: it is not known which keys of config.json"),
    "no norm": ("llama3", "ffn_norm", "nn_modules.Identity", "nn_modules.Identity.Config: it is not known which keys"),
}
"""A setting of every layer that contradicts another one of the same model, or that no config.json says."""


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_args_that_contradict_each_other_are_not_exported(case: str) -> None:
    """transformers would compute by the one what torchtitan computes by the other."""
    name, path, value, complaint = CONTRADICTIONS[case]
    model = _small(name).model
    *owners, last = path.split(".")
    for owner in [model] if path in ("dim", "lm_head.out_features") else model.layers:
        for part in owners:
            owner = getattr(owner, part, None)
        if owner is not None:
            setattr(owner, last, _class(f"common.{value}")() if isinstance(value, str) else value)
    with pytest.raises(ConfigError, match=complaint):
        config_json(model, None)


def test_a_setting_without_effect_is_described_by_its_effect() -> None:
    """Groups that nobody asked for limit nothing, and a factor of 0 scales nothing."""
    model = _small("deepseek").model
    for layer in model.layers:
        layer.attention.mscale = 0.0
        layer.attention.rope = replace(layer.attention.rope, scaling="yarn", rope_factor=4.0)
        if layer.moe is not None:
            layer.moe.router.num_expert_groups, layer.moe.router.num_limited_groups = None, 2
    said = config_json(model, None)
    assert (said["n_group"], said["topk_group"], said["rope_parameters"]["attention_factor"]) == (1, 1, 1.0)
    assert "mscale_all_dim" not in said["rope_parameters"]


def test_classes_whose_settings_are_not_known_are_refused_by_name() -> None:
    """A user's own part of a model too, unless checkpoint.allow names it."""
    from torchtitan.models.common import RMSNorm

    class Mine(RMSNorm):  # type: ignore[misc]  # torchtitan is not there when mypy runs
        @dataclass(kw_only=True, slots=True)
        class Config(RMSNorm.Config):  # type: ignore[misc]
            gain: float = 2.0

    model = _spec("llama3", "debugmodel").model
    said = config_json(model, None)
    model.norm = Mine.Config(normalized_shape=256)
    name = f"{__name__}.{Mine.Config.__qualname__}"
    with pytest.raises(LoadMismatchError, match=rf'allow = \["{re.escape(name)}"\]'):
        check_folder("there", said, model, ())
    check_folder("there", said, model, (name,))
    with pytest.raises(LoadMismatchError, match="rms_norm_eps: 1e-06 there"):
        check_folder("there", said | {"rms_norm_eps": 1e-6}, model, (name,))
    muse = _spec("muse_glimmer", "debugmodel").model
    with pytest.raises(
        LoadMismatchError, match=r'allow = \["torchtitan.models.muse_glimmer.model.MuseGlimmerModel.Config'
    ):
        check_folder("there", said, muse, ())
