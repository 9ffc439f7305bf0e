"""The converters that a checkpoint records against those of a run. Pure; knows no converter, only descriptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from titan_ckpt.errors import ConverterError

Description = Mapping[str, Any]
"""What a converter says of itself (`describe()`), as JSON gives it back: its kind and every setting."""


def check_converters(saved: Sequence[Description], here: Sequence[Description], step: int) -> None:
    """Raise unless a run has the converters that the step was saved with, in the same order and with the same settings.

    Raises: ConverterError listing each difference.
    """
    if found := differences(saved, here):
        raise ConverterError(
            f"step {step} was saved with converters {_kinds(saved)}, this run has {_kinds(here)}\n  "
            + "\n  ".join(found)
            + "\n  Resume with the same [[converters]], or start from the step in another folder, named in "
            "[[checkpoint.initial_load]]"
        )


def differences(saved: Sequence[Description], here: Sequence[Description]) -> list[str]:
    """Return one line per converter or setting that is not the same."""
    before, now = ({one["kind"]: one for one in some} for some in (saved, here))
    lines = [f"{kind}: only in the checkpoint" for kind in before if kind not in now]
    lines += [f"{kind}: only in this run" for kind in now if kind not in before]
    for kind in (kind for kind in before if kind in now):
        names = dict.fromkeys([*before[kind], *now[kind]])
        lines += [
            f"{kind}.{name}: {_show(before[kind], name)} in the checkpoint, {_show(now[kind], name)} in this run"
            for name in names
            if _show(before[kind], name) != _show(now[kind], name)
        ]
    common = [[kind for kind in some if kind in before and kind in now] for some in (before, now)]
    if common[0] != common[1]:
        lines.append(f"order: {', '.join(common[0])} in the checkpoint, {', '.join(common[1])} in this run")
    return lines


def _show(description: Description, name: str) -> str:
    return repr(description[name]) if name in description else "nothing"


def _kinds(descriptions: Sequence[Description]) -> str:
    return ", ".join(one["kind"] for one in descriptions) or "none"
