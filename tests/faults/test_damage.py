"""Flipped bits, cut and deleted files, swapped files, stale listings: noticed before a value is used, or harmless."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.scenarios import SOAK, quick_folder
from tests.faults.small_checkpoints import load
from tests.faults.writers import DirectoryWriter, ManagerWriter, NaiveWriter, Save, Writer
from titan_ckpt.disk import posix
from titan_ckpt.errors import CorruptCheckpointError

FLIPS = 10_000 if SOAK else 2000
STEPS: tuple[Save, ...] = ((10, 1), (20, 2))


def loaded(writer: Writer, root: Path) -> Save | str | None:
    """Load; return what a typed refusal says instead of raising it."""
    try:
        return writer.load(root)
    except CorruptCheckpointError as error:
        return f"refused: {error}"


def flips(writer: Writer, number: int) -> Iterator[str]:
    """Flip one random bit of the newest step at a time; yield each that was not noticed."""
    choose = random.Random(0)
    with quick_folder() as folder:
        writer.run(folder, STEPS, lambda _: None, keep=None)
        files = sorted((folder / "step-20").iterdir())
        for _ in range(number):
            path = choose.choice(files)
            original = path.read_bytes()
            bit = choose.randrange(8 * len(original))
            changed = bytearray(original)
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            try:
                found = loaded(writer, folder)
            except Exception as error:
                yield f"bit {bit} of {path.name}: {type(error).__name__}: {error}"
            else:
                if found not in (STEPS[0], STEPS[1]):
                    yield f"bit {bit} of {path.name}: loaded {found}"
                elif found == STEPS[1]:
                    yield f"bit {bit} of {path.name}: not noticed"
            path.write_bytes(original)
        assert writer.load(folder) == STEPS[1]


@pytest.mark.parametrize(
    ("writer", "share"), [(DirectoryWriter(), 0.75), (ManagerWriter("disabled"), 0.25)], ids=["directory", "manager"]
)
def test_every_flipped_bit_is_noticed(writer: Writer, share: float) -> None:
    """With any one bit wrong the newest step is refused and the one before it loaded."""
    assert list(flips(writer, int(FLIPS * share))) == []


def test_the_matrix_catches_a_writer_without_digests() -> None:
    """The same flips go unnoticed by the naive writer, or break it: the matrix can fail."""
    assert len(list(flips(NaiveWriter(), 100))) > 50


@pytest.mark.parametrize("writer", [DirectoryWriter(), ManagerWriter("disabled")], ids=lambda writer: writer.name)
def test_every_cut_and_deleted_file_is_noticed(writer: Writer) -> None:
    """Each file cut at many lengths, emptied, extended, deleted, or made a folder: the step before is loaded."""
    with quick_folder() as folder:
        writer.run(folder, STEPS, lambda _: None, keep=None)
        for path in sorted((folder / "step-20").iterdir()):
            original = path.read_bytes()
            sizes = sorted({0, 1, 2, len(original) // 2, len(original) - 1, *range(0, len(original), 97)})
            for size in sizes:
                path.write_bytes(original[:size])
                assert writer.load(folder) == STEPS[0], f"{path.name} cut to {size}"
            path.write_bytes(original + b"\0")
            assert writer.load(folder) == STEPS[0], f"{path.name} extended"
            path.unlink()
            assert writer.load(folder) == STEPS[0], f"{path.name} deleted"
            path.mkdir()
            assert writer.load(folder) == STEPS[0], f"{path.name} a folder"
            path.rmdir()
            os.mkfifo(path)
            assert writer.load(folder) == STEPS[0], f"{path.name} a pipe"
            path.unlink()
            path.write_bytes(original)
        assert writer.load(folder) == STEPS[1]


@pytest.mark.parametrize("writer", [DirectoryWriter(), ManagerWriter("disabled")], ids=lambda writer: writer.name)
def test_files_of_another_step_are_noticed(writer: Writer) -> None:
    """A file, a manifest, or a whole folder taken from another save of the same run is not taken for its own."""
    with quick_folder() as folder:
        writer.run(folder, STEPS, lambda _: None, keep=None)
        for name in sorted(os.listdir(folder / "step-20")):
            original = (folder / "step-20" / name).read_bytes()
            if original == (folder / "step-10" / name).read_bytes():
                continue  # A rank's random state, say, may be the same in both.
            shutil.copyfile(folder / "step-10" / name, folder / "step-20" / name)
            assert writer.load(folder) == STEPS[0], name
            (folder / "step-20" / name).write_bytes(original)
        shutil.rmtree(folder / "step-20")
        shutil.copytree(folder / "step-10", folder / "step-20")
        assert writer.load(folder) == STEPS[0]


def test_when_nothing_is_left_the_run_does_not_start_afresh() -> None:
    """Both steps damaged: an error that names both, not step 0."""
    with quick_folder() as folder:
        DirectoryWriter().run(folder, STEPS, lambda _: None, keep=None)
        for step, _ in STEPS:
            os.truncate(folder / f"step-{step}" / "state.json", 1)
        with pytest.raises(CorruptCheckpointError, match=r"(?s)step-10: .*state\.json.*step-20: .*state\.json"):
            load(folder)


def test_stale_listings_show_older_steps_but_never_torn_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing from an earlier moment, as network file systems give: what is loaded is whole, what is gone skipped."""
    writer = DirectoryWriter()
    real = posix.list_folder
    history: list[dict[str, list[str]]] = []
    with quick_folder() as folder:
        saves = [(10 * step, step) for step in range(1, 8)]
        for save in saves:
            writer.run(folder, [save], lambda _: None, keep=3)
            history.append({str(path): real(path) for path in (folder, folder / ".trash", folder / ".staging")})
        for moment in history:
            monkeypatch.setattr(posix, "list_folder", lambda path, moment=moment: moment.get(str(path), real(path)))
            found = loaded(writer, folder)
            if isinstance(found, tuple):
                assert found in saves[-3:]
            else:
                assert isinstance(found, str), "a fresh start beside committed steps"
        monkeypatch.undo()


def test_a_writer_with_a_stale_listing_overwrites_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that sees neither newer steps nor its own step's folder still cannot replace a committed one."""
    writer = DirectoryWriter()
    with quick_folder() as folder:
        writer.run(folder, STEPS, lambda _: None, keep=None)
        before = (folder / "step-20" / "MANIFEST.json").read_bytes()
        monkeypatch.setattr(os.path, "lexists", lambda path: False)
        exists = Path.exists
        monkeypatch.setattr(Path, "exists", lambda self: self.name != "step-20" and exists(self))
        with pytest.raises(OSError, match=r"step 20 was not saved: .*File exists"):
            writer.run(folder, [(20, 7)], lambda _: None)
        monkeypatch.undo()
        assert (folder / "step-20" / "MANIFEST.json").read_bytes() == before
        assert writer.load(folder) == (20, 2)
