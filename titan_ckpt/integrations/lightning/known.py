"""The classes of Lightning and Fabric, and which of them continue exactly after a resume.

Owns the tables of callbacks, strategies and precisions; a class that is in none is refused. Owns also which callbacks
of the user's own are exact. The tests compare the tables with the installed packages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from titan_ckpt.components.classes import class_name, defines, exact, gives_state, is_of_library, is_own, names_of
from titan_ckpt.components.unsaved_state import fault_of, faults, function_faults, unless_allowed
from titan_ckpt.components.watched import Watch

AVERAGING = "weight_averaging.WeightAveraging"
STOCHASTIC = "stochastic_weight_avg.StochasticWeightAveraging"
FINETUNING = "finetuning.BaseFinetuning"
"""Ends of the full names of callbacks that keep more than their own state, or change more than that."""

_OWN = "it changes Lightning's own checkpoint (on_save_checkpoint), which is not written, so a resume would lose its"
_WRITES = "it writes Lightning's own checkpoints beside those of titan_ckpt: leave it out"
_FSDP1 = "it is FSDP1, which flattens parameters, so none has a shard with a name: use ModelParallelStrategy (FSDP2)"
_DEEPSPEED = (
    "its engine keeps weights and optimizer state in partitions of its own: use ModelParallelStrategy, or DeepSpeed's "
    "own checkpoints"
)
_XLA = "only CPU and CUDA devices are supported"
_SCALES = "its weights have scales that no step is known to hold: use MixedPrecision or HalfPrecision"

_OF_TRAINER = exact(
    {
        "callbacks": "callback.Callback device_stats_monitor.DeviceStatsMonitor early_stopping.EarlyStopping "
        "finetuning.BackboneFinetuning finetuning.BaseFinetuning "
        "gradient_accumulation_scheduler.GradientAccumulationScheduler lambda_function.LambdaCallback "
        "lr_monitor.LearningRateMonitor model_summary.ModelSummary prediction_writer.BasePredictionWriter "
        "progress.progress_bar.ProgressBar progress.rich_progress.RichProgressBar "
        "progress.tqdm_progress.TQDMProgressBar rich_model_summary.RichModelSummary "
        "stochastic_weight_avg.StochasticWeightAveraging throughput_monitor.ThroughputMonitor timer.Timer "
        "weight_averaging.EMAWeightAveraging weight_averaging.WeightAveraging",
        "cli": "SaveConfigCallback",
        "plugins": "precision.amp.MixedPrecision precision.double.DoublePrecision precision.half.HalfPrecision "
        "precision.precision.Precision",
        "strategies": "ddp.DDPStrategy model_parallel.ModelParallelStrategy single_device.SingleDeviceStrategy",
    }
) | {
    "callbacks.batch_size_finder.BatchSizeFinder": "it tries batch sizes at the start, and again at every resume: call "
    "Tuner(trainer).scale_batch_size before attach",
    "callbacks.checkpoint.Checkpoint": _WRITES,
    "callbacks.lr_finder.LearningRateFinder": "it tries rates at the start, and again at every resume: call "
    "Tuner(trainer).lr_find before attach",
    "callbacks.model_checkpoint.ModelCheckpoint": _WRITES,
    "callbacks.on_exception_checkpoint.OnExceptionCheckpoint": _WRITES,
    "callbacks.pruning.ModelPruning": f"{_OWN} masks: prune the module before the training",
    "callbacks.spike.SpikeDetection": "its load_state_dict raises an AttributeError, so no run could be resumed: leave "
    "it out",
    "serve.servable_module_validator.ServableModuleValidator": "it starts a web server before the training: validate "
    "in a process of its own",
    "plugins.precision.bitsandbytes.BitsandbytesPrecision": _SCALES,
    "plugins.precision.deepspeed.DeepSpeedPrecision": _DEEPSPEED,
    "plugins.precision.fsdp.FSDPPrecision": _FSDP1,
    "plugins.precision.transformer_engine.TransformerEnginePrecision": _SCALES,
    "plugins.precision.xla.XLAPrecision": _XLA,
    "strategies.deepspeed.DeepSpeedStrategy": _DEEPSPEED,
    "strategies.fsdp.FSDPStrategy": _FSDP1,
    "strategies.single_xla.SingleDeviceXLAStrategy": _XLA,
    "strategies.xla.XLAStrategy": _XLA,
}
_OF_FABRIC = {name: why for name, why in _OF_TRAINER.items() if name.startswith(("plugins.", "strategies."))} | {
    "strategies.dp.DataParallelStrategy": "it runs several devices in one process: use DDPStrategy",
    "strategies.xla_fsdp.XLAFSDPStrategy": _XLA,
}
_TABLES = dict.fromkeys(("lightning.pytorch", "pytorch_lightning"), _OF_TRAINER)
_TABLES |= dict.fromkeys(("lightning.fabric", "lightning_fabric"), _OF_FABRIC)
KNOWN = {f"{package}.{name}": why for package, table in _TABLES.items() for name, why in table.items()}
"""Full name of a class -> why it is refused, and the next step; "" if it continues exactly."""


_BUILDS = (
    "configure_callbacks", "configure_model", "configure_optimizers", "configure_sharded_model", "on_fit_end",
    "on_train_end", "predict_dataloader", "prepare_data", "setup", "teardown", "test_dataloader", "train_dataloader",
    "val_dataloader",
)  # fmt: skip
_BEGINS = ("on_fit_start", "on_train_start")
"""Hooks that every start calls: before its load or after its last step, and after its load."""


def of_kinds(callbacks: Iterable[Any], *kinds: str) -> list[Any]:
    """Return the callbacks that are, or extend, any of these classes of Lightning's callbacks."""
    ends = tuple(f".callbacks.{kind}" for kind in kinds)
    return [each for each in callbacks if any(name.endswith(ends) for name in names_of(type(each)))]


def plugin_faults(strategy: Any, precision: Any, allow: Collection[str]) -> Iterator[str]:
    """Yield why a strategy or a precision does not work with titan_ckpt. Only one that is not known can be allowed."""
    for value in (strategy, precision):
        names = names_of(type(value))[: 1 if is_of_library(type(value)) else None]  # of a library, the class itself
        reason = next((KNOWN[name] for name in names if name in KNOWN), None)
        if value is not None and reason is None:
            unknown = "it was not proved to continue exactly after a resume: use one of Lightning's that is listed"
            yield from unless_allowed(type(value).__name__, class_name(value), unknown, allow)
        elif reason:
            yield f"{type(value).__name__}: {reason}"


def callback_faults(callbacks: Collection[Any], allow: Collection[str], strategy: Any = None) -> Iterator[str]:
    """Yield why callbacks cannot be resumed that are Lightning's, extend one that is refused, or change checkpoints.

    Also why one does not work with a strategy that shards weights.
    """
    for callback in callbacks:
        refused = [*faults([("callback", callback)], KNOWN, allow, gives_state=lambda _: True)]  # own code: own_faults
        if not refused and overrides(callback, ("callbacks.callback", "callbacks.weight_averaging")):
            reason = f"{_OWN} state: leave it out, or give it state_dict and load_state_dict"
            refused = [*fault_of("callback", callback, reason, allow)]
        yield from refused
    is_sharded = any(kind.__name__ == "ModelParallelStrategy" for kind in type(strategy).__mro__)
    for callback in of_kinds(callbacks, FINETUNING, AVERAGING, STOCHASTIC) if is_sharded else ():
        yield (
            f"callback {class_name(callback)}: ModelParallelStrategy replaces the parameters that it has copied or "
            "frozen by shards, after its setup: leave it out, or use DDPStrategy or one device"
        )


def own_faults(trainer: Any, module: nn.Module, allow: Collection[str], watch: Watch | None = None) -> Iterator[str]:
    """Yield why objects of the user's own cannot be resumed: callbacks, the module and the data module.

    `watch`: notes what they hold now, when the training has begun.
    """
    live = [module, trainer, *trainer.optimizers]
    own = [c for c in trainer.callbacks if not (is_of_library(type(c)) or class_name(c).startswith("titan_ckpt."))]
    judged = partial(faults, allow=allow, live=live, builds=_BUILDS, begins=_BEGINS, watch=watch)
    yield from judged([("callback", callback) for callback in own], KNOWN, gives_state=gives_state)
    given = [each for c in trainer.callbacks if is_of_library(type(c)) for each in _functions_of(c)]
    yield from function_faults(given, allow, live=live, others=trainer.callbacks, watch=watch or Watch())
    for role, value, hook in (
        ("module", module, "on_save_checkpoint"),
        ("data module", trainer.datamodule, "state_dict"),
    ):
        if value is not None:
            of_libraries = dict.fromkeys(names_of(type(value)), "")
            yield from judged([(role, value)], of_libraries, gives_state=partial(defines, methods=[hook]))
    for callback in own:
        if gives_state(callback) and defines(callback, ["on_fit_start"]):
            reason = "its on_fit_start is called before its state is loaded: name the method on_train_start"
            yield from fault_of("callback", callback, reason, allow)


def _functions_of(callback: Any) -> Iterator[tuple[str, Any]]:
    """Yield the functions of the user's that a callback of Lightning's was given, as LambdaCallback is."""
    for value in vars(callback).values():
        for each in value.values() if isinstance(value, dict) else [value]:
            function = each.func if isinstance(each, partial) else each
            if isinstance(function, (FunctionType, MethodType)) and is_own(getattr(function, "__self__", function)):
                yield f"function of callback {class_name(callback)}", each


def frozen_faults(trainer: Any, module: nn.Module) -> Iterator[str]:
    """Yield why a callback cannot unfreeze parameters later."""
    is_frozen = any(not parameter.requires_grad for parameter in module.parameters())
    is_lost = is_frozen and isinstance(trainer.model, DistributedDataParallel)
    for callback in of_kinds(trainer.callbacks, FINETUNING) if is_lost else ():
        yield (
            f"callback {class_name(callback)}: DDP averages no gradients of parameters that are frozen when the "
            "training begins, so each rank would train others: on several ranks, give configure_optimizers all "
            "groups, and raise their rates by a scheduler"
        )


def overrides(value: Any, home: str | tuple[str, ...]) -> bool:
    """Return whether an object changes Lightning's checkpoint by hooks that are not those of the base in `home`."""
    hooks = [getattr(value, name, None) for name in ("on_save_checkpoint", "on_load_checkpoint")]
    return any(hook is not None and not hook.__module__.endswith(home) for hook in hooks)  # LambdaCallback's own too
