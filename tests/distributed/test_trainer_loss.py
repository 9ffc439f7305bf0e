"""D3: the loss of a step and its gradient are those of its tokens, however these are dealt out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiny_run import Gradients, losses, rows, settings
from tests.world import on_ranks
from titan_ckpt.testing import distributed
from titan_ckpt.training.callbacks import Callback
from titan_ckpt.training.data.batch import IGNORED, Batch, collate
from titan_ckpt.training.trainer import Trainer

GLOBAL_BATCH = 16
"""Sequences of one optimizer step, whatever the layout."""


class UnevenLabels(Trainer):
    """Ignores a different number of labels in every sequence, nearly all of some."""

    def build_collate(self) -> Any:
        def uneven(samples: Any) -> Batch:
            batch = collate(samples)
            batch["labels"] = batch["labels"].clone()
            for row, labels in enumerate(batch["labels"]):
                labels[: int(batch["tokens"][row, 0]) % 16] = IGNORED
            return batch

        return uneven


def train(root: Path, size: int) -> None:
    """Take two steps with every accumulation, and leave the first one's gradient in gradients.pt."""
    for accumulation in (1, 2, 4):
        gradients, folder = Gradients(), root / f"{size}x{accumulation}"
        batch_size = GLOBAL_BATCH // (size * accumulation)
        training = {"steps": 2, "batch_size": batch_size, "accumulation": accumulation}
        config = settings(folder, training=training, checkpoint={"save": {"interval": 5}})
        UnevenLabels(config, callbacks=[gradients]).run()
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save(gradients.found[0], folder / "gradients.pt")


def test_d3_loss_and_gradient_do_not_change_with_ranks_or_accumulation(tmp_path: Path) -> None:
    """On 1, 2 and 4 ranks with 1, 2 and 4 micro-batches both steps have one loss and norm, and the first one gradient.

    The loss is the mean over all predicted tokens of all ranks, the norm that of the whole gradient.
    """
    for size in (1, 2, 4):
        on_ranks(size, train, tmp_path, size)
    expected_loss = losses(tmp_path / "1x1")
    norms = [row["grad_norm"] for row in rows(tmp_path / "1x1")]
    expected = torch.load(tmp_path / "1x1" / "gradients.pt")
    largest = max(float(grad.abs().max()) for grad in expected.values())
    for size in (1, 2, 4):
        for accumulation in (1, 2, 4):
            name = f"{size}x{accumulation}"
            assert losses(tmp_path / name) == pytest.approx(expected_loss, abs=2e-5), name
            assert [row["grad_norm"] for row in rows(tmp_path / name)] == pytest.approx(norms, rel=1e-4), name
            found = torch.load(tmp_path / name / "gradients.pt")
            for fqn, grad in expected.items():
                torch.testing.assert_close(found[fqn], grad, rtol=0, atol=1e-6 * largest, msg=f"{name} {fqn}")


class Reductions(TorchDispatchMode):
    """Counts the collectives that add up gradients."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "c10d" in str(func) and "reduce" in str(func)
        return func(*args, **(kwargs or {}))


class PerMicroBatch(Callback):
    """Writes down how many reductions there were by the end of each micro-batch of a step."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.last: list[bool] = []
        """Whether FSDP2 was told that the backward pass is the last one of the step."""
        self._mode = Reductions()

    def on_substep_begin(self, trainer: Trainer, index: int) -> None:
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def on_substep_end(self, trainer: Trainer, index: int) -> None:
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.counts.append(self._mode.count)
        self.last.append(trainer.model._get_fsdp_state()._state_ctx.is_last_backward)  # type: ignore[operator]


@distributed(nproc=2)
def test_d3_gradients_are_exchanged_after_the_last_micro_batch_only(tmp_path: Path) -> None:
    """The first two of three micro-batches reduce nothing; the last reduces once for every FSDP2 group."""
    reductions = PerMicroBatch()
    config = settings(
        tmp_path, training={"steps": 1, "batch_size": 2, "accumulation": 3}, checkpoint={"save": {"interval": 5}}
    )
    trainer = Trainer(config, callbacks=[reductions])
    trainer.run()
    groups = len(list(trainer.model.layers.children())) + 1
    assert reductions.counts == [0, 0, groups]
    assert reductions.last == [False, False, True]
