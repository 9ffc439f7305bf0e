"""Dtypes of parameters, and the settings of this process that decide the last bits of a step.

Trained parameters are float32, frozen ones have the dtype of the weights that they are loaded from.
training.compute_dtype sets the dtype of matrix products; the load checks what fits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from titan_ckpt.config import CheckpointConfig, InitialLoadConfig
from titan_ckpt.directory.names import CommittedStep
from titan_ckpt.directory.steps import open_steps
from titan_ckpt.errors import CheckpointError
from titan_ckpt.formats.open import open_reader
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.models.language_model import Model
from titan_ckpt.stores.answers import StoreError
from titan_ckpt.stores.store import open_location, open_source

_KEPT = (torch.bfloat16, torch.float16)
"""Stored dtypes that are kept; values of smaller dtypes must be converted before a computation."""


_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def determinism(wanted: bool | Literal["warn"]) -> Iterator[None]:
    """Refuse operations without a deterministic implementation, or warn of them; afterwards all is as it was.

    cuBLAS is deterministic with a fixed workspace, which it reads before its first product.
    Source: https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    workspace = os.environ.get(_WORKSPACE)
    if wanted:
        os.environ.setdefault(_WORKSPACE, ":4096:8")
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.use_deterministic_algorithms(bool(wanted), warn_only=wanted == "warn")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
        if wanted and workspace is None:
            os.environ.pop(_WORKSPACE, None)


def numerics(device: torch.device, **of_run: Any) -> dict[str, Any]:
    """Return the settings of this process that the last bits of a step depend on, and those of its run."""
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: dict[str, Any] = {
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled() and ("warn" if warn else True),
        "float32 products": torch.get_float32_matmul_precision(),
        **of_run,
    }
    if device.type == "cuda":
        settings |= {
            "cuDNN deterministic": torch.backends.cudnn.deterministic,
            "cuDNN benchmark": torch.backends.cudnn.benchmark,
            _WORKSPACE: os.environ.get(_WORKSPACE, ""),
        }
    else:
        settings["threads"] = torch.get_num_threads()
    return settings


def keep_stored_dtypes(model: Model, config: CheckpointConfig, base_folder: Path) -> None:
    """Cast frozen parameters to the dtype of the source that the run will load them from. Call it before sharding.

    Sources that cannot be opened are skipped; the load will report the reason. All ranks must find the same ones.
    Raises: StoreError for a bucket that does not answer this rank.
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
    steps = open_steps(open_location(config.folder, base_folder, config.store)).survey().steps[-1:]
    sources: list[CommittedStep | InitialLoadConfig] = [*steps, *config.initial_load]
    for source in sources:
        try:
            if isinstance(source, InitialLoadConfig):
                path = open_source(source.path, config.store, source.revision)
                yield stack.enter_context(open_reader(path, ignore=source.ignore))
            else:
                yield stack.enter_context(open_reader(source.path, "native"))
        except StoreError:  # other ranks may have been answered, and have other dtypes then
            raise
        except (CheckpointError, OSError):
            continue
