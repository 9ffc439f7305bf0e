"""Loops over what accelerate has prepared: killed and resumed runs equal those that nothing interrupted."""

from __future__ import annotations

import os
import signal
from dataclasses import fields
from pathlib import Path

import accelerate.utils.dataclasses as of_accelerate
import pytest
import torch
from accelerate.utils import DataLoaderConfiguration, KwargsHandler

from tests.integrations.accelerate_draws import drawn, verdict
from tests.integrations.accelerate_runs import CASES, OF_FSDP2
from tests.integrations.phases import Phase, play, play_together
from tests.zoo.offered import below
from titan_ckpt.integrations.accelerate.known import HANDLERS

MODULE = "tests.integrations.accelerate_runs"
ALL = bool(os.environ.get("TITAN_CKPT_SOAK"))
WITHIN, AT_END = {1: (2, 5), 2: (2, 5), 4: (2, 5)}, {1: (5, 6), 2: (3, 4), 4: (2, 3)}
"""Number of ranks -> interval of saves, and the step that the resumed run does not have; an epoch has 5, 3 or 2."""
KILLED = [
    ("shuffled", 1), ("use_stateful_dataloader", 2), ("dispatch_batches=False, a stream", 2),
    ("FSDP2, bf16, a stream", 2),
]  # fmt: skip
ALWAYS = [("shuffled", 2), ("dispatch_batches=False, a shuffled stream", 2), ("GradScaler", 2)]
RUNS = [
    (name, ranks, *at[ranks])
    for number, name in enumerate(CASES)
    for ranks in CASES[name].ranks
    for at in (WITHIN, AT_END)
    if ALL
    or (ranks + number + (at is WITHIN)) % 4 == 0
    or (at is WITHIN and (name in OF_FSDP2 or (name, ranks) in ALWAYS))
    if ALL or (name, ranks) not in KILLED
]
"""Runs that go on from a copy; a run of KILLED goes on from a step within an epoch after a real kill."""

DRAWN = range(12)


def assert_same(root: Path, case: str, ranks: int, *_: int) -> None:
    """Compare weights, losses, samples and rates of each step, and the random numbers that come next."""
    for rank in range(ranks):
        found, whole = (torch.load(root / part / f"result-{rank}.pt") for part in ("resumed", "whole"))
        assert min(found["read"]) > 1, case
        assert found["read"] == {step: read for step, read in whole["read"].items() if step in found["read"]}, case
        assert found["rates"] == {step: rate for step, rate in whole["rates"].items() if step in found["rates"]}, case
        assert (found["random"], found["scaler"]) == (whole["random"], whole["scaler"]), case
        assert found["weights"].keys() == whole["weights"].keys(), case
        assert all(torch.equal(value, whole["weights"][name]) for name, value in found["weights"].items()), case
        assert found["num_read"] <= 0.8 * whole["num_read"], case


@pytest.mark.parametrize("ranks", sorted({ranks for _, ranks in KILLED}))
def test_killed_loops_go_on_bit_for_bit(ranks: int, tmp_path: Path) -> None:
    """SIGKILL, and a new process, which then plays the next case."""
    interval, stop = 2, 5
    names = [name for name, of_ranks in KILLED if of_ranks == ranks]
    phases = [
        Phase("run_killed", str(tmp_path / name / part), ranks, (interval, at, name))
        for name in names
        for part, at in (("whole", None), ("resumed", stop), ("resumed", None))
    ]
    codes = play_together(MODULE, phases)
    for name, (whole, killed, resumed) in zip(names, zip(*[iter(codes)] * 3, strict=True), strict=True):
        assert whole == resumed == [0] * ranks, name
        assert -signal.SIGKILL in killed and 0 not in killed, name
        assert_same(tmp_path / name, name, ranks)


@pytest.mark.parametrize("ranks", sorted({run[1] for run in RUNS}))
def test_each_setting_goes_on_bit_for_bit(ranks: int, tmp_path: Path) -> None:
    """From a copy of what a kill leaves behind, within an epoch and at its end."""
    runs = [run for run in RUNS if run[1] == ranks]
    for part in ("whole", "resumed"):
        phases = [
            Phase("run", str(tmp_path / str(number) / part), ranks, (interval, stop if part == "whole" else None, name))
            for number, (name, _, interval, stop) in enumerate(runs)
        ]
        codes = play_together(MODULE, phases)
        assert [(run, ended) for run, ended in zip(runs, codes, strict=True) if any(ended)] == []
    for number, run in enumerate(runs):
        assert_same(tmp_path / str(number), *run)


@pytest.mark.parametrize("ranks", [1, 2])
def test_settings_that_a_seed_has_drawn_go_on_bit_for_bit_or_are_refused(ranks: int, tmp_path: Path) -> None:
    """Together, with data that batches do not divide. A loop that leaves an epoch is told what a resume reads first."""
    cases = [drawn(number) for number in (range(500) if ALL else DRAWN)]
    phases = [Phase("run_drawn", str(tmp_path), ranks, (cases, is_whole)) for is_whole in (True, False)]
    assert play("tests.integrations.accelerate_draws", phases) == [[0] * ranks] * 2
    verdicts = [verdict(tmp_path, number, rank) for number in range(len(cases)) for rank in range(ranks)]
    assert not [verdict for verdict in verdicts if verdict.startswith(("different", "resumed", "SaveError"))]
    assert verdicts.count("exact") >= len(verdicts) / 3
    assert any(verdict.startswith("refused") for verdict in verdicts)


@pytest.mark.parametrize(
    ("function", "ranks"),
    [
        ("run_refused", 1),
        ("run_beside", 1),
        ("run_beside_stateful", 1),
        ("run_left", 1),
        ("run_evaluated", 1),
        ("run_unheld", 1),
        ("run_skipped", 1),
        ("run_compressed", 2),
        ("run_summed", 3),
    ],
)
def test_what_a_function_of_accelerate_runs_sees_itself(function: str, ranks: int, tmp_path: Path) -> None:
    """Settings are refused by name; what is registered goes on, and so does a loader that evaluates."""
    assert play(MODULE, [Phase(function, str(tmp_path), ranks)]) == [[0] * ranks]


def test_every_setting_of_the_installed_accelerate_has_a_run_or_a_reason() -> None:
    """One that a newer version adds is noticed: fields of loaders, and classes that adjust an Accelerator."""
    runs = " ".join(CASES)
    assert [field.name for field in fields(DataLoaderConfiguration) if field.name not in runs] == []
    assert {name.rpartition(".")[2] for name in below(KwargsHandler, ["accelerate"])} == HANDLERS.keys()
    assert [name for name, why in HANDLERS.items() if not why and name not in runs] == []
    plugins = {name for name in vars(of_accelerate) if name.endswith("Plugin")}
    judged = {"DeepSpeedPlugin", "FullyShardedDataParallelPlugin", "MegatronLMPlugin", "TorchTensorParallelPlugin"}
    assert plugins == judged | {"GradientAccumulationPlugin", "TorchDynamoPlugin"}
