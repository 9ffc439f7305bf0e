"""Small files that replace others."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from titan_ckpt.disk import posix
from titan_ckpt.guard import outside_request
from titan_ckpt.training.outcome import STOPPED, Outcome, record_stop


@pytest.mark.parametrize("broken", ["pwrite_all", "fsync", "rename_noreplace"])
def test_a_file_that_cannot_replace_another_leaves_nothing_of_itself(
    tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk under the file of a stopped run, and under an answer: an error, and no draft beside them."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(posix, broken, full)
        with pytest.raises(OSError, match="full"):
            record_stop(tmp_path, Outcome(2, 4, 2, "SIGTERM to rank 0"))
        with pytest.raises(OSError, match="full"):
            outside_request.answer(tmp_path, outside_request.Answer("a", 2))
    assert list(tmp_path.iterdir()) == []
    for step in (2, 3):
        record_stop(tmp_path, Outcome(step, 4, step, "SIGTERM to rank 0"))
    assert [path.name for path in tmp_path.iterdir()] == [STOPPED]
    assert '"step": 3' in (tmp_path / STOPPED).read_text()
