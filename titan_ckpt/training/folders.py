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
    output = Path(config.output_folder)
    why_no_output = posix.why_no_folder(output)
    found = [("output_folder", why_no_output)] + [
        (setting, posix.why_no_folder(folder))
        for setting, folder in _folders(config, output)
        if why_no_output is None or not folder.is_relative_to(output)  # below it, folders have the same fault
    ]
    if problems := [f"{setting}: {why}" for setting, why in found if why]:
        raise ConfigError(problems)


def _folders(config: RunConfig, output: Path) -> Iterator[tuple[str, Path]]:
    yield "data.cache_folder", Path(config.data.cache_folder)
    if isinstance(folder := open_location(config.checkpoint.folder, output, config.checkpoint.store), Path):
        yield "checkpoint.folder", folder
    for i, export in enumerate(config.checkpoint.export):
        if isinstance(place := open_location(export.folder, output, config.checkpoint.store), Path):
            yield f"checkpoint.export.{i}.folder", place
    if config.tensorboard is not None:
        yield "tensorboard.folder", output / config.tensorboard.folder
    if config.profiling is not None:
        yield "profiling.folder", output / config.profiling.folder
