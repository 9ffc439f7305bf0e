"""Dtypes of parameters: trained ones are float32, frozen ones have the dtype of the weights that they are loaded from.

Owns this decision only. training.compute_dtype sets the dtype of matrix products; the load checks what fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from titan_ckpt.config import CheckpointConfig
from titan_ckpt.directory.names import survey
from titan_ckpt.errors import CheckpointError
from titan_ckpt.formats.open import open_reader
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.models.language_model import LanguageModel

_KEPT = (torch.bfloat16, torch.float16)
"""Stored dtypes that are kept; values of smaller dtypes must be converted before a computation."""


def keep_stored_dtypes(model: LanguageModel, config: CheckpointConfig, base_folder: Path) -> None:
    """Cast frozen parameters to the dtype of the source that the run will load them from. Call it before sharding.

    Sources that cannot be opened are skipped; the load will report the reason.
    """
    frozen = {fqn: p for fqn, p in model.named_parameters() if not p.requires_grad}
    if not frozen:
        return
    key_map = model.key_map()
    with ExitStack() as stack:
        for reader in _sources(config, base_folder, stack):
            table = key_map.of_folder(reader.tensors) if reader.format == "hf" else key_map
            for fqn, parameter in list(frozen.items()):
                keys = [f"model.{fqn}", fqn] if reader.format in ("native", "dcp") else table.group_of_fqn(fqn).keys
                dtypes = {reader.tensors[key].dtype for key in keys if key in reader.tensors}
                if len(dtypes) == 1:
                    (dtype,) = dtypes
                    parameter.data = parameter.data.to(dtype) if dtype in _KEPT else parameter.data
                    del frozen[fqn]


def _sources(config: CheckpointConfig, base_folder: Path, stack: ExitStack) -> Iterator[TensorReader]:
    """Yield the run's newest step, then the initial sources; for each weight the first source that has it counts."""
    root = base_folder / config.folder
    steps = [step.path for step in survey(root).steps[-1:]]
    initial = [(Path(source.path), source.ignore) for source in config.initial_load]
    for path, ignore in [*((step, ()) for step in steps), *initial]:
        try:
            yield stack.enter_context(open_reader(path, ignore=ignore))
        except (CheckpointError, OSError):
            continue
