"""A model's way into and out of a Hugging Face folder, as training runs take it, and models of other libraries."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from tests import world
from tests.world import TOKENS, fill, part, write_hf
from titan_ckpt.formats.open import open_reader
from titan_ckpt.geometry.chunks import Block, Chunk
from titan_ckpt.geometry.keymap import KeyMap
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.weights.wrapper import ModelWrapper


def load(model: Any, folder: Path, table: KeyMap | None = None, **how: Any) -> None:
    """Fill the model's live tensors from the folder, with nothing missing, left over or, unless asked, cast."""
    report = fill(ModelWrapper([model]).state_dict(), folder, table or model.key_map(), **how)
    assert not report.unexpected, report


def export(model: Any, folder: Path, table: KeyMap | None = None, **options: Any) -> None:
    """Write the model to a new folder; collective where the model is sharded."""
    state = options.pop("state", None) or ModelWrapper([model]).state_dict("export")
    write_hf(folder, state, table or model.key_map(), **{"config": model.hf_config()} | options)


@contextmanager
def without_a_word(*loggers: str) -> Iterator[None]:
    """Make any warning an error, Python's and those that the named loggers get."""
    with ExitStack() as stack:
        heard = [stack.enter_context(world.heard(name)) for name in loggers]
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # PEFT's own
        yield
    assert not any(heard), heard


def open_strictly(auto: Any, folder: Path) -> Any:
    """Open a folder with transformers; any warning, of Python's or of its logger, and any odd key is an error."""
    with without_a_word("transformers"):
        model, info = auto.from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert not any(info.values()), info
    return model.eval()


def theirs(config: dict[str, Any], folder: Path | None = None, *, seed: int = 1, **save: Any) -> Any:
    """Return transformers' causal model of a config with random values, norms too, for evaluation; saved if asked."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    make: Any = AutoModelForCausalLM.from_config
    model = make(AutoConfig.for_model(**config)).eval()
    disturb(model, std=0.05)
    if folder is not None:
        model.save_pretrained(folder, **save)
    return model


def tuned(base: Any, folder: Path | None = None, *targets: str, seed: int = 1, **settings: Any) -> Any:
    """Return a base with an adapter of PEFT that has an effect, for evaluation; the adapter is saved if asked."""
    from peft import LoraConfig, get_peft_model

    config = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "target_modules": list(targets), **settings}
    model: Any = get_peft_model(base, LoraConfig(**config)).eval()
    torch.manual_seed(seed)
    disturb(model, lambda name, parameter: parameter.requires_grad)
    if folder is not None:
        model.save_pretrained(str(folder), save_embedding_layers=False)
    return model


@torch.no_grad()
def disturb(
    model: nn.Module, which: Callable[[str, nn.Parameter], bool] = lambda *_: True, *, std: float = 0.1
) -> None:
    """Train, in effect: add noise to these parameters."""
    for name, parameter in model.named_parameters():
        if which(name, parameter):
            parameter.add_(torch.randn(parameter.shape) * std)


@torch.no_grad()
def logits(model: Any, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    """Return the logits of a model of ours or of theirs."""
    out = model(tokens)
    found: torch.Tensor = out if isinstance(out, torch.Tensor) else out.logits
    return found


def gap(one: Any, other: Any, tokens: torch.Tensor = TOKENS) -> float:
    """Return the largest difference of the logits of two models."""
    return float((logits(one, tokens) - logits(other, tokens)).abs().max())


def read(reader: TensorReader, key: str = "a.weight", chunk: Chunk | None = None, dtype: Any = None) -> torch.Tensor:
    """Read a tensor, or a region of it, into memory that was NaN."""
    info = reader.tensors[key]
    chunk = chunk or Chunk.whole(info.shape)
    into = torch.full(chunk.sizes, float("nan"), dtype=dtype or info.dtype)
    reader.read([Block(chunk, into, key)])
    return into


def assert_reads(folder: Path, key: str, expected: torch.Tensor, *boxes: Chunk) -> None:
    """Fail unless a tensor of a folder, whole and in these regions, has these values."""
    with open_reader(folder) as reader:
        assert torch.equal(read(reader, key), expected)
        for box in boxes:
            assert torch.equal(read(reader, key, box), part(expected, box))


def a_box(data: Any, shape: Sequence[int]) -> Chunk:
    """Draw a region of a tensor."""
    starts = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    return Chunk(starts, tuple(data.draw(st.integers(1, n - a)) for n, a in zip(shape, starts, strict=True)))
