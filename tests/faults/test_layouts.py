"""Random folders full of valid, torn and foreign things: nothing foreign is touched, nothing valid lost."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.faults.power import Tree, read_tree
from tests.faults.scenarios import SOAK, quick_folder
from tests.faults.small_checkpoints import commit_step, load, open_directory
from tests.faults.writers import NaiveWriter
from titan_ckpt.config import KeepConfig
from titan_ckpt.directory.directory import CheckpointDirectory
from titan_ckpt.directory.manifest import MANIFEST_NAME
from titan_ckpt.errors import CommitConflictError, CorruptCheckpointError

TORN = ("no manifest", "cut", "missing file", "link", "foreign step", "bad manifest")
FOREIGN_NAMES = st.sampled_from(
    (
        "old-step-3",
        "step-10-backup",
        "step-4.tmp",
        "step-99-backup",
        "step-007",
        "STEP-5",
        "logs",
        "step-5.abandoned-00000000",
    )
) | st.from_regex(r"\A(step|ckpt)?[-_. ]?[a-z0-9]{1,6}(-old|\.bak|~)?\Z").filter(
    lambda name: name not in (".", "..") and not (name.startswith("step-") and name[5:].isdigit())
)


@dataclass(frozen=True)
class Layout:
    """The content of a folder before a save."""

    valid: frozenset[int]
    torn: dict[int, str]
    foreign: dict[str, str]
    keep: int
    resume: int | None


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Draw a folder."""
    steps = draw(st.lists(st.integers(0, 12), unique=True, max_size=8))
    torn = {step: draw(st.sampled_from(TORN)) for step in steps if draw(st.integers(0, 2)) == 0}
    valid = frozenset(steps) - torn.keys()
    foreign = draw(st.dictionaries(FOREIGN_NAMES, st.sampled_from(("copy", "folder", "file", "link")), max_size=4))
    resume = draw(st.sampled_from([None, *sorted(valid)]))
    return Layout(valid, torn, foreign, draw(st.integers(1, 3)), resume)


@pytest.fixture(scope="module")
def template() -> Path:
    """Committed steps 0 to 12, made once."""
    folder = Path(os.environ.get("TMPDIR", "/tmp"), f"titan_ckpt-layouts-{os.getpid()}")
    shutil.rmtree(folder, ignore_errors=True)
    directory = open_directory(folder)
    for step in range(13):
        commit_step(directory, step, value=step)
    directory.close()
    return folder


def build(root: Path, layout: Layout, template: Path) -> Tree:
    """Make the folder, and return everything in it that is not ours."""
    root.mkdir()
    for step in sorted(layout.valid | layout.torn.keys()):
        shutil.copytree(template / f"step-{step}", root / f"step-{step}")
    for step, how in layout.torn.items():
        spoil(root / f"step-{step}", how, template)
    for name, kind in layout.foreign.items():
        for place in (root, root / ".staging", root / ".trash"):
            place.mkdir(exist_ok=True)
            if kind == "copy":
                shutil.copytree(template / "step-3", place / name)
            elif kind == "folder":
                (place / name).mkdir()
            elif kind == "file":
                (place / name).write_text(name)
            else:
                (place / name).symlink_to(template)
    return {
        path: data
        for path, data in visible(root).items()
        if not path.startswith("step-") or path.split("/")[0] in layout.foreign
    }


def visible(root: Path) -> Tree:
    """Read a folder without following links."""
    return {
        path: (os.readlink(root / path).encode() if (root / path).is_symlink() else data)
        for path, data in read_tree(root).items()
        if not any((root / parent).is_symlink() for parent in list(Path(path).parents)[:-1])
    }


def spoil(path: Path, how: str, template: Path) -> None:
    """Make a step one that is none."""
    if how == "no manifest":
        (path / MANIFEST_NAME).unlink()
    elif how == "cut":
        os.truncate(path / "state.json", 5)
    elif how == "missing file":
        (path / "rank-00000.safetensors").unlink()
    elif how == "bad manifest":
        (path / MANIFEST_NAME).write_bytes(b"{}")
    else:
        shutil.rmtree(path)
        if how == "link":
            path.symlink_to(template / path.name)
        else:
            path.mkdir()
            (path / ".metadata").write_bytes(b"dcp")


@settings(max_examples=10_000 if SOAK else 1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(layout=layouts())
def test_random_folders(template: Path, layout: Layout) -> None:
    """Load, go on, save, expire, clear up: foreign things stay byte for byte, min(k, valid) steps or more remain."""
    with quick_folder() as folder:
        root = folder / "checkpoints"
        foreign = build(root, layout, template)
        looks_like = bool(layout.torn) or any(kind in ("copy", "folder", "link") for kind in layout.foreign.values())
        if layout.valid:
            assert load(root) == (max(layout.valid), max(layout.valid))
        elif layout.torn:
            with pytest.raises(CorruptCheckpointError):
                load(root)
        elif not looks_like:
            assert load(root) is None
        resumed = layout.resume if layout.resume is not None else max(layout.valid, default=-1)
        following = resumed + 5
        directory = open_directory(root)
        directory.resume_from(resumed)
        refusal = refused(directory, following)
        if refusal is not None:
            assert {layout.torn.get(step) for step in range(resumed, 20)} & {"link", "foreign step", "no manifest"}
            directory.close()
            assert {path: visible(root).get(path) for path in foreign} == foreign
            return
        directory.expire(KeepConfig(latest=layout.keep))
        directory.close()
        assert load(root) == (following, following)
        remaining = {int(name[5:]) for name in os.listdir(root) if name.startswith("step-") and name[5:].isdigit()}
        kept_valid = remaining & ({step for step in layout.valid if step <= resumed} | {following})
        assert len(kept_valid) >= min(layout.keep, len({step for step in layout.valid if step <= resumed}) + 1)
        after = visible(root)
        assert {path: after.get(path) for path in foreign} == foreign
        for step, how in layout.torn.items():
            aside = [name for name in os.listdir(root) if name.startswith(f"step-{step}.abandoned-")]
            assert step in remaining or aside or how == "link", f"torn step {step} is gone"


def refused(directory: CheckpointDirectory, step: int) -> CommitConflictError | None:
    """Save a step, or return why something foreign of its name keeps it from being saved."""
    try:
        commit_step(directory, step, value=step)
    except CommitConflictError as error:
        return error
    return None


def test_a_naive_purge_deletes_what_is_not_its_own() -> None:
    """Purging by pattern takes a backup and a user's folder with it: what is compared above can be lost."""
    with quick_folder() as folder:
        for name in ("old-step-3", "step-10-backup"):
            (folder / name).mkdir()
        NaiveWriter().run(folder, [(20, 1), (30, 2), (40, 3)], lambda _: None, keep=2)
        assert not (folder / "old-step-3").exists()
        assert not (folder / "step-10-backup").exists()
