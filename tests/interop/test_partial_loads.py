"""Loads that leave out what their settings name: new heads, added tokens, dropped layers; and nothing else."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests import world
from titan_ckpt import CheckpointConfig, ExportConfig, InitialLoadConfig
from titan_ckpt.config import from_dict
from titan_ckpt.errors import ConfigError, LoadMismatchError
from titan_ckpt.models.language_model import Model
from titan_ckpt.models.registry import build_model
from titan_ckpt.testing import distributed
from titan_ckpt.types import LoadReport
from titan_ckpt.weights.initialize import construct, materialize

auto: Any = AutoModelForCausalLM  # its methods have no types
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
IN_LLAMA3 = {EMBEDDINGS: "tok_embeddings.weight", HEAD: "output.weight"}


def write_base(folder: Path, *, tied: bool = False) -> dict[str, torch.Tensor]:
    """Write a folder of transformers, of 96 tokens, and return its tensors."""
    return world.tensors(world.write_llama(folder, replace(world.TINY, tie_embeddings=tied), seed=1))


def write_headless(folder: Path) -> dict[str, torch.Tensor]:
    """Write the same without its head."""
    tensors = write_base(folder)
    del tensors[HEAD]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def shape_like(base: Path, folder: Path, **changes: Any) -> Path:
    """Write a folder with the config.json of a base, changed."""
    folder.mkdir()
    config = json.loads((base / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def part(folder: Path | str, **settings: Any) -> InitialLoadConfig:
    """Return a source of which only a part is loaded."""
    return InitialLoadConfig(str(folder), **settings)


def run(shape: Path, source: InitialLoadConfig, folder: Path, name: str = "hf") -> tuple[Model, LoadReport]:
    """Load a source into a model of this shape, and export it."""
    torch.manual_seed(2)
    model = construct(lambda: build_model(name, folder=shape))
    materialize(model, "cpu")
    with world.manager(
        folder, model, async_mode="disabled", initial_load=[source], export=(ExportConfig("hf"),)
    ) as manager:
        report = manager.load().report
        manager.save(1, last_step=True)
    return model, report


@pytest.mark.parametrize("name", ["hf", "llama3"])
def test_a_new_head_is_asked_for_by_name(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder of the base model has no head: the error names the setting, and with it only the head is initialized."""
    tensors = write_headless(tmp_path / "base")
    head = HEAD if name == "hf" else IN_LLAMA3[HEAD]
    base = part(tmp_path / "base")
    with pytest.raises(LoadMismatchError, match=rf"1 missing: {head}\. Name new tensors in .*initialize"):
        run(tmp_path / "base", base, tmp_path / "refused", name)
    with caplog.at_level(logging.INFO, "titan_ckpt"):
        model, report = run(tmp_path / "base", InitialLoadConfig(base.path, initialize=(head,)), tmp_path / "run", name)
    assert report.initialized == (head,)
    assert f"1 tensor is not loaded, as asked: {head}" in caplog.text
    exported = load_file(tmp_path / "run/exports/step-1/model.safetensors")
    assert {key for key, value in exported.items() if not torch.equal(value, tensors.get(key, value + 1))} == {HEAD}
    assert 0.001 < float(model.get_parameter(head).detach().std()) < 0.3
    again = auto.from_pretrained(tmp_path / "run/exports/step-1")
    assert torch.equal(again.lm_head.weight, model.get_parameter(head))


@pytest.mark.parametrize("tied", [True, False])
def test_added_tokens_keep_the_rows_that_exist(tied: bool, tmp_path: Path) -> None:
    """A table with more rows than the folder's has the folder's rows first, and initial values after them."""
    tensors = write_base(tmp_path / "base", tied=tied)
    grown = shape_like(tmp_path / "base", tmp_path / "shape", vocab_size=102)
    names = (EMBEDDINGS,) if tied else (EMBEDDINGS, HEAD)
    with pytest.raises(LoadMismatchError, match=r"expected float32\[102, 64\], found float32\[96, 64\]"):
        run(grown, part(tmp_path / "base"), tmp_path / "refused")
    model, report = run(grown, part(tmp_path / "base", initialize=names), tmp_path / "run")
    assert dict(report.grown) == dict.fromkeys(names, 96)
    for name in names:
        table = model.get_parameter(name)
        assert torch.equal(table[:96], tensors[name])
        assert 0.001 < float(table[96:].detach().std()) < 0.3
    again = auto.from_pretrained(tmp_path / "run/exports/step-1")
    assert torch.equal(again.model.embed_tokens.weight, model.get_parameter(EMBEDDINGS))


def test_a_new_head_under_adapters_is_saved_with_them(tmp_path: Path) -> None:
    """No folder has the head, so a step of the adapters alone could not be resumed: the step holds the base, too."""
    write_headless(tmp_path / "base")
    heads = []
    for seed, resumed in ((3, 0), (4, 1)):
        torch.manual_seed(seed)
        model = construct(lambda: build_model("hf", folder=tmp_path / "base"))
        converter = world.convert(model, {"kind": "lora", "rank": 2, "target_modules": ["q_proj"]})
        materialize(model, "cpu")
        source = part(tmp_path / "base", initialize=(HEAD,))
        with world.manager(
            tmp_path / "run", model, async_mode="disabled", initial_load=[source], model_converters=converter
        ) as manager:
            assert manager.load().step == resumed
            heads.append(model.get_parameter(HEAD).detach().clone())
            manager.save(1)
    assert torch.equal(*heads)


def test_rows_grow_on_every_rank(tmp_path: Path) -> None:
    """Two ranks hold 51 rows each of 102: the first 96 are the folder's, and the others those of one process."""
    write_base(tmp_path / "base")
    shape_like(tmp_path / "base", tmp_path / "shape", vocab_size=102)
    source = part(tmp_path / "base", initialize=(EMBEDDINGS, HEAD))
    model, _ = run(tmp_path / "shape", source, tmp_path / "run")
    torch.save(dict(model.state_dict()), tmp_path / "expected.pt")
    _grow_on_two_ranks(tmp_path)


@distributed(nproc=2)
def _grow_on_two_ranks(folder: Path) -> None:
    torch.manual_seed(2)
    model: Any = construct(lambda: build_model("hf", folder=folder / "shape"))
    world.shard(model)
    materialize(model, "cpu")
    source = part(folder / "base", initialize=(EMBEDDINGS, HEAD))
    world.load(world.manager(folder / "2", model, initial_load=[source]))
    for name, value in torch.load(folder / "expected.pt").items():
        assert torch.equal(model.state_dict()[name].full_tensor(), value), name


def test_dropped_layers_are_ignored_by_name(tmp_path: Path) -> None:
    """A model with fewer layers takes those that it has; the others are reported, and each has to be named."""
    tensors = write_base(tmp_path / "base")
    shape = shape_like(tmp_path / "base", tmp_path / "shape", num_hidden_layers=1)
    few = part(tmp_path / "base", ignore=("model.layers.1.mlp.*",))
    with pytest.raises(LoadMismatchError, match=r"6 that the model does not have: .*input_layernorm"):
        run(shape, few, tmp_path / "refused")
    source = part(tmp_path / "base", ignore=("model.layers.1.*",))
    model, report = run(shape, source, tmp_path / "run")
    assert set(report.ignored) == {key for key in tensors if "layers.1." in key}
    assert all(torch.equal(value, tensors[name]) for name, value in model.state_dict().items())
    assert auto.from_pretrained(tmp_path / "run/exports/step-1").config.num_hidden_layers == 1


@pytest.mark.parametrize("name", ["hf", "llama3"])
def test_a_head_that_differs_from_the_embeddings_it_is_tied_to_can_be_ignored(name: str, tmp_path: Path) -> None:
    """A folder of a tied model has a head of its own: the error says what to ignore, and with it the tie counts."""
    tensors = write_base(tmp_path / "base", tied=True) | {HEAD: torch.zeros(96, 64)}
    save_file(tensors, tmp_path / "base/model.safetensors", metadata={"format": "pt"})
    base = str(tmp_path / "base")
    with pytest.raises(LoadMismatchError, match=r"lm_head\.weight is not equal to .* or name it in .*ignore"):
        run(tmp_path / "base", part(base), tmp_path / "refused", name)
    model, report = run(tmp_path / "base", part(base, ignore=(HEAD,)), tmp_path / "run", name)
    assert report.ignored == (HEAD,)
    embeddings = model.get_parameter(EMBEDDINGS if name == "hf" else IN_LLAMA3[EMBEDDINGS])
    assert torch.equal(embeddings, tensors[EMBEDDINGS])
    assert HEAD not in load_file(tmp_path / "run/exports/step-1/model.safetensors")


def test_a_pattern_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    """A typing error leaves nothing out: it is an error that lists similar names."""
    write_base(tmp_path / "base")
    base = str(tmp_path / "base")
    sources = {
        "initialize": part(base, initialize=("lm_haed.weight",)),
        "ignore": part(base, ignore=("lm_haed.weight",)),
    }
    for setting, source in sources.items():
        similar = rf"{setting} has 1 .* match nothing: 'lm_haed\.weight' \(like {HEAD}"
        with pytest.raises(LoadMismatchError, match=similar):
            run(tmp_path / "base", source, tmp_path / setting)


def test_rows_of_another_dtype_are_cast_on_request_only(tmp_path: Path) -> None:
    """A grown table whose rows would be converted is refused, as any other tensor is."""
    base = write_base(tmp_path / "base")
    narrow = {key: value.bfloat16() for key, value in base.items()}
    save_file(narrow, tmp_path / "base/model.safetensors", metadata={"format": "pt"})
    shape = shape_like(tmp_path / "base", tmp_path / "shape", vocab_size=102)
    path = str(tmp_path / "base")
    with pytest.raises(LoadMismatchError, match=r"set cast = true"):
        run(shape, part(path, initialize=(EMBEDDINGS, HEAD)), tmp_path / "refused")
    _, report = run(shape, part(path, cast=True, initialize=(EMBEDDINGS, HEAD)), tmp_path / "run")
    assert report.grown


def test_a_step_of_another_run_can_be_loaded_partly(tmp_path: Path) -> None:
    """Native steps have the names of the model; a new head replaces the one that the step has."""
    write_base(tmp_path / "base")
    before, _ = run(tmp_path / "base", part(tmp_path / "base"), tmp_path / "first")
    step = part(tmp_path / "first/checkpoints/step-1", initialize=(HEAD,))
    model, report = run(tmp_path / "base", step, tmp_path / "second")
    assert report.initialized == (HEAD,)
    same = {name for name, value in before.state_dict().items() if torch.equal(value, model.state_dict()[name])}
    assert same == model.state_dict().keys() - {HEAD}


def test_a_merged_adapter_is_whole() -> None:
    """initialize and ignore are settings of weights, and a merge takes a whole adapter."""
    raw = {"initial_load": [{"path": "base"}, {"path": "adapter", "load": "merge", "ignore": ["a*"]}]}
    with pytest.raises(ConfigError, match=r"initial_load\.1\.load: an adapter is merged as a whole"):
        from_dict(CheckpointConfig, raw)
