"""The same optimizers over parameters that FSDP2 shards over two ranks: exact, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.interop.test_optimizer_content import EXACT
from tests.zoo.optimizer_runs import Case, judge
from tests.zoo.sample import chosen
from tests.zoo.test_optimizers import FLOORS, REFUSED, cases
from tests.zoo.worlds import Row, judged
from titan_ckpt.testing.ranks import distributed

__all__ = ["FLOORS"]


@distributed(nproc=2)
def test_optimizers_resume_exactly_on_two_ranks(tmp_path: Path) -> None:
    """Three steps after a resume give the bits of a run without a stop, and the same state; ZeRO is refused by name."""
    defaults = [case for case in sharded_cases() if "()" in case.name and not case.name.startswith(REFUSED)]
    few = [*chosen(defaults, 4), *(odd_case(kind) for kind in EXACT)]
    verdicts = {case.name: judge(case, tmp_path / case.name, fully_shard) for case in few}
    assert not {name: note for name, (verdict, note) in verdicts.items() if verdict not in ("exact", "unbuilt")}
    assert sum(verdict == "exact" for verdict, _ in verdicts.values()) > len(verdicts) // 2
    verdict, note = judge(Case("ZeRO-1", _zero, kind="plain"), tmp_path / "zero")
    assert verdict == "refused" and "ZeroRedundancyOptimizer" in note and "fully_shard" in note, note


def _zero(model: nn.Module) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch's own deprecations

    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)


def odd_case(kind: type[Any]) -> Case:
    """Return an optimizer that keeps more than tensors of its parameters' shapes."""
    return Case(kind.__name__, lambda model: kind(model.parameters()), kind="plain")


def sharded_cases() -> list[Case]:
    """Return the optimizers on parameters that FSDP2 can shard."""
    return [replace(case, kind="plain") for case in cases() if case.kind != "sparse"]


def rows() -> list[Row]:
    """Return the row of every optimizer that knows DTensors."""
    return judged(rows_of, [str(case) for case in sharded_cases()], ranks=2)


def rows_of(name: str, folder: Path) -> list[Row]:
    """Return the row of an optimizer; none if it does not work on shards."""
    (case,) = (case for case in sharded_cases() if str(case) == name)
    verdict, note = judge(case, folder, fully_shard)
    return [] if verdict == "unbuilt" else [(name, verdict, note)]
