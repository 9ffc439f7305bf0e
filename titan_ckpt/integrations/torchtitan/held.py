"""What torchtitan's Trainer holds beside what its steps save, and which of its classes a resumed run continues exactly.

KNOWN has the classes that tests/torchtitan/test_held.py trains, stops and resumes bit for bit ("") and those with a
reason against them. A class of torchtitan that is not here is refused by name, until it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

from titan_ckpt.components import unsaved_state
from titan_ckpt.components.known.streams import stream_faults
from titan_ckpt.components.unsaved_state import LIBRARIES, class_name
from titan_ckpt.components.watched import Watch
from titan_ckpt.integrations.torchtitan.described import tree

_OWN = ("torchtitan.", "torch.", "titan_ckpt.")
_LORA = "torchtitan.components.lora"
"""It makes subclasses of the args that it adapts, each with a name of its own."""
_DATA = "torchtitan.hf_datasets"
_TEXT = f"{_DATA}.text_datasets.HuggingFaceTextDataset"
_LOSS = "torchtitan.components.loss"
_QUANTIZED = "torchtitan.components.quantization"

KNOWN: Mapping[str, str] = {
    "torchtitan.trainer.Trainer": "",
    "torch.distributed.checkpoint.stateful.Stateful": "",
    # data
    "torchtitan.components.dataloader.BaseDataLoader": "",
    "torchtitan.components.dataloader.ParallelAwareDataloader": "",
    "torchdata.stateful_dataloader.stateful_dataloader.StatefulDataLoader": "",
    f"{_DATA}.text_datasets.HuggingFaceTextDataLoader": "",
    f"{_DATA}.text_datasets.InterleavedHuggingFaceTextDataLoader": "",
    f"{_DATA}.text_datasets.ChatDataLoader": "",
    f"{_DATA}.text_datasets.InterleavedChatDataLoader": "",
    _TEXT: "",
    f"{_DATA}.text_datasets.ChatDataset": "",
    f"{_DATA}.interleaved.InterleavedDataset": "",
    "torch.utils.data.dataset.IterableDataset": "",
    "torch.utils.data.dataset.Dataset": "",
    # optimization
    "torchtitan.components.optimizer.optimizer.OptimizersContainer": "",
    "torchtitan.components.optimizer.lr_scheduler.LRSchedulersContainer": "",
    "torch.optim.lr_scheduler.LambdaLR": "",
    f"{_LOSS}.BaseLoss": "",
    f"{_LOSS}.CrossEntropyLoss": "",
    f"{_LOSS}.ChunkedLossWrapper": "",
    "torchtitan.models.deepseek_v3.mtp.MTPLoss": "",
    # evaluation and logs
    "torchtitan.components.validate.BaseValidator": "",
    "torchtitan.components.validate.Validator": "",
    "torchtitan.components.metrics.MetricsProcessor": "",
    # models, by the class of their args; a user's own model is saved as any module is
    "torchtitan.protocols.model.BaseModel.Config": "",
    "torchtitan.models.common.decoder.Decoder.Config": "",
    "torchtitan.models.llama3.model.Llama3Model.Config": "",
    "torchtitan.models.qwen3.model.Qwen3Model.Config": "",
    "torchtitan.models.deepseek_v3.model.DeepSeekV3Model.Config": "",
    "torchtitan.models.kimi_k2_7.model.KimiK25Model.Config": "",
    "torchtitan.models.gpt_oss.model.GptOssModel.Config": "",
    "torchtitan.models.muse_glimmer.model.MuseGlimmerModel.Config": "",
    f"{_QUANTIZED}.float8.Float8Linear.Config": "",
}
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
    trainer = states.get("train_state")
    model = getattr(trainer, "model_config", None)
    stateful = [("state " + name if name != "train_state" else "trainer", value) for name, value in states.items()]
    stateful += [("optimizer", o) for o in optimizers if _package(o) == "torchtitan"]
    stateful += [("dataloader", dataloader), *(("dataset", dataset) for dataset in _datasets(dataloader))]
    stateful.append(("learning-rate scheduler", lr_schedulers))
    others = [("optimizer", optimizers), *(("loss", v) for v in _attribute(trainer, "loss_fn"))]
    others += [("metrics processor", v) for v in _attribute(trainer, "metrics_processor")]
    others += [("validator", v) for v in _attribute(trainer, "validator")]
    others += [("optimizer hook", hook) for hook in _hooks(optimizers)]
    if not _gives_state(lr_schedulers):
        others += [("learning-rate scheduler", s) for s in getattr(lr_schedulers, "schedulers", ())]
    live = getattr(trainer, "model_parts", ())
    known = {**KNOWN, **{class_name(d): _INTERLEAVED for d in _datasets(dataloader) if _loses_its_end(d)}}
    if not all(getattr(dataset, "infinite", True) for dataset in _datasets(dataloader)):
        known[_TEXT] = _TAIL
    check = partial(unsaved_state.faults, allow=allow, live=live, watch=watch)
    return [
        *check([held for held in stateful if held[1] is not None], known, gives_state=_gives_state),
        *check(others, known),
        *check([("model", model)] if model is not None else [], _with_adapted(model), gives_state=lambda _: True),
        *check([("model part", args) for args in _quantized(model)], known, gives_state=lambda _: True),
        *(
            line
            for dataset in _datasets(dataloader)
            for line in stream_faults(getattr(dataset, "_data", dataset), allow)
        ),
        *_closures(_hooks(optimizers), allow),
        *_settings(getattr(trainer, "config", None), allow),
    ]


_INTERLEAVED = (
    "which sources have ended is not in its state, so that a resumed run reads on after the end of all: set infinite "
    'in its sources, or stopping_strategy = "on_first_exhausted"'
)
_TAIL = (
    "a resumed run reads a document before it yields what it holds of earlier ones, and loses that at the end of the "
    "data: set infinite in the dataloader, and training.steps to where it must end"
)


def _attribute(owner: Any, name: str) -> list[Any]:
    """Return the object, if there is one: torchtitan's Trainer makes a validator only if it is asked to."""
    value = getattr(owner, name, None)
    return [] if value is None else [value]


def _package(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _gives_state(value: Any) -> bool:
    """Return whether the user's own class of an object says what its state is."""
    own = [kind for kind in type(value).__mro__ if kind.__module__.partition(".")[0] not in LIBRARIES]
    return all(any(name in vars(kind) for kind in own) for name in ("state_dict", "load_state_dict"))


def _hooks(optimizers: Any) -> list[Any]:
    """Return what the user calls at each step of an optimizer: functions, or objects."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    hooks = [hook for o in (optimizers, *optimizers) for name in names for hook in getattr(o, name, {}).values()]
    own = [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith(_OWN)]
    return [getattr(hook, "__self__", hook) for hook in own]


def _closures(hooks: Sequence[Any], allow: Collection[str]) -> Iterator[str]:
    for hook in hooks:
        name = f"{getattr(hook, '__module__', '')}.{getattr(hook, '__qualname__', '')}"
        if isinstance(hook, FunctionType) and hook.__closure__ and name not in allow:
            yield (
                f"optimizer hook {name}: it uses variables of the function around it, which no step holds: let it use "
                f'none, or allow that a resumed run loses them: checkpoint.allow = ["{name}"]'
            )


def _datasets(dataloader: Any) -> list[Any]:
    """Return the dataset that a dataloader reads, and those that it interleaves."""
    dataset = getattr(dataloader, "dataset", None)
    return [] if dataset is None else [dataset, *getattr(dataset, "_datasets", ())]


def _loses_its_end(dataset: Any) -> bool:
    return getattr(dataset, "_stopping_strategy", None) == "all_exhausted" and not all(
        getattr(source, "infinite", False)
        for source in dataset._datasets  # noqa: SLF001 - torchtitan has no other name
    )


def _with_adapted(model: Any) -> dict[str, str]:
    """Return KNOWN with the class that torchtitan's LoRA has made of a model's args."""
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(model).__mro__]
    own = next((name for name in names if not name.startswith(_LORA)), "")
    made = {name: KNOWN[own] for name in names if name.startswith(_LORA) and own in KNOWN}
    return {**KNOWN, **made}


def _quantized(model: Any) -> list[Any]:
    """Return the parts of a model's args that torchtitan's quantization has replaced, one of each class."""
    kinds = {type(args): args for args in tree(model)}
    return [args for kind, args in kinds.items() if kind.__module__.startswith(_QUANTIZED)]


def _settings(config: Any, allow: Collection[str]) -> Iterator[str]:
    """Yield each setting of the run's config that a newer torchtitan, or a class of the user, has added."""
    for section, part in [("", config), *((f.name, getattr(config, f.name)) for f in _fields(config))]:
        for kind in type(part).__mro__:
            known = FIELDS.get(f"{kind.__module__}.{kind.__qualname__}")
            if known is not None:
                for field in dataclasses.fields(kind):
                    name = f"{section}.{field.name}".lstrip(".")
                    if field.name not in known and name not in allow:
                        yield (
                            f"{name}: it is not known what a resumed run makes of this setting of torchtitan: leave it "
                            f'out, or allow it: checkpoint.allow = ["{name}"]'
                        )
                break


def _fields(config: Any) -> tuple[Any, ...]:
    return dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
