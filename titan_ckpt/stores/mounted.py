"""Posix: a mounted file system as a Store; its places are `pathlib.Path`s. Changes files by `disk.posix` alone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TypeVar

from titan_ckpt.disk import posix
from titan_ckpt.disk.files import IO_BYTES, FileReader, FileWriter, Reader, Writer
from titan_ckpt.disk.kernel import Buffer
from titan_ckpt.encoding.paths import hub_folder
from titan_ckpt.stores.settings import StoreConfig
from titan_ckpt.stores.store import Place, Sealed, Store

_Value = TypeVar("_Value")


class Posix(Store):
    """The file systems of this machine."""

    settings = StoreConfig()
    is_mounted = True

    def seen(self, place: Path, made: Mapping[str, bytes] | None = None) -> Path:
        return hub_folder(place)

    def afresh(self, place: Path) -> Path:
        """Let the page cache forget the file. Pages that were changed and not yet written stay: the disk lacks them."""
        try:
            fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:  # the second read will meet it
            return place
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:  # not a regular file
            pass
        finally:
            os.close(fd)
        return place

    def open(self, place: Path, *, through_links: bool = False) -> Reader:
        return FileReader(Path(os.path.realpath(place)) if through_links else place)

    def size(self, place: Path) -> int:
        return place.stat().st_size

    def read_whole(self, place: Path, max_bytes: int, *, through_links: bool = False) -> bytes:
        return posix.read_whole(os.path.realpath(place) if through_links else place, max_bytes)

    def names_in(self, place: Path) -> list[str]:
        return posix.list_folder(place)

    def folder_bytes(self, place: Path) -> int:
        """Return the bytes of all files in a folder; those that are gone meanwhile do not count."""
        total = 0
        for parent, _, files in os.walk(place):
            for name in files:
                with contextlib.suppress(OSError):
                    total += Path(parent, name).lstat().st_size
        return total

    def holds(self, folder: Path, name: str) -> bool:
        target = folder / PurePosixPath(name)
        return target.resolve().is_relative_to(folder.resolve()) and not target.is_symlink()

    def misses(self, place: Path, *, folder: bool = False) -> bool:
        return not (place.is_dir() if folder else place.exists())

    def new_file(self, place: Path, about_bytes: int) -> Writer:
        return FileWriter.create(place)

    def write_sealed(self, place: Path, file: Sealed, num_workers: int) -> None:
        """Write the rest while it is in the processor's cache, and then the head. Its entry is not durable yet."""
        from titan_ckpt.disk.workers import run_workers  # imports torch, and a list of steps does not wait for it

        end = file.num_bytes - file.start

        with FileWriter.create(place, file.num_bytes) as writer:

            def write_piece(start: int) -> None:
                stop = min(start + IO_BYTES, end)
                with file.pieces(start, stop) as view:
                    file.see([view[: stop - start]], start)
                    writer.write(view, file.start + start)

            run_workers(range(0, end, IO_BYTES), write_piece, num_workers)
            head = file.seal()
            aligned = Buffer.allocate(len(head))
            aligned.view[:] = head
            writer.write(aligned.view, 0)
            writer.finish(file.num_bytes)

    def put_new(self, place: Path, data: bytes) -> None:
        posix.write_file(place, data)

    def put_beside(self, files: Sequence[tuple[Path, bytes]], work: Callable[[], _Value]) -> _Value:
        value = work()
        for place, data in files:
            posix.write_file(place, data)
        return value

    def put_companion(self, place: Path, content: bytes | Place) -> None:
        """Write the content, or copy the bytes of a file, but no metadata; a link becomes a file."""
        if not place.parent.exists():
            posix.mkdir(place.parent)
        if not isinstance(content, bytes) and not (store := store_of(content)).is_mounted:
            # one answer is of one object, and ranges may be of two
            content = store.read_whole(content, store.size(content))
        if isinstance(content, bytes):
            posix.write_file(place, content)
            return
        with contextlib.closing(store_of(content).open(content, through_links=True)) as file:
            posix.write_blocks(place, (file.read(at, IO_BYTES) for at in range(0, file.num_bytes, IO_BYTES)))

    def remove(self, places: Sequence[Path]) -> None:
        for place in places:
            with contextlib.suppress(FileNotFoundError):
                posix.unlink(place)


POSIX = Posix()


def store_of(place: Place) -> Store:
    """Return the store that a place is in."""
    store: Store = getattr(place, "bucket", POSIX)
    return store


def local_path(place: Place) -> Path | None:
    """Return the path by which other programs and libraries open a place; None where they cannot."""
    return place if isinstance(place, Path) else None
