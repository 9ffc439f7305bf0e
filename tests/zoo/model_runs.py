"""One model of the zoo through its life: load, train, save, resume, export, reload; and as a base of LoRA.

Owns the steps and the verdicts about them. tiny_models.py finds the models.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import transformers
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.pytorch_utils import Conv1D

import converters
from tests.zoo.tiny_models import tokens
from titan_ckpt import (
    CheckpointConfig,
    CheckpointManager,
    ExportConfig,
    InitialLoadConfig,
    ResumeConfig,
    SaveConfig,
    StateDictTransforms,
)
from titan_ckpt.errors import CheckpointError
from titan_ckpt.models.hf import HuggingFaceModel
from titan_ckpt.models.registry import build_model
from titan_ckpt.weights.initialize import construct, materialise

STEPS = 3
_SAVED = 2
_RANK = 2
_TOLERANCE = 1e-4
"""Of the largest logit: a merged product is rounded once more than the products of the trained model."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict about one run, and the reason if it is not exact."""

    verdict: Literal["exact", "refused", "different"]
    note: str = ""


class Run:
    """A training run of a model that a folder holds."""

    def __init__(self, base: Path, folder: Path, lora: bool = False) -> None:
        self.base = base
        self.folder = folder
        self.steps = 0
        torch.manual_seed(1)
        self.model: Any = construct(lambda: build_model("hf", folder=base))
        self.hooks = converters.from_tables([_lora_table(self.model)]) if lora else None
        if self.hooks is not None:
            self.hooks.convert(self.model)
        materialise(self.model, "cpu")
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2 if lora else 1e-3)

    def manager(self, **settings: Any) -> CheckpointManager:
        """Return a manager that starts from the base."""
        return CheckpointManager(
            CheckpointConfig(initial_load=(InitialLoadConfig(str(self.base)),), **settings),
            model_parts=[self.model],
            optimizers=[self.optimizer],
            sd_transforms=StateDictTransforms(self.model.key_map(), self.model.hf_config()),
            model_converters=self.hooks,
            base_folder=self.folder,
        )

    def step(self, number: int) -> None:
        """Take one optimizer step."""
        self.model.train()
        batch = tokens(self.model.config, seed=number)
        logits = self.model(batch)
        F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def train(self, exports: tuple[ExportConfig, ...]) -> None:
        """Take all steps, with a save and exports at the end."""
        save = SaveConfig(interval=_SAVED, async_mode="disabled")
        with self.manager(save=save, export=exports) as manager:
            manager.load()
            for number in range(1, STEPS + 1):
                self.step(number)
                manager.save(number, last_step=number == STEPS)

    def resume(self) -> None:
        """Take the steps after the save again."""
        with self.manager(resume=ResumeConfig(step=_SAVED)) as manager:
            manager.load()
            for number in range(_SAVED + 1, STEPS + 1):
                self.step(number)

    def values(self) -> dict[str, torch.Tensor]:
        """Return every parameter and buffer."""
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def logits(self) -> torch.Tensor:
        """Return the logits of a fixed input."""
        return logits_of(self.model)


def judge(kind: Callable[[Path, Path], None], config: PretrainedConfig, folder: Path) -> Outcome:
    """Return the verdict of a whole run: `full_run` or `lora_run`."""
    try:
        with quiet():
            write_base(config, folder / "base")
            kind(folder / "base", folder / "run")
    except RefusedError as error:
        return Outcome("refused", _line(error, folder))
    except Exception as error:  # whatever a model, transformers or this package raises is a result
        return Outcome("different", f"{type(error).__name__}: {_line(error, folder)}")
    return Outcome("exact")


class RefusedError(Exception):
    """This package refused the run before its first step."""


class DifferentError(AssertionError):
    """A value is not the one that it has to be, and nothing said so."""


def full_run(base: Path, folder: Path) -> None:
    """Train all weights: they are loaded, resumed and exported bit for bit."""
    with _refusals() as runs:
        runs.append(whole := Run(base, folder))
        with whole.manager() as manager:
            manager.load()
        twin = opened(base).eval()
        _same("the loaded logits", logits_of(twin), whole.logits())
        runs.append(whole := Run(base, folder))
        whole.train((ExportConfig("hf"),))
    again = Run(base, folder)
    again.resume()
    _same_values("after a resume", whole.values(), again.values())
    theirs = _reloaded(folder / "exports" / f"step-{STEPS}")
    _same_values("of the export", dict(whole.model.state_dict()), dict(theirs.state_dict()))
    _same("the exported logits", whole.logits(), logits_of(theirs))


def lora_run(base: Path, folder: Path) -> None:
    """Train adapters of all linear modules: merged and through PEFT the logits are those of the trained model."""
    with _refusals() as runs:
        runs.append(run := Run(base, folder, lora=True))
        run.train((ExportConfig("hf"), ExportConfig("peft")))
    trained, plain = run.logits(), logits_of(opened(base).eval())
    tolerance = _TOLERANCE * float(trained.abs().max())
    if (trained - plain).abs().max() <= 10 * tolerance:
        raise DifferentError("training changed nothing")
    exports = folder / "exports"
    merged = _reloaded(exports / f"step-{STEPS}")
    adapted = PeftModel.from_pretrained(opened(base), str(exports / f"step-{STEPS}-peft")).eval()
    for name, model in (("merged", merged), ("PEFT's", adapted)):
        difference = float((logits_of(model) - trained).abs().max())
        if not difference <= tolerance:
            raise DifferentError(f"{name} logits differ by {difference:.1e}")


def write_base(config: PretrainedConfig, folder: Path) -> None:
    """Write a folder of transformers' model with random weights, of which none is at its initial value."""
    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM.from_config
    model = make(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder)


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    """Return the logits of a fixed input, without dropout."""
    was_training = model.training
    model.eval()
    batch = tokens(model.config, seed=99)
    own = isinstance(model, HuggingFaceModel)
    result: torch.Tensor = model(batch) if own else model(input_ids=batch, use_cache=False).logits
    model.train(was_training)
    return result


@contextmanager
def quiet() -> Iterator[None]:
    """Let libraries say nothing; what has to be said is in a verdict."""
    logging.disable(logging.ERROR)
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def _refusals() -> Iterator[list[Run]]:
    """Turn an error of this package into RefusedError if none of the runs has taken a step."""
    runs: list[Run] = []
    try:
        yield runs
    except CheckpointError as error:
        if any(run.steps for run in runs):
            raise
        raise RefusedError(str(error)) from error


def _lora_table(model: nn.Module) -> dict[str, Any]:
    """Return the settings of LoRA on all linear modules but the output, as PEFT's "all-linear" has it."""
    output = model.get_output_embeddings()  # type: ignore[operator]
    named = [(fqn, m) for fqn, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and m is not output]
    linear = [fqn for fqn, module in named if min(module.weight.shape) >= _RANK]
    return {"kind": "lora", "rank": _RANK, "alpha": 8.0, "target_modules": linear}


def opened(folder: Path, **options: Any) -> Any:
    """Open a folder with the class of transformers that its config.json names."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, name).from_pretrained(folder, **options)


def _reloaded(folder: Path) -> Any:
    """Open an export with transformers, which must find all keys and no others."""
    model, info = opened(folder, output_loading_info=True, dtype="auto")
    if wrong := {name: keys for name, keys in info.items() if keys}:
        raise DifferentError(f"transformers finds {wrong}")
    return model.eval()


def _same(what: str, expected: torch.Tensor, actual: torch.Tensor) -> None:
    if not torch.equal(expected, actual):
        raise DifferentError(f"{what} differ by {float((expected - actual).abs().max()):.1e}")


def _same_values(where: str, expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> None:
    if expected.keys() != actual.keys():
        raise DifferentError(f"{where}: names {sorted(expected.keys() ^ actual.keys())[:4]}")
    wrong = [name for name, value in expected.items() if not torch.equal(value, actual[name])]
    if wrong:
        raise DifferentError(f"{where}: {len(wrong)} values differ, such as {wrong[0]}")


def _line(error: BaseException, folder: Path) -> str:
    return " ".join(str(error).replace(f"{folder}/", "").split())[:300]
