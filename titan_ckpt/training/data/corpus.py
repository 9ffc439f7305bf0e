"""Training text: the documents of the built-in corpus, a text file or a jsonl file. Knows no tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_ckpt.errors import ConfigError

BUILTIN = "builtin"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents in a fixed order, and a digest of all of them."""

    name: str
    documents: tuple[str, ...]
    digest: str

    @staticmethod
    def of(name: str, documents: Sequence[str], setting: str = "data.corpus") -> Corpus:
        """Return a corpus of the documents that are not empty. Raises: ConfigError if there are none."""
        kept = tuple(d for d in documents if d.strip())
        if not kept:
            raise ConfigError([f"{setting}: {name} holds no text"])
        hasher = hashlib.sha256()
        for document in kept:
            data = document.encode()
            hasher.update(len(data).to_bytes(8, "little") + data)
        return Corpus(name, kept, hasher.hexdigest())


def open_corpus(name: str, setting: str = "data.corpus") -> Corpus:
    """Return a corpus: "builtin", or the path of a .jsonl file (one {"text": ...} per line) or of a UTF-8 text file.

    The built-in corpus is the help topics of the Python reference, part of every Python: 79 documents, 0.5 MB of
    English. A text file is one document. `setting`: the key that errors name.
    Raises: ConfigError for a missing file, bytes that are not UTF-8, and jsonl lines without a string "text".
    """
    if name == BUILTIN:
        from pydoc_data.topics import topics  # 0.5 MB of literals, imported only when needed

        return Corpus.of(name, [topics[key] for key in sorted(topics)], setting)
    path = Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError([f'{setting}: {path} is not there; expected a text or jsonl file, or "builtin"']) from None
    except IsADirectoryError:
        raise ConfigError([f"{setting}: {path} is a folder; expected a .txt or .jsonl file"]) from None
    except OSError as error:
        raise ConfigError([f"{setting}: {path} cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{setting}: {path} is not UTF-8 text: {error}"]) from None
    return Corpus.of(name, _jsonl_texts(path, text, setting) if path.suffix == ".jsonl" else [text], setting)


def _jsonl_texts(path: Path, text: str, setting: str) -> list[str]:
    documents: list[str] = []
    problems: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            problems.append(f"{setting}: {path}:{number}: not JSON: {error}")
            continue
        if isinstance(value, dict) and isinstance(value.get("text"), str):
            documents.append(value["text"])
        else:
            problems.append(f'{setting}: {path}:{number}: expected an object with a string "text"')
    if problems:
        more = [f"{setting}: and {len(problems) - 8} more lines"] if len(problems) > 8 else []
        raise ConfigError([*problems[:8], *more])
    return documents
