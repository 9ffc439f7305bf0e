"""Pure decisions about steps: whether a save is due, which exports are due, which exports have expired."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from titan_ckpt.config import ExportConfig, SaveConfig

ExportWay = Literal["now", "background", "left out"]
"""At once, while training waits; from a staged copy, while it goes on; not at all, because training must not wait."""


def is_due(step: int, save: SaveConfig | None, last_step: bool) -> bool:
    """Return whether the state after `step` optimizer steps must be saved."""
    if save is None:
        return False
    on_interval = step > 0 and step % save.interval == 0
    return last_step or on_interval or (save.first_step and step == 1)


def due_exports(step: int, exports: Sequence[ExportConfig], last_step: bool) -> list[ExportConfig]:
    """Return the exports that are due after `step` optimizer steps."""
    return [e for e in exports if last_step or (e.interval is not None and step > 0 and step % e.interval == 0)]


def may_be_there(step: int, last_step: bool, resumed_from: int | None) -> bool:
    """Return whether an earlier run of the same folder may have published the exports of this step.

    After a resume, steps are replayed with identical weights, so exports already on disk are still valid. A finished
    run makes only the exports that it had not completed.
    """
    return resumed_from is not None and (not last_step or resumed_from == step)


def way_to_export(last_step: bool, staged: bool, busy: bool, save: SaveConfig | None) -> ExportWay:
    """Return how exports that are due are made. `staged`: every rank has a copy of the weights. `busy`: a save or
    exports are in flight.
    """
    if last_step:
        return "now"
    if staged:
        return "background"
    return "left out" if busy and save is not None and save.if_busy == "skip" else "now"


def expired_exports(steps: Sequence[int], step: int, export: ExportConfig) -> list[int]:
    """Return the exported steps to remove after the export of `step`: interval exports up to it, except the newest.

    Later ones were made before an interruption and are valid when the run has come so far again; they stay.
    """
    if export.interval is None or export.keep is None:
        return []
    return sorted(n for n in set(steps) if 0 < n <= step and n % export.interval == 0)[: -export.keep]
