"""Interrupts in the waits of a manager, at every bytecode of them; then the run goes on, as a notebook does."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import titan_ckpt
from tests.faults.shim import intercepted
from titan_ckpt.config import CheckpointConfig, ExportConfig, SaveConfig
from titan_ckpt.errors import CheckpointError
from titan_ckpt.formats.native.segments import Segments
from titan_ckpt.manager import CheckpointManager

PACKAGE = str(Path(titan_ckpt.__file__).parent)


class Interrupt:
    """Raises KeyboardInterrupt in this thread before the n-th bytecode of the package that the block runs."""

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.seen += 1
            if self.seen == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace

    def around(self, act: Callable[[], object]) -> bool:
        """Return whether `act` was interrupted."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            act()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


@contextmanager
def slow(gate: threading.Event) -> Iterator[None]:
    """Let copies and writes begin only when the gate is open."""
    fill = Segments.fill

    def late(*arguments: Any) -> None:
        gate.wait(60)
        fill(*arguments)

    def write(name: str, operation: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if name == "pwrite_all" and threading.current_thread() is not threading.main_thread():
            gate.wait(60)
        return operation(*arguments)

    with pytest.MonkeyPatch.context() as patch, intercepted(write):
        patch.setattr(Segments, "fill", late)
        yield


class Notebook:
    """A run of which cells are interrupted; it knows the weights of every step that it has saved."""

    def __init__(self, folder: Path, mode: Any, *, exports: bool = False) -> None:
        self.folder = folder
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        config = CheckpointConfig(
            save=SaveConfig(interval=1, async_mode=mode),
            export=(ExportConfig("dcp", interval=1),) if exports else (),
        )
        self.manager = CheckpointManager(
            config, model_parts=[self.model], optimizers=[self.optimizer], base_folder=folder
        )
        self.wanted: dict[int, Any] = {}

    def train(self) -> None:
        for p in self.model.parameters():
            p.grad = torch.ones_like(p)
        self.optimizer.step()

    def save(self, step: int) -> None:
        self.wanted[step] = copy.deepcopy(self.model.state_dict())
        self.manager.save(step)

    def check(self, steps: set[int]) -> None:
        """Compare the committed steps with what was live when they were saved."""
        names = {int(path.name.removeprefix("step-")) for path in (self.folder / "checkpoints").glob("step-*")}
        assert names == steps
        other = nn.Linear(3, 2)
        with CheckpointManager(CheckpointConfig(), model_parts=[other], base_folder=self.folder) as reader:
            for step in steps:
                reader.load(step)
                assert all(torch.equal(v, self.wanted[step][n]) for n, v in other.state_dict().items()), step


WAITS: dict[str, Callable[[Notebook], object]] = {
    "optimizer.step": lambda run: run.optimizer.step(),
    "maybe_wait_for_staging": lambda run: run.manager.maybe_wait_for_staging(),
    "wait": lambda run: run.manager.wait(),
    "close": lambda run: run.manager.close(),
    "next save": lambda run: run.manager.save_step(titan_ckpt.saving.saver.DueSave(1)),
}


def test_an_interrupt_at_any_bytecode_of_a_wait_leaves_the_save_known(tmp_path: Path) -> None:
    """The step in flight is committed with its own weights, the run goes on, and the next steps are exact."""
    for name, wait in WAITS.items():
        if name == "next save":
            continue
        at, is_over = 1, False
        while not is_over:
            folder = tmp_path / f"{name}-{at}"
            run, gate = Notebook(folder, "thread"), threading.Event()
            with slow(gate):
                run.train()
                run.save(1)
                for p in run.model.parameters():
                    p.grad = torch.ones_like(p)
                opens = threading.Timer(0.02, gate.set)
                opens.start()
                is_over = not Interrupt(at).around(lambda run=run, wait=wait: wait(run))
                opens.join()
            with suppress(CheckpointError):  # an interrupt after the last step of close
                run.train()
                run.save(2)
                run.train()
                run.manager.wait()
            run.manager.close()
            run.check(set(run.wanted) if not run.manager._closed or 2 in run.wanted else {1})
            at += 7
