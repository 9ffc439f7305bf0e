"""D5: what parameters are stored in, and in which group they are trained."""

from __future__ import annotations

import errno
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_run import export_base, losses, settings
from titan_ckpt.converters import from_tables
from titan_ckpt.stores.answers import StoreError
from titan_ckpt.testing import distributed
from titan_ckpt.training import precision
from titan_ckpt.training.config import RunConfig
from titan_ckpt.training.trainer import Trainer

LORA = [{"kind": "lora", "rank": 2, "alpha": 4.0, "target_modules": ["wq", "w1"]}]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Hugging Face folder in bfloat16."""
    return export_base(tmp_path_factory.mktemp("base"), dtype="bfloat16")


def on_base(folder: Path, base: Path, steps: int = 4, **model: Any) -> RunConfig:
    """Return a run over the base that computes in bfloat16."""
    tables: dict[str, dict[str, Any]] = {
        "model": {"flavor": None, "folder": str(base), **model},
        "training": {"steps": steps, "compute_dtype": "bfloat16"},
        "checkpoint": {"save": {"interval": 2}, "initial_load": [{"path": str(base), "cast": bool(model)}]},
    }
    return settings(folder, **tables)


def test_d5_a_frozen_base_keeps_its_dtype_and_adapters_have_a_float32_master(tmp_path: Path, base: Path) -> None:
    """No cast is needed, the values are the file's bit for bit, and a resumed run has the same dtypes."""
    filters = [*warnings.filters]
    trainer = Trainer(on_base(tmp_path, base), from_tables(LORA, "test"))
    trainer.run()
    assert warnings.filters == filters, "what a run silences it silences for itself"
    dtypes = {(p.requires_grad, p.dtype) for p in trainer.model.parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    moments = {v.dtype for state in trainer.optimizer.state.values() for v in state.values() if v.dim()}
    assert moments == {torch.float32}
    stored = load_file(base / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(trainer.model.get_parameter("layers.0.feed_forward.w2.weight"), stored)
    again = Trainer(on_base(tmp_path, base, steps=5), from_tables(LORA, "test"))
    again.run()
    assert len(losses(tmp_path)) == 5
    assert {(p.requires_grad, p.dtype) for p in again.model.parameters()} == dtypes


def test_d5_a_bucket_that_does_not_answer_one_rank_gives_it_no_other_dtypes(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks have been answered, and hold their frozen parameters in bfloat16."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise StoreError(errno.EIO, "s3://box/base: rank 1 could not list it", is_final=False)

    monkeypatch.setattr(precision, "open_reader", refuse)
    with pytest.raises(StoreError, match="rank 1 could not list it"):
        Trainer(on_base(tmp_path, base), from_tables(LORA, "test")).run()


def test_d5_parameters_frozen_by_name_keep_their_dtype_over_a_resume(tmp_path: Path, base: Path) -> None:
    """Trained ones are cast to float32, frozen ones are not; the run's own step is found in both dtypes again."""
    frozen = {"freeze": ["tok_embeddings.*", "layers.0.*"]}
    for steps in (2, 3):
        trainer = Trainer(on_base(tmp_path, base, steps, **frozen))
        config = trainer.config
        if steps == 3:
            trainer.config = replace(config, checkpoint=replace(config.checkpoint, initial_load=()))
        trainer.run()
        for fqn, parameter in trainer.model.named_parameters():
            is_frozen = fqn.startswith(("tok_embeddings.", "layers.0."))
            assert parameter.dtype is (torch.bfloat16 if is_frozen else torch.float32), fqn
    assert len(losses(tmp_path)) == 3


def test_d5_computing_in_float32_needs_float32(tmp_path: Path, base: Path) -> None:
    """Nothing is stored in less than it is computed in."""
    config = on_base(tmp_path, base, 1, freeze=["layers.0.*"])
    trainer = Trainer(replace(config, training=replace(config.training, compute_dtype="float32")))
    trainer.run()
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


@distributed(nproc=2)
def test_d5_a_frozen_base_keeps_its_dtype_when_sharded(tmp_path: Path) -> None:
    """FSDP2 groups with bfloat16 and float32 parameters train, save and resume."""
    folder = export_base(tmp_path / "base", dtype="bfloat16")
    for steps in (2, 3):
        trainer = Trainer(on_base(tmp_path / "lora", folder, steps), from_tables(LORA, "test"))
        trainer.run()
        dtypes = {(p.requires_grad, p.dtype) for p in trainer.model.parameters()}
        assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}


def test_d5_tied_parameters_are_trained_once(tmp_path: Path) -> None:
    """A transformers model whose output is its embedding has one parameter and one pair of moments for both."""
    from transformers import LlamaConfig

    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    LlamaConfig(**shape, vocab_size=512, tie_word_embeddings=True, architectures=["LlamaForCausalLM"]).save_pretrained(
        tmp_path / "tied"
    )
    config = settings(tmp_path, model={"name": "hf", "flavor": None, "folder": str(tmp_path / "tied")})
    trainer = Trainer(config)
    trainer.run()
    grouped = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    names = dict(trainer.model.named_parameters(remove_duplicate=False))
    assert names["lm_head.weight"] is names["model.embed_tokens.weight"]
    assert len(grouped) == len({id(p) for p in grouped}) == len(names) - 1
