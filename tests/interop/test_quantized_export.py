"""Quantized exports of QAT and Float8 runs: what transformers opens computes what training computed."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import quantize_
from transformers import AutoModelForCausalLM, TorchAoConfig

from tests import world
from tests.interop.folders import gap, logits
from tests.unit.converters.test_qat import TOKENS, train
from tests.world import TINY as SHAPE
from tests.world import convert, read_all, same
from titan_ckpt import ExportConfig
from titan_ckpt.converters import QATConfig
from titan_ckpt.converters.qat.converter import _torchao_config
from titan_ckpt.errors import ExportError
from titan_ckpt.geometry.chunks import blocks_of
from titan_ckpt.models import hf, llama3, qwen3_moe

INT4: dict[str, Any] = {"kind": "qat", "scheme": "int4_weight_only"}
FLOAT8: dict[str, Any] = {"kind": "float8", "emulate": True}


def lora(*targets: str) -> dict[str, Any]:
    return {"kind": "lora", "target_modules": list(targets), "rank": 4}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers says that there is no GPU, and that it dequantizes: which is what is wanted."""
    monkeypatch.setattr(logging.getLogger("transformers"), "disabled", True)


def llama(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    torch.manual_seed(0)
    return hf.build(SHAPE.to_hf() | changes, dtype)


def export(model: Any, converters: Any, folder: Path, *, step: int = 1, **settings: Any) -> Path:
    """Make a quantized export as the last step of a run does, and return it."""
    world.save(
        world.manager(
            folder,
            model,
            save=None,
            export=(ExportConfig("hf_quantized", **settings),),
            model_converters=converters,
        ),
        step,
        last_step=True,
    )
    return folder / f"exports/step-{step}-quantized"


def reload(folder: Path, **options: Any) -> Any:
    """Open a folder with transformers alone; nothing may be missing, left over or made up."""
    auto: Any = AutoModelForCausalLM
    model, report = auto.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report.values()), report
    return model.eval()


CASES: dict[str, list[dict[str, Any]]] = {
    "int4": [INT4],
    "int4 in groups of 16, head too": [{**INT4, "group_size": 16, "exclude_modules": ["k_proj"]}],
    "int4 and embeddings": [{**INT4, "embeddings": True}],
    "int8": [{"kind": "qat", "scheme": "int8_weight_only"}],
    "8da4w": [{"kind": "qat", "scheme": "int8_dynamic_act_int4_weight"}],
    "int4 and lora": [INT4, lora("q_proj", "k_proj", "o_proj", "down_proj")],
    "int4, embeddings and dora": [
        {**INT4, "embeddings": True},
        {**lora("q_proj", "v_proj", "up_proj"), "use_dora": True},
    ],
    "mxfp8": [{"kind": "qat", "scheme": "mxfp8"}],
    "mxfp4": [{"kind": "qat", "scheme": "mxfp4"}],
}


@pytest.mark.parametrize("name", CASES)
def test_f1_transformers_computes_what_training_computed(name: str, tmp_path: Path) -> None:
    """Train a fake-quantized model of transformers and export it: the reloaded folder gives its logits, bit for bit."""
    model = llama(torch.bfloat16 if name.startswith("mx") else torch.float32)
    converters = convert(model, *CASES[name])
    train(model)
    folder = export(model, converters, tmp_path, max_shard_bytes=20_000)
    assert len(list(folder.glob("*.safetensors"))) > 1
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert settings["include_input_output_embeddings"] == ("embeddings" in name or "head" in name)
    assert torch.equal(logits(reload(folder), TOKENS), logits(model, TOKENS))
    for key, value in read_all(folder).items():
        assert bool(torch.isfinite(value).all()), key


def test_the_folder_is_what_transformers_would_save(tmp_path: Path) -> None:
    """config.json is TorchAoConfig's own, all headers describe all tensors, and codes are the ones torchao gives."""
    model = llama()
    converters = convert(model, {**INT4, "exclude_modules": ["lm_head", "up_proj"]})
    folder = export(model, converters, tmp_path, max_shard_bytes=20_000)
    config = json.loads((folder / "config.json").read_text())
    plain = [f"model.layers.{i}.mlp.up_proj" for i in range(2)]
    base = _torchao_config(QATConfig("int4_weight_only"))
    theirs: Any = TorchAoConfig(base, modules_to_not_convert=["lm_head", "model.embed_tokens", *plain])
    assert config["quantization_config"] == theirs.to_dict()
    assert config["dtype"] == "float32"
    quantize_(model, base, filter_fn=lambda m, n: isinstance(m, nn.Linear) and n != "lm_head" and "up_proj" not in n)
    tensors, metadata = flatten_tensor_state_dict({k: v.detach() for k, v in model.state_dict().items()})
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            described = dict(file.metadata())
            assert described.pop("format") == "pt"
            assert sorted(json.loads(described.pop("tensor_names"))) == sorted(model.state_dict())
            assert described == {key: text for key, text in metadata.items() if key != "tensor_names"}
    assert same(world.tensors(folder), dict(tensors))


def test_the_head_of_a_tied_model_is_not_taken_for_a_quantized_one(tmp_path: Path) -> None:
    """It is in no file, and a module all the same, so the folder has to name it."""
    model = llama(tie_word_embeddings=True)
    folder = export(model, convert(model, INT4), tmp_path)
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert settings["modules_to_not_convert"] == ["lm_head", "model.embed_tokens"]
    assert torch.equal(logits(reload(folder), TOKENS), logits(model, TOKENS))


def test_our_reader_gives_back_what_training_computed_with(tmp_path: Path) -> None:
    """A native Llama, whose rows are permuted on the way: the folder holds the fake-quantized merge, bit for bit."""
    model = world.llama()
    converters = convert(model, INT4, lora("wq", "wk", "w2"))
    train(model)
    folder = export(model, converters, tmp_path)
    plain = llama3.Llama3(SHAPE)
    world.load(world.manager(tmp_path, plain, save=None, initial_load=[folder]))
    for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w2"):
        module: Any = model.get_submodule(f"layers.1.{name}")
        weight = module.merged_weight() if hasattr(module, "lora_a") else module.weight
        assert torch.equal(plain.get_parameter(f"layers.1.{name}.weight"), module.weight_fake_quantizer(weight)), name
    assert gap(reload(folder), model, TOKENS) <= 1e-5


@pytest.mark.parametrize("table", [INT4, {"kind": "qat", "scheme": "int8_weight_only"}], ids=["int4", "int8"])
def test_quantizing_again_gives_other_values_and_a_warning(
    table: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Codes of dequantized weights are other codes: a run on a quantized folder says so, a resumed one need not."""

    def again(folder: Path, out: Path, *tables: dict[str, Any]) -> Any:
        model = llama()
        exports = (ExportConfig("hf_quantized"),) * bool(tables)
        converter = convert(model, *tables)
        world.finish(
            world.manager(out, model, save=None, initial_load=[folder], export=exports, model_converters=converter)
        )
        return model

    model = llama()
    first = export(model, convert(model, table), tmp_path)
    again(first, tmp_path / "plain")
    assert "quantizes them again" not in caplog.text, "what is loaded into a plain run is what was quantized"
    again(first, tmp_path / "again", table)
    assert f"{first} holds quantized weights" in caplog.text
    before, after = read_all(first), read_all(tmp_path / "again/exports/step-1-quantized")
    assert before.keys() == after.keys()
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    assert changed if table is INT4 else len(changed) < len(before)
    for key, value in before.items():
        assert (value - after[key]).abs().max() <= 0.1 * value.abs().max(), key


def test_a_plain_export_stands_beside_the_quantized_one(tmp_path: Path) -> None:
    """One run writes both; the plain one, in another dtype, has no word of quantization."""
    model = llama()
    converters = convert(model, INT4)
    exports = (ExportConfig("hf_quantized"), ExportConfig("hf", dtype="bfloat16"))
    world.save(
        world.manager(tmp_path, model, save=None, export=exports, model_converters=converters), 3, last_step=True
    )
    assert "quantization_config" not in json.loads((tmp_path / "exports/step-3/config.json").read_text())
    assert {value.dtype for value in read_all(tmp_path / "exports/step-3").values()} == {torch.bfloat16}
    assert (tmp_path / "exports/step-3-quantized/config.json").is_file()


@pytest.mark.parametrize("targets", [(), ("q_proj", "up_proj")])
def test_float8_blocks_are_read_by_transformers(targets: tuple[str, ...], tmp_path: Path) -> None:
    """Every weight comes back within half a step of float8, and as our own reader gives it; the rest is bfloat16."""
    model = llama(hidden_size=256, intermediate_size=384, head_dim=64)
    converters = convert(model, FLOAT8, *([lora(*targets)] if targets else []))
    train(model)
    folder = export(model, converters, tmp_path, dtype="bfloat16")
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
    }
    assert bool(torch.isfinite(reload(folder)(TOKENS).logits).all())
    theirs = reload(folder, dtype=torch.float32).state_dict()
    ours = read_all(folder)
    exported = converters.state_dict_transform(dict(model.state_dict()), last_step=True)
    assert theirs.keys() == ours.keys() == exported.keys()
    for key, value in exported.items():
        (block,) = blocks_of(value)
        plain = block.data.bfloat16().float()
        assert torch.equal(ours[key].float(), theirs[key])
        if "_proj" not in key:
            assert torch.equal(theirs[key], plain)
            continue
        blocks = plain.abs().unfold(0, 128, 128).unfold(1, 128, 128).amax(dim=(2, 3)) / 448
        scale = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
        step = torch.maximum(plain.abs() / 16, scale * 2**-10)
        assert bool(((theirs[key] - plain).abs() <= step * 1.0001).all()), key


def test_a_weight_that_blocks_do_not_tile_stays_plain(tmp_path: Path) -> None:
    """transformers works out a block's size by dividing, so a block cut short would shift every scale."""
    model = llama(intermediate_size=192)
    converters = convert(model, FLOAT8)
    folder = export(model, converters, tmp_path)
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert [name for name in settings["modules_to_not_convert"] if "layers.0" in name] == [
        f"model.layers.0.mlp.{name}_proj" for name in ("down", "gate", "up")
    ]
    theirs = reload(folder, dtype=torch.float32).state_dict()
    assert torch.equal(
        theirs["model.layers.0.mlp.up_proj.weight"], model.state_dict()["model.layers.0.mlp.up_proj.weight"]
    )


def test_what_cannot_be_quantized_is_refused_before_training(tmp_path: Path) -> None:
    """No converter, two schemes, tied embeddings, a scheme that wants bfloat16: one message each, nothing trained."""

    def fault(*tables: dict[str, Any], **changes: Any) -> str:
        model = llama(**changes)
        with pytest.raises(ExportError) as caught:
            export(model, convert(model, *tables), tmp_path)
        return str(caught.value)

    assert 'add [[converters]] kind = "qat" or "float8"' in fault(lora("q_proj"))
    assert "float8 and qat both quantize weights" in fault(
        {**FLOAT8, "exclude_modules": ["q_proj", "lm_head"]},
        {**INT4, "exclude_modules": ["k_proj", "v_proj", "o_proj", "*.mlp.*", "lm_head"]},
    )
    assert "none of its 14 weights has a shape" in fault(FLOAT8, hidden_size=192, head_dim=48)
    assert "tied to model.embed_tokens.weight" in fault({**INT4, "embeddings": True}, tie_word_embeddings=True)
    assert "torchao cannot quantize float32[64, 64]: Only supporting bf16" in fault({"kind": "qat", "scheme": "mxfp8"})
    assert not (tmp_path / "exports").exists()


@pytest.mark.parametrize("table", [INT4, FLOAT8], ids=["int4", "float8"])
def test_experts_stay_plain_beside_quantized_attention(table: dict[str, Any], tmp_path: Path) -> None:
    """Stacked experts are no linear modules, so no scheme has them: the folder says so, and transformers opens it."""
    model = qwen3_moe.Qwen3Moe(replace(qwen3_moe.FLAVORS["debug-1m"], dim=64, num_layers=2, head_dim=16, vocab_size=96))
    model.init_weights()
    converters = convert(model, table, lora("wq", "experts.w2"))
    train(model)
    folder = export(model, converters, tmp_path)
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    layer = [name for name in settings["modules_to_not_convert"] if "layers.1" in name]
    assert layer == ["model.layers.1.mlp.experts", "model.layers.1.mlp.gate"]
    assert gap(reload(folder), model, TOKENS) <= (1e-5 if table is INT4 else 0.2)


@pytest.mark.parametrize("table", [INT4, FLOAT8], ids=["int4", "float8"])
def test_nothing_is_published_that_is_not_a_number_or_does_not_come_back(
    table: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN has no scale; a scale that the files do not hold as it was computed is found by reading them."""
    model = llama()
    converters = convert(model, table)
    weight = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[3, 4] = float("nan")
    with pytest.raises(ExportError, match=r"layers\.0\.self_attn\.q_proj\.weight holds NaN or infinite values"):
        export(model, converters, tmp_path)
    with torch.no_grad():
        weight.copy_(kept)
    function = "qat.converter._decoded" if table is INT4 else "float8.converter.decode"
    module = f"titan_ckpt.converters.{function}"
    right: Any = resolve_name(module)
    monkeypatch.setattr(module, lambda *found: right(*found) * 1.001)
    with pytest.raises(ExportError, match=r"14 quantized weight\(s\) come back as other values than were written"):
        export(model, converters, tmp_path)
    assert not [*(tmp_path / "exports").glob("step*")]
