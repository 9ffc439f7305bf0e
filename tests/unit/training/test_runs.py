"""D9: how long a run is, what a step averages, how it computes, and who is told; each exact over a kill."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.tiny_run import Recorder, losses, rows, settings
from titan_ckpt.config import from_dict
from titan_ckpt.errors import ConfigError
from titan_ckpt.models import llama3
from titan_ckpt.models.language_model import LanguageModel
from titan_ckpt.models.registry import Architecture
from titan_ckpt.training.callbacks import Callback, StepMetrics
from titan_ckpt.training.config import RunConfig
from titan_ckpt.training.data.batch import IGNORED, Batch, collate
from titan_ckpt.training.data.sequences import PackedDataset
from titan_ckpt.training.parallel.apply import parallelize
from titan_ckpt.training.parallel.data_parallel import clip_gradients
from titan_ckpt.training.parallel.ranks import Ranks, find_backends
from titan_ckpt.training.schedule import ScheduleConfig
from titan_ckpt.training.trainer import Trainer

SEQUENCES, LENGTH = 10, 8
CONSTANT = {"kind": "constant", "warmup_ratio": 0.0}


class Tiny(Trainer):
    """Trains on ten sequences, each of its own tokens, and notes those that it takes in each step."""

    def build_assets(self) -> None:
        return

    def build_dataset(self) -> PackedDataset:
        tokens = torch.arange(SEQUENCES * LENGTH + 1)
        rank, num_ranks = self.ranks.data_rank, self.ranks.data_size
        return PackedDataset(tokens, LENGTH, self.config.seed, rank=rank, num_ranks=num_ranks)

    def accumulate_gradients(self, micro_batches: Sequence[Batch], divisor: Any) -> torch.Tensor:
        counted = [row[0] // LENGTH for batch in micro_batches for row, labels in pairs(batch) if IGNORED not in labels]
        self.taken: list[list[int]] = [*getattr(self, "taken", []), counted]
        return super().accumulate_gradients(micro_batches, divisor)


def pairs(batch: Batch) -> list[tuple[list[int], list[int]]]:
    return [*zip(batch["tokens"].tolist(), batch["labels"].tolist(), strict=True)]


def epochs(folder: Path, num: int | None = 3, **training: Any) -> RunConfig:
    table = {"steps": None, "epochs": num, "batch_size": 2, "accumulation": 2, **training}
    data = {"sequence_length": LENGTH}
    return settings(folder, data=data, training=table, schedule={"kind": "linear", "min_ratio": 0.0})


def test_d9_a_run_ends_with_its_last_epoch_and_takes_every_sequence_once_in_each(tmp_path: Path) -> None:
    """Ten sequences by four: three epochs take eight steps, the last of them with two sequences; then all is done."""
    recorder = Recorder()
    trainer = Tiny(epochs(tmp_path), callbacks=[recorder])
    assert trainer.run().step == trainer.num_steps == 8
    assert [len(step) for step in trainer.taken] == [4] * 7 + [2]
    order = [number for step in trainer.taken for number in step]
    for first in range(0, 30, 10):
        assert sorted(order[first : first + 10]) == [*range(10)], "an epoch has each sequence once"
    assert [e for e in recorder.events if e.startswith("epoch")] == [
        "epoch_begin 0", "epoch_end 0", "epoch_begin 1", "epoch_end 1", "epoch_begin 2", "epoch_end 2"
    ]  # fmt: skip
    assert rows(tmp_path)[-1]["num_tokens"] == 2 * LENGTH and trainer.state.num_tokens == 30 * LENGTH
    assert rows(tmp_path)[-1]["lr"] == pytest.approx(3e-3 / 7), "the schedule falls to the end of the last epoch"
    assert Tiny(epochs(tmp_path)).run().step == 8, "a finished run trains no further"
    assert len(rows(tmp_path)) == 8


def test_the_end_of_a_run_says_what_is_left_of_it_and_where(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The newest step and the newest exports, also where there was nothing left to train, and after a stop."""

    class Stop(Callback):
        def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
            trainer.guard._board.post("stop", "a test")

    caplog.set_level(logging.INFO, logger="titan_ckpt")
    exports = [{"format": "hf"}, {"format": "dcp", "folder": "dcp", "interval": 1}]
    config = settings(tmp_path, training={"steps": 2}, checkpoint={"save": {"interval": 1}, "export": exports})
    run = tmp_path / "run"
    left = [
        "ended   after step 2 of 2", f"saved   {run}/checkpoints/step-2",
        f"export  {run}/exports/step-2, for transformers", f"export  {run}/dcp/step-2, for DCP",
    ]  # fmt: skip
    for _ in range(2):
        caplog.clear()
        Trainer(config).run()
        assert sorted(caplog.messages[-4:]) == sorted(left)
    caplog.clear()
    stopped = replace(config, output_folder=str(tmp_path / "stopped"), training=replace(config.training, steps=500))
    Trainer(stopped, callbacks=[Stop()]).run()
    *_, ended, saved, export, told = caplog.messages
    step = int(saved.rpartition("-")[2])
    assert ended == f"ended   after step {step} of 500"
    assert saved == f"saved   {tmp_path}/stopped/checkpoints/step-{step}"
    assert export.startswith(f"export  {tmp_path}/stopped/dcp/step-")
    assert told.startswith(f"stopped at step {step} of 500, all saved")
    assert "steps   of AdamW, gradients are not clipped (training.max_grad_norm)" in caplog.messages
    caplog.clear()
    bare = {"steps": 1, "max_grad_norm": 1.0}
    Trainer(settings(tmp_path / "bare", training=bare, checkpoint={"save": None})).run()
    assert "steps   of AdamW, gradients clipped to 1" in caplog.messages
    assert any(line.startswith("model   llama3") and line.endswith(", built on meta") for line in caplog.messages)
    assert caplog.messages[-2:] == ["ended   after step 1 of 1", "saved   nothing"]


def test_d9_steps_or_epochs_end_a_run_whichever_comes_first(tmp_path: Path) -> None:
    """Five steps are before the end of three epochs, twenty are after it."""
    assert Tiny(epochs(tmp_path / "five", steps=5)).run().step == 5
    assert Tiny(epochs(tmp_path / "twenty", steps=20)).run().step == 8
    assert Tiny(epochs(tmp_path / "two", num=None, steps=2)).run().step == 2
    assert Trainer(settings(tmp_path, training={"steps": None})).num_steps == 1000


def test_d9_more_epochs_go_on_with_the_next_sequence(tmp_path: Path) -> None:
    """A second epoch begins where the first has ended, inside a step; another batch size ends it in time."""
    first = Tiny(epochs(tmp_path, 1))
    first.run()
    second = Tiny(epochs(tmp_path, 2, accumulation=1))
    assert second.run().step == 3 + 5
    assert [len(step) for step in second.taken] == [2] * 5
    for trainer in (first, second):
        assert sorted(number for step in trainer.taken for number in step) == [*range(10)]


def test_c5_a_numbered_decay_of_a_run_by_epochs_is_judged_by_what_is_left(tmp_path: Path) -> None:
    """Larger steps end the epoch at step 5, after the decay, although a run of them alone would end before it."""
    Tiny(replace(epochs(tmp_path, 1, accumulation=1, steps=4), schedule=from_dict(ScheduleConfig, CONSTANT))).run()
    decay = {"kind": "wsd", "warmup_ratio": 0.0, "start_decay": 4, "decay": 1}
    config = replace(epochs(tmp_path, 1), schedule=from_dict(ScheduleConfig, decay))
    resumed = Tiny(config)
    assert resumed.run().step == resumed.num_steps == 5
    assert [row["lr"] for row in rows(tmp_path)] == [3e-3] * 5, "the last step is the first of the decay"
    with pytest.raises(ConfigError, match=r"after step 4 takes 1 step and training has -1; train more epochs"):
        Tiny(replace(config, output_folder=str(tmp_path / "afresh"))).run()


def test_d9_accumulation_follows_from_the_global_batch(tmp_path: Path) -> None:
    """Twelve sequences are three batches of four, and the run that of accumulation = 3."""
    trainer = Trainer(settings(tmp_path / "whole", training={"global_batch_size": 12, "steps": 2}))
    trainer.run()
    assert trainer.accumulation == 3
    Trainer(settings(tmp_path / "parts", training={"accumulation": 3, "steps": 2})).run()
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    assert rows(tmp_path / "whole")[0]["num_tokens"] == 12 * 16


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"training": {"global_batch_size": 12, "batch_size": 8}}, r"12 is no multiple of training\.batch_size 8"),
        ({"training": {"global_batch_size": 8, "accumulation": 2}}, r"accumulation: it follows from global_batch_size"),
        ({"training": {"epochs": 1}, "data": {"streaming": True}}, r"training\.epochs: a stream's length is not known"),
        ({"training": {"epochs": 1}, "data": {"corpus": "dummy"}}, r"training\.epochs: random tokens have no end"),
        ({"training": {"deterministic": "warm"}}, r'deterministic: expected true or false or one of "warn"'),
        ({"training": {"check_gradients": "log", "max_grad_norm": 1.0}}, r"check_gradients: .*leave one of them out"),
        ({"training": {"loss_average": "sequence"}}, r'loss_average: expected one of "token", "rank"'),
        ({"optimizer": {"implementation": "fast"}}, r'implementation: expected one of "fused", "foreach", "for-loop"'),
        ({"parallel": {"reshard_after_forward": "no"}}, r'expected one of "default", "always", "never"'),
    ],
)
def test_d9_settings_that_do_not_fit_are_refused_where_they_are_read(sections: Any, expected: str) -> None:
    """By name, with what is expected."""
    raw = {"output_folder": "run", "model": {"flavor": "debug-0.5m"}, **sections}
    with pytest.raises(ConfigError, match=expected):
        from_dict(RunConfig, raw)


class Endless(torch.utils.data.IterableDataset[Batch]):
    """Data of one's own, without a length."""

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield {"tokens": torch.zeros(16, dtype=torch.int64), "labels": torch.zeros(16, dtype=torch.int64)}


def test_d9_the_backend_is_that_of_the_device_beside_gloo() -> None:
    """Tensors in host memory go by gloo on CUDA; another backend than that of a group that is there is refused."""
    assert (find_backends("cpu", None), find_backends("cpu", "gloo")) == ("gloo", "gloo")
    assert (find_backends("cuda", None), find_backends("cuda", "Gloo")) == ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo")


def test_d9_data_that_says_what_it_does_not_do_is_told_what_to_set(tmp_path: Path) -> None:
    """A sequence without some labels, in data that has declared that every label counts."""

    class Masked(PackedDataset):
        def sequence(self, number: int) -> Batch:
            sample = super().sequence(number)
            return sample | {"labels": sample["labels"].masked_fill(torch.arange(LENGTH) == 0, IGNORED)}

    class OnMasked(Tiny):
        def build_dataset(self) -> PackedDataset:
            return Masked(torch.arange(SEQUENCES * LENGTH + 1), LENGTH, self.config.seed)

    with pytest.raises(RuntimeError, match=r"4 labels of a step are -100.*set it to False in the class"):
        OnMasked(epochs(tmp_path)).run()


def test_d9_a_step_that_learns_nothing_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such as one whose conversations were all dropped; it has a loss of zero, and is no error."""

    class Silent(Tiny):
        def build_collate(self) -> Any:
            return lambda samples: {**(batch := collate(samples)), "labels": batch["labels"] * 0 + IGNORED}

    Silent(epochs(tmp_path, None, steps=1)).run()
    assert "step 1 learns nothing: no label of its 4 sequences counts" in caplog.text
    assert losses(tmp_path) == [0.0]


class Scattering(Trainer):
    """Calls an operation that has no deterministic implementation."""

    def compute_loss(self, batch: Batch) -> torch.Tensor:
        torch.zeros(2).put_(torch.tensor([0]), torch.tensor([1.0]))
        return super().compute_loss(batch)


def test_d9_operations_without_a_deterministic_form_are_refused_or_warned_of(tmp_path: Path) -> None:
    """As training.deterministic says; afterwards the process is as it was."""
    before = dict(os.environ)
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        Scattering(settings(tmp_path / "true", training={"deterministic": True})).run()
    with pytest.warns(UserWarning, match="put_ does not have a deterministic implementation"):
        assert Scattering(settings(tmp_path / "warn", training={"deterministic": "warn"})).run().step == 3
    assert not torch.are_deterministic_algorithms_enabled()
    assert dict(os.environ) == before, "cuBLAS takes its workspace from there"


def test_d9_what_the_last_bits_depend_on_is_recorded_and_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the step and in the run's record; a resume that computes otherwise says what differs."""
    Trainer(settings(tmp_path, training={"deterministic": True})).run()
    run = json.loads((tmp_path / "run" / "checkpoints" / "step-3" / "state.json").read_text())
    record = [json.loads(line) for line in (tmp_path / "run" / "telemetry.jsonl").read_text().splitlines()]
    (start,) = [event for event in record if event["event"] == "start"]
    numerics = start["config"]["numerics"]
    assert numerics["deterministic algorithms"] is True and numerics["threads"] == torch.get_num_threads()
    assert json.dumps(numerics["torch"]) in json.dumps(run)
    with caplog.at_level(logging.WARNING):
        Trainer(settings(tmp_path, training={"steps": 4}, optimizer={"implementation": "foreach"})).run()
    (line,) = [message for message in caplog.messages if "last bits" in message]
    assert line.endswith("deterministic algorithms from True to False, optimizer from as torch does to foreach")


@pytest.mark.parametrize(
    ("implementation", "flags"), [("fused", (None, True)), ("foreach", (True, None)), ("for-loop", (False, False))]
)
def test_d9_the_implementation_of_the_optimizer_is_the_one_that_is_named(
    tmp_path: Path, implementation: str, flags: Any
) -> None:
    """Each goes on exactly, as tests/unit/components/test_optimizer.py and the zoo show."""
    trainer = Trainer(settings(tmp_path, training={"steps": 1}, optimizer={"implementation": implementation}))
    trainer.run()
    assert all((group["foreach"], group["fused"]) == flags for group in trainer.optimizer.param_groups)


def test_d9_the_log_history_is_that_of_the_whole_run(tmp_path: Path) -> None:
    """A resumed run has the rows of the steps before it."""
    Trainer(settings(tmp_path, training={"steps": 2})).run()
    trainer = Trainer(settings(tmp_path, training={"steps": 4}))
    trainer.run()
    assert [row["step"] for row in trainer.log_history] == [1, 2, 3, 4]
    assert [*trainer.log_history] == rows(tmp_path)


class Late(Callback):
    """Adds another callback when the second step ends."""

    def __init__(self, other: Callback) -> None:
        self.other = other

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        if metrics.step == 2:
            trainer.add_callback(self.other)


def test_d9_callbacks_are_added_to_a_trainer_that_is_there(tmp_path: Path) -> None:
    """Before the run, and from inside it; what is no callback is refused."""
    early, late = Recorder(), Recorder()
    trainer = Trainer(settings(tmp_path))
    trainer.add_callback(early)
    trainer.add_callback(Late(late))
    trainer.run()
    assert early.events[0] == "init_end" and early.events[-1] == "train_end"
    assert [event for event in late.events if event.startswith("step")] == ["step_begin 3", "step_end 3"]
    with pytest.raises(TypeError, match="expected an object of a subclass of Callback"):
        trainer.add_callback(Recorder)  # type: ignore[arg-type]


CALLS: Counter[str] = Counter()


def own_parallelize(model: nn.Module, *arguments: Any) -> Sequence[nn.Module]:
    CALLS["parallelize"] += 1
    return parallelize(model, *arguments)  # type: ignore[arg-type]


def own_clip(parameters: Sequence[nn.Parameter], max_norm: float | None, ranks: Ranks) -> float:
    CALLS["clip"] += 1
    return 2 * clip_gradients(parameters, max_norm, ranks)


def wrapped(model: nn.Module, *arguments: Any) -> Sequence[nn.Module]:
    return [nn.Sequential(model)]


OWN: Architecture[Any] = Architecture(
    llama3.Llama3, llama3.Llama3Config.from_hf, {"tiny": llama3.FLAVORS["debug-0.5m"]}, own_parallelize, own_clip
)
WRAPPED: Architecture[Any] = Architecture(llama3.Llama3, llama3.Llama3Config.from_hf, OWN.flavors, wrapped)


class NoLayers(LanguageModel):
    """A model whose blocks are nowhere to be found."""

    vocab_size, max_seq_len = 300, None

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 8)


def own(name: str = "OWN", **more: Any) -> dict[str, Any]:
    return {"name": f"{__name__}:{name}", "flavor": "tiny", **more}


def test_d9_an_architecture_of_ones_own_has_its_own_parallelize_and_clip_functions(tmp_path: Path) -> None:
    """It is named in the run file, with a flavor of its own, and its functions are those that are called."""
    CALLS.clear()
    Trainer(settings(tmp_path / "own", model=own())).run()
    assert CALLS == {"parallelize": 1, "clip": 3}
    Trainer(settings(tmp_path / "built_in")).run()
    assert losses(tmp_path / "own") == losses(tmp_path / "built_in")
    norms, doubled = ([row["grad_norm"] for row in rows(tmp_path / name)] for name in ("built_in", "own"))
    assert doubled == [2 * norm for norm in norms]


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"training": {"epochs": 1}, "data": {"dataset": f"{__name__}:Endless", "tokenizer": None}},
            r"training\.epochs: OwnDataLoader does not say how long the data is; set training\.steps",
        ),
        ({"parallel": {"backend": "nccl"}}, r"parallel\.backend: 'nccl' is no backend of this torch for cpu; .* gloo"),
        ({"parallel": {"backend": "fake"}}, r"parallel\.backend: 'fake' is no backend"),
        (
            {"optimizer": {"name": "torch.optim:SGD", "implementation": "fused"}},
            r"optimizer\.implementation: a setting of adamw; give it to torch\.optim:SGD as optimizer\.settings",
        ),
        (
            {"training": {"measure": ["load_balance"]}},
            r"training\.measure: load_balance: the model has no mixture of experts",
        ),
        ({"evaluation": {"interval": 1, "corpus": "nowhere.txt"}}, r"nowhere\.txt is not there"),
        ({"evaluation": {"interval": 1}}, r"name evaluation\.corpus, or keep a share back with data\.held_out"),
        ({"profiling": {"interval": 1}}, r"profiling\.interval: expected 2 or more"),
        ({"wandb": {}}, r"wandb\.project: required"),
        ({"model": own(flavor="small")}, r"model\.flavor: 'small' is unknown; known: tiny"),
        ({"model": own(settings={"a": 1})}, r"model\.settings: .*OWN has none"),
        ({"model": own("WRAPPED")}, r"model\.name: .* returns a Sequential first, expected a Model;"),
        (
            {"model": {"name": f"{__name__}:NoLayers", "flavor": None}},
            r"model\.name: NoLayers has no module `layers`, .*; give it one",
        ),
        ({"model": own("NOWHERE")}, r"model\.name: .*no attribute 'NOWHERE'"),
    ],
)
def test_d9_what_a_run_lacks_or_cannot_use_is_said_before_any_step(
    tmp_path: Path, sections: Any, expected: str
) -> None:
    """One error, and nothing of the run is written."""
    with pytest.raises(ConfigError, match=expected):
        Trainer(settings(tmp_path, **sections)).run()
    assert not (tmp_path / "run").exists()
