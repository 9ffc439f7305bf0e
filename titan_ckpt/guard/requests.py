"""Requests of `titan-ckpt save` to this run: rank 0 takes one at a time, and answers when the save has ended.

Owns the request that is under way. outside_request.py has the files; RunGuard lets all ranks save.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress

from titan_ckpt.directory.steps import open_steps
from titan_ckpt.errors import CheckpointError
from titan_ckpt.guard import outside_request
from titan_ckpt.guard.outside_request import PIN, Answer
from titan_ckpt.manager import CheckpointManager
from titan_ckpt.saving.saver import SaveHandle

logger = logging.getLogger(__name__)


class Requests:
    """The requests to one run; on the other ranks there never is one."""

    def __init__(self, manager: CheckpointManager, post: Callable[[], None]) -> None:
        """`post`: lets all ranks save after the step that is under way, and call `saved` then."""
        self._manager, self._post = manager, post
        self._announced = False
        self._asked: str | None = None
        self._answering: tuple[str, int, SaveHandle | None] | None = None
        self._refused = ""
        """Why the file `save-request` is no request, as last logged."""

    def announce(self) -> None:
        """Say in the run's folder that requests are taken; the first save may make the folder."""
        run = self._manager.base_folder
        if not self._announced and run.is_dir():
            self._announced = True
            with suppress(OSError):  # then no request can be taken either
                outside_request.announce(run)

    def look(self) -> None:
        """Take a request to save, and answer the previous one when its save has ended; in rank 0's watcher."""
        self.announce()
        if self._answering is not None:
            name, step, handle = self._answering
            if handle is not None and not handle.done:
                return
            error = None if handle is None or handle.succeeded() else str(handle.error or "see the log of the run")
            self._answer(name, step, error)
            self._answering = None
        elif self._asked is None and (asked := self._take()) is not None:
            if self._manager.config.save is None:
                self._answer(asked, 0, "this run saves nothing: its config has no [checkpoint.save]")
            else:
                self._asked = asked
                self._post()

    def _take(self) -> str | None:
        """Return the name of the waiting request and remove it; log once what cannot be one, or cannot be removed."""
        try:
            return outside_request.take(self._manager.base_folder)
        except OSError as error:
            if str(error) != self._refused:
                logger.warning("no request to save: %s", error)
            self._refused = str(error)
            return None

    def saved(self, step: int, fault: str | None) -> None:
        """Answer the request that `step` was saved for, or let `look` do so. `fault`: why it was not saved."""
        if self._asked is None:
            return
        handle = self._manager.in_flight
        if fault is None and self._manager.completed.saved != step:  # on_failure is "warn"
            fault = "the save has failed: see the log of the run"
        elif fault is None and self._asked.endswith(PIN):
            fault = self._pin(step, handle)
        if fault is None:
            self._answering = self._asked, step, handle
        else:
            self._answer(self._asked, step, fault)
        self._asked = None

    def _pin(self, step: int, save: SaveHandle | None) -> str | None:
        """Wait until a save is committed and pin its step, before a later save can expire it. Not collective.

        Return why it is not pinned although it is saved, or None.
        """
        if save is None or save.succeeded():
            try:
                open_steps(self._manager.folder).pin(step)
            except (CheckpointError, OSError) as error:
                return f"step {step} is saved, and not pinned: {error}"
        return None

    def _answer(self, name: str, step: int, error: str | None) -> None:
        """Answer a request; a disk that is full then is no reason to end the run."""
        try:
            outside_request.answer(self._manager.base_folder, Answer(name, step, error))
        except OSError as failure:
            logger.warning("the request to save is not answered: %s", failure)

    def close(self) -> None:
        """Take no more requests, and answer the one that is under way; its save may still have to end."""
        if self._announced:
            outside_request.retire(self._manager.base_folder)
        if self._asked is not None:
            self._answer(self._asked, 0, "the run ended before it could save")
        elif self._answering is not None:
            handle = self._answering[2]
            while handle is not None and not handle.done:
                time.sleep(0.05)
            self.look()
