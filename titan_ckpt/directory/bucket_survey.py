"""The committed steps below a URL, as any process finds them: by one listing of commits and one of files.

Owns the order of these requests, and what is said of a step with a fault. Changes nothing. `bucket_commits` knows what
the objects below `commits/` mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from titan_ckpt.directory.bucket_commits import Commit, Commits, Look
from titan_ckpt.directory.lease import ObjectLease
from titan_ckpt.directory.names import (
    COMMITS,
    DATA,
    PIN_NAME,
    CommittedStep,
    Survey,
    looks_like_a_step,
    step_name,
    step_of,
)
from titan_ckpt.directory.steps import faults_of
from titan_ckpt.disk.direct import meanwhile
from titan_ckpt.errors import CorruptCheckpointError, listed
from titan_ckpt.stores.bucket import BucketPath

ATTEMPT = re.compile(r"[0-9a-f]{32}")
"""Id of an attempt."""
Sizes = dict[tuple[int, str], dict[str, int]]
"""(Step, attempt) -> size of each of its files."""
_WAS_LEFT = "set aside when its run went back to an earlier step"


def survey(root: BucketPath, commits: Commits) -> Survey:
    """List the commits and the files at the same time, and read the commits that are new. Raises: OSError.

    A step that has no fault is whole, whichever listing came first: its files come before its commit, and go after it.
    A fault may come from the order, for example if the step was committed between the two. So the files are listed
    again, after the commits. A fault that stays counts if the commits are the same after that; else the step was
    deleted meanwhile, and all is looked at again.
    """
    sizes: Sizes = {}
    with meanwhile(lambda: sizes.update(listed_sizes(root)), patience=0.0):
        look = commits.look()
    while True:
        seen = _survey_of(root, look, sizes)
        if _is_clear(seen):
            return seen
        sizes = listed_sizes(root)
        seen = _survey_of(root, look, sizes)
        if _is_clear(seen) or (again := commits.look()) == look:
            return seen
        look = again


def listed_sizes(root: BucketPath) -> Sizes:
    """Return the sizes of the files of every attempt, by one listing. Raises: StoreError."""
    sizes: Sizes = {}
    prefix = (root / DATA).key
    for facts in root.bucket.list_objects(prefix):
        step, _, rest = facts.key.removeprefix(f"{prefix}/").partition("/")
        attempt, _, name = rest.partition("/")
        number = step_of(step)
        if number is not None and name and ATTEMPT.fullmatch(attempt):
            sizes.setdefault((number, attempt), {})[name] = facts.num_bytes
    return sizes


def _survey_of(root: BucketPath, look: Look, sizes: Sizes) -> Survey:
    steps: dict[int, CommittedStep] = {}
    rejected = [(f"{step_name(c.step)}.{c.attempt}", _WAS_LEFT) for c in look.commits if c.is_set_aside]
    for commit in look.commits:
        if not commit.is_current:
            continue
        try:
            committed = _committed(commit, sizes.get((commit.step, commit.attempt), {}))
        except CorruptCheckpointError as error:
            rejected.append((step_name(commit.step), str(error)))
            continue
        other = steps.setdefault(commit.step, committed)
        if other is not committed:  # only a store without conditional puts lets it happen
            older, steps[commit.step] = sorted((other, committed), key=lambda c: c.manifest.created_unix_seconds)
            rejected.append((f"{step_name(commit.step)}.{older.manifest.attempt}", "an older save of this step"))
    if not look.commits:
        rejected += [*_strangers(root, look.strangers), *lost(look, sizes)]
    return Survey(tuple(steps[step] for step in sorted(steps)), (), tuple(rejected))


def lost(look: Look, attempts: Iterable[tuple[int, str]]) -> list[tuple[str, str]]:
    """Return (name, reason) of every attempt that has files where all of `commits/` was deleted, or not copied."""
    reason = f"its files are there, and {COMMITS}/, which says whether they are a whole step, is empty: put it back"
    return [(f"{DATA}/{step_name(step)}/{attempt}", reason) for step, attempt in sorted(attempts) if look.is_empty]


def _strangers(root: BucketPath, strangers: list[str]) -> list[tuple[str, str]]:
    """Return what looks like checkpoints of another program, where there are none of ours.

    Raises: PreflightError if the lease is not one of ours, because a web server may list nothing, too; OSError.
    """
    ObjectLease.named_in(root)
    names = [*root.bucket.list_names(root.key), *strangers]
    reason = "not a checkpoint of titan_ckpt in a bucket, which has another layout than a folder on a disk"
    return [(name, reason) for name in names if looks_like_a_step(name)]


def _is_clear(seen: Survey) -> bool:
    """Return whether the listings show no fault; that a step was set aside is none."""
    return all(reason == _WAS_LEFT for _, reason in seen.rejected)


def _committed(commit: Commit, sizes: Mapping[str, int]) -> CommittedStep:
    """Return a commit as a step. `sizes`: those of its files. Raises: CorruptCheckpointError."""
    manifest = commit.manifest()
    files = commit.path.parent.parent / DATA / step_name(commit.step) / commit.attempt
    if faults := faults_of(manifest, sizes):
        raise CorruptCheckpointError(f"{files}: {listed(faults, last=' ')}", str(files))
    return CommittedStep(commit.step, files, manifest, commit.content, (PIN_NAME,) if commit.is_pinned else ())
