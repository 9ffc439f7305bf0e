"""Decides whether a stream of the package datasets returns to its position by its own state, and why it does not.

Owns the table of the parts that a stream is made of. datasets itself is not imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from titan_ckpt.components.classes import class_name
from titan_ckpt.components.unsaved_state import MAX_DEPTH, fault_of, function_faults
from titan_ckpt.components.watched import ATOMS
from titan_ckpt.process import generators_kept, held_by, held_generators, process_state

_EXACT = (
    "Examples", "ArrowExamples", "RebatchedArrowExamples", "StepExamples", "CyclingMultiSourcesExamples",
    "VerticallyConcatenatedMultiSourcesExamples", "HorizontallyConcatenatedMultiSourcesExamples",
    "RandomlyCyclingMultiSourcesExamples", "MappedExamples", "FilteredExamples", "InterleavedShardsExamples",
    "SkipExamples", "RepeatExamples", "TakeExamples", "FormattedExamples", "SelectColumns", "BufferShuffledExamples",
)  # fmt: skip
_HOME = "datasets.iterable_dataset"
_MAX_ITEMS = 256
"""Longer lists and dicts hold data."""
_SHUFFLED = f"{_HOME}.BufferShuffledExamplesIterable"
_INTERLEAVED = f"{_HOME}.RandomlyCyclingMultiSourcesExamplesIterable"
_BUFFER = (
    "the state of a stream leaves out the buffer of shuffle(), and a resumed run would never train on it: give the "
    "stream to a DataLoader in titan_ckpt.PositionedLoader, which reads the epoch again, or shuffle a Dataset before "
    "to_iterable_dataset()"
)
PARTS = {f"{_HOME}.{name}Iterable": "" for name in _EXACT} | {
    "datasets.packaged_modules.spark.spark.SparkExamplesIterable": "it was not proved to continue exactly after a "
    "resume: write the rows to Parquet files, and stream those",
}
"""Full name of a part's class -> "" if it continues exactly, or why it does not, with the next step."""

_READS_AHEAD = frozenset(
    f"{_HOME}.{name}Iterable"
    for name in (
        "Examples", "RebatchedArrowExamples", "CyclingMultiSourcesExamples", "RandomlyCyclingMultiSourcesExamples",
        "HorizontallyConcatenatedMultiSourcesExamples", "MappedExamples", "FilteredExamples", "BufferShuffledExamples",
    )
)  # fmt: skip
"""Parts that read examples once more after a resume: all from the start of a shard, of a batch, of the next one, or of
the epoch."""

_DRAWS = (
    "it reads examples once more after a resume, and the random numbers that are drawn while it reads would be others: "
    "draw them in a map() that is not batched and comes last, or in the collator"
)

_NOT_HELD = (
    "the state of the stream leaves it out: read the stream by a DataLoader without worker processes, in "
    "titan_ckpt.PositionedLoader"
)

_UNSEEDED = (
    "no seed is given to its shuffle() or interleave_datasets(), and each process would read in another order: give "
    "it a seed"
)

_READ_ONCE = (
    "a function of the stream reads from it, and a resumed run would read it from its start: make it in the function "
    "that reads it"
)


def stream_faults(
    data: Any, allow: Collection[str], *, is_read_again: bool = False, held: Collection[Any] = ()
) -> Iterator[str]:
    """Yield one line for each part of a stream that loses examples at a resume; none for other data.

    `data`: a stream, or an object of the user's that holds one. `is_read_again`: a resume reads it from the start of
    its epoch, so that it needs no state. `held`: the generators that steps hold.
    """
    for stream in _streams(data):
        parts = [*_parts(stream)]
        for part in parts:
            name = class_name(part)
            reason = PARTS.get(name, "it was not proved to continue exactly after a resume: leave it out")
            if name == _SHUFFLED and not is_read_again:
                reason = _BUFFER
            if any(seed >> 64 for seed in seeds_of(stream)) and hasattr(part, "generator"):
                reason = reason or _UNSEEDED
            if reason:
                yield from fault_of("data:", part, reason, allow)
        functions = [part.function for part in parts if hasattr(part, "function")]
        drawn = held_generators([_functions_of(part) for part in parts])
        yield from function_faults([("function of a stream", function) for function in functions], allow, live=drawn)
        for generator in (each for each in drawn if not any(each is other for other in held)):
            yield from fault_of("data: a function of the stream draws from a", generator, _NOT_HELD, allow)
        read_once = [found for part in parts for found in held_by(_functions_of(part), _is_read_once)]
        for found in read_once:
            yield from fault_of("data:", found, _READ_ONCE, allow)
        for part in _parts(stream, within=False):
            own = held_generators([_functions_of(inner) for inner in _below(part)])
            if _reads_again(part) and not read_once and (class_name(part) in allow or own or _draws(part)):
                yield from fault_of("data:", part, _DRAWS, allow)


def functions_of(data: Any) -> list[Any]:
    """Return the functions of the user's that streams call, and what they are called with."""
    return [_functions_of(part) for stream in _streams(data) for part in _parts(stream)]


def is_shuffled(stream: Any) -> bool:
    """Return whether a stream of datasets has a buffer of shuffle(), which its state leaves out."""
    return any(class_name(part) == _SHUFFLED for part in _parts(stream))


def drawn_by_workers(loader: Any) -> list[Any]:
    """Return the parts of a loader's streams whose random numbers each of several worker processes begins otherwise.

    datasets says those of the first worker until a worker is read, and a loader's state may be of that moment.
    """
    if getattr(loader, "num_workers", 0) < 2:
        return []
    parts = [part for stream in _streams(loader.dataset) for part in _parts(stream)]
    return [part for part in parts if class_name(part) == _INTERLEAVED]


def seeds_of(data: Any) -> list[int]:
    """Return the seeds by which streams order examples; one that was not given is a random number of 128 bits."""
    parts = [part for stream in _streams(data) for part in _parts(stream)]
    generators = [part.generator for part in parts if isinstance(getattr(part, "generator", None), np.random.Generator)]
    seeds = [getattr(generator.bit_generator.seed_seq, "entropy", None) for generator in generators]
    return [seed for seed in seeds if isinstance(seed, int)]


def begin_once(data: Any) -> None:
    """Let streams begin at a position that was loaded once, and not in each later epoch again.

    `data`: a stream or a loader, which has made its iterator by now, if it will. Torchdata's loader does not ask a
    stream for its end once more. Source: datasets 5.2, iterable_dataset.py `_prepare_ex_iterable_for_iteration`.
    """
    is_ended = getattr(getattr(getattr(data, "_iterator", None), "_dataset_fetcher", None), "ended", False)
    say_position(data)
    for stream in _streams(getattr(data, "dataset", data)):
        if position := getattr(stream, "_starting_state_dict", None):
            stream._starting_state_dict = None if is_ended else _Once(position)  # noqa: SLF001 - datasets has no name for it


def say_position(data: Any) -> None:
    """Let streams say the position that was loaded; until they are read, datasets says the start of the data."""
    for stream in _streams(getattr(data, "dataset", data)):
        if position := getattr(stream, "_starting_state_dict", None):
            stream._state_dict = dict(position)  # noqa: SLF001 - datasets has no name for it


class _Once(dict[str, Any]):
    """The state of a stream, which is empty when it has been used."""

    def __getitem__(self, name: str) -> Any:
        return self.pop(name) if name == "examples_iterable" else super().__getitem__(name)

    def __bool__(self) -> bool:
        return "examples_iterable" in self


def _streams(data: Any) -> Iterator[Any]:
    """Yield the streams of datasets that an object is, or holds in its attributes and those of what it wraps."""
    pending, seen = [data], set[int]()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if hasattr(value, "_ex_iterable"):
            yield value
        elif isinstance(value, (list, tuple, dict)):
            first = islice(value.values() if isinstance(value, dict) else value, _MAX_ITEMS)
            items = [item for item in first if type(item) not in ATOMS]
            pending += [item for item in items if isinstance(item, (list, tuple, dict))][:MAX_DEPTH]
            pending += [item for item in items if not isinstance(item, (list, tuple, dict))]
        elif value is data or isinstance(value, IterableDataset):
            pending += getattr(value, "__dict__", {}).values()


def _parts(stream: Any, *, within: bool = True) -> Iterator[Any]:
    """Yield the parts of a stream from the last one on; `within`: also those that are read again with another."""
    return _below(stream._ex_iterable, within=within)  # noqa: SLF001 - datasets has no public name for it


def _below(part: Any, *, within: bool = True) -> Iterator[Any]:
    """Yield a part and those that it reads from."""
    pending = [part]
    while pending:
        part = pending.pop()
        if part is not None:
            if within or not _reads_again(part):
                pending += [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
            yield part


def _functions_of(part: Any) -> list[Any]:
    """Return the functions of the user's that a part calls, and what a generator is called with."""
    generate = getattr(part, "generate_examples_fn", None)
    config = getattr(getattr(generate, "__self__", None), "config", None)
    found = [getattr(part, name, None) for name in ("function", "fn_kwargs", "kwargs")]
    return [*found, getattr(config, "generator", None)]


def _is_read_once(value: Any) -> bool:
    """Return whether what is read from an object is gone, as of an iterator, an open file or a queue."""
    is_queue = all(callable(getattr(value, name, None)) for name in ("get", "put", "empty"))
    return isinstance(value, Iterator) or is_queue


def _reads_again(part: Any) -> bool:
    """Return whether a part reads again what it had read before a save: a map does if it is batched or async."""
    is_ahead = getattr(part, "batched", True) or inspect.iscoroutinefunction(part.function)
    return class_name(part) in _READS_AHEAD and is_ahead


def _draws(part: Any) -> bool:
    """Return whether the process draws random numbers while the first example is read, without filling a buffer."""
    part = part.ex_iterable if class_name(part) == _SHUFFLED else part
    with generators_kept():
        before = process_state()
        with suppress(Exception):  # the first step will raise it
            next(iter(part), None)
        return process_state() != before
