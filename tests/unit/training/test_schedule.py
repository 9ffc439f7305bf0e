"""The learning rate's course."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from titan_ckpt.config import from_dict
from titan_ckpt.errors import ConfigError
from titan_ckpt.training.config import RunConfig
from titan_ckpt.training.schedule import (
    Decay,
    ScheduleConfig,
    changes,
    find_decay,
    rate_factor,
    rescaled,
    schedule_record,
)
from titan_ckpt.training.train_state import TrainState


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_d5_warm_up_rises_to_the_peak_and_nothing_exceeds_it(kind: str) -> None:
    """The last warm-up step is the first at the peak; the peak is the largest factor."""
    factor = rate_factor(ScheduleConfig(kind, warmup_ratio=0.1, min_ratio=0.1), 50)
    course = [factor(i) for i in range(50)]
    assert course[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert max(course) == 1.0
    assert all(a >= b for a, b in pairwise(course[4:]))


@pytest.mark.parametrize(
    ("kind", "settings", "steps", "course"),
    [
        ("constant", {"min_ratio": 0.1}, 10, dict.fromkeys(range(10), 1.0)),
        ("constant", {"warmup_ratio": 0.11}, 10, {0: 0.5, 1: 1.0, 2: 1.0}),
        ("linear", {}, 8, {i: 1 - i / 8 for i in range(8)}),
        ("cosine", {}, 10, {0: 1.0, 1: 0.97552826, 5: 0.5, 9: 0.02447174}),
        ("wsd", {"decay": 0.2}, 10, dict.fromkeys(range(9), 1.0) | {9: 0.5}),
        ("wsd", {"decay": 0}, 10, dict.fromkeys(range(10), 1.0)),
        ("wsd", {"warmup_ratio": 1.0, "decay": 0.0}, 3, {0: 1 / 3, 1: 2 / 3, 2: 1.0}),
        ("linear", {"min_ratio": 0.25}, 40, {39: 0.26875, 40: 0.25, 400: 0.25}),
        ("cosine", {"min_ratio": 0.25}, 40, {39: 0.251156, 40: 0.25, 400: 0.25}),
        ("wsd", {"min_ratio": 0.25}, 40, {39: 0.34375, 40: 0.25, 400: 0.25}),
    ],
)
def test_d5_every_kind_has_its_course(kind: str, settings: Any, steps: int, course: dict[int, float]) -> None:
    """A part of a step warms up for a whole one; stable until the decay; all warm-up divides by nothing.

    After the last step the factor is `min_ratio`, and stays there.
    """
    factor = rate_factor(ScheduleConfig(kind, **{"warmup_ratio": 0.0, "min_ratio": 0.0, **settings}), steps)
    assert {step: factor(step) for step in course} == pytest.approx(course)


def run(steps: int = 20, **schedule: Any) -> RunConfig:
    tables = {
        "training": {"steps": steps},
        "schedule": {"kind": "wsd", "warmup_ratio": 0.0, "min_ratio": 0.0, **schedule},
    }
    return from_dict(RunConfig, {"output_folder": "run", "model": {"flavor": "debug-0.5m"}, **tables})


def resumed(step: int, **saved: Any) -> TrainState:
    state = TrainState()
    state.step, state.saved_schedule = step, saved
    return state


def test_c5_a_decay_has_a_length_in_steps_or_in_tokens() -> None:
    """By default it ends with the last step; a number of tokens is rounded up to whole steps of full batches."""
    for length in ({"decay": 4}, {"decay": "301 tokens"}):
        decay = find_decay(run(**length), 20, 100)
        assert decay == Decay(16, 4)
        factor = rate_factor(run(**length).schedule, 20, decay)
        assert [factor(i) for i in range(15, 21)] == [1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert find_decay(run(), 20, 100) is None, "a share"


def test_c5_a_decay_in_tokens_says_if_another_size_of_steps_changes_its_length() -> None:
    """More ranks take as many tokens in fewer steps, and the settings are the same."""
    config, before, now = run(decay="400 tokens"), resumed(8), resumed(8)
    assert find_decay(config, 20, 100, before) == Decay(16, 4)
    assert find_decay(config, 20, 200, now) == Decay(18, 2)
    assert changes(before.schedule, now.schedule) == "schedule.decay in steps from 4 to 2"


def test_c5_a_decay_begins_at_a_step_or_now() -> None:
    """The rate falls after that step and stays at its floor; one that began goes on there in every later resume."""
    factor = rate_factor(run(start_decay=5, decay=2).schedule, 20, find_decay(run(start_decay=5, decay=2), 20, 1))
    assert [factor(i) for i in range(4, 9)] == [1.0, 1.0, 0.5, 0.0, 0.0]
    now = run(start_decay="now", decay=4)
    assert find_decay(now, 20, 1) is None, "the load says it"
    state = resumed(7, **{"schedule.start_decay": None})
    assert find_decay(now, 20, 1, state) == Decay(7, 4)
    again = resumed(9, **{"schedule.start_decay": "now", **state.schedule})
    assert find_decay(now, 20, 1, again) == Decay(7, 4)


def test_c5_what_a_decay_lacks_is_said() -> None:
    """A length, a checkpoint, or steps; and settings that contradict one another."""
    for faulty, message in (
        ({"start_decay": "now"}, "length of the decay is missing"),
        ({"decay": 2, "kind": "cosine"}, 'a setting of kind = "wsd"'),
    ):
        with pytest.raises(ConfigError, match=message):
            run(**faulty)
    with pytest.raises(ConfigError, match="there is no checkpoint"):
        find_decay(run(start_decay="now", decay=4), 20, 1, resumed(0))
    with pytest.raises(ConfigError, match=r"after step 18 takes 4 steps.*set training.steps = 22"):
        find_decay(run(start_decay="now", decay=4), 20, 1, resumed(18))
    with pytest.raises(ConfigError, match=r"set training\.steps = 30"):
        find_decay(run(decay=30), 20, 1)


def test_d5_a_record_of_three_settings_of_a_decay_is_compared_with_its_one_length() -> None:
    """A step of an earlier version has decay_ratio, decay_steps and decay_tokens; only another length is reported."""
    before = {"schedule.kind": "wsd", "schedule.decay_ratio": 0.2, "schedule.decay_steps": None}
    for tokens, same, other in ((None, 0.2, 0.5), (300, "300 tokens", "400 tokens")):
        record = {**before, "schedule.decay_tokens": tokens}
        assert rescaled(record, {"schedule.kind": "wsd", "schedule.decay": same}, 5) == ""
        changed = rescaled(record, {"schedule.kind": "wsd", "schedule.decay": other}, 5)
        assert changed == f"schedule.decay from {same} to {other}"


def test_d5_a_constant_rate_is_rescaled_in_its_warm_up_alone() -> None:
    """Other steps, floors and lengths of decays change no rate of it; another length of warm-up does, until it ends."""

    def record(steps: int, kind: str = "constant", **settings: Any) -> dict[str, Any]:
        return schedule_record(run(steps, **{"kind": kind, "warmup_ratio": 0.1, "min_ratio": 0.1, **settings}), steps)

    before = record(20)
    assert rescaled(before, record(40, min_ratio=0.0), 4) == ""
    assert rescaled(before, record(40, min_ratio=0.0), 3) == "training.steps from 20 to 40"
    assert rescaled(before, record(40, warmup_ratio=0.05), 1) == "", "two steps, as before"
    assert rescaled(before, record(20, "linear"), 8) == "schedule.kind from constant to linear"
    assert rescaled(record(20, "linear"), record(40, "linear"), 8) == "training.steps from 20 to 40"
    assert rescaled({}, before, 1) == ""
