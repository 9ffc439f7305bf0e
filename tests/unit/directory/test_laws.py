"""The laws of step stores, on a disk and in memory; tests/stores has them for buckets."""

from __future__ import annotations

import errno
import uuid
from pathlib import Path
from typing import Any

import pytest

import tests.memory_store  # noqa: F401 - it names the scheme
from tests.steps_tests import StepsTests, manifest_of, save, there, write
from titan_ckpt.directory.steps import Steps
from titan_ckpt.errors import CommitConflictError, CorruptCheckpointError
from titan_ckpt.stores.answers import StoreError
from titan_ckpt.stores.store import Place, open_location


class TestFolder(StepsTests):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self._root = tmp_path

    def make_place(self) -> Path:
        return self._root / uuid.uuid4().hex


class TestMemory(StepsTests):
    def make_place(self) -> Place:
        return open_location(f"ram://box/{uuid.uuid4().hex}")

    def test_a_commit_in_doubt_is_asked_for_again_after_an_interrupt(
        self, steps: Steps, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its answer was lost and it arrives late; the save between was interrupted while it asked. None is twice."""
        attempt = steps.begin(1, 10)
        write(attempt)

        def lost(*_: Any) -> None:
            raise StoreError(errno.EIO, "no answer", is_final=False)

        def interrupted(_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as silent:
            silent.setattr(steps.root.bucket, "create", lost)
            with pytest.raises(StoreError):
                steps.commit(attempt, manifest_of(attempt))
            assert not steps.abandon(attempt)
        with monkeypatch.context() as hasty:
            hasty.setattr(steps, "_recover", interrupted)
            with pytest.raises(KeyboardInterrupt):
                steps.begin(1, 10)
        steps._has_leftovers = False  # as if the interrupt had come right after this
        other = steps.begin(1, 10)
        with pytest.raises(FileExistsError):
            steps._commits.commit(1, attempt.id, manifest_of(attempt).to_bytes())  # type: ignore[attr-defined]
        write(other)
        steps.commit(other, manifest_of(other))
        steps.close()
        assert steps.survey().rejected == () and there(steps) == [1]

    def test_a_run_whose_commits_are_taken_away_saves_nothing_until_they_are_back(self, steps: Steps) -> None:
        """A later clean-up would take the files of its steps for those of interrupted saves."""
        save(steps, 1, 2)
        bucket = steps.root.bucket
        prefix = (steps.root / "commits").key
        away = {facts.key: bucket.read(facts.key)[0] for facts in bucket.list_objects(prefix)}
        bucket.delete([*away])
        for _ in range(2):
            with pytest.raises(CorruptCheckpointError, match="nothing is deleted"):
                steps.begin(3, 10)
            steps._has_leftovers = not steps._has_leftovers
        for key, content in away.items():
            bucket.put(key, content)
        save(steps, 3)
        with pytest.raises(CommitConflictError, match="committed already"):
            steps.begin(3, 10)
        steps.close()
        assert there(steps) == [1, 2, 3]
