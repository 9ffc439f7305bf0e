"""The text of a load's verdict: what of its sources does not fit the model, and what to do about it.

sources.py finds the facts; a load that fits does not come here. Knows no files and no live tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from titan_ckpt.errors import listed
from titan_ckpt.loading.plan import LoadSource
from titan_ckpt.stores.store import Place
from titan_ckpt.types import LoadReport, Mismatch
from titan_ckpt.weights.transforms import ReadPlan

_LISTED = 12
_FEW = 16
"""More tensors than this are missing or unexpected because a folder is another model's, not because a few are new."""

Judged = tuple[LoadSource, ReadPlan, Sequence[str], Sequence[str]]
"""A source, what is read of it, its keys that no rank has a place for, and those that PEFT would ignore."""


def problems_of(
    report: LoadReport, sources: Sequence[Judged], in_two: Sequence[tuple[str, Place, Place]], *, resuming: bool
) -> list[str]:
    """Return a line for each kind of fault, and what to do about it.

    `report`: of all sources. `in_two`: weights that two sources have, each with these sources.
    """
    adapters = [source.adapter for source, *_ in sources]
    prefix = _prefix(sources[0][2], [*sources[0][1].absent]) if len(sources) == 1 else ""
    problems = [f"{judged[0].path}: {line}" for judged in sources for line in _of_source(*judged[1:], prefix, resuming)]
    if report.missing and not prefix:
        where = ", ".join(str(source.path) for source, *_ in sources)
        alone = ". Name the base of this adapter before it" if all(adapters) else ""
        few = not (alone or resuming) and len(report.missing) <= _FEW  # a resume takes all that the step's run had
        hint = ". Name new tensors in checkpoint.initial_load.initialize" if few else ""
        problems.append(f"{where}: {len(report.missing)} missing: {_listed(report.missing)}{alone}{hint}")
    if twice := [f"{fqn} (in {first} and {second})" for fqn, first, second in in_two]:
        both = ', or merge all adapters but one into the base (load = "merge")' if any(adapters) else ""
        problems.append(f"{len(twice)} in two sources: {_listed(twice)}. Name each weight's source once{both}")
    resized = any(m.kind == "shape" for m in report.mismatched)
    other_model = not prefix and (report.unexpected or report.missing or resized)
    is_extra_alone = not (resuming or prefix or report.missing or resized) and len(sources) == 1
    if is_extra_alone and 0 < len(report.unexpected) <= _FEW:
        problems.append("Name tensors that the model does not need in checkpoint.initial_load.ignore")
        other_model = False
    if other_model and not all(adapters):
        problems.append("Was it saved from a different model config?")
    return problems


def _of_source(
    plan: ReadPlan, strangers: Sequence[str], unused: Sequence[str], prefix: str, resuming: bool
) -> Iterator[str]:
    """Yield a line for each kind of fault of one source. `prefix`: see `_prefix`."""
    yield from _mismatches(plan.report.mismatched, resuming=resuming)
    if prefix:
        yield (
            f"all {len(strangers)} names begin with {prefix!r}, and the model's do not: save the state dict of the "
            f"module inside its wrapper, or name the tensors anew, such as {next(iter(plan.absent))}"
        )
    elif strangers:
        near = {key: plan.near(key) for key in strangers[:_LISTED]}
        lines = [f"{key} (like {', '.join(keys)}?)" if keys else key for key, keys in near.items()]
        lines += strangers[_LISTED:]
        yield f"{len(lines)} that the model does not have: {_listed(lines)}"
    if unused:
        why = "that its target_modules does not select, so that PEFT would ignore them"
        yield f"{len(unused)} {why}: {_listed(unused)}"


def _prefix(strangers: Sequence[str], absent: Sequence[str]) -> str:
    """Return the text by which the unexpected names differ from all that are absent; empty if they differ otherwise."""
    first, wanted = min(strangers, default=""), set(absent)
    prefixes = [first.removesuffix(key) for key in wanted if first.endswith(key)]
    return next((p for p in prefixes if p and {key.removeprefix(p) for key in strangers} == wanted), "")


def _mismatches(mismatched: Sequence[Mismatch], *, resuming: bool) -> list[str]:
    """Return one line for the tensors of another shape, and one for each pair of dtypes that differ."""
    lines = [f"{m.key}: expected {m.expected}, found {m.found}" for m in mismatched if m.kind == "shape"]
    problems = [f"{len(lines)} of another shape than the model's: {listed(lines, most=_LISTED)}"] if lines else []
    dtypes: dict[tuple[str, str, str], list[str]] = {}
    for m in mismatched:
        if m.kind != "shape":
            there, here = m.found.partition("[")[0], m.expected.partition("[")[0]
            dtypes.setdefault((there, here, m.kind), []).append(m.key)
    for (there, here, kind), keys in dtypes.items():
        if kind == "dtype":
            step = "such values cannot be converted: take weights of the model's dtype"
        elif resuming:
            step = f"build the model in {there}, or start a new run from this step as an initial_load with cast = true"
        else:
            step = "set cast = true to convert them while loading"
        problems.append(f"{len(keys)} of dtype {there}, expected {here}: {_listed(keys)}; {step}")
    return problems


def _listed(names: Sequence[str]) -> str:
    return listed(names, ", ", most=_LISTED)
