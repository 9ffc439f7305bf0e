"""A LoRA run through the manager: base from Hugging Face, adapter-only saves, resume, both exports, real peers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from tests import world
from tests.interop.folders import logits
from titan_ckpt import CheckpointManager, ExportConfig, ResumeConfig, SaveConfig, converters
from titan_ckpt.models.llama3 import Llama3, Llama3Config

IDS = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(0))


def reload(folder: Path, **options: Any) -> Any:
    """Open a folder with transformers, in evaluation mode."""
    model: Any = LlamaForCausalLM.from_pretrained(folder, **options)
    return model.eval()


@dataclass
class LoraRun:
    model: Llama3
    converter: Any
    optimizer: torch.optim.Optimizer

    @classmethod
    def build(cls, base: Path, seed: int = 0, **lora: Any) -> LoraRun:
        table = {"kind": "lora", "rank": 4, "alpha": 8.0, "target_modules": ["wq", "wk", "wv", "w2"]} | lora
        converter = converters.from_tables([table])
        model = world.llama(Llama3Config.from_hf(json.loads((base / "config.json").read_text())), seed, converter)
        return cls(model, converter, world.adamw(model))

    def manager(self, folder: Path, sources: list[Path], **settings: Any) -> CheckpointManager:
        settings.setdefault("save", SaveConfig(interval=2))
        return world.manager(
            folder, self.model, self.optimizer, initial_load=sources, **settings, model_converters=self.converter
        )

    def step(self) -> float:
        ids = torch.randint(0, 96, (2, 8))
        loss = torch.nn.functional.cross_entropy(self.model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return world.learn(self.optimizer, loss)

    def logits(self) -> torch.Tensor:
        return logits(self.model, IDS)


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
