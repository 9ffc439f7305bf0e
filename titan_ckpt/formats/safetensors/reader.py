"""Safetensors files, open to be read: which file holds a key, and where. All formats that store plain files share it.

Owns no I/O: the engine (formats/reading) reads the slices that are planned here. Knows no folder and no index.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

from titan_ckpt.disk.files import Reader
from titan_ckpt.errors import CorruptCheckpointError, listed
from titan_ckpt.formats.reading.engine import SliceFill
from titan_ckpt.formats.reading.slices import Slice
from titan_ckpt.formats.safetensors.container import Entry, SafetensorsHeader
from titan_ckpt.gc_paused import gc_paused
from titan_ckpt.geometry.requests import FilePart
from titan_ckpt.stores.mounted import store_of
from titan_ckpt.stores.store import Place


class SafetensorsFiles:
    """Open safetensors files whose headers were checked before. Each key is in one file."""

    def __init__(self, headers: Sequence[SafetensorsHeader]) -> None:
        """Index the files' keys. Raises: CorruptCheckpointError if two files hold one key."""
        self._files: dict[Place, Reader] = {}
        self._lock = threading.Lock()
        self._places: dict[str, tuple[SafetensorsHeader, Entry]] = {}
        faults = []
        for header in headers:
            for key, entry in header.entries.items():
                if key in self._places:
                    faults.append(f"{key} is in {self._places[key][0].path.name} and in {header.path.name}")
                self._places[key] = (header, entry)
        if faults:
            folder = headers[0].path.parent
            raise CorruptCheckpointError(f"{folder}: {len(faults)} tensor(s) twice: {listed(faults)}", str(folder))
        self._headers = headers

    @property
    def entries(self) -> Mapping[str, Entry]:
        return {key: entry for key, (_, entry) in self._places.items()}

    def read(self, requests: Sequence[FilePart]) -> None:
        """Fill every request. Several threads may call it. Raises: as `plan`, and as the function that it returns."""
        self.plan(requests)()

    @gc_paused()
    def plan(self, requests: Sequence[FilePart]) -> SliceFill:
        """Open the files of all requests; return the function that fills them.

        Raises: CorruptCheckpointError if a file has changed since its header was read; OSError. The function raises
        CorruptCheckpointError if a file ends early; OSError.
        """
        slices: dict[Place, list[Slice]] = {}
        for key, chunk, into in requests:
            header, entry = self._places[key]
            if chunk.numel:
                box = None if chunk.sizes == entry.info.shape else chunk
                made = Slice(key, entry.start, entry.info.shape, entry.info.dtype, box, into.detach())
                slices.setdefault(header.path, []).append(made)
                self._open(header)
        of_files = [(self._files[path], None, of_file) for path, of_file in slices.items()]
        return SliceFill(of_files, f"loading {self._headers[0].path.parent.name}")

    def open(self, keys: Iterable[str]) -> None:
        """Open the files of these tensors. Raises: CorruptCheckpointError if one has changed since; OSError."""
        for key in keys:
            self._open(self._places[key][0])

    def _open(self, header: SafetensorsHeader) -> None:
        with self._lock:
            if header.path not in self._files:
                # download caches hold links to their files
                file = store_of(header.path).open(header.path, through_links=True)
                if file.num_bytes != header.num_bytes:
                    file.close()
                    raise CorruptCheckpointError(f"{header.path}: it has changed since it was opened", str(header.path))
                self._files[header.path] = file

    def close(self) -> None:
        """Close all files; idempotent."""
        for file in self._files.values():
            file.close()
        self._files = {}
