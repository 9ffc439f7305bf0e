"""Corpora: which files a name means, what their rows are, and what is said of those that cannot be used."""

from __future__ import annotations

import errno
import glob
import json
import os
from pathlib import Path
from typing import Any

import pytest
from pyarrow import Table, parquet

from titan_ckpt.errors import ConfigError
from titan_ckpt.training.data import files
from titan_ckpt.training.data.corpus import open_corpus

TEXTS = ["One document about checkpoints.\n", "Another — with ünïcode, 数字 and\u2028tabs.", "  leading spaces\n\n\n"]
CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


def jsonl(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def texts(name: Path | str, **settings: Any) -> list[str]:
    return [*open_corpus(str(name), **settings).documents()]


def test_the_builtin_corpus_is_half_a_megabyte_of_text() -> None:
    """Every Python carries the text that the demo trains on."""
    documents = texts("builtin")
    assert len(documents) > 70
    assert 400_000 < sum(map(len, documents)) < 700_000
    assert open_corpus("builtin").digest == open_corpus("builtin").digest


def test_d8_text_jsonl_and_parquet_hold_the_same_documents(tmp_path: Path) -> None:
    """A text file is one document; a line and a row are one; blank ones are none; the field is one's own."""
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.txt").write_text(text)
    lines = jsonl(tmp_path / "l" / "a.jsonl", *({"body": text, "id": 1} for text in [*TEXTS, " "]))
    lines.write_text(lines.read_text() + "\n")
    parquet.write_table(Table.from_pylist([{"body": text, "n": 1} for text in [*TEXTS, ""]]), tmp_path / "a.parquet")
    assert texts(tmp_path / "*.txt") == TEXTS
    assert texts(lines, field="body") == TEXTS
    assert texts(tmp_path / "a.parquet", field="body") == TEXTS
    assert texts(tmp_path / "1.txt") == [TEXTS[1]]


def test_d8_a_folder_and_a_pattern_are_all_of_their_files_in_order(tmp_path: Path) -> None:
    """At any depth, by name, of all kinds at once, without other files and hidden ones; names may have brackets."""
    jsonl(tmp_path / "b[1]" / "x.jsonl", {"text": "3"}, {"text": "4"})
    jsonl(tmp_path / "a" / "deep" / "y.jsonl", {"text": "2 1/2"})
    for name, text in {"a/1.txt": "1", "a/2.md": "2", "c.txt": "5", ".hidden.txt": "no", "picture.png": "no"}.items():
        (tmp_path / name).write_text(text)
    assert texts(tmp_path) == ["1", "2", "2 1/2", "3", "4", "5"]
    assert texts(tmp_path / "**" / "*.jsonl") == ["2 1/2", "3", "4"]
    assert texts(tmp_path / "b[1]") == ["3", "4"]
    rows = [row.place for row in open_corpus(str(tmp_path)).rows(2, start=1)]
    assert rows == [f"{tmp_path}/b[1]/x.jsonl:2"]


def test_d8_files_of_other_tools_hold_what_they_say(tmp_path: Path) -> None:
    """A byte order mark, Windows' line ends, a part without rows, and linked folders, of which each comes once."""
    corpus, other = tmp_path / "corpus", tmp_path / "other"
    jsonl(other / "x.jsonl", {"text": "4"})
    corpus.mkdir()
    (corpus / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "1"}\r\n\r\n{"text": "2"}\r\n')
    (corpus / "b.jsonl").touch()
    (corpus / "c.txt").write_bytes(b"\xef\xbb\xbf3")
    parquet.write_table(Table.from_pylist([{"text": "x"}]).slice(1), corpus / "d.parquet")
    for link, folder in ((corpus / "e", other), (corpus / "f", other), (other / "back", corpus)):
        link.symlink_to(folder, target_is_directory=True)
    assert texts(corpus) == ["1", "2", "3", "4"]


@pytest.mark.parametrize("name", ["corpus", "corpus/*", "corpus/**/*.jsonl"])
def test_d8_a_linked_file_beside_its_target_is_read_once(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same text is not trained on twice without a word: one line of the log names the link."""
    monkeypatch.chdir(tmp_path)
    for file in ("a", "b"):
        jsonl(Path(f"corpus/{file}.jsonl"), {"text": file})
    Path("corpus/newest.jsonl").symlink_to("b.jsonl")
    assert texts(Path(name)) == ["a", "b"]
    said = (
        "data.corpus: left out, because the same files are read by other paths: corpus/newest.jsonl is corpus/b.jsonl"
    )
    assert [record.getMessage() for record in caplog.records] == [said]


def test_d8_a_folder_that_cannot_be_read_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that trained on the rest would not be told."""
    jsonl(tmp_path / "a.jsonl", {"text": "1"})
    jsonl(tmp_path / "locked" / "b.jsonl", {"text": "2"})
    scandir = os.scandir

    def refusing(path: str) -> Any:
        if os.path.basename(path.rstrip("/")) == "locked":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(ConfigError, match=r"data\.corpus: \S+/locked cannot be read: Permission denied; give"):
        open_corpus(str(tmp_path))
    for pattern in ("**/*.jsonl", "*/b*.jsonl", "**"):
        with pytest.raises(ConfigError, match=r"data\.corpus: \S+/locked cannot be read: Permission denied"):
            open_corpus(str(tmp_path / pattern))


def test_d8_a_pattern_goes_into_no_folder_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two links back into the tree are paths without number. What is found is what glob finds, by fewer paths."""
    monkeypatch.chdir(tmp_path)
    jsonl(Path("data/a/b/x.jsonl"), {"text": "1"})
    jsonl(Path("data/c/y.jsonl"), {"text": "2"})
    jsonl(Path("y.jsonl"), {"text": "3"})
    for name in (".hidden.jsonl", ".h/z.jsonl", "a/b/c.jsonl/w.jsonl"):
        jsonl(Path("data") / name, {"text": name})
    patterns = (
        "data/**/*.jsonl",
        "**",
        "data/**/b/*",
        "*/*/b/../b/x*",
        "data/.h*/*",
        "data/[ab]/**/x.jsonl",
        "**/**/y*",
    )
    plain = {pattern: {Path(path) for path in glob.glob(pattern, recursive=True)} for pattern in patterns}
    assert {pattern: {*files._matches(pattern)} for pattern in patterns} == plain
    Path("data/a/up").symlink_to("..")
    Path("data/c/up").symlink_to("..")
    for pattern in patterns:
        found = {path.resolve() for path in files._matches(pattern) if path.is_file()}
        assert found == {path.resolve() for path in plain[pattern] if path.is_file()}, pattern
    assert texts("data/**/*.jsonl") == ["a/b/c.jsonl/w.jsonl", "1", "2"]


def test_d8_a_pattern_asks_for_no_right_that_it_does_not_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder above the data may let nobody list it, as that of all homes; one that nobody may enter is an error."""
    jsonl(tmp_path / "homes" / "me" / "a.jsonl", {"text": "1"})
    jsonl(tmp_path / "sealed" / "a.jsonl", {"text": "2"})
    jsonl(tmp_path / "outer" / "sealed" / "a.jsonl", {"text": "3"})
    scandir, stat = os.scandir, os.stat

    def refusing(path: Any) -> Any:
        if os.path.basename(os.fspath(path).rstrip("/")) == "homes":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    def sealed(path: Any, *arguments: Any, **options: Any) -> Any:
        if "sealed/" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "scandir", refusing)
    assert texts(tmp_path / "homes" / "me" / "*.jsonl") == ["1"]
    monkeypatch.setattr(os, "stat", sealed)
    for pattern in ("sealed/*.jsonl", "s*/a.jsonl", "outer/**"):
        with pytest.raises(ConfigError, match=r"data\.corpus: \S+/sealed cannot be read: Permission denied"):
            open_corpus(str(tmp_path / pattern))
    with pytest.raises(ConfigError, match="matches no file"):
        open_corpus(str(tmp_path / f"{'x' * 300}*.jsonl"))


def test_d8_what_cannot_be_read_is_not_left_out_of_a_folder_or_a_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Links that lead nowhere, pipes, names that datasets would not find; files of other kinds are named in the log."""
    monkeypatch.chdir(tmp_path)
    good, kept = jsonl(Path("data/a.jsonl"), {"text": "1"}), jsonl(Path("other/b.parquet/c.jsonl"), {"text": "2"})
    with caplog.at_level("INFO"):
        for name in ("x.jsonl.gz", "y.JSONL", "README", "z.json"):
            (good.parent / name).touch()
        assert texts("data") == ["1"]
        assert "not read: x.jsonl.gz, y.JSONL, z.json; expected a .txt" in caplog.text
    Path("data/lost").symlink_to("nowhere")
    Path("data/long").symlink_to("x" * 300)
    colons = jsonl(tmp_path / "data/a::b.jsonl", {"text": "1"})
    os.mkfifo("data/p.jsonl")
    for name in ("data", "data/*"):
        with pytest.raises(ConfigError) as caught:
            texts(name)
        assert [problem.removeprefix("data.corpus: ") for problem in caught.value.problems] == [
            f'{colons}: "::" in a path separates URLs for datasets, which would not find it; rename it',
            "data/long cannot be read: File name too long",
            "data/lost is a link that leads nowhere; remove it, or put back what it leads to",
            "data/p.jsonl is no regular file; remove it, or give it another suffix",
        ]
    assert texts("other/*.parquet") == ["2"], "as Spark names its folders"
    (kept.parent / "loop").symlink_to("..")
    assert texts("other/**/*.jsonl") == ["2"]


def test_d8_a_parquet_column_of_another_type_is_an_error_before_any_row_is_read(tmp_path: Path) -> None:
    """A struct, bytes and numbers for text; numbers for conversations."""
    table = Table.from_pylist([{"doc": {"text": "x"}, "raw": b"x", "n": 1, "text": "x", "chat": CHAT}])
    parquet.write_table(table, tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == ["x"]
    for field, found in (("doc", "struct<text: string>"), ("raw", "binary"), ("n", "int64"), ("chat", "list<")):
        with pytest.raises(ConfigError, match=rf"a\.parquet: expected strings in the column '{field}', found {found}"):
            open_corpus(str(tmp_path / "a.parquet"), field=field)
    with pytest.raises(ConfigError, match=r"expected lists of messages in the column 'n', found int64; name the right"):
        open_corpus(str(tmp_path / "a.parquet"), field="n", messages=True)


def test_a_digest_follows_the_files(tmp_path: Path) -> None:
    """A cached corpus is built again when one of its files changes, or a different field is read."""
    path = jsonl(tmp_path / "a.jsonl", {"text": "a", "x": "b"})
    before = open_corpus(str(path)).digest
    assert open_corpus(str(path)).digest == before != open_corpus(str(path), field="x").digest
    os.utime(path, ns=(1, 1))
    assert open_corpus(str(path)).digest != before


def test_d8_conversations_come_as_they_are_written(tmp_path: Path) -> None:
    """In jsonl to the letter; in parquet without the empty fields that Arrow adds to messages unlike others."""
    call = [*CHAT, {"role": "tool", "content": "5", "name": "add"}]
    rows = [{"chat": CHAT}, {"chat": call, "tools": [{"type": "function"}]}]
    parquet.write_table(Table.from_pylist([{"tools": None, **row} for row in rows]), tmp_path / "a.parquet")
    for path in (jsonl(tmp_path / "a.jsonl", *rows), tmp_path / "a.parquet"):
        found = [*open_corpus(str(path), field="chat", messages=True).all_rows([])]
        assert [(row.value, row.tools) for row in found] == [(CHAT, None), (call, [{"type": "function"}])]
    as_text = jsonl(tmp_path / "b.jsonl", {"chat": CHAT, "tools": json.dumps([{"type": "function"}])})
    (row,) = open_corpus(str(as_text), field="chat", messages=True).all_rows([])
    assert row.tools == [{"type": "function"}], "Arrow has no other place for schemas that differ"


def bad(folder: Path) -> None:
    """Make the files of the cases below."""
    (folder / "empty").mkdir()
    (folder / "pictures").mkdir()
    (folder / "pictures" / "x.png").touch()
    (folder / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (folder / "blank.txt").write_text(" \n")
    (folder / "x.csv").touch()
    (folder / "no.parquet").write_text("x" * 100)
    parquet.write_table(Table.from_pylist([{"body": "x"}]), folder / "body.parquet")
    (folder / "bad.jsonl").write_text('{"text": "x"}\n{"txt": "y"}\nnot json\n[]\n{"text": 1}\n')
    (folder / "odd.jsonl").write_text('{"text": "a\\ud83d"}\n{"text": null}\n' + "[" * 100_000 + "\n")
    parquet.write_table(Table.from_pylist([{"text": "x"}, {"text": None}]), folder / "null.parquet")
    parquet.write_table(Table.from_pylist([{"m": CHAT}, {"m": None}, {"m": []}]), folder / "chat.parquet")
    picture, part = {"type": "image", "image": "x.png"}, {"type": "text", "text": "\ud83d"}
    said = [{"role": "user", "contents": "x"}, {"role": "user", "content": None}]
    said += [{"role": "user", "content": content} for content in ([picture], [part], "a\udc00", {"text": "x"})]
    with (folder / "said.jsonl").open("w") as file:
        file.writelines(json.dumps({"m": [message]}) + "\n" for message in said)
        file.writelines(json.dumps({"m": CHAT, "tools": tools}) + "\n" for tools in ("{", "[" * 100_000))
    jsonl(folder / "chat.jsonl", {"m": CHAT}, {"m": []}, {"m": "hi"}, {"m": [{"from": "x"}]}, {"m": [1]}, {"x": 1})


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("absent.txt", {}, [r"absent\.txt is not there; expected a file, a folder, a pattern"]),
        ("**.jsonl", {}, [r'data\.corpus: .* in \'\*\*\.jsonl\' only for one name; make it a part of its own, such']),
        ("*.{txt,jsonl}", {}, [r"\*\.\{txt,jsonl\} matches no file; a pattern has no braces"]),
        ("*.nope", {}, [r"\*\.nope matches no file"]),
        ("empty", {}, [r"the folder empty holds nothing; expected a \.txt, \.md, \.jsonl or \.parquet file"]),
        ("pictures", {}, [r"the folder pictures holds 1 other file, such as x.png; expected"]),
        ("x.csv", {}, [r"x\.csv: expected a \.txt.*, found the suffix '\.csv'"]),
        ("binary.txt", {}, [r"binary\.txt is not UTF-8"]),
        ("blank.txt", {}, [r"blank\.txt holds no text"]),
        ("no.parquet", {}, [r"no\.parquet: no parquet file: "]),
        ("body.parquet", {}, [r"body\.parquet: expected a column 'text', found body; name .* data\.field"]),
        (
            "bad.jsonl",
            {},
            [
                r':2: expected an object with a string "text", found the fields txt; name the right one in data\.field',
                r":3: not JSON: .*; expected an object",
                r":4: expected an object .*, found list",
                r":5: .*, found int",
            ],
        ),
        ("null.parquet", {}, [r"null\.parquet: row 1: expected an object with a string .*, found null"]),
        (
            "chat.parquet",
            {"field": "m", "messages": True},
            [r"chat\.parquet: row 1: .*, found null", r"row 2: .*, found an empty list"],
        ),
        (
            "odd.jsonl",
            {},
            [
                r":1: .*found half of a character, '\\ud83d' at position 1; remove it",
                r":2: .*, found null",
                r":3: not JSON: maximum recursion depth",
            ],
        ),
        (
            "said.jsonl",
            {"field": "m", "messages": True},
            [
                r":1: .*, found message 0 with the fields role, contents",
                r":2: .*, found message 0 with the fields role",
                r":3: .*, found message 0 with a part of type image; text alone can be learned",
                r":4: .*, found message 0 with half of a character, '\\ud83d' at position 0",
                r":5: .*, found message 0 with half of a character, '\\udc00' at position 1",
                r":6: .*, found message 0 with dict",
                r':7: "tools" is a text that is not JSON',
                r':8: "tools" is a text that is not JSON: maximum recursion',
            ],
        ),
        (
            "chat.jsonl",
            {"field": "m", "messages": True},
            [
                r":2: expected .*list of messages, each with \"role\" and \"content\", as \"m\", found an empty list",
                r":3: .*, found str",
                r":4: .*, found message 0 with the fields from",
                r":5: .*, found a int as message 0",
                r":6: .*, found the fields x; name the right one in data\.messages",
            ],
        ),
        ("blank.txt", {"messages": True}, [r"blank\.txt: text holds no conversations; use \.jsonl or \.parquet"]),
    ],
)  # fmt: skip
def test_d8_what_cannot_be_read_is_one_error_that_names_file_and_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, settings: dict[str, Any], expected: list[str]
) -> None:
    """Every bad row of a corpus is in it: where, what was expected, what was found, and what to do."""
    monkeypatch.chdir(tmp_path)
    bad(tmp_path)
    with pytest.raises(ConfigError) as caught:
        texts(name, **settings)
    assert len(caught.value.problems) == len(expected), caught.value.problems
    for problem, pattern in zip(caught.value.problems, expected, strict=True):
        assert problem.startswith("data.corpus: ")
        with pytest.raises(ConfigError, match=pattern):
            raise ConfigError([problem])


def test_d8_a_mistake_of_many_rows_is_said_once(tmp_path: Path) -> None:
    """With the number of rows and the first places; mistakes of other kinds have lines of their own."""
    file = jsonl(tmp_path / "a.jsonl", *[{"body": "x"}] * 500, {"text": 1}, {"text": "good"})
    with pytest.raises(ConfigError) as caught:
        texts(file)
    many, one = caught.value.problems
    assert many.startswith(f"data.corpus: {file}:1, {file}:2, {file}:3 and 497 more (500 in all): expected")
    assert "found the fields body" in many
    assert one.startswith(f"data.corpus: {file}:501: expected") and one.endswith("found int")


@pytest.mark.parametrize("name", ["tokens", "tokens.bin", ""])
def test_tokens_of_megatron_are_answered_with_what_reads_them(name: str, tmp_path: Path) -> None:
    """By the prefix that Megatron takes, a file, or the folder."""
    for suffix in (".bin", ".idx"):
        (tmp_path / f"tokens{suffix}").write_bytes(b"1")
    with pytest.raises(ConfigError, match=r"expected .*; tokens, as in Megatron's \.bin .*: data\.dataset$"):
        open_corpus(str(tmp_path / name))
