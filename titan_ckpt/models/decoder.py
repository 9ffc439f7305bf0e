"""The stack that decoder-only models share: embedding, blocks, norm, output.

Owns tying, pipeline stages, initial values, the rotary buffer and the shared rows of key tables. Each architecture
defines its block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from copy import copy
from typing import Any, Generic, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from titan_ckpt.geometry.keymap import IDENTITY, KeyRule, TensorOp, Tie
from titan_ckpt.models.config import INIT_STD, DecoderConfig
from titan_ckpt.models.language_model import LanguageModel
from titan_ckpt.models.layers import ExactBuffers, RMSNorm, TransformerBlock

ConfigT = TypeVar("ConfigT", bound=DecoderConfig)
BLOCK, HF_BLOCK = "layers.{i}", "model.layers.{i}"
TORCHTITAN = {"output": "lm_head.weight", "qkv": "attention.qkv_linear"}
"""The names in torchtitan 0.3's models that differ from ours. Source: torchtitan, models/*/state_dict_adapter.py."""


def embedding_rules(tied: bool, output: str = "output.weight") -> tuple[KeyRule, ...]:
    """Return the rows of a decoder's key table for its embeddings and its output matrix."""
    embeddings = "tok_embeddings.weight"
    if tied:
        return (KeyRule.of((embeddings, output), "model.embed_tokens.weight", Tie(2)),)
    return KeyRule.of(embeddings, "model.embed_tokens.weight"), KeyRule.of(output, "lm_head.weight")


def block_rules(q: TensorOp = IDENTITY, k: TensorOp = IDENTITY, qkv: str = "attention") -> tuple[KeyRule, ...]:
    """Return the rows of a decoder's key table for dense blocks and the last norm.

    `q`, `k`: operations on wq, wk. `qkv`: the module that holds wq, wk and wv.
    """
    return (
        KeyRule.of(f"{BLOCK}.{qkv}.wq.weight",             f"{HF_BLOCK}.self_attn.q_proj.weight", q),
        KeyRule.of(f"{BLOCK}.{qkv}.wk.weight",             f"{HF_BLOCK}.self_attn.k_proj.weight", k),
        KeyRule.of(f"{BLOCK}.{qkv}.wv.weight",             f"{HF_BLOCK}.self_attn.v_proj.weight"),
        KeyRule.of(f"{BLOCK}.attention.wo.weight",        f"{HF_BLOCK}.self_attn.o_proj.weight"),
        KeyRule.of(f"{BLOCK}.feed_forward.w1.weight",     f"{HF_BLOCK}.mlp.gate_proj.weight"),
        KeyRule.of(f"{BLOCK}.feed_forward.w2.weight",     f"{HF_BLOCK}.mlp.down_proj.weight"),
        KeyRule.of(f"{BLOCK}.feed_forward.w3.weight",     f"{HF_BLOCK}.mlp.up_proj.weight"),
        KeyRule.of(f"{BLOCK}.attention_norm.weight",      f"{HF_BLOCK}.input_layernorm.weight"),
        KeyRule.of(f"{BLOCK}.ffn_norm.weight",            f"{HF_BLOCK}.post_attention_layernorm.weight"),
        KeyRule.of("norm.weight",                         "model.norm.weight"),
    )  # fmt: skip


class Decoder(ExactBuffers, LanguageModel, Generic[ConfigT]):
    """A causal language model made of equal blocks.

    A tied model has no `output`; it uses the embedding matrix, so nothing can untie them.
    A pipeline stage is a model without some of `tok_embeddings`, `layers`, `norm` and `output`. Its layers keep their
    names, because a ModuleDict does not renumber.
    """

    rope_table: torch.Tensor
    layers: nn.ModuleDict
    max_seq_len: int

    def __init__(
        self,
        config: ConfigT,
        blocks: Sequence[TransformerBlock],
        make_rope_table: Callable[[torch.device | None], torch.Tensor],
    ) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_seq_len = config.max_seq_len
        self.make_rope_table = make_rope_table
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): block for i, block in enumerate(blocks)})
        self.norm: RMSNorm | None = RMSNorm(config.dim, eps=config.norm_eps)
        self.output: nn.Linear | None = None
        if not config.tie_embeddings:
            self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.register_buffer("rope_table", make_rope_table(None), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits.

        Shape: (batch, seq) token ids, or (batch, seq, dim) on a later stage; (batch, seq, vocab) out.
        """
        if tokens.shape[1] > self.max_seq_len:
            raise ValueError(f"{tokens.shape[1]} tokens are longer than max_seq_len {self.max_seq_len}")
        x = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for layer in self.layers.values():
            x = layer(x, self.rope_table)
        if self.norm is None:
            return x
        x = self.norm(x)
        if self.config.tie_embeddings:
            assert self.tok_embeddings is not None, "a tied model cannot be cut between its embedding and its output"
            return F.linear(x, self.tok_embeddings.weight)
        assert self.output is not None, "the stage with the norm has the output"
        logits: torch.Tensor = self.output(x)
        return logits

    def stage(self, layers: Collection[int], *, first: bool, last: bool) -> Self:
        """Return a model with only these layers, with the embedding if `first`, and with norm and output if `last`.

        It shares the modules of this model and their names.
        """
        assert not self.config.tie_embeddings, "a tied model cannot be cut between its embedding and its output"
        stage = copy(self)
        # the stage has its own tables of modules, buffers and hooks
        stage.__dict__.update({name: copy(value) for name, value in self.__dict__.items() if isinstance(value, dict)})
        stage.layers = nn.ModuleDict({str(i): self.layers[str(i)] for i in layers})
        if not first:
            stage.tok_embeddings = None
        if not last:
            stage.norm = stage.output = None
        return stage

    def init_weights(self) -> None:
        """Fill every parameter in place from the current generator, and recompute the buffers.

        Weights that write into the residual stream start smaller in deeper models. Source: GPT-2's report, 2.3.
        """
        with torch.no_grad():
            if self.tok_embeddings is not None:
                nn.init.normal_(self.tok_embeddings.weight, std=INIT_STD)
            for block in self.layers.values():
                assert isinstance(block, TransformerBlock)
                block.init_weights(INIT_STD / math.sqrt(2 * self.config.num_layers))
            if self.norm is not None:
                self.norm.reset_parameters()
            if self.output is not None:
                nn.init.trunc_normal_(self.output.weight, std=self.config.dim**-0.5)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Recompute the buffers that no checkpoint holds, in the whole model, on its device."""
        self.rope_table = self.make_rope_table(self.rope_table.device)
        for module in self.modules():
            if isinstance(module, ExactBuffers) and module is not self:
                module.reset_buffers()

    def hf_config(self) -> dict[str, Any]:
        """Return the config.json of this model."""
        return self.config.to_hf()
