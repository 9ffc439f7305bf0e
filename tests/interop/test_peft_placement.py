"""PEFT exports by PEFT's own rules of names: each pair lands on its module, or is refused before training."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from tests import world
from tests.interop.folders import disturb
from tests.zoo.model_runs import Outcome, lora_outcomes, write_base
from tests.zoo.tiny_models import species, tiny_config
from titan_ckpt import (
    CheckpointConfig,
    CheckpointManager,
    ExportConfig,
    InitialLoadConfig,
    SaveConfig,
    StateDictTransforms,
)
from titan_ckpt.converters import LoRAConfig, LoRAConverter, ModelConvertersContainer
from titan_ckpt.converters.lora.placement import misplaced
from titan_ckpt.errors import ExportError
from titan_ckpt.formats.huggingface.peft import PREFIX
from titan_ckpt.geometry.keymap import KeyMap
from titan_ckpt.models import hf, qwen3_moe

auto: Any = AutoModelForCausalLM  # its methods have no types
TOKENS = torch.arange(12).view(2, 6) % 7 + 3
TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {**TINY, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64}
GEMMA = {**TINY, "head_dim": 8, "tie_word_embeddings": False}
DEEPSEEK = {
    **MOE, "n_routed_experts": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip


class Run:
    """A model of transformers over its own folder, with adapters, and the manager that exports them."""

    def __init__(self, kind: str, shape: dict[str, Any], folder: Path, *targets: str, **settings: Any) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.base = auto.from_config(hf.build({"model_type": kind, **shape}).config).eval()
        self.base.save_pretrained(folder / "base")
        self.model = hf.build(folder / "base")
        table = {"kind": "lora", "rank": 2, "alpha": 8.0, "target_modules": list(targets), **settings}
        self.converters = world.convert(self.model.eval(), table)

    def manager(self, *exports: ExportConfig, sources: tuple[InitialLoadConfig, ...] = ()) -> CheckpointManager:
        base = InitialLoadConfig(str(self.folder / "base"))
        return world.manager(
            self.folder / "run",
            self.model,
            initial_load=sources or (base,),
            export=exports,
            model_converters=self.converters,
        )

    @torch.no_grad()
    def export(self) -> torch.Tensor:
        """Give all adapters values, export them, and return the logits of the model that was exported."""
        with self.manager(ExportConfig("peft")) as manager:
            manager.load()
            disturb(self.model, lambda name, _: self.converters.key_filter(name), std=0.2)
            manager.save(1, last_step=True)
        logits: torch.Tensor = self.model(TOKENS)
        return logits


ATTENTION_AND_MLP = ("q_proj", "o_proj", "gate_proj", "down_proj")
PLACED: dict[str, tuple[str, dict[str, Any], tuple[str, ...], dict[str, Any]]] = {
    "dense, with patterns": (
        "llama", TINY, ATTENTION_AND_MLP,
        {"rank_pattern": {"q_proj": 3, "1.mlp.down_proj": 1}, "alpha_pattern": {"0.self_attn.o_proj": 3.0}},
    ),
    "an embedding that scales": ("gemma3_text", GEMMA, ("embed_tokens", "q_proj"), {"modules_to_save": ["model.norm"]}),
    "Conv1D": ("gpt2", GPT2, ("c_attn", "c_proj", "wte"), {}),
    "experts": ("qwen3_moe", {**MOE, "num_experts": 4}, ("experts.down_proj", "q_proj"), {}),
    "a shared expert beside experts": (
        "qwen2_moe", {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 16},
        ("layers.0.mlp.shared_expert.up_proj", "v_proj"), {},
    ),
    "dense layers named like experts": (
        "deepseek_v3", DEEPSEEK, ("gate_proj", "q_a_proj", "down_proj"), {"rank_pattern": {"mlp.gate_proj": 3}},
    ),
    "only dense layers named like experts": ("deepseek_v3", DEEPSEEK, ("shared_experts.up_proj",), {}),
    "experts of one layer": (
        "deepseek_v3", {**DEEPSEEK, "num_hidden_layers": 3, "first_k_dense_replace": 0},
        ("layers.1.mlp.experts.down_proj",), {},
    ),
    "both stacks of experts": ("qwen3_moe", {**MOE, "num_experts": 4}, ("experts.down_proj", "gate_up_proj"), {}),
    "experts that PEFT renames": ("mixtral", {**TINY, "num_local_experts": 4}, ("experts.down_proj", "v_proj"), {}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")  # it omits parameters
@pytest.mark.parametrize("name", PLACED)
def test_peft_computes_what_was_trained(name: str, tmp_path: Path) -> None:
    """PEFT opens the folder over the base and gives the logits of the run."""
    kind, shape, targets, settings = PLACED[name]
    run = Run(kind, shape, tmp_path, *targets, **settings)
    trained = run.export()
    opened = PeftModel.from_pretrained(
        auto.from_pretrained(tmp_path / "base"), str(tmp_path / "run/exports/step-1-peft")
    )
    with torch.no_grad():
        assert (opened.eval()(TOKENS).logits - trained).abs().max() <= 1e-5
        assert (run.base(TOKENS).logits - trained).abs().max() > 1e-2


def test_modules_that_transformers_renames_on_load_are_placed(tmp_path: Path) -> None:
    """The settings name a module as the folder and as the model have it; tensors keep the folder's names."""
    (kind,) = (kind for kind in species() if str(kind) == "lfm3")
    write_base(tiny_config(kind), tmp_path / "base")
    assert [*lora_outcomes(tmp_path / "base", tmp_path / "runs").values()] == [Outcome("exact")]


REFUSED: dict[str, tuple[str, dict[str, Any], tuple[str, ...], dict[str, Any], str]] = {
    "a name that differs in the folder": ("gpt_neox", TINY, ("lm_head",), {}, "PEFT has no module for embed_out"),
    "dropout beside experts": (
        "deepseek_v3", DEEPSEEK, ("layers.0.mlp.gate_proj",), {"dropout": 0.1}, "does not work with lora_dropout",
    ),
}  # fmt: skip


def test_an_export_is_a_source_of_the_next_run(tmp_path: Path) -> None:
    """Parameters that are named in place of modules are read like modules."""
    kind, shape, targets, settings = PLACED["dense layers named like experts"]
    run = Run(kind, shape, tmp_path, *targets, **settings)
    trained = run.export()
    again = Run(kind, shape, tmp_path / "again", *targets, **settings)
    sources = (InitialLoadConfig(str(tmp_path / "base")), InitialLoadConfig(str(tmp_path / "run/exports/step-1-peft")))
    with again.manager(sources=sources) as manager, torch.no_grad():
        manager.load()
        assert torch.equal(again.model(TOKENS), trained)


@pytest.mark.parametrize("name", REFUSED)
def test_an_adapter_that_peft_would_ignore_is_refused_before_training(name: str, tmp_path: Path) -> None:
    """The manager is not even made; without the export the same run trains, and merged weights can be exported."""
    kind, shape, targets, settings, fault = REFUSED[name]
    run = Run(kind, shape, tmp_path, *targets, **settings)
    state = torch.get_rng_state()
    with pytest.raises(ExportError, match=f"checkpoint.export: peft: .*{fault}.*Leave these modules out"):
        run.manager(ExportConfig("peft"))
    assert torch.equal(torch.get_rng_state(), state)
    run.manager(ExportConfig("hf")).close()


class OtherKind(LoRAConverter):
    """A converter whose adapter other tools would know by another kind than LoRA."""

    def state_dict_adapter(self) -> Any:
        adapter: Any = super().state_dict_adapter()
        return SimpleNamespace(key_map=adapter.key_map, file_config=lambda base: {"peft_type": "IA3"})


def test_an_adapter_of_another_kind_is_refused_before_training(tmp_path: Path) -> None:
    """A user's adapter that PEFT does not read as LoRA costs no run: its export is refused when the manager is made."""
    converter = ModelConvertersContainer([OtherKind(LoRAConfig(("up",), rank=2))])
    model = nn.Sequential()
    model.add_module("up", nn.Linear(4, 4))
    converter.convert(model)
    with pytest.raises(ExportError, match=r"checkpoint.export: peft: peft_type is 'IA3', expected 'LORA'.*merged"):
        CheckpointManager(
            CheckpointConfig(save=SaveConfig(interval=1), export=(ExportConfig("peft"),)),
            model_parts=[model],
            model_converters=converter,
            sd_transforms=StateDictTransforms(KeyMap(identity=True)),
            base_folder=tmp_path,
        )


def test_tensors_that_peft_drops_without_a_word_are_named() -> None:
    """The gate by its name in old releases and by its new one: PEFT takes one of them and reports nothing."""

    def pair(module: str, inputs: int, outputs: int) -> dict[str, list[int]]:
        return {f"{PREFIX}{module}.lora_A.weight": [2, inputs], f"{PREFIX}{module}.lora_B.weight": [outputs, 2]}

    hf_config = {"model_type": "mixtral", **TINY, "num_hidden_layers": 1, "num_local_experts": 2}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["gate"], "inference_mode": True}
    old, new = (pair(f"model.layers.0.{parent}.gate", 32, 2) for parent in ("block_sparse_moe", "mlp"))
    assert misplaced(new, config, hf_config) == []
    (line,) = misplaced({**old, **new}, config, hf_config)
    assert re.fullmatch(
        r"PEFT would not put .*\.gate\.lora_A\.weight, .*\.gate\.lora_B\.weight on exactly one module", line
    )


def test_without_peft_the_names_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two projections of experts that transformers fuses is refused from the names in the folder alone."""
    monkeypatch.setitem(sys.modules, "peft", None)
    shape = replace(qwen3_moe.FLAVORS["debug-1m"], num_layers=2)
    expected = ["PEFT fuses gate_proj and up_proj of experts, and up_proj has no adapter"]
    for targets, faults in ((["experts.w1"], expected), (["wq", "experts.w2"], []), (["w1", "w2", "w3"], [])):
        model = qwen3_moe.Qwen3Moe(shape)
        made = world.convert(model, {"kind": "lora", "target_modules": targets})
        adapter: Any = made.state_dict_adapter()
        assert adapter.misplaced(model.key_map(), {}, model.hf_config()) == faults


class Nested(nn.Module):
    """Names of which one is the end of another, and numbers that name layers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(2)])
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(2)])})
        self.norm = nn.LayerNorm(4)


@pytest.mark.parametrize(
    ("targets", "rank_pattern"),
    [
        (["layers.*"], {}),
        (["encoder.layers.0.0", "layers.1.2"], {"layers.1.2": 1}),
        (["layers.0.[0]", "layers.1.[0]"], {}),  # each is also the end of a name in the encoder
        (["layers.0.0"], {"layers.0.[0]": 1}),
        (["layers.0.2", "layers.1.2"], {}),
    ],
)
def test_peft_adapts_the_same_modules_with_the_same_ranks(targets: list[str], rank_pattern: dict[str, int]) -> None:
    """A short name such as "0" would also mean layers, and a full name may be the end of another one."""
    model = Nested()
    made = world.convert(model, {"kind": "lora", "rank": 2, "target_modules": targets, "rank_pattern": rank_pattern})
    ours = {name: tuple(p.shape) for name, p in model.named_parameters() if name.endswith("lora_a.weight")}
    adapter: Any = made.state_dict_adapter()
    fields = {
        k: v
        for k, v in adapter.file_config(KeyMap(identity=True)).items()
        if k in ("r", "target_modules", "rank_pattern")
    }
    theirs: Any = get_peft_model(Nested(), LoraConfig(**fields))
    found = {
        n.removeprefix("base_model.model."): tuple(p.shape) for n, p in theirs.named_parameters() if ".lora_A." in n
    }
    assert found == {name.replace("lora_a.weight", "lora_A.default.weight"): shape for name, shape in ours.items()}
    chosen = fields["target_modules"]
    assert isinstance(chosen, str) or not any(map(str.isdigit, chosen)), "a longer model has layers of these numbers"
