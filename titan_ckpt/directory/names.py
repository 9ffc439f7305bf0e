"""Names in a checkpoint folder, and which of its folders are committed steps. Reads only.

A name is ours only if all of it matches: `old-step-3`, `step-10-backup` and `step-4.tmp` belong to somebody else.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xxhash

from titan_ckpt.directory.manifest import MANIFEST_NAME, MAX_BYTES, FileRecord, Manifest
from titan_ckpt.disk import posix
from titan_ckpt.errors import CorruptCheckpointError, listed
from titan_ckpt.stores.answers import StoreError
from titan_ckpt.stores.store import Place, may_pass, read_twice, store_of

STAGING = ".staging"
TRASH = ".trash"
PIN_NAME = "PINNED"
COMMITS = "commits"
DATA = "data"
"""In a bucket: the manifests of committed steps, and the files of all attempts."""

_Place = TypeVar("_Place", bound=Place)
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,18})")
ATTEMPT_NAME = re.compile(r"step-(?:0|[1-9][0-9]{0,18})\.[0-9a-f]{32}")
"""The name of a save in progress, in the staging folder."""
TRASHED_NAME = re.compile(r"(?:removed|dead|preflight)-step-(?:0|[1-9][0-9]{0,18})\.[0-9a-f]{32}")
"""The name of a folder being deleted, in the trash folder."""
_SET_ASIDE = re.compile(r"step-(?:0|[1-9][0-9]{0,18})\.abandoned-[0-9a-f]{8}")
NAME_IN_A_STEP = re.compile(r"MANIFEST\.json|state\.json|rank-[0-9]{5,}\.(?:safetensors|json)")
"""The name of a file that a save may have written."""
LOOKS_LIKE_A_STEP = re.compile(r"(?i).*(?:step|checkpoint|ckpt|epoch|iter)[-_.]?[0-9]+.*")
"""A name such as people or programs give to a checkpoint."""
_WAS_LEFT = "set aside when its run went back to an earlier step; `titan-ckpt prune RUN --set-aside` deletes it"
_MAX_LISTED = 10
_MAX_STATE_BYTES = 256 * 2**20
"""The limit of typed JSON, whose module imports torch: a list of steps does not wait for that."""


def step_name(step: int) -> str:
    """Return the name of a committed step's folder."""
    return f"step-{step}"


def rank_file_name(rank: int) -> str:
    """Return the name of a rank's file inside a checkpoint's folder."""
    return f"rank-{rank:05d}.safetensors"


def step_of(name: str) -> int | None:
    """Return N for the name `step-N`, None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match else None


def listed_steps(root: Path) -> list[int]:
    """Return the number of every entry named `step-N`, ascending, whether or not it is a committed step."""
    return sorted(step for name in posix.list_folder(root) if (step := step_of(name)) is not None)


def manifest_path(files: _Place) -> _Place:
    """Return where the manifest of a step is whose files are at `files`; in a bucket a run puts it apart from them."""
    if holds_attempt(files):
        step = files.parent
        return step.parent.parent / COMMITS / f"{step.name}.{files.name}.json"
    return files / MANIFEST_NAME


def holds_attempt(files: Place) -> bool:
    """Return whether a place in a bucket has the name of one attempt's files. A copied folder of a step has none."""
    place = files.parent
    return not store_of(files).is_mounted and place.parent.name == DATA and step_of(place.name) is not None


def may_be_resumed(files: Place) -> bool:
    """Return whether a step's files are where a run has saved them; a mounted file system has them under any name."""
    return store_of(files).is_mounted or holds_attempt(files)


def users_name(path: Place) -> str:
    """Return the name under which a user names a place: of an attempt's files, that of the step."""
    return str(path.parent.parent.parent / path.parent.name) if holds_attempt(path) else str(path)


def read_committed(path: Place, record: FileRecord) -> bytes:
    """Return a state file as the manifest lists it; a wrong answer is asked for again.

    Raises: CorruptCheckpointError; OSError, with EFBIG if the file is larger.
    """

    def read(path: Place) -> bytes:
        data = store_of(path).read_whole(path, min(record.num_bytes, _MAX_STATE_BYTES))
        if (digest := xxhash.xxh3_128_hexdigest(data)) != record.digest:
            raise CorruptCheckpointError(
                f"{path}: digest {digest}, {record.digest} was committed. Take another checkpoint", str(path)
            )
        return data

    return read_twice(path, read)


def is_set_aside_name(name: str) -> bool:
    """Return whether this is the name of a step that a run left when it went back to an earlier one."""
    return _SET_ASIDE.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class CommittedStep:
    """A step with a valid manifest, whose files all have the listed sizes. Digests are checked when files are read."""

    step: int
    path: Place
    """The folder or the place in a bucket that holds its files."""
    manifest: Manifest
    manifest_bytes: bytes
    foreign: tuple[str, ...]
    """Names in the folder that the manifest does not list; a step with any is never deleted."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The committed steps of a checkpoint folder, and the entries that only look like one."""

    steps: tuple[CommittedStep, ...]
    """Ascending."""
    dcp: tuple[int, ...]
    """Ascending numbers of the folders step-N that torch.distributed.checkpoint has completed, as torchtitan saves."""
    rejected: tuple[tuple[str, str], ...]
    """(name, reason) of every entry that looks like a checkpoint and is not a committed step."""
    unread: tuple[int, ...] = ()
    """Steps among them that could not be read, so that nobody knows whether they are committed."""

    def explain(self) -> str:
        """Return one indented line per rejected name."""
        lines = [f"\n  {name}: {reason}" for name, reason in self.rejected[:_MAX_LISTED]]
        more = len(self.rejected) - _MAX_LISTED
        return "".join(lines) + (f"\n  ... and {more} more" if more > 0 else "")


def survey(root: Path) -> Survey:
    """Inspect every entry of a checkpoint folder; an absent folder is empty. Raises: OSError if it cannot be listed.

    If a run that writes here deletes a step meanwhile, the folder is looked at again: the newer step, for which the
    older one made room, may not have been listed. A list that does not change comes from the cache of a network file
    system.
    """
    names = posix.list_folder(root)
    while True:
        steps: list[CommittedStep] = []
        dcp: list[int] = []
        rejected: list[tuple[str, str]] = []
        unread: list[int] = []
        is_current = True
        for name in names:
            path = root / name
            step = step_of(name)
            if step is not None and _is_dcp(path):
                dcp.append(step)
            elif step is not None:
                try:
                    steps.append(inspect(path, step, waits=()))
                except (CorruptCheckpointError, OSError) as error:
                    is_current &= os.path.lexists(path)
                    unread += [step] if may_pass(error) else []
                    rejected.append((name, str(error).removeprefix(f"{path}: ").removeprefix(f"{path}/")))
            elif not name.startswith(".") and path.is_dir() and _looks_like_a_checkpoint(path):
                rejected.append((name, _WAS_LEFT if is_set_aside_name(name) else "not named step-N"))
        now = names if is_current else posix.list_folder(root)
        if now == names:
            steps.sort(key=lambda step: step.step)
            return Survey(tuple(steps), tuple(sorted(dcp)), tuple(rejected), tuple(unread))
        names = now


def _is_dcp(path: Path) -> bool:
    if os.path.lexists(path / MANIFEST_NAME) or not posix.is_real_folder(path):
        return False
    try:
        metadata = os.stat(path / ".metadata")  # once: torchtitan's run may delete it meanwhile
    except OSError:  # also in a folder that we may not enter
        return False
    return stat.S_ISREG(metadata.st_mode) and metadata.st_size > 0


def inspect(path: Path, step: int, *, waits: Sequence[float] | None = None) -> CommittedStep:
    """Read one step's manifest and compare its files' sizes. `waits`: as in `read_twice`.

    Raises: CorruptCheckpointError naming every fault; OSError.
    """
    return read_twice(path / MANIFEST_NAME, lambda _: _inspected(path, step), waits)


def _inspected(path: Path, step: int) -> CommittedStep:
    if not posix.is_real_folder(path):
        raise CorruptCheckpointError(f"{path}: not a folder of its own, but a link or a file", str(path))
    data = read_manifest_bytes(path / MANIFEST_NAME)
    manifest = Manifest.from_bytes(data, str(path / MANIFEST_NAME))
    faults = [fault for record in manifest.files if (fault := _fault(path / record.name, record.num_bytes))]
    if manifest.step != step:
        faults.append(f"its manifest says step {manifest.step}; give the folder its name back")
    if faults:
        raise CorruptCheckpointError(f"{path}: {listed(faults, last=' ', most=_MAX_LISTED)}", str(path))
    known = {MANIFEST_NAME, *(record.name for record in manifest.files)}
    foreign = tuple(name for name in posix.list_folder(path) if name not in known)
    return CommittedStep(step, path, manifest, data, foreign)


def read_manifest_bytes(path: Place) -> bytes:
    """Read a step's manifest. Raises: CorruptCheckpointError if its folder has none; OSError."""
    try:
        return store_of(path).read_whole(path, MAX_BYTES)
    except FileNotFoundError:
        if path.name != MANIFEST_NAME:  # the commit of an attempt in a bucket: its run deletes the step
            raise
        raise CorruptCheckpointError(
            f"{path.parent}: no {path.name}: not a checkpoint of this format, or not a whole one", str(path.parent)
        ) from None
    except OSError as error:
        if isinstance(error, StoreError) or error.errno not in (errno.EINVAL, errno.EFBIG, errno.ELOOP):
            raise  # another attempt may succeed
        raise CorruptCheckpointError(
            f"{path}: not a manifest, which is a regular file of at most {MAX_BYTES} bytes: "
            f"{error.strerror}. Take another checkpoint",
            str(path),
        ) from None


def _fault(path: Path, num_bytes: int) -> str | None:
    try:
        status = os.lstat(path)
    except OSError as error:
        if may_pass(error):
            raise
        return f"{path.name}: {error.strerror}"
    if not stat.S_ISREG(status.st_mode):
        return f"{path.name}: not a regular file"
    if status.st_size != num_bytes:
        return f"{path.name}: {status.st_size} bytes, {num_bytes} were committed"
    return None


def _looks_like_a_checkpoint(path: Path) -> bool:
    if LOOKS_LIKE_A_STEP.fullmatch(path.name):
        return True
    # os.path.exists is False in a folder that we may not enter, such as lost+found at the root of a disk
    return any(os.path.exists(path / name) for name in (MANIFEST_NAME, ".metadata"))
