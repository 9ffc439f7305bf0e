"""Errors that travel between processes."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import pytest

from titan_ckpt import errors

_ARGUMENTS: dict[type[errors.CheckpointError], tuple[object, ...]] = {
    errors.ConfigError: (["save.interval: 0 is not positive", "export: no format"], "run.toml"),
    errors.DataError: (["data: ended"],),
    errors.CorruptCheckpointError: ("a block is wrong", "rank-0", ["norm.weight"]),
    errors.HalfLoadedError: ("half", "step-4", ["norm.weight"]),
    errors.BaseMismatchError: ("another base", {"path": "a"}, {"path": "b"}),
    errors.GradientError: ("not finite", 7),
    errors.PeerError: ("rank 3 is silent", [3]),
}


def _kinds(kind: type[errors.CheckpointError] = errors.CheckpointError) -> list[type[errors.CheckpointError]]:
    return [kind, *(found for below in kind.__subclasses__() for found in _kinds(below))]


@pytest.mark.parametrize("kind", _kinds())
def test_an_error_comes_out_of_a_pickle_as_it_went_in(kind: type[errors.CheckpointError]) -> None:
    make: Any = kind
    error = make(*_ARGUMENTS.get(kind, ("a message",)))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error) and vars(again) == vars(error)


def test_one_thing_is_not_called_several() -> None:
    """A number of things stands before the word for one or for several."""
    assert [errors.counted(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    assert [errors.counted(n, "row is", "rows are") for n in (0, 1, 2)] == ["0 rows are", "1 row is", "2 rows are"]


HOSTILE = "w\x1b[2J\x9b1m\u202e\r\n12:00:00 saved step 7"
SHOWN = r"w\x1b[2J\x9b1m\u202e\r" + "\n  12:00:00 saved step 7"


def test_a_name_moves_no_cursor_and_forges_no_line(caplog: pytest.LogCaptureFixture) -> None:
    """In a message as in the log, as an argument or as part of the text; other packages' records are left alone."""
    assert str(errors.CorruptCheckpointError(HOSTILE)) == str(errors.SaveError(HOSTILE)) == SHOWN
    assert str(errors.PeerError("a\n  b\n\n  c", [1])) == "a\n  b\n\n  c"
    logging.getLogger("titan_ckpt.loading.restore").warning("skipped %s", HOSTILE)
    logging.getLogger("titan_ckpt.loading.restore").warning(f"skipped 100% of {HOSTILE}")
    logging.getLogger("another").warning("of %s", HOSTILE)
    assert caplog.messages == [f"skipped {SHOWN}", f"skipped 100% of {SHOWN}", f"of {HOSTILE}"]


def test_a_message_stays_readable() -> None:
    """Of one that quotes a large file the middle is left out."""
    text = str(errors.NotACheckpointError("a" * 10**6 + "z"))
    assert len(text) < 17_000 and text.startswith("aaa") and text.endswith("aaz") and " ... " in text
