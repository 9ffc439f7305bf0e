"""D1: the thirteen build steps of the trainer, each called, overridden and left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from torch import nn

from tests.tiny_run import settings
from titan_ckpt.errors import ConfigError
from titan_ckpt.models.language_model import LanguageModel, Model
from titan_ckpt.models.registry import build_model
from titan_ckpt.training.callbacks import Callback, Callbacks, StepMetrics
from titan_ckpt.training.callbacks.due import Checkpointing
from titan_ckpt.training.data.batch import Batch
from titan_ckpt.training.data.sequences import PackedDataset
from titan_ckpt.training.data.tokenizer import BOS
from titan_ckpt.training.parallel.ranks import Ranks
from titan_ckpt.training.trainer import Trainer
from titan_ckpt.weights.initialize import construct, materialize

STEPS = [
    "setup", "build_model", "freeze_model", "build_assets", "build_data_transform", "build_dataset", "build_collate",
    "build_dataloader", "parallelize_model", "build_optimizer", "build_lr_scheduler", "build_training_context",
    "build_callbacks",
]  # fmt: skip


def test_d1_thirteen_steps_are_called_once_each_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subclass can replace each step: its own runs in that place, and the run is made of what it returns."""
    made: dict[str, Any] = {}

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: Trainer) -> Any:
            assert name not in made, "called twice"
            made[name] = original(self)
            return made[name]

        return step

    for name in STEPS:
        monkeypatch.setattr(Trainer, name, noting(name, getattr(Trainer, name)))
    trainer = Trainer(settings(tmp_path, training={"steps": 1}))
    trainer.run()
    assert [*made] == STEPS
    for name, part in {
        "build_model": trainer.model, "build_assets": trainer.tokenizer, "build_data_transform": trainer.encode,
        "build_dataset": trainer.dataset, "build_collate": trainer.collate, "build_dataloader": trainer.dataloader,
        "parallelize_model": trainer.model_parts, "build_optimizer": trainer.optimizer,
        "build_lr_scheduler": trainer.lr_scheduler, "build_training_context": trainer.training_context,
        "build_callbacks": trainer.callbacks,
    }.items():  # fmt: skip
        assert part is made[name], name


class Wrapped:
    """Stands for an object that a step returned, and notes that it was used."""

    digest: str

    def __init__(self, made: Any, note: Callable[[], None]) -> None:
        self.made, self.note = made, note

    def __call__(self, *given: Any) -> Any:
        self.note()
        return self.made(*given)

    def __iter__(self) -> Iterator[Any]:
        self.note()
        return iter(self.made)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.made, name)


class Noting(Callback):
    def __init__(self, note: Callable[[], None]) -> None:
        self.note = note

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        self.note()


def test_d1_a_run_uses_what_its_steps_return(tmp_path: Path) -> None:
    """Whatever a subclass returns in place of the default's is what trains, reads, steps and reports."""
    used: set[str] = set()

    def note(name: str) -> Callable[[], None]:
        return lambda: used.add(name)

    class Subclass(Trainer):
        @contextmanager
        def setup(self) -> Iterator[Ranks]:
            with super().setup() as ranks:
                yield ranks
                assert used, "the run is over"
            used.add("setup")

        def build_model(self) -> Model:
            model: Any = super().build_model()
            model.register_forward_pre_hook(lambda *_: note("build_model")())
            return model  # type: ignore[no-any-return]

        def freeze_model(self) -> None:
            model: Any = self.model
            model.norm.weight.requires_grad_(False)

        def build_assets(self) -> Any:
            made = super().build_assets()
            assert made is not None
            ids, name = made.encode_document, note("build_assets")
            object.__setattr__(made, "encode_document", lambda *given: (name(), ids(*given))[1])
            return made

        def build_data_transform(self) -> Any:
            made = Wrapped(super().build_data_transform(), note("build_data_transform"))
            made.digest = str(tmp_path)  # no run has made such ids
            return made

        def build_dataset(self) -> Any:
            made: Any = super().build_dataset()
            samples, name = made.samples, note("build_dataset")
            made.samples = lambda: (name(), samples())[1]
            return made

        def build_collate(self) -> Any:
            return Wrapped(super().build_collate(), note("build_collate"))

        def build_dataloader(self) -> Any:
            return Wrapped(super().build_dataloader(), note("build_dataloader"))

        def parallelize_model(self) -> Sequence[nn.Module]:
            (part,) = super().parallelize_model()
            part.register_forward_hook(lambda *_: note("parallelize_model")())
            return [part]

        def build_optimizer(self) -> torch.optim.Optimizer:
            made = super().build_optimizer()
            made.register_step_post_hook(lambda *_: note("build_optimizer")())
            return made

        def build_lr_scheduler(self) -> Any:
            self.first_scheduler = super().build_lr_scheduler()
            return self.first_scheduler

        def build_training_context(self) -> Any:
            return Wrapped(super().build_training_context(), note("build_training_context"))

        def build_callbacks(self) -> Callbacks:
            return replace(super().build_callbacks(), user=(Noting(note("build_callbacks")),))

    trainer = Subclass(settings(tmp_path, training={"steps": 2}))
    trainer.run()
    assert used == {*STEPS} - {"freeze_model", "build_lr_scheduler"}
    assert trainer.first_scheduler is not None and trainer.first_scheduler.last_epoch == 2
    model: Any = trainer.model
    assert torch.equal(model.norm.weight, torch.ones_like(model.norm.weight))


def test_d1_a_data_transform_of_ones_own_is_not_answered_from_the_cache_of_another(tmp_path: Path) -> None:
    """The cache has the ids of the run's tokenizer; others are known by a digest, and refused without one."""

    class Backwards:
        def __init__(self, encode: Any) -> None:
            self.encode = encode

        def __call__(self, text: str) -> list[int]:
            ids: list[int] = self.encode(text)
            return ids[::-1]

    class Own(Trainer):
        def build_data_transform(self) -> Any:
            return transform(super().build_data_transform())

    def first_tokens(trainer: Trainer) -> list[int]:
        with trainer.setup() as trainer.ranks:
            trainer.model = trainer.build_model()
            trainer.tokenizer = trainer.build_assets()
            trainer.encode = trainer.build_data_transform()
            made = trainer.build_dataset()
            assert isinstance(made, PackedDataset)
            return made.tokens.tolist()

    config = settings(tmp_path)
    run = Trainer(config)
    default = first_tokens(run)
    transform: Any = Backwards
    with pytest.raises(ConfigError, match=r"build_data_transform: it returns a Backwards.*give it a `digest`"):
        first_tokens(Own(config))
    Backwards.digest = f"backwards {tmp_path}"  # type: ignore[attr-defined]
    assert first_tokens(Own(config)) != default
    assert first_tokens(Trainer(config)) == default
    fewer = settings(tmp_path, data={"tokenizer": 280})
    assert max(first_tokens(Own(fewer))) < 280, "its own digest says nothing of the tokenizer"
    assert run.tokenizer is not None
    folder = copytree(run.tokenizer.folder, tmp_path / "tokenizer")
    of_folder = settings(tmp_path, data={"tokenizer": str(folder)})
    assert first_tokens(Trainer(of_folder)) == default
    names = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(names | {"eos_token": BOS}))
    other = first_tokens(Trainer(of_folder))
    assert (default[-1], other[-1]) == (1, 0), "models of one vocabulary may end documents by tokens of their own"


def test_d1_a_step_can_be_called_by_itself(tmp_path: Path) -> None:
    """Tools that need a part build it, and what it stands on, without a run; nothing is written."""
    trainer = Trainer(settings(tmp_path))
    with trainer.setup() as trainer.ranks:
        trainer.model = trainer.build_model()
        trainer.tokenizer = trainer.build_assets()
        trainer.encode = trainer.build_data_transform()
        trainer.dataset = trainer.build_dataset()
        trainer.collate = trainer.build_collate()
        batch = next(iter(trainer.build_dataloader()))
    assert batch["tokens"].shape == (4, 16)
    assert not (tmp_path / "run").exists()


def test_d7_degrees_are_checked_before_anything_is_built(tmp_path: Path) -> None:
    """Three ranks of tensor parallelism in one process: an error out of the first step, and no second one."""

    class Unbuilt(Trainer):
        def build_model(self) -> LanguageModel:
            raise AssertionError("nothing is to be built")

    with pytest.raises(ConfigError, match="tensor_parallel 3 needs a multiple of 3 ranks, and this run has 1"):
        Unbuilt(settings(tmp_path, parallel={"tensor_parallel": 3})).run()
    assert not (tmp_path / "run").exists()


class RandomBatches:
    """A loader with a position and without a dataset."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self.position += 1
            tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(self.position))
            yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Bare(Trainer):
    """Leaves out every step that can be left out."""

    @contextmanager
    def setup(self) -> Iterator[Ranks]:
        torch.manual_seed(0)
        yield Ranks(0, 1, torch.device("cpu"))

    def build_model(self) -> Model:
        return construct(lambda: build_model("llama3", flavor="debug-0.5m"))

    def freeze_model(self) -> None:
        return

    def build_assets(self) -> None:
        return

    def build_data_transform(self) -> None:
        return

    def build_dataset(self) -> None:
        return

    def build_dataloader(self) -> RandomBatches:
        return RandomBatches()

    def parallelize_model(self) -> Sequence[nn.Module]:
        materialize(self.model, self.ranks.device)
        return [self.model]

    def build_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.trainable(), lr=0.1)

    def build_lr_scheduler(self) -> None:
        return

    def build_training_context(self) -> Callable[[], AbstractContextManager[object]]:
        return nullcontext

    def build_callbacks(self) -> Callbacks:
        return Callbacks(checkpoint=Checkpointing())


def test_d1_steps_that_are_left_out_leave_a_run_that_saves_and_resumes(tmp_path: Path) -> None:
    """Without tokenizer, transform, dataset, schedule, sharding and reports, four steps are two and two."""
    whole = Bare(settings(tmp_path / "whole", training={"steps": 4}))
    whole.run()
    Bare(settings(tmp_path / "cut", training={"steps": 2})).run()
    resumed = Bare(settings(tmp_path / "cut", training={"steps": 4}))
    assert resumed.run().step == 4
    assert isinstance(resumed.optimizer, torch.optim.SGD)
    assert all(map(torch.equal, whole.model.parameters(), resumed.model.parameters()))
    assert {p.name for p in (tmp_path / "cut" / "run").iterdir()} == {"checkpoints", "telemetry.jsonl"}
