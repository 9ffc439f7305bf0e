"""Reading again what was wrong or failed, because one bad answer is no damage: only damage that stays makes a step bad.

Owns what counts as damage, as a failure that may pass, and as neither. Knows no format: the caller says what is wrong.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from titan_ckpt.errors import CheckpointError, CorruptCheckpointError
from titan_ckpt.stores.answers import StoreError
from titan_ckpt.stores.store import Place, store_of

logger = logging.getLogger(__name__)

WAITS_SECONDS: Sequence[float] = (0.1, 0.3, 0.9)
"""Pauses before a read that failed is made again; after the last one its error is raised."""

_OF_NAMES = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.EFBIG})
"""Errors that say what is at a path, and not that it could not be read."""

_Place = TypeVar("_Place", bound=Place)
_Value = TypeVar("_Value")


def may_pass(error: BaseException) -> bool:
    """Return whether an error says nothing about the file, such as ESTALE, ENOMEM or EACCES.

    A bucket's client has asked again for `checkpoint.store.retry_seconds` before its error is raised.
    """
    if not isinstance(error, OSError) or isinstance(error, CheckpointError | StoreError):
        return False
    return error.errno is not None and error.errno != errno.EIO and error.errno not in _OF_NAMES


def read_twice(path: _Place, read: Callable[[_Place], _Value], waits: Sequence[float] | None = None) -> _Value:
    """Return `read(path)`. What it finds damaged counts as damaged if it is so again when the disk or bucket is asked.

    `read` raises CorruptCheckpointError for wrong bytes, and opens the file itself. After an error that may pass it is
    called again after `waits`, by default WAITS_SECONDS.
    Raises: CorruptCheckpointError, also for a file that ends too early and for EIO; any other OSError as it is.
    """
    left = [*(WAITS_SECONDS if waits is None else waits)]
    doubt: Exception | None = None
    while True:
        try:
            value = read(path)
        except StoreError:
            raise
        except (CorruptCheckpointError, EOFError, OSError) as error:
            if may_pass(error) and left:
                logger.warning("%s: %s; reading it again in %g s", path, error, left[0])
                time.sleep(left.pop(0))
                continue
            if not isinstance(error, CorruptCheckpointError | EOFError) and error.errno != errno.EIO:
                raise
            if doubt is None:
                doubt, path = error, store_of(path).afresh(path)
                continue
            if isinstance(error, CorruptCheckpointError):
                raise
            raise CorruptCheckpointError(
                f"{path}: cannot be read ({error}). Load another step, or copy the file again from where it is whole",
                str(path),
            ) from error
        if doubt is not None:
            logger.warning("%s was read a second time, which went well; the first time: %s", path, doubt)
        return value
