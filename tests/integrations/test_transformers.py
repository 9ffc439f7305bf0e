"""transformers' Trainer and TRL's trainers with titan_ckpt: killed and resumed runs equal uninterrupted ones."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from tests.integrations.loader_cases import Sized
from tests.integrations.phases import Phase, play
from tests.integrations.playing import Run, assert_same_run, played
from titan_ckpt import CheckpointConfig, ExportConfig
from titan_ckpt.encoding.typed_json import MAX_INLINE_BYTES
from titan_ckpt.errors import LoadMismatchError
from titan_ckpt.formats.safetensors.container import read_header
from titan_ckpt.integrations.loop import Restored
from titan_ckpt.integrations.transformers.attach import TitanCheckpoint
from titan_ckpt.integrations.transformers.known import HOOKS, problems
from titan_ckpt.integrations.transformers.loader import TrainerLoader
from titan_ckpt.integrations.transformers.progress import RankProgress, completions_of

MODULE = "tests.integrations.trainer_runs"
RUNS = {
    "SFTTrainer, LoRA, FSDP2, 2 ranks": Run("run_lora", 2, 2, 5),
    "Trainer, FSDP2 and tensor parallelism, 4 ranks": Run("run_parallel", 4, 1, 2),
}
"""Sharded runs. Those of a process, and of two that are not sharded: test_trainer_classes.py."""


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_resumes_bit_for_bit_and_its_steps_hold_what_it_trains(name: str, tmp_path: Path) -> None:
    """SIGKILL, and a new process: weights and every line of the log are those of the whole run.

    No tensor of the base is in the rank files of a PEFT model's steps.
    """
    for found, expected in played(MODULE, RUNS[name], tmp_path):
        assert_same_run(found, expected)
        assert found["is_sharded"]
    files = sorted((tmp_path / "whole").glob("checkpoints/step-*/*.safetensors"))
    names = {name for file in files for name in read_header(file).entries if name.startswith("model.")}
    assert names
    assert all(".lora_" in name for name in names) == ("LoRA" in name)


def test_three_ranks_of_ddp_sum_gradients_in_the_order_of_the_whole_run(tmp_path: Path) -> None:
    """DDP orders its exchange anew after the first backward pass of a process."""
    for found, expected in played(MODULE, Run("run_summed", 3, 1, 4), tmp_path):
        assert_same_run(found, expected)


@pytest.mark.parametrize("size", [4, 5])
def test_each_epoch_over_a_stream_with_a_length_reads_all_of_it(size: int) -> None:
    """The Trainer stops at the length, and a stream whose end was not read would begin there."""
    loader = TrainerLoader(DataLoader(Sized(), size))
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert [number for batch in islice(loader, len(loader)) for number in batch.tolist()] == [*range(10)]
        assert loader.epoch == epoch


@pytest.mark.parametrize("function", ["run_other_base", "run_export"])
def test_what_a_function_of_trainer_runs_sees_itself(function: str, tmp_path: Path) -> None:
    """One different number in the base is a BaseMismatchError; an export has what was added in memory."""
    assert play(MODULE, [Phase(function, str(tmp_path), 1)]) == [[0]]


def test_a_signal_stops_the_trainer_with_everything_saved(tmp_path: Path) -> None:
    """After SIGTERM, the same program finishes the run, bit for bit."""
    whole, stopped = str(tmp_path / "whole"), str(tmp_path / "stopped")
    phases = [Phase("run", whole, 1, (3,)), Phase("run_signal", stopped, 1), Phase("run", stopped, 1, (3,))]
    assert play(MODULE, phases) == [[0]] * 3
    found, expected = (torch.load(Path(folder, "result-0.pt")) for folder in (stopped, whole))
    assert_same_run(found, expected)


def trainer(**changed: Any) -> Any:
    """Return the attributes of a Trainer that decide whether it can be attached."""
    arguments = SimpleNamespace(
        save_strategy="no",
        load_best_model_at_end=False,
        auto_find_batch_size=False,
        n_gpu=1,
        accelerator_config=SimpleNamespace(dispatch_batches=None),
    )
    plugin = SimpleNamespace(fsdp_version=changed.pop("fsdp_version", 2))
    kind = SimpleNamespace(value=changed.pop("distributed_type", "NO"))
    state = SimpleNamespace(distributed_type=kind, fsdp_plugin=plugin, mixed_precision="no")
    accelerator = SimpleNamespace(
        state=state, parallelism_config=changed.pop("parallelism_config", None), ddp_handler=None
    )
    values = {**dict.fromkeys(HOOKS), **changed}
    return SimpleNamespace(args=arguments, accelerator=accelerator, **values)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"distributed_type": "FSDP", "fsdp_version": 1}, 'FSDP1: .* use FSDP2, .*fsdp_config={"version": 2}'),
        ({"distributed_type": "DEEPSPEED"}, "DeepSpeed: .* use FSDP2"),
        ({"distributed_type": "XLA"}, "only DDP, FSDP2 and a single process"),
        (
            {"parallelism_config": SimpleNamespace(cp_enabled=True, sp_enabled=False)},
            "context and sequence parallelism",
        ),
    ],
)
def test_what_has_no_named_shards_is_refused_by_name(changed: dict[str, Any], message: str) -> None:
    """FSDP1, DeepSpeed and XLA are refused before anything runs, with what to use instead."""
    (fault,) = problems(trainer(**changed), CheckpointConfig(), has_adapter=False)
    assert re.search(message, fault)


def test_settings_that_do_not_fit_are_all_told_at_once() -> None:
    """The Trainer's own checkpoints and everything that depends on them are refused together."""
    attached = trainer()
    attached.args.save_strategy = SimpleNamespace(value="steps")
    attached.args.load_best_model_at_end = attached.args.auto_find_batch_size = True
    attached.args.n_gpu = 2
    config = CheckpointConfig(export=(ExportConfig("peft"),))
    faults = "\n".join(problems(attached, config, has_adapter=True))
    for name in (
        'save_strategy="no"',
        "load_best_model_at_end",
        "auto_find_batch_size",
        "DataParallel",
        "save_model()",
    ):
        assert name in faults
    assert [*problems(trainer(), CheckpointConfig(), has_adapter=True)] == []


def test_the_metrics_of_a_step_are_those_of_every_evaluation_set() -> None:
    """The Trainer logs an entry for the step and one for each set: none may be missed by keep.best."""
    sets = [{f"eval_{name}_loss": float(number), "step": 4} for number, name in enumerate("abcdefg")]
    state = SimpleNamespace(log_history=[{"loss": 9.0, "step": 3}, {"loss": 1.0, "step": 4}, *sets])
    running: Any = SimpleNamespace(state=state, callback_handler=SimpleNamespace(callbacks=[]))
    checkpoint = TitanCheckpoint(running, CheckpointConfig(), only_adapter=False)
    found = checkpoint._metrics(4)
    assert found == {"step": 4.0, "loss": 1.0, **{f"eval_{name}_loss": float(n) for n, name in enumerate("abcdefg")}}
    assert checkpoint._metrics(5) == {}


def test_ranks_of_tensor_parallelism_have_one_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate gives the whole loader to each of them: two ranks have read one batch, not two."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    loader = TrainerLoader(DataLoaderShard(range(8), batch_size=2))
    assert (loader.dp_rank, loader.dp_world_size) == (0, 1)


def share(rank: int, size: int, *, split: bool) -> TrainerLoader:
    """Return one rank's loader of 64 numbers, as accelerate prepares it."""
    sampler: Any = BatchSampler(SequentialSampler(range(64)), 8, drop_last=False)
    if size > 1:
        sampler = BatchSamplerShard(sampler, size, rank, split_batches=split)
    return TrainerLoader(DataLoader(range(64), batch_sampler=sampler))  # type: ignore[arg-type]  # numbers are a dataset


@pytest.mark.parametrize("split", [False, True])
def test_another_number_of_ranks_goes_on_after_what_all_ranks_have_read(split: bool) -> None:
    """If accelerate splits each batch among the ranks, together they read as many batches as one of them."""
    loaders = [share(rank, 2, split=split) for rank in range(2)]
    for loader in loaders:
        loader.set_epoch(0)
    runs = [iter(loader) for loader in loaders]
    read = [number for _ in range(2) for run in runs for number in next(run).tolist()]
    for size in (1, 4):
        resumed = [share(rank, size, split=split) for rank in range(size)]
        for loader in resumed:
            loader.load_state_dicts([old.state_dict() for old in loaders])
            loader.set_epoch(0)
        rest = [number for loader in resumed for batch in loader for number in batch.tolist()]
        assert sorted(read + rest) == [*range(64)]


def generating(number: int, held: Any) -> Any:
    """Return the attributes of a GRPOTrainer that uses each generation for four forward passes."""
    args = SimpleNamespace(steps_per_generation=2, num_iterations=2, gradient_accumulation_steps=1)
    state = SimpleNamespace(global_step=number)
    return SimpleNamespace(args=args, _step=number, _buffered_inputs=held, entropy_coef=0.5, state=state)


def test_completions_are_held_between_generations_and_where_they_fit(caplog: pytest.LogCaptureFixture) -> None:
    """A step before a generation holds none; those that typed JSON cannot hold are left out with a warning."""
    held, large = [{"ids": torch.ones(2)}], [{"ids": torch.ones(MAX_INLINE_BYTES + 1, dtype=torch.int8)}]
    states = [completions_of(generating(number, value)) for number, value in ((3, held), (4, held), (5, large))]
    assert [state and state["held"] for state in states] == [held, None, None]
    assert [record.getMessage()[:22] for record in caplog.records] == ["step 5: the completion"]
    assert completions_of(trainer()) is None


def test_a_step_asks_an_object_of_the_users_by_the_method_that_it_has_then() -> None:
    """A hook of the training may wrap the method, after the manager has been built."""
    value = nn.Linear(1, 1)
    state, own = Restored(value), value.state_dict
    vars(value)["state_dict"] = lambda: {**own(), "more": 1}
    assert state.state_dict().keys() == {"weight", "bias", "more"}


def test_completions_are_not_divided_among_another_number_of_ranks() -> None:
    """The error says which steps hold none; from such a step they go on with the coefficient that was adapted."""
    running = generating(0, None)
    running.accelerator = SimpleNamespace(device="cpu")
    progress = RankProgress(running, share(0, 1, split=False))
    stored = {"loader": {}, "completions": completions_of(generating(3, [{"ids": torch.ones(2)}]))}
    with pytest.raises(LoadMismatchError, match=r"2 data-parallel ranks use.*checkpoint\.resume\.step.*multiple of"):
        progress.load_state_dicts([stored, stored])
    before = generating(4, None)
    before.entropy_coef = 0.25
    stored = {"loader": share(0, 2, split=False).state_dict(), "completions": completions_of(before)}
    progress.load_state_dicts([stored, stored])
    progress.begin()
    assert (running.entropy_coef, running._step, running._buffered_inputs) == (0.25, 4, None)
