"""Llama 3 against transformers' own: the same weights give the same logits, both ways through the table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from titan_ckpt.geometry.chunks import Chunk
from titan_ckpt.models.llama3 import FLAVORS, Llama3, Llama3Config, RopeScaling, rotary_table

SMALL = replace(FLAVORS["debug-0.5m"], vocab_size=256, max_seq_len=128)
SHAPES = {
    "grouped_tied": SMALL,
    "grouped_untied": replace(SMALL, tie_embeddings=False),
    "one_kv_head": replace(SMALL, num_kv_heads=1),
    "full_heads": replace(SMALL, num_kv_heads=4, tie_embeddings=False),
    "wide_heads": replace(SMALL, head_dim=32, tie_embeddings=False),
    "scaled": replace(SMALL, rope_theta=500_000.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32)),
}


def copy_between(model: Llama3, file: dict[str, torch.Tensor], *, to_file: bool) -> None:
    """Copy every weight of the model into the file tensors, or out of them, by the table's views."""
    table = model.key_map()
    for fqn, value in model.state_dict().items():
        group = table.group_of_fqn(fqn)
        shape = tuple(value.shape)
        for piece in group.op.pieces(0, [shape], Chunk.whole(shape), value):
            target = file[group.keys[piece.file_index]][piece.chunk.within(Chunk.whole(shape))]
            if to_file:
                target.copy_(piece.view.reshape(target.shape))
            else:
                piece.view.copy_(target.reshape(piece.view.shape))


def hf_twin(config: Llama3Config) -> LlamaForCausalLM:
    """Return transformers' model of this shape, with random weights."""
    torch.manual_seed(1)
    twin = LlamaForCausalLM(LlamaConfig.from_dict(config.to_hf()))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    twin.train(False)
    return twin


@pytest.mark.parametrize("name", list(SHAPES))
def test_hugging_face_weights_give_hugging_face_logits(name: str) -> None:
    """Weights of LlamaForCausalLM, read through the table, give its logits in float32."""
    twin = hf_twin(SHAPES[name])
    model = Llama3(Llama3Config.from_hf(twin.config.to_dict())).eval()
    copy_between(model, twin.state_dict(), to_file=False)
    tokens = torch.randint(0, 256, (2, 100))
    with torch.no_grad():
        ours, theirs = model(tokens), twin(tokens).logits
    assert theirs.abs().max() > 0.1
    assert (ours - theirs).abs().max() <= 1e-5


@pytest.mark.parametrize("name", list(SHAPES))
def test_native_weights_give_native_logits_in_transformers(name: str) -> None:
    """Weights of this model, written through the table, load strictly and give its logits."""
    torch.manual_seed(2)
    model = Llama3(SHAPES[name]).eval()
    model.init_weights()
    twin = hf_twin(SHAPES[name])
    copy_between(model, twin.state_dict(), to_file=True)
    tokens = torch.randint(0, 256, (2, 100))
    with torch.no_grad():
        assert (model(tokens) - twin(tokens).logits).abs().max() <= 1e-5


def test_a_tied_model_names_no_output_matrix() -> None:
    """Tied embeddings are one tensor under one name on both sides."""
    assert "output.weight" not in Llama3(SHAPES["grouped_tied"]).state_dict()
    assert "output.weight" in Llama3(SHAPES["grouped_untied"]).state_dict()


@pytest.mark.parametrize("flavor", ["1B", "3B", "8B", "70B"])
def test_rotary_frequencies_of_the_true_shapes_are_those_of_transformers(flavor: str) -> None:
    """The scaled frequencies are bit-equal, so the angles agree even at position 131071."""
    config = replace(FLAVORS[flavor], max_seq_len=2)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig.from_dict(FLAVORS[flavor].to_hf()), torch.device("cpu"))
    angles = rotary_table(config)[1].angle()
    assert (angles - expected).abs().max() <= 1.2e-7
    assert torch.equal(rotary_table(config)[1], torch.polar(torch.ones_like(expected), expected))


def test_the_config_is_understood_by_transformers() -> None:
    """Every number that shapes the model arrives in LlamaConfig, and the model is of the same size."""
    config = FLAVORS["8B"]
    hf = LlamaConfig.from_dict(config.to_hf())
    with torch.device("meta"):
        assert LlamaForCausalLM(hf).num_parameters() == sum(p.numel() for p in Llama3(config).parameters())
    rope = hf.rope_parameters or {}
    assert rope.get("rope_type") == "llama3"
    assert rope.get("original_max_position_embeddings") == 8192
