"""Comparing every byte of a committed step with the digests of its manifest. Loads nothing into a model."""

from __future__ import annotations

from pathlib import Path

import xxhash

from titan_ckpt.directory.manifest import MANIFEST_NAME, MAX_BYTES, FileRecord, Manifest
from titan_ckpt.disk import posix
from titan_ckpt.disk.direct import FileReader
from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.formats.native.reader import read_header


def verify_files(folder: Path) -> tuple[int, int]:
    """Check every file of a step against its manifest; return the number of files and their bytes.

    Raises: CorruptCheckpointError listing every file that is missing or changed, with the first bad byte range.
    """
    manifest = Manifest.from_bytes(posix.read_whole(folder / MANIFEST_NAME, MAX_BYTES), str(folder / MANIFEST_NAME))
    problems = [problem for record in manifest.files if (problem := _fault(folder / record.name, record))]
    expected = {MANIFEST_NAME, *(record.name for record in manifest.files)}
    problems += [f"{name}: was not committed" for name in posix.list_folder(folder) if name not in expected]
    if problems:
        lines = "\n  ".join(problems)
        raise CorruptCheckpointError(f"{folder}: {len(problems)} file(s) differ\n  {lines}", str(folder))
    return len(manifest.files), sum(record.num_bytes for record in manifest.files)


def _fault(path: Path, record: FileRecord) -> str | None:
    """Return what is wrong with a file, or None."""
    try:
        file = FileReader(path)
    except (OSError, CorruptCheckpointError) as error:
        return f"{path.name}: {error}"
    try:
        if file.num_bytes != record.num_bytes:
            return f"{path.name}: {file.num_bytes} bytes, {record.num_bytes} were committed"
        if path.suffix != ".safetensors":
            digest = xxhash.xxh3_128_hexdigest(file.read(0, file.num_bytes))
            return None if digest == record.digest else f"{path.name}: digest {digest}, {record.digest} was committed"
        header = read_header(file)
        if header.digest != record.digest:
            return f"{path.name}: header digest {header.digest}, {record.digest} was committed"
        for block, start in enumerate(range(0, header.data_bytes, header.block_bytes)):
            data = file.read(header.data_start + start, min(header.block_bytes, header.data_bytes - start))
            if xxhash.xxh3_128_hexdigest(data) != header.block_digest(block):
                return f"{path.name}: bytes {start} to {start + len(data)} of its data are not what was committed"
    except CorruptCheckpointError as error:
        return f"{path.name}: {error}"
    finally:
        file.close()
    return None
