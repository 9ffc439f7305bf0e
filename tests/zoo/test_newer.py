"""A class that a newer version of a library adds is refused by name until it is listed, and the scripts find it."""

from __future__ import annotations

import dataclasses
import gc
import importlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from tests.integrations.trainer_cases import plain
from tests.zoo.offered import below
from titan_ckpt import CheckpointConfig
from titan_ckpt.components import unsaved_state
from titan_ckpt.components.known import peft_adapters, switches
from titan_ckpt.components.known.streams import PARTS
from titan_ckpt.components.unsaved_state import faults
from titan_ckpt.errors import ConfigError
from titan_ckpt.integrations.data_order import SAMPLERS
from titan_ckpt.integrations.lightning import known as of_lightning
from titan_ckpt.integrations.lightning.known import callback_faults, plugin_faults
from titan_ckpt.integrations.loader_position import PositionedLoader
from titan_ckpt.integrations.transformers import known as of_transformers
from titan_ckpt.integrations.transformers.known import CALLBACKS, TRAINERS

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


def listed(known: dict[str, str], value: Any) -> Iterable[str]:
    return faults([("object", value)], known, ())


def sampled(value: Any) -> Iterable[str]:
    with pytest.raises(ConfigError) as refused:
        PositionedLoader(DataLoader([1, 2], sampler=value))  # type: ignore[arg-type]  # a list is a dataset
    return [str(refused.value)]


def streamed(value: Any) -> Iterable[str]:
    stream = datasets.Dataset.from_dict({"a": [1]}).to_iterable_dataset()
    stream._ex_iterable = value
    with pytest.raises(ConfigError) as refused:
        PositionedLoader(DataLoader(stream))
    return [str(refused.value)]


def adapted(attribute: str, value: Any) -> Iterable[str]:
    layer: Any = type("Layer", (torch.nn.Linear,), {"__module__": "peft.tuners.newer"})(1, 1)
    setattr(layer, attribute, {"default": value})
    return peft_adapters.faults([layer], [], ())


def optimized(value: Any) -> Iterable[str]:
    return peft_adapters.faults([], [value], ())


Judge = Callable[[Any], Iterable[str]]
NEWER: list[tuple[str, str, Judge]] = [
    ("lightning.pytorch.callbacks.timer", "Callback", lambda value: callback_faults([value], ())),
    ("pytorch_lightning.callbacks.timer", "Callback", lambda value: callback_faults([value], ())),
    ("lightning.pytorch.strategies.ddp", "DDPStrategy", lambda value: plugin_faults(value, None, ())),
    ("lightning.fabric.plugins.precision.amp", "MixedPrecision", lambda value: plugin_faults(None, value, ())),
    ("transformers.trainer_seq2seq", "Trainer", partial(listed, TRAINERS)),
    ("trl.trainer.sft_trainer", "_BaseTrainer", partial(listed, TRAINERS)),
    ("transformers.trainer_callback", "TrainerCallback", partial(listed, CALLBACKS)),
    ("torch.utils.data.sampler", "Sampler", sampled),
    ("transformers.trainer_pt_utils", "Sampler", sampled),
    ("datasets.iterable_dataset", "_BaseExamplesIterable", streamed),
    ("peft.tuners.lora.config", "PeftConfig", partial(adapted, "peft_config")),
    ("peft.tuners.lora.layer", "LoraVariant", partial(adapted, "lora_variant")),
    ("peft.optimizers.lorafa", "Optimizer", optimized),
]
"""Module, a base that it has, and what judges an object."""
KNOWN = (
    of_lightning.KNOWN.keys() | TRAINERS.keys() | CALLBACKS.keys() | SAMPLERS.keys() | PARTS.keys()
    | peft_adapters.KNOWN.keys()
)  # fmt: skip


@pytest.mark.parametrize(("module", "base", "judge"), NEWER, ids=[name for name, _, _ in NEWER])
def test_a_class_of_a_newer_version_is_refused_until_it_is_listed(
    module: str, base: str, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the class that it extends is exact; the script that lists the library finds it."""
    library = importlib.import_module(module)
    root = getattr(library, base)
    kind: Any = type("Newer", (root,), {"__module__": module})
    kind.__abstractmethods__ = frozenset()
    monkeypatch.setattr(library, "Newer", kind, raising=False)
    name = f"{module}.Newer"
    assert name in below(root, [module.partition(".")[0]]) - KNOWN
    lines = [*judge(object.__new__(kind))]
    assert "was not proved" in lines[0] and f'checkpoint.allow = ["{name}"]' in lines[0]
    monkeypatch.undo()
    del kind
    unsaved_state._stored_within.cache_clear()
    switches._any_of_peft.cache_clear()
    gc.collect()


def test_an_argument_of_a_newer_version_is_refused_if_it_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of TrainingArguments, and of the Trainer itself."""

    @dataclasses.dataclass
    class Newer(TrainingArguments):
        newer: int = 0

    class NewerTrainer(Trainer):
        def __init__(self, newest: Any = None) -> None:
            """Take one argument more."""

    trainer: Any = plain(tmp_path)
    monkeypatch.setattr(of_transformers, "TrainingArguments", Newer)
    monkeypatch.setattr(of_transformers, "Trainer", NewerTrainer)
    assert [*of_transformers.problems(trainer, CheckpointConfig(), has_adapter=False)] == []
    trainer.args.newer = trainer.newest = 1
    lines = [*of_transformers.problems(trainer, CheckpointConfig(), has_adapter=False)]
    expected = "this version of titan_ckpt does not know the argument: leave it out"
    assert lines == [f"{name}: {expected}" for name in ("newer", "newest")]
