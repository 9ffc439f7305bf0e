"""Reading a committed step whole to hold every byte against what was committed. Loads nothing into a model."""

from __future__ import annotations

from pathlib import Path

import xxhash

from titan_ckpt import posix
from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.manifest import MANIFEST_NAME, MAX_BYTES, Manifest
from titan_ckpt.storage.base import FileRecord
from titan_ckpt.storage.engine import FileReader
from titan_ckpt.storage.native_header import header_bytes, parse_header


def verify_files(folder: Path) -> tuple[int, int]:
    """Check every file of a step against its manifest; return their number and bytes.

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
            found = xxhash.xxh3_128_hexdigest(file.read(0, file.num_bytes))
            return None if found == record.digest else f"{path.name}: digest {found}, {record.digest} was committed"
        header = parse_header(
            file.read(0, header_bytes(file.read(0, 8), file.num_bytes, str(path))), file.num_bytes, str(path)
        )
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
