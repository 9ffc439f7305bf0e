"""accelerate_manager: a CheckpointManager for what an Accelerator has prepared.

Source: accelerate 1.15, accelerator.py `prepare` and `accumulate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from titan_ckpt.components.known.loaders import begin_afresh, samplers_of
from titan_ckpt.components.unsaved_state import class_name
from titan_ckpt.config import CheckpointConfig
from titan_ckpt.errors import ConfigError, LoadMismatchError
from titan_ckpt.integrations.accelerate.known import accelerator_faults
from titan_ckpt.integrations.accelerate.loader import LoopLoader, Positioned
from titan_ckpt.integrations.loop import iterate_over
from titan_ckpt.manager import CheckpointManager
from titan_ckpt.types import ModelHooks, Stateful
from titan_ckpt.weights.transforms import StateDictTransforms


def accelerate_manager(
    accelerator: Accelerator,
    config: CheckpointConfig,
    *,
    dataloader: Any = None,
    states: Mapping[str, Stateful] | None = None,
    sd_transforms: StateDictTransforms | None = None,
    model_converters: ModelHooks | None = None,
    base_folder: str | Path = ".",
) -> CheckpointManager:
    """Return a manager for everything that `accelerator.prepare` and `register_for_checkpointing` were given.

    `dataloader`: the one that the training reads, of several that are prepared. It has a position from now on: after
    `manager.load()` it continues where the checkpoint was made. The loop is that of any CheckpointManager; do not call
    accelerator.save_state and load_state.
    Raises: ConfigError for what is not prepared, FSDP1, DeepSpeed, XLA, fp8, and data whose position cannot be known.
    """
    prepared: Any = accelerator
    loaders = prepared._dataloaders  # noqa: SLF001 - accelerate has no public names for what it has prepared
    if problems := [*accelerator_faults(accelerator), *_not_prepared(prepared, dataloader)]:
        raise ConfigError(problems)
    read = dataloader if dataloader is not None else next(iter(loaders), None)
    position = None
    if read is not None:
        iterate_over(read, position := LoopLoader(read, config.allow), Positioned)
    others = [loader for loader in loaders if loader is not read]
    for other in others:
        begin_afresh(getattr(other, "base_dataloader", other))
    own = prepared._custom_objects  # noqa: SLF001
    if taken := sorted({"accelerator", "scaler"} & {*(states or {})}):
        raise ConfigError([f"states: {', '.join(taken)}: the name of accelerate's own state; choose another"])
    names = [f"{class_name(value)} {i}" for i, value in enumerate(own)]
    return CheckpointManager(
        config,
        model_parts=[accelerator.unwrap_model(m, keep_torch_compile=False) for m in prepared._models],  # noqa: SLF001
        optimizers=[optimizer.optimizer for optimizer in prepared._optimizers],  # noqa: SLF001
        lr_schedulers=prepared._schedulers,  # noqa: SLF001
        dataloader=position,
        states={
            "accelerator": _Progress(accelerator, others),
            **({} if accelerator.scaler is None else {"scaler": accelerator.scaler}),
            **dict(zip(names, own, strict=True)),
            **(states or {}),
        },
        sd_transforms=sd_transforms,
        model_converters=model_converters,
        base_folder=base_folder,
    )


def _not_prepared(prepared: Any, dataloader: Any) -> Iterator[str]:
    loaders = prepared._dataloaders  # noqa: SLF001 - as above
    if not prepared._models:  # noqa: SLF001
        yield "accelerator: no model is prepared: call accelerator.prepare(model, optimizer, loader, scheduler) first"
    if dataloader is not None and not any(dataloader is loader for loader in loaders):
        yield f"dataloader: {type(dataloader).__name__} is not what accelerator.prepare returns: pass it through that"
    if dataloader is None and len(loaders) > 1:
        yield f"dataloader: {len(loaders)} are prepared: name the one that the training reads, dataloader=loader"
    hooks = [*prepared._save_model_state_pre_hook.values(), *prepared._load_model_state_pre_hook.values()]  # noqa: SLF001
    if hooks:
        yield (
            "register_save_state_pre_hook and register_load_state_pre_hook: titan_ckpt makes the steps, and never "
            "calls them: give what they save as an object with state_dict and load_state_dict to "
            "accelerator.register_for_checkpointing"
        )


class _Progress:
    """The numbers of the Accelerator: its batches since the last step, and the orders of loaders beside the data."""

    def __init__(self, accelerator: Accelerator, others: list[Any]) -> None:
        self._accelerator, self._others = accelerator, others

    def state_dict(self) -> dict[str, Any]:
        """Return them."""
        orders = [(other.iteration, [g.get_state() for g in _generators(other)]) for other in self._others]
        return {"step": self._accelerator.step, "orders": orders}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set them."""
        orders = state_dict["orders"]
        if len(orders) != len(self._others):
            raise LoadMismatchError(
                f"accelerator: the step has the orders of {len(orders)} loaders beside the training's, and this run "
                f"prepares {len(self._others)}: prepare the same, in the same order, or start them afresh: "
                'checkpoint.resume.exclude = ["states"]'
            )
        self._accelerator.step = state_dict["step"]
        for other, (iteration, states) in zip(self._others, orders, strict=True):
            other.iteration = iteration
            for generator, state in zip(_generators(other), states, strict=False):  # some are made when they are used
                generator.set_state(state)


def _generators(loader: Any) -> list[torch.Generator]:
    inner = loader.base_dataloader
    found = [getattr(owner, "generator", None) for owner in (inner, *samplers_of(inner))]
    return [*{id(g): g for g in found if isinstance(g, torch.Generator)}.values()]
