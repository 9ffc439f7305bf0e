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
from pathlib import Path

import torch
from torch import nn

from titan_ckpt import CheckpointConfig, CheckpointManager, KeepConfig, SaveConfig
from titan_ckpt.loading.external import ExternalLoad
from titan_ckpt.models.language_model import Model
from titan_ckpt.models.registry import build_model
from titan_ckpt.training.callbacks.diloco import await_file, publish
from titan_ckpt.weights.initialize import construct, materialize

INNER_STEPS = 3


def build() -> Model:
    return build_model("llama3", flavor="debug-0.5m")


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
