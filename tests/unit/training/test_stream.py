"""Streams: the order of their sequences, and where a run goes on in them, in any layout of ranks and workers."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chats import chat_tokenizer, conversations, write_chats
from titan_ckpt.errors import ConfigError, LoadMismatchError
from titan_ckpt.training.data.batch import IGNORED, Batch, collate
from titan_ckpt.training.data.chat import ChatTemplate
from titan_ckpt.training.data.corpus import open_corpus
from titan_ckpt.training.data.loader import build_dataloader
from titan_ckpt.training.data.stream import StreamDataset


def encode(text: str) -> list[int]:
    return [int(word) for word in text.split()]


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    """Write the numbers from 0 to 399 into documents of one to twelve numbers, in files of both kinds of text."""
    first = 0
    (tmp_path / "data").mkdir()
    for file in range(6):
        documents = []
        for size in (1, 12, 3, 7, 2, 9):
            documents.append(" ".join(map(str, range(first, first + size))))
            first += size
        if file % 3 == 2:
            (tmp_path / "data" / f"{file}.txt").write_text(" ".join(documents))
        else:
            lines = [json.dumps({"text": text}) for text in documents]
            (tmp_path / "data" / f"{file}.jsonl").write_text("\n".join([*lines, "", ""]))
    return tmp_path / "data"


TOTAL, LENGTH = 6 * 34, 5


def stream(folder: Path, rank: int = 0, num_ranks: int = 1, window: int = 0, length: int = LENGTH) -> StreamDataset:
    return StreamDataset(open_corpus(str(folder)), encode, length, 7, window=window, rank=rank, num_ranks=num_ranks)


def test_d8_a_stream_is_the_documents_in_their_order_over_and_over(numbers: Path) -> None:
    """Sequences overlap by one token: nothing is left out, and an epoch goes on in the next."""
    seen = [*islice(stream(numbers), 100)]
    assert all(len(s["tokens"]) == len(s["labels"]) == LENGTH for s in seen)
    assert torch.cat([s["tokens"] for s in seen]).tolist() == [i % TOTAL for i in range(100 * LENGTH)]
    assert torch.cat([s["labels"] for s in seen]).tolist() == [(i + 1) % TOTAL for i in range(100 * LENGTH)]


def test_d8_a_window_shuffles_rows_and_sources_anew_in_each_epoch(numbers: Path) -> None:
    """Every token comes once before any comes twice."""
    tokens = torch.cat([s["tokens"] for s in islice(stream(numbers, window=4), 2 * TOTAL // LENGTH)]).tolist()
    epochs = tokens[:TOTAL], tokens[TOTAL : 2 * TOTAL]
    assert sorted(epochs[0]) == [*range(TOTAL)] != epochs[0]
    assert len({*epochs[1]}) == len(epochs[1]) and epochs[0][: len(epochs[1])] != epochs[1]
    alone = torch.cat([s["tokens"] for s in islice(stream(numbers / "0.jsonl", window=6, length=1), 68)]).tolist()
    assert sorted(alone[:34]) == sorted(alone[34:]) == [*range(34)] and alone[:34] != alone[34:], "the rows of one file"
    in_order = torch.cat([s["tokens"] for s in islice(stream(numbers, window=1, length=1), 2 * TOTAL)]).tolist()
    files = [number // 34 for number in in_order if number % 34 == 0]
    assert sorted(files[:6]) == sorted(files[6:]) == [*range(6)] and files[:6] != files[6:], "the files"


LAYOUTS = [(1, 4, 0), (2, 2, 0), (2, 3, 2), (3, 1, 0), (4, 1, 1)]
"""Ranks, sequences in a batch of each, and workers of each."""


def loaders(make: Any, ranks: int, batch: int, workers: int) -> list[Any]:
    datasets = [make(rank, ranks) for rank in range(ranks)]
    return [build_dataloader(dataset, batch, collate, 0, workers) for dataset in datasets]


def take(readers: list[Any], steps: int) -> list[list[int]]:
    """Return the sequences of all ranks in their common order, without padding."""
    rows: list[list[int]] = []
    iterators = [iter(one) for one in readers]
    for _ in range(steps):
        batches: list[Batch] = [next(one) for one in iterators]
        for turn in zip(*(batch["tokens"].tolist() for batch in batches), strict=True):
            rows += turn
    return rows


@pytest.mark.parametrize("kind", ["packed", "shuffled", "conversations"])
def test_d8_a_stream_goes_on_exactly_in_any_layout(numbers: Path, tmp_path: Path, kind: str) -> None:
    """Through four changes of ranks, batch and workers, and over epochs: what one uninterrupted reader takes.

    Each reader is thrown away with the batches that its workers have made ahead, as by a kill.
    """
    template = ChatTemplate(chat_tokenizer(tmp_path / "t")) if kind == "conversations" else None
    chats = write_chats(tmp_path / "chats.jsonl", 11)

    def make(rank: int, ranks: int) -> StreamDataset:
        if template is None:
            return stream(numbers, rank, ranks, 4 if kind == "shuffled" else 0)
        corpus = open_corpus(str(chats), field="messages", messages=True)
        return StreamDataset(corpus, template, 500, 7, window=4, rank=rank, num_ranks=ranks)

    found: list[list[int]] = []
    states: list[dict[str, Any]] = []
    for number, layout in enumerate([*LAYOUTS, LAYOUTS[2]]):
        readers = loaders(make, *layout)
        for reader in readers:
            if number and len(states) == len(readers):
                reader.load_state_dict(states[reader.dp_rank])
            elif number:
                reader.load_state_dicts(states)
        found += take(readers, 5)
        states = json.loads(json.dumps([reader.state_dict() for reader in readers]))
    assert {state["next_index"] for state in states} == {len(found)}
    whole = [sample["tokens"].tolist() for sample in islice(make(0, 1), len(found))]
    assert [row[: len(expected)] for row, expected in zip(found, whole, strict=True)] == whole
    assert not any(any(row[len(expected) :]) for row, expected in zip(found, whole, strict=True)), "padding"
    if template is not None:
        epoch = sorted(whole[:11])
        assert epoch == sorted(template(messages)[0][:-1] for messages in conversations(11))


def test_d8_a_resume_reads_only_from_the_bookmark_on(numbers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files before it are not opened, and nothing before it is tokenised again."""
    reader = loaders(lambda *share: stream(numbers, *share), 1, 1, 0)[0]
    taken = take([reader], 30)
    encoded: list[str] = []
    again = stream(numbers)

    def note(text: str) -> list[int]:
        encoded.append(text)
        return encode(text)

    monkeypatch.setattr(again, "encode", note)
    resumed = build_dataloader(again, 1, collate, 0)
    resumed.load_state_dict(reader.state_dict())
    assert take([resumed], 1)[0][0] == taken[-1][-1] + 1
    assert len(encoded) <= 3 and encode(encoded[0])[-1] >= taken[-1][-1]


def test_d8_a_position_in_another_stream_is_refused(numbers: Path) -> None:
    """Another window, another length, a file that has come, or one that has changed."""
    state = loaders(lambda *share: stream(numbers, *share), 1, 1, 0)[0].state_dict()
    (numbers / "9.jsonl").write_text('{"text": "1"}')
    with pytest.raises(LoadMismatchError, match="the checkpoint's position is in other data"):
        build_dataloader(stream(numbers), 1, collate, 0).load_state_dict(state)
    (numbers / "9.jsonl").unlink()
    build_dataloader(stream(numbers), 1, collate, 0).load_state_dict(state)
    lines = (numbers / "0.jsonl").read_text().splitlines()
    (numbers / "0.jsonl").write_text("\n".join([*lines[1:], lines[0]]) + "\n")  # as many bytes, in another order
    with pytest.raises(LoadMismatchError, match="the checkpoint's position is in other data"):
        build_dataloader(stream(numbers), 1, collate, 0).load_state_dict(state)
    (numbers / "0.jsonl").write_text('{"text": "1"}')
    for other in (stream(numbers), stream(numbers, window=2), stream(numbers, length=6)):
        with pytest.raises(LoadMismatchError, match=r"checkpoint\.resume\.exclude"):
            build_dataloader(other, 1, collate, 0).load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_d8_a_bad_row_of_a_stream_is_one_error(tmp_path: Path, workers: int) -> None:
    """In the first row before anything is read; later when it is reached, out of a worker process too."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"txt": 1}\n')
    with pytest.raises(ConfigError, match=r'x\.jsonl:1: expected an object with a string "text", found the fields txt'):
        stream(path)
    path.write_text('{"text": "1 2 3 4 5 6 7 8 9"}\nbroken\n')
    reader = build_dataloader(stream(path), 1, collate, 0, workers)
    with pytest.raises(ConfigError) as caught:
        take([reader], 5)
    assert len(caught.value.problems) == 1 and "x.jsonl:2: not JSON" in caught.value.problems[0]
    path.write_text("\n\n")
    with pytest.raises(ConfigError, match="holds nothing to train on"):
        take([build_dataloader(stream(path), 1, collate, 0)], 1)


def test_d8_a_dropped_conversation_of_a_stream_has_no_loss(tmp_path: Path) -> None:
    """It keeps its number, so that ranks agree on every other's."""
    template = ChatTemplate(chat_tokenizer(tmp_path / "t"))
    corpus = open_corpus(str(write_chats(tmp_path / "c.jsonl", 6)), field="messages", messages=True)
    lengths = [len(s["tokens"]) for s in islice(StreamDataset(corpus, template, 500, 7), 6)]
    longest = sorted(lengths)[2]
    dropped = [*islice(StreamDataset(corpus, template, longest, 7, too_long="drop"), 6)]
    for sample, length in zip(dropped, lengths, strict=True):
        assert bool((sample["labels"] != IGNORED).any()) == (length <= longest)
    with pytest.raises(ConfigError, match=r"c\.jsonl:1: .* tokens are longer than data\.sequence_length"):
        next(iter(StreamDataset(corpus, template, longest, 7)))
