"""TitanCheckpointer: torchtitan's checkpointer interface with a CheckpointManager behind it.

Owns the calls of torchtitan's Trainer. settings.py owns the meaning of its settings, adapter.py the names in Hugging
Face folders. A model's converters are torchtitan's own LoRA, or those of this package.
Source of the interface: torchtitan 0.3, components/checkpointer/base.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.checkpointer import CheckpointManager as TorchtitanManager

from titan_ckpt.config import StopConfig
from titan_ckpt.converters import ModelConvertersContainer
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.encoding.paths import is_uri
from titan_ckpt.errors import ConfigError, KeyMapError, refuse
from titan_ckpt.guard.run_guard import RunGuard
from titan_ckpt.integrations.torchtitan import adapter, held, settings
from titan_ckpt.integrations.torchtitan.converters import (
    adapted_modules,
    find_converters,
    over_layers,
    trained_beside_adapters,
)
from titan_ckpt.integrations.torchtitan.model_config import check_folder, config_json, is_allowed
from titan_ckpt.integrations.torchtitan.wording import InTorchtitansWords, in_torchtitans_words
from titan_ckpt.manager import CheckpointManager
from titan_ckpt.stores.store import StoreConfig, local_path
from titan_ckpt.types import Stateful
from titan_ckpt.weights.transforms import StateDictTransforms
from titan_ckpt.weights.wrapper import ModelWrapper


class _Kept:
    """A state that is saved and never loaded, because exclude_from_loading names it."""

    def __init__(self, state: Stateful) -> None:
        self.state_dict = state.state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Leave the run's own state as it is."""


def _check_left_out(nameless: Collection[str], allow: Collection[str]) -> None:
    """Check that the buffers which an export would lack are allowed. Raises: ConfigError naming each."""
    faults = []
    for name in dict.fromkeys(map(over_layers, sorted(nameless))):
        line = f"Hugging Face folders of this model have no name for the buffer {name}: the export leaves it out"
        if not is_allowed(name, allow, f"checkpoint.last_save_in_hf: {line}, and computes without it"):
            faults.append(
                f"checkpoint.last_save_in_hf: {line}, and would compute without what training has made of it. Build "
                f'the model without it, or accept it: checkpoint.allow = ["{name}"]'
            )
    refuse(*faults)


class TitanCheckpointer(BaseCheckpointManager):  # type: ignore[misc]  # torchtitan is not there when mypy runs
    """Saves, resumes and exports a run of torchtitan's Trainer, with torchtitan's settings.

    config.checkpoint = TitanCheckpointer.Config(enable=True, interval=500)

    `Config` has every setting of torchtitan's own manager, those of adapters, `last_save_in_dcp`, `store` and `stop`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TorchtitanManager.Config):  # type: ignore[misc]  # torchtitan is not there when mypy runs
        """The settings of torchtitan's own manager, and more: docs/use-in-torchtitan.md has their meanings."""

        additional_load_path: str | None = None
        """An adapter of the initial weights: a PEFT folder, a step of this package, or a DCP folder."""
        include_base: bool = False
        """Interval saves of adapters hold the frozen base too; else they name its folder."""
        last_save_adapter: settings.LastSave = "merged"
        """With last_save_in_hf: merged weights, the adapter alone as PEFT reads it, or both."""
        last_save_in_dcp: bool = False
        """Whether the last step is also written, with all training state, as torchtitan's own manager writes it: in
        the folder dcp beside the checkpoint folder."""
        allow: list[str] = field(default_factory=list)
        """Names that messages ask for: classes whose state a resumed run may lose, settings in config.json that may
        differ. Steps record them."""
        store: StoreConfig = field(default_factory=StoreConfig)
        """How buckets are reached, if a folder or a source is in one."""
        stop: StopConfig = field(default_factory=StopConfig)
        """The signals and the time limits on which the run saves its step and ends, as RunGuard does it."""

        def __post_init__(self) -> None:
            """Check as torchtitan does, which has no Hugging Face folders in buckets and refuses them there."""
            paths = {name: getattr(self, name) for name in ("folder", "initial_load_path")}
            remote = {name: path.strip() for name, path in paths.items() if path and is_uri(path.strip())}
            for name in remote:
                setattr(self, name, "/")
            TorchtitanManager.Config.__post_init__(self)
            for name, path in remote.items():
                setattr(self, name, path)

    @in_torchtitans_words
    def __init__(
        self,
        config: Config,
        *,
        dataloader: Stateful | None,
        model_parts: Sequence[nn.Module],
        optimizers: Iterable[Any],
        lr_schedulers: Stateful,
        states: Mapping[str, Stateful],
        sd_adapter: Any,
        base_folder: str = "",
        ft_manager: Any = None,
    ) -> None:
        """Bind to the run's objects; torchtitan's Trainer is the caller. Raises: ConfigError listing every fault."""
        self.enable = config.enable
        self._opened, self._watching = ExitStack(), ExitStack()
        self._guard: RunGuard | None = None
        if not self.enable:
            return
        if ft_manager is not None and ft_manager.enabled:
            raise ConfigError(
                ["fault_tolerance.enable: TitanCheckpointer does not work with torchft; use torchtitan's checkpointer"]
            )
        assets = getattr(sd_adapter, "hf_assets_path", None)
        converters = find_converters(model_parts)
        trained = trained_beside_adapters(model_parts, converters)
        self._line = Coordinator.current()
        self._line.together(
            "torchtitan-settings",
            lambda: settings.check(config, base_folder, states, assets, adapted_modules(converters), trained),
        )
        self._config = config
        self._trainer: Any = states.get("train_state")
        self._held = partial(held.faults, states, dataloader, optimizers, lr_schedulers, config.allow)
        excluded = set(config.exclude_from_loading)
        self.manager = CheckpointManager(
            settings.translated(config, assets),
            model_parts=model_parts,
            optimizers=[*optimizers],
            lr_schedulers=[lr_schedulers],
            dataloader=dataloader,
            states={name: _Kept(state) if name in excluded else state for name, state in states.items()},
            sd_transforms=self._transforms(model_parts, converters, sd_adapter),
            model_converters=converters,
            base_folder=base_folder,
        )
        self._opened.callback(InTorchtitansWords().remove)

    def _transforms(
        self, model_parts: Sequence[nn.Module], converters: ModelConvertersContainer | None, sd_adapter: Any
    ) -> StateDictTransforms | None:
        """Return the names of the model in Hugging Face folders, if a setting needs them. Collective.

        Raises: ConfigError without an adapter or config.json; KeyMapError for an adapter that is no table.
        """
        config, assets = self._config, getattr(sd_adapter, "hf_assets_path", None)
        peft = settings.reads_peft(config)
        wanted = [name for name in ("initial_load_in_hf", "last_save_in_hf") if getattr(config, name)]
        wanted += ["additional_load_path"] if peft else []
        if not wanted:
            return None
        if sd_adapter is None:
            raise ConfigError([f"checkpoint.{name}: the model spec has no state_dict_adapter" for name in wanted])
        complete, exports = adapter.with_experts(sd_adapter), settings.exports(config)

        def made() -> StateDictTransforms:
            wrapper = ModelWrapper(model_parts, converters)
            state = wrapper.state("base")
            shapes = {fqn: tuple(v.shape) for fqn, v in state.tensors.items()}
            try:
                key_map = adapter.find_key_map(complete, shapes, wrapper.tied, wrapper.buffers().keys())
                named = {fqn: shape for fqn, shape in shapes.items() if fqn not in key_map.nameless}
                adapter.check_reads(complete, named, wrapper.tied)
                if peft or "peft" in exports:
                    adapted = [f"{fqn}.weight" for fqn in adapted_modules(converters)]
                    key_map = adapter.with_stored_forms(key_map, complete, state.own, adapted)
            except KeyMapError as error:
                folder = settings.initial_path(config, assets) if config.initial_load_in_hf else None
                names = ", ".join(f"checkpoint.{name}" for name in wanted)
                where = f" ({folder})" if folder else ""
                spec = getattr(getattr(self._trainer, "config", None), "model_spec", None)
                flavor = "the model" if spec is None else f"{spec.name} {spec.flavor}"  # as in torchtitan's registries
                step = f"Correct {adapter.name_of(complete)}, which the model spec names, or leave {names} out"
                raise KeyMapError(f"{names}{where}: {flavor}: {error}\n{step}", error.unknown) from error
            if "hf" in exports:
                _check_left_out(key_map.nameless, config.allow)
            model = getattr(sd_adapter, "model_config", None)
            return StateDictTransforms(
                key_map,
                config_json(model, assets, config.allow) if exports else None,
                Path(assets) if assets and Path(assets).is_dir() else None,
                check_folder=partial(check_folder, model=model, allow=config.allow),
            )

        return self._line.together("torchtitan-names", made)  # a pipeline stage has other names than the next one

    @property
    def save_future(self) -> Any:
        """Return the save in flight, which maybe_wait_for_saving waits for; None without one."""
        return self.manager.in_flight

    @in_torchtitans_words
    def _load(self, step: int = -1) -> bool:
        """Resume, or load the initial weights; return whether anything was loaded.

        Raises: ConfigError for a run that would save steps which are older than the one that it resumed, or that holds
        objects which are not known to resume exactly: its Trainer is complete here, and has not trained.
        """
        self._line.together(  # rank 0 alone has loggers
            "torchtitan-held", lambda: refuse(*self._held(self.manager.watch), source="TitanCheckpointer")
        )
        result = self.manager.load(step)
        resumed = result.plan.resume
        folder = self.manager.folder
        own = os.path.abspath(path) if (path := local_path(folder)) else folder
        if resumed is not None and str(resumed.path).startswith(f"{own}/"):
            settings.check_restart(self._config, resumed.step)
        self._watching.close()  # the guard of an earlier load
        self._guard = self._watching.enter_context(RunGuard(self.manager)) if self._trainer is not None else None
        return bool(result.report.loaded)

    @in_torchtitans_words
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save or export the step if it is due; return whether it was.

        torchtitan's Trainer calls it at the end of each step, and goes on to its end if the run must stop.
        """
        if curr_step == 0:
            self.manager.save_seed()
            return True
        exports = last_step and self._config.last_save_in_hf
        is_due = (self.manager.export if exports else self.manager.save)(curr_step, last_step)
        if self._guard is not None and self._guard.step_ended(curr_step):
            own = vars(self._trainer).get("should_continue_training")
            self._watching.callback(_put_back, self._trainer, own)
            self._trainer.should_continue_training = lambda: False  # the trainer ends as after its last step
            return True
        return is_due

    @property
    def stopped(self) -> str | None:
        """Return why the run was stopped before its last step, such as a signal, or None."""
        return None if self._guard is None else self._guard.stopped

    @in_torchtitans_words
    def _maybe_wait_for_staging(self) -> None:
        self.manager.maybe_wait_for_staging()

    @in_torchtitans_words
    def _wait_for_saving(self) -> None:
        self.manager.wait()

    @in_torchtitans_words
    def _close(self) -> None:
        with self._opened:
            # torchtitan closes a run that has raised while it handles the error
            self._watching.__exit__(*sys.exc_info())
            if hasattr(self, "manager"):  # the constructor may have refused the settings
                self.manager.close()


def _put_back(trainer: Any, own: Any) -> None:
    """Let a Trainer that was stopped train again. `own`: what it had in place of its class's method, or None."""
    del trainer.should_continue_training
    if own is not None:
        trainer.should_continue_training = own
