"""fabric_manager: a CheckpointManager for the objects that Fabric's setup() returns.

Source: lightning 2.6, fabric/wrappers.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from titan_ckpt.components.unsaved_state import faults
from titan_ckpt.config import CheckpointConfig
from titan_ckpt.errors import ConfigError, refuse
from titan_ckpt.integrations.lightning.known import KNOWN, plugin_faults
from titan_ckpt.integrations.loader_position import PositionedLoader
from titan_ckpt.integrations.loop import iterate_over
from titan_ckpt.manager import CheckpointManager
from titan_ckpt.types import ModelConverter, Stateful
from titan_ckpt.weights.names import is_compiled
from titan_ckpt.weights.transforms import StateDictTransforms


def fabric_manager(
    fabric: Any,
    config: CheckpointConfig,
    *,
    model: Any,
    optimizers: Sequence[Any] = (),
    lr_schedulers: Sequence[Stateful] = (),
    dataloader: Any = None,
    states: Mapping[str, Stateful] | None = None,
    sd_transforms: StateDictTransforms | None = None,
    model_converters: ModelConverter | None = None,
    base_folder: str | Path = ".",
) -> CheckpointManager:
    """Return a manager for what `fabric.setup` and `fabric.setup_dataloaders` have returned.

    `dataloader` has a position from now on: after `manager.load()` it continues where the checkpoint was made. The loop
    is that of any CheckpointManager; do not call fabric.save and fabric.load.
    Raises: ConfigError for what is not set up, FSDP1, DeepSpeed, XLA, and data whose position cannot be known.
    """
    stateful = dict(states or {})
    own = [c for c in fabric._callbacks if not any(c is state for state in stateful.values())]  # noqa: SLF001 - Fabric has no public name for them
    own = [callback for callback in own if not isinstance(callback, nn.Module)]  # Fabric adds every module to them
    judged = partial(faults, [("callback", callback) for callback in own], KNOWN, config.allow, live=[model])
    wrapper = model._orig_mod if is_compiled(model) else model  # noqa: SLF001 - compiled by Fabric, or not
    not_set_up = [
        f"{what}: {type(given).__name__} is not what fabric.setup returns: call model, optimizer = "
        "fabric.setup(model, optimizer) first, and give what it returns"
        for what, given, attribute in [
            ("model", wrapper, "_forward_module"),
            *(("optimizers", o, "optimizer") for o in optimizers),
        ]
        if not hasattr(given, attribute)
    ]
    refuse(
        *not_set_up,
        *plugin_faults(fabric.strategy, fabric.strategy.precision, config.allow),
        *judged(),
    )
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    if scaler is not None:
        stateful.setdefault("scaler", scaler)
    manager = CheckpointManager(
        config,
        model_parts=[wrapper.module],
        optimizers=[optimizer.optimizer for optimizer in optimizers],
        lr_schedulers=lr_schedulers,
        dataloader=None if dataloader is None else _with_position(dataloader, config.allow),
        states=stateful,
        sd_transforms=sd_transforms,
        model_converters=model_converters,
        base_folder=base_folder,
    )
    _ = [*judged(watch=manager.watch)]
    return manager


def _with_position(loader: Any, allow: Collection[str]) -> Stateful:
    """Give Fabric's wrapper a position."""
    if not hasattr(loader, "_dataloader"):
        raise ConfigError(
            [f"dataloader: {type(loader).__name__} is not what fabric.setup_dataloaders returns: pass it through that"]
        )
    iterate_over(loader, position := _FabricPosition(loader, allow))
    return position


class _FabricPosition(PositionedLoader):
    """The position in a loader, whose batches go to Fabric's device and whose sampler is told the epoch."""

    def __init__(self, wrapper: Any, allow: Collection[str]) -> None:
        super().__init__(wrapper._dataloader, allow=allow)  # noqa: SLF001 - the wrapper has no public name for it
        self._device = wrapper.device
        package = type(wrapper).__module__.rpartition(".")[0]
        self._to_device = importlib.import_module(f"{package}.utilities.apply_func").move_data_to_device

    def deliver(self, batch: Any) -> Any:
        """Return the batch on Fabric's device."""
        return batch if self._device is None else self._to_device(batch, self._device)
