"""Situations a save can be killed in, what may be loaded afterwards, and how that is judged."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from tests.faults.shim import KillAt, Moment, intercepted
from tests.faults.writers import Save, Writer
from tests.forked import fork
from titan_ckpt.directory.lease import LEASE_NAME
from titan_ckpt.directory.names import survey

SOAK = os.environ.get("TITAN_CKPT_SOAK") == "1"


@dataclass(frozen=True)
class Scenario:
    """Steps that are there, then one process that goes on."""

    name: str
    before: tuple[Save, ...]
    saves: tuple[Save, ...]
    resume: int | None = None

    def prepare(self, writer: Writer, root: Path) -> None:
        if self.before:
            writer.run(root, self.before, lambda _: None, keep=None)

    @property
    def least(self) -> int:
        """How many valid steps there must be at any moment, with keep = 2 and less an abandoned branch."""
        return min(2, len([step for step, _ in self.before if self.resume is None or step <= self.resume]))

    def legal(self, acknowledged: Sequence[Save]) -> set[Save | None]:
        """Return what a resume may find: the last acknowledged save, or the one under way, whole.

        Until a rollback's first save is acknowledged, its abandoned branch is still a legal place to resume from.
        """
        done = len(acknowledged)
        under_way: set[Save | None] = set(self.saves[done : done + 1])
        if done:
            return {self.saves[done - 1], *under_way}
        if self.resume is not None:
            return under_way | {save for save in self.before if save[0] >= self.resume}
        return {self.before[-1] if self.before else None, *under_way}


FRESH = Scenario("fresh", (), ((10, 1),))
NEXT = Scenario("next", ((10, 1), (20, 2)), ((30, 3),))
REWRITE = Scenario("rewrite", ((10, 1), (20, 2)), ((20, 3),))
"""A step that is saved again, for the naive writer alone: ours refuse it."""
ROLLBACK = Scenario("rollback", ((10, 1), (20, 2), (30, 3)), ((20, 4), (30, 5)), resume=10)
SEVERAL = Scenario("several", ((10, 1),), ((20, 2), (30, 3), (40, 4)))
SCENARIOS = (FRESH, NEXT, ROLLBACK, SEVERAL)


def judge(writer: Writer, root: Path, legal: set[Save | None], least: int = 0) -> str | None:
    """Resume, then save and resume again; return what is wrong, None if nothing is.

    `legal` is what the resume may find, `least` how many valid steps there must be.
    """
    try:
        found = writer.load(root)
    except BaseException as error:
        return f"load failed: {type(error).__name__}: {error}"
    if found not in legal:
        return f"loaded {found}, legal were {sorted(legal, key=str)}"
    if (root / LEASE_NAME).exists() and len(survey(root).steps) < least:
        return f"{len(survey(root).steps)} valid steps are left of {least}"
    following = (1000, 99)
    try:
        writer.run(root, [following], lambda _: None, resume=found[0] if found else None)
        again = writer.load(root)
    except BaseException as error:
        return f"going on failed: {type(error).__name__}: {error}"
    if again != following:
        return f"went on, and loaded {again}"
    left = [str(path) for name in (".staging", ".trash") for path in (root / name).glob("*")]
    return f"left behind: {left}" if left else None


@contextmanager
def quick_folder() -> Iterator[Path]:
    """Yield a folder in memory where there is one: being killed does not depend on the disk, only its speed does."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="titan_ckpt-", dir=memory if memory.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def copy_of(prepared: Path) -> Iterator[Path]:
    """Yield a copy, in memory, of a folder that cases begin with."""
    with quick_folder() as folder:
        yield shutil.copytree(prepared, folder, symlinks=True, dirs_exist_ok=True)


def kill_at(ordinal: int, act: Callable[[], object], moment: Moment = "before") -> None:
    """Run `act` in a process of its own, which is killed at one operation; fail if it was not reached."""

    def killed() -> None:
        with intercepted(KillAt(ordinal=ordinal, moment=moment)):
            act()

    status = os.waitpid(fork(killed), 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (ordinal, status)


def run_killed(
    writer: Writer,
    scenario: Scenario,
    root: Path,
    around: Callable[..., object] | None,
    meanwhile: Callable[[int], None] = lambda pid: None,
) -> tuple[list[Save], bool]:
    """Run the scenario's saves in a process of its own; return what it acknowledged and whether it ended by itself."""
    read, write = os.pipe()

    def acknowledge(save: Save) -> None:
        os.write(write, json.dumps(save).encode() + b"\n")

    def run() -> None:
        with intercepted(around) if around else nullcontext():
            writer.run(root, scenario.saves, acknowledge, scenario.resume)

    pid = fork(run)
    os.close(write)
    meanwhile(pid)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(read) as pipe:
        step_values = [json.loads(line) for line in pipe]
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0, f"{scenario.name} of {writer.name} ended with status {status}"
    return [(step, value) for step, value in step_values], not killed
