"""Adapters merged into the base one after another, as PEFT merges them, and what cannot be merged."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from tests import world
from tests.interop.folders import gap, tuned
from tests.world import TINY as SHAPE
from tests.world import convert, llama, same, shard, whole, write_llama
from titan_ckpt import CheckpointManager, ExportConfig, InitialLoadConfig
from titan_ckpt.errors import BaseMismatchError, CorruptCheckpointError, LoadMismatchError
from titan_ckpt.formats.huggingface.peft import PeftReader
from titan_ckpt.geometry.keymap import KeyMap, KeyRule, Transpose
from titan_ckpt.loading.merge import prepare_merge
from titan_ckpt.models import hf
from titan_ckpt.models.llama3 import Llama3, Llama3Config
from titan_ckpt.testing import distributed

LORA: dict[str, Any] = {"kind": "lora", "target_modules": ["wq", "w2"], "rank": 4, "alpha": 8.0}


def open_base(folder: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(folder)


def write_adapter(base: Path, folder: Path, seed: int = 1, **settings: Any) -> Path:
    tuned(open_base(base), folder, seed=seed, **{"target_modules": ["q_proj", "k_proj", "down_proj"]} | settings)
    return folder


def manager_of(
    model: Llama3, folder: Path, sources: list[Path], merged: int, converter: Any = None
) -> CheckpointManager:
    """Return the manager of a run whose second to `merged`-th sources are merged."""
    loads = tuple(
        InitialLoadConfig(str(path), load="merge" if 0 < i <= merged else "weights") for i, path in enumerate(sources)
    )
    return world.manager(
        folder, model, initial_load=loads, export=(ExportConfig("peft"),) * bool(converter), model_converters=converter
    )


def load(base: Path, folder: Path, *adapters: Path) -> Llama3:
    """Return a native model of the base with the adapters merged into it."""
    model = Llama3(Llama3Config.from_hf(json.loads((base / "config.json").read_text())))
    world.load(manager_of(model, folder, [base, *adapters], len(adapters)))
    return model


@distributed(nproc=2)
def load_on_shards(base: Path, folder: Path, adapters: list[Path], expected: dict[str, torch.Tensor]) -> None:
    model = shard(Llama3(SHAPE))
    world.load(manager_of(model, folder, [base, *adapters], len(adapters)))
    for fqn, value in model.state_dict().items():
        assert isinstance(value, DTensor)
        assert torch.allclose(value.full_tensor(), expected[fqn], rtol=1e-6, atol=1e-7), fqn


def test_a4_adapters_are_merged_one_after_another(tmp_path: Path) -> None:
    """Two merged sources, with patterns, embeddings and a module trained in full: PEFT's logits, and on shards."""
    base = write_llama(tmp_path / "base")
    first = write_adapter(base, tmp_path / "first", rank_pattern={"k_proj": 2}, modules_to_save=["norm"])
    second = write_adapter(
        base, tmp_path / "second", 2, target_modules=["q_proj", "embed_tokens", "o_proj"], use_rslora=True, r=8
    )
    theirs = open_base(base)
    for folder in (first, second):
        theirs = PeftModel.from_pretrained(theirs, str(folder)).merge_and_unload()
        vars(theirs).pop("peft_config", None)  # PEFT leaves it behind, and warns of it the next time
    ours = load(base, tmp_path / "run", first, second)
    assert gap(ours, theirs) <= 1e-5 < 1e-3 < gap(ours, open_base(base))
    load_on_shards(base, tmp_path / "shards", [first, second], whole(ours.state_dict()))


def test_a4_a_run_trains_an_adapter_over_a_merged_base(tmp_path: Path) -> None:
    """The merged base is the new adapter's base: saves hold the adapter, a resume merges again, and both know it."""
    base = write_llama(tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "adapter")

    def run(sources: list[Path]) -> tuple[Llama3, CheckpointManager]:
        converter = convert(model := llama(), LORA)
        return model, manager_of(model, tmp_path / "run", sources, len(sources) - 1, converter)

    model, manager = run([base, adapter])
    with manager, torch.no_grad():
        assert manager.load().step == 0
        for name, parameter in model.named_parameters():
            if "lora_b" in name:
                parameter.fill_(0.01)
        manager.save(1, last_step=True)
    names = load_file(tmp_path / "run/checkpoints/step-1/rank-00000.safetensors")
    assert all("lora_" in name for name in names if name.startswith("model."))
    again, manager = run([base, adapter])
    with manager:
        assert manager.load().step == 1
    assert same(again.state_dict(), model.state_dict())
    _, manager = run([base])
    named = rf"expected {base} .*, after the merge of {adapter}\n[^$]* and with {adapter} merged into it, in this order"
    with manager, pytest.raises(BaseMismatchError, match=named):
        manager.load()
    another = write_adapter(base, tmp_path / "another", 3)
    _, manager = run([base, another])
    with manager, pytest.raises(BaseMismatchError, match=rf"found    {base} .*, after the merge of {another}\n"):
        manager.load()
    # the exported adapter stands on the merged base, so it merges into that, and into nothing else
    exported = tmp_path / "run/exports/step-1-peft"
    with pytest.raises(BaseMismatchError, match=rf"step-1-peft was trained on another[^$]*with {adapter} merged"):
        load(base, tmp_path / "other", exported)
    other = shutil.copytree(exported, tmp_path / "other-adapter")
    for given, fault in (
        ([exported], "Name the base of this adapter"),
        ([base, exported, other], "or merge all adapters but one"),
    ):
        converter = convert(fresh := Llama3(SHAPE), LORA)
        world.load_fails(manager_of(fresh, tmp_path / "f", given, 0, converter), LoadMismatchError, fault)


def test_what_cannot_be_merged_is_refused_with_the_base_untouched(tmp_path: Path) -> None:
    """DoRA of other lengths, zeros, tied embeddings, strange modules, NaN, and what is no adapter: each is named."""
    base = write_llama(tmp_path / "base")
    tied = write_llama(tmp_path / "tied", replace(SHAPE, tie_embeddings=True))
    good = write_adapter(base, tmp_path / "good")

    def changed(name: str, change: Any, source: Path = good) -> Path:
        tensors = change(load_file(source / "adapter_model.safetensors"))
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
        save_file(tensors, tmp_path / name / "adapter_model.safetensors", {"format": "pt"})
        return tmp_path / name

    zero = changed("zero", lambda t: {k: v * ("lora_A" in k) for k, v in t.items()})
    broken = changed("nan", lambda t: {k: v / ("lora_A" in k) for k, v in t.items()})
    strange = changed("strange", lambda t: {k.replace("down_proj", "down"): v for k, v in t.items()})
    wide = changed("wide", lambda t: {k: v.repeat(2, 1) if "lora_B" in k else v for k, v in t.items()})
    lone = changed("lone", lambda t: {k: v for k, v in t.items() if "0.mlp.down_proj.lora_B" not in k})
    dora = write_adapter(base, tmp_path / "dora", use_dora=True)
    short = changed("short", lambda t: {k: v[:16] if "magnitude" in k else v for k, v in t.items()}, dora)
    sized = write_adapter(base, tmp_path / "sized", use_dora=True, target_modules=["embed_tokens"])
    unsized = changed("unsized", lambda t: {k: v for k, v in t.items() if "magnitude" not in k}, sized)  # an old PEFT's
    unscaled = write_adapter(base, tmp_path / "unscaled", lora_alpha=0)
    words = write_adapter(base, tmp_path / "words", target_modules=["embed_tokens"])
    head = write_adapter(base, tmp_path / "head", target_modules=["lm_head"])
    second = write_llama(tmp_path / "second")
    for where, adapter, fault in [
        (base, short, r"q_proj\.lora_magnitude_vector: expected \[64\], found \[16\]"),
        (base, sized, r"embed_tokens\.lora_embedding_A: use_dora of embeddings scales columns"),
        (base, unsized, r"embed_tokens\.lora_embedding_A: use_dora of embeddings scales columns"),
        (base, zero, "none of its 6 pairs has any effect"),
        (base, unscaled, "none of its 6 pairs has any effect: A, B or the scale is zero"),
        (base, strange, r"2 that the model does not have: .*mlp\.down\.lora_A"),
        (base, wide, r"6 of another shape .*expected a weight \[64, 64\], found one for \[128, 64\]"),
        (base, second, "is hf and holds whole weights, and only an adapter can be merged"),
        (tied, words, r"tok_embeddings\.weight is another module's weight too"),
        (tied, head, r"lm_head\.lora_A\.weight: .* is another module's weight too"),
        (base, lone, r"0\.mlp\.down_proj\.lora_A\.weight has no partner"),
        (base, broken, "not finite"),
    ]:
        model = Llama3(Llama3Config.from_hf(json.loads((where / "config.json").read_text())))
        model.init_weights()
        before = whole(model.state_dict())
        kind = CorruptCheckpointError if adapter in (lone, broken) else LoadMismatchError
        world.load_fails(manager_of(model, tmp_path / "run", [where, adapter], 1), kind, fault)
        assert same(model.state_dict(), before), fault


def test_dora_over_cut_rows_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    """A rank that has some columns of a weight cannot know how long its rows are."""
    base = write_llama(tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "dora", use_dora=True, target_modules=["down_proj"])
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())  # a mesh needs one; nothing is sent
    try:
        weight = distribute_tensor(torch.zeros(64, 128), init_device_mesh("cpu", (2,)), [Shard(1)])
        state: dict[str, Any] = {f"layers.{i}.feed_forward.w2.weight": weight for i in range(2)}
        with PeftReader(adapter) as reader, pytest.raises(LoadMismatchError, match=r"1\.mlp.*whole rows.*are cut"):
            prepare_merge(reader, state, {}, Llama3(SHAPE).key_map())
    finally:
        dist.destroy_process_group()


def test_dora_is_merged_as_peft_merges_it(tmp_path: Path) -> None:
    """Rows get their lengths, on whole rows of shards too; a bfloat16 base is rounded once, not at every step."""
    base = write_llama(tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "dora", use_dora=True, use_rslora=True, rank_pattern={"k_proj": 2})
    theirs = PeftModel.from_pretrained(open_base(base), str(adapter)).merge_and_unload()
    ours = load(base, tmp_path / "run", adapter)
    assert gap(ours, theirs) <= 1e-5 < 1e-3 < gap(ours, open_base(base))
    load_on_shards(base, tmp_path / "shards", [adapter], whole(ours.state_dict()))
    lengths = tmp_path / "lengths"  # A without B: what acts is DoRA's lengths
    shutil.copytree(adapter, lengths)
    file = lengths / "adapter_model.safetensors"
    save_file({k: v * ("lora_B" not in k) for k, v in load_file(file).items()}, file, {"format": "pt"})
    scaled = PeftModel.from_pretrained(open_base(base), str(lengths)).merge_and_unload()
    assert gap(load(base, tmp_path / "l", lengths), scaled) <= 1e-5 < 1e-3 < gap(scaled, open_base(base))
    open_base(base).bfloat16().save_pretrained(tmp_path / "half")
    exact = PeftModel.from_pretrained(open_base(tmp_path / "half").double(), str(adapter)).merge_and_unload()
    ideal = exact.state_dict()["model.layers.0.mlp.down_proj.weight"]
    model = Llama3(SHAPE).bfloat16()
    world.load(manager_of(model, tmp_path / "half-run", [tmp_path / "half", adapter], 1))
    found = model.state_dict()["layers.0.feed_forward.w2.weight"].double()
    assert ((found - ideal).abs() <= (ideal.bfloat16().double() - ideal).abs() + 1e-6).all()


def write_gpt2(folder: Path) -> Path:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=2, n_head=4, tie_word_embeddings=False)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def merged_gpt2(base: Path, adapter: Path, folder: Path) -> Any:
    """Return GPT-2 as transformers has it, with the adapter merged by a run."""
    model = hf.build(base)
    if dist.is_initialized():
        fully_shard(model)
    sources = [base, InitialLoadConfig(str(adapter), load="merge")]
    world.load(world.manager(folder, model, initial_load=sources))
    return model


@distributed(nproc=2)
def merge_gpt2_on_shards(base: Path, adapter: Path, folder: Path, expected: dict[str, torch.Tensor]) -> None:
    for fqn, value in merged_gpt2(base, adapter, folder).state_dict().items():
        assert isinstance(value, DTensor)
        assert torch.allclose(value.full_tensor(), expected[fqn], rtol=1e-6, atol=1e-7), fqn


def test_weights_that_are_stored_transposed_get_the_transposed_product(tmp_path: Path) -> None:
    """GPT-2's Conv1D: its square projections have no shape that would tell, and the flag in the file is not asked."""
    base = write_gpt2(tmp_path / "base")
    for flag in (True, False):
        adapter = tmp_path / f"adapter-{flag}"
        theirs = tuned(
            GPT2LMHeadModel.from_pretrained(base), adapter, "c_attn", "c_proj", use_dora=flag, fan_in_fan_out=True
        )
        config = json.loads((adapter / "adapter_config.json").read_text())
        (adapter / "adapter_config.json").write_text(json.dumps(config | {"fan_in_fan_out": flag}))
        ours = merged_gpt2(base, adapter, tmp_path / f"run-{flag}")
        expected = theirs.merge_and_unload().state_dict()
        assert {tuple(expected[f"transformer.h.0.attn.{name}.weight"].shape) for name in ("c_proj", "c_attn")} == {
            (32, 32),
            (32, 96),
        }
        for name, value in ours.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)
    truth = {name: value.clone() for name, value in ours.state_dict().items()}
    merge_gpt2_on_shards(base, adapter, tmp_path / "shards", truth)


def test_a_table_that_transposes_a_square_weight_says_how_the_other_tool_stores_it(tmp_path: Path) -> None:
    """A linear module of ours under GPT-2's names: PEFT's A and B are those of the Conv1D in the other model."""
    base = write_gpt2(tmp_path / "base")
    adapter = tmp_path / "adapter"
    theirs = tuned(GPT2LMHeadModel.from_pretrained(base), adapter, "c_proj", fan_in_fan_out=True)
    key = "transformer.h.{i}.attn.c_proj.weight"
    table = KeyMap(
        (
            KeyRule.of("layers.{i}.wo.weight", key, Transpose()),
            KeyRule.of("layers.{i}.w2.weight", key.replace("attn", "mlp"), Transpose()),
        )
    )
    plain = GPT2LMHeadModel.from_pretrained(base).state_dict()
    names = {
        table.group_of_fqn(f"layers.{i}.{w}.weight").keys[0]: f"layers.{i}.{w}.weight"
        for i in (0, 1)
        for w in ("wo", "w2")
    }
    state = {fqn: plain[name].t().clone() for name, fqn in names.items()}
    modules = {fqn.removesuffix(".weight"): torch.nn.Linear(1, 1) for fqn in state}
    with PeftReader(adapter) as reader:
        prepare_merge(reader, state, {}, table, modules).apply()
    merged = theirs.merge_and_unload().state_dict()
    for name, fqn in names.items():
        torch.testing.assert_close(state[fqn].t(), merged[name], rtol=0, atol=1e-6)


def test_an_adapter_that_names_another_base_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A load compares the base that the adapter's config names with the one that it is merged into."""
    base, other = write_llama(tmp_path / "base"), write_llama(tmp_path / "other")
    file = write_adapter(base, tmp_path / "adapter") / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(other)}))
    load(base, tmp_path / "run", file.parent)
    assert f"was trained on {other}, and the base of this run is another folder, {base}" in caplog.text
