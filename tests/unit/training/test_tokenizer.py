"""Tokenizers: what is trained, what is cached, what other libraries make of it."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.forked import Program
from titan_ckpt.errors import ConfigError
from titan_ckpt.training.data.corpus import Corpus, open_corpus
from titan_ckpt.training.data.tokenizer import BOS, EOS, read_tokenizer, train_tokenizer

TEXTS = ["One document about checkpoints.\n", "Another — with ünïcode, 数字 and\ttabs.", "  leading spaces\n\n\n"]


def corpus_of(folder: Path) -> Corpus:
    """Return a corpus of TEXTS."""
    folder.mkdir(exist_ok=True)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return open_corpus(str(folder / "texts.jsonl"))


def test_text_survives_the_tokenizer(tmp_path: Path) -> None:
    """Any text decodes to itself, unseen characters included."""
    tokenizer = train_tokenizer(corpus_of(tmp_path / "texts"), 400, tmp_path)
    for text in [*TEXTS, "🙂 never seen"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode_document("x")
    assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)


def test_a_tokenizer_is_trained_once(tmp_path: Path) -> None:
    """The same corpus and size are read from the cache; another size is another entry."""
    corpus = corpus_of(tmp_path / "texts")
    first = train_tokenizer(corpus, 300, tmp_path)
    written = (first.folder / "tokenizer.json").stat().st_mtime_ns
    again = train_tokenizer(corpus, 300, tmp_path)
    assert again.folder == first.folder
    assert (again.folder / "tokenizer.json").stat().st_mtime_ns == written
    assert train_tokenizer(corpus, 320, tmp_path).folder != first.folder


def train_beside(cache: Path, ready: Path, other: Path) -> None:
    """Train when the other process is ready, too."""
    ready.touch()
    while not other.exists():
        time.sleep(0.001)
    print(train_tokenizer(open_corpus("builtin"), 600, cache).digest)


def test_ranks_that_train_at_once_agree(tmp_path: Path) -> None:
    """Two processes that start on an empty cache together end with one tokenizer and no leftovers."""
    cache, a, b = (tmp_path / name for name in ("cache", "a", "b"))
    places = ((a, b), (b, a))
    ranks = [Program(train_beside, cache, *ready, output=tmp_path / f"{ready[0].name}.log") for ready in places]
    assert [rank.wait(120) for rank in ranks] == [0, 0], [rank.text() for rank in ranks]
    assert len({rank.text() for rank in ranks}) == 1
    assert len(list(cache.iterdir())) == 1


def test_auto_tokenizer_loads_what_was_trained(tmp_path: Path) -> None:
    """transformers gives the same ids, the same special tokens, and the same text back, beside a Llama config.json."""
    tokenizer = train_tokenizer(open_corpus("builtin"), 600, tmp_path)
    folder = tmp_path / "export"
    folder.mkdir()
    for file in tokenizer.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    loaded = AutoTokenizer.from_pretrained(folder)
    for text in [*TEXTS, "def f(x): return x"]:
        ids = tokenizer.encode(text)
        assert loaded(text, add_special_tokens=False)["input_ids"] == ids
        assert loaded(text)["input_ids"] == [tokenizer.bos_id, *ids]
        assert loaded.decode(ids) == text
    assert (loaded.bos_token, loaded.eos_token, loaded.eos_token_id) == (BOS, EOS, tokenizer.eos_id)
    assert len(loaded) == tokenizer.vocab_size


def test_a_tokenizer_saved_by_transformers_is_read(tmp_path: Path) -> None:
    """A tokenizer that AutoTokenizer has saved again is the same tokenizer here."""
    tokenizer = train_tokenizer(corpus_of(tmp_path), 300, tmp_path / "cache")
    AutoTokenizer.from_pretrained(tokenizer.folder).save_pretrained(tmp_path / "saved")
    again = read_tokenizer(tmp_path / "saved")
    assert (again.bos_id, again.eos_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert again.encode(TEXTS[1]) == tokenizer.encode(TEXTS[1])


def test_stored_truncation_and_padding_touch_no_document(tmp_path: Path) -> None:
    """A tokenizer.json that was saved after a padded and truncated call encodes every document whole."""
    tokenizer = train_tokenizer(corpus_of(tmp_path), 300, tmp_path / "cache")
    whole = tokenizer.encode(TEXTS[0])
    for stored in ({"max_length": 3}, {}):
        if stored:
            tokenizer.backend.enable_truncation(**stored)
        else:
            tokenizer.backend.no_truncation()
            tokenizer.backend.enable_padding(length=4 * len(whole), pad_id=1, pad_token=EOS)
        shutil.copytree(tokenizer.folder, tmp_path / "stored", dirs_exist_ok=True)
        tokenizer.backend.save(str(tmp_path / "stored" / "tokenizer.json"))
        assert tokenizer.encode(TEXTS[0]) != whole
        assert read_tokenizer(tmp_path / "stored").encode(TEXTS[0]) == whole


def test_a_bos_token_of_null_is_none(tmp_path: Path) -> None:
    """As in Qwen's folders: config.json names an id, and AutoTokenizer begins no document with it."""
    folder = train_tokenizer(corpus_of(tmp_path), 300, tmp_path / "cache").folder
    names = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(names | {"bos_token": None}))
    (folder / "config.json").write_text(json.dumps({"bos_token_id": 5, "eos_token_id": 1}))
    assert AutoTokenizer.from_pretrained(folder).bos_token == BOS  # from special_tokens_map.json
    assert read_tokenizer(folder).bos_id == 0
    (folder / "special_tokens_map.json").unlink()
    assert AutoTokenizer.from_pretrained(folder).bos_token is None
    assert read_tokenizer(folder).bos_id is None


def test_a_folder_without_a_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    """The message names the file that was looked for."""
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not there"):
        read_tokenizer(tmp_path)
