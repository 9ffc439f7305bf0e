"""Settings of the LoRA converter: one frozen dataclass, checked when it is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch

from titan_ckpt.config import PositiveInt
from titan_ckpt.encoding.toml import Check, Checked, ForeignKeys

Alpha = Annotated[float, Check("a positive number; at 0 the adapter does nothing", lambda a: a > 0)]
Index = Annotated[int, Check("a row, from 0", lambda i: i >= 0)]
Dropout = Annotated[float, Check("a probability below 1", lambda p: 0 <= p < 1)]
AdapterDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class LoRAConfig(Checked):
    """Low-rank adapters on linear and embedding modules. Source: arXiv 2106.09685."""

    FOREIGN_KEYS: ClassVar[ForeignKeys] = {
        "PEFT's name": {"r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout"},
    }

    target_modules: tuple[str, ...]
    """Modules to adapt: the last part or a dotted suffix of the name (`wq`, `attention.wq`), a full name, or a shell
    pattern over the full name (`layers.*.attention.w[qv]`; `*` also matches dots)."""
    kind: Literal["lora"] = "lora"
    rank: PositiveInt = 8
    """Rows of A and columns of B."""
    alpha: Alpha = 16.0
    """The adapter's output is scaled by alpha / rank, or with rsLoRA by alpha / sqrt(rank)."""
    dropout: Dropout = 0.0
    """Probability that an input element of the adapter is set to zero in training."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank). Source: arXiv 2312.03732."""
    use_dora: bool = False
    """Also train a magnitude per output row. Source: arXiv 2402.09353."""
    rank_pattern: Mapping[str, PositiveInt] = field(default_factory=dict)
    """Module name as in target_modules -> rank of its adapter; the first matching name counts."""
    alpha_pattern: Mapping[str, Alpha] = field(default_factory=dict)
    """Module name as in target_modules -> alpha of its adapter (not the scale); the first matching name counts."""
    modules_to_save: tuple[str, ...] = ()
    """Modules to train in full beside the adapters. A copy is trained, so the base does not change."""
    frozen_copies: tuple[str, ...] = ()
    """Modules of which the adapter holds the weights as well, frozen: PEFT saves tables so after the vocabulary was
    resized. The base does not change."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Biases of the base to train beside the adapters: none, all, or those of adapted modules. Copies are trained."""
    lora_bias: bool = False
    """B has a bias. A merged export needs modules with a bias of their own."""
    trainable_token_indices: Mapping[str, tuple[Index, ...]] = field(default_factory=dict)
    """Name of a table as in target_modules -> its rows to train beside the adapters, such as those of new tokens; a
    module that shares the table's weight follows."""
    ensure_weight_tying: bool = False
    """Adapters and copies of a table also act on the module that shares its weight; else each acts on its own."""
    dtype: AdapterDtype = "float32"
    """Dtype of all trained tensors; the base keeps its own."""
    seed: int = 0
    """Initial values depend only on this and on each tensor's name, so they are equal for any number of ranks."""

    def problems(self) -> Iterator[str]:
        if not self.target_modules:
            yield "target_modules: names no module"
        if self.lora_bias and self.use_dora:
            yield "lora_bias: DoRA scales whole rows, which a bias is not part of; leave one of them out"
        for name, rows in self.trainable_token_indices.items():
            if not rows or len({*rows}) < len(rows):
                yield f"trainable_token_indices.{name}: expected different rows, found {list(rows)}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.dtype]
