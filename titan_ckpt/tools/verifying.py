"""Whether a checkpoint of any format is whole. Native steps have digests; of other formats the structure is checked.

Every byte is read, so that a bad sector shows; memory is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from titan_ckpt import progress
from titan_ckpt.converting import native_tensors, stored_tensor
from titan_ckpt.directory.manifest import MANIFEST_NAME, MAX_BYTES, FileRecord, Manifest
from titan_ckpt.directory.names import manifest_path, read_committed, read_manifest_bytes
from titan_ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    KeyMapError,
    NotACheckpointError,
    counted,
)
from titan_ckpt.formats.huggingface.peft import PeftReader, check_adapter
from titan_ckpt.formats.huggingface.reader import HuggingFaceReader
from titan_ckpt.formats.native.reader import NativeReader
from titan_ckpt.formats.open import detect_format, locate, open_reader
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.stores.answers import StoreError
from titan_ckpt.stores.store import Place, may_pass, read_twice, store_of
from titan_ckpt.tools.models import CONFIG, find_table


@dataclass(frozen=True, slots=True)
class Verified:
    """A checkpoint that is whole. `checks`: what was checked, one sentence each."""

    path: str
    format: str
    num_tensors: int
    num_bytes: int
    checks: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """Remarks that do not make the checkpoint damaged."""


def verify(place: Place) -> Verified:
    """Check a checkpoint, on a mounted file system or in a bucket.

    Raises: CorruptCheckpointError, or the format's own CheckpointError, listing all that is damaged;
    CheckpointNotFoundError; NotACheckpointError for what is no checkpoint.
    """
    path = locate(place)
    if detect_format(path) == "native":
        return _native(path, str(place))
    with open_reader(path) as reader:
        total = sum(info.nbytes for info in reader.tensors.values())
        with progress.shown("verifying", total) as count:
            faults = [*_unreadable(reader, count)]
        notes: list[str] = []
        checks = ["every tensor is read whole; this format has no digests"]
        if isinstance(reader, HuggingFaceReader):
            checks.insert(0, "the index, the headers and the sizes of all files agree")
            faults += _not_of_config(reader, checks, notes)
        elif isinstance(reader, PeftReader):
            faults += check_adapter(reader.tensors, reader.metadata())
            checks.insert(0, "adapter_config.json and the pairs of factors agree")
        else:
            checks.insert(0, "the stored chunks of every tensor cover it exactly once")
        if faults:
            lines = "\n  ".join(faults)
            raise CorruptCheckpointError(f"{place} is not whole\n  {lines}", str(place))
        return Verified(str(place), reader.format, len(reader.tensors), total, tuple(checks), tuple(notes))


def _native(path: Place, name: str) -> Verified:
    num_files, num_bytes, foreign = verify_step(path)
    with open_reader(path, "native") as reader:
        num_tensors = len(reader.tensors)
    checks = (
        f"every digest of {counted(num_files, 'file')} holds",
        "the stored chunks of every tensor cover it exactly once",
    )
    notes = (f"also there, and no part of the step: {', '.join(foreign)}",) if foreign else ()
    return Verified(name, "native", num_tensors, num_bytes, checks, notes)


def verify_step(folder: Place) -> tuple[int, int, list[str]]:
    """Check every file of a step, and that the chunks of every tensor cover it exactly once.

    Return the number of its files, their bytes, and the names in its folder that are no part of it, such as PINNED: no
    reader looks at them.
    Raises: CorruptCheckpointError listing every file and tensor that is not as it was committed;
    CheckpointNotFoundError if the step went away meanwhile, as one that expires does.
    """
    place = manifest_path(folder)
    manifest = read_twice(place, lambda path: Manifest.from_bytes(read_manifest_bytes(path), str(path)))
    states = [record for record in manifest.files if not record.name.endswith(".safetensors")]
    problems = [fault for record in states if (fault := _state_fault(folder / record.name, record))]
    try:
        with (
            NativeReader(folder) as reader,
            progress.shown("verifying", sum(info.nbytes for info in reader.tensors.values())) as count,
        ):
            reader.verify(count)
    except CorruptCheckpointError as error:
        problems.append(str(error))
    if problems:
        try:
            store_of(place).read_whole(place, MAX_BYTES)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(
                f"{folder} went away while it was verified: the run expired it, or somebody moved it. "
                "Pin a step before you verify it (`titan-ckpt pin`), or verify a newer one"
            ) from error
        lines = "\n  ".join(problems)
        raise CorruptCheckpointError(f"{folder} is not as it was committed\n  {lines}", str(folder))
    names = {MANIFEST_NAME, *(record.name for record in manifest.files)}
    foreign = [name for name in store_of(folder).names_in(folder) if name not in names]
    return len(manifest.files), sum(record.num_bytes for record in manifest.files), foreign


def _state_fault(path: Place, record: FileRecord) -> str | None:
    """Return what is wrong with a state file, or None."""
    try:
        read_committed(path, record)
    except CorruptCheckpointError as error:
        return str(error)
    except OSError as error:
        if isinstance(error, StoreError) or may_pass(error):
            raise
        return f"{path}: {error.strerror}"
    return None


def _unreadable(reader: TensorReader, count: progress.Count) -> Iterator[str]:
    """Read every tensor and yield a line for each that cannot be read."""
    for key in reader.tensors:
        try:
            for block in stored_tensor(reader, key).blocks():
                count(block.data.nbytes)
        except (StoreError, PermissionError):  # a bucket without an answer, and a lack of rights, say nothing
            raise
        except (CheckpointError, OSError) as error:
            yield f"{key}: {error}"


def _not_of_config(reader: HuggingFaceReader, checks: list[str], notes: list[str]) -> Iterator[str]:
    """Compare the tensors with the model of config.json: yield what is missing, unknown or of a wrong shape."""
    folder = reader.path if reader.path.is_dir() else reader.path.parent
    if not (folder / CONFIG).is_file():
        notes.append(f"there is no {CONFIG}, so whether tensors are missing cannot be told")
        return
    if "quantization_config" in reader.metadata():
        notes.append("the weights are quantized: codes and scales are complete")
    try:
        table = find_table(folder)
        found = native_tensors(reader, table.key_map)
    except ConfigError as error:
        notes.append(f"not compared with {CONFIG}: {'; '.join(error.problems)}")
        return
    except (KeyMapError, NotACheckpointError) as error:
        yield f"{CONFIG}: {error}"
        return
    checks.append(f"the tensors are those of the model in {CONFIG} ({table.architecture})")
    yield from table.misfits(found)
