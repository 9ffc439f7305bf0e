"""A run over a pretrained folder takes its weights and its tokenizer, or says which others it takes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_run import export_base, losses, settings
from titan_ckpt.converters import from_tables
from titan_ckpt.errors import ConfigError, LoadMismatchError
from titan_ckpt.training.config import RunConfig
from titan_ckpt.training.model_folder import refuse_new_tokenizer
from titan_ckpt.training.run_data import find_tokenizer
from titan_ckpt.training.trainer import Trainer

LORA = [{"kind": "lora", "rank": 2, "target_modules": ["wq"]}]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in bfloat16 with a tokenizer, whose model may stop at two tokens."""
    exported = export_base(tmp_path_factory.mktemp("base"), dtype="bfloat16")
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps({**config, "eos_token_id": [1, 7]}))
    return exported


def over(base: Path, folder: Path, *, model: dict[str, Any] | None = None, **tables: dict[str, Any]) -> RunConfig:
    """Return a run of one step over a folder, with no word on weights and tokenizer unless `tables` say one."""
    tables = {"training": {"steps": 1}, "data": {"tokenizer": None}, **tables}
    return settings(folder, model={"flavor": None, "folder": str(base), **(model or {})}, **tables)


def test_weights_and_tokenizer_of_the_folder_are_the_default(
    tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run is, bit for bit, the one that names both; its export carries the folder's tokenizer and stop tokens."""
    Trainer(over(base, tmp_path / "default", checkpoint={"export": {"format": "hf"}})).run()
    named = {"data": {"tokenizer": str(base)}}
    load = {"initial_load": [{"path": str(base), "cast": True}], "export": {"format": "hf"}}
    Trainer(over(base, tmp_path / "named", checkpoint=load, **named)).run()
    assert losses(tmp_path / "default") == losses(tmp_path / "named")
    exports = [tmp_path / name / "run" / "exports" / "step-1" for name in ("default", "named")]
    first, second = (load_file(folder / "model.safetensors") for folder in exports)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    for folder in exports:
        assert (folder / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
        assert json.loads((folder / "config.json").read_text())["eos_token_id"] == [1, 7]
    assert "not loaded" not in caplog.text and "tokenizer" not in caplog.text


def test_d6_other_choices_are_explicit_and_warned_about(
    tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Random values and a trained tokenizer are settings; each is one warning, also where other weights are loaded."""
    data = {"tokenizer": 300, "corpus": str(Path(__file__).parents[3] / "README.md")}
    Trainer(over(base, tmp_path / "a", model={"load_weights": False}, data=data)).run()
    assert f"the weights in {base} are not loaded; this run starts from random values" in caplog.text
    assert f"data.tokenizer: this run uses and exports the tokenizer in {settings(tmp_path).data.cache_folder}" in (
        caplog.text
    )
    caplog.clear()
    other = shutil.copytree(base, tmp_path / "other")
    Trainer(over(base, tmp_path / "b", checkpoint={"initial_load": [{"path": str(other), "cast": True}]})).run()
    assert f"{base} are not loaded; this run starts from the sources of [[checkpoint.initial_load]]" in caplog.text
    assert "data.tokenizer" not in caplog.text, "the tokenizer is the same"


def test_a_folder_that_holds_a_shape_alone_is_no_silent_random_start(
    tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is warned about, unless the config asks for random values; a resume is not warned."""
    shape = shutil.copytree(base, tmp_path / "shape", ignore=shutil.ignore_patterns("*.safetensors*"))
    Trainer(over(shape, tmp_path / "a")).run()
    assert f"model.folder: {shape} holds no weights; this run starts from random values" in caplog.text
    caplog.clear()
    Trainer(over(shape, tmp_path / "a", training={"steps": 4})).run()
    Trainer(over(shape, tmp_path / "b", model={"load_weights": False})).run()
    assert "holds no weights" not in caplog.text


def test_an_adapter_finds_its_base_again_without_being_told(tmp_path: Path, base: Path) -> None:
    """A step that holds an adapter alone resumes over the folder that its run started from by default."""
    for steps in (1, 2):
        config = over(base, tmp_path, training={"steps": steps}, checkpoint={"save": {"interval": 1}})
        assert Trainer(config, from_tables(LORA)).run().step == steps
    assert len(losses(tmp_path)) == 2
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "step-2" / "MANIFEST.json").read_text())
    assert (manifest["kind"], manifest["base"]["path"]) == ("adapter", str(base))


def test_a_resume_without_the_model_takes_the_weights_of_the_folder(
    tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not random ones under the step's moments; tensors of converters, which the folder lacks, start anew."""
    caplog.set_level("INFO")
    for name, converters in (("plain", []), ("adapter", LORA)):
        save, exclude = {"save": {"interval": 1}}, {"resume": {"exclude": ["model"]}}
        Trainer(over(base, tmp_path / name, checkpoint=save), from_tables(converters)).run()
        caplog.clear()
        again = over(base, tmp_path / name, training={"steps": 2}, checkpoint={**save, **exclude})
        assert Trainer(again, from_tables(converters)).run().step == 2
        assert f"resume step 1\n  1. weights from {base} (hf, cast)\n  not loaded: model" in caplog.text


def test_a_tokenizer_comes_from_the_source_of_weights_of_a_flavor(tmp_path: Path, base: Path) -> None:
    """A run that names its shape by a flavor and loads a folder takes the tokenizer of that folder."""
    trainer = Trainer(
        settings(
            tmp_path,
            training={"steps": 1},
            data={"tokenizer": None},
            checkpoint={"initial_load": [{"path": str(base), "cast": True}]},
        )
    )
    trainer.run()
    assert trainer.tokenizer is not None and trainer.tokenizer.folder == base


def test_pretrained_weights_without_a_tokenizer_or_in_pickles_are_refused(tmp_path: Path, base: Path) -> None:
    """One error before step 1 says which settings choose; the settings that it names are accepted."""
    bare = shutil.copytree(base, tmp_path / "bare", ignore=shutil.ignore_patterns("token*"))
    with pytest.raises(
        ConfigError, match=rf"{bare} holds weights and no tokenizer\.json; .*the number of tokens of one"
    ):
        Trainer(over(bare, tmp_path / "a")).run()
    Trainer(over(bare, tmp_path / "b", model={"load_weights": False})).run()
    (bare / "model.safetensors").rename(bare / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"such as pytorch_model\.bin; .*model\.load_weights = false"):
        Trainer(over(bare, tmp_path / "c")).run()
    assert not (tmp_path / "a").exists() and not (tmp_path / "c").exists()


def test_weights_of_any_format_bring_their_tokenizer_or_are_refused(tmp_path: Path, base: Path) -> None:
    """No tokenizer is trained in silence for weights. Random tokens need none, and a missing source is the load's."""
    exports = {"save": {"interval": 1}, "export": {"format": "dcp"}}
    Trainer(settings(tmp_path / "made", training={"steps": 1}, checkpoint=exports)).run()
    dcp, step = (tmp_path / "made" / "run" / name / "step-1" for name in ("exports", "checkpoints"))
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "adapter_config.json").write_text("{}")

    def over_source(source: Path, *, corpus: str = "builtin") -> RunConfig:
        load = {"initial_load": [{"path": str(source)}]}
        return settings(tmp_path, data={"tokenizer": None, "corpus": corpus}, checkpoint=load)

    for source in (dcp, step, tmp_path / "peft", base / "model.safetensors"):
        with pytest.raises(ConfigError, match=rf"data.tokenizer: {source} holds weights and no tokenizer\.json; name"):
            find_tokenizer(over_source(source), 2048)
    assert find_tokenizer(over_source(dcp, corpus="dummy"), 2048) is None
    refuse_new_tokenizer(over_source(tmp_path / "missing"))
    for path in base.glob("tokenizer*"):
        shutil.copy(path, dcp)
    found = find_tokenizer(over_source(dcp), 2048)
    assert found is not None and found.folder == dcp


def test_a_token_beyond_the_table_is_refused_before_step_1(tmp_path: Path, base: Path) -> None:
    """Ids count, and not the number of tokens: a vocabulary with a gap can name a row that the table lacks."""
    gap = shutil.copytree(base, tmp_path / "gap")
    tokenizer = json.loads((gap / "tokenizer.json").read_text())
    last = max(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    tokenizer["model"]["vocab"][last] = 2048
    (gap / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"the 2049 tokens of .*gap do not fit the model's vocabulary of 2048"):
        Trainer(over(gap, tmp_path / "run")).run()


def test_a_resume_with_another_number_of_steps_says_how_the_schedule_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line from what to what; a resume with the same settings has none."""
    Trainer(settings(tmp_path, training={"steps": 1})).run()
    Trainer(settings(tmp_path, training={"steps": 2}, schedule={"kind": "linear"})).run()
    lines = [record.getMessage() for record in caplog.records if "schedule is rescaled" in record.getMessage()]
    changes = "training.steps from 1 to 2, schedule.kind from cosine to linear"
    assert lines == [f"the learning rate schedule is rescaled after step 1: {changes}"]
    caplog.clear()
    Trainer(settings(tmp_path, training={"steps": 2}, schedule={"kind": "linear"})).run()
    assert "rescaled" not in caplog.text


CYCLE = {"kind": "torch.optim.lr_scheduler:OneCycleLR", "settings": {"max_lr": 0.1}}
STAIRS = {"kind": "torch.optim.lr_scheduler:StepLR", "settings": {"step_size": 1}}
SLOWER = {**STAIRS, "settings": {"step_size": 1, "gamma": 0.5}}


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (CYCLE, CYCLE, "training.steps is 3, and the checkpoint's schedule has 2.*afresh"),
        (STAIRS, SLOWER, r"schedule\.settings is {.*0\.5}, and the checkpoint's schedule has {'step_size': 1}"),
        (STAIRS, CYCLE, r"schedule\.kind is torch\.optim\.lr_scheduler:OneCycleLR, and .* has .*StepLR"),
        ({}, STAIRS, r"schedule\.kind is .*StepLR, and the checkpoint's schedule has cosine"),
        (STAIRS, {"kind": "linear"}, r"LambdaLR\.load_state_dict\(\) does not take the state .*afresh"),
    ],
)
def test_a_schedule_of_ones_own_does_not_go_on_with_other_settings(
    first: dict[str, Any], second: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Its state holds what it was built with: refused before the next step, unless it is started afresh."""
    Trainer(settings(tmp_path, training={"steps": 2}, schedule=first)).run()
    with pytest.raises((ConfigError, LoadMismatchError), match=f"(?s){message}"):
        Trainer(settings(tmp_path, training={"steps": 3}, schedule=second)).run()
    afresh = {"save": {"interval": 2}, "resume": {"exclude": ["lr_scheduler"]}}
    assert Trainer(settings(tmp_path, training={"steps": 3}, schedule=second, checkpoint=afresh)).run().step == 3


def test_a_schedule_of_ones_own_goes_on_if_the_steps_mean_nothing_to_it(tmp_path: Path) -> None:
    """Three steps in one run or in two: the same losses."""
    for folder, ends in ((tmp_path / "a", (3,)), (tmp_path / "b", (2, 3))):
        for steps in ends:
            Trainer(settings(folder, training={"steps": steps}, schedule=STAIRS)).run()
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
