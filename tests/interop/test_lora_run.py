"""A LoRA run through the manager: base from Hugging Face, adapter-only saves, resume, both exports, real peers."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from titan_ckpt import (
    CheckpointConfig,
    CheckpointManager,
    ExportConfig,
    InitialLoadConfig,
    ResumeConfig,
    SaveConfig,
    StateDictTransforms,
    converters,
)
from titan_ckpt.errors import BaseMismatchError, ExportError, LoadMismatchError
from titan_ckpt.models.llama3 import Llama3, Llama3Config

IDS = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A tiny Llama that transformers wrote."""
    return write_base(tmp_path / "base", seed=0)


def reload(folder: Path, **options: Any) -> Any:
    """Open a folder with transformers, in evaluation mode."""
    model: Any = LlamaForCausalLM.from_pretrained(folder, **options)
    return model.eval()


def write_base(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@dataclass
class LoraRun:
    model: Llama3
    hooks: Any
    optimizer: torch.optim.Optimizer

    @classmethod
    def build(cls, base: Path, seed: int = 0, **lora: Any) -> LoraRun:
        torch.manual_seed(seed)
        model = Llama3(Llama3Config.from_hf(json.loads((base / "config.json").read_text())))
        model.init_weights()
        table = {"kind": "lora", "rank": 4, "alpha": 8.0, "target_modules": ["wq", "wk", "wv", "w2"]} | lora
        hooks = converters.from_tables([table])
        hooks.convert(model)
        return cls(model, hooks, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))

    def manager(self, folder: Path, sources: list[Path], **settings: Any) -> CheckpointManager:
        settings.setdefault("save", SaveConfig(interval=2))
        config = CheckpointConfig(initial_load=tuple(InitialLoadConfig(str(s)) for s in sources), **settings)
        transforms = StateDictTransforms(key_map=self.model.key_map(), hf_config=self.model.hf_config())
        return CheckpointManager(
            config,
            model_parts=[self.model],
            optimizers=[self.optimizer],
            sd_transforms=transforms,
            model_converters=self.hooks,
            base_folder=folder,
        )

    def step(self) -> float:
        ids = torch.randint(0, 96, (2, 8))
        logits = self.model(ids)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())

    @torch.no_grad()
    def logits(self) -> torch.Tensor:
        logits: torch.Tensor = self.model(IDS)
        return logits


EXPORTS = (ExportConfig("hf"), ExportConfig("peft"))


def trained(tmp_path: Path, base: Path, **lora: Any) -> LoraRun:
    """Four steps, saved at 2 and 4, exported merged and as an adapter."""
    run = LoraRun.build(base, **lora)
    with run.manager(tmp_path / "run", [base], export=EXPORTS) as manager:
        for step in range(manager.load().step + 1, 5):
            run.step()
            manager.save(step, last_step=step == 4)
    return run


def test_a4_saves_hold_the_adapter_only_and_resume_over_the_base(tmp_path: Path, base: Path) -> None:
    """A save takes 12 bytes per adapter parameter and none of the base; a resume of both goes on bit for bit."""
    whole = trained(tmp_path, base)
    saved = tmp_path / "run" / "checkpoints" / "step-2"
    names = load_file(saved / "rank-00000.safetensors")
    assert {n for n in names if n.startswith("model.")} == {
        f"model.{n}" for n in whole.model.state_dict() if "lora_" in n
    }
    adapter = sum(p.numel() for n, p in whole.model.named_parameters() if "lora_" in n)
    plain = sum(p.numel() for n, p in whole.model.named_parameters() if "lora_" not in n)
    stored = sum(file.stat().st_size for file in saved.iterdir())
    assert 12 * adapter <= stored <= 12 * adapter + 64_000 < 4 * plain, "float32 and AdamW's two moments; and names"
    resumed = LoraRun.build(base, seed=7)
    with resumed.manager(tmp_path / "run", [base], resume=ResumeConfig(step=2), save=None) as manager:
        assert manager.load().step == 2
        resumed.step()
        resumed.step()
    assert torch.equal(resumed.logits(), whole.logits())


def test_exports_give_the_same_logits_in_transformers_and_peft(tmp_path: Path, base: Path) -> None:
    """The merged folder in transformers, base + adapter in PEFT, and our model: within 1e-5."""
    run = trained(tmp_path, base)
    exports = tmp_path / "run" / "exports"
    merged = reload(exports / "step-4")
    adapted = PeftModel.from_pretrained(reload(base), str(exports / "step-4-peft"))
    adapted.eval()
    plain = reload(base)
    with torch.no_grad():
        assert (merged(IDS).logits - run.logits()).abs().max() <= 1e-5
        assert (adapted(IDS).logits - run.logits()).abs().max() <= 1e-5
        assert (plain(IDS).logits - run.logits()).abs().max() > 1e-3


def test_a4_base_and_exported_adapter_are_sources_of_another_run(tmp_path: Path, base: Path) -> None:
    """Multi-source: base + our own PEFT folder give the logits of the run that wrote it."""
    run = trained(tmp_path, base)
    other = LoraRun.build(base, seed=9)
    sources = [base, tmp_path / "run" / "exports" / "step-4-peft"]
    with other.manager(tmp_path / "second", sources) as manager:
        report = manager.load().report
    assert torch.equal(other.logits(), run.logits())
    assert not report.initialised


def test_a4_an_adapter_that_peft_wrote_is_a_source(tmp_path: Path, base: Path) -> None:
    """q and k rows are permuted on the way in: the logits are PEFT's, within 1e-5."""
    theirs = get_peft_model(
        LlamaForCausalLM.from_pretrained(base),
        PeftLoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "down_proj"]),
    ).eval()
    torch.manual_seed(3)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained(str(tmp_path / "adapter"))
    run = LoraRun.build(base)
    with run.manager(tmp_path / "run", [base, tmp_path / "adapter"]) as manager:
        manager.load()
    with torch.no_grad():
        assert (theirs(IDS).logits - run.logits()).abs().max() <= 1e-5


def test_f9_another_base_is_named(tmp_path: Path, base: Path) -> None:
    """A step and an exported adapter both know the weights they were trained on."""
    trained(tmp_path, base)
    other = write_base(tmp_path / "other", seed=1)
    run = LoraRun.build(base)
    with run.manager(tmp_path / "run", [other]) as manager, pytest.raises(BaseMismatchError, match=r"step 4.*another"):
        manager.load()
    sources = [other, tmp_path / "run" / "exports" / "step-4-peft"]
    run = LoraRun.build(base)
    with run.manager(tmp_path / "b", sources) as manager, pytest.raises(BaseMismatchError, match=r"step-4-peft"):
        manager.load()


def test_f9_a_base_that_moved_is_the_same_base(tmp_path: Path, base: Path) -> None:
    """The digest counts, not the path."""
    trained(tmp_path, base)
    moved = tmp_path / "moved"
    shutil.move(base, moved)
    run = LoraRun.build(moved)
    with run.manager(tmp_path / "run", [moved]) as manager:
        assert manager.load().step == 4


def test_an_adapter_whose_keys_match_nothing_is_refused(tmp_path: Path, base: Path) -> None:
    """Keys under another prefix: listed with what they may have meant, nothing is loaded."""
    run = trained(tmp_path, base)
    adapter = tmp_path / "run" / "exports" / "step-4-peft"
    tensors = load_file(adapter / "adapter_model.safetensors")
    wrong = {k.replace("self_attn", "attention"): v for k, v in tensors.items()}
    save_file(wrong, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    run = LoraRun.build(base)
    before = {k: v.clone() for k, v in run.model.state_dict().items()}
    with run.manager(tmp_path / "b", [base, adapter]) as manager, pytest.raises(LoadMismatchError, match="attention"):
        manager.load()
    assert all(torch.equal(v, before[k]) for k, v in run.model.state_dict().items())


def test_an_adapter_without_a_converter_is_refused(tmp_path: Path, base: Path) -> None:
    """A PEFT source in a run without LoRA says which converter to add."""
    run = trained(tmp_path, base)
    plain = Llama3(run.model.config)
    config = CheckpointConfig(
        initial_load=(InitialLoadConfig(str(base)), InitialLoadConfig(str(tmp_path / "run/exports/step-4-peft")))
    )
    transforms = StateDictTransforms(key_map=plain.key_map(), hf_config=plain.hf_config())
    with (
        CheckpointManager(config, model_parts=[plain], sd_transforms=transforms, base_folder=tmp_path / "b") as manager,
        pytest.raises(LoadMismatchError, match=r'kind = "lora"'),
    ):
        manager.load()


def test_a_peft_export_without_an_adapter_is_refused_before_training(tmp_path: Path, base: Path) -> None:
    """Nothing is trained for an export that cannot be made."""
    model = Llama3(LoraRun.build(base).model.config)
    transforms = StateDictTransforms(key_map=model.key_map(), hf_config=model.hf_config())
    with pytest.raises(ExportError, match="owns adapter weights"):
        CheckpointManager(
            CheckpointConfig(export=(ExportConfig("peft"),)),
            model_parts=[model],
            sd_transforms=transforms,
            base_folder=tmp_path,
        )


def test_a_bf16_export_is_the_cast_of_the_weights(tmp_path: Path, base: Path) -> None:
    """Every exported tensor of a plain run equals the native one, permuted and rounded once."""
    model = LoraRun.build(base).model
    plain = Llama3(model.config)
    plain.init_weights()
    transforms = StateDictTransforms(key_map=plain.key_map(), hf_config=plain.hf_config())
    config = CheckpointConfig(export=(ExportConfig("hf", dtype="bfloat16"), ExportConfig("dcp", folder="dcp")))
    with CheckpointManager(config, model_parts=[plain], sd_transforms=transforms, base_folder=tmp_path) as manager:
        manager.save(1, last_step=True)
    back = reload(tmp_path / "exports" / "step-1", dtype=torch.float32)
    plain.bfloat16().float()
    with torch.no_grad():
        assert (back(IDS).logits - plain(IDS)).abs().max() <= 1e-5
    again = Llama3(model.config)
    source = InitialLoadConfig(str(tmp_path / "dcp" / "step-1"))
    with CheckpointManager(
        CheckpointConfig(initial_load=(source,)), model_parts=[again], base_folder=tmp_path / "c"
    ) as manager:
        manager.load()
    assert (again.state_dict()["output.weight"].bfloat16() == plain.state_dict()["output.weight"].bfloat16()).all()
