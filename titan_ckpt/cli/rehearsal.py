"""Fit a run file to its model and its data, and rehearse the run: find what `train` would refuse before step 1.

Owns the lengths and the adapted modules that `titan-ckpt init` writes. A rehearsal takes the build steps of the run on
the CPU, with memory that nothing is read into; the tokenised corpus stays in the cache, where the run finds it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.loading.origin import Origin
from titan_ckpt.loading.sources import prepare_load
from titan_ckpt.models.language_model import LanguageModel
from titan_ckpt.training.config import RunConfig
from titan_ckpt.training.data.chat import ChatError, ChatTemplate
from titan_ckpt.training.data.corpus import open_corpus
from titan_ckpt.training.data.tokens import marked_ids
from titan_ckpt.training.run_file import read_run
from titan_ckpt.training.trainer import Trainer
from titan_ckpt.weights.lora import is_conv1d
from titan_ckpt.weights.wrapper import ModelWrapper


@dataclass(frozen=True, slots=True)
class Fit:
    """The settings of a run file that depend on its model and data."""

    sequence_length: int
    too_long: str
    """"truncate" if the model is too short for some conversation, else "error"."""
    target_modules: tuple[str, ...]
    """The last parts of the names of the layers' linear modules that can have an adapter of rank `rank`."""


def fit(path: str, rank: int) -> Fit:
    """Return what fits the model and the data of a run file. Raises: CheckpointError for what `train` would refuse."""
    config, _ = read_run(path)
    trainer = Trainer(_on_cpu(config))
    with trainer.setup() as trainer.ranks:
        trainer.model = model = trainer.build_model()
        assert isinstance(model, LanguageModel), "init writes runs on text"
        trainer.tokenizer = trainer.build_assets()
        trainer.encode = trainer.build_data_transform()
        wanted, longest = config.data.sequence_length, _longest(trainer)
        if config.data.messages is not None:
            wanted = longest
        limit = model.max_seq_len or wanted
        length = max(1, min(wanted, longest, limit))
        is_cut = config.data.messages is not None and longest > limit
        return Fit(length, "truncate" if is_cut else "error", _adaptable(model, rank))


def rehearse(path: str) -> None:
    """Take the steps of a run before its first load, and compare its sources with the model.

    Raises: CheckpointError for what `train` would refuse.
    """
    config, converters = read_run(path)
    trainer = Trainer(_on_cpu(config), converters)
    with trainer.setup() as trainer.ranks:
        trainer.build()
        with trainer.build_manager() as manager:
            load_plan = Origin().plan(manager.config)
            wrapper, transforms = ModelWrapper(trainer.model_parts, converters), trainer.find_transforms()
            sources = prepare_load(load_plan.sources, wrapper, transforms, Coordinator.current(), require_owned=False)
            with sources:
                pass


def _on_cpu(config: RunConfig) -> RunConfig:
    return replace(config, training=replace(config.training, device="cpu"))


def _longest(trainer: Trainer) -> int:
    """Return the tokens of the longest conversation, or those of a text as far as a sequence is long, but for one."""
    data = trainer.config.data
    corpus = open_corpus(data.corpus, field=data.messages or data.field, messages=data.messages is not None)
    rows, encode, longest = corpus.all_rows([]), trainer.encode, 0
    for row in rows:
        if isinstance(encode, ChatTemplate):
            try:
                longest = max(longest, len(marked_ids(row, encode)) - 1)
            except ChatError:  # the rehearsal lists all of them
                continue
        elif encode is not None and longest < data.sequence_length:
            longest += len(encode(row.value)) - (longest == 0)
        else:
            break
    return longest


def _adaptable(model: LanguageModel, rank: int) -> tuple[str, ...]:
    linear = {name: module for name, module in model.named_modules() if type(module) is nn.Linear or is_conv1d(module)}
    inside = {id(module) for module in model.layers.modules()}
    unfit = {
        name.rpartition(".")[2]
        for name, module in linear.items()
        if id(module) not in inside or min(module.get_parameter("weight").shape) < rank
    }
    return tuple(dict.fromkeys(last for name in linear if (last := name.rpartition(".")[2]) not in unfit))
