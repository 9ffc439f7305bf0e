"""The learning rate's course."""

from __future__ import annotations

from itertools import pairwise

import pytest

from titan_ckpt.training.config import ScheduleConfig
from titan_ckpt.training.schedule import rate_factor


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_d5_warm_up_rises_to_the_peak_and_nothing_exceeds_it(kind: str) -> None:
    """The last warm-up step is the first at the peak; the peak is the largest factor."""
    factor = rate_factor(ScheduleConfig(kind, warmup_ratio=0.1, min_ratio=0.1), 50)
    course = [factor(i) for i in range(50)]
    assert course[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert max(course) == 1.0
    assert all(a >= b for a, b in pairwise(course[4:]))


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
def test_d5_the_factor_ends_at_the_floor(kind: str) -> None:
    """After the last step the factor is `min_ratio`, and stays there."""
    factor = rate_factor(ScheduleConfig(kind, min_ratio=0.25), 40)
    assert factor(39) > 0.25
    assert [factor(40), factor(400)] == pytest.approx([0.25, 0.25])


def test_d5_warm_up_is_rounded_up() -> None:
    """A ratio that gives a part of a step warms up for a whole one."""
    factor = rate_factor(ScheduleConfig("constant", warmup_ratio=0.11), 10)
    assert [factor(0), factor(1), factor(2)] == [0.5, 1.0, 1.0]


def test_d5_wsd_is_stable_until_its_decay() -> None:
    """The factor leaves the peak only in the last `decay_ratio` of the steps."""
    factor = rate_factor(ScheduleConfig("wsd", warmup_ratio=0.0, decay_ratio=0.2, min_ratio=0.0), 10)
    assert [factor(i) for i in range(10)] == [1.0] * 9 + [0.5]


def test_d5_linear_falls_in_a_straight_line() -> None:
    """Every step takes the same part of the peak away."""
    factor = rate_factor(ScheduleConfig("linear", warmup_ratio=0.0, min_ratio=0.0), 8)
    assert [factor(i) for i in range(8)] == pytest.approx([1 - i / 8 for i in range(8)])


def test_d5_cosine_falls_along_half_a_cosine() -> None:
    """Slowly at both ends, half way down in the middle of the steps after warm-up."""
    factor = rate_factor(ScheduleConfig("cosine", warmup_ratio=0.0, min_ratio=0.0), 10)
    assert [factor(i) for i in (0, 1, 5, 9)] == pytest.approx([1.0, 0.97552826, 0.5, 0.02447174])


def test_d5_constant_stays_at_the_peak() -> None:
    """To the last step, whatever the floor is."""
    factor = rate_factor(ScheduleConfig("constant", warmup_ratio=0.0, min_ratio=0.1), 10)
    assert {factor(i) for i in range(10)} == {1.0}


def test_a_run_that_is_all_warm_up_has_a_course() -> None:
    """Degenerate ratios divide by nothing."""
    factor = rate_factor(ScheduleConfig("wsd", warmup_ratio=1.0, decay_ratio=0.0), 3)
    assert [factor(i) for i in range(3)] == pytest.approx([1 / 3, 2 / 3, 1.0])
