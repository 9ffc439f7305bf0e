"""Owns what belongs to this whole process: its random number generators, and its cyclic garbage collector.

Owns their state, and how a block of code keeps or pauses them. The generators are those of Python, of NumPy, and of
torch on the CPU and on all CUDA devices.
"""

from __future__ import annotations

import dis
import gc
import pickle
import random
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeVar

import numpy as np
import torch

_Kind = TypeVar("_Kind")


class RandomState:
    """All generators of the process as one Stateful; every rank has its own."""

    def state_dict(self) -> dict[str, Any]:
        """Return every generator's state as tensors and tuples, which typed JSON encodes."""
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),  # noqa: NPY002 - the legacy global generator is what libraries draw from
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
            if others := _other_devices():  # this process trains on several; their numbers are their names
                state["cuda_others"] = {str(i): torch.cuda.get_rng_state(i) for i in others}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set every generator; those of CUDA devices only if both the state and this process have them.

        The state of the device that was the current one goes to the one that is now: a rank may get another device.
        """
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])  # noqa: NPY002
        torch.set_rng_state(state_dict["torch"])
        if "cuda" in state_dict and torch.cuda.is_available():
            torch.cuda.set_rng_state(state_dict["cuda"])
            others = state_dict.get("cuda_others", {})
            for i in _other_devices():
                if str(i) in others:
                    torch.cuda.set_rng_state(others[str(i)], i)

    def reseed(self, seed: int) -> None:
        """Seed every generator; a generator left as it is would repeat the numbers of the start of the run."""
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.manual_seed(seed)


class Seeded:
    """An entry of a sampler on its way to a worker process, where its arrival seeds the generators.

    So what a batch draws depends on no batch that the same worker has made before.
    """

    def __init__(self, entry: Any, seed: int) -> None:
        self._entry, self._seed = entry, seed

    def __reduce__(self) -> tuple[Callable[[Any, int], Any], tuple[Any, int]]:
        return _arrived, (self._entry, self._seed)


def _arrived(entry: Any, seed: int) -> Any:
    RandomState().reseed(seed)
    return entry


def process_state() -> bytes:
    """Return bytes that are others when the process has drawn a random number on the CPU."""
    of_numpy = np.random.get_state()  # noqa: NPY002 - the legacy global generator is what libraries draw from
    return pickle.dumps((random.getstate(), of_numpy, torch.get_rng_state().numpy().tobytes()))


def is_random(value: Any) -> bool:
    """Return whether an object is a generator of random numbers, of Python, NumPy or torch, that has a state."""
    has_none = isinstance(value, random.SystemRandom)
    return not has_none and isinstance(
        value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
    )


_MAX_ITEMS = 64
"""Longer lists and dicts hold data."""
_CLOSED = frozenset(
    {
        "accelerate", "datasets", "lightning", "numpy", "pandas", "peft", "pyarrow", "pytorch_lightning", "titan_ckpt",
        "torch", "transformers", "trl",
    }
)  # fmt: skip
"""Packages whose objects, and those of classes that extend theirs, hold no generator that data draws from."""


def held_generators(value: Any) -> list[Any]:
    """Return the generators that an object or function draws from: in its attributes, in what they hold, around it."""
    return held_by(value, is_random)


def held_by(value: Any, is_wanted: Callable[[Any], bool]) -> list[Any]:
    """Return the objects of a kind that an object or function has: in its attributes, in what they hold, around it.

    Objects of libraries are not looked into, but for the datasets of torch, and a transform of datasets.
    """
    seen: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if id(item) not in seen:
            seen[id(item)] = item
            waiting += reversed([*_held(item, is_wanted)])
    return [item for item in seen.values() if is_wanted(item)]


def _held(value: Any, is_wanted: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield the objects in which one that is wanted may be."""
    if is_wanted(value):
        return
    if isinstance(value, (list, tuple, dict)):
        yield from (value.values() if isinstance(value, dict) else value) if len(value) <= _MAX_ITEMS else ()
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, FunctionType):
        yield from used_by(value, is_wanted).values()
    elif hasattr(value, "_format_kwargs"):
        yield value._format_kwargs  # noqa: SLF001 - where datasets keeps the transform
    elif not isinstance(value, type) and not any(map(_is_closed, type(value).__mro__)):
        yield from getattr(value, "__dict__", {}).values()
        yield from (m for kind in type(value).__mro__ for m in vars(kind).values() if isinstance(m, FunctionType))


def _is_closed(kind: type) -> bool:
    package = kind.__module__.partition(".")[0]
    return package in _CLOSED and not kind.__module__.startswith("torch.utils.data")


def used_by(function: FunctionType, is_wanted: Callable[[Any], bool] = is_random) -> dict[str, Any]:
    """Return what a function uses beside its arguments: variables around it, defaults, and globals that are wanted.

    `is_wanted`: absent, generators of random numbers.
    """
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # an empty cell
            found[name] = cell.cell_contents
    defaults, named = function.__defaults__ or (), function.__code__.co_varnames
    found |= dict(zip(named[function.__code__.co_argcount - len(defaults) :], defaults, strict=False))
    found |= function.__kwdefaults__ or {}
    for code in codes_within(function.__code__):
        found |= {n: function.__globals__[n] for n in _globals_of(code) if is_wanted(function.__globals__.get(n))}
    return found


def codes_within(*codes: CodeType) -> list[CodeType]:
    """Return code objects, and those of the functions that are defined in them."""
    found = [*codes]
    for code in found:
        found += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return found


@cache
def _globals_of(code: CodeType) -> list[str]:
    """Return the names of globals that code loads; its other names are those of attributes."""
    return [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]


def get_random(generator: Any) -> Any:
    """Return the state of one generator, as typed JSON encodes it."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def set_random(generator: Any, state: Any) -> None:
    """Set the state of one generator."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


@contextmanager
def generators_kept(start: dict[str, Any] | None = None, beside: Collection[Any] = ()) -> Iterator[None]:
    """Put the generators back after a block that draws from them. `start`: the state in which the block has them.

    `beside`: further ones than those of the process.
    """
    random_state = RandomState()
    before, others = random_state.state_dict(), [*map(get_random, beside)]
    try:
        if start is not None:
            random_state.load_state_dict(start)
        yield
    finally:
        random_state.load_state_dict(before)
        for generator, state in zip(beside, others, strict=True):
            set_random(generator, state)


def _other_devices() -> list[int]:
    """Return the numbers of the visible CUDA devices except the current one. A generator's state takes no memory."""
    current = torch.cuda.current_device()
    return [i for i in range(torch.cuda.device_count()) if i != current]


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the cyclic collector, which would walk the 10^6 new objects of a large plan again and again.

    Only in the main thread: the collector is the process's, and training goes on beside saves and exports in other
    threads, which take minutes.
    """
    enabled = gc.isenabled() and threading.current_thread() is threading.main_thread()
    if enabled:
        gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_not_frozen: list[list[Any]] = []
"""A list that holds itself, so that the collector finds it until gc.freeze() sets it aside."""


def freeze_imports() -> None:
    """Keep the collector away from what this process has imported: `has_frozen` then tells only of what came later."""
    gc.freeze()
    _not_frozen[:] = [[]]
    _not_frozen[0].append(_not_frozen[0])


def has_frozen() -> bool:
    """Return whether gc.freeze() has set aside objects, which takes long if there are many: it counts them."""
    return not gc.get_referrers(*_not_frozen) if _not_frozen else gc.get_freeze_count() > 0


def instances_of(kind: type[_Kind], *, frozen: bool = False) -> list[_Kind]:
    """Return all objects of a class in this process; some may be garbage that was not collected yet.

    An object refers to its class, so the collector finds them in one pass of its own: to ask each of 10^6 objects takes
    a second. `frozen`: also those that gc.freeze() has set aside, which the collector then has again.
    """
    if frozen:
        gc.unfreeze()
    kinds: list[type] = [kind]
    for own in kinds:
        kinds += type.__subclasses__(own)
    return [value for value in gc.get_referrers(*kinds) if issubclass(type(value), kind)]
