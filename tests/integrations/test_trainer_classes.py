"""Every trainer, callback and argument of transformers, TRL and PEFT resumes exactly, or is refused by name."""

from __future__ import annotations

import inspect
import os
import random
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from tests.integrations import trainer_grid
from tests.integrations.loader_cases import Estimated
from tests.integrations.trainer_cases import (
    CASES,
    UNDIVIDED,
    Counting,
    Giving,
    Looking,
    Weighted,
    judge,
    plain,
    stream,
)
from tests.zoo.offered import below
from titan_ckpt import CheckpointConfig, ExportConfig, SaveConfig
from titan_ckpt.components.classes import class_name
from titan_ckpt.directory.manifest import Manifest
from titan_ckpt.errors import ConfigError, LoadMismatchError, SaveError
from titan_ckpt.integrations.transformers import attach
from titan_ckpt.integrations.transformers.known import ARGUMENTS, CALLBACKS, GIVEN, REFUSED_ARGUMENTS, TRAINERS

ALL = bool(os.environ.get("TITAN_CKPT_SOAK"))
NAMES = [name for number, name in enumerate(CASES) if ALL or not name.startswith("argument") or number % 4 == 0]
CONFIG = CheckpointConfig(save=SaveConfig(interval=3))


@pytest.mark.parametrize(("root", "known"), [(Trainer, TRAINERS), (TrainerCallback, CALLBACKS)])
def test_every_class_of_the_installed_libraries_is_listed(root: type[Any], known: dict[str, str]) -> None:
    """One that a newer version adds is refused until it is listed."""
    found = {name for name in below(root, ("transformers", "trl", "peft")) if "CallbackHandler" not in name}
    assert found - known.keys() == set()


def test_every_argument_of_the_installed_trainer_is_listed() -> None:
    """Those of TrainingArguments, and those of the Trainer itself."""
    assert {field.name for field in fields(TrainingArguments)} <= ARGUMENTS | REFUSED_ARGUMENTS.keys()
    assert inspect.signature(Trainer).parameters.keys() <= GIVEN


def test_what_is_listed_as_exact_has_a_run() -> None:
    """But for callbacks that report to a service, and classes from which others are derived."""
    proved = {name.partition(" ")[2] for name in CASES}
    services = ("integrations.integration_utils", "notebook", "Weave", "RichProgress")
    without = {name for name, reason in (TRAINERS | CALLBACKS).items() if not reason and name not in proved}
    bases = {"_BaseTrainer", "TrainerCallback", "DefaultFlowCallback"}
    assert {n for n in without if n.rpartition(".")[2] not in bases and not any(s in n for s in services)} == set()


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_run_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Weights, log, and what callbacks keep beside the model."""
    assert judge(name, tmp_path) == [(name, "exact", "")]


@pytest.mark.parametrize("number", range(60 if ALL else 6))
def test_a_drawn_run_reads_the_samples_of_a_whole_one(number: int, tmp_path: Path) -> None:
    """With steps or epochs as the limit, within an epoch and at its end, on one rank and on two."""
    assert trainer_grid.judge(str(number), tmp_path) == [(str(trainer_grid.drawn(number)), "exact", "")]


class Storing(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.newest = loss
        return loss


class Exporting(Trainer):
    """Stores more than its base does, in a method that an attached trainer has no use for."""

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)


def summing() -> Any:
    """Return functions that keep what they have seen: in a variable around them, and in an attribute."""
    seen = 0

    def around(out: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        nonlocal seen
        seen += 1
        return seen * out.logits.sum()

    def attribute(predictions: Any) -> dict[str, float]:
        attribute.best = 1.0  # type: ignore[attr-defined]  # it is one of the function
        return {}

    return around, attribute


def drawing(out: Any, labels: Any, num_items_in_batch: Any = None, draw: Any = None) -> Any:
    return draw.random() * out.logits.sum()


class Mixed(PrinterCallback, JITCheckpointCallback):
    """Extends a class that is refused, behind one that is exact."""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"callbacks": [Counting]}, "callback .*Counting: its code sets self.counted, and no step holds it"),
        ({"callbacks": [Mixed]}, "Mixed: it writes checkpoints of its own: leave it out"),
        (
            {"kind": Exporting},
            r"trainer .*Exporting: titan_ckpt makes the steps, and never calls its _save_checkpoint(?s:.*)allow = \[",
        ),
        ({"kind": Storing}, "trainer .*Storing: its code sets self.newest"),
        (
            {"compute_loss_func": partial(summing()[0])},
            r"compute_loss_func .*around: its code sets seen, which is outside of it(?s:.*)allow = \[\".*around\"\]",
        ),
        (
            {"compute_loss_func": partial(drawing, draw=random.Random(1))},
            "drawing: it draws from a Random that it is given",
        ),
        ({"compute_metrics": summing()[1]}, r"compute_metrics .*: its code sets attribute\.best"),
        ({"ignore_data_skip": True}, "ignore_data_skip is True: a resumed run would read batches again: leave it out"),
    ],
)
def test_what_is_not_known_is_refused_by_name(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        attach(plain(tmp_path, **settings), CONFIG)


class Appending(TrainerCallback):
    """Keeps what it has seen in a list."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_step_end(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        if state.global_step > 3:
            self.seen.append(state.global_step)


def appending() -> Any:
    """Return a function that keeps what it has seen in a list around it."""
    seen: list[Any] = []

    def loss(out: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        seen.append(labels)
        return out.logits.sum()

    return loss


@pytest.mark.parametrize(
    ("settings", "step", "message"),
    [
        ({"callbacks": [Appending]}, 6, "callback .*Appending: self.seen changed"),
        ({"compute_loss_func": appending()}, 1, "compute_loss_func .*loss: the variable seen changed"),
    ],
)
def test_data_that_changes_is_refused_at_the_save_that_sees_it(
    settings: dict[str, Any], step: int, message: str, tmp_path: Path
) -> None:
    """The first step is looked at, too. Steps before it are saved, the stop saves none after it; it can be allowed."""
    attach(trainer := plain(tmp_path, **settings), CONFIG)
    with pytest.raises(SaveError, match=f"step {step} is not saved: {message}") as refused:
        trainer.train()
    saved = {path.name for path in (tmp_path / "checkpoints").glob("step-*")}
    assert saved == {f"step-{number}" for number in range(3, step, 3)}
    name = str(refused.value).rpartition('["')[2].partition('"]')[0]
    attach(
        trainer := plain(tmp_path / "allowed", **settings), CheckpointConfig(save=SaveConfig(interval=3), allow=(name,))
    )
    trainer.train()


class Remembering(TrainerCallback):
    """Copies the weights when the training begins."""

    def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.first = [value.detach().clone() for value in model.parameters()]


def test_a_copy_of_weights_that_every_start_makes_is_refused_before_the_first_step(tmp_path: Path) -> None:
    attach(trainer := plain(tmp_path, callbacks=[Remembering]), CONFIG)
    with pytest.raises(
        ConfigError, match=r"Remembering: every start sets self\.first, a Tensor, anew in on_train_begin"
    ):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_callback_that_is_added_later_is_judged_when_the_training_begins(tmp_path: Path) -> None:
    """A trainer of the user's own is not refused for what attach has added to it."""
    trainer = plain(tmp_path, kind=Weighted)
    attach(trainer, CONFIG)
    trainer.add_callback(Counting())
    with pytest.raises(ConfigError, match=r"Counting: its code sets self\.counted") as refused:
        trainer.train()
    assert "Weighted" not in str(refused.value)


def test_what_is_allowed_runs_and_every_step_records_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = class_name(Counting())
    trainer = plain(tmp_path, callbacks=[Counting])
    attach(trainer, CheckpointConfig(save=SaveConfig(interval=3), allow=(name,)))
    trainer.train()
    assert "checkpoint.allow lets it run" in caplog.text
    for step in (3, 6, 7):
        data = (tmp_path / f"checkpoints/step-{step}/MANIFEST.json").read_bytes()
        assert Manifest.from_bytes(data).allowed == (name,)


def test_a_callback_that_is_added_moves_no_state_of_another(tmp_path: Path) -> None:
    """A restart may report to one more service."""
    for steps, callbacks in ((7, [Giving]), (9, [PrinterCallback, Giving])):
        trainer: Any = plain(tmp_path, callbacks=callbacks)
        trainer.args.max_steps = steps
        attach(trainer, CONFIG)
        trainer.train()
        assert next(c for c in trainer.callback_handler.callbacks if isinstance(c, Giving)).counted == steps


def test_a_callback_that_is_added_later_leaves_a_trainer_of_ones_own_alone(tmp_path: Path) -> None:
    trainer = plain(tmp_path, kind=Weighted)
    attach(trainer, CONFIG)
    trainer.add_callback(PrinterCallback)
    trainer.train()


class Short(TrainerCallback):
    """Leaves the rest of each epoch out."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        control.should_epoch_stop = state.global_step % 2 == 0


class StopAtEpochEnd(TrainerCallback):
    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        control.should_training_stop = True


@pytest.mark.parametrize(
    ("make", "last"),
    [
        (partial(plain, callbacks=[Short]), 4),
        (partial(UNDIVIDED, data=partial(stream, 6), callbacks=[StopAtEpochEnd], gradient_accumulation_steps=1), 3),
    ],
)
def test_a_run_whose_epochs_end_early_saves_its_last_step(make: Any, last: int, tmp_path: Path) -> None:
    """With its exports; started again, it takes no step."""
    for _ in range(2):
        trainer = make(tmp_path)
        attach(trainer, CheckpointConfig(save=SaveConfig(interval=100), export=(ExportConfig("hf"),)))
        trainer.train()
        assert trainer.state.global_step == last
        assert [path.name for path in tmp_path.glob("*/step-*")] == [f"step-{last}"] * 2


class Resampled(Trainer):
    """Reads by torchdata's sampler."""

    batches = BatchSampler

    def get_train_dataloader(self) -> Any:
        data: Any = self.train_dataset
        batches = self.batches(StatefulDistributedSampler(data, 1, 0), 2, drop_last=False)
        return self.accelerator.prepare(DataLoader(data, batch_sampler=batches, collate_fn=self.data_collator))


class Shortened(Resampled):
    """Ends each epoch at a length that is too small."""

    batches = Estimated


@pytest.mark.parametrize(("kind", "callbacks"), [(Resampled, [Short]), (Shortened, [])])
def test_an_epoch_that_ends_early_is_refused_if_no_step_says_where_the_next_one_begins(
    kind: type[Trainer], callbacks: list[type[TrainerCallback]], tmp_path: Path
) -> None:
    trainer = plain(tmp_path, kind=kind, callbacks=callbacks)
    attach(trainer, CONFIG)
    with pytest.raises(ConfigError, match="StatefulDistributedSampler does not say where an epoch begins"):
        trainer.train()


def test_steps_of_other_batches_are_refused(tmp_path: Path) -> None:
    """A run that accumulates more batches, or shares them among more ranks, would leave gradients out of a save."""
    refused = pytest.raises(LoadMismatchError, match="ended after 6 batches of its epoch, and steps of 4 batches")
    cases: Any = ((3, 2, nullcontext()), (5, 4, refused))
    for steps, accumulated, expected in cases:
        trainer: Any = plain(tmp_path, gradient_accumulation_steps=accumulated)
        trainer.args.max_steps = steps
        attach(trainer, CONFIG)
        with expected:
            trainer.train()


class StopAt4(TrainerCallback):
    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        control.should_training_stop = state.global_step == 4


def test_a_run_that_a_callback_has_ended_does_not_train_on(tmp_path: Path) -> None:
    """Started again, it takes no step, and its weights are those it ended with."""
    weights = []
    for _ in range(2):
        trainer: Any = plain(tmp_path, callbacks=[StopAt4])
        attach(trainer, CONFIG)
        trainer.train()
        assert trainer.state.global_step == 4
        weights.append([value.clone() for value in trainer.model.parameters()])
    assert all(map(torch.equal, *weights))


def test_a_callback_that_would_move_the_position_of_a_stream_is_refused(tmp_path: Path) -> None:
    """A resumed run would go on elsewhere."""
    trainer = UNDIVIDED(tmp_path, data=partial(stream, 18), callbacks=[Looking])
    attach(trainer, CONFIG)
    with pytest.raises(ConfigError, match=r"a stream has one position.*let it read from a loader over a"):
        trainer.train()


def test_a_stream_that_rank_0_reads_for_all_is_refused_with_the_setting_that_works(tmp_path: Path) -> None:
    trainer = plain(tmp_path, data=partial(stream, 18))
    attach(trainer, CONFIG)
    with pytest.raises(ConfigError, match=r"set accelerator_config={\"dispatch_batches\": False}"):
        trainer.train()
