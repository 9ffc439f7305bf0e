"""Embeddings and output matrix under a table that ties them: once in the file, in every place in memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests import world
from tests.interop.folders import export, load
from tests.world import assert_same_bytes, llama, tensors
from titan_ckpt import ExportConfig, StateDictTransforms
from titan_ckpt.converting import convert
from titan_ckpt.errors import ExportError
from titan_ckpt.models.llama3 import FLAVORS, Llama3

TIED = replace(FLAVORS["debug-0.5m"], vocab_size=96, num_layers=1, max_seq_len=16)


def with_copies(seed: int) -> Llama3:
    """The tied architecture, as stages hold it: an output matrix in memory of its own."""
    model = llama(replace(TIED, tie_embeddings=False), seed)
    assert model.output is not None and model.tok_embeddings is not None
    model.output.weight.data.copy_(model.tok_embeddings.weight)
    return model


def test_copies_become_one_file_tensor_and_are_both_filled_from_it(tmp_path: Path) -> None:
    """An export has no lm_head, and opens in a model with one tensor, in one with an alias, and in one with two."""
    table, config = Llama3(TIED).key_map(), Llama3(TIED).hf_config()
    truth = with_copies(1)
    export(truth, tmp_path / "out", table, config=config)
    assert "lm_head.weight" not in tensors(tmp_path / "out")
    assert truth.tok_embeddings is not None
    one, alias, two = Llama3(TIED), with_copies(2), with_copies(3)
    assert alias.output is not None and alias.tok_embeddings is not None
    alias.output.weight = alias.tok_embeddings.weight
    for model in (one, alias, two):
        load(model, tmp_path / "out", table)
        for name, value in model.state_dict().items():
            assert torch.equal(value, truth.state_dict()[name]), name
    assert alias.output.weight is alias.tok_embeddings.weight
    export(alias, tmp_path / "again", table, config=config)
    assert tensors(tmp_path / "again").keys() == tensors(tmp_path / "out").keys()


def test_copies_that_have_come_apart_are_not_exported(tmp_path: Path) -> None:
    """One value of difference is found by the proof, which names both; nothing is published."""
    model = with_copies(1)
    assert model.output is not None
    model.output.weight.data[-1, -1] += 1
    tied = r"model\.embed_tokens\.weight \(tied, and not equal: tok_embeddings\.weight, output\.weight\)"
    with pytest.raises(ExportError, match=tied):
        export(model, tmp_path / "out", Llama3(TIED).key_map(), config=Llama3(TIED).hf_config())
    assert list(tmp_path.iterdir()) == []


def test_a_converted_folder_has_the_first_name_alone(tmp_path: Path) -> None:
    """Offline, a tied file tensor becomes one native one, as a save of the model has it, and goes back."""
    model = Llama3(TIED)
    model.init_weights()
    table, config = model.key_map(), model.hf_config()
    export(model, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "native", "native", key_map=table)
    convert(tmp_path / "native", tmp_path / "back", "hf", key_map=table, hf_config=config)
    assert_same_bytes(tmp_path / "hf", tmp_path / "back")


class HeadFirst(nn.Module):
    """A model whose output matrix is registered before the embeddings that it is tied to."""

    def __init__(self, head: str) -> None:
        super().__init__()
        self.add_module(head, nn.Linear(8, 32, bias=False))
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(32, 8)
        self.get_submodule(head).weight = self.model.embed_tokens.weight


@pytest.mark.parametrize("head", ["lm_head", "lm_loss"])
@pytest.mark.parametrize("with_base", [True, False])
def test_a_head_that_is_registered_first_has_the_name_of_the_embeddings_in_files(
    with_base: bool, head: str, tmp_path: Path
) -> None:
    """A folder has the embeddings alone, or a copy of the head: both are read, and the export has the embeddings."""
    table = torch.randn(32, 8)
    (tmp_path / "base").mkdir()
    config = {"model_type": "x", "architectures": ["XForCausalLM"], "tie_word_embeddings": True}
    (tmp_path / "base/config.json").write_text(json.dumps(config))
    for copies in ({}, {f"{head}.weight": table.clone()}):
        save_file({"model.embed_tokens.weight": table, **copies}, tmp_path / "base/model.safetensors", {"format": "pt"})
        model = HeadFirst(head)
        world.finish(
            world.manager(
                tmp_path / "run",
                model,
                initial_load=[tmp_path / "base"] if with_base else [],
                export=(ExportConfig("hf", folder=f"{len(copies)}"),),
                sd_transforms=StateDictTransforms(hf_config=config),
            )
        )
        if with_base:
            assert torch.equal(model.get_parameter(f"{head}.weight"), table)
        exported = tensors(tmp_path / f"run/{len(copies)}/step-1")
        assert exported.keys() == {"model.embed_tokens.weight"}
        assert torch.equal(exported["model.embed_tokens.weight"], model.get_parameter(f"{head}.weight"))
