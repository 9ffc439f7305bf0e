"""The loss of a batch as a sum, the divisor of the sums of a step, and the loss that keeps a mixture's load even."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from titan_ckpt.errors import ConfigError
from titan_ckpt.models.layers import local_shard
from titan_ckpt.models.qwen3_moe import Qwen3MoeConfig, Router
from titan_ckpt.training.config import RunConfig
from titan_ckpt.training.data.batch import IGNORED, Batch
from titan_ckpt.training.parallel.ranks import Ranks

_SETTING = "training.router_aux_loss_coef"


def num_predicted(batch: Batch) -> int:
    """Return how many labels of the batch count in the loss."""
    return int((batch["labels"] != IGNORED).sum())


@dataclass(frozen=True, slots=True)
class Predicted:
    """The predicted tokens of a step, or whatever a model's own loss is a sum of. Ranks that read the same data count
    as one.
    """

    here: int
    """Number of them in this rank's data."""
    everywhere: torch.Tensor
    """Number of them on all ranks; int64 on the run's device, so that nothing waits for it."""
    num_ranks: torch.Tensor
    """Number of ranks that have any."""
    num_tokens: int | None
    """Number of predicted tokens of all ranks; None if only an exchange can tell it."""
    data_ends: bool = False
    """Whether some rank has fewer batches than another one, or all have none: then no step can be taken."""

    @staticmethod
    def of(
        batches: Sequence[Any], count: Callable[[Any], int], ranks: Ranks, *, is_whole: bool, may_end: bool
    ) -> Predicted:
        """Count. `is_whole`: every label of every rank counts, so there is nothing to exchange; otherwise collective.

        `may_end`: the number of batches is compared, too.
        Raises: RuntimeError for a label without a loss in data that has said to have none.
        """
        here, num_batches, data_ends = sum(map(count, batches)), len(batches), False
        if is_whole:
            if here != (size := sum(batch["labels"].numel() for batch in batches)):
                raise RuntimeError(
                    f"{size - here} labels of a step are {IGNORED}, and every_label_counts of the dataset is true: set "
                    "it to False in the class of the dataset"
                )
            known = here * ranks.data_size
            counts = torch.tensor([known, ranks.data_size]).to(ranks.device, non_blocking=True)
        else:
            known = None
            own = [here, min(here, 1), num_batches, num_batches**2]
            counts = ranks.sum(torch.tensor(own, device=ranks.device), over_data=True)
            if may_end:
                total, squares = counts[2:].tolist()
                data_ends = not total or total**2 != ranks.data_size * squares  # equal only for equal numbers
        return Predicted(here, counts[0], counts[1], known, data_ends)

    def divisor(self, average: Literal["token", "rank"]) -> torch.Tensor:
        """Return what this rank's summed loss is divided by, 1 or more, so that the sum over ranks is their average.

        A step may hold nothing but conversations without a loss. A rank without predicted tokens has no mean.
        """
        if average == "token":
            return self.everywhere.clamp(min=1)
        return self.num_ranks.clamp(min=1) * max(self.here, 1)


def summed_cross_entropy(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the sum over all predicted tokens in float32; a sum, so that the mean can be taken over all ranks.

    Shape: (batch, sequence, vocab) logits, a DTensor under tensor parallelism; a scalar out.
    """
    return F.cross_entropy(
        local_shard(logits).flatten(0, 1).float(), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
    )


def balance_coefficient(config: RunConfig, shape: Any) -> float:
    """Return the factor of the load-balancing loss: that of the run, or else that of the model's config.json.

    `shape`: the model's, from registry.py. Raises: ConfigError for a loss that cannot be computed.
    """
    wanted, coefficient, problem = config.training.router_aux_loss_coef, 0.0, ""
    if isinstance(shape, Qwen3MoeConfig):
        coefficient = shape.balance_coefficient if wanted is None else wanted
        loss = f"the load-balancing loss (factor {coefficient:g})"
        if coefficient and not any(map(shape.is_sparse, range(shape.num_layers))):
            problem = f"{loss} needs a sparse layer, and all are dense: set it to 0.0"
        elif coefficient and config.parallel.pipeline_parallel > 1:
            problem = (
                f"{loss} is one of all layers together, and with pipeline_parallel no rank has all of them: set it to "
                "0.0, or pipeline_parallel to 1"
            )
    elif wanted:
        problem = 'only model.name = "qwen3_moe" has this loss; leave it out'
    elif isinstance(shape, Mapping) and wanted is None:
        texts = [shape, shape.get("text_config") or {}]  # transformers would add the loss to that of the model
        asks = any(text.get("output_router_logits") and text.get("router_aux_loss_coef", 0.001) for text in texts)
        problem = asks * (
            'config.json asks for a load-balancing loss (output_router_logits), which model.name = "hf" does not '
            "compute: set it to 0.0 to train without that loss, or train a qwen3_moe under its own name"
        )
    if problem:
        raise ConfigError([f"{_SETTING}: {problem}"])
    return coefficient


class BalanceLoss:
    """The load-balancing loss of all sparse layers and all ranks, equal to transformers' load_balancing_loss_func.

    E * sum over the experts e of f_e * P_e: f_e is the share of the tokens that were routed to e, and P_e is the mean
    probability of e, both over the tokens of all layers and all ranks. Each rank adds to its own loss the part with its
    own tokens' probabilities, so that the sum of all ranks' gradients is the gradient of the whole.
    Source: arXiv 2101.03961, eq. 4; transformers, models/mixtral/modeling_mixtral.py.
    """

    def __init__(self, model_parts: Sequence[nn.Module], ranks: Ranks, coefficient: float) -> None:
        self._routers = [module for part in model_parts for module in part.modules() if isinstance(module, Router)]
        self._ranks = ranks
        self._coefficient = coefficient
        self._values: list[torch.Tensor] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the routers during the forward pass of one micro-batch."""
        for router in self._routers:
            router.is_watched = True
        try:
            yield
        finally:
            for router in self._routers:
                router.is_watched = False

    def share(self) -> torch.Tensor:
        """Return this rank's share of the loss of the micro-batch that was watched, times the factor. Collective."""
        counts, sums = [], []
        for router in self._routers:
            assert router.last is not None, "watching() precedes share()"
            tokens, probability = router.last
            router.last = None
            counts.append(tokens)
            sums.append(probability)
        local = torch.stack(sums).double().sum(dim=0)
        here = torch.stack([torch.stack(counts).sum(dim=0).double(), local.detach()])
        # tensor-parallel ranks have routed the same tokens
        tokens, probability = self._ranks.sum(here if self._ranks.place.tp == 0 else torch.zeros_like(here))
        rows = tokens.sum() / self._routers[0].experts_per_token
        factor = len(tokens) * tokens / rows.square()
        self._values.append((factor * probability).sum())
        share: torch.Tensor = self._coefficient * (factor * local).sum()
        return share

    def take_mean(self) -> float:
        """Return the mean of the loss over the micro-batches since the last call, without the factor."""
        mean = float(torch.stack(self._values).mean())
        self._values.clear()
        return mean
