"""accelerate_manager: a CheckpointManager for what an Accelerator has prepared.

Source: accelerate 1.15, accelerator.py `prepare` and `accumulate`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch.optim import Optimizer

from titan_ckpt.components.classes import class_name
from titan_ckpt.components.known.loaders import begin_afresh, seed_workers_apart
from titan_ckpt.config import CheckpointConfig
from titan_ckpt.errors import ConfigError, LoadMismatchError, SaveError, listed, refuse
from titan_ckpt.integrations.accelerate.known import accelerator_faults
from titan_ckpt.integrations.accelerate.loader import Beside, LoopLoader, Positioned, begin
from titan_ckpt.integrations.loader_random import order_of, set_order
from titan_ckpt.integrations.loop import extend, iterate_over
from titan_ckpt.manager import CheckpointManager
from titan_ckpt.types import ModelConverter, Stateful
from titan_ckpt.weights.transforms import StateDictTransforms


def accelerate_manager(
    accelerator: Accelerator,
    config: CheckpointConfig,
    *,
    dataloader: Any = None,
    states: Mapping[str, Stateful] | None = None,
    sd_transforms: StateDictTransforms | None = None,
    model_converters: ModelConverter | None = None,
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
    refuse(
        *accelerator_faults(accelerator),
        *_not_prepared(prepared, dataloader),
        *(_unsaved(prepared, states or {}, config.left_out()) if config.save is not None else ()),
    )
    read = dataloader if dataloader is not None else next(iter(loaders), None)
    position = None
    if read is not None:
        iterate_over(read, position := LoopLoader(read, config.allow), Positioned)
        prepared.gradient_state._add_dataloader = begin  # noqa: SLF001 - as above
    others = [loader for loader in loaders if loader is not read]
    for other in others:
        if not isinstance(other, Beside):  # else an earlier manager in this process has changed it
            extend(other, Beside)
        begin_afresh(getattr(other, "base_dataloader", other))
        seed_workers_apart(other.base_dataloader)
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


def _unsaved(prepared: Any, states: Mapping[str, Stateful], left_out: Collection[str]) -> Iterator[str]:
    """Yield why the optimizer, or a schedule of one, would be in no step."""
    given = [*prepared._custom_objects, *states.values()]  # noqa: SLF001 - as above
    own = [optimizer.optimizer for optimizer in prepared._optimizers]  # noqa: SLF001 - as above
    if "optimizer" not in left_out and not own and not any(isinstance(value, Optimizer) for value in given):
        yield (
            "accelerator: no optimizer is prepared, so no step would hold its state: pass it through "
            'accelerator.prepare; a training without one has checkpoint.components without "optimizer"'
        )
    known = [*prepared._schedulers, *given]  # noqa: SLF001 - as above
    known += [held for value in known for held in getattr(value, "__dict__", {}).values()]
    followed = {id(getattr(value, "optimizer", None)) for value in known}
    for optimizer in own if "lr_scheduler" not in left_out else ():
        if hasattr(optimizer.step, "_wrapped_by_lr_sched") and id(optimizer) not in followed:  # torch's mark
            yield (
                f"accelerator: a schedule of {class_name(optimizer)} is not prepared, so no step would hold it: pass "
                "it through accelerator.prepare, or give it to accelerator.register_for_checkpointing"
            )


class _Progress:
    """The numbers of the Accelerator: its batches since the last step, and the orders of loaders beside the data."""

    def __init__(self, accelerator: Accelerator, others: list[Any]) -> None:
        self._accelerator, self._others = accelerator, others
        self._known = _everything(accelerator)

    def state_dict(self) -> dict[str, Any]:
        """Return them. Raises: SaveError for what the steps of the manager cannot hold."""
        known = {id(value) for value in self._known}
        if late := [class_name(value) for value in _everything(self._accelerator) if id(value) not in known]:
            raise SaveError(
                f"accelerator: {listed(late)}: prepared or registered after accelerate_manager, so no step holds it: "
                "call accelerate_manager when everything is prepared"
            )
        if read := [f"prepared loader {i}" for i, other in enumerate(self._others) if other.titan_ckpt_num_read]:
            raise SaveError(
                f"accelerator: {listed(read)} beside the training's: it is being read, and a step holds the position "
                "in one loader: let one read all data of the training, such as torch's StackDataset, and leave no "
                "iterator of another open while a step is saved"
            )
        orders = [(other.iteration, order_of(other.base_dataloader)) for other in self._others]
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
            set_order(other.base_dataloader, states)


def _everything(accelerator: Any) -> list[Any]:
    """Return what is prepared and registered."""
    kinds = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects")
    return [value for kind in kinds for value in getattr(accelerator, kind)]
