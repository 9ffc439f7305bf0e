"""Which step store a place has: one that commits by a rename, or one that commits by creating an object.

Owns that choice alone. Imports no torch for a mounted file system.
"""

from __future__ import annotations

import os
from pathlib import Path

from titan_ckpt.directory.steps import Steps
from titan_ckpt.directory.store import StepStore
from titan_ckpt.encoding.local_path import require_local
from titan_ckpt.stores.mounted import local_path
from titan_ckpt.stores.store import Place


def steps_at(root: Place) -> Steps:
    """Return the steps of a place, by the name that it is given; nothing is touched."""
    if (folder := local_path(root)) is not None:
        return StepStore(folder)
    from titan_ckpt.directory.bucket_steps import BucketSteps
    from titan_ckpt.stores.objects import object_path

    return BucketSteps(object_path(root))


def open_steps(root: Place) -> Steps:
    """Return the steps of a place, by its absolute name. Raises: ConfigError for a Path that is a URI."""
    if (folder := local_path(root)) is None:
        return steps_at(root)
    require_local({"root": folder})
    return StepStore(Path(os.path.abspath(folder)))
