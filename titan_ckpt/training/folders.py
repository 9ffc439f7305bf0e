"""Check that a run can write to its folders and files. Creates nothing: a run which cannot start leaves no trace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from titan_ckpt.disk import posix
from titan_ckpt.errors import refuse
from titan_ckpt.guard.outside_request import ANSWER, TAKER
from titan_ckpt.stores.store import local_path, open_location
from titan_ckpt.telemetry.events import METRICS, TELEMETRY
from titan_ckpt.training.callbacks.process import PROFILES
from titan_ckpt.training.callbacks.trackers import RUN_ID
from titan_ckpt.training.config import RunConfig
from titan_ckpt.training.outcome import STOPPED

FILES = (METRICS, STOPPED, TELEMETRY, RUN_ID, ANSWER, TAKER)
"""Files that a run writes into its output folder itself."""


def check_folders(config: RunConfig) -> None:
    """Check all folders of a run, and the files in its output folder.

    Raises: ConfigError listing every setting whose folder is a file, is below a file, or is not writable, and every
        file of the run in whose place is a folder, or which cannot be read.
    """
    output = Path(config.output_folder)
    why_no_output = posix.why_no_folder(output)
    found = [("output_folder", why_no_output)] + [
        (setting, posix.why_no_folder(folder))
        for setting, folder in _folders(config, output)
        if why_no_output is None or not folder.is_relative_to(output)  # below it, folders have the same fault
    ]
    if why_no_output is None:
        found += [("output_folder", _why_no_file(output / name)) for name in FILES]
    refuse(*(f"{setting}: {why}" for setting, why in found if why))


def _why_no_file(path: Path) -> str | None:
    """Return why a run cannot go on with a file of its own; None if it can, or if there is none."""
    if path.is_dir():
        fault = "is a folder, and the run writes a file of that name"
    elif path.exists() and not os.access(path, os.R_OK):
        fault = "cannot be read, and the run goes on with what it says"
    else:
        return None
    return f"{path} {fault}: move it away, or set another output_folder"


def _folders(config: RunConfig, output: Path) -> Iterator[tuple[str, Path]]:
    yield "data.cache_folder", Path(config.data.cache_folder)
    if folder := local_path(open_location(config.checkpoint.folder, output, config.checkpoint.store)):
        yield "checkpoint.folder", folder
    for i, export in enumerate(config.checkpoint.export):
        if place := local_path(open_location(export.folder, output, config.checkpoint.store)):
            yield f"checkpoint.export.{i}.folder", place
    if config.tensorboard is not None:
        yield "tensorboard.folder", output / config.tensorboard.folder
    if config.profiling is not None:
        yield "profiling", output / PROFILES
