"""DiLoCo with a server and workers over a shared folder: the server has the weights, not the workers' checkpoints.

    python docs/examples/diloco.py server FOLDER --workers a --rounds 6
    python docs/examples/diloco.py worker FOLDER --name a --rounds 6

A worker takes the weights of a round from the server, makes `INNER_STEPS` steps with its own AdamW, and returns the
change of the weights. The server averages the changes and takes one Nesterov step with them. A worker saves its inner
optimizer, its generators and its progress, and asks the server for the weights when it starts. You can kill it and
start it again.
Source: arXiv 2311.08105.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from titan_ckpt import CheckpointConfig, CheckpointManager, KeepConfig, SaveConfig
from titan_ckpt.errors import ConfigError
from titan_ckpt.geometry.chunks import fill
from titan_ckpt.loading.external import ExternalLoad
from titan_ckpt.models.language_model import Model
from titan_ckpt.models.registry import build_model
from titan_ckpt.training.callbacks import Callback, StepMetrics
from titan_ckpt.training.trainer import Trainer
from titan_ckpt.weights.initialize import construct, materialize

INNER_STEPS = 3


def build() -> Model:
    return build_model("llama3", flavor="debug-0.5m")


def publish(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a file atomically."""
    partial = path.with_suffix(f".{os.getpid()}")
    save_file(tensors, partial)
    partial.replace(path)


def await_file(path: Path, timeout_seconds: float = 120.0) -> dict[str, torch.Tensor]:
    """Wait for a file and return its tensors. Raises: TimeoutError."""
    deadline = time.monotonic() + timeout_seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not come within {timeout_seconds:.0f} s: is its process running?")
        time.sleep(0.02)
    return load_file(path)


def serve(folder: Path, workers: list[str], rounds: int) -> None:
    """Run the server; its own ordinary checkpoints hold the weights and the outer optimizer."""
    torch.manual_seed(0)
    model = construct(build)
    materialize(model, "cpu")
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    config = CheckpointConfig(folder="server", save=SaveConfig(interval=1, keep=KeepConfig(latest=2)))
    with CheckpointManager(config, model_parts=[model], optimizers=[outer], base_folder=folder) as manager:
        done = manager.load().step
        for number in range(done, rounds + 1):
            publish(model.state_dict(), folder / f"weights-{number}.safetensors")
            if number == rounds:
                break
            deltas = [await_file(folder / f"delta-{number}-{name}.safetensors") for name in workers]
            for name, parameter in model.named_parameters():
                parameter.grad = torch.stack([delta[name] for delta in deltas]).mean(dim=0)
            outer.step()
            manager.save(number + 1)


def work(folder: Path, name: str, rounds: int) -> None:
    """Run a worker; its checkpoint holds everything except the weights."""
    model = construct(build)
    materialize(model, "cpu")
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(sum(name.encode()))  # determines this worker's data

    def take_weights(event: ExternalLoad) -> None:
        event.fill(await_file(folder / f"weights-{event.step // INNER_STEPS}.safetensors"))

    config = CheckpointConfig(
        folder=f"worker-{name}",
        components=("optimizer", "rng"),
        save=SaveConfig(interval=INNER_STEPS, keep=KeepConfig(latest=2)),
    )
    with CheckpointManager(
        config, model_parts=[model], optimizers=[inner], external_weights=take_weights, base_folder=folder
    ) as manager:
        step = manager.load().step
        for number in range(step // INNER_STEPS, rounds):
            start = {fqn: value.detach().clone() for fqn, value in model.named_parameters()}
            for _ in range(INNER_STEPS):
                loss = nn.functional.cross_entropy(*predictions(model))
                loss.backward()
                inner.step()
                inner.zero_grad()
            step += INNER_STEPS
            delta = {fqn: start[fqn] - value.detach() for fqn, value in model.named_parameters()}
            publish(delta, folder / f"delta-{number}-{name}.safetensors")
            manager.save(step)
            print(f"worker {name}: round {number}, loss {loss.item():.4f}", flush=True)
            model.load_state_dict(await_file(folder / f"weights-{number + 1}.safetensors"))


class Worker(Callback):
    """A worker in the Trainer, named in a run file: callbacks = ["diloco:Worker"]. Its folder is FOLDER/NAME.

    A round is as long as the interval of the run's saves. A worker that is killed resumes at the start of a round; one
    that is stopped within a round takes the weights of its start once more. It may be sharded.
    """

    def __init__(self) -> None:
        self.start: dict[str, torch.Tensor] = {}

    def on_init_end(self, trainer: Trainer) -> None:
        save, output = trainer.config.checkpoint.save, Path(trainer.config.output_folder)
        if save is None:
            problem = "checkpoint.save: a worker's rounds are the intervals of its saves; set checkpoint.save.interval"
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


def predictions(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and targets of a batch whose sequences count up from random numbers."""
    tokens = (torch.randint(0, 64, (4, 1)) + torch.arange(17)) % 64
    return model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["server", "worker"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", default="a", help="the worker's own")
    parser.add_argument("--workers", nargs="+", default=["a"], help="the names that the server waits for")
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.role == "server":
        serve(arguments.folder, arguments.workers, arguments.rounds)
    else:
        work(arguments.folder, arguments.name, arguments.rounds)
