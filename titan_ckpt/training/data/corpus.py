"""Training text and conversations: the rows of files, one after the other.

Owns fields and the place that an error names. Hugging Face `datasets` reads the files. Knows no tokens.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_ckpt.errors import ConfigError, listed, refuse
from titan_ckpt.training.data.files import BUILTIN, KINDS, Source, find_files, sample, sources_of

_MARK = "\ufeff"
"""The byte order mark with which some editors begin a file."""


@dataclass(frozen=True, slots=True)
class Row:
    """One document or conversation."""

    number: int
    """Its number in its source, counted from 0."""
    value: Any
    """A string, or a list of messages."""
    tools: Any
    """The row's "tools", which a chat template may render; None for text."""
    place: str
    """File and line, as an error names them."""
    problem: str | None = None
    """Why the row cannot be used."""


Problem = tuple[str, str]
"""The place of a row or a file that cannot be used, and why."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents, or conversations, in a fixed order."""

    name: str
    setting: str = "data.corpus"
    """The key that errors name."""
    field: str = "text"
    """The field of a jsonl line, and the column of a parquet file."""
    messages: bool = False
    """Whether the field holds conversations."""
    sources: tuple[Source, ...] = (Source(BUILTIN, ()),)

    @property
    def files(self) -> list[Path]:
        return [file for source in self.sources for file in source.files]

    @property
    def digest(self) -> str:
        """Return what caches know the corpus by: its files' names, sizes and times, and the field."""
        known = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in self.files]
        texts = [] if self.files else [row.value for row in self.rows(0)]
        return hashlib.sha256(json.dumps([known, texts, self.field, self.messages]).encode()).hexdigest()

    @property
    def layout(self) -> list[object]:
        """Return what the order of the rows depends on, as far as the files' names and a sample of their bytes tell."""
        return [self.field, self.messages, [[file.name, sample(file)] for file in self.files]]

    def rows(self, source: int, start: int = 0) -> Iterator[Row]:
        """Yield the rows of one source from number `start` on; blank ones are left out.

        Raises: ConfigError for a file that cannot be read.
        """
        kind, files = self.sources[source].kind, self.sources[source].files
        if kind == BUILTIN:
            from pydoc_data.topics import topics  # 0.5 MB of literals, imported only when needed

            texts = [topics[key] for key in sorted(topics)]
            yield from (Row(i, texts[i], None, f"topic {i}") for i in range(start, len(texts)))
            return
        for number, value in self._read(kind, files, start):
            if kind == "text":
                row = self._row(number, {self.field: value["text"].removeprefix(_MARK)}, str(files[number]))
            elif kind == "jsonl":
                line = value["text"] if number else value["text"].removeprefix(_MARK)
                row = self._line(number, line, f"{files[0]}:{number + 1}")
            else:
                whole = {name: _without_none(part) for name, part in value.items()} if self.messages else value
                row = self._row(number, whole, f"{files[0]}: row {number}")
            if row.problem is not None or not isinstance(row.value, str) or row.value.strip():
                yield row

    def documents(self) -> Iterator[str]:
        """Yield the value of every row. Raises: ConfigError after the last one, listing those that cannot be used."""
        problems: list[Problem] = []
        yield from (row.value for row in self.all_rows(problems))
        self.refuse(problems)

    def all_rows(self, problems: list[Problem]) -> Iterator[Row]:
        """Yield the rows of all sources, and add to `problems` why others cannot be used.

        Raises: ConfigError after the last one if there was none.
        """
        empty = True
        for row in (row for source in range(len(self.sources)) for row in self.rows(source)):
            empty = False
            if row.problem is None:
                yield row
            else:
                problems.append((row.place, row.problem))
        if empty:
            what = "conversation" if self.messages else "text"
            raise ConfigError([f"{self.setting}: {self.name} holds no {what}; name a file or a folder that does"])

    def refuse(self, problems: Sequence[Problem]) -> None:
        """Raise a ConfigError for rows that cannot be used, if there are any: the first eight causes, each once."""
        places: dict[str, list[str]] = {}
        for place, cause in problems:
            places.setdefault(cause, []).append(place)
        lines = []
        for cause, found in list(places.items())[:8]:
            more = f" and {len(found) - 3} more ({len(found)} in all)" if len(found) > 3 else ""
            lines.append(f"{self.setting}: {', '.join(found[:3])}{more}: {cause}")
        if num_more := len(problems) - sum(map(len, list(places.values())[:8])):
            lines.append(f"{self.setting}: and {num_more} more rows")
        refuse(*lines)

    def _read(self, kind: str, files: tuple[Path, ...], start: int) -> Iterator[tuple[int, dict[str, Any]]]:
        from datasets import load_dataset  # it takes seconds to import

        number = start
        escaped = [glob.escape(str(file.absolute())) for file in files]
        options: dict[str, Any] = {"sample_by": "document" if kind == "text" else "line"}
        if kind == "parquet":
            from pyarrow import parquet  # as `datasets`

            metadata = parquet.read_metadata(files[0])
            if not metadata.num_rows:
                return  # datasets fails there; writers in parallel leave such files
            names = metadata.schema.to_arrow_schema().names
            options = {"columns": [name for name in (self.field, "tools") if name in names]}
        try:
            builder = "parquet" if kind == "parquet" else "text"
            rows: Any = load_dataset(builder, data_files=escaped, split="train", streaming=True, **options)
            # batches, because a loop over rows would divide them among the worker processes of a loader; small ones,
            # because a line may be large
            for batch in (rows.skip(start) if start else rows).iter(batch_size=1 if kind == "text" else 16):
                for values in zip(*batch.values(), strict=True):
                    yield number, dict(zip(batch, values, strict=True))
                    number += 1
        except UnicodeDecodeError as error:
            file = files[number if kind == "text" else 0]
            raise ConfigError([f"{self.setting}: {file} is not UTF-8 text: {error}"]) from None
        except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
            file = files[min(number, len(files) - 1)]
            cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
            raise ConfigError([f"{self.setting}: {file} cannot be read: {cause}"]) from error

    def _line(self, number: int, line: str, place: str) -> Row:
        if not line.strip():
            return Row(number, "", None, place)
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            return Row(number, None, None, place, f"not JSON: {error}; expected {self._expected}")
        return self._row(number, value, place)

    def _row(self, number: int, value: Any, place: str) -> Row:
        if not isinstance(value, Mapping):
            found: str | None = type(value).__name__
        elif self.field not in value:
            found = f"the fields {', '.join(value) or '(none)'}; {self._choose(value)}"
        else:
            found = _no_conversation(value[self.field]) if self.messages else _no_text(value[self.field])
        if found is not None:
            return Row(number, None, None, place, f"expected {self._expected}, found {found}")
        tools = value.get("tools") if self.messages else None
        if isinstance(tools, str) and tools:  # parquet has no other place for schemas that differ between rows
            try:
                tools = json.loads(tools)
            except (ValueError, RecursionError) as error:
                return Row(number, None, None, place, f'"tools" is a text that is not JSON: {error}')
        return Row(number, value[self.field], tools or None, place)

    @property
    def _expected(self) -> str:
        kind = 'a list of messages, each with "role" and "content", as' if self.messages else "a string"
        return f'an object with {kind} "{self.field}"'

    def _choose(self, row: Mapping[str, Any]) -> str:
        if self.messages:
            return "name the right one in data.messages"
        named = (f'for conversations, set data.messages = "{name}"' for name in _chats_among(row))
        return next(named, "name the right one in data.field")


def _chats_among(row: Mapping[str, Any]) -> list[str]:
    """Return the fields that hold lists of messages, or of what may be meant as such; real conversations come first."""
    listed = [n for n, value in row.items() if isinstance(value, list) and all(isinstance(m, Mapping) for m in value)]
    return sorted(listed, key=lambda name: _no_conversation(row[name]) is not None)


def _no_text(value: Any) -> str | None:
    """Return what a field holds that is no text."""
    if not isinstance(value, str):
        return "null" if value is None else type(value).__name__
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return f"half of a character, {value[error.start]!a} at position {error.start}; remove it"
    return None


def _no_conversation(value: Any) -> str | None:
    """Return what a field holds that is no list of messages with text."""
    if not isinstance(value, list) or not value:
        return "an empty list" if value == [] else "null" if value is None else type(value).__name__
    for i, message in enumerate(value):
        if not isinstance(message, Mapping):
            return f"a {type(message).__name__} as message {i}"
        content = message.get("content")
        if not isinstance(message.get("role"), str) or (content is None and not message.get("tool_calls")):
            fields = [name for name in message if message[name] is not None]
            return f"message {i} with the fields {', '.join(fields) or '(none)'}"
        for part in content if isinstance(content, list) else [{"type": "text", "text": content or ""}]:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text":
                return f"message {i} with a part of type {kind}; text alone can be learned"
            if wrong := _no_text(part.get("text")):
                return f"message {i} with {wrong}"
    return None


def _without_none(value: Any) -> Any:
    """Return a row without the fields that Arrow adds to a struct because other rows have them."""
    if isinstance(value, Mapping):
        return {key: _without_none(part) for key, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value


def open_corpus(name: str, setting: str = "data.corpus", *, field: str = "text", messages: bool = False) -> Corpus:
    """Return the corpus "builtin", or that of a file, of all files in a folder, or of those that a pattern matches.

    The built-in corpus is the help topics of the Python reference, part of every Python: 79 documents, 0.5 MB of
    English. `field`: see Corpus. `setting`: the key that errors name.
    Raises: ConfigError for what is not there, holds no such file, or has no such column.
    """
    if name == BUILTIN:
        return Corpus(name, setting, field, messages)
    files = find_files(name, setting)
    if messages and (texts := [str(file) for file in files if KINDS[file.suffix] == "text"]):
        raise ConfigError([f"{setting}: {listed(texts, ', ')}: text holds no conversations; use .jsonl or .parquet"])
    problems = []
    for file in files:
        try:
            file.open("rb").close()
            if file.suffix == ".parquet" and (wrong := _wrong_column(file, field, messages=messages)):
                right = f"name the right one in {'data.messages' if messages else 'data.field'}"
                problems.append((str(file), f"{wrong}; {right}"))
        except OSError as error:
            problems.append((str(file), f"cannot be read: {error.strerror or error}"))
        except ValueError as error:  # pyarrow's errors are ValueErrors
            problems.append((str(file), f"no parquet file: {str(error).splitlines()[0]}"))
    Corpus(name, setting).refuse(problems)
    return Corpus(name, setting, field, messages, tuple(sources_of(files)))


def fields_of(name: str) -> tuple[list[str], list[str]]:
    """Return the fields of a corpus that hold text, and those that hold conversations, by its first row.

    Raises: ConfigError as find_files; both are empty for a row that cannot be read, which `documents` names.
    """
    file = None if name == BUILTIN else find_files(name, "data.corpus")[0]
    row: Any = {"text": "a document"}
    try:
        if file is not None and KINDS[file.suffix] == "jsonl":
            with file.open(encoding="utf-8-sig") as lines:
                row = json.loads(next((line for line in lines if line.strip()), "{}"))
        elif file is not None and KINDS[file.suffix] == "parquet":
            from pyarrow import parquet  # as `datasets`

            batches = parquet.ParquetFile(file).iter_batches(batch_size=1)
            row = next((row for batch in batches for row in _without_none(batch.to_pylist())), {})
    except (OSError, ValueError, RecursionError):
        row = {}
    known = row if isinstance(row, Mapping) else {}
    texts = [name for name, value in known.items() if _no_text(value) is None]
    return texts, _chats_among(known)


def _wrong_column(file: Path, field: str, *, messages: bool) -> str | None:
    """Return what a parquet file has in place of a column of texts or conversations."""
    from pyarrow import parquet, types  # as `datasets`

    schema = parquet.read_schema(file)
    if field not in schema.names:
        return f"expected a column {field!r}, found {', '.join(schema.names) or 'none'}"
    kind = schema.types[schema.names.index(field)]
    value = kind.value_type if types.is_dictionary(kind) else kind
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_list_view(kind)
    is_text = types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)
    expected, fits = ("lists of messages", is_list) if messages else ("strings", is_text)
    return None if fits or types.is_null(kind) else f"expected {expected} in the column {field!r}, found {kind}"
