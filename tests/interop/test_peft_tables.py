"""Tables that PEFT saves beside an adapter: equal to the base, changed, and in two adapters that are merged in turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config

from tests import world
from tests.interop.folders import disturb, gap, logits, theirs, tuned
from titan_ckpt import ExportConfig, InitialLoadConfig
from titan_ckpt.cli.main import main
from titan_ckpt.converters import ModelConvertersContainer, from_tables
from titan_ckpt.errors import LoadMismatchError
from titan_ckpt.models import hf

LLAMA = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
TABLE = {"kind": "lora", "rank": 4, "alpha": 8.0, "target_modules": ["lm_head", "q_proj"]}

open_base: Any = AutoModelForCausalLM.from_pretrained  # it has no types

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's own, of tables


def adapter(base: Path, folder: Path, *, seed: int, changed: bool = False) -> Any:
    """Return PEFT's model with an adapter on the output matrix, saved as by default, with the whole table beside it."""
    model = tuned(open_base(base), None, "lm_head", "q_proj", seed=seed)
    if changed:
        disturb(model, lambda name, _: "lm_head.base_layer" in name)
    model.save_pretrained(str(folder))
    return model


def loaded(tmp_path: Path, *adapters: str, merge: bool, **settings: Any) -> Any:
    model = hf.build(tmp_path / "base")
    converter: ModelConvertersContainer | None = None if merge else from_tables([TABLE | settings])
    if converter is not None:
        converter.convert(model)
    sources = [
        tmp_path / "base",
        *(InitialLoadConfig(str(tmp_path / name), load="merge" if merge else "weights") for name in adapters),
    ]
    world.load(world.manager(tmp_path / "run", model, save=None, initial_load=sources, model_converters=converter))
    return model.eval()


def test_a_changed_table_is_refused_unless_the_adapter_holds_it(tmp_path: Path) -> None:
    """PEFT would compute with it; as a frozen copy it does so here, too, and the base stays what it is."""
    theirs(LLAMA, tmp_path / "base")
    expected = adapter(tmp_path / "base", tmp_path / "a", seed=1, changed=True)
    with pytest.raises(LoadMismatchError, match=r"lm_head\.base_layer\.weight of its base.*frozen_copies"):
        loaded(tmp_path, "a", merge=False)
    model = loaded(tmp_path, "a", merge=False, frozen_copies=["lm_head"])
    assert gap(model, expected) == 0
    assert not model.get_parameter("lm_head.trained.weight").requires_grad
    assert gap(loaded(tmp_path, "a", merge=True), expected) <= 2e-5


def test_the_table_of_a_second_adapter_does_not_undo_the_first(tmp_path: Path) -> None:
    """Both have the base's table beside them, and the merged weight has both products."""
    theirs(LLAMA, tmp_path / "base")
    for name, seed in (("a", 1), ("b", 2)):
        adapter(tmp_path / "base", tmp_path / name, seed=seed)
    merged = [loaded(tmp_path, *names, merge=True).get_parameter("lm_head.weight") for names in ("a", "b", "ab")]
    base = loaded(tmp_path, merge=True).get_parameter("lm_head.weight")
    assert torch.allclose(merged[2] - base, merged[0] + merged[1] - 2 * base, atol=1e-6)
    assert (merged[0] - base).abs().max() > 1e-2 < (merged[1] - base).abs().max()


def test_the_table_of_a_second_step_does_not_undo_the_first(tmp_path: Path) -> None:
    """As that of a second folder: steps hold such tables as frozen copies."""
    theirs(LLAMA, tmp_path / "base")
    weights = []
    for name, seed in (("a", 1), ("b", 2)):
        adapter(tmp_path / "base", tmp_path / name, seed=seed)
        step = [str(tmp_path / name), str(tmp_path / f"{name}-step"), "--to", "native"]
        assert main(["convert", *step, "--config", str(tmp_path / "base"), "--model", "hf"]) == 0
    for form in ("", "-step"):
        adapters = [str(tmp_path / f"{name}{form}") for name in "ab"]
        assert main(["merge", str(tmp_path / "base"), *adapters, str(tmp_path / f"merged{form}"), "--model", "hf"]) == 0
        weights.append(load_file(tmp_path / f"merged{form}" / "model.safetensors")["lm_head.weight"])
    assert torch.equal(*weights)


@pytest.mark.parametrize("named", ["lm_head", "embed_tokens"])
def test_a_changed_tied_table_is_exported_and_merged_for_both_modules(named: str, tmp_path: Path) -> None:
    """Whichever of the modules frozen_copies names."""
    base = tmp_path / "base"
    theirs(LLAMA | {"tie_word_embeddings": True}, base)
    peft = tuned(open_base(base), None, "q_proj")
    disturb(peft, lambda name, _: "embed_tokens" in name)
    peft.save_pretrained(str(tmp_path / "a"), save_embedding_layers=True)
    model, table = hf.build(base), TABLE | {"target_modules": ["q_proj"], "frozen_copies": [named]}
    converter = from_tables([table])
    converter.convert(model)
    run = world.manager(
        tmp_path / "run",
        model,
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0),
        initial_load=[base, tmp_path / "a"],
        model_converters=converter,
        export=(ExportConfig("peft"),),
    )
    world.finish(run)
    exported = PeftModel.from_pretrained(open_base(base), str(next((tmp_path / "run/exports").iterdir())))
    assert gap(model.eval(), peft) == gap(exported.eval(), peft) == 0
    step = str(next((tmp_path / "run/checkpoints").glob("step-*")))
    assert main(["merge", str(base), step, str(tmp_path / "merged"), "--model", "hf"]) == 0
    merged = open_base(tmp_path / "merged").eval()
    assert gap(merged, peft) <= 2e-5 and merged.config.tie_word_embeddings


def test_a_changed_table_after_an_adapter_that_changes_it_is_refused(tmp_path: Path) -> None:
    """It would undo what was merged before."""
    theirs(LLAMA, tmp_path / "base")
    adapter(tmp_path / "base", tmp_path / "a", seed=1)
    adapter(tmp_path / "base", tmp_path / "b", seed=2, changed=True)
    with pytest.raises(LoadMismatchError, match=r"of another base than this one, and an adapter before it"):
        loaded(tmp_path, "a", "b", merge=True)


def test_a_table_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """PEFT's own answer to it is an error of sizes."""
    theirs(LLAMA, tmp_path / "base")
    theirs(LLAMA | {"vocab_size": 104}, tmp_path / "larger")
    adapter(tmp_path / "larger", tmp_path / "a", seed=1)
    for merge in (True, False):
        with pytest.raises(LoadMismatchError, match=r"lm_head"):
            loaded(tmp_path, "a", merge=merge)


def test_an_adapter_on_a_resized_vocabulary_goes_on(tmp_path: Path) -> None:
    """The base has fewer rows than the adapter's tables, whose own rows count."""
    theirs(LLAMA, tmp_path / "base")
    resized = open_base(tmp_path / "base")
    resized.resize_token_embeddings(104)
    peft = tuned(resized, None, "q_proj")
    peft.save_pretrained(str(tmp_path / "a"))
    config = {**LLAMA, "vocab_size": 104}
    for merge in (True, False):
        model = hf.build(config)
        table = TABLE | {"target_modules": ["q_proj"], "frozen_copies": ["lm_head", "embed_tokens"]}
        converter = None if merge else from_tables([table])
        if converter is not None:
            converter.convert(model)
        tables = ("model.embed_tokens.weight", "lm_head.weight")
        base = InitialLoadConfig(str(tmp_path / "base"), initialize=tables)
        sources = [base, InitialLoadConfig(str(tmp_path / "a"), load="merge" if merge else "weights")]
        world.load(world.manager(tmp_path / "run", model, save=None, initial_load=sources, model_converters=converter))
        assert (logits(model.eval()) - logits(peft.eval())).abs().max() <= 2e-5, merge


@pytest.mark.parametrize("bias", ["none", "lora_only"])
def test_dora_of_conv1d_computes_beside_a_base_of_another_dtype(bias: str) -> None:
    """With a trained copy of the bias, which is rounded to the base's dtype."""
    config = GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=1, n_head=4)
    make: Any = AutoModelForCausalLM.from_config
    model = make(config).to(torch.bfloat16).eval()
    before = logits(model)
    converter = from_tables([{"kind": "lora", "target_modules": ["c_attn"], "use_dora": True, "bias": bias}])
    converter.convert(model)
    assert (logits(model) - before).abs().max() <= 0.05


TOKENS_AND_TABLES: list[tuple[dict[str, Any], bool]] = [
    ({"trainable_token_indices": [1, 90]}, False),
    ({"trainable_token_indices": [1, 90]}, True),
    ({"trainable_token_indices": {"embed_tokens": [7]}}, True),
    ({"trainable_token_indices": {"embed_tokens": [7], "lm_head": [8]}}, False),
    ({"modules_to_save": ["embed_tokens", "lm_head"]}, False),
    ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
    ({"target_modules": ["q_proj", "lm_head"]}, True),
    ({"target_modules": ["q_proj", "embed_tokens"]}, True),
    ({"target_modules": ["q_proj", "lm_head"], "trainable_token_indices": [5]}, True),
    ({"trainable_token_indices": {"lm_head": [5]}}, True),
]


@pytest.mark.parametrize(("settings", "tied"), TOKENS_AND_TABLES)
@pytest.mark.parametrize("form", ["folder", "step"])
def test_tables_beside_trained_rows_and_copies(settings: dict[str, Any], tied: bool, form: str, tmp_path: Path) -> None:
    """As PEFT saves them for a resized vocabulary; a table of one of two tied modules is that of both."""
    base, source = tmp_path / "base", tmp_path / "a"
    theirs(LLAMA | {"tie_word_embeddings": tied}, base)
    peft = tuned(open_base(base), None, **{"target_modules": ["q_proj"]} | settings)
    ends = ("embed_tokens", "lm_head", "base_layer")
    disturb(peft, lambda name, _: ("embed" in name or "lm_head" in name) and name.split(".")[-2] in ends)
    peft.save_pretrained(str(source), save_embedding_layers=True)
    peft = PeftModel.from_pretrained(open_base(base), str(source)).eval()  # it does not save every changed table
    arguments = ["--config", str(base), "--model", "hf"]
    if form == "step" and settings != {"target_modules": ["q_proj", "lm_head"]}:  # PEFT saves half of the pair
        assert main(["convert", str(source), str(tmp_path / "step"), "--to", "native", *arguments]) == 0
        assert main(["convert", str(tmp_path / "step"), str(tmp_path / "again"), "--to", "peft", *arguments]) == 0
        again = PeftModel.from_pretrained(open_base(base), str(tmp_path / "again")).eval()
        assert gap(again, peft) == 0
        source = tmp_path / "step"
    assert main(["merge", str(base), str(source), str(tmp_path / "merged"), "--model", "hf"]) == 0
    assert gap(open_base(tmp_path / "merged").eval(), peft) <= 2e-5


def test_an_adapter_that_peft_could_not_tie_is_not_tied(tmp_path: Path) -> None:
    """GPT-2's embeddings are not among the names by which PEFT ties; their adapter acts on the embeddings alone."""
    config = {"model_type": "gpt2", "vocab_size": 96, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 4}
    theirs(config, tmp_path / "base")
    settings: dict[str, Any] = {"target_modules": ["wte", "c_attn"], "ensure_weight_tying": True}
    peft = tuned(open_base(tmp_path / "base"), tmp_path / "a", **settings)
    model, table = hf.build(tmp_path / "base"), TABLE | settings
    with pytest.raises(LoadMismatchError, match="ensure_weight_tying is False, expected True"):
        load_as_lora(tmp_path, model, table)
    model = hf.build(tmp_path / "base")
    load_as_lora(tmp_path, model, table | {"ensure_weight_tying": False})
    assert gap(model.eval(), peft) == 0
    assert main(["merge", *(str(tmp_path / name) for name in ("base", "a", "merged"))]) == 0
    assert gap(open_base(tmp_path / "merged").eval(), peft) <= 2e-5


def load_as_lora(folder: Path, model: Any, table: dict[str, Any]) -> None:
    converter = from_tables([table])
    converter.convert(model)
    sources = [folder / "base", folder / "a"]
    world.load(world.manager(folder / "run", model, save=None, initial_load=sources, model_converters=converter))


def test_rows_of_an_output_matrix_act_on_a_changed_tied_table(tmp_path: Path) -> None:
    """The frozen copy of the embeddings is the table that the rows are in."""
    theirs(LLAMA | {"tie_word_embeddings": True}, tmp_path / "base")
    settings: dict[str, Any] = {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [5]}}
    peft = tuned(open_base(tmp_path / "base"), None, **settings)
    disturb(peft, lambda name, _: "embed_tokens" in name)
    peft.save_pretrained(str(tmp_path / "a"), save_embedding_layers=True)
    model = hf.build(tmp_path / "base")
    load_as_lora(tmp_path, model, TABLE | settings | {"frozen_copies": ["embed_tokens"]})
    assert gap(model.eval(), peft) == 0


def test_a_bias_of_b_without_a_bias_to_merge_it_into_is_converted_and_named(tmp_path: Path) -> None:
    """PEFT adds none either."""
    base, arguments = tmp_path / "base", ["--config", str(tmp_path / "base"), "--model", "hf"]
    theirs(LLAMA, base)
    settings: dict[str, Any] = {"target_modules": ["q_proj"], "lora_bias": True}
    peft = tuned(open_base(base), tmp_path / "a", **settings)
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "step"), "--to", "native", *arguments]) == 0
    assert main(["convert", str(tmp_path / "step"), str(tmp_path / "again"), "--to", "peft", *arguments]) == 0
    assert gap(PeftModel.from_pretrained(open_base(base), str(tmp_path / "again")).eval(), peft) == 0
    for name in ("a", "step"):
        model = hf.build(base)
        sources = [base, InitialLoadConfig(str(tmp_path / name), load="merge")]
        run = world.manager(tmp_path / "run", model, save=None, initial_load=sources)
        world.load_fails(run, LoadMismatchError, "its module has no bias, and neither PEFT nor a merge adds one")


def test_dora_of_tied_modules_is_not_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They share the pair, and each has lengths of its own; those of embeddings are not merged."""
    theirs(LLAMA | {"tie_word_embeddings": True}, tmp_path / "base")
    settings: dict[str, Any] = {"target_modules": ["q_proj", "lm_head"], "use_dora": True, "ensure_weight_tying": True}
    tuned(open_base(tmp_path / "base"), tmp_path / "a", **settings)
    assert main(["merge", *(str(tmp_path / name) for name in ("base", "a", "merged"))]) == 2
    assert "use_dora of embeddings scales columns, which is not merged" in capsys.readouterr().err
