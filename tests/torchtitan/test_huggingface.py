"""The last step as a Hugging Face folder: opened by transformers and by torchtitan, with the weights of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torchtitan.runs import FLAVOURS, config, distributed, logits_of, same_tensors, steps_in, train
from titan_ckpt import CheckpointConfig, ExportConfig, InitialLoadConfig
from titan_ckpt import CheckpointManager as Manager
from titan_ckpt.errors import ConfigError, KeyMapError
from titan_ckpt.geometry.chunks import Chunk
from titan_ckpt.integrations.torchtitan.adapter import find_key_map
from titan_ckpt.integrations.torchtitan.model_config import config_json
from titan_ckpt.models.registry import build_model
from titan_ckpt.weights.transforms import StateDictTransforms

HF: dict[str, Any] = {"last_save_model_only": True, "last_save_in_hf": True}


@distributed(1)
def _exported(assets: Path, folder: Path, flavour: str) -> None:
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(3, 2000, (2, 16), generator=torch.Generator().manual_seed(3))
    logits: list[torch.Tensor] = []

    def look(trainer: Any) -> None:
        logits.append(logits_of(trainer, tokens))

    made = config(assets, folder, flavour, steps=2, interval=1, exact=True, last_save_in_dcp=True, **HF)
    run = train(made, then=look)
    assert steps_in(folder) == [1]  # the last step is the export alone
    exported = folder / "exports/step-2"
    opened = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    opened.train(False)
    with torch.no_grad():
        torch.testing.assert_close(opened(tokens).logits, logits[0], rtol=2e-4, atol=2e-5)
    initial: dict[str, Any] = {"initial_load_in_hf": True, "initial_load_path": str(exported)}
    for titan in (False, True):
        loaded = config(assets, folder / f"again-{titan}", flavour, steps=0, titan=titan, **initial)
        same_tensors(train(loaded).model, run.model)

    ours = build_model(flavour.partition("_")[0], folder=exported)
    table = StateDictTransforms(ours.key_map(), torchtitan=ours.torchtitan_key_map())
    export, initial_load = ExportConfig("dcp", names="torchtitan"), InitialLoadConfig(str(folder / "dcp/step-2"))
    settings = CheckpointConfig(initial_load=(initial_load,), export=(export,))
    with Manager(settings, model_parts=[ours], sd_transforms=table, base_folder=folder / "ours") as manager:
        manager.load()
        manager.export(2, last_step=True)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), logits[0], rtol=2e-4, atol=2e-5)
    back = config(
        assets, folder / "back", flavour, steps=0, titan=False, initial_load_path=str(folder / "ours/exports/step-2")
    )
    same_tensors(train(back).model, run.model)


@pytest.mark.parametrize("flavour", ["llama3_debugmodel", "qwen3_debugmodel"])
def test_an_export_has_the_weights_of_the_run(assets: Path, tmp_path: Path, flavour: str) -> None:
    """transformers computes the logits of torchtitan's model; both checkpointers load the export bit for bit.

    So does our own model from torchtitan's DCP folder, and torchtitan's own checkpointer from our model's.
    """
    _exported(assets, tmp_path, flavour)


@pytest.mark.parametrize("flavour", ["llama3_debugmodel", "qwen3_debugmodel", "qwen3_debugmodel_moe_param_groups"])
def test_an_adapter_is_a_table(flavour: str) -> None:
    """The table gives every element of a numbered state dict the place that to_hf() gives it."""
    adapter, tied, shapes = _adapter_of(flavour)
    shapes = {fqn: shape for fqn, shape in shapes.items() if "expert_bias" not in fqn}
    whole = {fqn: torch.arange(torch.Size(shape).numel()).view(shape) for fqn, shape in shapes.items()}
    groups = StateDictTransforms(find_key_map(adapter, shapes, tied)).to_file(dict(whole), None, None)
    made = {key: torch.full(info.shape, -1) for group in groups for key, info in group.infos.items()}
    for piece in (p for group in groups for index, block in group.blocks() for p in group.cut(index, block)):
        region = piece.chunk.within(Chunk.whole(made[piece.key].shape))
        made[piece.key][region] = piece.view.reshape(piece.chunk.sizes)
    same_tensors(made, adapter.to_hf(whole))


def test_a_bias_that_an_adapter_drops_is_named() -> None:
    """Hugging Face's Qwen3 MoE has no bias of experts: a run that trains one is refused, and each bias is named."""
    adapter, tied, shapes = _adapter_of("qwen3_debugmodel_moe_param_groups")
    with pytest.raises(KeyMapError, match=r"layers.1.moe.expert_bias_E: the adapter's to_hf\(\) drops it"):
        find_key_map(adapter, shapes, tied)


def _adapter_of(flavour: str) -> tuple[Any, dict[str, str], dict[str, tuple[int, ...]]]:
    spec = FLAVOURS[flavour]().model_spec
    spec.model.layers = spec.model.layers[:2]
    with torch.device("meta"):
        model = spec.model.build()
    tied = {"lm_head.weight": "tok_embeddings.weight"} if spec.model.enable_weight_tying else {}
    shapes = {fqn: tuple(value.shape) for fqn, value in model.state_dict().items() if fqn not in tied}
    return spec.state_dict_adapter(spec.model, None), tied, shapes


class _Adapter:
    """An adapter whose to_hf is the function it is given."""

    def __init__(self, to_hf: Any) -> None:
        self.to_hf = to_hf


SHAPES = {"a.weight": (8, 4), "b.weight": (4,)}


@pytest.mark.parametrize(
    ("to_hf", "complaint"),
    [
        (lambda s: {"x": s["b.weight"]} if "b.weight" in s else {}, "a.weight: the adapter's to_hf.. drops it"),
        (lambda s: {k: v * 2 for k, v in s.items()}, "a.weight: to_hf.. makes a.weight of it in a way that is no"),
        (lambda s: {k: v.flip(-1) for k, v in s.items()}, "a.weight: to_hf.. makes a.weight"),
        (lambda s: {k: v[:2] for k, v in s.items()}, "a.weight: to_hf.. makes a.weight"),
    ],
    ids=["drops", "computes", "flips columns", "cuts"],
)
def test_an_adapter_that_is_no_table_is_refused_by_name(to_hf: Any, complaint: str) -> None:
    """Nothing is exported that a load would not bring back."""
    with pytest.raises(KeyMapError, match=complaint):
        find_key_map(_Adapter(to_hf), SHAPES, {})


def test_rows_in_any_order_and_transposed_matrices_are_tables() -> None:
    """A permutation that no name announces is found too."""
    order = torch.tensor([3, 1, 0, 2, 7, 6, 4, 5])
    key_map = find_key_map(_Adapter(lambda s: {k: v[order] for k, v in s.items()}), {"a": (8, 4)}, {})
    assert key_map.group_of_fqn("a").op.order == tuple(order.tolist())  # type: ignore[attr-defined]
    key_map = find_key_map(_Adapter(lambda s: {k: v.t() for k, v in s.items()}), {"a": (8, 4)}, {})
    assert type(key_map.group_of_fqn("a").op).__name__ == "Transpose"


def test_a_config_json_of_another_model_or_none_at_all_is_refused(tmp_path: Path) -> None:
    """Each fault is named before step 1; the flavours of llama3 and qwen3 need no file."""
    model = FLAVOURS["qwen3_debugmodel"]().model_spec.model
    derived = config_json(model, str(tmp_path))
    assert (derived["model_type"], derived["tie_word_embeddings"], derived["head_dim"]) == ("qwen3", True, 128)
    (tmp_path / "config.json").write_text(json.dumps(derived | {"hidden_size": 64, "my_own": 1}))
    with pytest.raises(ConfigError, match="hidden_size: 64 there, 256 here"):
        config_json(model, str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(derived | {"my_own": 1}))
    assert config_json(model, str(tmp_path))["my_own"] == 1
    with pytest.raises(ConfigError, match="none can be derived for"):
        config_json(object(), None)
