"""Every setting of PEFT's LoraConfig, made by PEFT and read in both ways: PEFT's logits, or a refusal by its name."""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import EvaConfig, LoraConfig, LoraRuntimeConfig, get_peft_model, initialize_lora_eva_weights
from peft.tuners.lora.config import BdLoraConfig, KasaConfig, LoraGAConfig, MontecloraConfig, VeloraConfig
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GptOssConfig, LlamaConfig, Qwen2Config, Qwen3MoeConfig

from tests import world
from tests.interop.folders import disturb, logits
from tests.zoo.model_runs import is_first
from tests.zoo.sample import chosen
from tests.zoo.worlds import Row, judged
from titan_ckpt import InitialLoadConfig
from titan_ckpt.converters import from_tables
from titan_ckpt.errors import CheckpointError
from titan_ckpt.formats.huggingface.peft import PREFIX, ModuleNumbers, PeftReader
from titan_ckpt.formats.huggingface.peft_fields import HONOURED, REFUSED, WITHOUT_EFFECT, saves, targets_stacks
from titan_ckpt.formats.huggingface.reader import read_config
from titan_ckpt.models import hf
from titan_ckpt.weights.lora import TrainedRows

FLOORS = {"": 146}
"""Settings and ways in that are exact at the least."""

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=16),
    "gpt2": GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=2, n_head=4, tie_word_embeddings=False),
}
TARGETS = {"llama": ["q_proj", "k_proj", "down_proj"], "gpt2": ["c_attn", "c_proj", "c_fc"]}
"""GPT-2's projection after attention is square, the others are not."""


def is_trained(_: str, parameter: nn.Parameter) -> bool:
    return parameter.requires_grad


def _as_made(model: Any, folder: Path) -> None:
    model.save_pretrained(str(folder), save_embedding_layers=False)


def _by_default(model: Any, folder: Path) -> None:
    """Save as people do: tables that have adapters are saved beside them."""
    disturb(model, is_trained)
    model.save_pretrained(str(folder))


def changed_tables(model: Any, folder: Path) -> None:
    """Save after the tables of the base were changed, as new rows of a resized vocabulary are."""
    adapted = any(
        "lora_" in name for name, _ in model.named_parameters() if "embed_tokens" in name or "lm_head" in name
    )
    tables = ("embed_tokens.base_layer", "lm_head.base_layer") if adapted else ("embed_tokens", "lm_head")
    disturb(model, lambda name, _: any(table in name for table in tables))
    disturb(model, is_trained)
    model.save_pretrained(str(folder), save_embedding_layers=True)


def _converted(model: Any, folder: Path) -> None:
    """Save as PEFT turns an adapter with a changed base into an ordinary one: by what it was at the start."""
    start = folder.with_name("start")
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(str(start))
    disturb(model, is_trained)
    model.save_pretrained(str(folder), path_initial_model_for_weight_conversion=str(start))


@dataclass(frozen=True)
class Case:
    """One adapter: LoraConfig's settings, what is changed in its file, and the field by which it must be refused."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    refused: str | None = None
    edited: Mapping[str, Any] = field(default_factory=dict)
    base: str = "llama"
    save: Callable[[Any, Path], None] = _as_made
    no_converter: str = ""
    """Why no [[converters]] table can hold the adapter, so that it can only be merged."""
    no_merge: str = ""
    """Why it cannot be merged."""
    untied: bool = False
    """It is merged into a model that does not share the weight."""
    no_shards: str = ""
    """Why it cannot be merged into a weight whose rows FSDP2 has divided among ranks."""

    def reason(self, way: str) -> str:
        """Return why the case has to be refused in this way in; "" if it has to be exact."""
        if way == "as LoRA" and self.no_converter:
            return self.no_converter
        if self.refused:
            return f"{self.refused} = "
        if way == "as LoRA":
            return ""
        return self.no_merge or (self.no_shards if dist.is_initialized() else "")

    def __str__(self) -> str:
        fields = {**self.settings, **self.edited}
        text = ", ".join(f"{name}={_shown(value)}" for name, value in fields.items()) or "defaults"
        how: dict[Any, str] = {
            _converted: ", converted",
            _by_default: ", tables beside",
            changed_tables: ", changed tables beside",
        }
        return f"{self.base}: {text}{how.get(self.save, '')}"


def _shown(value: Any) -> str:
    if not dataclasses.is_dataclass(value):
        return str(value)
    fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    numbers = ", ".join(f"{name}={number}" for name, number in fields if isinstance(number, int | float))
    return f"{type(value).__name__}({numbers})"


def exact(base: str = "llama", **settings: Any) -> Case:
    return Case(settings, base=base)


def refused(*, by: str | None = None, base: str = "llama", **settings: Any) -> Case:
    return Case(settings, by or next(iter(settings)), base=base)


def edited(refused: str | None = None, **fields: Any) -> Case:
    """A folder whose config PEFT does not write, or cannot make on this machine."""
    return Case({}, refused, fields)


CASES = [
    exact(),
    exact(r=2, lora_alpha=3),
    exact(use_rslora=True),
    exact(use_dora=True),
    exact(use_dora=True, use_rslora=True, rank_pattern={"k_proj": 2}, alpha_pattern={"layers.0.mlp.down_proj": 5}),
    exact(rank_pattern={r"layers\.\d\.self_attn\.q_proj": 2}, alpha_pattern={"^model.layers.1.*": 2}),
    exact(target_modules="all-linear"),
    exact(target_modules=r".*\.1\..*(q|down)_proj"),
    exact(target_modules=["embed_tokens", "lm_head", "o_proj"]),
    exact(exclude_modules=["layers.0.self_attn.k_proj"]),
    exact(exclude_modules=".*0.*down_proj"),
    exact(layers_to_transform=[1]),
    exact(layers_to_transform=0, layers_pattern="layers"),
    exact(modules_to_save=["norm", "lm_head"]),
    exact(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    exact(target_modules=["k_proj"], target_parameters=["q_proj.weight", "down_proj.weight"]),
    exact(lora_dropout=0.5),
    exact(task_type="CAUSAL_LM", inference_mode=False, revision="main"),
    exact(runtime_config=LoraRuntimeConfig(ephemeral_gpu_offload=True)),
    exact(megatron_core="somewhere.else"),
    exact(fan_in_fan_out=True),
    exact("gpt2"),
    exact("gpt2", fan_in_fan_out=True, use_rslora=True),
    exact("gpt2", fan_in_fan_out=False, target_modules=["c_proj"]),
    exact("gpt2", target_modules=["wte", "lm_head"]),
    Case(
        {"use_dora": True},
        base="gpt2",
        no_shards="use_dora needs whole columns",
    ),
    Case({"target_modules": ["embed_tokens", "q_proj"]}, base="tied", untied=True),
    Case({"target_modules": ["lm_head", "q_proj"]}, base="tied", untied=True),
    Case({"modules_to_save": ["embed_tokens"]}, base="tied", untied=True),
    Case({"modules_to_save": ["lm_head"]}, base="tied", untied=True),
    exact("tied", modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    exact("tied", modules_to_save=["lm_head"], ensure_weight_tying=True),
    exact("tied", target_modules=["embed_tokens"], ensure_weight_tying=True),
    exact("tied", target_modules=["embed_tokens", "lm_head", "q_proj"], ensure_weight_tying=True),
    Case({"target_modules": ["lm_head", "q_proj"]}, save=_by_default),
    Case({"target_modules": ["embed_tokens", "lm_head"]}, save=_by_default),
    Case({"target_modules": ["embed_tokens", "k_proj"]}, base="tied", untied=True, save=_by_default),
    Case({"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, base="tied", save=_by_default),
    Case({"target_modules": ["lm_head", "q_proj"]}, save=changed_tables),
    Case({"target_modules": ["embed_tokens", "lm_head"]}, save=changed_tables),
    Case({"target_modules": ["q_proj"]}, save=changed_tables),
    Case({"target_modules": ["q_proj"]}, base="tied", save=changed_tables),
    exact(modules_to_save=["self_attn"], target_modules=["down_proj"]),
    exact(modules_to_save=["q_proj"], target_modules=["q_proj", "k_proj"]),
    exact("qwen2", modules_to_save=["q_proj"], target_modules=["down_proj"]),
    exact(bias="all"),
    exact(bias="lora_only"),
    exact("qwen2", bias="all"),
    exact("qwen2", bias="lora_only"),
    exact("gpt2", bias="all"),
    exact("qwen2", lora_bias=True, target_modules=["q_proj", "v_proj"]),
    exact("gpt2", lora_bias=True, bias="lora_only"),
    Case({"lora_bias": True}, base="qwen2", no_merge="lora_B.bias"),
    exact(init_lora_weights=False),
    exact(init_lora_weights="gaussian"),
    exact(init_lora_weights="orthogonal"),
    exact(init_lora_weights="mica"),
    exact(init_lora_weights="eva", eva_config=EvaConfig(rho=2.0)),
    exact(init_lora_weights="eva", eva_config=EvaConfig(rho=1.0, adjust_scaling_factors=False), r=3),
    refused(init_lora_weights="pissa"),
    refused(init_lora_weights="pissa_niter_4"),
    refused(init_lora_weights="olora"),
    refused(init_lora_weights="lora_ga", lora_ga_config=LoraGAConfig()),
    Case({"init_lora_weights": "pissa"}, save=_converted),
    Case({"init_lora_weights": "olora", "use_rslora": True}, save=_converted),
    edited("init_lora_weights", init_lora_weights="loftq", loftq_config={"loftq_bits": 4, "loftq_iter": 1}),
    edited("init_lora_weights", init_lora_weights="corda", corda_config={"corda_method": "kpm"}),
    edited("init_lora_weights", init_lora_weights="a_later_one"),
    edited(loftq_config={"loftq_bits": 4}, corda_config={"verbose": True}),
    exact(trainable_token_indices=[1, 2]),
    exact(trainable_token_indices={"embed_tokens": [3]}),
    exact(trainable_token_indices={"embed_tokens": [3], "lm_head": [9, 4]}),
    exact("tied", trainable_token_indices=[1, 2]),
    Case({"trainable_token_indices": {"lm_head": [5]}}, base="tied", untied=True),
    refused(alora_invocation_tokens=[1, 2], task_type="CAUSAL_LM"),
    refused(layer_replication=[(0, 2), (0, 2)]),
    refused(kasa_config=KasaConfig()),
    refused(velora_config=VeloraConfig(num_groups=4)),
    refused(monteclora_config=MontecloraConfig()),
    refused(use_bdlora=BdLoraConfig(target_modules_bd_a=TARGETS["llama"], nblocks=2)),
    exact(use_bdlora=BdLoraConfig(target_modules_bd_a=TARGETS["llama"], nblocks=1)),
    exact(use_qalora=True, qalora_group_size=8),
    edited("arrow_config", arrow_config={"top_k": 2}),
    edited("megatron_config", megatron_config={"hidden_size": 32}),
    exact("qwen3_moe", target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"]),
    exact("qwen3_moe", target_modules=["q_proj"], target_parameters=["experts.down_proj", "experts.gate_up_proj"]),
    exact(
        "qwen3_moe",
        target_modules=["q_proj"],
        target_parameters=["experts.down_proj", "experts.gate_up_proj"],
        rank_pattern={"experts.down_proj": 2},
        use_rslora=True,
    ),
    exact("gpt_oss", target_modules=["q_proj"], target_parameters=["experts.down_proj", "experts.gate_up_proj"]),
    edited("a_later_field", a_later_field={"scale": 2}),
    edited(a_later_field=None, auto_mapping={"parent_library": "transformers"}, peft_version="99.0"),
]
_OF_PEFT = {"peft_type", "auto_mapping", "peft_version", "base_model_name_or_path"}
"""Fields that PEFT fills itself in every case."""


def open_base(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def made(case: Case, base: Path, folder: Path) -> Any:
    """Write the case's adapter with PEFT and return PEFT's model of it."""
    torch.manual_seed(1)
    targets = TARGETS.get(case.base, TARGETS["llama"])
    settings = copy.deepcopy(dict(case.settings))  # PEFT adds names to its lists
    model: Any = get_peft_model(
        open_base(base), LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": targets, **settings})
    )
    if case.settings.get("init_lora_weights") == "eva":
        batches = [{"input_ids": torch.randint(0, 96, (2, 12)), "attention_mask": torch.ones(2, 12)} for _ in range(4)]
        initialize_lora_eva_weights(model, batches, gather_distributed_inputs=False)
    if case.save is _as_made:
        disturb(model, is_trained)
    case.save(model.eval(), folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | case.edited))
    return model


def lora_table(adapter: Path, model: nn.Module, *, frozen: bool = False) -> dict[str, Any]:
    """Return the [[converters]] table that a user would write for an adapter of PEFT."""
    with PeftReader(adapter) as reader:
        reader.pass_by()
        config, numbers = reader.metadata(), ModuleNumbers(reader.metadata())
        names = [key.removeprefix(PREFIX) for key in reader.tensors]
        beside = reader.beside()
        present = dict(model.named_modules())
        stacks = {reader.on_parameter(u, present).weight for u in reader.pairs() if reader.is_on_parameter(u)}
        rows = {u.weight.removesuffix(".weight"): [*u.indices] for u in reader.updates() if isinstance(u, TrainedRows)}
    modules = {module for name in names if ".lora_" in name and (module := name.partition(".lora_")[0]) in present}
    modules = {name for name in modules if not targets_stacks(config, name)} | stacks
    copies = {name.rpartition(".")[0] for name in names if ".lora_" not in name and saves(config, name)}
    changed = {name.rpartition(".")[0] for name in beside.values()} if frozen else set()
    return {
        "kind": "lora",
        "target_modules": sorted(modules),
        "use_dora": config["use_dora"],
        "rank_pattern": {name: numbers.rank(name) for name in modules},
        "alpha_pattern": {name: numbers.scaling(name) * numbers.rank(name) for name in modules},
        "modules_to_save": sorted(copies),
        "frozen_copies": sorted(changed),
        "bias": config["bias"],
        "lora_bias": bool(config.get("lora_bias")),
        "trainable_token_indices": rows,
        "ensure_weight_tying": bool(config.get("ensure_weight_tying")),
    }


def logits_of(base: Path, adapter: Path, folder: Path, *, merge: bool, case: Case) -> torch.Tensor:
    """Return our model's logits with the adapter merged into the base, or loaded into LoRA's modules.

    In a process group FSDP2 shards the model. Collective there.
    """
    config = read_config(base / "config.json")
    model = hf.build({**config, "tie_word_embeddings": False} if merge and case.untied else config)
    hooks = None
    if not merge:
        hooks = from_tables([lora_table(adapter, model, frozen=case.save is changed_tables)])
        hooks.convert(model)
    world.shard(model)
    sources = [base, InitialLoadConfig(str(adapter), load="merge" if merge else "weights")]
    world.load(world.manager(folder, model, save=None, initial_load=sources, model_converters=hooks))
    return logits(model.eval())


def references(case: Case, folder: Path) -> list[torch.Tensor]:
    """Write the case's base and adapter, and return the logits of PEFT's model and of the base."""
    base = folder / "base"
    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM.from_config
    model = make(CONFIGS[case.base])
    disturb(model)
    model.save_pretrained(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own, of unusual settings
        return [logits(made(case, base, folder / "adapter").eval()), logits(open_base(base).eval())]


def verdicts(case: Case, folder: Path) -> dict[str, tuple[str, str]]:
    """Return (verdict, note) of both ways in: exact, refused, or different. Collective in a process group."""
    base = folder / "base"
    of_first: list[Any] = [references(case, folder) if is_first() else None]
    if dist.is_initialized():
        dist.broadcast_object_list(of_first)
    theirs, plain = of_first[0]
    found = {}
    for way, merge in (("merged", True), ("as LoRA", False)):
        try:
            ours = logits_of(base, folder / "adapter", folder / way, merge=merge, case=case)
        except CheckpointError as error:
            found[way] = "refused", str(error)
            continue
        close = bool((ours - theirs).abs().max() <= 2e-5 < 1e-3 < (ours - plain).abs().max())
        found[way] = "exact" if close else "different", ""
    return found


@pytest.mark.parametrize("case", chosen(CASES, 14), ids=str)
def test_a_setting_of_peft_is_exact_or_refused_by_its_name(case: Case, tmp_path: Path) -> None:
    """Merged into the base and as a source of LoRA's modules: PEFT's logits within 2e-5, or an error with the field."""
    for way, (verdict, note) in verdicts(case, tmp_path).items():
        assert verdict == ("refused" if case.reason(way) else "exact"), (way, note)
        assert case.reason(way) in note, (way, note)


def test_every_field_of_the_installed_peft_is_in_one_table_and_in_a_case() -> None:
    """A field that PEFT adds is refused until it is in a table of peft_fields.py, and shown here."""
    fields = {f.name for f in dataclasses.fields(LoraConfig)}
    tables = [*HONOURED, *WITHOUT_EFFECT, *REFUSED]
    assert len(tables) == len(set(tables)) and fields <= set(tables), fields - set(tables)
    shown = {name for case in CASES for name in (*case.settings, *case.edited)}
    assert fields - shown <= _OF_PEFT, fields - shown
    assert {case.refused for case in CASES} >= REFUSED.keys()


def rows() -> list[Row]:
    """Return the rows of every case."""
    return judged(rows_of, [str(case) for case in CASES])


def rows_of(name: str, folder: Path) -> list[Row]:
    """Return a row for each way in; a case that is refused for another reason than its own is different."""
    (case,) = (case for case in CASES if str(case) == name)
    return [_row(case, way, verdict, error) for way, (verdict, error) in verdicts(case, folder).items()]


def _row(case: Case, way: str, verdict: str, error: str) -> Row:
    reason, name = case.reason(way), f"{case}, {way}"
    of_reason = [line.strip() for line in error.splitlines() if reason and reason in line]
    if verdict != ("refused" if reason else "exact") or bool(reason) > bool(of_reason):
        return name, "different", " ".join(error.split())[:300] or f"{verdict}, expected {reason or 'exact'}"
    return name, verdict, of_reason[0].partition(". ")[0] if of_reason else ""
