"""Programs of the hunt: what a user's process does with its weights, its manager and its folder, one act after another.

Owns the acts, their text and how Hypothesis draws them. `run` carries them out; `slow` holds the disk and interrupts.

An act is `name[:detail][/hold][!interrupt]`, such as `save/copy` or `wait!saving@12`:

| act | what the process does |
|---|---|
| step | one step of the optimizer; after `eval`, schedulefree's own `train()` comes first |
| save, save:export | `save(step)`, without or with the export that is due at every step |
| export, export:last | `export(step)`, and the same for the last step |
| eval, train | schedulefree's `eval()` and `train()`, which change all weights; nothing for other optimizers |
| write:copy_, :data, :assign, :numpy | new values by `p.copy_(q)`, `p.data.copy_(q)`, `p.data = q`, or through numpy |
| swap:copy_, swap:assign | the weight and its average change places, by `copy_` or by `p.data = q` |
| load, rollback:K | `load()`, and `load(step)` of the committed step that is K before the newest |
| wait, ready | `wait()` and `maybe_wait_for_staging()` |
| close | `close()`, then another model, optimizer and manager in the same folder, and `load()` |
| fork:exit, fork:live | a child that drops the manager and exits, or one that lives until the program ends |
| time | nothing, until everything in the background has ended |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hypothesis import strategies as st

Mode = Literal["thread", "process", "disabled"]
MODES: tuple[Mode, ...] = ("thread", "process", "disabled")
OPTIMIZERS = ("adamw", "sgd", "schedulefree", "own")
HOLDS = ("copy", "piece", "begin", "write", "commit", "export")
"""Slow saves: a save is held at a drawn point until the training thread waits for something.

The first or the third piece of the copy, the staging folder, the first file, the rename, or the export's first folder.
"""
UNSEEN = ("write:data", "write:numpy")
"""Writes that raise no version. With an optimizer of torch.optim the program calls maybe_wait_for_staging() before."""


@dataclass(frozen=True)
class Act:
    """One act of a program, as its text says it."""

    text: str

    @property
    def name(self) -> str:
        return self.text.partition("!")[0].partition("/")[0]

    @property
    def hold(self) -> str:
        return self.text.partition("!")[0].partition("/")[2]

    @property
    def interrupt(self) -> str:
        """`wait`: SIGINT while the thread waits; `saving@N`, `all@N`: before the N-th opcode of some modules."""
        return self.text.partition("!")[2]


@dataclass(frozen=True)
class Program:
    """Acts of one process, or of two ranks that do the same."""

    ranks: int
    """1 or 2."""
    mode: Mode
    optimizer: str
    acts: tuple[Act, ...]

    def __str__(self) -> str:
        return f"{self.ranks} {self.mode} {self.optimizer}: {'; '.join(act.text for act in self.acts)}"

    def _repr_pretty_(self, printer: Any, _is_cycle: bool) -> None:
        """Let Hypothesis print the text."""
        printer.text(f"Program.parse({str(self)!r})")

    @staticmethod
    def parse(text: str) -> Program:
        """Return the program that `str` gives this text."""
        head, _, acts = text.partition(": ")
        ranks, mode, optimizer = head.split()
        (known,) = (known for known in MODES if known == mode)
        return Program(int(ranks), known, optimizer, tuple(map(Act, filter(None, acts.split("; ")))))


def _act(names: str, *suffixes: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(st.sampled_from(names.split()), *suffixes).map("".join)


_HOLD = st.sampled_from(("", *(f"/{point}" for point in HOLDS)))
_AT = st.one_of(st.integers(0, 200), st.integers(0, 1000), st.integers(0, 4000)).map(lambda at: f"!saving@{at}")
_ANYWHERE = st.integers(0, 80_000).map(lambda at: f"!all@{at}")
_IN_A_WAIT = st.one_of(st.just("!wait"), _AT)

_SAVE = _act("save save save:export", _HOLD)
_EXPORT = _act("export save:export export:last")
_CHANGE = _act("eval train write:copy_ write:data write:assign write:numpy swap:copy_ swap:assign")
_GO_BACK = _act("rollback:1 rollback:2 load")
_PLAIN = st.one_of(
    _SAVE, _act("step"), _CHANGE, _act("wait ready time"), _EXPORT, _GO_BACK, _act("close fork:exit fork:live")
)
_INTERRUPTED = st.one_of(
    _act("wait step ready close", _IN_A_WAIT),
    _act("save save:export", _HOLD, _IN_A_WAIT),
    _act("export export:last load rollback:1", _IN_A_WAIT),
    _act("save export load close", _ANYWHERE),
)
_INTERRUPTED_RANK = _act("wait step ready", _IN_A_WAIT)
"""On two ranks one alone is interrupted, where it waits: in an exchange, the others would wait for their time limit."""


def _phrases(interrupted: st.SearchStrategy[str]) -> st.SearchStrategy[tuple[str, ...]]:
    """Draw acts that belong together: one alone would seldom meet the other."""
    step = st.just("step")
    return st.one_of(
        _PLAIN.map(lambda act: (act,)),
        st.tuples(_SAVE, _CHANGE),
        st.tuples(st.just("eval"), _SAVE, st.just("train")),
        st.tuples(_SAVE, interrupted),
        st.tuples(_SAVE, interrupted, step, _SAVE),
        st.tuples(_SAVE, step, _SAVE, _GO_BACK),
        st.tuples(_GO_BACK, step, _EXPORT),
    )


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Draw a program; one of six is of two ranks."""
    ranks = draw(st.sampled_from((1, 1, 1, 1, 1, 2)))
    mode = draw(st.sampled_from(("thread", *MODES)))
    optimizer = draw(st.sampled_from(OPTIMIZERS))
    phrases = draw(st.lists(_phrases(_INTERRUPTED if ranks == 1 else _INTERRUPTED_RANK), min_size=1, max_size=8))
    return Program(ranks, mode, optimizer, tuple(Act(text) for phrase in phrases for text in phrase))
