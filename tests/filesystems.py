"""`make filesystems`, as root: saves, loads, exports and kills on each file system that this machine can mount.

Prints the table of docs/troubleshooting.md. What cannot be mounted is "not run", with the reason below the table. Owns
the mounts, and leaves none behind. Exits with 1 if something fails on a file system that is mounted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.forked import fork
from tests.world import Run, finish, load, same, tensors, write_hf
from titan_ckpt.disk import kernel, posix
from titan_ckpt.disk.files import open_direct
from titan_ckpt.disk.kernel import ALIGNMENT, Buffer

_WIDTH = 1024
_TMPFS = ["mount", "-t", "tmpfs", "-o", "size=512m", "tmpfs"]


class NotRunError(Exception):
    """A file system that this machine cannot mount, and why."""


def _run(*command: str | Path) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise NotRunError(f"{command[0]} is not installed") from None
    if done.returncode:
        raise NotRunError(f"{command[0]}: {' '.join(done.stderr.split())}")


def _tmpfs(place: Path, _: Path, __: contextlib.ExitStack) -> None:
    _run(*_TMPFS, place)


def _ramfs(place: Path, _: Path, __: contextlib.ExitStack) -> None:
    _run("mount", "-t", "ramfs", "ramfs", place)


def _ext2(place: Path, other: Path, _: contextlib.ExitStack) -> None:
    image = other / "image"
    image.touch()
    os.truncate(image, 512 << 20)
    _run("mkfs.ext2", "-q", "-F", image)
    _run("mount", "-o", "loop", image, place)


def _overlay(place: Path, other: Path, undo: contextlib.ExitStack) -> None:
    _run(*_TMPFS, other)  # the upper folder may not be on an overlay, as that of a container is
    undo.callback(_run, "umount", other)
    for name in ("lower", "upper", "work"):
        (other / name).mkdir()
    folders = ",".join(f"{name}dir={other / name}" for name in ("lower", "upper", "work"))
    _run("mount", "-t", "overlay", "overlay", "-o", folders, place)


def _fuse(place: Path, other: Path, _: contextlib.ExitStack) -> None:
    _run("bindfs", other, place)


def _nfs(place: Path, other: Path, undo: contextlib.ExitStack) -> None:
    if "nfs" not in Path("/proc/filesystems").read_text().split():
        raise NotRunError("this kernel has no NFS client")
    _run("exportfs", "-i", "-o", "rw,no_root_squash,insecure,fsid=7", f"127.0.0.1:{other}")
    undo.callback(_run, "exportfs", "-u", f"127.0.0.1:{other}")
    _run("mount", "-t", "nfs", f"127.0.0.1:{other}", place)


_MOUNTS: dict[str, Callable[[Path, Path, contextlib.ExitStack], None]] = {
    "tmpfs": _tmpfs,
    "ramfs": _ramfs,
    "ext2": _ext2,
    "overlay on tmpfs": _overlay,
    "FUSE (bindfs)": _fuse,
    "NFS": _nfs,
}


@contextlib.contextmanager
def _mounted(name: str) -> Iterator[Path]:
    """Mount a file system in a new folder; unmount it and remove all. Raises: NotRunError."""
    with contextlib.ExitStack() as undo:
        base = Path(tempfile.mkdtemp(prefix="filesystems-"))
        undo.callback(shutil.rmtree, base)
        place, other = base / "mounted", base / "other"
        place.mkdir()
        other.mkdir()
        _MOUNTS[name](place, other, undo)
        undo.callback(_run, "umount", place)
        yield place


def _run_of(value: float) -> Run:
    """Return a run whose weights are multiples of a value."""
    run = Run(torch.nn.Linear(_WIDTH, _WIDTH))
    with torch.no_grad():
        for number, weight in enumerate(run.model.parameters()):
            weight.copy_(torch.arange(weight.numel()).view_as(weight) * value + number)
    return run


def _save(place: Path) -> None:
    for mode in ("thread", "disabled"):
        finish(_run_of(0.5).manager(place / mode, async_mode=mode))


def _load(place: Path) -> None:
    for mode in ("thread", "disabled"):
        _require(place / mode, 1, 0.5)


def _require(folder: Path, step: int, value: float) -> None:
    """Check that a resume finds this step, bit for bit."""
    run = _run_of(0.0)
    assert load(run.manager(folder)).step == step
    assert same(run.state(), _run_of(value).state())


def _export(place: Path) -> None:
    state = dict(_run_of(0.25).model.state_dict())
    write_hf(place / "export", state)
    assert same(tensors(place / "export"), state)


def _kill(place: Path) -> None:
    """Kill a process while it writes step 2; step 1 is resumed, and step 2 can be saved."""

    def killed() -> None:
        manager = _run_of(0.5).manager(place / "killed", async_mode="disabled")
        manager.load()
        manager.save(1)
        pwrite = posix.pwrite_all

        def last(fd: int, buffer: Any, offset: int) -> None:
            pwrite(fd, memoryview(buffer).cast("B")[: len(buffer) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)

        with mock.patch.object(posix, "pwrite_all", last):
            manager.save(2)

    assert os.waitstatus_to_exitcode(os.waitpid(fork(killed), 0)[1]) == -signal.SIGKILL
    _require(place / "killed", 1, 0.5)
    finish(_run_of(0.75).manager(place / "killed"), 2)
    _require(place / "killed", 2, 0.5)


def _direct(place: Path) -> bool:
    """Return whether a block can be written around the page cache."""
    (place / "direct").touch()
    fd = open_direct(place / "direct", os.O_RDWR)
    if fd < 0:
        return False
    try:
        os.pwrite(fd, Buffer.allocate(ALIGNMENT).view, 0)
    except OSError:
        return False
    finally:
        kernel.close(fd)
    return True


def _reserves(place: Path) -> bool:
    fd = posix.open_exclusive(place / "reserved")
    try:
        return posix.fallocate(fd, ALIGNMENT)
    finally:
        posix.close(fd)


def _result(act: Callable[[Path], bool | None], place: Path, problems: list[str]) -> str:
    try:
        found = act(place)
    except Exception as error:
        problems.append(f"{act.__name__.strip('_')}: {type(error).__name__}: {error}")
        return "FAILED"
    return {None: "yes", True: "yes", False: "no"}[found]


def main() -> int:
    """Print the table. Returns: 1 if something has failed."""
    acts = (_save, _load, _export, _kill, _direct, _reserves)
    failed, notes = False, []
    print("| file system | save | load | export | kill | direct writes | fallocate |\n|---|---|---|---|---|---|---|")
    for name in _MOUNTS:
        problems: list[str] = []
        try:
            with _mounted(name) as place:
                results = [_result(act, place, problems) for act in acts]
        except NotRunError as error:
            results = ["not run"] * len(acts)
            notes.append(f"{name}: not run: {error}")
        failed = failed or bool(problems)
        notes += [f"{name}: {problem}" for problem in problems]
        print("|", " | ".join([name, *results]), "|", flush=True)
    print("\n" + "\n".join(notes))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
