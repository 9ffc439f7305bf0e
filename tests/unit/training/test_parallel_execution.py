"""How layers run, recomputed or compiled, changes neither the loss nor any name in a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import settings
from titan_ckpt.formats.open import open_reader
from titan_ckpt.training.callbacks.console import read_metrics
from titan_ckpt.training.trainer import Trainer


def train_with(folder: Path, table: dict[str, Any]) -> tuple[list[float], list[str]]:
    """Return the losses of three steps and the names of what was saved."""
    Trainer(settings(folder, parallel=table)).run()
    losses = [row["loss"] for row in read_metrics(folder / "run" / "metrics.jsonl")]
    with open_reader(folder / "run" / "checkpoints" / "step-3") as reader:
        return losses, sorted(reader.tensors)


@pytest.mark.filterwarnings("default")  # the compiler imports and reads what torch itself warns about
def test_losses_and_names_stay_the_same(tmp_path: Path) -> None:
    """Full and selective recomputation give the same bits, compiled layers the same losses to rounding."""
    losses, names = train_with(tmp_path / "plain", {})
    for mode in ("full", "selective"):
        assert train_with(tmp_path / mode, {"activation_checkpoint": mode}) == (losses, names)
    compiled, compiled_names = train_with(tmp_path / "compiled", {"compile": True})
    assert compiled == pytest.approx(losses, abs=1e-4)
    assert compiled_names == names
