"""Runs of torchtitan's Trainer on its debug models, and what they computed."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.torchtitan import cpu as cpu  # before torchtitan
from tests.world import differing, whole
from titan_ckpt.formats.native.arena import StagedFile
from titan_ckpt.integrations.torchtitan import TitanCheckpointer
from titan_ckpt.testing.ranks import RankError
from titan_ckpt.testing.ranks import distributed as _distributed

# isort: split
import torchtitan.trainer
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.models.qwen3 import config_registry as qwen3
from torchtitan.tools.logging import init_logger

FLAVOURS: dict[str, Callable[[], Any]] = {
    name: value
    for registry in (llama3, qwen3)
    for name, value in vars(registry).items()
    if callable(value) and name.startswith(("llama3_debug", "qwen3_debug"))
}
_SMALLER: dict[tuple[str, object], int] = {
    **{(name, 2048): 512 for name in ("vocab_size", "num_embeddings", "global_vocab_size", "lm_head.out_features")},
    **{(name, 3072): 512 for name in ("w1.out_features", "w2.in_features", "w3.out_features")},
}
distributed = partial(_distributed, timeout_seconds=500.0)  # a run takes seconds, and minutes on a busy machine
init_logger()
logging.getLogger().setLevel(logging.WARNING)
torchtitan.trainer.time = SimpleNamespace(**vars(time) | {"sleep": lambda _: None})  # it sleeps when it has ended


@dataclass
class Run:
    """Losses and parameters that a run of the Trainer computed."""

    losses: list[float]
    step: int
    model: dict[str, torch.Tensor]
    """The model's own state dict, whole tensors."""
    optimizer: dict[str, Any]
    ntokens_seen: int


def config(
    assets: Path, folder: Path, flavour: str = "llama3_debugmodel", /, *, steps: int = 6, titan: bool = True,
    degrees: dict[str, int] | None = None, exact: bool = False, recompute: bool = False, layers: int | None = None,
    **settings: Any,
) -> Any:  # fmt: skip
    """Return the config of a small run: the flavour unmodified but for sizes, and the checkpointer.

    `exact`: FSDP2 computes in float32 too, so that logits can be compared. `recompute`: keep the flavour's activation
    checkpointing, which wraps layers; it takes a quarter of the time. `layers`: the model has the first of its layers.
    """
    made = FLAVOURS[flavour]()
    made.model_spec.model.layers = made.model_spec.model.layers[:layers]
    narrow(made)
    made.hf_assets_path, made.dump_folder, made.dataloader.dataset_path = str(assets), str(folder), str(assets / "data")
    made.training.seq_len, made.training.local_batch_size, made.training.steps = 16, 2, steps
    made.training.disable_cuda_graphs = True
    made.lr_scheduler.warmup_steps, made.lr_scheduler.total_steps = 2, 6
    if hasattr(made.loss, "num_chunks"):
        made.loss.num_chunks = 2
    if not recompute:
        made.activation_checkpoint = None
    made.training.mixed_precision_param = "float32" if exact else "bfloat16"
    made.validator.enable, made.debug.seed, made.debug.enable_structured_logging = False, 0, False
    made.parallelism.spmd_backend = "partial_dtensor"  # spmd_types, the default, needs a nightly torch for FSDP2
    for name, degree in (degrees or {}).items():
        setattr(made.parallelism, f"{name}_degree", degree)
    kind = TitanCheckpointer if titan else CheckpointManager
    made.checkpoint = kind.Config(**{"enable": True, "interval": 2, "last_save_model_only": False} | settings)
    return made


def narrow(part: Any, name: str = "") -> None:
    """Give a config's parts fewer words and narrower layers: memory and initial values take much of a run's time."""
    if isinstance(part, (list, tuple)):
        for one in part:
            narrow(one)
    for field in fields(part) if is_dataclass(part) else ():
        value = getattr(part, field.name)
        narrow(value, field.name)
        for place in (field.name, f"{name}.{field.name}"):
            if isinstance(value, int) and (place, value) in _SMALLER:
                setattr(part, field.name, _SMALLER[place, value])


def train(
    made: Any,
    *,
    until: int | None = None,
    then: Callable[[Any], object] | None = None,
    before_death: Callable[[Run], object] | None = None,
    logged: Callable[[int], object] | None = None,
) -> Run:
    """Run the Trainer to its last step, or to the end of step `until`, and call `then` on it before it is closed.

    `before_death`: the process kills itself in the middle of the save of step `until`, after this call. `logged`: is
    called within each step.
    """
    trainer = made.build()
    losses: list[float] = []
    dies: SimpleQueue[bool] = SimpleQueue()
    log = trainer.metrics_processor.log

    def noted(step: int, loss: float, *rest: Any, **more: Any) -> None:
        losses.append(loss)
        log(step, loss, *rest, **more)
        if logged is not None:
            logged(step)
        if before_death is not None and step == until:
            _die_while_writing(dies, step)

    trainer.metrics_processor.log = noted
    if until is not None:
        trainer.should_continue_training = lambda: trainer.step < until
    try:
        trainer.train()
        if then is not None:
            then(trainer)
        model = {f"{i}.{n}": v for i, part in enumerate(trainer.model_parts) for n, v in part.state_dict().items()}
        weights = {name.removeprefix("0."): whole(value) for name, value in model.items()}
        moments = {name: whole(value) for name, value in trainer.optimizers.state_dict().items()}
        run = Run(losses, trainer.step, weights, moments, trainer.ntokens_seen)
        if before_death is not None:
            before_death(run)
            dies.put(True)
            signal.pause()
        return run
    finally:
        dies.put(False)
        trainer.close()
        gc.enable()  # the Trainer switches it off for its process


def _die_while_writing(dies: SimpleQueue[bool], step: int) -> None:
    """Let the save of `step` wait for the answer, and end by SIGKILL when this rank's file has been begun.

    The save before it may not have written its file yet, and this step's save waits for it.
    """
    write = StagedFile.write

    def written(self: StagedFile, folder: Any) -> Any:
        if folder.name.startswith(f"step-{step}.") and dies.get():
            threading.Thread(target=write, args=(self, folder), daemon=True).start()
            while not (folder / self.plan.file_name).exists():
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)  # before the ranks tell each other of their files: none can commit
        return write(self, folder)

    StagedFile.write = written  # type: ignore[method-assign]


def killed(body: Callable[..., None], *arguments: Any) -> None:
    """Run the body of ranks, which must all end by SIGKILL."""
    with pytest.raises(RankError) as error:
        body(*arguments)
    ends = str(error.value).count("ended by SIGKILL")
    assert ends == len(error.value.ranks), str(error.value)


@distributed(1)
def make_base(assets: Path, folder: Path) -> None:
    """Train a base of two layers for one step and export it as a Hugging Face folder."""
    train(config(assets, folder, steps=1, layers=2, last_save_model_only=True, last_save_in_hf=True))


def same(a: Run, b: Run, losses: int = 6) -> None:
    """Assert that two runs ended with the same bits; the last `losses` losses too."""
    assert a.losses[len(a.losses) - losses :] == b.losses[len(b.losses) - losses :]
    assert (a.step, a.ntokens_seen) == (b.step, b.ntokens_seen)
    same_tensors(a.model, b.model)
    same_tensors(a.optimizer, b.optimizer)


def steps_in(dump_folder: Path) -> list[int]:
    """Return the steps in a run's checkpoint folder."""
    return sorted(int(path.name[5:]) for path in (dump_folder / "checkpoint").glob("step-*"))


def same_tensors(left: dict[str, Any], right: dict[str, Any]) -> None:
    """Assert that two state dicts have the same names and bits."""
    assert differing(left, right) == []


def near(logits: torch.Tensor, wanted: torch.Tensor, atol: float) -> None:
    """Assert that logits are equal within the error of bfloat16, in which torchtitan computes experts.

    An error may choose another expert for a token: two tokens may differ.
    """
    differ = ((logits - wanted).abs() > atol + 2e-4 * wanted.abs()).any(-1)
    assert differ.sum() <= 2, (logits - wanted).abs().amax(-1)


def logits_of(trainer: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of a run's model, whole on every rank."""
    model = trainer.model_parts[0].eval()
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    skipped, model._skip_lm_head = getattr(model, "_skip_lm_head", False), False
    with torch.no_grad():
        logits: torch.Tensor = model(tokens, positions=positions)
    model._skip_lm_head = skipped
    return whole(logits)  # type: ignore[no-any-return]
