"""Run: one rank of a program, and the model of what is right.

Owns a tiny model, its optimizer and its manager, and a copy of the whole state at every call of save() and export().
tests/format_programs read the folder; they know this package's format from its documentation alone.
"""

from __future__ import annotations

import copy
import gc
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import schedulefree
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from tests.format_programs import read_step
from tests.hunt.programs import UNSEEN, Act, Program
from tests.hunt.slow import Slow, background_threads, interrupted
from tests.world import differing, same
from titan_ckpt import CheckpointConfig, CheckpointManager, ExportConfig, SaveConfig
from titan_ckpt.errors import CheckpointError, HalfLoadedError, PeerError

TIMEOUT_SECONDS = 8.0

Values = dict[str, torch.Tensor]


_FAILED = object()


class WrongError(Exception):
    """A promise was broken."""


class OutOfStepError(Exception):
    """A rank was interrupted or left behind, so that the ranks can no longer act together: the program ends."""


@dataclass(frozen=True)
class Reference:
    """The state of the run at one call of save() or export()."""

    nonce: int
    """Different after every act; the run keeps it among its counters."""
    values: Values
    settings: dict[str, Any]
    """Settings of the optimizer's group, and the number of steps that torch counts per parameter."""


class Net(nn.Module):
    """One tensor of four pieces, one of another dtype, small ones, and a buffer."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Parameter(torch.arange(32_768.0).view(256, 128) / 1000)
        self.low = nn.Parameter(torch.arange(1001.0).to(torch.bfloat16))
        self.biases = nn.ParameterList(torch.arange(3.0) + n for n in range(5))
        self.register_buffer("mean", torch.zeros(7))


class Own(torch.optim.Optimizer):
    """An optimizer of a user, of which nobody knows when it changes the weights."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.mul_(0.9).add_(p.grad)
                p.sub_(average, alpha=group["lr"])


class Counters:
    """State that a user keeps beside the model: counters, and the average of a weight."""

    def __init__(self, big: torch.Tensor) -> None:
        self.step = self.nonce = 0
        self.average = big.detach().clone() + 1

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "nonce": self.nonce, "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.nonce = state["step"], state["nonce"]
        self.average = state["average"].clone()


def _optimizer(name: str, net: Net) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(net.parameters(), lr=0.1)
    if name == "sgd":
        return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if name == "own":
        return Own(net.parameters())
    optimizer: torch.optim.Optimizer = schedulefree.AdamWScheduleFree(net.parameters(), lr=0.1)
    optimizer.train()  # type: ignore[attr-defined]
    return optimizer


class Run:
    """One rank of a program, in a folder."""

    def __init__(self, program: Program, folder: Path, rank: int, slow: Slow) -> None:
        self.program, self.folder, self.rank, self.slow = program, folder, rank, slow
        self.clock = self.branch = 0
        self.references: dict[int, list[Reference]] = {}
        """By step: the states that a committed step or an export may hold now."""
        self.abandoned: dict[int, list[Reference]] = {}
        """The same of the branch that a rollback left. They are whole, and may be there, until the next commit."""
        self.started: tuple[int, int] | None = None
        """Step and nonce of the save that has returned True and was not waited for."""
        self.exporting: list[int] = []
        """Steps of exports that are due by a call that has returned, and were not waited for."""
        self.may_fail = False
        """Whether weights changed since the newest save, or it or a wait was interrupted: it may fail, by name."""
        self.may_be_half_loaded = False
        self.may_be_out_of_step = self.is_out_of_step = False
        """Whether one of two ranks was interrupted, and whether an error has told that they cannot go on together."""
        self.checked: set[tuple[int, int]] = set()
        """Committed steps that were compared, which never change."""
        self.exports: dict[tuple[str, int], Values] = {}
        self.children: list[tuple[int, bool]] = []
        self.build()
        self.call(self.manager.load)
        self.step()
        self.step()  # after one, schedulefree's weights are the same in both modes

    # the user's process

    def build(self) -> None:
        self.net = Net()
        self.optimizer = _optimizer(self.program.optimizer, self.net)
        self.counters = Counters(self.net.big)
        save = SaveConfig(interval=1, async_mode=self.program.mode, timeout_seconds=TIMEOUT_SECONDS)
        self.manager = CheckpointManager(
            CheckpointConfig(save=save, export=(ExportConfig("dcp", interval=1),)),
            model_parts=[self.net],
            optimizers=[self.optimizer],
            states={"counters": self.counters},
            base_folder=self.folder,
        )

    def step(self) -> None:
        if self.program.optimizer == "schedulefree" and not self.optimizer.param_groups[0]["train_mode"]:
            self.change(self.optimizer.train)  # type: ignore[attr-defined]
        for n, p in enumerate(self.net.parameters()):
            p.grad = torch.sin(p.detach() * 1e3 + self.counters.step + n + 0.1 * self.branch)
        if self.call(self.optimizer.step) is _FAILED:  # by the save in flight: the step comes now
            self.call(self.optimizer.step)
        self.counters.step += 1
        self.net.mean += 1

    def change(self, act: Callable[[], object]) -> None:
        """Change weights without a step."""
        if self.manager.in_flight is not None:
            self.may_fail = True
        with torch.no_grad():
            act()

    def write(self, way: str) -> None:
        big = self.net.big
        values = torch.full_like(big, float(self.clock)) + torch.arange(128.0) / 1000
        if f"write:{way}" in UNSEEN and self.program.optimizer in ("adamw", "sgd"):
            self.call(self.manager.maybe_wait_for_staging)
        self.change(
            {
                "copy_": lambda: big.copy_(values),
                "data": lambda: big.data.copy_(values),
                "assign": lambda: setattr(big, "data", values),
                "numpy": lambda: np.copyto(big.detach().numpy(), values.numpy()),
            }[way]
        )

    def swap(self, way: str) -> None:
        big, counters = self.net.big, self.counters

        def by_copy() -> None:
            weights = big.clone()
            big.copy_(counters.average)
            counters.average = weights

        def by_assignment() -> None:
            big.data, counters.average = counters.average, big.data

        self.change(by_copy if way == "copy_" else by_assignment)

    def mode(self, name: str) -> None:
        if self.program.optimizer == "schedulefree":
            self.change(getattr(self.optimizer, name))

    def fork(self, how: str) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                if how == "exit":
                    del self.manager
                    gc.collect()
                while how == "live" and os.getppid() == parent:
                    time.sleep(0.05)
                code = 0
            finally:
                os._exit(code)
        self.children.append((pid, how == "live"))

    def flow(self) -> None:
        """Let time pass until nothing of a save is under way."""
        self.slow.flow()
        for thread in background_threads():
            thread.join(TIMEOUT_SECONDS)

    # acts, and what must be true after each

    def act(self, act: Act) -> None:
        self.clock += 1
        self.counters.nonce = self.clock
        name, _, detail = act.name.partition(":")
        acts: dict[str, Callable[[], object]] = {
            "step": self.step,
            "save": lambda: self.save(act.hold, detail == "export"),
            "export": lambda: self.export(last=detail == "last"),
            "eval": lambda: self.mode("eval"),
            "train": lambda: self.mode("train"),
            "write": lambda: self.write(detail),
            "swap": lambda: self.swap(detail),
            "load": self.load,
            "rollback": lambda: self.load(int(detail)),
            "wait": lambda: self.settle(self.manager.wait),
            "ready": lambda: self.call(self.manager.maybe_wait_for_staging),
            "close": self.reopen,
            "fork": lambda: self.fork(detail),
            "time": self.flow,
        }
        if act.interrupt and self.program.ranks == 2:
            self.may_be_out_of_step = True
        if not act.interrupt or (self.program.ranks == 2 and self.rank != len(act.interrupt) % 2):  # one rank alone
            acts[name]()
            self.slow.stand_still()
            return
        before, manager = self.values(), self.manager
        self.may_fail = True  # a library on the way may make an error of its own of an interrupt
        try:
            with interrupted(self.slow, act.interrupt):
                acts[name]()
            self.slow.stand_still()
            return
        except KeyboardInterrupt:
            pass
        self.slow.stand_still()
        self.may_fail = True
        self.after_interrupt(name, before, manager)

    def after_interrupt(self, name: str, before: Values, manager: CheckpointManager) -> None:
        """Go on as a notebook does in which a cell was interrupted."""
        if name == "step" and self.program.ranks == 2:
            self.step()  # as the other rank has done
        elif name == "export":
            self.may_be_half_loaded = self.program.optimizer == "schedulefree"  # within its eval()
        elif name == "close":
            if self.manager is manager:
                self.reopen()
            else:
                self.load()
        elif name in ("load", "rollback"):
            if same(self.values(), before):
                self.may_be_half_loaded = True
                return
            if not self.is_a_reference():
                with suppress(HalfLoadedError):
                    self.manager.save(self.counters.step + 1000, export=False)
                    raise WrongError("an interrupted load left a mixture, and save() took it")
            self.load()

    def call(self, act: Callable[[], Any]) -> Any:
        """Call the manager. An error must be named and have a reason; what was not waited for is not acknowledged then.

        Return _FAILED after such an error. Raises: OutOfStepError if ranks no longer make the same calls.
        """
        try:
            return act()
        except HalfLoadedError as error:
            if not self.may_be_half_loaded:
                raise WrongError(f"nothing was half loaded: {error}") from error
            self.load()
        except CheckpointError as error:
            self.started, self.exporting = None, []
            if self.may_be_out_of_step or isinstance(error, PeerError):
                self.is_out_of_step = True
                raise OutOfStepError from error
            is_there = "committed already" in str(error) or "is there already" in str(error)
            if not (self.may_fail or is_there):
                raise WrongError(f"a failure without a reason: {type(error).__name__}: {error}") from error
            if self.manager.in_flight is None:  # else it was an export's, and that of the save has yet to come
                self.may_fail = False
        return _FAILED

    def settle(self, act: Callable[[], Any]) -> Any:
        """Call what waits for the save in flight; if it returns, the save is committed and its exports are there."""
        result = self.call(act)
        if result is not _FAILED:
            self.acknowledge()
        return result

    def save(self, hold: str, export: bool) -> None:
        step = self.counters.step
        self.slow.hold(hold)
        self.note(step)
        saved = self.call(lambda: self.manager.save(step, export=False))
        if saved is True:  # it begins after the one before it has ended
            self.acknowledge()
            self.started = step, self.clock
            if self.program.mode == "disabled":
                self.acknowledge()
        if export and saved is not _FAILED:
            self.export(last=False)

    def export(self, last: bool) -> None:
        step = self.counters.step
        self.note(step)
        if last and self.program.optimizer == "schedulefree":  # the manager calls its eval()
            net, optimizer = copy.deepcopy((self.net, self.optimizer))
            optimizer.eval()  # type: ignore[attr-defined]
            self.references[step].append(Reference(self.clock, self.values(net, optimizer), {}))
        if self.call(lambda: self.manager.export(step, last)) is not _FAILED:
            self.exporting.append(step)
            if last:
                self.acknowledge()

    def note(self, step: int) -> None:
        """Note the state that a save or an export of this moment must hold."""
        if self.references.get(step, [None])[-1:] != [None] and self.references[step][-1].nonce == self.clock:
            return
        self.references.setdefault(step, []).append(Reference(self.clock, self.values(), self.settings()))

    def load(self, back: int = 0) -> None:
        steps = self.committed()
        if not steps and self.started is None:
            self.exporting = []  # a run that has no step starts over, and sets its exports aside
        target = steps[max(0, len(steps) - 1 - back)] if back and steps else -1
        result = self.settle(lambda: self.manager.load(target))
        if result is _FAILED:  # by the save in flight: the load comes now
            result = self.settle(lambda: self.manager.load(target))
        if result is _FAILED:
            raise WrongError("load() fails again after it has raised the error of the save in flight")
        self.may_be_half_loaded = False
        steps = self.committed()
        wanted = target if target >= 0 else max(steps, default=0)
        if result.step != wanted:
            raise WrongError(f"load({target}) resumed step {result.step} where {wanted} was right; there are {steps}")
        if not steps:
            self.counters.step = 0
            self.step()
            return
        known = self.references.get(wanted, []) + self.abandoned.get(wanted, [])
        reference = next((r for r in known if r.nonce == self.counters.nonce), None)
        if reference is None:
            raise WrongError(f"load({target}) gives step {wanted} counters of no save of it: {self.counters.nonce}")
        self.compare(self.values(), reference, f"the run after load({target}) of step {wanted}")
        for step in [n for n in self.abandoned if n <= wanted]:  # a rollback that has committed nothing is taken back
            self.references[step] = self.references.get(step, []) + self.abandoned.pop(step)
        if target >= 0:
            self.branch += 1
            for step in [n for n in self.references if n > wanted]:
                self.abandoned[step] = self.abandoned.get(step, []) + self.references.pop(step)

    def reopen(self) -> None:
        self.close()
        self.build()
        self.load()

    def close(self) -> None:
        if self.settle(self.manager.close) is _FAILED:  # its error comes once
            self.settle(self.manager.close)

    # what is on the disk

    def acknowledge(self) -> None:
        """Check that the save that was waited for and its exports are there, and everything else that is there."""
        started, self.started = self.started, None
        exporting, self.exporting = self.exporting, []
        self.may_fail = False
        if self.rank:
            return
        if started is not None:
            step, nonce = started
            if step not in self.committed():
                raise WrongError(f"step {step} was acknowledged and is not committed; there are {self.committed()}")
            self.abandoned.clear()
            found = self.check_step(step)
            if found is not None and found != nonce:
                raise WrongError(f"step {step} holds the save of act {found}, and that of act {nonce} was acknowledged")
        for step in self.committed():
            self.check_step(step)
        self.check_exports(exporting)

    def committed(self) -> list[int]:
        return self.steps("checkpoints")

    def steps(self, folder: str) -> list[int]:
        """Return the steps in a folder; what a rollback gave up has the names step-N.abandoned-ID."""
        names = [path.name.removeprefix("step-") for path in (self.folder / folder).glob("step-*")]
        return sorted(int(name) for name in names if name.isdigit())

    def check_step(self, step: int) -> int | None:
        """Compare a committed step with the state at the call of save() that it is of; return that call's nonce."""
        folder = self.folder / "checkpoints" / f"step-{step}"
        try:
            mark = step, folder.stat().st_ino
            manifest = read_step.read_manifest(folder)
            state = read_step.read_state(folder, manifest, "state.json")
            nonce: int = state["states"]["counters"]["nonce"]
            known = self.references.get(step, []) + self.abandoned.get(step, [])
            reference = next((r for r in known if r.nonce == nonce), None)
            if reference is None:
                raise WrongError(f"step {step} holds counters of no save of it: those after act {nonce}")
            if mark in self.checked:
                return nonce
            stored = {n: _tensor(v) for n, v in read_step.read_tensors(folder, manifest).items()}
        except FileNotFoundError:  # set aside meanwhile
            return None
        self.compare(stored, reference, f"step {step}, by its counters of act {nonce}")
        (group,) = state["optimizer"][0]
        for name, value in (group["hyperparameters"] | group["shared"]).items():
            if reference.settings[name] != _plain(value):
                raise WrongError(
                    f"step {step} has {name} = {value}, and the call of save() had {reference.settings[name]}"
                )
        self.checked.add(mark)
        return nonce

    def check_exports(self, acknowledged: Sequence[int] = ()) -> None:
        """Compare every export with the states of its step; `acknowledged` ones are there, and of this branch."""
        for step in acknowledged:
            if not (self.folder / "exports" / f"step-{step}").is_dir():
                raise WrongError(f"the export of step {step} was acknowledged and is not there")
        for step in self.steps("exports"):
            path = self.folder / "exports" / f"step-{step}"
            known = self.references.get(step, [])
            if step not in acknowledged:
                known = known + self.abandoned.get(step, [])
            values = self._exported(path)
            holds = {
                n: [at for at, r in enumerate(known) if torch.equal(v, r.values[f"model.{n}"])]
                for n, v in values.items()
            }
            if not set.intersection(*map(set, holds.values())):
                acts = [r.nonce for r in known]
                raise WrongError(f"export {step} is of none of the acts {acts} of its step and branch: {holds}")

    def _exported(self, path: Path) -> Values:
        mark = path.name, path.stat().st_ino
        if mark not in self.exports:
            values: Values = {}
            reader = dcp.FileSystemReader(path)
            _load_state_dict(values, reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
            self.exports[mark] = values
        return self.exports[mark]

    def values(self, net: Net | None = None, optimizer: torch.optim.Optimizer | None = None) -> Values:
        """Return copies of everything that a step holds as tensors, by its names there; of the run's own by default."""
        net, optimizer = net or self.net, optimizer or self.optimizer
        values = {f"model.{n}": v for n, v in net.state_dict().items()}
        for fqn, p in net.named_parameters():
            state = optimizer.state.get(p, {})
            values |= {f"optimizer.{fqn}.{k}": v for k, v in state.items() if k != "step" and v is not None}
        values["states.counters.average"] = self.counters.average
        return {name: value.detach().clone() for name, value in values.items()}

    def settings(self) -> dict[str, Any]:
        """Return what a step holds of the optimizer beside tensors."""
        (group,) = self.optimizer.param_groups
        of_big = self.optimizer.state.get(self.net.big, {})
        return {k: v for k, v in group.items() if k != "params"} | {k: _plain(of_big[k]) for k in of_big if k == "step"}

    def is_a_reference(self) -> bool:
        """Return whether the live state is that of a step, whole."""
        now = self.values()
        every = [r for d in (self.references, self.abandoned) for refs in d.values() for r in refs]
        return any(r.nonce == self.counters.nonce and same(now, r.values) for r in every)

    def compare(self, found: Values, reference: Reference, what: str) -> None:
        if wrong := differing(found, reference.values, what):
            raise WrongError(f"these differ: {', '.join(wrong)}")

    # the end

    def finish(self) -> None:
        """Close the manager."""
        self.clock += 1
        with suppress(OutOfStepError):
            self.close()
        self.flow()

    def check(self, *, resumes: bool) -> None:
        """Compare everything that is there, and resume it. Every rank has finished."""
        self.slow.flow()
        if not self.rank:
            for step in self.committed():
                self.check_step(step)
            self.check_exports()
        if resumes:
            self.build()
            with suppress(OutOfStepError):
                self.load()
                self.manager.close()
        for pid, lives in self.children:
            if lives:
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if status and not lives:
                raise WrongError(f"a forked child that dropped the manager ended with status {status}")

    def leave(self) -> None:
        """End the children that live."""
        for pid, _ in self.children:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _plain(value: Any) -> Any:
    """Return the number that a tensor of one element holds, live or as a step has it."""
    if isinstance(value, read_step.Tensor):
        value = _tensor(value)
    return value.item() if isinstance(value, torch.Tensor) else value


def _tensor(stored: read_step.Tensor) -> torch.Tensor:
    data = torch.frombuffer(bytearray(stored.data), dtype=torch.uint8)
    return data.view(getattr(torch, stored.dtype)).view(stored.shape)
