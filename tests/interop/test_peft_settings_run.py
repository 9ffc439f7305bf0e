"""Adapters with the settings that PEFT users take today: trained on, killed, resumed, exported, merged by command."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel

from tests import world
from tests.interop.folders import logits
from tests.world import TOKENS
from tests.zoo.model_runs import is_first
from tests.zoo.test_peft_settings import CASES, Case, changed_tables, logits_of, lora_table, open_base, references
from titan_ckpt import ExportConfig
from titan_ckpt.cli.main import main
from titan_ckpt.converters import from_tables
from titan_ckpt.converters.stack import stack_adapters
from titan_ckpt.errors import ConverterError, LoadMismatchError
from titan_ckpt.models import hf

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's own, of unusual settings

NAMES = [
    "llama: target_modules=['embed_tokens', 'lm_head'], tables beside",
    "llama: target_modules=['embed_tokens', 'lm_head'], changed tables beside",
    "tied: target_modules=['q_proj'], changed tables beside",
    "tied: modules_to_save=['embed_tokens']",
    "tied: modules_to_save=['embed_tokens'], ensure_weight_tying=True",
    "tied: target_modules=['embed_tokens'], ensure_weight_tying=True",
    "qwen2: bias=all",
    "gpt2: lora_bias=True, bias=lora_only",
    "gpt2: use_dora=True",
    "llama: trainable_token_indices={'embed_tokens': [3], 'lm_head': [9, 4]}",
    "tied: trainable_token_indices=[1, 2]",
    "tied: trainable_token_indices=[1, 2], target_modules=['q_proj'], changed tables beside",
    "qwen3_moe: target_modules=['q_proj'], target_parameters=['experts.down_proj', 'experts.gate_up_proj']",
    (
        "qwen3_moe: target_modules=['q_proj'], target_parameters=['experts.down_proj', 'experts.gate_up_proj'], "
        "rank_pattern={'experts.down_proj': 2}, use_rslora=True"
    ),
    "gpt_oss: target_modules=['q_proj'], target_parameters=['experts.down_proj', 'experts.gate_up_proj']",
]
RESIZED = Case({"trainable_token_indices": [1, 2], "target_modules": ["q_proj"]}, base="tied", save=changed_tables)
ONE_EACH = {str(case): case for case in [*CASES, RESIZED]}


class TrainedOn:
    """A run on a base and an adapter of PEFT's; its own initial values differ by `seed`."""

    def __init__(self, case: Case, folder: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = hf.build(folder / "base")
        table = lora_table(folder / "adapter", self.model, frozen=case.save is changed_tables)
        self.converter = from_tables([table | {"seed": 0}])
        self.converter.convert(self.model)
        world.shard(self.model)
        self.optimizer = world.adamw(self.model)

    def manager(self, folder: Path, run: Path, **settings: Any) -> Any:
        sources = [folder / "base", folder / "adapter"]
        return world.manager(
            run, self.model, self.optimizer, initial_load=sources, model_converters=self.converter, **settings
        )

    def step(self) -> None:
        loss = torch.nn.functional.cross_entropy(self.model(TOKENS)[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
        world.learn(self.optimizer, loss)


def together() -> None:
    """Wait for the other ranks, if there are some."""
    if dist.is_initialized():
        dist.barrier()


def go_on(name: str, folder: Path) -> None:
    """Two steps, exported; and the second one again in a new run, over what a kill after the first one leaves."""
    case = ONE_EACH[name]
    if is_first():
        references(case, folder)
    together()
    run, killed, is_mergeable = folder / "run", folder / "killed", not case.untied
    exports = (ExportConfig("peft"), *([ExportConfig("hf")] if is_mergeable else []))
    whole = TrainedOn(case, folder, 1)
    with whole.manager(folder, run, export=exports) as manager:
        assert manager.load().step == 0
        whole.step()
        manager.save(1)
        manager.wait()
        if is_first():
            shutil.copytree(run, killed)
        together()
        whole.step()
        manager.save(2, last_step=True)
    resumed = TrainedOn(case, folder, 2)
    with resumed.manager(folder, killed) as manager:
        assert manager.load().step == 1
        resumed.step()
    one, other = (world.weights_and_moments(each.model, each.optimizer) for each in (whole, resumed))
    assert world.same(one, other), world.differing(one, other)
    expected = logits(whole.model.eval())
    if is_first():
        step = next((run / "exports").glob("step-2-peft"))
        theirs = PeftModel.from_pretrained(open_base(folder / "base"), str(step)).eval()
        assert (logits(theirs) - expected).abs().max() <= 2e-5
        if is_mergeable:
            merged = open_base(run / "exports/step-2").eval()
            assert (logits(merged) - expected).abs().max() <= 2e-5
    together()
    again = logits_of(folder / "base", run / "exports/step-2-peft", folder / "again", merge=False, case=case)
    assert torch.equal(again, expected)


def go_on_with_each(folder: Path) -> None:
    for number, name in enumerate(NAMES):
        try:
            go_on(name, folder / str(number))
        except Exception as error:
            error.add_note(f"of {name}")
            raise


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_of_peft_are_trained_on_killed_resumed_and_exported(ranks: int, tmp_path: Path) -> None:
    """Bit for bit as without the kill; the export in PEFT, merged in transformers and here again has our logits."""
    world.on_ranks(ranks, go_on_with_each, tmp_path, timeout_seconds=240)


@pytest.mark.parametrize("name", NAMES)
def test_the_command_merges_an_adapter_of_peft(name: str, tmp_path: Path) -> None:
    """transformers opens the folder, without a tie if the adapter acts on one of the modules that share a weight."""
    theirs, _ = references(ONE_EACH[name], tmp_path)
    paths = [str(tmp_path / folder) for folder in ("base", "adapter", "merged")]
    assert main(["merge", *paths]) == 0
    merged = open_base(tmp_path / "merged").eval()
    assert (logits(merged) - theirs).abs().max() <= 2e-5


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(("gpt_oss", "qwen3_moe"))])
def test_an_adapter_of_peft_is_converted_and_back(name: str, tmp_path: Path) -> None:
    """By the command into a step of ours and back: PEFT has the same logits of it."""
    case = ONE_EACH[name]
    theirs, _ = references(case, tmp_path)
    config = ["--config", str(tmp_path / "base"), "--model", "hf"]
    for source, target, to in (("adapter", "step", "native"), ("step", "again", "peft")):
        assert main(["convert", str(tmp_path / source), str(tmp_path / target), "--to", to, *config]) == 0
    again = PeftModel.from_pretrained(open_base(tmp_path / "base"), str(tmp_path / "again")).eval()
    assert (logits(again) - theirs).abs().max() <= 2e-5


def test_an_adapter_that_ties_is_refused_by_a_run_that_does_not(tmp_path: Path) -> None:
    """The same tensors would act on one module or on both."""
    case = ONE_EACH["tied: target_modules=['embed_tokens'], ensure_weight_tying=True"]
    references(case, tmp_path)
    model = hf.build(tmp_path / "base")
    converter = from_tables([lora_table(tmp_path / "adapter", model) | {"ensure_weight_tying": False}])
    converter.convert(model)
    sources = [tmp_path / "base", tmp_path / "adapter"]
    run = world.manager(tmp_path / "run", model, save=None, initial_load=sources, model_converters=converter)
    world.load_fails(run, LoadMismatchError, "ensure_weight_tying is True, expected False")


def test_rows_of_a_table_that_the_model_uses_twice_itself_are_refused() -> None:
    """No module could follow the table."""
    model = world.llama(dataclasses.replace(world.TINY, tie_embeddings=True))
    table = {"kind": "lora", "target_modules": ["wq"], "trainable_token_indices": {"tok_embeddings": [1]}}
    with pytest.raises(ConverterError, match="no module was found that could follow"):
        from_tables([table]).convert(model)


def test_adapters_with_more_than_pairs_are_not_stacked(tmp_path: Path) -> None:
    """Their rows, biases and tables do not add up."""
    references(ONE_EACH["llama: trainable_token_indices={'embed_tokens': [3], 'lm_head': [9, 4]}"], tmp_path)
    with pytest.raises(ConverterError, match=r"more than pairs of modules \(.*trainable_tokens_delta"):
        stack_adapters([tmp_path / "adapter", tmp_path / "adapter"], tmp_path / "both")
