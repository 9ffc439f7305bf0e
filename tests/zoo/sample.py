"""The cases of the zoo that a test runs: a seeded sample, or all of them if TITAN_CKPT_ZOO=1."""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Sequence
from typing import TypeVar

Case = TypeVar("Case")


def chosen(cases: Sequence[Case], number: int, unbuilt: Collection[str] = ()) -> list[Case]:
    """Return all cases if TITAN_CKPT_ZOO is 1, else `number` of them, the same in every run, in their order.

    The `unbuilt` are left out of the sample: the library that has them cannot make them, so they show nothing.
    """
    if os.environ.get("TITAN_CKPT_ZOO") == "1" or number >= len(cases):
        return list(cases)
    sample = [cases[i] for i in sorted(random.Random(0).sample(range(len(cases)), number))]
    return [case for case in sample if str(case) not in unbuilt]
