"""Decides whether a stream of the package datasets returns to its position by its own state, and why it does not.

Owns the table of the parts that a stream is made of. datasets itself is not imported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from titan_ckpt.components.unsaved_state import unless_allowed

_EXACT = (
    "Examples", "ArrowExamples", "RebatchedArrowExamples", "StepExamples", "CyclingMultiSourcesExamples",
    "VerticallyConcatenatedMultiSourcesExamples", "HorizontallyConcatenatedMultiSourcesExamples",
    "RandomlyCyclingMultiSourcesExamples", "MappedExamples", "FilteredExamples", "InterleavedShardsExamples",
    "SkipExamples", "RepeatExamples", "TakeExamples", "FormattedExamples", "SelectColumns",
)  # fmt: skip
_HOME = "datasets.iterable_dataset"
_SHUFFLED = f"{_HOME}.BufferShuffledExamplesIterable"
PARTS = {f"{_HOME}.{name}Iterable": "" for name in _EXACT} | {
    _SHUFFLED: "the state of a stream leaves out the buffer of shuffle(), and a resumed run would never train on it: "
    "shuffle a Dataset that is not streamed, before to_iterable_dataset() if it is to be one, or leave shuffle() out",
    "datasets.packaged_modules.spark.spark.SparkExamplesIterable": "it was not proved to continue exactly after a "
    "resume: write the rows to Parquet files, and stream those",
}
"""Full name of a part's class -> "" if it continues exactly, or why it does not, with the next step."""


def stream_faults(dataset: Any, allow: Collection[str]) -> Iterator[str]:
    """Yield one line for each part of a stream that loses examples at a resume; none for other data."""
    pending: list[Any] = [getattr(dataset, "_ex_iterable", None)]
    while pending:
        part = pending.pop()
        if part is None:
            continue
        pending += [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
        name = f"{type(part).__module__}.{type(part).__qualname__}"
        reason = PARTS.get(name, "it was not proved to continue exactly after a resume: leave it out")
        if reason:
            yield from unless_allowed(f"data: {name}", name, reason, allow)
