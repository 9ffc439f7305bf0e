"""The files of a corpus: those that a path, a folder or a pattern means.

Owns which files are read and in which order, and the sample of their bytes that a position in a stream knows them by.
Knows no rows.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import logging
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from titan_ckpt.errors import ConfigError, counted, listed

logger = logging.getLogger(__name__)

BUILTIN, DUMMY = "builtin", "dummy"
KINDS = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".parquet": "parquet"}
"""Suffix -> kind of file. A text file is one document; a line of a jsonl file and a row of a parquet file are one."""
_EXPECTED = "a .txt, .md, .jsonl or .parquet file"
_NOT_READ = {*KINDS, ".gz", ".zst", ".bz2", ".xz", ".zip", ".json", ".csv", ".arrow"}
"""Suffixes, in small letters, of files that may hold text all the same."""
_SAMPLE_BYTES = 4096
_TOKENS = {".bin", ".idx", ".npy"}


@dataclass(frozen=True, slots=True)
class Source:
    """Files that are read as one: a jsonl or parquet file, or any number of text files with a row each."""

    kind: str
    files: tuple[Path, ...]


def _hint(names: Sequence[str]) -> str:
    """Return what to do with files of tokens, such as Megatron's, which name none of their tokenizer."""
    is_tokens = any(Path(name).suffix in _TOKENS for name in names)
    return (
        "; tokens, as in Megatron's .bin and .idx, are read by a dataset of your own: data.dataset" if is_tokens else ""
    )


def find_files(name: str, setting: str) -> list[Path]:
    """Return the file, all files in a folder, or those that a pattern matches, in the order of their paths, each once.

    Raises: ConfigError listing all that is not there, cannot be read, or is no file that training can read.
    """
    path = Path(name)
    if split := [part for part in path.parts if "**" in part and part != "**" and not os.path.exists(name)]:
        what = f'"**" stands for folders at any depth, and in {split[0]!r} only for one name'
        raise ConfigError([f'{setting}: {what}; make it a part of its own, such as "data/**/*.jsonl"'])
    if glob.has_magic(name) and not os.path.exists(name):
        found, folder = _matched(name, setting), None
    elif _is_folder(path, setting):
        found, folder = _inside([path], setting), path
    elif path.suffix in KINDS:
        found, folder = [path], None
    else:
        found_suffix = f"found the suffix {path.suffix or '(none)'!r}"
        raise ConfigError([f"{setting}: {path}: expected {_EXPECTED}, {found_suffix}{_hint([name])}"])
    files = [file for file in found if file.suffix in KINDS]
    others = [file.name for file in found if file.suffix not in KINDS]
    if problems := [*_unusable(found)]:
        raise ConfigError([f"{setting}: {problem}" for problem in problems])
    if not files and folder is not None:
        what = f"{counted(len(others), 'other file')}, such as {others[0]}" if others else "nothing"
        raise ConfigError([f"{setting}: the folder {path} holds {what}; expected {_EXPECTED}{_hint(others)}"])
    if not files:
        what = f"matches {counted(len(found), 'file')} and none is {_EXPECTED}" if found else "matches no file"
        hint = "; a pattern has no braces: name a folder, or a pattern of all" if "{" in name else ""
        raise ConfigError([f"{setting}: {name} {what}{hint}"])
    if textual := [other for other in others if Path(other).suffix.lower() in _NOT_READ]:
        logger.info("%s: not read: %s; expected %s", setting, listed(textual, ", ", " "), _EXPECTED)
    return _each_once(files, setting)


def _each_once(files: Iterable[Path], setting: str) -> list[Path]:
    """Return files without links to those that come before them, and log the links."""
    first: dict[str, Path] = {}
    again = [f"{file} is {one}" for file in files if (one := first.setdefault(os.path.realpath(file), file)) != file]
    if again:
        logger.warning("%s: left out, because the same files are read by other paths: %s", setting, listed(again))
    return list(first.values())


def sources_of(files: Iterable[Path]) -> Iterator[Source]:
    """Yield the sources of files in their order; neighbouring text files are one, because opening one takes long."""
    for kind, neighbours in groupby(files, lambda file: KINDS[file.suffix]):
        if kind == "text":
            yield Source(kind, tuple(neighbours))
        else:
            yield from (Source(kind, (file,)) for file in neighbours)


def sample(file: Path) -> str:
    """Return a digest of the size of a file and of its first, middle and last bytes."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        for start in sorted({0, max(0, (size - _SAMPLE_BYTES) // 2), max(0, size - _SAMPLE_BYTES)}):
            stream.seek(start)
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _is_folder(path: Path, setting: str) -> bool:
    """Raises: ConfigError for what is not there or cannot be looked at."""
    try:
        path.stat()
    except FileNotFoundError:
        beside = [f"{path}{suffix}" for suffix in _TOKENS if os.path.exists(f"{path}{suffix}")]
        expected = f'expected a file, a folder, a pattern such as "data/*.jsonl", "{BUILTIN}" or "{DUMMY}"'
        raise ConfigError([f"{setting}: {path} is not there; {expected}{_hint(beside)}"]) from None
    except OSError as error:
        raise ConfigError([f"{setting}: {path} cannot be read: {error.strerror}"]) from None
    return path.is_dir()


def _inside(folders: Iterable[Path], setting: str) -> list[Path]:
    """Return the files in folders at any depth, each once. Raises: ConfigError for a folder that cannot be read."""
    try:
        return sorted({Path(file) for folder in folders for file in _files_in(_below(str(folder), set()))})
    except OSError as error:
        problem = f"{os.path.normpath(error.filename)} cannot be read: {error.strerror}; give the run the right to"
        raise ConfigError([f'{setting}: {problem}, or name files by a pattern such as "data/*.jsonl"']) from None


def _matched(pattern: str, setting: str) -> list[Path]:
    """Return the files that a pattern matches. A folder with a suffix of files, as of Spark, stands for those in it.

    Raises: ConfigError for a folder that cannot be read.
    """
    try:
        matched = [*_matches(pattern)]
    except OSError as error:
        folder = os.path.normpath(error.filename)
        raise ConfigError([f"{setting}: {folder} cannot be read: {error.strerror}"]) from None
    folders = {path for path in matched if os.path.isdir(path)}  # a link may lead to where nothing may be looked at
    inside = _inside((folder for folder in folders if folder.suffix in KINDS), setting)
    return sorted({*matched, *inside} - folders)


def _matches(pattern: str) -> Iterable[Path]:
    """Return what glob.glob(pattern, recursive=True) does, and go into no folder twice, which links may lead to.

    Raises: OSError for a folder that cannot be read; glob leaves it out.
    """
    parts = Path(pattern).parts
    is_deep = parts[-1] == "**"
    folders = [""]  # the current one
    for part in parts if is_deep else parts[:-1]:
        folders = [path for path in _step(folders, part) if os.path.isdir(path or os.curdir)]
        for folder in folders:
            os.stat(os.path.join(folder, "."))  # asks for the right to go into it
    if is_deep:
        found = [*folders, *_files_in(folders)]
    else:
        found = _step(folders, parts[-1])
    return map(Path, filter(os.path.isdir if pattern.endswith(os.sep) else None, found))


def _step(folders: Iterable[str], part: str) -> list[str]:
    """Return what one part of a pattern matches in folders."""
    if part == "**":
        seen: set[str] = set()
        return [below for folder in folders for below in _below(folder, seen)]
    if glob.has_magic(part):
        return [path for folder in folders for path in _named(folder, part)]
    return [path for folder in folders if os.path.lexists(path := os.path.join(folder, part))]


def _below(folder: str, seen: set[str]) -> Iterator[str]:
    """Yield a folder and those in it at any depth that are not hidden, each real one once."""
    todo = [folder]
    while todo:
        real = os.path.realpath(path := todo.pop())
        if real not in seen:
            seen.add(real)
            yield path
            todo += reversed([entry for entry in _named(path, "*") if os.path.isdir(entry)])


def _named(folder: str, part: str) -> list[str]:
    """Return the entries of a folder that match, in order; hidden ones only if the part begins with a dot."""
    with os.scandir(os.path.join(folder or os.curdir, "")) as entries:
        names = [entry.name for entry in entries if part.startswith(".") or not entry.name.startswith(".")]
    return [os.path.join(folder, name) for name in sorted(fnmatch.filter(names, part))]


def _files_in(folders: Iterable[str]) -> Iterator[str]:
    """Yield what is no folder and not hidden. Raises: OSError for a folder that cannot be read."""
    return (entry for folder in folders for entry in _named(folder, "*") if not os.path.isdir(entry))


def _unusable(found: Iterable[Path]) -> Iterator[str]:
    """Yield a line for each link that leads nowhere, and for each file that is none or that `datasets` cannot find."""
    for file in found:
        try:
            mode = file.stat().st_mode
        except FileNotFoundError:
            if file.is_symlink():  # anything else has just been deleted
                yield f"{file} is a link that leads nowhere; remove it, or put back what it leads to"
            continue
        except OSError as error:
            yield f"{file} cannot be read: {error.strerror}"
            continue
        if file.suffix not in KINDS:
            continue
        if not stat.S_ISREG(mode):
            yield f"{file} is no regular file; remove it, or give it another suffix"
        elif "::" in str(file.absolute()):
            yield f'{file.absolute()}: "::" in a path separates URLs for datasets, which would not find it; rename it'
