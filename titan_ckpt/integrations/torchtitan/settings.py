"""torchtitan's checkpoint settings as a CheckpointConfig. Every setting is honoured or refused by its name.

Owns what each setting means here. Builds nothing and imports no torchtitan: a config is read by its attributes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from titan_ckpt.config import CheckpointConfig, ExportConfig, InitialLoadConfig, KeepConfig, ResumeConfig, SaveConfig
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.encoding.paths import is_uri
from titan_ckpt.errors import ConfigError, counted, refuse
from titan_ckpt.formats.huggingface.peft import CONFIG as PEFT_CONFIG
from titan_ckpt.stores.store import EXPECTED_PLACE, open_location, split_url

ASYNC_MODES: Mapping[str, Literal["disabled", "thread", "process"]] = {
    "disabled": "disabled", "async": "thread", "async_with_pinned_mem": "process",
}  # fmt: skip
EXPORT_DTYPES = ("float16", "float32", "bfloat16")
COMPONENTS: Sequence[Literal["optimizer", "lr_scheduler", "dataloader"]] = ("optimizer", "lr_scheduler", "dataloader")
"""torchtitan's keys in exclude_from_loading that are components here; every other key names a state."""

SETTINGS = frozenset(
    {
        "enable", "folder", "interval", "async_mode", "keep_latest_k", "load_step", "load_only", "exclude_from_loading",
        "enable_first_step_checkpoint", "create_seed_checkpoint", "last_save_model_only", "last_save_in_dcp",
        "last_save_in_hf", "store", "stop", "export_dtype", "initial_load_path", "initial_load_model_only",
        "initial_load_in_hf", "initial_load_in_hf_quantized", "additional_load_path", "include_base", "allow",
        "last_save_adapter",
    }
)  # fmt: skip
"""Every setting of TitanCheckpointer.Config; docs/use-in-torchtitan.md says what each means."""
LastSave = Literal["merged", "peft", "both"]


def check(
    config: Any,
    base_folder: str,
    states: Mapping[str, Any],
    hf_assets_path: str | None,
    tied: Mapping[str, bool],
    trained: Sequence[str],
) -> None:
    """Check what this checkpointer cannot do.

    `tied`: for each module with an adapter, whether its weight is that of a second module too. `trained`: the
    parameters that are trained beside the adapters.
    Raises: ConfigError listing every fault by torchtitan's names.
    """
    faults = [
        *_faults(config, base_folder, states, hf_assets_path),
        *_faults_of_adapters(config, tied),
        *_trained(config, trained),
    ]
    refuse(*(f"checkpoint.{fault}" for fault in faults))


def _faults_of_adapters(config: Any, adapted: Mapping[str, bool]) -> Iterator[str]:
    tied = [fqn for fqn, is_tied in adapted.items() if is_tied]
    names = ", ".join(get_args(LastSave))
    if config.last_save_adapter not in get_args(LastSave):
        yield f"last_save_adapter: {config.last_save_adapter!r}; expected one of {names}"
    elif config.last_save_adapter != "merged" and not config.last_save_in_hf:
        yield f"last_save_adapter: {config.last_save_adapter!r} is a form of last_save_in_hf; set that too"
    elif config.last_save_adapter != "merged" and not adapted:
        yield f"last_save_adapter: {config.last_save_adapter!r}, and the model has no adapters; add a LoRA converter"
    elif config.last_save_in_hf and config.last_save_adapter != "peft" and tied:
        yield (
            f"last_save_adapter: {', '.join(tied)} shares its weight with a second module, which merging would change "
            "too: set it to 'peft', or leave the module out of target_modules"
        )
    if config.include_base and not adapted:
        yield "include_base: the model has no adapters, and its saves are whole; leave it out"
    path = config.additional_load_path
    if path is None:
        return
    yield from _faults_of_source("additional_load_path", path)
    if not adapted:
        yield f"additional_load_path: {path} is for adapters, and the model has none; add a LoRA converter"
    if not config.initial_load_path and not config.initial_load_in_hf:
        yield "additional_load_path: name the adapter's base, by initial_load_path or initial_load_in_hf"
    if not config.initial_load_model_only:
        yield "additional_load_path: with initial_load_model_only=False the run has the adapter of initial_load_path"


def _trained(config: Any, names: Sequence[str]) -> Iterator[str]:
    """Yield the fault of settings that keep adapters alone while other parameters are trained."""
    asked = []
    if config.last_save_in_hf and config.last_save_adapter != "merged":
        asked.append("last_save_adapter")
    if not config.include_base and (config.initial_load_path or config.initial_load_in_hf):
        asked.append("include_base")
    if names and asked:
        yield (
            f"{', '.join(asked)}: beside its adapters the model trains {counted(len(names), 'parameter')}, such as "
            f"{names[0]}, which adapters alone would lose. torchtitan's spmd_types makes frozen parameters "
            'trainable: set parallelism.spmd_backend = "partial_dtensor", or keep the base by include_base and export '
            "merged weights"
        )


def _faults(config: Any, base_folder: str, states: Mapping[str, Any], hf_assets_path: str | None) -> Iterator[str]:
    for field in dataclasses.fields(config):
        if field.name not in SETTINGS:
            yield f"{field.name}: TitanCheckpointer has no such setting; leave it out, or use torchtitan's checkpointer"
    if is_uri(base_folder):
        yield (
            f"folder: the run's dump_folder, {base_folder}, is remote, and logs are written there: "
            "name a mounted folder, and the bucket in checkpoint.folder"
        )
    place = split_url(config.folder)
    exporting = not config.load_only and (config.last_save_in_hf or config.last_save_in_dcp)
    if place is None and is_uri(config.folder):
        yield f"folder: {config.folder}: expected {EXPECTED_PLACE}"
    elif place is not None and "/" not in place[2] and exporting:
        yield (
            f"folder: {config.folder}: the last step's folders would lie beside it, where other runs are: name a place "
            "of its own in the run's, such as s3://bucket/run/checkpoint"
        )
    known = [*COMPONENTS, *states]
    for name in config.exclude_from_loading:
        if name not in known:
            yield f"exclude_from_loading: the run has no {name!r}; it has {', '.join(known)}"
    if config.load_step < -1:
        yield f"load_step: {config.load_step} is no step; -1 takes the newest one"
    if config.load_only and config.create_seed_checkpoint:
        yield "create_seed_checkpoint: load_only permits no save; leave one of the two out"
    if config.export_dtype not in EXPORT_DTYPES:
        yield f"export_dtype: {config.export_dtype!r}; expected one of {', '.join(EXPORT_DTYPES)}"
    if config.async_mode not in ASYNC_MODES:
        yield f"async_mode: {config.async_mode!r}; expected one of {', '.join(ASYNC_MODES)}"
    path = initial_path(config, hf_assets_path)
    if config.initial_load_in_hf and path is None:
        yield "initial_load_in_hf: no initial_load_path and no hf_assets_path names the folder"
    elif path is not None:
        yield from _faults_of_source("initial_load_path", path)


def _faults_of_source(name: str, path: str) -> Iterator[str]:
    """Yield the fault of a path that cannot be a source. A bucket is asked only when the source is loaded."""
    if split_url(path) is not None:
        return
    if is_uri(path):
        yield f"{name}: {path}: expected {EXPECTED_PLACE}"
    elif not Path(path).is_dir():
        yield f"{name}: {path} is no folder"


def check_restart(config: Any, resumed: int) -> None:
    """Check the saves of a run that has loaded step `resumed` of its own folder. Raises: ConfigError."""
    first = 1 if config.enable_first_step_checkpoint else config.interval
    if "train_state" in config.exclude_from_loading and not config.load_only and first <= resumed:
        fault = (
            "checkpoint.exclude_from_loading: without 'train_state' this run counts from step 1, and its save of step "
            f"{first} would be older than step {resumed}, which is in its folder: name that step as initial_load_path "
            "of a run in another folder, or set load_only"
        )
        raise ConfigError([fault])


def initial_path(config: Any, hf_assets_path: str | None) -> str | None:
    """Return the folder of the initial weights; None without one."""
    path: str | None = config.initial_load_path
    return path or (hf_assets_path if config.initial_load_in_hf else None)


def translated(config: Any, hf_assets_path: str | None = None) -> CheckpointConfig:
    """Return the config of a CheckpointManager that does what these settings say."""
    save = SaveConfig(
        interval=config.interval,
        async_mode=ASYNC_MODES[config.async_mode],
        keep=KeepConfig(latest=config.keep_latest_k) if config.keep_latest_k else None,
        first_step=config.enable_first_step_checkpoint,
        model_only_last=config.last_save_model_only and not config.last_save_in_hf and config.export_dtype,
        include_base=config.include_base,
    )
    path = initial_path(config, hf_assets_path)
    kind: Literal["hf"] | None = "hf" if config.initial_load_in_hf else None
    what: Literal["weights", "training_state"] = "weights" if config.initial_load_model_only else "training_state"
    initial = [] if path is None else [InitialLoadConfig(path, kind, cast=True, load=what)]
    if config.additional_load_path:
        initial.append(InitialLoadConfig(config.additional_load_path, cast=True))
    beside = f"{config.folder.rstrip('/').rpartition('/')[0]}/" if split_url(config.folder) else ""
    last_exports = [ExportConfig(f, dtype=config.export_dtype, folder=f"{beside}exports") for f in exports(config)]
    if config.last_save_in_dcp:  # torchtitan resumes the newest step of a folder, so it has one of its own
        last_exports.append(ExportConfig("torchtitan", folder=f"{beside}dcp"))
    return CheckpointConfig(
        folder=config.folder,
        store=config.store,
        stop=config.stop,
        allow=tuple(config.allow),
        save=None if config.load_only else save,
        resume=ResumeConfig(exclude=tuple(name for name in COMPONENTS if name in config.exclude_from_loading)),
        initial_load=tuple(initial),
        export=() if config.load_only else tuple(last_exports),
    )


def reads_peft(config: Any) -> bool:
    """Return whether the additional path is a PEFT folder, whose names are those of Hugging Face.

    Collective if the path is given. Raises: StoreError, PeerError on the other ranks.
    """
    path = config.additional_load_path
    return path is not None and Coordinator.current().on_rank_0(
        "additional-load-format", lambda: (open_location(path, settings=config.store) / PEFT_CONFIG).is_file()
    )


def exports(config: Any) -> list[Literal["hf", "peft"]]:
    """Return the formats of the last step's exports that other programs open."""
    formats: dict[str, list[Literal["hf", "peft"]]] = {"merged": ["hf"], "peft": ["peft"], "both": ["hf", "peft"]}
    return formats[config.last_save_adapter] if config.last_save_in_hf else []
