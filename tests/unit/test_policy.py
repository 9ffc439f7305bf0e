"""When a save is due, and which steps expire: laws over all steps and settings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from titan_ckpt.config import KeepConfig, SaveConfig
from titan_ckpt.directory.retention import StepFacts, expired_steps

step_numbers = st.integers(0, 200)
step_lists = st.lists(step_numbers, max_size=20)
step_sets = st.frozensets(step_numbers, max_size=5)
some = st.integers(1, 30)
keeps = st.one_of(
    st.builds(KeepConfig, latest=some),
    st.builds(KeepConfig, every=some),
    st.builds(KeepConfig, latest=some, every=some),
    st.builds(KeepConfig, best=some, metric=st.sampled_from(["loss", "max:loss"])),
    st.builds(KeepConfig, every=st.integers(1, 500).map(lambda n: f"{n / 10} hours"), latest=some),
)


@st.composite
def histories(draw: st.DrawFn) -> dict[int, StepFacts]:
    """Steps saved one after another, some with a loss."""
    facts, now = {}, 1e9
    for step in sorted(set(draw(step_lists))):
        now += draw(st.floats(0, 1e5))
        loss = draw(st.none() | st.sampled_from([0.5, 1.0, 2.0]))
        facts[step] = StepFacts(now, {} if loss is None else {"loss": loss})
    return facts


@given(step_numbers, some, st.booleans())
def test_the_last_step_is_always_due_where_saving_is_configured(step: int, interval: int, flag: bool) -> None:
    """A run that ends leaves its end on disk, whatever the interval."""
    assert SaveConfig(interval, first_step=flag).is_due(step, last_step=True)


@given(some, st.integers(0, 100))
def test_due_steps_are_the_multiples_of_the_interval(interval: int, num_steps: int) -> None:
    """Step 0, before any training, is no multiple; nothing between multiples is due."""
    due = [s for s in range(num_steps + 1) if SaveConfig(interval).is_due(s, last_step=False)]
    assert due == list(range(interval, num_steps + 1, interval))


def test_the_first_step_is_due_on_request() -> None:
    """first_step adds step 1 and nothing else."""
    save = SaveConfig(interval=10, first_step=True)
    assert [s for s in range(21) if save.is_due(s, last_step=False)] == [1, 10, 20]


@given(histories(), keeps, step_sets, st.booleans())
def test_whatever_the_policy_what_must_stay_stays(
    facts: dict[int, StepFacts], keep: KeepConfig, protected: frozenset[int], is_known: bool
) -> None:
    """Each step that goes is named once, the oldest first: none of the k newest, or the newest without k, no protected
    one and no multiple of `every`. After the removal nothing more expires, so one that was interrupted can be taken up
    by deciding again; and nothing does without a policy.
    """
    steps, known = [*facts], (facts,) if is_known else ()
    expired = expired_steps(steps, keep, protected, *known)
    assert set(expired) <= set(steps) and expired == sorted(set(expired))
    remaining = sorted(set(steps) - set(expired))
    k = keep.latest or 1
    assert remaining[-k:] == sorted(steps)[-k:]
    assert not {*expired} & protected
    assert not [step for step in expired if keep.every_steps is not None and step % keep.every_steps == 0]
    assert expired_steps(remaining, keep, protected, *known) == []
    assert expired_steps(steps, None, protected) == []


@given(step_lists, some, step_sets)
def test_what_no_rule_keeps_expires(steps: list[int], latest: int, protected: frozenset[int]) -> None:
    """With `latest` alone, exactly the k newest and the protected remain: old steps do not pile up."""
    valid = sorted(set(steps))
    remaining = set(valid) - set(expired_steps(steps, KeepConfig(latest=latest), protected))
    assert remaining == set(valid[-latest:]) | (protected & set(valid))


@given(histories(), some, st.sampled_from(["min", "max"]))
def test_the_best_stay(facts: dict[int, StepFacts], best: int, mode: str) -> None:
    """No step that goes has a better loss than one that stays because of its loss."""
    keep = KeepConfig(best=best, metric="loss" if mode == "min" else "max:loss")
    expired = expired_steps(list(facts), keep, frozenset(), facts)
    losses = {step: f.metrics["loss"] for step, f in facts.items() if f.metrics}
    stay = sorted(losses[step] for step in losses if step not in expired)
    gone = [losses[step] for step in losses if step in expired]
    assert len(stay) >= min(best, len(losses))
    if gone and mode == "min":
        assert sorted(stay)[best - 1] <= min(gone)
    if gone and mode == "max":
        assert sorted(stay, reverse=True)[best - 1] >= max(gone)


@given(histories(), some)
def test_nothing_expires_for_a_metric_that_has_not_come(facts: dict[int, StepFacts], best: int) -> None:
    """A metric may come with the first evaluation, or never, because its name is misspelled."""
    keep = KeepConfig(best=best, latest=1, metric="eval/loss")
    assert expired_steps(list(facts), keep, frozenset(), facts) == []


@given(histories(), st.floats(0.1, 50.0))
def test_one_step_of_each_span_stays(facts: dict[int, StepFacts], hours: float) -> None:
    """Every step that goes has one that stays at most a span before it."""
    expired = expired_steps(list(facts), KeepConfig(every=f"{hours} hours"), frozenset(), facts)
    stay = [facts[step].unix_seconds for step in facts if step not in expired]
    for step in expired:
        assert any(0 <= facts[step].unix_seconds - kept < hours * 3600 for kept in stay)


def test_a_clock_that_was_put_back_or_forward_does_not_end_the_spans() -> None:
    """A first step dated years ahead, or a clock put back by more than a span, begins a new span."""
    hours = [1e6, 0.0, 1.0, 5.0, 1.5]
    facts = {step: StepFacts(hour * 3600, {}) for step, hour in enumerate(hours)} | {9: StepFacts(7e3, {})}
    assert expired_steps(list(facts), KeepConfig(every="3 hours"), frozenset(), facts) == [2]


def test_a_tie_goes_to_the_newer_step() -> None:
    """The newer one of two steps with the same loss is the best."""
    facts = {step: StepFacts(float(step), {"loss": 1.0}) for step in (1, 2)} | {3: StepFacts(3.0, {"loss": 9.0})}
    assert expired_steps([1, 2, 3], KeepConfig(best=1), frozenset(), facts) == [1]
