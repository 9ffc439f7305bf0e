"""`titan-ckpt init` with a model and data of the user's: `train` runs the file as it is written, or there is none."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from safetensors.torch import load_file, save_file

from tests.chats import FORGETFUL, conversations, write_chats, write_model
from titan_ckpt.cli.main import main
from titan_ckpt.training.run_file import read_run


def test_a_file_of_chats_becomes_a_run_that_learns_from_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The field is found, a sequence is as long as the longest conversation, and both exports are made."""
    monkeypatch.chdir(tmp_path)
    write_model(Path("base"))
    write_chats(Path("chat.jsonl"), 40)
    assert main(["init", "lora", "--model", "base", "--data", "chat.jsonl"]) == 0
    assert [path.name for path in Path("outputs").iterdir()] == ["cache"], "the tokens, which the run finds there"
    data = read_run("run.toml")[0].data
    assert (data.messages, data.too_long) == ("messages", "error")
    assert main(["train", "run.toml", "--data.sequence_length", str(data.sequence_length - 1)]) == 2, (
        "it is the longest"
    )
    assert main(["train", "run.toml", "--training.steps", "2"]) == 0
    assert sorted(path.name for path in Path("outputs/lora/exports").iterdir()) == ["step-2", "step-2-peft"]


def test_each_run_file_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the second run would go on with the first, or be refused."""
    monkeypatch.chdir(tmp_path)
    found = []
    for file in ("run.toml", "small.toml", "other/run.toml"):
        Path(file).parent.mkdir(exist_ok=True)
        assert main(["init", "pretrain", "--file", file]) == 0
        found.append(read_run(file)[0].output_folder)
        Path(found[-1]).mkdir(parents=True)
    assert found == ["outputs/pretrain", "outputs/small", "outputs/pretrain-2"]


def _no_tokenizer(folder: Path) -> None:
    write_model(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink()


def _no_weights(folder: Path) -> None:
    write_model(folder)
    (folder / "model.safetensors").unlink()


def _pickles(folder: Path) -> None:
    _no_weights(folder)
    torch.save({}, folder / "pytorch_model.bin")


def _cut_short(folder: Path) -> None:
    write_model(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _a_weight_short(folder: Path) -> None:
    write_model(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _another_size(folder: Path) -> None:
    write_model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))


def _no_causal_model(folder: Path) -> None:
    write_model(folder)
    (folder / "config.json").write_text('{"model_type": "bert", "vocab_size": 320}')


def _gpt2(folder: Path) -> None:
    write_model(folder, kind="gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=256)


MODELS: dict[str, Callable[[Path], object]] = {
    "llama": write_model,
    "tied": lambda folder: write_model(folder, tie_word_embeddings=True),
    "qwen3": lambda folder: write_model(folder, kind="qwen3", head_dim=8),
    "phi3": lambda folder: write_model(folder, kind="phi3"),
    "gpt2": _gpt2,
    "narrow": lambda folder: write_model(folder, hidden_size=24, num_attention_heads=2, num_key_value_heads=1),
    "short": lambda folder: write_model(folder, max_position_embeddings=24),
    "no template": lambda folder: write_model(folder, None),
    "forgets": lambda folder: write_model(folder, FORGETFUL),
    "small vocabulary": lambda folder: write_model(folder, vocab_size=128),
    "no tokenizer": _no_tokenizer,
    "no weights": _no_weights,
    "pickles": _pickles,
    "cut short": _cut_short,
    "a weight short": _a_weight_short,
    "another size": _another_size,
    "no causal model": _no_causal_model,
}


def _lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def _columns(path: Path, **columns: Any) -> Path:
    parquet.write_table(pyarrow.table(columns), path)
    return path


def _folder(path: Path) -> Path:
    path.mkdir()
    (path / "a.txt").write_text("One text. " * 40)
    (path / "b.md").write_text("Another one. " * 40)
    return path


_CHAT = conversations(3)
_LONG = [*_CHAT[1][:-1], {"role": "assistant", "content": "It is much. " * 40}]
DATA: dict[str, Callable[[Path], Path]] = {
    "text": lambda p: _lines(p / "a.txt", "A few words. " * 60),
    "few words": lambda p: _lines(p / "a.txt", "Three words here"),
    "nothing": lambda p: _lines(p / "a.txt"),
    "folder": lambda p: _folder(p / "texts"),
    "table": lambda p: _lines(p / "a.csv", "a,b"),
    "texts": lambda p: _lines(p / "a.jsonl", *({"text": f"Row {i}. " * 9} for i in range(40))),
    "bodies": lambda p: _lines(p / "a.jsonl", *({"id": i, "body": f"Row {i}. " * 9} for i in range(40))),
    "two texts": lambda p: _lines(p / "a.jsonl", *({"prompt": "x", "answer": "y"} for _ in range(40))),
    "broken line": lambda p: _lines(p / "a.jsonl", *({"text": "Row. " * 9} for _ in range(40)), '{"text": '),
    "numbers": lambda p: _lines(p / "a.jsonl", 1, 2),
    "chats": lambda p: write_chats(p / "a.jsonl", 40),
    "chats and text": lambda p: _lines(p / "a.jsonl", *({"text": "Row. " * 9, "messages": c} for c in _CHAT * 9)),
    "other name": lambda p: _lines(p / "a.jsonl", *({"chat": c} for c in _CHAT * 9)),
    "other keys": lambda p: _lines(p / "a.jsonl", {"conversations": [{"from": "human", "value": "x"}]}),
    "a long chat": lambda p: _lines(p / "a.jsonl", *({"messages": c} for c in [*_CHAT, _LONG] * 9)),
    "nothing to learn": lambda p: _lines(p / "a.jsonl", *({"messages": c[:1]} for c in _CHAT[1:2])),
    "a chat is text": lambda p: _lines(p / "a.jsonl", *({"messages": c} for c in [*_CHAT, "x"])),
    "parquet of text": lambda p: _columns(p / "a.parquet", text=["Row. " * 40] * 9),
    "parquet of chats": lambda p: _columns(p / "a.parquet", messages=_CHAT * 9),
    "parquet of numbers": lambda p: _columns(p / "a.parquet", n=[1, 2]),
}
KINDS = ("lora", "finetune", "qat", "pretrain")


def fault(kind: str, model: str, data: str, folder: Path, cache: Path) -> str | None:
    """Return in words how `train` refuses what `init` has written; None if it runs, or if `init` has written nothing.

    Models and tokenizers are made once, and copied for each draw.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if not (made := cache / model).exists():
        MODELS[model](made)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        named = ["--data", str(DATA[data](folder))]
        if kind != "pretrain":
            shutil.copytree(made, "base")
            named += ["--model", "base"]
        if main(["init", kind, *named]):
            return "a file is left" if Path("run.toml").exists() else None
        small = ["--training.steps", "1", "--training.batch_size", "2", "--training.device", "cpu"]
        code = main(["train", "run.toml", *small])
        return f"train ends with {code}:\n{Path('run.toml').read_text()}" if code else None


ALL = list(itertools.product(KINDS, MODELS, DATA))


@settings(max_examples=12)
@given(st.sampled_from(ALL))
def test_init_never_writes_what_train_refuses(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[str, str, str]
) -> None:
    """A kind, a model folder and data, drawn by a machine: a file that is written runs; else there is no file."""
    cache = tmp_path_factory.getbasetemp() / "models"
    assert fault(*drawn, folder=tmp_path_factory.getbasetemp() / "drawn", cache=cache) is None, drawn


@pytest.mark.parametrize(
    ("kind", "model", "data"),
    [("lora", m, "chats") for m in ("llama", "tied", "qwen3", "phi3", "gpt2", "short")]
    + [("lora", "llama", d) for d in ("few words", "bodies", "chats and text", "other name", "a long chat")]
    + [("lora", "no template", "chats and text"), ("qat", "llama", "parquet of chats"), ("finetune", "tied", "folder")]
    + [("pretrain", "llama", "texts"), ("pretrain", "llama", "parquet of text")],
)
def test_init_writes_a_file_for_what_can_be_trained(kind: str, model: str, data: str, tmp_path: Path) -> None:
    """And `train` runs it: so it is no way out to write nothing."""
    assert fault(kind, model, data, tmp_path / "run", tmp_path / "models") is None
    assert (tmp_path / "run" / "run.toml").is_file()
