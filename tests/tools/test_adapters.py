"""Adapters in PEFT, native and DCP folders: converted into each other, compared, and merged into the base they know."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tests import world
from tests.tools.steps import LORA, call, save_step
from tests.world import TINY as SHAPE
from tests.world import TOKENS, same
from titan_ckpt import InitialLoadConfig
from titan_ckpt.converters import from_tables
from titan_ckpt.models.llama3 import Llama3
from titan_ckpt.weights.identity import base_digest

OWN = "lora/checkpoints/step-1"


def told(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    """Run a command with --json; return its exit code and what it printed."""
    capsys.readouterr()
    code = call(*words, "--json")
    printed = capsys.readouterr()
    assert code != 2, printed.err
    return code, json.loads(printed.out)


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def exotic(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter with ranks and alphas by module, rsLoRA, DoRA and a module that is trained in full."""
    torch.manual_seed(3)
    base: Any = LlamaForCausalLM.from_pretrained(root / "hf")
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "o_proj", "down_proj"], rank_pattern={"layers.1.mlp.down_proj": 3},
        alpha_pattern={"o_proj": 5}, use_rslora=True, use_dora=True, modules_to_save=["lm_head"],
        init_lora_weights=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("exotic")
    adapted = get_peft_model(base, config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter) if parameter.requires_grad else 0)
    adapted.save_pretrained(str(folder))
    return folder


def test_f4_an_adapter_converts_between_peft_native_and_dcp_bit_exact(root: Path, exotic: Path, tmp_path: Path) -> None:
    """Out and back: the same tensors under the same names, and PEFT computes what it did; native names between."""
    for source in (root / "peft1", exotic):
        out = tmp_path / source.name
        out.mkdir()
        assert call("convert", source, out / "native", "--to", "native", "--config", root / "hf") == 0
        assert call("convert", out / "native", out / "dcp", "--to", "dcp") == 0
        assert call("convert", out / "dcp", out / "state.pt", "--to", "torch") == 0
        native = {k.removeprefix("model."): v for k, v in load_file(out / "native/rank-00000.safetensors").items()}
        assert same(torch.load(out / "state.pt", weights_only=True), native)
        assert "layers.0.attention.wq.lora_a.weight" in native
        settings = ("--config", root / "hf", "--settings", out / "native")
        assert call("convert", out / "dcp", out / "peft", "--to", "peft", *settings) == 0
        assert same(adapter(out / "peft"), adapter(source))
        with torch.no_grad():
            theirs, ours = (
                PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(root / "hf"), str(folder))(TOKENS).logits
                for folder in (source, out / "peft")
            )
        assert torch.equal(theirs, ours)


def test_a_converted_adapter_is_a_source_of_a_run_and_of_a_merge(root: Path, exotic: Path, tmp_path: Path) -> None:
    """A run with the settings that the folder records computes what PEFT does; a merge gives the same weights."""
    native = tmp_path / "native"
    assert call("convert", exotic, native, "--to", "native", "--config", root / "hf") == 0
    (settings,) = json.loads((native / "MANIFEST.json").read_text())["converters"]
    converters = world.convert(model := Llama3(SHAPE), settings)
    sources = (InitialLoadConfig(str(root / "hf")), InitialLoadConfig(str(native)))
    assert not world.load(
        world.manager(tmp_path / "run", model, initial_load=sources, model_converters=converters)
    ).report.initialized
    base: Any = LlamaForCausalLM.from_pretrained(root / "hf")
    with torch.no_grad():
        expected = PeftModel.from_pretrained(base, str(exotic))(TOKENS).logits
        torch.testing.assert_close(model(TOKENS), expected, rtol=1e-4, atol=1e-4)
        for number, source in enumerate((native, exotic)):
            assert call("merge", root / "hf", source, tmp_path / f"merged{number}") == 0
            merged: Any = LlamaForCausalLM.from_pretrained(tmp_path / f"merged{number}")
            torch.testing.assert_close(merged(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)


def test_our_own_adapter_becomes_what_its_run_would_export(root: Path, tmp_path: Path) -> None:
    """The base's path and digest go along, also back again."""
    assert call("convert", root / OWN, tmp_path / "peft", "--to", "peft") == 0
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["r"], config["lora_alpha"]) == (str(root / "hf"), 4, 8)
    assert call("convert", tmp_path / "peft", tmp_path / "native", "--to", "native") == 0
    manifests = [json.loads((folder / "MANIFEST.json").read_text()) for folder in (root / OWN, tmp_path / "native")]
    assert manifests[0]["base"] == manifests[1]["base"]
    assert call("diff", root / OWN, tmp_path / "native", "--weights") == 0


def test_a_base_that_is_known_by_its_name_alone_stays_known(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """PEFT records no digest: the name goes to native and back, and a base of another name is told at a merge."""
    theirs, native, dcp, back = (tmp_path / name for name in ("theirs", "native", "dcp", "back"))
    shutil.copytree(root / "peft1", theirs)
    config = json.loads((theirs / "adapter_config.json").read_text())
    named = {"base_model_name_or_path": "someone/a-llama", "revision": "v1"}
    (theirs / "adapter_config.json").write_text(json.dumps(config | named))
    where = ("--config", root / "hf")
    assert call("convert", theirs, native, "--to", "native", *where) == 0
    base = json.loads((native / "MANIFEST.json").read_text())["base"]
    assert base == {"path": "someone/a-llama", "revision": "v1", "format": None, "digest": None}
    assert call("convert", native, dcp, "--to", "dcp") == 0
    for source, more in ((native, ()), (dcp, ("--settings", native))):
        assert call("convert", source, back, "--to", "peft", *where, *more) == 0
        converted = json.loads((back / "adapter_config.json").read_text())
        assert {key: converted.get(key) for key in (*named, "titan_ckpt_base")} == {**named, "titan_ckpt_base": None}
        shutil.rmtree(back)
    other = tmp_path / "other"
    shutil.copytree(root / "hf", other)
    (other / "config.json").write_text(json.dumps(SHAPE.to_hf() | {"_name_or_path": "someone/another"}))
    assert call("merge", other, native, tmp_path / "merged") == 0
    assert "was trained on someone/a-llama, and the base of this run" in caplog.text


def test_f4_diff_compares_a_peft_folder_with_our_own_adapter(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same is the same in PEFT, native and DCP; one element, and a scale that no tensor shows, are named."""
    peft, dcp = tmp_path / "peft", tmp_path / "dcp"
    assert call("convert", root / OWN, peft, "--to", "peft") == 0
    assert call("convert", root / OWN, dcp, "--to", "dcp") == 0
    for pair in ((peft, root / OWN), (root / OWN, peft), (peft, dcp), (root / OWN, dcp)):
        code, found = told(capsys, "diff", *pair)
        assert (code, found["components"][0]["num_equal"]) == (0, 8), found
    assert any("scale" in line for line in found["not_compared"]) is False
    config = json.loads((peft / "adapter_config.json").read_text())
    (peft / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 99}))
    tensors = adapter(peft)
    key = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    tensors[key][0, 0] += 1
    save_file(tensors, peft / "adapter_model.safetensors", {"format": "pt"})
    code, found = told(capsys, "diff", peft, root / OWN)
    ((difference,),) = [component["tensors"] for component in found["components"]]
    assert (code, difference["name"], difference["num_different"]) == (1, "layers.1.attention.wq.lora_a.weight", 1)
    scales = {s["name"]: (s["left"], s["right"]) for s in found["settings"]}
    assert scales["layers.0.attention.wq scale"] == ("24.75", "2")
    code, found = told(capsys, "diff", peft, dcp)
    assert any(line == f"{dcp} does not say the scale of its adapter" for line in found["not_compared"])
    assert call("diff", peft, root / "hf") == 2


def test_f4_merge_refuses_another_base_by_its_digest(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One changed element of the base is enough; a base that a run had cast, or in another format, is the same."""
    changed = tmp_path / "hf"
    shutil.copytree(root / "hf", changed)
    path = next(changed.glob("*.safetensors"))
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, path, {"format": "pt"})
    assert call("convert", root / OWN, tmp_path / "peft", "--to", "peft") == 0
    for source in (root / OWN, tmp_path / "peft"):
        assert call("merge", changed, source, tmp_path / "out") == 2
        assert "was trained on another base" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    code, written = told(capsys, "merge", root / "hf", root / OWN, root / "peft1", tmp_path / "out")
    assert code == 0
    assert "was trained on this base: digest" in written["notes"][0]
    assert "records no digest of its base" in written["notes"][1]
    native = root / "run2/checkpoints/step-1"
    assert call("merge", native, tmp_path / "peft", tmp_path / "out2", "--config", root / "hf") == 0


def test_a_base_that_its_run_had_cast_is_the_same_base(root: Path, tmp_path: Path) -> None:
    """The folder is bfloat16 and the run float32: the digest is that of the values in the run's memory."""
    half = tmp_path / "half"
    assert call("convert", root / "hf", half, "--to", "hf", "--dtype", "bfloat16") == 0
    save_step(half, tmp_path / "run", converters=from_tables([LORA]), cast=True)
    assert call("merge", half, tmp_path / "run/checkpoints/step-1", tmp_path / "out") == 0
    assert call("merge", root / "hf", tmp_path / "run/checkpoints/step-1", tmp_path / "other") == 2


def test_a_base_is_digested_once_if_the_adapter_records_its_dtype(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of an earlier version has no dtype: then the base is digested as it is stored, and as it may be cast."""
    half, peft = tmp_path / "half", tmp_path / "peft"
    assert call("convert", root / "hf", half, "--to", "hf", "--dtype", "bfloat16") == 0
    save_step(half, tmp_path / "run", converters=from_tables([LORA]), cast=True)
    assert call("convert", tmp_path / "run/checkpoints/step-1", peft, "--to", "peft") == 0
    passes: list[Mapping[str, str]] = []

    def digest(digests: Mapping[str, str]) -> str:
        passes.append(digests)
        return base_digest(digests)

    monkeypatch.setattr("titan_ckpt.tools.adapters.base_digest", digest)
    assert call("merge", half, peft, tmp_path / "once") == 0
    assert len(passes) == 1
    record = json.loads((peft / "titan_ckpt.json").read_text())
    assert record["titan_ckpt_base"].pop("dtype") == "float32"
    (peft / "titan_ckpt.json").write_text(json.dumps(record))
    assert call("merge", half, peft, tmp_path / "guessed") == 0
    assert len(passes) == 3


def test_what_is_no_adapter_or_says_no_scale_is_refused(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each message names the folder and the next step, and nothing is written."""
    assert call("convert", root / OWN, tmp_path / "dcp", "--to", "dcp") == 0
    config, out = ("--config", root / "hf"), tmp_path / "out"
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(SHAPE.to_hf() | {"num_hidden_layers": 1}))
    base: Any = LlamaForCausalLM.from_pretrained(root / "hf")
    matrix = tmp_path / "matrix"
    settings = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["embed_tokens.weight"])
    get_peft_model(base, settings).save_pretrained(str(matrix))
    cases: list[tuple[tuple[object, ...], str]] = [
        (("convert", root / "peft1", out, "--to", "hf"), f"titan-ckpt merge BASE {root / 'peft1'} {out}"),
        (("convert", root / "hf", out, "--to", "peft"), "holds whole weights: no adapter is in it"),
        (("convert", root / "run1/checkpoints/step-1", out, "--to", "peft", *config), "no adapter is in it"),
        (("convert", tmp_path / "dcp", out, "--to", "native"), "says no rank and no alpha of its adapter"),
        (("convert", tmp_path / "dcp", out, "--to", "native", "--settings", root / "peft2"), "settings of another"),
        (("convert", root / "peft1", out, "--to", "native", "--config", other), "the model (llama3) has no place for"),
        (("convert", root / "peft1", root / "peft2", "--to", "peft", *config), "is there already"),
        (("merge", root / "hf", tmp_path / "dcp", out), "says no rank and no alpha"),
        (("convert", matrix, out, "--to", "native", *config), "embed_tokens: target_parameters adapts its weight as a"),
    ]
    capsys.readouterr()
    for words, reason in cases:
        assert call(*words) == 2, words
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert reason in error, error
        assert not out.exists()
