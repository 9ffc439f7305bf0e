"""The laws of places that hold bytes as a test class. Inherit it to test a store. Knows no particular store."""

from __future__ import annotations

import errno
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import TestCase

from titan_ckpt.config import ExportConfig
from titan_ckpt.directory.directory import CheckpointDirectory
from titan_ckpt.directory.manifest import FileRecord, Manifest
from titan_ckpt.directory.steps import Attempt
from titan_ckpt.disk.kernel import Buffer
from titan_ckpt.disk.workers import run_workers
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import CommitConflictError, SaveError
from titan_ckpt.formats.publish.publication import published
from titan_ckpt.formats.publish.record import exports_at
from titan_ckpt.stores.store import Place, Store, store_of

_raises = TestCase().assertRaisesRegex
_ALONE = Coordinator(0, 1, None, "", 0.0)
_DATA = bytes(range(251)) * 40_000
"""Ten megabytes whose every stretch says where it is."""
_SEALED = str(len(_DATA)).encode().ljust(4096) + _DATA
_MANY = 8
_PATIENCE_SECONDS = 60.0


class _File:
    """A file with a head of one block, which is the number of bytes that were seen."""

    start = 4096

    def __init__(self, *, is_live: bool = True) -> None:
        self.num_bytes = self.start + len(_DATA)
        self._is_live = is_live
        self._seen = 0
        self._lock = threading.Lock()

    def pieces(self, start: int, stop: int) -> nullcontext[memoryview]:
        buffer = Buffer.allocate(-(-(stop - start) // 4096) * 4096)
        buffer.view[: stop - start] = _DATA[start:stop]
        return nullcontext(buffer.view)

    def views(self, start: int, stop: int) -> Sequence[memoryview] | None:
        return [memoryview(_DATA)[start:stop]] if self._is_live and start % (8 << 20) else None

    def see(self, views: Sequence[memoryview], start: int) -> None:
        for view in views:
            assert view == _DATA[start : start + len(view)]
            start += len(view)
        with self._lock:
            self._seen += sum(map(len, views))

    def seal(self) -> bytes:
        return str(self._seen).encode().ljust(self.start)


class StoreTests(ABC):
    """Tests of every law. Inherit from it, name the subclass Test..., and define `make_place`."""

    @abstractmethod
    def make_place(self) -> Place:
        """Return a place in the store where nothing is, another one at each call; its parent may be written to."""

    def _begin(self) -> tuple[Store, Place]:
        place = self.make_place()
        store = store_of(place)
        store.put_companion(place / "first", b"")  # a bucket's folder is there when something is in it
        store.remove([place / "first"])
        return store, place

    def test_a_small_file_is_put_once_and_read_whole(self) -> None:
        """Who comes second is told, and changes nothing; a file that is larger than expected is not read."""
        store, place = self._begin()
        store.put_new(place / "a.json", b"first")
        with _raises(FileExistsError, ""):
            store.put_new(place / "a.json", b"second")
        assert store.read_whole(place / "a.json", 5) == b"first"
        assert store.read_whole(place / "a.json", 9, through_links=True) == b"first"
        assert store.size(store.seen(place) / "a.json") == 5
        with _raises(OSError, "larger than 4 bytes") as caught:
            store.read_whole(place / "a.json", 4)
        assert caught.exception.errno == errno.EFBIG

    def test_what_is_not_there_is_said_so(self) -> None:
        """Each way of reading names the place."""
        store, place = self._begin()
        for read in (store.open, store.size, lambda path: store.read_whole(path, 9)):
            with _raises(FileNotFoundError, r"none\.json"):
                read(place / "none.json")
        assert not (place / "none.json").exists() and not (place / "none").is_dir()
        assert store.names_in(place / "none") == [] and store.folder_bytes(place / "none") == 0
        store.remove([place / "none.json"])

    def test_a_listing_shows_what_is_there(self) -> None:
        """Names, kinds, sizes and patterns of files at once, and of those in a folder below."""
        store, place = self._begin()
        store.put_companion(place / "b.json", b"1")
        with TemporaryDirectory() as folder:
            Path(folder, "c.txt").write_bytes(b"22")
            store.put_companion(place / "deep" / "c.txt", Path(folder, "c.txt"))
        seen = store.seen(place)
        assert store.names_in(place) == ["b.json", "deep"] == sorted(path.name for path in seen.iterdir())
        assert (seen / "b.json").is_file() and (seen / "deep").is_dir() and seen.is_dir() and seen.exists()
        assert not (seen / "b.json").is_dir() and not (seen / "deep").is_file()
        assert [str(path) for path in seen.glob("deep/*.txt")] == [f"{place}/deep/c.txt"]
        assert (seen / "deep" / "c.txt").suffix == ".txt" and (seen / "deep").parent.name == place.name
        assert store.folder_bytes(place) == 3
        assert store.holds(place, "deep/c.txt") and not store.holds(place, "../c.txt") and not store.holds(place, "/c")
        store.remove([place / "b.json", place / "none"])
        assert store.names_in(place) == ["deep"]

    def test_a_name_is_not_what_begins_with_it(self) -> None:
        """The store lists, measures and removes step-1 without step-10; it removes several files at once."""
        store, place = self._begin()
        names = ("step-1", "step-10", "a b", "x%20y", "\u00fc~+&=\u65e5")
        for number, name in enumerate(names, 1):
            store.put_companion(place / name / "x.json", bytes(number))
        assert store.names_in(place) == sorted(names) and store.seen(place / "step").exists() is False
        for number, name in enumerate(names, 1):
            assert store.names_in(place / name) == ["x.json"] and store.folder_bytes(place / name) == number
            assert [path.name for path in store.seen(place / name).iterdir()] == ["x.json"]
            assert store.read_whole(place / name / "x.json", number) == bytes(number)
        store.put_new(place / "step-1" / "x.json.bak", b"")
        store.remove([place / name / "x.json" for name in names if name != "step-10"])
        assert store.names_in(place / "step-1") == ["x.json.bak"]
        assert [store.folder_bytes(place / name) for name in names] == [0, 2, 0, 0, 0]

    def test_one_of_many_puts_a_file(self) -> None:
        """All of them come at the same time, and the others are told."""
        store, place = self._begin()
        together, won = threading.Barrier(_MANY), list[int]()

        def put(number: int) -> None:
            together.wait()
            with suppress(FileExistsError):
                store.put_new(place / "a.json", str(number).encode())
                won.append(number)

        run_workers(range(_MANY), put, _MANY)
        assert [store.read_whole(place / "a.json", 9)] == [str(number).encode() for number in won]

    def test_a_file_is_written_and_read_at_offsets(self) -> None:
        """Every way of reading gives the same bytes, and says where a file ends."""
        store, place = self._begin()
        with store.new_file(place / "f.bin", len(_DATA)) as file:
            for start in range(0, len(_DATA), 1_000_003):
                file.write(memoryview(_DATA)[start : start + 1_000_003], start)
            file.finish(len(_DATA))
        reader = store.open(place / "f.bin")
        buffer = Buffer.allocate(1 << 20)
        assert reader.num_bytes == len(_DATA) and reader.read(7, 9) == _DATA[7:16]
        assert reader.read(len(_DATA) - 3, 9) == _DATA[-3:]
        assert reader.view(5, 3 << 20) == _DATA[5:][: 3 << 20] and reader.view(8192, 5000) == _DATA[8192:13192]
        for read in (reader.read_aligned, reader.read_again):
            read(buffer.view, 4096, 9999)
            assert buffer.view[:9999] == _DATA[4096:14095]
        reader.fetch(1 << 20, 2 << 20)
        for first in (0, 1 << 20, 5 << 20):
            reader.read_into([buffer.view[:10], buffer.view[10:5000]], first)
            assert buffer.view[:5000] == _DATA[first : first + 5000]
        end = len(_DATA) // 4096 * 4096
        for read_past in (
            lambda: reader.read_into([buffer.view[:9]], len(_DATA) - 3),
            lambda: reader.view(len(_DATA) - 3, 9),
            lambda: reader.view(0, len(_DATA) + 1),
            lambda: reader.read_aligned(buffer.view, end, 4097),
            lambda: reader.read_again(buffer.view, end, 4097),
        ):
            with _raises(EOFError, r"f\.bin"):
                read_past()
        assert reader.read(len(_DATA) + 5, 9) == b""
        reader.close()
        again = store.open(store.afresh(place / "f.bin"))
        assert again.read(0, len(_DATA)) == _DATA
        again.close()

    def test_a_file_that_is_replaced_while_it_is_open_is_read_as_it_was_or_not_at_all(self) -> None:
        """The new one is shorter: nobody gets fewer bytes than asked for, or bytes of something else."""
        store, place = self._begin()
        with store.new_file(place / "f.bin", len(_DATA)) as file:
            file.write(memoryview(_DATA), 0)
            file.finish(len(_DATA))
        reader = store.open(place / "f.bin")
        store.remove([place / "f.bin"])
        store.put_companion(place / "f.bin", bytes(4 << 20))
        with suppress(EOFError):
            assert reader.view((4 << 20) - 9, 99) == _DATA[(4 << 20) - 9 :][:99]
        reader.close()

    def test_a_file_that_is_not_finished_is_given_up(self) -> None:
        """An upload that nobody finishes leaves nothing, whatever was sent of it; a folder keeps such a file."""
        store, place = self._begin()
        with store.new_file(place / "f.bin", len(_DATA)) as file:
            file.write(memoryview(_DATA), 0)
        file.close()
        assert store.is_mounted or store.names_in(place) == []

    def test_a_file_is_sealed_when_all_of_it_was_seen(self) -> None:
        """Its head comes from its rest, whichever the store writes first."""
        store, place = self._begin()
        store.write_sealed(place / "r.bin", _File(), 2)
        assert _content(place / "r.bin") == _SEALED
        if not store.is_mounted:  # then there is memory for one of its two parts
            vars(store).update(part_mib=5, concurrency=2)
        sealing = threading.Thread(
            target=store.write_sealed, args=(place / "s.bin", _File(is_live=False), 2), daemon=True
        )
        sealing.start()
        sealing.join(_PATIENCE_SECONDS)
        assert not sealing.is_alive(), "upload keeps a part that it has put: its memory is waited for"
        assert _content(place / "s.bin") == _SEALED

    def test_small_files_are_put_beside_work(self) -> None:
        """The value of the work comes back, and so does its error."""
        store, place = self._begin()
        assert store.put_beside([(place / "x.json", b"x"), (place / "y.json", b"y")], lambda: 3) == 3
        assert store.names_in(place) == ["x.json", "y.json"]
        with _raises(ZeroDivisionError, ""):
            store.put_beside([(place / "z.json", b"z")], lambda: 1 // 0)

    def test_a_step_is_there_whole_or_not_at_all(self) -> None:
        """An attempt that is given up, or lacks a file, leaves no step; one writer at a time commits."""
        root = self.make_place()
        directory = CheckpointDirectory(root, _ALONE)
        directory.preflight(0)  # a bucket is asked whether it refuses what it must
        given_up = directory.begin(1)
        _write(given_up)
        assert CheckpointDirectory(root, _ALONE).steps() == []
        directory.abandon(given_up)
        with _raises(SaveError, r"state\.json is missing"):
            hollow = directory.begin(1)
            directory.commit(hollow, _manifest(hollow))
        attempt = directory.begin(1)
        _write(attempt)
        directory.commit(attempt, _manifest(attempt))
        with _raises(CommitConflictError, "already writes here"):
            CheckpointDirectory(root, _ALONE).begin(2)
        directory.close()
        other = CheckpointDirectory(root, _ALONE)
        assert other.steps() == [1] and other.committed(1)[0].attempt == attempt.id
        with _raises(CommitConflictError, "committed already"):
            other.begin(1)
        other.close()

    def test_a_folder_is_published_whole_or_not_at_all(self) -> None:
        """Its last file makes it loadable; a name that is taken is refused."""
        store, place = self._begin()
        with _raises(ZeroDivisionError, ""), published(place / "step-1", _ALONE, "", lambda: None) as made:
            made.put_last("config.json", b"{}")
            raise ZeroDivisionError
        assert not (place / "step-1" / "config.json").exists()
        with published(place / "step-1", _ALONE, "", lambda: None) as made:
            store.put_companion(made.path / "weights.txt", b"w")
            made.put_last("config.json", b"{}")
            assert store.read_whole(made.as_source() / "config.json", 9) == b"{}"
            assert not (place / "step-1" / "config.json").exists()
        assert store.read_whole(place / "step-1" / "config.json", 9) == b"{}"
        assert exports_at(place).steps_there(ExportConfig("hf", folder=".")) == [1]
        with _raises(FileExistsError, "is there already"), published(place / "step-1", _ALONE, "", lambda: None):
            raise AssertionError("nothing is written")


def _content(place: Place) -> bytes:
    reader = store_of(place).open(place)
    try:
        return reader.read(0, reader.num_bytes)
    finally:
        reader.close()


def _write(attempt: Attempt) -> None:
    store_of(attempt.path).put_new(attempt.path / "state.json", b"{}")


def _manifest(attempt: Attempt) -> Manifest:
    return Manifest(
        step=attempt.step,
        kind="model",
        attempt=attempt.id,
        world_size=1,
        created_unix_seconds=0.0,
        components=("model",),
        converters=[],
        base=None,
        resumed_from=None,
        files=(FileRecord("state.json", 2, "0" * 32),),
    )
