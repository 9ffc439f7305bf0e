"""The tables and sentences that `titan-ckpt` prints; they fit 80 columns. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from titan_ckpt.errors import age, counted, printable, size

if TYPE_CHECKING:
    from titan_ckpt.cli.planning import Plan
    from titan_ckpt.tools.conversion import Written
    from titan_ckpt.tools.difference import Difference, TensorDifference
    from titan_ckpt.tools.inspecting import ComponentContent, Content, TensorStatistics
    from titan_ckpt.tools.listing import Listing
    from titan_ckpt.tools.logits import ComparedLogits
    from titan_ckpt.tools.retention import Pruned
    from titan_ckpt.tools.verifying import Verified

_BAR = 30
_MOST_ROWS = 1000
"""Tensors of one component that are shown as a table, which is laid out to the width of the console."""


def say(console: Console, text: str) -> None:
    """Print a sentence; paths in it stay whole."""
    console.print(printable(text), soft_wrap=True, highlight=False, markup=False)


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        is_right = column in right
        table.add_column(column, justify="right" if is_right else "left", no_wrap=is_right, overflow="fold")
    return table


def _one_line(text: str) -> str:
    """Return the text of a cell: a line break in a name would begin another row."""
    return printable(text.replace("\n", r"\n"))


def _add(table: Table, *cells: object) -> None:
    """Add a row of plain texts; None is an empty cell."""
    table.add_row(*("" if cell is None else escape(_one_line(str(cell))) for cell in cells))


def listing(found: Listing, console: Console) -> None:
    table = _table(
        "step", "age", "loss", "kind", "size", "ranks", "remarks", right=("step", "age", "loss", "size", "ranks")
    )
    for step in found.steps:
        kind, loss, *others = step.cells
        _add(table, step.step, age(step.created_unix_seconds), loss, kind, *others)
    console.print(table)
    for name, reason in found.rejected:
        say(console, f"{name} cannot be loaded: {reason}")
    if found.exports:
        console.print()
        exports = _table("export", "format", "size", "age", "remarks", right=("size", "age"))
        for export in found.exports:
            name = export.path.removeprefix(found.folder).lstrip("/")
            made = age(export.created_unix_seconds) if export.created_unix_seconds else None
            _add(exports, name, export.format, size(export.num_bytes), made, export.changed or "proved")
        console.print(exports)
    if found.writer is not None:
        state = "writes here" if found.writer_lives else "was the last to write here"
        say(console, f"{found.writer} {state}")


def _tensor_rows(component: ComponentContent, *, everything: bool) -> Iterator[tuple[str, ...]]:
    """Yield name, shape, sharding and size of each group of tensors, or with `everything` of each tensor."""
    for group in component.groups:
        dtype = "" if len(component.dtypes) == 1 else group.dtype
        shape = f"{dtype}{list(group.shape)}"
        sharding = "" if group.sharding == "whole" else group.sharding
        for name in group.names if everything else [group.pattern]:
            times = f"{group.count} x " if group.count > 1 and not everything else ""
            num_bytes = group.num_bytes / (group.count if everything else 1)
            own_name = name.removeprefix(f"{component.component}.")
            yield _one_line(own_name), times + shape, sharding, size(num_bytes)


def content(found: Content, console: Console, *, everything: bool) -> None:
    total = sum(component.num_bytes for component in found.components)
    count = sum(component.num_tensors for component in found.components)
    tree = Tree(escape(_one_line(f"{found.path}: {found.format}, {counted(count, 'tensor')}, {size(total)}")))
    for component in found.components:
        dtypes = ", ".join(f"{dtype} {size(num)}" for dtype, num in component.dtypes.items())
        head = (
            f"[bold]{component.component}[/]: {counted(component.num_tensors, 'tensor')}, "
            f"{size(component.num_bytes)} ({dtypes})"
        )
        branch = tree.add(head)
        rows = [*_tensor_rows(component, everything=everything)]
        if len(rows) > _MOST_ROWS:  # a table of them would take rich minutes
            console.print(tree)
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
            say(console, "\n".join(f"    {line}" for line in lines))
            tree = Tree("")
            tree.hide_root = True
            continue
        table = _table("", "", "", "")
        table.show_header = False
        for row in rows:
            table.add_row(*map(escape, row))
        branch.add(table)
    if tree.children or not found.components:
        console.print(tree)
    _about("manifest", found.manifest, console)
    _about("config", found.config, console)
    if everything:
        _about("state", found.state, console)
    elif found.state:
        say(console, f"state: {counted(len(found.state), 'value')}; --all lists them")


def _about(title: str, values: Mapping[str, Any], console: Console) -> None:
    if not values:
        return
    table = _table(title, "")
    for name, value in values.items():
        if value not in (None, [], {}, ()):
            text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            _add(table, name, text if len(text) <= 300 else text[:297] + "...")
    console.print(table)


def statistics(found: TensorStatistics, console: Console) -> None:
    say(console, f"{found.name}: {found.dtype}{list(found.shape)}, {size(found.num_bytes)}, stored {found.sharding}")
    table = _table("", "")
    table.show_header = False
    for name in ("minimum", "maximum", "mean", "std", "norm"):
        value = getattr(found, name)
        _add(table, name, "no finite value" if value is None else f"{value:.6g}")
    for name, number in {"zeros": found.num_zero, "NaN": found.num_nan, "infinite": found.num_infinite}.items():
        _add(table, name, number)
    _add(table, "digest", found.digest)
    console.print(table)
    most = max((count for _, _, count in found.histogram), default=0)
    for low, high, count in found.histogram:
        bar = "█" * round(_BAR * count / most) if most else ""
        console.print(f"{low:>12.4g} .. {high:<12.4g} {bar} {count}", highlight=False)


def verified(found: Verified, console: Console) -> None:
    what = f"{found.format}, {counted(found.num_tensors, 'tensor')}, {size(found.num_bytes)}"
    say(console, f"{found.path} is whole: {what}")
    for line in (*found.checks, *found.notes):
        say(console, f"  {line}")


def difference(found: Difference, console: Console, top: int) -> None:
    verdict = "the same" if found.same else "different"
    say(console, verdict)
    say(console, f"  {found.left} ({found.left_format})")
    say(console, f"  {found.right} ({found.right_format})")
    for component in found.components:
        differing = len(component.tensors)
        equal = f"{counted(component.num_equal, 'tensor is', 'tensors are')} identical"
        unread = f", {component.num_unread} of them by the digests in both steps" * bool(component.num_unread)
        also = f", {differing} differ" if differing else "" if unread else f", digest {component.digests[0]}"
        say(console, f"{component.component}: {equal}{unread}{also}")
        if differing:
            console.print(_tensor_differences(component.tensors[:top]))
            _more(differing, top, console)
    others = {"state": found.state, "a time, which does not count": found.times, "settings": found.settings}
    for title, differences in others.items():
        if differences:
            rows = _table(title, "first", "second")
            for d in differences[:top]:
                _add(rows, d.name, *("nothing" if side is None else side for side in (d.left, d.right)))
            console.print(rows)
            _more(len(differences), top, console)
    for line in found.not_compared:
        say(console, f"not compared: {line}")


def _more(number: int, top: int, console: Console) -> None:
    if number > top:
        say(console, f"and {number - top} more; --top {number} shows all")


def _tensor_differences(differences: Iterable[TensorDifference]) -> Table:
    numbers = ("elements", "largest", "mean", "cosine")
    table = _table("tensor", "how", *numbers, right=numbers)
    for d in differences:
        how = d.kind if d.kind == "values" else f"{d.kind}: {d.left or 'nothing'} -> {d.right or 'nothing'}"
        distances = (None if figure is None else f"{figure:.3g}" for figure in (d.max_abs, d.mean_abs))
        _add(table, d.name, how, d.num_different, *distances, None if d.cosine is None else f"{d.cosine:.6f}")
    return table


def written(found: Written, console: Console) -> None:
    merged = f", {counted(found.merged, 'weight')} merged" if found.merged else ""
    tensors = counted(found.num_tensors, "tensor")
    what = f"{found.format}, {tensors}, {size(found.num_bytes)}, names: {found.names}{merged}"
    say(console, f"{found.target} is written: {what}")
    for line in found.notes:
        say(console, line)


def logits(found: ComparedLogits, console: Console) -> None:
    verdict = "the same but for rounding" if found.same else "DIFFERENT: do not use the target"
    figures = f"largest difference {found.largest_difference:.3g}, of rounding at most {found.allowed:.3g}"
    say(console, f"logits of {found.num_tokens} random tokens: {verdict} ({figures})")


def pruned(found: Pruned, console: Console, *, dry_run: bool, set_aside: bool) -> None:
    verb = "would delete" if dry_run else "deleted"
    say(console, f"{found.checkpoints}: {verb} {_counted(found.deleted)} ({size(found.num_bytes)})")
    say(console, f"kept {_counted(found.kept)}")
    if found.set_aside:
        what = f"{counted(len(found.set_aside), 'folder')} that a rollback set aside ({size(found.set_aside_bytes)})"
        say(console, f"{verb} {what}" if set_aside else f"kept {what}; see --set-aside")
    for line in found.held:
        say(console, f"kept: {line}")
    for name in found.left_over:
        say(console, f"left for the next run: {name}")


def _counted(steps: Sequence[int]) -> str:
    """Return steps in words; four or more at one distance are a range."""
    parts, i = [], 0
    while i < len(steps):
        distance = steps[min(i + 1, len(steps) - 1)] - steps[i]
        last = next((j for j in range(i, len(steps) - 1) if steps[j + 1] - steps[j] != distance), len(steps) - 1)
        is_range = last - i > 2
        parts.append(f"{steps[i]} to {steps[last]} every {distance}" if is_range else str(steps[i]))
        i = last + 1 if is_range else i + 1
    return f"{len(steps)} step{'s' * (len(steps) > 1)}: {', '.join(parts)}" if steps else "nothing"


def plan(found: Plan, console: Console) -> None:
    say(console, f"{found.config}: {found.action}")
    table = _table("", "source", "format", "tensors", "size", right=("tensors", "size"))
    for number, source in enumerate(found.sources, 1):
        path = f"{source.role} {source.path}"
        _add(table, number, path, source.format, source.num_tensors, size(source.num_bytes))
    if found.sources:
        console.print(table)
    for line in found.notes:
        say(console, line)
    for line in found.problems:
        say(console, f"problem: {line}")
