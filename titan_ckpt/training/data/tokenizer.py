"""A byte-level BPE tokenizer: trained once on a corpus and cached, or read from a Hugging Face folder.

Owns the tokenizer files. Exports contain them, so AutoTokenizer loads the tokenizer of the training run.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from titan_ckpt.disk import posix
from titan_ckpt.encoding.strict_json import MAX_BYTES_BY_HAND, loads_by_hand
from titan_ckpt.errors import ConfigError
from titan_ckpt.training.data.cache import cached_folder
from titan_ckpt.training.data.corpus import Corpus

BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"
VOCAB_SIZE = 2048
"""Number of tokens of a tokenizer that is trained without data.tokenizer."""
_MAX_BYTES = 2**30
_MAX_ID = 2**31
_FORMAT = 2
"""Part of the cache key: change it when the written files change."""


@dataclass(frozen=True)
class TextTokenizer:
    """Converts text to ids and back; `folder` holds its files."""

    backend: tokenizers.Tokenizer
    bos_id: int | None
    eos_id: int
    folder: Path
    digest: str
    """Another one for a tokenizer that makes other ids of a document."""

    @property
    def vocab_size(self) -> int:
        return int(self.backend.get_vocab_size())

    @property
    def num_ids(self) -> int:
        """Return the number of rows that a table needs for every id, which may be more than there are tokens."""
        ids = self.backend.get_vocab(with_added_tokens=True).values()
        return 1 + max(*ids, self.eos_id, self.bos_id or 0)

    @property
    def special_ids(self) -> dict[str, Any]:
        """Return the bos and eos ids of an exported config.json; those that the folder's config.json names stay.

        A model may stop at several tokens: its eos_token_id is a list then.
        """
        declared = _json(self.folder / "config.json")
        ids = {"bos_token_id": self.bos_id, "eos_token_id": self.eos_id}
        return {name: value if declared.get(name) is None else declared[name] for name, value in ids.items()}

    def encode(self, text: str) -> list[int]:
        """Return the ids of the text alone, without special tokens."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_document(self, text: str) -> list[int]:
        """Return the ids of a document between the bos token (if the vocabulary has one) and the eos token."""
        return [*([] if self.bos_id is None else [self.bos_id]), *self.encode(text), self.eos_id]

    def decode(self, ids: list[int]) -> str:
        text: str = self.backend.decode(ids, skip_special_tokens=True)
        return text


def train_tokenizer(corpus: Corpus, vocab_size: int, cache: Path) -> TextTokenizer:
    """Return the cached tokenizer of this corpus and size; train it first if the cache has none.

    The vocabulary is smaller than `vocab_size` if the corpus has too few merges to learn.
    """
    key = {"corpus": corpus.digest, "vocab_size": vocab_size, "tokenizers": tokenizers.__version__, "format": _FORMAT}
    return read_tokenizer(cached_folder(cache, "tokenizer", key, lambda folder: _train(corpus, vocab_size, folder)))


def read_tokenizer(folder: Path) -> TextTokenizer:
    """Return the tokenizer of a Hugging Face folder: tokenizer.json and the names of its special tokens.

    Raises: ConfigError for a file that is missing or damaged, and if no eos token is named.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError([f"data.tokenizer: {file} is not there; expected a folder that AutoTokenizer loads"])
    try:
        data = posix.read_whole(os.path.realpath(file), _MAX_BYTES)
        backend = tokenizers.Tokenizer.from_str(data.decode())
    except Exception as error:  # tokenizers raises nothing narrower
        raise ConfigError([f"data.tokenizer: {file} is no tokenizer: {error}"]) from None
    backend.no_truncation()  # a file may hold those of the last call before it was saved; AutoTokenizer drops them, too
    backend.no_padding()
    bos, eos = (_special(backend, folder, kind) for kind in ("bos", "eos"))
    if eos is None:
        raise ConfigError([f"data.tokenizer: tokenizer_config.json or config.json in {folder} must name an eos"])
    digest = hashlib.sha256(data + repr((bos, eos)).encode()).hexdigest()  # models may share all but these
    return TextTokenizer(backend, bos, eos, folder, digest)


def _special(backend: tokenizers.Tokenizer, folder: Path, kind: str) -> int | None:
    """Return the id of the bos or eos token, by its name in the tokenizer's files or else the id in config.json.

    A bos token of null there says that documents begin without one; the model has to stop at some eos token.
    """
    names = _json(folder / "tokenizer_config.json")
    name = names.get(f"{kind}_token") or _json(folder / "special_tokens_map.json").get(f"{kind}_token")
    if kind == "bos" and name is None and "bos_token" in names:
        return None
    if isinstance(name, dict):
        name = name.get("content")
    ids = _json(folder / "config.json").get(f"{kind}_token_id") if name is None else None
    first = ids[0] if isinstance(ids, list) and ids else ids
    if not isinstance(name, str | None) or not (first is None or (type(first) is int and 0 <= first < _MAX_ID)):
        found, where = (first, "config.json") if name is None else (name, "tokenizer_config.json")
        fault = f"has {found!r:.80} as its {kind} token; expected a token's name or id"
        raise ConfigError([f"data.tokenizer: {folder / where} {fault}"])
    return first if name is None else backend.token_to_id(name)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = loads_by_hand(posix.read_whole(os.path.realpath(path), MAX_BYTES_BY_HAND))
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        raise ConfigError([f"data.tokenizer: {path} is not JSON: {error}"]) from None
    return value if isinstance(value, dict) else {}


def _train(corpus: Corpus, vocab_size: int, folder: Path) -> None:
    """Train a tokenizer and write tokenizer.json and the two other files that AutoTokenizer reads."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken(name, special=True, normalized=False) for name in (BOS, EOS)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(corpus.documents(), trainer)
    bos = backend.token_to_id(BOS)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B:1", special_tokens=[(BOS, bos)]
    )
    backend.save(str(folder / "tokenizer.json"))
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        **names,
    }
    for name, value in {"tokenizer_config.json": config, "special_tokens_map.json": names}.items():
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")
