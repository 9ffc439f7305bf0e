"""Read a run's TOML file: the settings, and the converters of its [[converters]] tables. Knows no converter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from titan_ckpt.encoding.named import converter_tables
from titan_ckpt.encoding.overrides import apply_overrides
from titan_ckpt.encoding.paths import require_local
from titan_ckpt.encoding.toml import from_dict, read_toml
from titan_ckpt.errors import ConfigError, collected, refuse
from titan_ckpt.training.config import RunConfig


def read_run(path: str, overrides: Sequence[str] = ()) -> tuple[RunConfig, Any]:
    """Return the checked settings from the file and the command line, and the run's converters (None without any).

    `Trainer(*read_run("run.toml")).run()` trains; so does a subclass of Trainer.
    Raises: ConfigError with all faults of the file; ConverterError for converters that cannot be combined.
    """
    require_local({"config": path})
    raw = apply_overrides(read_toml(path), overrides)
    tables = raw.pop("converters", [])
    problems: list[str] = []
    converters, config = None, None
    if tables:
        with collected(problems):
            found = converter_tables()
            if found is None:
                raise ConfigError(
                    ['converters: no installed package reads these tables; run: pip install "titan-ckpt"']
                )
            converters = found.from_tables(tables if isinstance(tables, list) else [tables], path)
    with collected(problems):
        config = from_dict(RunConfig, raw, path)
    refuse(*problems, source=path)
    return config, converters
