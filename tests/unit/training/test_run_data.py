"""Every kind of data in a run: what [data] asks for is what the trainer takes, evaluates and resumes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, IterDataPipe

from tests.chats import chat_tokenizer, write_chats
from tests.dit import DiT
from tests.test_bad_input import write_config
from tests.tiny_run import losses, rows, settings
from tests.unit.training.test_terminal import own_log
from titan_ckpt.errors import ConfigError
from titan_ckpt.training.data.batch import collate
from titan_ckpt.training.data.sequences import ConversationDataset, DummyDataset
from titan_ckpt.training.data.stream import StreamDataset
from titan_ckpt.training.launch.command import main
from titan_ckpt.training.parallel.ranks import Ranks
from titan_ckpt.training.trainer import Trainer


def chats(root: Path, **more: Any) -> dict[str, Any]:
    if not (root / "tokenizer").exists():
        chat_tokenizer(root / "tokenizer")
    path = str(write_chats(root / "chats.jsonl", 10))
    tokenizer = str(root / "tokenizer")
    return {"corpus": path, "messages": "messages", "sequence_length": 100, "tokenizer": tokenizer, **more}


def streamed_text(root: Path) -> dict[str, Any]:
    chat_tokenizer(root / "tokenizer", None)
    (root / "text").mkdir(exist_ok=True)
    lines = [json.dumps({"body": f"{i} and {i + 1} are neighbours, as {i + 2} is. " * (1 + i % 5)}) for i in range(20)]
    (root / "text" / "a.jsonl").write_text("\n".join(lines))
    tokenizer = str(root / "tokenizer")
    return {"corpus": str(root / "text"), "field": "body", "streaming": True, "tokenizer": tokenizer}


@pytest.mark.parametrize("kind", ["dummy", "stream", "conversations"])
def test_d8_every_kind_of_data_trains_and_goes_on_where_it_was(tmp_path: Path, kind: str) -> None:
    """Two steps and two more have the losses of four; a run without a tokenizer has none."""
    made = {"dummy": {"corpus": "dummy", "tokenizer": None}}
    data = made[kind] if kind in made else streamed_text(tmp_path) if kind == "stream" else chats(tmp_path)
    constant = {"kind": "constant", "warmup_ratio": 0.0}
    for name, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        trainer = Trainer(settings(tmp_path / name, data=data, training={"steps": steps}, schedule=constant))
        trainer.run()
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole") and len(losses(tmp_path / "whole")) == 4
    kinds = {"dummy": DummyDataset, "stream": StreamDataset, "conversations": ConversationDataset}
    assert isinstance(trainer.dataset, kinds[kind])
    assert (trainer.tokenizer is None) == (kind == "dummy")


def test_d8_a_bad_row_in_the_middle_of_a_stream_loses_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step before it is saved. The process that has met the row names it, whichever rank it is."""
    data = chats(tmp_path, streaming=True, shuffle=False)
    with Path(data["corpus"]).open("a") as file:
        file.write("broken\n")
    path = write_config(tmp_path, {"data": data, "checkpoint": {"save": {"interval": 100}}})
    monkeypatch.setenv("LOCAL_RANK", "1")
    with own_log():
        assert main([str(path), "--training.steps", "9"]) == 2
    assert capsys.readouterr().err.count("chats.jsonl:11: not JSON") == 1
    assert (tmp_path / "run" / "checkpoints" / "step-5").is_dir()


class Own(IterableDataset[Any]):
    """Data of one's own, which torchdata reads."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize("dataset", [DummyDataset(9, 4, 0), Own()], ids=["ours", "one's own"])
@pytest.mark.parametrize(("device", "is_pinned"), [("cpu", False), ("cuda", True)])
def test_d8_a_loader_has_the_settings_of_the_run(tmp_path: Path, dataset: Any, device: str, is_pinned: bool) -> None:
    """Workers, batches ahead, and pinned memory where there is a device to copy to."""
    trainer = Trainer(settings(tmp_path, data={"num_workers": 2, "prefetch": 5}))
    trainer.ranks, trainer.dataset, trainer.collate = Ranks(0, 1, torch.device(device)), dataset, collate
    made = trainer.build_dataloader()
    loader = getattr(made, "_batches", made)
    assert (loader.num_workers, loader.prefetch_factor, loader.pin_memory) == (2, 5, is_pinned)


def test_d8_held_out_conversations_are_evaluated_and_not_trained_on(tmp_path: Path) -> None:
    """The last share of them, each in a batch padded to its longest."""
    trainer = Trainer(settings(tmp_path, data=chats(tmp_path, held_out=0.3), evaluation={"interval": 3}))
    trainer.run()
    assert isinstance(trainer.dataset, ConversationDataset)
    assert trainer.dataset.numbers == range(7)
    held_out = trainer.held_out()
    assert isinstance(held_out, ConversationDataset) and held_out.numbers == range(7, 10)
    assert rows(tmp_path)[-1]["eval/loss"] > 0


class Dealt(Dataset[Any]):
    """Map-style data that deals itself."""

    def __init__(self, rank: int = 0, generator: bool = False) -> None:
        self.generator = torch.Generator() if generator else None

    def __len__(self) -> int:
        return 3


class Passing(Dealt):
    """Map-style data that passes on what it is called with."""

    def __init__(self, **more: Any) -> None:
        super().__init__(rank=more["rank"])


class Pipe(IterDataPipe[Any]):
    """Data whose position torchdata does not know."""


class Captions(Dealt):
    """Texts without any tensor."""

    def __init__(self) -> None:
        super().__init__()

    def __getitem__(self, number: int) -> Any:
        return "a picture"


class Captioned(DiT):
    """Counts no losses of its own."""

    def summed_loss(self, batch: Any) -> torch.Tensor:
        return super().summed_loss((torch.zeros(len(batch), 1, 8, 8), torch.zeros(len(batch), dtype=torch.int64)))


class Drawing(Dealt):
    """Map-style data that holds a random generator."""

    def __init__(self) -> None:
        super().__init__(generator=True)


class Pairs(Dealt):
    """Map-style data of tokens."""

    def __init__(self) -> None:
        super().__init__()

    def __getitem__(self, number: int) -> Any:
        return {"tokens": torch.arange(16) + number, "labels": torch.arange(1, 17) + number}


def own(name: str, **more: Any) -> dict[str, Any]:
    return {"dataset": f"{__name__}:{name}", "tokenizer": None, **more}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"data": own("Dealt")}, r"data\.dataset: .*Dealt' takes rank, and the run deals map-style data"),
        (
            {"data": own("Passing")},
            r"Passing' takes \*\*more, and the run deals map-style data to the ranks",
        ),
        ({"data": own("Pipe")}, r"Pipe' makes a Pipe, expected an IterableDataset, .* and no DataPipe"),
        (
            {
                "model": {"flavor": None, "name": f"{__name__}:Captioned"},
                "data": own("Captions"),
                "training": {"batch_size": 1},
            },
            r"data: a list without a tensor does not say how many losses it has: give your Model a num_counted",
        ),
        ({"data": own("Drawing")}, r"data\.dataset: .*Drawing' holds a random generator"),
        ({"data": own("Own")}, r"data: it has no batch for the first step on every rank"),
        (
            {"model": {"flavor": None, "name": "tests.dit:DiT"}, "data": {"tokenizer": None}},
            r"data\.dataset: the model is no LanguageModel and takes no text; name data of your own",
        ),
        (
            {
                "model": {"flavor": None, "name": "tests.dit:DiT"},
                "data": {"tokenizer": None, "dataset": "tests.dit:Pictures"},
                "evaluation": {"interval": 1, "corpus": "builtin"},
            },
            r"evaluation: it measures text, and DiT is no LanguageModel",
        ),
    ],
)
def test_d8_data_of_ones_own_that_does_not_fit_is_refused(tmp_path: Path, sections: Any, expected: str) -> None:
    """By one error that says what it does and what to do."""
    with pytest.raises(ConfigError, match=expected):
        Trainer(settings(tmp_path, **sections)).run()


def test_d8_map_style_tokens_are_trained_on_by_epochs(tmp_path: Path) -> None:
    """Three sequences twice, in steps of four: the second has what is left, and the loss counts no more."""
    state = Trainer(settings(tmp_path, data=own("Pairs"), training={"steps": None, "epochs": 2})).run()
    assert (state.step, state.num_tokens) == (2, 6 * 16)
