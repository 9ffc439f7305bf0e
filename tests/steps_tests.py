"""The laws of a step store as a test class: on a disk, in a bucket and in memory. Inherit it to test one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import pytest

from titan_ckpt.config import KeepConfig
from titan_ckpt.directory import lease as leases
from titan_ckpt.directory.manifest import FileRecord, Kind, Manifest
from titan_ckpt.directory.steps import Attempt, Steps, open_steps
from titan_ckpt.disk import posix
from titan_ckpt.errors import CheckpointNotFoundError, CommitConflictError, PreflightError, SaveError
from titan_ckpt.stores.store import Place, store_of


def write(attempt: Attempt) -> None:
    """Write the only file of an attempt."""
    store_of(attempt.path).put_new(attempt.path / "state.json", b"{}")


def manifest_of(attempt: Attempt, kind: Kind = "full") -> Manifest:
    """Return the manifest of what `write` has written."""
    file = FileRecord("state.json", 2, "0" * 32)
    return Manifest(attempt.step, kind, attempt.id, 1, 0.0, ("model",), [], None, None, (file,))


def save(steps: Steps, *numbers: int, kind: Kind = "full") -> None:
    """Commit these steps."""
    for number in numbers:
        attempt = steps.begin(number, 10)
        write(attempt)
        steps.commit(attempt, manifest_of(attempt, kind))


def there(steps: Steps) -> list[int]:
    return [step.step for step in steps.survey().steps]


def being_removed(steps: Steps) -> list[str]:
    """Return the marks of removals that have not ended; a disk has none."""
    return [name for name in store_of(steps.root).names_in(steps.root / "commits") if name.endswith(".removal")]


def cut(files: Place) -> None:
    """Let a file have another size."""
    store_of(files).remove([files / "state.json"])
    store_of(files).put_new(files / "state.json", b"{")


class StepsTests(ABC):
    """Tests of every law. Define `make_place`."""

    @abstractmethod
    def make_place(self) -> Place:
        """Return a place where nothing is, another one at each call."""

    @pytest.fixture
    def steps(self) -> Steps:
        return open_steps(self.make_place())

    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (lambda files: store_of(files).remove([files / "state.json"]), "state.json is missing"),
            (lambda files: store_of(files).put_new(files / "rank-00007.json", b"x"), "rank-00007.json is not expected"),
            (cut, "state.json has 1 bytes, 2 were written"),
        ],
    )
    def test_what_does_not_match_the_reports_is_not_committed(
        self, steps: Steps, spoil: Callable[[Place], None], message: str
    ) -> None:
        """A file missing, left over or of another size fails the save; the step before stays."""
        save(steps, 10)
        attempt = steps.begin(20, 100)
        write(attempt)
        spoil(attempt.path)
        with pytest.raises(SaveError, match=message):
            steps.commit(attempt, manifest_of(attempt))
        assert not steps.abandon(attempt)
        assert there(steps) == [10] and store_of(attempt.path).names_in(attempt.path) == []
        save(steps, 20)
        steps.close()
        assert there(steps) == [10, 20]

    def test_an_attempt_that_is_abandoned_twice_leaves_nothing(self, steps: Steps) -> None:
        """After a failed write the same step can be saved; one that is older than a committed step, or it, cannot."""
        attempt = steps.begin(5, 100)
        write(attempt)
        assert not steps.abandon(attempt) and not steps.abandon(attempt)
        assert store_of(attempt.path).names_in(attempt.path) == [] and not steps.exists(5)
        save(steps, 5)
        for number, message in ((4, "older than step 5"), (5, "step 5 is committed already")):
            with pytest.raises(CommitConflictError, match=message):
                steps.begin(number, 100)
        steps.close()
        assert steps.exists(5) and steps.left_over() == ()

    def test_a_rollback_sets_newer_steps_aside_whole_or_not(
        self, steps: Steps, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Going on from 10 gives 20 and 30 other names at the first save; they can be deleted, but not a pinned one."""
        save(steps, 10, 20, 30)
        steps.pin(20)
        cut(steps.inspect(30).path)
        steps.resume_from(10)
        assert there(steps) == [10, 20] and steps.set_aside() == {}
        save(steps, 15, 20)
        assert there(steps) == [10, 15, 20] and steps.inspect(20).foreign == ()
        assert caplog.text.count("went back to step 10") == 2
        aside = steps.set_aside()
        assert sorted(name.partition(".")[0] for name in aside) == ["step-20", "step-30"] and all(aside.values())
        pinned, other = sorted(aside)
        for dry_run in (True, False):
            with pytest.raises(SaveError, match=r"(?i)pinned"):
                steps.remove_set_aside(pinned, dry_run=dry_run)
            steps.remove_set_aside(other, dry_run=dry_run)
        steps.expire(KeepConfig(latest=1))
        steps.close()
        assert [*steps.set_aside()] == [pinned] and there(steps) == [10, 20]  # 10 is what this run stands on

    def test_retention_counts_only_whole_steps(self, steps: Steps) -> None:
        """A step whose file was lost or cut short is none of the two that stay, and stays with its reason."""
        save(steps, 1, 2, 3, 4)
        lost = steps.inspect(2).path
        store_of(lost).remove([lost / "state.json"])
        cut(steps.inspect(4).path)
        assert steps.expire(KeepConfig(latest=2)) == []
        assert steps.expire(KeepConfig(latest=1)) == [1]
        steps.close()
        seen = steps.survey()
        assert there(steps) == [3] and [name for name, _ in seen.rejected] == ["step-2", "step-4"]
        assert "state.json" in seen.rejected[0][1] and "state.json" in seen.rejected[1][1]

    def test_retention_keeps_pinned_and_protected_steps_and_weights_apart(self, steps: Steps) -> None:
        """Weights-only steps do not crowd out those that a run resumes from."""
        save(steps, *range(1, 7))
        save(steps, 7, 8, kind="model")
        steps.pin(1)
        steps.pin(1)
        keep, second = KeepConfig(latest=1), steps.inspect(2).path
        assert [step.step for step in steps.expired(keep, {3})] == [2, 4, 5, 7]
        steps.resume_from(3)
        assert steps.expire(keep) == [2, 4, 5, 7] and steps.expire(None) == []
        assert there(steps) == [1, 3, 6, 8] and store_of(second).names_in(second) == []
        assert being_removed(steps) == []
        with pytest.raises(SaveError, match=r"(?i)pinned"):
            steps.remove(steps.inspect(1))
        steps.unpin(1)
        assert steps.expire(keep) == [1] and steps.left_over() == ()
        steps.close()
        with pytest.raises(CheckpointNotFoundError, match="step 1 is not there; committed steps: 3, 6, 8"):
            steps.unpin(1)

    def test_a_step_that_was_pinned_after_it_was_listed_is_not_removed(self, steps: Steps) -> None:
        """Another process has pinned it while this one decided what expires."""
        save(steps, 1)
        listed = steps.inspect(1)
        open_steps(steps.root).pin(1)
        with pytest.raises(SaveError, match=r"(?i)pinned"):
            steps.remove(listed)
        steps.close()
        assert steps.inspect(1).foreign == ("PINNED",) and being_removed(steps) == []

    def test_one_process_writes_and_another_that_takes_over_clears_away_its_save(
        self, steps: Steps, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another object of the process is refused; the one that lost the lease deletes nothing and commits nothing."""
        quick = open_steps(steps.root)
        lost = steps.open()
        with pytest.raises(CommitConflictError, match="already writes here"):
            quick.open()
        old = steps.begin(1, 100)
        write(old)
        leases.held.clear()  # as if the first one were on another machine, which no lock reaches
        monkeypatch.setattr(posix, "lock", lambda fd: None)
        attempt = quick.begin(1, 100)
        write(attempt)
        with pytest.raises(CommitConflictError, match="taken over"):
            steps._recover(lost)
        with pytest.raises(CommitConflictError, match="taken over"):
            steps.commit(old, manifest_of(old))
        assert store_of(old.path).names_in(old.path) == []
        quick.commit(attempt, manifest_of(attempt))
        with pytest.raises(CommitConflictError, match="taken over"):
            steps.begin(2, 100)
        quick.close()
        assert quick.inspect(1).manifest.attempt == attempt.id

    def test_a_test_save_comes_back_whole_or_is_an_error(self, steps: Steps) -> None:
        """It leaves nothing, also if a rank's bytes are missing."""
        steps.open()
        name = steps.begin_probe(100)
        with pytest.raises(PreflightError, match="0 of 1 ranks' bytes came back"):
            steps.end_probe(name, 1)
        name = steps.begin_probe(100)
        for rank in range(3):
            steps.write_probe(name, rank)
        steps.end_probe(name, 3)
        steps.close()
        assert store_of(steps.root).folder_bytes(steps.root) < 1000 and steps.left_over() == ()
