"""Every file in configs/ runs: a few small steps on the CPU, in the order in which their comments tell to run them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.world import on_ranks
from titan_ckpt.converters import from_tables
from titan_ckpt.training.callbacks.console import read_metrics
from titan_ckpt.training.launch.command import main
from titan_ckpt.training.run_file import read_run

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
SMALL = {"training.steps": 2, "training.batch_size": 2, "data.sequence_length": 16, "checkpoint.save.interval": 1}
TINY = {**SMALL, "model.flavor": "debug-0.5m"}
SPREAD: dict[str, object] = {**SMALL, "training.batch_size": 4, "data.tokenizer": 300}
BASE = "outputs/pretrain/exports/step-2"
ON_BASE = {**SMALL, "model.folder": BASE, "data.tokenizer": BASE, "checkpoint.initial_load.0.path": BASE}

TOKENS = torch.arange(24).reshape(2, 12)


def words(overrides: dict[str, object]) -> list[str]:
    """Return overrides as a command line has them."""
    return [word for key, value in overrides.items() for word in (f"--{key}", str(value))]


def run(name: str, overrides: dict[str, object]) -> Path:
    """Train in this process, in the current folder; check metrics and checkpoint, and return the output folder."""
    assert main([str(CONFIGS / name), *words(overrides)]) == 0
    config, _ = read_run(str(CONFIGS / name), words(overrides))
    output = Path(config.output_folder)
    assert [row["step"] for row in read_metrics(output / "metrics.jsonl")] == [1, 2]
    assert (output / "checkpoints" / "step-2" / "MANIFEST.json").is_file()
    return output


def open_model(folder: Path) -> Any:
    """Open a folder with transformers, in the dtype it has."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    return model.eval()


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = open_model(folder)(TOKENS).logits
    assert bool(torch.isfinite(out).all())
    return out.float()


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_config_is_tested_here() -> None:
    """A config that is added is a config that is run."""
    tested = set(Path(__file__).read_text().split('"'))
    assert {path.name for path in CONFIGS.iterdir()} <= tested | {f"{name}.toml" for name in tested}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_a_config_is_valid_as_it_stands(path: Path) -> None:
    """Without any override the file has no fault."""
    config, _ = read_run(str(path))
    assert config.checkpoint.save is not None


def test_debug_pretrain_runs() -> None:
    """The first command of the README."""
    run("debug_pretrain.toml", TINY)


def test_pretrain_lora_and_continued_lora_run_one_after_the_other() -> None:
    """A base is trained and exported, an adapter is trained on it, and trained on, and merged."""
    base = run("pretrain_hf_export.toml", TINY) / "exports" / "step-2"
    weights = load_file(base / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in weights, "debug-0.5m is tied"

    adapter = run("lora_from_hf.toml", ON_BASE) / "exports" / "step-2-peft"
    first = load_file(adapter / "adapter_model.safetensors")
    assert (adapter / "adapter_config.json").is_file()

    overrides = {**ON_BASE, "checkpoint.initial_load.1.path": adapter}
    exports = run("lora_from_base_and_adapter.toml", overrides) / "exports"
    second = load_file(exports / "step-2-peft" / "adapter_model.safetensors")
    assert first.keys() == second.keys()
    assert any(not torch.equal(first[key], second[key]) for key in first)
    merged = load_file(exports / "step-2" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(merged[name], weights[name].float())


@pytest.mark.parametrize("name", ["float8_lora.toml", "qat_lora.toml"])
def test_lora_over_a_replaced_base_runs(name: str) -> None:
    """Two converters at once train on the exported base; merged weights and adapter are exported."""
    run("pretrain_hf_export.toml", TINY)
    exports = run(name, ON_BASE) / "exports"
    assert (exports / "step-2" / "model.safetensors").is_file()
    if name == "qat_lora.toml":
        logits(exports / "step-2-quantized")
    assert (exports / "step-2-peft" / "adapter_model.safetensors").is_file()


def test_qat_runs() -> None:
    """Fake quantization trains; the quantized export computes what the plain one does when it is fake-quantized."""
    exports = run("qat.toml", TINY) / "exports"
    weights = load_file(exports / "step-2" / "model.safetensors")
    assert all(value.is_floating_point() for value in weights.values())
    from_tables([{"kind": "qat", "scheme": "int4_weight_only"}]).convert(model := open_model(exports / "step-2"))
    with torch.no_grad():
        assert torch.equal(logits(exports / "step-2-quantized"), model(TOKENS).logits)


def test_float8_runs() -> None:
    """Emulated float8 trains on this machine; its weights are exported plain, and as float8 that transformers opens."""
    exports = run("float8.toml", TINY) / "exports"
    weights = load_file(exports / "step-2" / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    far = logits(exports / "step-2-quantized") - logits(exports / "step-2")
    assert 0 < far.abs().max() < 0.1


def run_all(folder: Path, names: list[str]) -> None:
    os.chdir(folder)
    for name in names:
        run(f"{name}.toml", {**TINY, "data.tokenizer": 1024} if name == "fsdp2" else SPREAD)


def test_every_layout_runs(tmp_path: Path) -> None:
    """Ranks that share matrices, layers, experts or copies train, save together and export one folder."""
    files = {"fsdp2": 2, "pipeline": 2, "expert_parallel": 2, "hsdp": 4, "fsdp_tensor_parallel": 4}
    for nproc in (2, 4):
        on_ranks(nproc, run_all, tmp_path, [name for name, number in files.items() if number == nproc])
    for name, num_files in files.items():
        step = tmp_path / "outputs" / name / "checkpoints" / "step-2"
        assert len(list(step.glob("*.safetensors"))) == num_files
        exported = tmp_path / "outputs" / name / "exports" / "step-2" / "model.safetensors"
        assert exported.is_file() == (name != "hsdp")
