"""Errors that travel between processes."""

from __future__ import annotations

import pickle

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
    error = kind(*_ARGUMENTS.get(kind, ("a message",)))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error) and vars(again) == vars(error)


def test_one_thing_is_not_called_several() -> None:
    """A number of things stands before the word for one or for several."""
    assert [errors.counted(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    assert [errors.counted(n, "row is", "rows are") for n in (0, 1, 2)] == ["0 rows are", "1 row is", "2 rows are"]
