"""Check that a run can write to its folders. Creates nothing, so that a run which cannot start leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from titan_ckpt.disk import posix
from titan_ckpt.errors import ConfigError
from titan_ckpt.stores.bucket import open_location
from titan_ckpt.training.config import RunConfig


def check_folders(config: RunConfig) -> None:
    """Raises: ConfigError listing every setting whose folder is a file, is below a file, or is not writable."""
    found = ((setting, posix.why_no_folder(folder)) for setting, folder in _folders(config))
    if problems := [f"{setting}: {why}" for setting, why in found if why]:
        raise ConfigError(problems)


def _folders(config: RunConfig) -> Iterator[tuple[str, Path]]:
    yield "data.cache_folder", Path(config.data.cache_folder)
    output = Path(config.output_folder)
    yield "output_folder", output
    if posix.why_no_folder(output) is None:  # otherwise folders below it have the same fault
        if isinstance(folder := open_location(config.checkpoint.folder, output, config.checkpoint.store), Path):
            yield "checkpoint.folder", folder
        for i, export in enumerate(config.checkpoint.export):
            if isinstance(place := open_location(export.folder, output, config.checkpoint.store), Path):
                yield f"checkpoint.export.{i}.folder", place
        if config.tensorboard is not None:
            yield "tensorboard.folder", output / config.tensorboard.folder
        if config.profiling is not None:
            yield "profiling.folder", output / config.profiling.folder
