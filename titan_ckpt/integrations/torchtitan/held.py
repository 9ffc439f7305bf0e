"""What torchtitan's Trainer holds beside what its steps save, and which of its classes a resumed run continues exactly.

KNOWN has the classes that tests/torchtitan/test_held.py trains, stops and resumes bit for bit ("") and those with a
reason against them. A class of torchtitan that is not here is refused by name, until it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from types import FunctionType
from typing import Any

from titan_ckpt.components import unsaved_state
from titan_ckpt.components.classes import class_name, exact, gives_state, names_of, package_of
from titan_ckpt.components.known.streams import stream_faults
from titan_ckpt.components.unsaved_state import fault_of
from titan_ckpt.components.watched import Watch
from titan_ckpt.integrations.torchtitan.described import tree

_OWN = ("torchtitan.", "torch.", "titan_ckpt.")
_LORA = "torchtitan.components.lora"
"""It makes subclasses of the args that it adapts, each with a name of its own."""
_QUANTIZED = "torchtitan.components.quantization"

_EXACT = {
    "torchtitan.trainer": "Trainer",
    "torch.distributed.checkpoint.stateful": "Stateful",
    # data
    "torchtitan.components.dataloader": "BaseDataLoader ParallelAwareDataloader",
    "torchdata.stateful_dataloader.stateful_dataloader": "StatefulDataLoader",
    "torchtitan.hf_datasets.text_datasets": "HuggingFaceTextDataLoader InterleavedHuggingFaceTextDataLoader "
    "ChatDataLoader InterleavedChatDataLoader HuggingFaceTextDataset ChatDataset",
    "torchtitan.hf_datasets.interleaved": "InterleavedDataset",
    "torch.utils.data.dataset": "IterableDataset Dataset",
    # optimization
    "torchtitan.components.optimizer.optimizer": "OptimizersContainer",
    "torchtitan.components.optimizer.lr_scheduler": "LRSchedulersContainer",
    "torch.optim.lr_scheduler": "LambdaLR",
    "torchtitan.components.loss": "BaseLoss CrossEntropyLoss ChunkedLossWrapper",
    "torchtitan.models.deepseek_v3.mtp": "MTPLoss",
    # evaluation and logs
    "torchtitan.components.validate": "BaseValidator Validator",
    "torchtitan.components.metrics": "MetricsProcessor",
    # models, by the class of their args; a user's own model is saved as any module is
    "torchtitan.protocols.model": "BaseModel.Config",
    "torchtitan.models.common.decoder": "Decoder.Config",
    "torchtitan.models.llama3.model": "Llama3Model.Config",
    "torchtitan.models.qwen3.model": "Qwen3Model.Config",
    "torchtitan.models.deepseek_v3.model": "DeepSeekV3Model.Config",
    "torchtitan.models.kimi_k2_7.model": "KimiK25Model.Config",
    "torchtitan.models.gpt_oss.model": "GptOssModel.Config",
    "torchtitan.models.muse_glimmer.model": "MuseGlimmerModel.Config",
    f"{_QUANTIZED}.float8": "Float8Linear.Config",
}
KNOWN = exact(_EXACT)
"""Full name of a class of a library -> "", or why a resumed run is not exact with it and the next step."""

FIELDS: Mapping[str, frozenset[str]] = {
    name: frozenset(fields.split())
    for name, fields in {
        "torchtitan.trainer.Trainer.Config": "model_spec hf_assets_path dump_folder profiler metrics tokenizer "
        "dataloader optimizer lr_scheduler training parallelism checkpoint activation_checkpoint compile comm "
        "validator debug override loss",
        "torchtitan.config.configs.TrainingConfig": "local_batch_size global_batch_size seq_len max_norm steps "
        "enable_cpu_offload disable_cuda_graphs dtype mixed_precision_param mixed_precision_reduce gc_freq gc_debug",
        "torchtitan.components.optimizer.optimizer.OptimizersContainer.Config": "param_groups implementation "
        "optimizer_factory_kwargs_by_name",
        "torchtitan.components.optimizer.lr_scheduler.LRSchedulersContainer.Config": "warmup_steps total_steps "
        "decay_ratio decay_type min_lr_factor",
        "torchtitan.components.validate.Validator.Config": "freq enable steps dataloader",
    }.items()
}
"""Class of a part of the run's config -> its settings, as far as state may depend on them."""


def faults(
    states: Mapping[str, Any],
    dataloader: Any,
    optimizers: Any,
    lr_schedulers: Any,
    allow: Collection[str],
    watch: Watch | None = None,
) -> list[str]:
    """Return a line for each object of the run whose state a resumed run would lose, as far as that is known.

    `states`: torchtitan's Trainer gives itself, as "train_state". `watch`: notes what the objects hold now.
    """
    trainer, datasets, hooks = states.get("train_state"), _datasets(dataloader), _hooks(optimizers)
    model = getattr(trainer, "model_config", None)
    stateful = [("state " + name if name != "train_state" else "trainer", value) for name, value in states.items()]
    stateful += [("optimizer", o) for o in optimizers if package_of(type(o)) == "torchtitan"]
    stateful += [("dataloader", dataloader), *(("dataset", dataset) for dataset in datasets)]
    stateful.append(("learning-rate scheduler", lr_schedulers))
    parts = {"loss": "loss_fn", "metrics processor": "metrics_processor", "validator": "validator"}
    others = [("optimizer", optimizers), *((what, getattr(trainer, name, None)) for what, name in parts.items())]
    others += [("optimizer hook", getattr(hook, "__self__", hook)) for hook in hooks]
    if not gives_state(lr_schedulers):
        others += [("learning-rate scheduler", s) for s in getattr(lr_schedulers, "schedulers", ())]
    live = getattr(trainer, "model_parts", ())
    known = (
        KNOWN | _adapted(model) | {class_name(dataset): _INTERLEAVED for dataset in datasets if _loses_its_end(dataset)}
    )
    if not all(getattr(dataset, "infinite", True) for dataset in datasets):
        known[_TEXT] = _TAIL
    args = [("model", model), *(("model part", part) for part in _quantized(model))]
    closures = [hook for hook in hooks if isinstance(hook, FunctionType) and hook.__closure__]

    def check(objects: list[tuple[str, Any]], **options: Any) -> Iterator[str]:
        there = [each for each in objects if each[1] is not None]
        return unsaved_state.faults(there, known, allow, live=live, watch=watch, **options)

    return [
        *check(stateful, gives_state=gives_state),
        *check(others),
        *check(args, gives_state=lambda _: True),
        *(line for dataset in datasets for line in stream_faults(getattr(dataset, "_data", dataset), allow)),
        *(line for hook in closures for line in fault_of("optimizer hook", hook, _CLOSURE, allow)),
        *_settings(getattr(trainer, "config", None), allow),
    ]


_TEXT = "torchtitan.hf_datasets.text_datasets.HuggingFaceTextDataset"
_INTERLEAVED = (
    "which sources have ended is not in its state, so that a resumed run reads on after the end of all: set infinite "
    'in its sources, or stopping_strategy = "on_first_exhausted"'
)
_CLOSURE = "it uses variables of the function around it, which no step holds: let it use none"
_TAIL = (
    "a resumed run reads a document before it yields what it holds of earlier ones, and loses that at the end of the "
    "data: set infinite in the dataloader, and training.steps to where it must end"
)


def _hooks(optimizers: Any) -> list[Any]:
    """Return what the user calls at each step of an optimizer: functions, methods, or objects."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    hooks = [hook for o in (optimizers, *optimizers) for name in names for hook in getattr(o, name, {}).values()]
    return [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith(_OWN)]


def _datasets(dataloader: Any) -> list[Any]:
    """Return the dataset that a dataloader reads, and those that it interleaves."""
    dataset = getattr(dataloader, "dataset", None)
    return [] if dataset is None else [dataset, *getattr(dataset, "_datasets", ())]


def _loses_its_end(dataset: Any) -> bool:
    return getattr(dataset, "_stopping_strategy", None) == "all_exhausted" and not all(
        getattr(source, "infinite", False)
        for source in dataset._datasets  # noqa: SLF001 - torchtitan has no other name
    )


def _adapted(model: Any) -> dict[str, str]:
    """Return the class that torchtitan's LoRA has made of a model's args, if it is one of KNOWN."""
    names = names_of(type(model))
    own = next((name for name in names if not name.startswith(_LORA)), "")
    return {name: KNOWN[own] for name in names if name.startswith(_LORA) and own in KNOWN}


def _quantized(model: Any) -> list[Any]:
    """Return the parts of a model's args that torchtitan's quantization has replaced, one of each class."""
    kinds = {type(args): args for args in tree(model)}
    return [args for kind, args in kinds.items() if kind.__module__.startswith(_QUANTIZED)]


def _settings(config: Any, allow: Collection[str]) -> Iterator[str]:
    """Yield each setting of the run's config that a newer torchtitan, or a class of the user, has added."""
    sections = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    for section, part in [("", config), *((field.name, getattr(config, field.name)) for field in sections)]:
        for kind in type(part).__mro__:
            if (known := FIELDS.get(names_of(kind)[0])) is not None:
                for field in dataclasses.fields(kind):
                    name = f"{section}.{field.name}".lstrip(".")
                    if field.name not in known and name not in allow:
                        yield (
                            f"{name}: it is not known what a resumed run makes of this setting of torchtitan: leave it "
                            f'out, or allow it: checkpoint.allow = ["{name}"]'
                        )
                break
