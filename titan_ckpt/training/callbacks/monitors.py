"""Monitors of the gradients, of the load of a mixture's experts and of the run's memory.

The first stops the run before a gradient that is not finite reaches the weights; the others measure when a log is due.
"""

from __future__ import annotations

import math
import resource
import sys
from pathlib import Path

import torch

from titan_ckpt.errors import ConfigError, GradientError
from titan_ckpt.models.qwen3_moe import Qwen3Moe, Router, entropy, imbalance
from titan_ckpt.training.callbacks.base import Callback, StepMetrics, Trainer

GIB = 2**30


class GradientHealth(Callback):
    """Stops the run, and saves the last good step with the data position and generators from before the bad step."""

    def __init__(self) -> None:
        self._good = 0
        """The newest step whose weights are known to be finite."""

    def on_train_begin(self, trainer: Trainer) -> None:
        self._good = trainer.state.step

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        if trainer.config.training.check_gradients == "step":  # also one that was left out, by an overflow in float16
            self._good = metrics.step

    def on_pre_optimizer(self, trainer: Trainer, step: int, grad_norm: float) -> None:
        """Raises: GradientError, on all ranks, because `grad_norm` is the norm of the whole gradient."""
        if not trainer.is_measured:
            return
        if math.isfinite(grad_norm):
            self._good = step
            return
        advice = "Resume from a checkpoint with a lower optimizer.lr, or with training.max_grad_norm set"
        if self._good < step - 1:
            raise GradientError(
                f"step {step}: the gradient's norm is {grad_norm}; it was finite in step {self._good}, the last that "
                f"was checked, and nothing is saved. {advice}",
                step,
            )
        if trainer.step_back() and step > 1:
            trainer.manager.save(step - 1, force=True)
        raise GradientError(
            f"step {step}: the gradient's norm is {grad_norm}; the weights are those of step {step - 1}. {advice}", step
        )


class LoadBalance(Callback):
    """Measures how evenly the routers of all ranks have distributed tokens since the last log.

    Each sparse layer has `moe/<layer>/load`, every expert's share of the tokens; `moe/<layer>/max_over_mean`, the
    busiest expert's share divided by an even share (1 is even, the number of experts the worst); and
    `moe/<layer>/entropy` of the shares (1 is even, 0 is a single expert). `moe/max_over_mean` is the value of the worst
    layer, `moe/entropy` the mean over layers.
    """

    def on_init_end(self, trainer: Trainer) -> None:
        """Raises: ConfigError for a model without a mixture of experts."""
        if not isinstance(trainer.model, Qwen3Moe):
            absent = "the model has no mixture of experts; leave it out, or train qwen3_moe"
            raise ConfigError([f"training.measure: load_balance: {absent}"])

    def on_train_begin(self, trainer: Trainer) -> None:
        for router in self._routers(trainer).values():
            router.reset_buffers()

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        if not trainer.is_log_due(metrics.step):
            return
        assert isinstance(trainer.model, Qwen3Moe), "on_init_end() refuses others"
        routers = self._routers(trainer)
        config = trainer.model.config
        tokens = torch.zeros(config.num_layers, config.num_experts, dtype=torch.int64, device=trainer.ranks.device)
        for layer, router in routers.items():  # other ranks count the layers of other pipeline stages
            tokens[layer] = router.tokens
            router.reset_buffers()
        tokens = trainer.ranks.sum(tokens).cpu()
        worst, entropies = 0.0, []
        for layer in filter(config.is_sparse, range(config.num_layers)):
            counted, name = tokens[layer], f"layers.{layer}"
            trainer.measurements |= {
                f"moe/{name}/load": (counted / counted.sum()).tolist(),
                f"moe/{name}/max_over_mean": imbalance(counted),
                f"moe/{name}/entropy": entropy(counted),
            }
            worst = max(worst, imbalance(counted))
            entropies.append(entropy(counted))
        trainer.measurements |= {"moe/max_over_mean": worst, "moe/entropy": sum(entropies) / len(entropies)}

    @staticmethod
    def _routers(trainer: Trainer) -> dict[int, Router]:
        """Return this rank's routers by the number of their layer."""
        parts = [part for part in trainer.model_parts if isinstance(part, Qwen3Moe)]
        return {int(fqn.split(".")[1]): router for part in parts for fqn, router in part.routers().items()}


class MemoryMonitor(Callback):
    """Measures the memory of the rank that needs most, in GiB.

    `memory/rss` is the current host memory and `memory/peak_rss` its peak since the start. With CUDA,
    `memory/cuda_allocated` and `memory/cuda_reserved` are peaks since the last log.
    """

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        if not trainer.is_log_due(metrics.step):
            return
        measured = host_memory() | (cuda_memory(trainer.ranks.device) if trainer.ranks.device.type == "cuda" else {})
        per_rank = torch.zeros(trainer.ranks.size, len(measured), dtype=torch.float64, device=trainer.ranks.device)
        per_rank[trainer.ranks.rank] = torch.tensor(list(measured.values()), dtype=torch.float64)
        most = (trainer.ranks.sum(per_rank).amax(dim=0) / GIB).tolist()
        trainer.measurements |= {f"memory/{name}": value for name, value in zip(measured, most, strict=True)}


def host_memory() -> dict[str, int]:
    """Return the bytes that this process has in memory now (if /proc exists, else the peak), and the peak."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    statm = Path("/proc/self/statm")
    now = int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else peak
    return {"rss": now, "peak_rss": max(now, peak)}


def cuda_memory(device: torch.device) -> dict[str, int]:
    """Return the CUDA allocator's peaks in bytes since the last call."""
    peaks = {
        "cuda_allocated": torch.cuda.max_memory_allocated(device),
        "cuda_reserved": torch.cuda.max_memory_reserved(device),
    }
    torch.cuda.reset_peak_memory_stats(device)
    return peaks
