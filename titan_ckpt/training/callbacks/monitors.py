"""Monitors: how the experts of a mixture are loaded, and how much memory the run takes. Measured where a log is due."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from titan_ckpt.errors import ConfigError
from titan_ckpt.models.qwen3_moe import Qwen3Moe, Router, RouterLoad
from titan_ckpt.training.callbacks.base import Callback, StepMetrics

if TYPE_CHECKING:
    from titan_ckpt.training.trainer import Trainer

GIB = 2**30


class LoadBalance(Callback):
    """Says how evenly the routers of all ranks have dealt out tokens since the last log.

    Of each sparse layer: `moe/<layer>/load`, every expert's share of the tokens; `max_over_mean`, the busiest expert's
    against an even one (1 is even, the number of experts the worst); `entropy` of the shares (1 is even, 0 is one
    expert). `moe/max_over_mean` is the worst layer's, `moe/entropy` the mean.
    """

    def on_init_end(self, trainer: Trainer) -> None:
        """Raises: ConfigError for a model that no rank has a router of."""
        if not isinstance(trainer.model, Qwen3Moe):
            raise ConfigError(
                ["monitoring.load_balance: the model has no mixture of experts; leave it out, or train qwen3_moe"]
            )

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
        for layer, router in routers.items():  # those of other pipeline stages are counted there
            tokens[layer] = router.load().tokens
            router.reset_buffers()
        tokens = trainer.ranks.sum(tokens).cpu()
        worst, entropies = 0.0, []
        for layer in filter(config.is_sparse, range(config.num_layers)):
            counted, name = tokens[layer], f"layers.{layer}"
            load = RouterLoad(counted, torch.zeros_like(counted, dtype=torch.float32), config.experts_per_token)
            trainer.measurements |= {
                f"moe/{name}/load": (counted / counted.sum()).tolist(),
                f"moe/{name}/max_over_mean": load.imbalance(),
                f"moe/{name}/entropy": load.entropy(),
            }
            worst = max(worst, load.imbalance())
            entropies.append(load.entropy())
        trainer.measurements |= {"moe/max_over_mean": worst, "moe/entropy": sum(entropies) / len(entropies)}

    @staticmethod
    def _routers(trainer: Trainer) -> dict[int, Router]:
        """Return the routers that are on this rank by the number of their layer."""
        parts = [part for part in trainer.model_parts if isinstance(part, Qwen3Moe)]
        return {int(fqn.split(".")[1]): router for part in parts for fqn, router in part.routers().items()}


class MemoryMonitor(Callback):
    """Says how much memory the rank that needs most has taken, in GiB.

    `memory/rss` now and `memory/peak_rss` since the start, of the host; `memory/cuda_allocated` and
    `memory/cuda_reserved` at their peak since the last log, where there is CUDA.
    """

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        if not trainer.is_log_due(metrics.step):
            return
        mine = host_memory() | (cuda_memory(trainer.ranks.device) if trainer.ranks.device.type == "cuda" else {})
        per_rank = torch.zeros(trainer.ranks.size, len(mine), dtype=torch.float64, device=trainer.ranks.device)
        per_rank[trainer.ranks.rank] = torch.tensor(list(mine.values()), dtype=torch.float64)
        most = (trainer.ranks.sum(per_rank).amax(dim=0) / GIB).tolist()
        trainer.measurements |= {f"memory/{name}": value for name, value in zip(mine, most, strict=True)}


def host_memory() -> dict[str, int]:
    """Return the bytes this process has in memory, now (where there is /proc) and at most."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    statm = Path("/proc/self/statm")
    now = int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else peak
    return {"rss": now, "peak_rss": max(now, peak)}


def cuda_memory(device: torch.device) -> dict[str, int]:
    """Return the allocator's peaks in bytes since the last call."""
    peaks = {
        "cuda_allocated": torch.cuda.max_memory_allocated(device),
        "cuda_reserved": torch.cuda.max_memory_reserved(device),
    }
    torch.cuda.reset_peak_memory_stats(device)
    return peaks
