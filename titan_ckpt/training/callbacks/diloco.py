"""DiLoCo's worker as a callback: the weights of each round come from a server, over a shared folder.

Owns the files that worker and server exchange; docs/examples/diloco.py is a server. Source: arXiv 2311.08105.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from titan_ckpt.errors import ConfigError
from titan_ckpt.geometry.chunks import fill
from titan_ckpt.loading.external import ExternalLoad
from titan_ckpt.training.callbacks.base import Callback, StepMetrics, Trainer


def publish(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write the tensors that worker and server exchange, as a file that is there whole or not at all."""
    partial = path.with_suffix(f".{os.getpid()}")
    save_file(tensors, partial)
    partial.replace(path)


def await_file(path: Path, timeout_seconds: float = 120.0) -> dict[str, torch.Tensor]:
    """Wait for a file of `publish` and return its tensors. Raises: TimeoutError."""
    deadline = time.monotonic() + timeout_seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not come within {timeout_seconds:.0f} s: is its process running?")
        time.sleep(0.02)
    return load_file(path)


class DiLoCoWorker(Callback):
    """A worker of a DiLoCo server, named among the callbacks of a run file whose output_folder is FOLDER/NAME.

    It takes FOLDER/weights-N.safetensors at the start of round N, and writes FOLDER/delta-N-NAME.safetensors after it.
    A round is as long as the interval of the run's saves. A worker that is killed resumes at the start of a round; one
    that is stopped within a round takes the weights of its start once more. It may be sharded.
    """

    def __init__(self) -> None:
        self.start: dict[str, torch.Tensor] = {}

    def on_init_end(self, trainer: Trainer) -> None:
        save, output, problem = trainer.config.checkpoint.save, Path(trainer.config.output_folder), ""
        if save is None:
            problem = "checkpoint.save: a worker's rounds are the intervals of its saves; set checkpoint.save.interval"
        elif trainer.pipeline is not None:
            problem = "parallel.pipeline_parallel: a DiLoCo worker returns the change of a whole model; set it to 1"
        if save is None or problem:
            raise ConfigError([problem])
        self.folder, self.name, self.inner_steps = output.parent, output.name, save.interval

    def on_external_load(self, trainer: Trainer, event: ExternalLoad) -> None:
        event.fill(await_file(self.folder / f"weights-{event.step // self.inner_steps}.safetensors"))

    def on_train_begin(self, trainer: Trainer) -> None:
        self.start = {fqn: value.detach().clone() for fqn, value in trainer.model.named_parameters()}

    def on_save_begin(self, trainer: Trainer, step: int) -> None:
        """Return the round's change before its step is saved, so that no resumed round waits for it."""
        if step % self.inner_steps == 0:
            changes = {fqn: self.start[fqn] - value.detach() for fqn, value in trainer.model.named_parameters()}
            whole = {
                fqn: value.full_tensor() if isinstance(value, DTensor) else value for fqn, value in changes.items()
            }
            if trainer.ranks.rank == 0:
                publish(whole, self.folder / f"delta-{step // self.inner_steps - 1}-{self.name}.safetensors")

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        if metrics.step % self.inner_steps == 0:
            values = await_file(self.folder / f"weights-{metrics.step // self.inner_steps}.safetensors")
            for fqn, value in trainer.model.named_parameters():
                fill(value, values[fqn])
            self.on_train_begin(trainer)
