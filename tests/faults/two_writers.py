"""Two runs in one place: a predecessor that goes on saving, and a successor that loads, saves once and ends.

They are threads of this process, of which one runs at a time, and look to each other as if each was on another
machine. The predecessor runs up to one of its operations, the successor up to one of its own, then the rest of the
first, and the rest of the second. An operation is a change of a file system or a look at it, or a request to a bucket.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.faults.scenarios import SOAK
from tests.faults.shim import intercepted
from tests.world import manager as build
from titan_ckpt.config import KeepConfig, ResumeConfig
from titan_ckpt.directory import lease
from titan_ckpt.disk import posix
from titan_ckpt.disk.kernel import Holder
from titan_ckpt.errors import SaveError
from titan_ckpt.manager import CheckpointManager

PREDECESSOR, SUCCESSOR = 0, 1
_WAIT_SECONDS = 60.0
_LOOKS = ("list_folder", "read_whole")


class NeverHeld(dict[str, str]):
    """Lets a process take a lease that it has, as a process on another machine could."""

    def __contains__(self, item: object) -> bool:
        return False


class Baton:
    """Lets one of two writers run. `at`: operations of the predecessor, then of the successor, up to a switch."""

    def __init__(self, *at: int) -> None:
        self.counts = [0, 0]
        self._switches = list(at)
        self._active = PREDECESSOR
        self.is_on = False
        """Whether both are there: the predecessor has loaded."""
        self._changed = threading.Condition()

    def step(self, who: int) -> None:
        """Wait for the turn of a writer that is about to do an operation."""
        if not self.is_on:
            return
        with self._changed:
            self._wait(who)
            if self._switches and self.counts[who] == self._switches[0]:
                del self._switches[0]
                self._pass_on(who)
                self._wait(who)
            self.counts[who] += 1

    def end(self, who: int) -> None:
        """Leave the rest to the other one."""
        with self._changed:
            self._wait(who)
            self._switches.clear()
            self._pass_on(who)

    def _pass_on(self, who: int) -> None:
        self._active = 1 - who
        self._changed.notify_all()

    def _wait(self, who: int) -> None:
        if not self._changed.wait_for(lambda: self._active == who, _WAIT_SECONDS):
            raise TimeoutError(f"writer {who} never got its turn")


@dataclass
class Run:
    """The outcome of two writers: acknowledged steps, the step that the successor resumed, and errors."""

    acknowledged: list[int] = field(default_factory=list)
    resumed: int | None = None
    after: list[int] = field(default_factory=list)
    errors: list[BaseException | None] = field(default_factory=lambda: [None, None])


@dataclass(frozen=True)
class Case:
    """The acts of two writers in a folder with steps 10 and 20. `resume`, `named`: the step in each one's setting."""

    name: str
    saves: tuple[int, ...]
    resume: int | None = None
    named: int | None = None


CASES = (Case("goes on", (30, 40)), Case("went back", (15, 16), resume=10), Case("is named", (30,), named=20))
BEFORE = (10, 20)


def manager_of(folder: str, base: Path, resume: int | None = None, *, saves: bool = True) -> CheckpointManager:
    model = torch.nn.Linear(4, 4)
    save: dict[str, Any] = {"save": None}
    if saves:  # longer than a commit to a bucket may take
        save = {"async_mode": "disabled", "keep": KeepConfig(latest=2), "timeout_seconds": 600}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return build(base, model, optimizer, folder=folder, resume=ResumeConfig(step=resume), **save)


def race(baton: Baton, folders: Sequence[str], base: Path, case: Case) -> Run:
    """Let the successor start while the predecessor, which has loaded, makes its saves. `folders`: of each."""
    done, is_loaded = Run(), threading.Event()

    def precede() -> None:
        with manager_of(folders[PREDECESSOR], base, case.resume) as manager:
            manager.load()
            baton.is_on = True
            is_loaded.set()
            for step in case.saves:
                manager.save(step)
                done.acknowledged.append(step)

    def succeed() -> None:
        assert is_loaded.wait(_WAIT_SECONDS)
        with manager_of(folders[SUCCESSOR], base, case.named) as manager:
            done.resumed = manager.load().step
            manager.save(done.resumed + 1)
            done.after.append(done.resumed + 1)

    def run(who: int, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            done.errors[who] = error
        finally:
            is_loaded.set()
            baton.end(who)

    with _on_two_machines():
        threads = [threading.Thread(target=run, args=args, name=str(args[0])) for args in enumerate((precede, succeed))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return done


@contextlib.contextmanager
def _on_two_machines() -> Iterator[None]:
    current = Holder.current

    def elsewhere() -> Holder:
        here = current()
        return Holder(here.id, "elsewhere", "other-boot", "", here.pid, here.started)

    with (
        mock.patch.object(lease, "held", NeverHeld()),
        mock.patch.object(posix, "lock", return_value=None),
        mock.patch.object(Holder, "current", staticmethod(elsewhere)),
    ):
        yield


@contextlib.contextmanager
def every_operation(baton: Baton) -> Iterator[None]:
    """Let the operations on a disk of the two threads of a race take their turns; also looks, which change nothing."""

    def take_turn() -> None:
        if (name := threading.current_thread().name) in ("0", "1"):
            baton.step(int(name))

    def around(name: str, operation: Callable[..., object], args: tuple[object, ...]) -> object:
        take_turn()
        return operation(*args)

    def looking(look: Callable[..., object]) -> Callable[..., object]:
        def looked(*args: object) -> object:
            take_turn()
            return look(*args)

        return looked

    with contextlib.ExitStack() as stack:
        stack.enter_context(intercepted(around))
        for name in _LOOKS:
            stack.enter_context(mock.patch.object(posix, name, looking(getattr(posix, name))))
        yield


def positions(counts: Sequence[int], number: int) -> list[tuple[int, int]]:
    """Return pairs of operations at which the two are interrupted, which a seed draws; all pairs in the soak."""
    pairs = [(first, second) for first in range(counts[0] + 1) for second in range(counts[1] + 1)]
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    return pairs if SOAK else random.Random(seed).sample(pairs, number)


def faults_of(done: Run, case: Case, newest: int) -> list[str]:
    """Return what is wrong with a race, after which `newest` is what a third run resumes."""
    first, second = done.errors
    told = done.acknowledged
    if first is not None and not isinstance(first, SaveError):
        return [f"the predecessor failed by {first!r}"]
    if second is not None:
        is_late = told == [*case.saves] and "taken over by another process" in str(second)
        is_refused = case.named is not None and "No step was set aside" in str(second)
        if not (is_late or is_refused):  # docs/format.md, "One writer": a release that is late where no lock reaches
            return [f"the successor failed by {second!r}"]
        is_whole = newest >= max(told, default=0) or (is_late and case.named is not None)
        return [] if is_whole else [f"{newest} is newest, acknowledged were {told}"]
    legal = {told[-1]} if told else {case.resume, *BEFORE} - {None} if case.resume else {BEFORE[-1]}
    legal |= {*case.saves[len(told) : len(told) + 1]}
    if done.resumed not in ({case.named} if case.named else legal):
        return [f"resumed {done.resumed}, acknowledged were {told}"]
    return [] if newest == done.after[-1] else [f"{newest} is newest, the successor saved {done.after}"]
