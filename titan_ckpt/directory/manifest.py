"""MANIFEST.json: metadata of a committed step, the list of its files, and a digest of the manifest itself.

Owns the schema (docs/format.md, "MANIFEST.json") and its strict reading. The manifest lists files only; the rank files
say where each tensor is, so that the manifest stays small with 50,000 tensors and with 1,000 ranks. Touches no folder.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from typing import Any, Literal, NoReturn, cast, get_args

import xxhash

from titan_ckpt.config import Component
from titan_ckpt.encoding.strict_json import Json, as_int, as_list, as_str, parse, to_text
from titan_ckpt.errors import CorruptCheckpointError, StateEncodingError, listed

MANIFEST_NAME = "MANIFEST.json"
"""The file that makes a folder a committed step."""
MAX_BYTES = 32 * 2**20
MAX_METRICS = 1_000
SCHEMA_VERSION = 1
Kind = Literal["full", "adapter", "model", "external"]

_FORMAT = "titan_ckpt"
_MAX_ENTRIES = 100_000
_MAX_TEXT = 1_000_000
_RANK_FILE = re.compile(r"rank-(\d{5,})\.(safetensors|json)")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_SEAL = re.compile(rb',\n"digest": "([0-9a-f]{32})"\n\}\n\Z')


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A committed file of a checkpoint: its name in the folder, size in bytes and xxh3-128 hex digest."""

    name: str
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Metadata of one committed step; `converters`, `base` and `resumed_from` are plain JSON."""

    step: int
    kind: Kind
    """full: resumes by itself; adapter: resumes over its base; model: weights only, never resumed;
    external: everything but the weights, which come from outside the run's checkpoints. Only `external` lacks them."""
    attempt: str
    """Id of the save, 32 hex digits; tells two saves of the same step apart."""
    world_size: int
    created_unix_seconds: float
    components: tuple[str, ...]
    converters: list[dict[str, Any]]
    base: dict[str, Any] | None
    resumed_from: dict[str, Any] | None
    files: tuple[FileRecord, ...]
    metrics: dict[str, float] = field(default_factory=dict)
    """Finite values that the run passed with this save, for retention of the best steps."""
    allowed: tuple[str, ...] = ()
    """Names of classes that the run's settings allow although their state is not saved; written only if there are any.
    """
    schema_version: int = SCHEMA_VERSION

    def to_bytes(self) -> bytes:
        """Return the file's bytes: JSON with one field or file per line, then the digest of all preceding bytes.

        Raises: StateEncodingError if a field would not be read back unchanged.
        """
        values: dict[str, Any] = {"format": _FORMAT, "schema_version": self.schema_version}
        values |= {f.name: getattr(self, f.name) for f in fields(self) if f.name not in values}
        if not self.allowed:
            del values["allowed"]
        values["files"] = "FILES"
        try:
            lines = ",\n".join(f"{to_text(name)}: {to_text(value)}" for name, value in values.items())
            files = ",\n".join(" " + to_text(asdict(record)) for record in self.files)
            body = ("{\n" + lines.replace('"files": "FILES"', f'"files": [\n{files}\n]')).encode()
        except (TypeError, ValueError) as error:
            raise StateEncodingError(f"{MANIFEST_NAME} of step {self.step}: not plain JSON: {error}") from None
        data = body + f',\n"digest": "{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'.encode()
        self._prove(data)
        return data

    def _prove(self, data: bytes) -> None:
        try:
            same = Manifest.from_bytes(data) == self
        except CorruptCheckpointError as error:
            raise StateEncodingError(f"{MANIFEST_NAME} of step {self.step} would be refused: {error}") from None
        if not same:
            raise StateEncodingError(
                f"{MANIFEST_NAME} of step {self.step}: converters, base and resumed_from must be plain JSON (lists, "
                "not tuples; text keys)"
            )

    @staticmethod
    def from_bytes(data: bytes, path: str = MANIFEST_NAME) -> Manifest:
        """Parse a manifest's bytes; `path` names the file in errors.

        Raises: CorruptCheckpointError and nothing else, whatever the bytes are.
        """
        seal = _SEAL.search(data[-64:]) if len(data) <= MAX_BYTES else None
        if seal is None:
            _refuse(path, f"it has no seal at its end, or more than {MAX_BYTES} bytes")
        body = data[: len(data) - len(seal.group())]
        actual = xxhash.xxh3_128_hexdigest(body)
        expected = seal.group(1).decode()
        if actual != expected:
            _refuse(path, f"its digest is {actual}, {expected} was committed")
        document = parse(data, MAX_BYTES, path)
        try:
            return _validate(document)
        except (TypeError, ValueError) as error:
            _refuse(path, str(error))


def _refuse(path: str, cause: str) -> NoReturn:
    raise CorruptCheckpointError(f"{path}: not a manifest of this format: {cause}", path)


def _validate(document: Json) -> Manifest:
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise ValueError(f'expected an object with "format": "{_FORMAT}"')
    version = document.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise ValueError(
            f"schema_version {version!r:.40} is not {SCHEMA_VERSION}: take the titan_ckpt version that wrote it"
        )
    expected = {"format", "digest", *_READERS} - ({"allowed"} - document.keys())
    if document.keys() != expected:
        raise ValueError(f"fields {sorted(document.keys() ^ expected)} are missing or unknown")
    values: dict[str, Any] = {}
    for name, read in _READERS.items():
        if name not in document:
            continue
        try:
            values[name] = read(document[name])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from None
    manifest = Manifest(**values)
    if (manifest.kind == "external") is ("model" in manifest.components):
        raise ValueError(f"kind {manifest.kind!r} with components {', '.join(manifest.components)}")
    _check_ranks(manifest)
    return manifest


def _check_ranks(manifest: Manifest) -> None:
    """Raise ValueError unless there is one tensor file, and one state file, of each rank, or none of any."""
    ranks: dict[str, set[int]] = {}
    for match in filter(None, (_RANK_FILE.fullmatch(record.name) for record in manifest.files)):
        ranks.setdefault(match[2], set()).add(int(match[1]))
    for kind, numbers in ranks.items():
        foreign = [f"rank-{rank:05d}.{kind}" for rank in sorted(numbers) if rank >= manifest.world_size]
        num_missing = manifest.world_size - (len(numbers) - len(foreign))
        if num_missing or foreign:  # the manifest may claim any number of ranks: not all that lack are walked through
            lacking = (rank for rank in range(manifest.world_size) if rank not in numbers)
            missing = [f"rank-{rank:05d}.{kind}" for rank in islice(lacking, min(num_missing, 8))]
            missing += [f"and {num_missing - 8} more"] * (num_missing > 8)
            faults = [f"lacks {', '.join(missing)}"] if missing else []
            faults += [f"lists {listed(foreign, ', ', ' ')}"] if foreign else []
            raise ValueError(f"world_size is {manifest.world_size}, and files {' and '.join(faults)}")


def _natural(least: int, most: int) -> Callable[[Json], int]:
    def read(value: Json) -> int:
        number = as_int(value)
        if not least <= number <= most:
            raise ValueError(f"expected {least} to {most}, found {number!r:.40}")
        return number

    return read


def _metrics(value: Json) -> dict[str, float]:
    if not isinstance(value, dict) or len(value) > MAX_METRICS:
        raise ValueError(f"expected an object of at most {MAX_METRICS} numbers")
    for name, number in value.items():
        if type(number) is not float or not math.isfinite(number):
            raise ValueError(f"{name!r:.80}: expected a finite number with a point, found {number!r:.40}")
    return value  # type: ignore[return-value]


def _kind(value: Json) -> Kind:
    if value not in get_args(Kind):
        raise ValueError(f"expected one of {get_args(Kind)}, found {value!r:.80}")
    return cast(Kind, value)


def _digest(value: Json) -> str:
    if not _DIGEST.fullmatch(as_str(value)):
        raise ValueError(f"expected 32 hexadecimal digits, found {value!r:.80}")
    return as_str(value)


def _seconds(value: Json) -> float:
    if not isinstance(value, float) or not 0 <= value < math.inf:
        raise ValueError(f"expected seconds, found {value!r:.80}")
    return value


def _components(value: Json) -> tuple[str, ...]:
    names = tuple(as_str(name) for name in as_list(value))
    if len(set(names)) != len(names) or not all(0 < len(name) <= 200 for name in names):
        raise ValueError("expected names, each once")
    if unknown := [name for name in names if name not in get_args(Component)]:
        raise ValueError(
            f"this version knows no {', '.join(unknown):.200}; it restores {', '.join(get_args(Component))}: take the "
            "titan_ckpt version that wrote it"
        )
    return names


def _names(value: Json) -> tuple[str, ...]:
    names = tuple(as_str(name) for name in as_list(value))
    if not 0 < len(names) <= 1000 or len(set(names)) != len(names) or not all(0 < len(name) <= 1000 for name in names):
        raise ValueError("expected 1 to 1000 names, each once")
    return names


def _object(value: Json) -> dict[str, Any]:
    if not isinstance(value, dict) or len(json.dumps(value)) > _MAX_TEXT:
        raise TypeError(f"expected an object, found {value!r:.80}")
    return value


def _converters(value: Json) -> list[dict[str, Any]]:
    converters = [_object(item) for item in as_list(value)]
    for converter in converters:
        if not isinstance(converter.get("kind"), str):
            raise TypeError(f"a converter without a kind: {converter!r:.80}")
    return converters


def _base(value: Json) -> dict[str, Any] | None:
    if value is None:
        return None
    base = _object(value)
    if base.keys() - {"merged", "dtype"} != {"path", "revision", "format", "digest"}:
        raise ValueError(f"expected path, revision, format and digest, found {', '.join(base):.80}")
    if not all(text is None or isinstance(text, str) for name, text in base.items() if name != "merged"):
        raise TypeError(f"expected texts or null, found {base!r:.200}")
    if "merged" in base:
        base["merged"] = [as_str(path) for path in as_list(base["merged"])]
    return {**base, "digest": base["digest"] if base["digest"] is None else _digest(base["digest"])}


def _resumed_from(value: Json) -> dict[str, Any] | None:
    if value is None:
        return None
    source = _object(value)
    if source.keys() not in ({"step", "attempt"}, {"step", "path"}):
        raise ValueError(f"expected step, and attempt or path, found {', '.join(source):.80}")
    step = _natural(0, 2**63 - 1)(source["step"])
    return {name: step if name == "step" else as_str(item) for name, item in source.items()}


def _files(value: Json) -> tuple[FileRecord, ...]:
    records = tuple(_file(item) for item in as_list(value))
    if not 0 < len(records) <= _MAX_ENTRIES or len({record.name for record in records}) != len(records):
        raise ValueError(f"expected 1 to {_MAX_ENTRIES} files, each once")
    return records


def _file(value: Json) -> FileRecord:
    if not isinstance(value, Mapping) or value.keys() != {"name", "num_bytes", "digest"}:
        raise TypeError(f"expected name, num_bytes and digest, found {value!r:.80}")
    name = as_str(value["name"])
    if not _FILE_NAME.fullmatch(name) or name == MANIFEST_NAME:
        raise ValueError(f"{name!r:.80} cannot be a file of a step")
    return FileRecord(name, _natural(0, 2**63 - 1)(value["num_bytes"]), _digest(value["digest"]))


_READERS: dict[str, Callable[[Json], Any]] = {
    "step": _natural(0, 2**63 - 1),
    "kind": _kind,
    "attempt": _digest,
    "world_size": _natural(1, 2**24),
    "created_unix_seconds": _seconds,
    "components": _components,
    "converters": _converters,
    "base": _base,
    "resumed_from": _resumed_from,
    "files": _files,
    "metrics": _metrics,
    "allowed": _names,
    "schema_version": as_int,
}
