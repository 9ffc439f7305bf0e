"""What parameters are stored in: trained ones in float32, frozen ones in the dtype of the weights they are loaded from.

Owns that decision. What matrices are multiplied in is training.compute_dtype's; what fits what, the load's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from titan_ckpt.config import CheckpointConfig
from titan_ckpt.errors import CheckpointError
from titan_ckpt.models.language_model import LanguageModel
from titan_ckpt.step_folders import survey
from titan_ckpt.storage import open_reader
from titan_ckpt.storage.base import TensorReader

_KEPT = (torch.bfloat16, torch.float16)
"""Dtypes worth keeping: what is smaller than these is not computed with as it is."""


def keep_stored_dtypes(model: LanguageModel, config: CheckpointConfig, base_folder: Path) -> None:
    """Give frozen parameters the dtype they have where the run will load them from; call it before sharding.

    What cannot be opened is left to the load, which says why.
    """
    frozen = {fqn: p for fqn, p in model.named_parameters() if not p.requires_grad}
    if not frozen:
        return
    key_map = model.key_map()
    with ExitStack() as stack:
        for reader in _sources(config, base_folder, stack):
            for fqn, parameter in list(frozen.items()):
                keys = [f"model.{fqn}", fqn] if reader.format in ("native", "dcp") else key_map.group_of_fqn(fqn).keys
                dtypes = {reader.tensors[key].dtype for key in keys if key in reader.tensors}
                if len(dtypes) == 1:
                    (dtype,) = dtypes
                    parameter.data = parameter.data.to(dtype) if dtype in _KEPT else parameter.data
                    del frozen[fqn]


def _sources(config: CheckpointConfig, base_folder: Path, stack: ExitStack) -> Iterator[TensorReader]:
    """Yield the run's own newest step, then the initial sources: the order in which a weight's first one counts."""
    root = base_folder / config.folder
    steps = [step.path for step in survey(root).steps[-1:]]
    for path in [*steps, *(Path(source.path) for source in config.initial_load)]:
        try:
            yield stack.enter_context(open_reader(path))
        except (CheckpointError, OSError):
            continue
