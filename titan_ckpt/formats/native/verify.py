"""Comparing every byte of a committed step with what was committed. Loads nothing into a model.

The reader checks the tensors' files, as a load does; this module checks the manifest and the state files.
"""

from __future__ import annotations

from titan_ckpt import progress
from titan_ckpt.directory.manifest import MANIFEST_NAME, MAX_BYTES, FileRecord, Manifest
from titan_ckpt.directory.names import manifest_path, read_committed, read_manifest_bytes
from titan_ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from titan_ckpt.formats.native.reader import NativeReader
from titan_ckpt.stores.answers import StoreError
from titan_ckpt.stores.mounted import store_of
from titan_ckpt.stores.second_look import may_pass, read_twice
from titan_ckpt.stores.store import Place


def verify_step(folder: Place) -> tuple[int, int, list[str]]:
    """Check every file of a step, and that the chunks of every tensor cover it exactly once.

    Return the number of its files, their bytes, and the names in its folder that are no part of it, such as PINNED: no
    reader looks at them.
    Raises: CorruptCheckpointError listing every file and tensor that is not as it was committed;
    CheckpointNotFoundError if the step went away meanwhile, as one that expires does.
    """
    place = manifest_path(folder)

    def look(place: Place) -> Manifest:
        return Manifest.from_bytes(read_manifest_bytes(place), str(place))

    manifest = read_twice(place, look)
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
