"""Expressions from files: matched as `re` matches them, and in bounded time whatever they are."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_ckpt.encoding import foreign_pattern
from titan_ckpt.encoding.foreign_pattern import ForeignPatterns, pattern_fault

PATTERNS = st.recursive(
    st.sampled_from(["a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", "$", "^", r"\b", "(?i:A)", "(?s:.)", r"\w", ""]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+?", "?", "{2}", "{1,3}", "{0,}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
        inner.map(lambda text: f"(?={text})"),
        inner.map(lambda text: f"(?!{text})"),
    ),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None)
@given(PATTERNS, st.text("ab.A1\n", max_size=7))
def test_an_expression_matches_where_re_does(pattern: str, name: str) -> None:
    """Choices, repeats, sets, anchors, scoped flags and looks ahead give `re`'s answer."""
    expected = re.match(rf"(.*\.)?({pattern})$", name) is not None
    assert (ForeignPatterns({pattern: 1.0}).first(name) == 1.0) is expected


@pytest.mark.parametrize("pattern", ["(?<=a)b", "(?<!a)b", r"(?<=\.)b", "a|b", "(a|b){2}", r"x\.(1|2)\.q", "a)|(b"])
@pytest.mark.parametrize("name", ["b", "ab", "x.b", "aa", "x.1.q", "y.x.2.q", "x.3.q"])
def test_looks_behind_and_choices_at_the_top_match_where_re_does(pattern: str, name: str) -> None:
    """A look behind has a fixed width; a choice is not cut apart by what PEFT puts around it."""
    expected = re.match(rf"(.*\.)?({pattern})$", name) is not None
    assert (ForeignPatterns({pattern: 1.0}).first(name) == 1.0) is expected


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+$", "(a|a)*b", "(a|a?)+b", "(.*)*x", ".*" * 30 + "x", "(a*)*(a*)*b", "(?=(a+)+$)a*b", "(a|a)" * 30 + "b"],
)
def test_an_expression_that_would_run_for_ever_is_answered_at_once(pattern: str) -> None:
    """`re` takes longer than a day for some of these; they do not match, or they match."""
    started = time.monotonic()
    assert ForeignPatterns({pattern: 1.0}).first("a" * 60 + "!") is None
    assert time.monotonic() - started < 60


def test_the_first_expression_that_matches_wins() -> None:
    """The order is that of the file, and the end of a name is enough, as in PEFT."""
    patterns = ForeignPatterns({"v_proj": 1.0, r"layers\.\d+\.q_proj": 2.0, "q_proj": 3.0})
    assert [patterns.first(name) for name in ("m.layers.11.q_proj", "q_proj", "xq_proj", "a.v_proj")] == [2, 3, None, 1]


def test_all_lookups_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many expressions for many names are refused, also if each is quick."""
    monkeypatch.setattr(foreign_pattern, "MAX_STEPS", 1_000)
    patterns = ForeignPatterns(dict.fromkeys(map(str, range(30)), 1.0))
    with pytest.raises(ValueError, match="take more than 1000 steps"):
        [patterns.first(f"layer.{i}.x") for i in range(40)]


@pytest.mark.parametrize(
    ("pattern", "cause"),
    [
        ("(", "missing )"),
        (r"(a)\1", "a backreference"),
        ("(a)(?(1)b|c)", "a condition on a group"),
        ("(?>a+)b", "an atomic group"),
        ("a++b", "a possessive repeat"),
        ("(" * 900 + ")" * 900, "recursion"),
        ("a" * 2001, "2001 characters, at most 2000"),
        ("a{99999999999}", "repetition number is too large"),
    ],
)
def test_an_expression_that_is_not_matched_is_refused_with_its_cause(pattern: str, cause: str) -> None:
    """Expressions that need backtracking, that are invalid, or that are too long are refused with the reason."""
    fault = pattern_fault(pattern)
    assert fault is not None
    assert cause in fault
