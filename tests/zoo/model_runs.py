"""One model of the zoo through its life: load, train, save, resume, export, reload; and as a base of LoRA.

Owns the steps and the verdicts about them. tiny_models.py finds the models. In a process group a model is sharded over
its ranks by FSDP2: every rank calls the same functions, and rank 0 compares what transformers and PEFT make of exports.
"""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from tests import world
from tests.interop.folders import disturb
from tests.zoo.tiny_models import tokens
from titan_ckpt import CheckpointManager, ExportConfig, ResumeConfig, SaveConfig, converters
from titan_ckpt.errors import CheckpointError
from titan_ckpt.geometry.chunks import local_tensor
from titan_ckpt.models.hf import HuggingFaceModel
from titan_ckpt.models.registry import build_model
from titan_ckpt.weights.initialize import construct, materialize

STEPS = 3
_SAVED = 2
_RANK = 2
_LORA, _LORA_REST = "LoRA", "LoRA without what is refused"
_ATTEMPTS = 4
_TOLERANCE = 1e-4
"""Share of the largest logit: a merged product is rounded once more than the products of the trained model."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict about one run, and the reason if it is not exact."""

    verdict: Literal["exact", "refused", "different"]
    note: str = ""

    @property
    def line(self) -> str:
        """Return the reason on one line."""
        return " ".join(self.note.split())[:300]


class Run:
    """A training run of a model that a folder holds."""

    def __init__(self, base: Path, folder: Path, adapted: Callable[[Any], list[str]] | None = None) -> None:
        self.base = base
        self.folder = folder
        self.steps = 0
        torch.manual_seed(1)
        self.model: Any = construct(lambda: build_model("hf", folder=base))
        self.converter = None
        if adapted is not None:
            table = {"kind": "lora", "rank": _RANK, "alpha": 8.0, "target_modules": adapted(self.model)}
            self.converter = converters.from_tables([table])
            self.converter.convert(self.model)
        world.shard(self.model)
        materialize(self.model, "cpu")
        self.optimizer = world.adamw(self.model, lr=1e-3 if adapted is None else 1e-2)

    def manager(self, **settings: Any) -> CheckpointManager:
        """Return a manager that starts from the base."""
        given = {"save": None, "initial_load": [self.base], "model_converters": self.converter, **settings}
        return world.manager(self.folder, self.model, self.optimizer, **given)

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
        """Return every parameter and buffer, those of FSDP2 as this rank's shards."""
        live = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return {name: local_tensor(value) for name, value in live.items()}

    def whole(self) -> dict[str, torch.Tensor]:
        """Return the model's state dict with whole tensors."""
        found: dict[str, torch.Tensor] = world.whole(dict(self.model.state_dict()))
        return found

    def logits(self) -> torch.Tensor:
        """Return the logits of a fixed input."""
        return logits_of(self.model)


def full_outcome(base: Path, folder: Path) -> Outcome:
    """Return the verdict about training all weights of a base."""
    return _judged(lambda: full_run(base, folder), folder.parent)


def lora_outcomes(base: Path, folder: Path) -> dict[str, Outcome]:
    """Return the verdict about LoRA on all linear modules; if some are refused by name, also without them."""
    left_out: set[str] = set()
    outcomes: dict[str, Outcome] = {}
    for attempt in range(_ATTEMPTS):
        targets = _Targets(left_out)
        run = folder / str(attempt)
        outcome = _judged(partial(lora_run, base, run, targets), folder.parent)
        outcomes[_LORA_REST if left_out else _LORA] = outcome
        more = targets.named_in(outcome.note) if outcome.verdict == "refused" else set()
        if not more:
            break
        left_out |= more
    return outcomes


def _judged(run: Callable[[], None], folder: Path) -> Outcome:
    try:
        with quiet():
            run()
    except RefusedError as error:
        return Outcome("refused", str(error).replace(f"{folder}/", ""))
    except Exception as error:  # whatever a model, transformers or this package raises is a result
        return Outcome("different", f"{type(error).__name__}: {error}".replace(f"{folder}/", ""))
    return Outcome("exact")


class _Targets:
    """All linear modules of a model but the output, as PEFT's "all-linear" has them, without some kinds of them."""

    def __init__(self, left_out: Collection[str]) -> None:
        self._left_out = frozenset(left_out)
        self._chosen: list[str] = []

    def __call__(self, model: Any) -> list[str]:
        """Return the names of the modules to adapt."""
        output = model.get_output_embeddings()
        named = [(fqn, m) for fqn, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and m is not output]
        linear = [fqn for fqn, module in named if min(module.weight.shape) >= _RANK]
        self._chosen = [fqn for fqn in linear if _kind(fqn) not in self._left_out]
        return self._chosen

    def named_in(self, message: str) -> set[str]:
        """Return the kinds of modules that a message names, by their paths or between quotes."""
        words = re.findall(r"'(\w+)'|((?:\w+\.)+\w+)", message)
        names = [re.sub(r"\.(lora_[AB]\.)?weight$", "", quoted or path) for quoted, path in words]
        return {_kind(fqn) for fqn in self._chosen if any(f".{fqn}".endswith(f".{name}") for name in names)}


def _kind(fqn: str) -> str:
    """Return the name of a module without the numbers of its layers."""
    return re.sub(r"\d+", "N", fqn)


class RefusedError(Exception):
    """This package refused the run before its first step."""


class DifferentError(AssertionError):
    """A value is not the one that it has to be, and nothing said so."""


def full_run(base: Path, folder: Path) -> None:
    """Train all weights: they are loaded, resumed and exported bit for bit."""
    with _refusals() as runs:
        runs.append(whole := Run(base, folder))
        world.load(whole.manager())
        twin = opened(base).eval()
        _same("the loaded logits", logits_of(twin), whole.logits())
        runs.append(whole := Run(base, folder))
        whole.train((ExportConfig("hf"),))
    again = Run(base, folder)
    again.resume()
    _same("after a resume", whole.values(), again.values())
    trained, logits = whole.whole(), whole.logits()
    if is_first():
        theirs = _reloaded(folder / "exports" / f"step-{STEPS}")
        _same("of the export", trained, dict(theirs.state_dict()))
        _same("the exported logits", logits, logits_of(theirs))


def lora_run(base: Path, folder: Path, adapted: Callable[[Any], list[str]]) -> None:
    """Train adapters: they are resumed bit for bit; merged and through PEFT the logits are those of the model."""
    with _refusals() as runs:
        runs.append(run := Run(base, folder, adapted))
        run.train((ExportConfig("hf"), ExportConfig("peft")))
    again = Run(base, folder, adapted)
    again.resume()
    _same("after a resume", run.values(), again.values())
    trained = run.logits()
    if not is_first():
        return
    plain = logits_of(opened(base).eval())
    tolerance = _TOLERANCE * float(trained.abs().max())
    if (trained - plain).abs().max() <= 10 * tolerance:
        raise DifferentError("training changed nothing")
    exports = folder / "exports"
    merged = _reloaded(exports / f"step-{STEPS}")
    adapter = PeftModel.from_pretrained(opened(base), str(exports / f"step-{STEPS}-peft")).eval()
    for name, model in (("merged", merged), ("PEFT's", adapter)):
        difference = float((logits_of(model) - trained).abs().max())
        if not difference <= tolerance:
            raise DifferentError(f"{name} logits differ by {difference:.1e}")


def is_first() -> bool:
    """Return whether this is rank 0, or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0


def write_base(config: PretrainedConfig, folder: Path) -> None:
    """Write a folder of transformers' model with random weights, of which none is at its initial value."""
    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM.from_config
    model = make(config)
    disturb(model, std=0.02)
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


def opened(folder: Path, **options: Any) -> Any:
    """Open a folder with the class of transformers that its config.json names.

    Its weights move from the mapped file to memory as torch allocates it: some kernels' sums depend on alignment.
    """
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    found = getattr(transformers, name).from_pretrained(folder, **options)
    model = found[0] if isinstance(found, tuple) else found
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return found


def _reloaded(folder: Path) -> Any:
    """Open an export with transformers, which must find all keys and no others."""
    model, info = opened(folder, output_loading_info=True, dtype="auto")
    if wrong := {name: keys for name, keys in info.items() if keys}:
        raise DifferentError(f"transformers finds {wrong}")
    return model.eval()


def _same(what: str, expected: Any, actual: Any) -> None:
    if wrong := world.differing(expected, actual, what):
        raise DifferentError(f"{len(wrong)} differ, such as {wrong[0]}")
