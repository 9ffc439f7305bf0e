"""The configuration reference: complete, current, and answers to other libraries' names that lead to real keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from titan_ckpt.config import from_dict
from titan_ckpt.encoding.toml import fields_of, foreign_keys, tables_in
from titan_ckpt.errors import ConfigError
from titan_ckpt.training.config import RunConfig
from titan_ckpt.training.launch.command import main
from titan_ckpt.training.launch.reference import as_markdown, tables

ROOT = Path(__file__).parents[3]
HEADERS = {table.header.strip("[]") for table in tables()}
KEYS = {f"{table.header.strip('[]')}.{key.name}".lstrip(".") for table in tables() for key in table.keys}


def test_the_page_is_current() -> None:
    """docs/configuration.md is what `python -m titan_ckpt.training.launch.reference` prints."""
    assert (ROOT / "docs" / "configuration.md").read_text() == as_markdown()


def test_g13_there_are_no_more_keys_than_somebody_would_set() -> None:
    """A new key takes the place of one that nobody would set, or is listed here with who sets it."""
    later = {"checkpoint.resume.share_reads": "who has a network between ranks that is slower than the store"}
    keys = [f"{table.header.strip('[]')}.{key.name}" for table in tables() for key in table.keys]
    assert {*later} <= {*keys}
    assert len(keys) <= 140 + len(later)
    assert sum(key.startswith("checkpoint.") for key in keys) <= 40 + sum(k.startswith("checkpoint.") for k in later)


def test_every_key_and_table_has_a_sentence() -> None:
    """Type, default and what it does."""
    for table in tables():
        assert table.text.endswith("."), table.header
        for key in table.keys:
            assert key.kind
            assert key.text.endswith("."), f"{table.header} {key.name}: {key.text}"


def test_train_list_prints_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    """Also those of the converters that are installed; no config is needed."""
    assert main(["--list"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    for table in tables():
        assert table.header in out
        assert all(f"\n  {key.name} " in out for key in table.keys)
    assert 'one of "int4_weight_only"' in " ".join(out.split())


def foreign(cls: type[Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, answer) of every key that is answered and does not exist here."""
    for key, answer in foreign_keys(cls).items():
        yield f"{path}.{key}".lstrip("."), answer
    for name, kind in fields_of(cls).items():
        for inner in tables_in(kind):
            yield from foreign(inner, f"{path}.{name}")


@pytest.mark.parametrize(("key", "answer"), sorted(foreign(RunConfig)), ids=lambda value: value.split(" ")[0])
def test_another_librarys_key_is_answered_with_one_that_exists(key: str, answer: str) -> None:
    """torchtitan's and transformers' names, each in the table where a user would write it."""
    raw: Any = 1
    for part in reversed(key.split(".")):
        raw = {part: raw}
    with pytest.raises(ConfigError) as raised:
        from_dict(RunConfig, raw)
    (line,) = [line for line in raised.value.problems if line.startswith(f"{key}: ")]
    assert line == f"{key}: {answer}"
    for named in re.findall(r"(?<![\w.\"'])([a-z_]+(?:\.[a-z_]+)+)(?![\w(])", answer):
        if not named.endswith(".md"):
            assert named in KEYS | HEADERS, f"{key} is answered with {named}, which is no key"
