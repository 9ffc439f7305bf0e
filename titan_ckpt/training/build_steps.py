"""The default versions of a trainer's thirteen build steps, and what they share.

Owns what is built from which settings. Knows neither the order of the steps nor the loop (trainer.py).
"""

from __future__ import annotations

import fnmatch
import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import IterableDataset, default_collate

from titan_ckpt.encoding.named import is_import_name
from titan_ckpt.errors import CheckpointError, ConfigError, refuse, says_setting_is_wrong
from titan_ckpt.guard.run_guard import RunGuard, StopRun
from titan_ckpt.loading.external import ExternalLoad, ExternalWeights, check_handler
from titan_ckpt.manager import CheckpointManager
from titan_ckpt.models.language_model import LanguageModel, Model
from titan_ckpt.models.registry import build_model, find_architecture, read_config
from titan_ckpt.process import RandomState
from titan_ckpt.telemetry.events import METRICS
from titan_ckpt.training.callbacks import Callback, Callbacks, LogValue
from titan_ckpt.training.callbacks.base import import_callbacks
from titan_ckpt.training.callbacks.console import Logging, ProgressBar
from titan_ckpt.training.callbacks.due import Checkpointing, Evaluation, Export
from titan_ckpt.training.callbacks.monitors import GradientHealth, LoadBalance, MemoryMonitor
from titan_ckpt.training.callbacks.process import GarbageCollection, Profiler
from titan_ckpt.training.callbacks.trackers import TensorBoard, Wandb
from titan_ckpt.training.config import DEFAULT_STEPS, RunConfig
from titan_ckpt.training.data.batch import Batch, collate
from titan_ckpt.training.data.chat import ChatTemplate
from titan_ckpt.training.data.loader import build_dataloader
from titan_ckpt.training.data.sequences import IndexedDataset
from titan_ckpt.training.data.stream import Encoder
from titan_ckpt.training.data.tokenizer import TextTokenizer
from titan_ckpt.training.folders import check_folders
from titan_ckpt.training.loss import BalanceLoss, balance_coefficient, summed_cross_entropy
from titan_ckpt.training.model_folder import checkpoint_settings
from titan_ckpt.training.own_code import check_names, make_optimizer, make_patterns, make_scheduler
from titan_ckpt.training.parallel.apply import parallelize
from titan_ckpt.training.parallel.data_parallel import check_axes, decay_groups, find_mixed, is_sharded, sum_gradients
from titan_ckpt.training.parallel.degrees import Degrees, find_degrees, micro_batches
from titan_ckpt.training.parallel.pipeline import Pipeline
from titan_ckpt.training.parallel.ranks import Ranks, process_group, world_size
from titan_ckpt.training.precision import determinism, keep_stored_dtypes
from titan_ckpt.training.run_data import find_tokenizer, make_data, make_held_out
from titan_ckpt.training.schedule import Decay, changed_settings, find_decay, rate_factor
from titan_ckpt.training.train_state import TrainState
from titan_ckpt.types import ModelConverter
from titan_ckpt.weights.initialize import construct, materialize
from titan_ckpt.weights.transforms import StateDictTransforms

logger = logging.getLogger(__name__)


class BuildSteps:
    """The build steps of a trainer; each attribute below holds the result of one step."""

    ranks: Ranks
    model: Model
    """The whole model until it is distributed over the ranks, then the first of `model_parts`."""
    built_on: str
    """"meta", or the type of the device that a model is built on which cannot be built on meta."""
    num_parameters: tuple[int, int]
    """Elements of the whole model's parameters, and how many of them are trained."""
    tokenizer: TextTokenizer | None
    encode: Encoder | None
    dataset: IterableDataset[Batch] | None
    collate: Callable[[Sequence[Any]], Any]
    dataloader: Any
    model_parts: Sequence[nn.Module]
    """This rank's parts of the model: its pipeline stages, or the one model."""
    pipeline: Pipeline | None
    balance_loss: BalanceLoss | None = None
    """The load-balancing loss of a mixture of experts, if one is asked for."""
    optimizer: Optimizer
    lr_scheduler: LRScheduler | None
    decay: Decay | None = None
    """Where "wsd" decays, if the settings say it by a step or a length; known after the load."""
    training_context: Callable[[], AbstractContextManager[object]]
    callbacks: Callbacks
    manager: CheckpointManager
    guard: RunGuard

    external_weights: ExternalWeights | None = None
    """Fills the model at every load if checkpoint.components excludes it; a subclass may define it as a method."""

    def __init__(
        self, config: RunConfig, converters: ModelConverter | None = None, callbacks: Sequence[Callback] = ()
    ) -> None:
        """Store the settings; nothing is built before `run`."""
        self.config = config
        self.converters = converters
        self.user_callbacks = tuple(callbacks)
        self.state = TrainState()
        self.num_steps = DEFAULT_STEPS if config.training.steps is None else config.training.steps
        """The last step of the run; with training.epochs it is known when the data is built, and again after a load."""
        self.log_history: deque[Mapping[str, LogValue]] = deque(maxlen=10_000)
        """The newest rows of metrics.jsonl, those before a resume included; on rank 0, and empty on the others."""
        self.measurements: dict[str, LogValue] = {}
        """Values that callbacks measured in the current step, to be logged with it; equal on every rank."""

    # The build steps in their order; setup is the first and lasts as long as the run.

    @contextmanager
    def setup(self) -> Iterator[Ranks]:
        """Join the other ranks and seed all generators equally, because initial values must agree before sharding.

        Raises: ConfigError for folders that are not writable, and for degrees of parallelism that the model, the batch
            or the number of ranks do not allow.
        """
        check_folders(self.config)
        check_names(self.config)
        training, degrees = self.config.training, self.find_degrees()
        balance_coefficient(self.config, self.read_shape())
        check_handler(self.config.checkpoint, self._weight_handlers())
        # warning filters that a step adds end with the run
        with (
            process_group(training.device, degrees, self.config.parallel.backend) as ranks,
            determinism(training.deterministic),
            warnings.catch_warnings(),
        ):
            RandomState().reseed(self.config.seed)
            try:
                yield ranks
            except CheckpointError as error:  # whichever rank meets it first says it, because others may never
                if says_setting_is_wrong(error):  # each rank says any other, of which the store may be the cause
                    error.repeats = not ranks.is_first(f"{type(error).__name__}: {error}")
                raise

    def build_model(self) -> Model:
        """Return the whole, converted model on meta; a model that cannot be built on meta has its initial values.

        Raises: ConfigError for an unknown flavor, or a folder without a config.json of this architecture.
        """
        config = self.config.model
        shape: dict[str, Any] = {"flavor": config.flavor, "folder": config.folder, "settings": config.settings}
        model = construct(lambda: build_model(config.name, **shape), config.construct, make_patterns(self.config))
        if self.converters is not None:
            self.converters.convert(model)
        return model

    def freeze_model(self) -> None:
        """Freeze the parameters that `model.freeze` names, in addition to those that converters froze.

        Trained parameters stay float32. With compute_dtype bfloat16, frozen ones take the dtype of their source.
        Raises: ConfigError for patterns without a match, and if nothing is left to train.
        """
        problems = []
        for i, pattern in enumerate(self.config.model.freeze):
            matched = [p for fqn, p in self.model.named_parameters() if fnmatch.fnmatchcase(fqn, pattern)]
            if not matched:
                problems.append(
                    f"model.freeze.{i}: {pattern!r} matches no parameter; names look like layers.0.ffn_norm.weight"
                )
            for parameter in matched:
                parameter.requires_grad_(False)
        if not problems and not self.trainable():
            problems.append("model.freeze: leaves nothing to train; name fewer modules")
        refuse(*problems)
        if self._compute_dtype is torch.bfloat16:
            keep_stored_dtypes(self.model, checkpoint_settings(self.config), Path(self.config.output_folder))

    def build_assets(self) -> TextTokenizer | None:
        """Return the tokenizer, by default that of the pretrained model; None if the data comes without any.

        Raises: ConfigError if the model's vocabulary is too small for it, and for pretrained weights without one.
        """
        return find_tokenizer(self.config, self.model.vocab_size if isinstance(self.model, LanguageModel) else None)

    def build_data_transform(self) -> Encoder | None:
        """Return what turns a document into ids, or a conversation into ids and the mask of the learned ones.

        Raises: ConfigError if a chat template is missing.
        """
        if self.tokenizer is None:
            return None
        return self.tokenizer.encode_document if self.config.data.messages is None else ChatTemplate(self.tokenizer)

    def build_dataset(self) -> IterableDataset[Batch] | None:
        """Return this rank's share of the data. Raises: ConfigError for a length that does not fit, and bad data."""
        return make_data(self.config, self.ranks, self.tokenizer, self.encode, self.model)

    def build_collate(self) -> Callable[[Sequence[Any]], Any]:
        """Return the function that turns sequences into a batch: each is padded to the longest.

        Pipelines and ranks that share sequences need batches of one length. The samples of a model that is no
        LanguageModel are stacked by torch's default_collate.
        """
        if not isinstance(self.model, LanguageModel):
            stack: Callable[[Any], Any] = default_collate
            return stack
        parallel = self.config.parallel
        shared = parallel.pipeline_parallel * parallel.context_parallel * parallel.tensor_parallel > 1
        return partial(collate, length=self.config.data.sequence_length) if shared else collate

    def build_dataloader(self) -> Any:
        """Return a loader whose state_dict holds the position in the data. If it ends, the run ends there."""
        assert self.dataset is not None, "who builds no dataset builds a loader"
        data, training = self.config.data, self.config.training
        batches = (self.dataset, training.batch_size, self.collate, self.config.seed)
        pinned = self.ranks.device.type == "cuda"
        return build_dataloader(*batches, data.num_workers, data.prefetch, pin_memory=pinned)

    def parallelize_model(self) -> Sequence[nn.Module]:
        """Return this rank's parts of the model, with memory; reseed ranks with different data differently.

        Parameters that were on meta before this step get their values from `load`.
        """
        fit = self.converters.parallel_plan if self.converters is not None else dict
        length, distribute = self.config.data.sequence_length, self.own_function("parallelize") or parallelize
        parts = distribute(self.model, self.ranks, self.config.parallel, self._compute_dtype, length, fit)
        if self.own_function("clip_gradients") is None:
            check_axes(parts, self.config.model.name)
        for part in parts:
            sum_gradients(part)
            materialize(part, self.ranks.device)
        if not isinstance(parts[0], Model):
            found = f"its parallelize returns a {type(parts[0]).__name__} first, expected a Model"
            raise ConfigError([f"model.name: {self.config.model.name!r}: {found}; distribute the model in place"])
        self.model = parts[0]
        if coefficient := balance_coefficient(self.config, self.read_shape()):
            self.balance_loss = BalanceLoss(parts, self.ranks, coefficient)
        place = self.ranks.place
        RandomState().reseed(self.config.seed + 1 + self.ranks.data_rank * self.ranks.degrees.pp + place.pp)
        return parts

    def build_optimizer(self) -> Optimizer:
        """Return the optimizer over the trained parameters: matrices with weight decay, norms, biases, vectors without.

        Raises: ConfigError for an implementation that cannot update all of them.
        """
        config = self.config.optimizer
        # every rank has both groups, even if its pipeline stage trains no parameter of one
        parts = getattr(self, "model_parts", [self.model])
        of_groups = zip(decay_groups(parts), (config.weight_decay, 0.0), strict=True)
        groups = [{"params": [p for _, p in named], "weight_decay": decay} for named, decay in of_groups]
        if is_import_name(config.name):
            return make_optimizer(config, groups)
        if config.implementation in ("fused", "foreach") and (mixed := find_mixed(self.model_parts)):
            problem = f'"{config.implementation}" updates parameters together, and torch cannot mix'
            problem += f" {mixed[0]}, which parallelism distributes, and {mixed[1]}, which it leaves whole"
            raise ConfigError([f'optimizer.implementation: {problem}; leave it out, or take "for-loop"'])
        way: dict[str, Any] = {None: {}, "fused": {"fused": True}, "foreach": {"foreach": True}}.get(
            config.implementation, {"foreach": False, "fused": False}
        )
        return AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, **way)

    def build_lr_scheduler(self) -> LRScheduler | None:
        """Return the scheduler of the learning rate."""
        if is_import_name(self.config.schedule.kind):
            return make_scheduler(self.config, self.optimizer, max(self.num_steps, 1))
        # a load may change the number of steps, and where the decay begins
        self.decay = find_decay(self.config, self.num_steps, self.tokens_per_step)
        schedule = self.config.schedule
        return LambdaLR(self.optimizer, lambda index: rate_factor(schedule, self.num_steps, self.decay)(index))

    def build_training_context(self) -> Callable[[], AbstractContextManager[object]]:
        """Return the context of every forward pass: autocast, unless FSDP2 already computes in 16 bits."""
        if self._compute_dtype is torch.float32 or isinstance(self.model, FSDPModule):
            return nullcontext
        return lambda: torch.autocast(self.ranks.device.type, self._compute_dtype)

    def build_callbacks(self) -> Callbacks:
        """Return the callbacks that the config requests, each under its name, and the user's callbacks last.

        Raises: ConfigError for a library that is not installed, for held-out text that is too short, and for names that
            are no callbacks.
        """
        config, folder = self.config, Path(self.config.output_folder)
        training, profiling = config.training, config.profiling
        return Callbacks(
            gradient_health=GradientHealth(),
            load_balance=LoadBalance() if "load_balance" in training.measure else None,
            memory=MemoryMonitor() if "memory" in training.measure else None,
            evaluation=Evaluation(config.evaluation, self.held_out()) if config.evaluation else None,
            logging=Logging(folder / METRICS),
            tensorboard=TensorBoard(config.tensorboard, folder) if config.tensorboard else None,
            wandb=Wandb(config.wandb, folder) if config.wandb else None,
            progress=ProgressBar(),
            checkpoint=Checkpointing(),
            export=Export(),
            profiler=Profiler(profiling, folder) if profiling else None,
            garbage_collection=GarbageCollection(training.gc_interval) if training.gc_interval else None,
            user=(*self.user_callbacks, *self.named_callbacks),
        )

    @cached_property
    def named_callbacks(self) -> tuple[Callback, ...]:
        """The callbacks that the run file names. Raises: ConfigError."""
        return tuple(import_callbacks(self.config.callbacks))

    # Shared by the build steps

    def _weight_handlers(self) -> list[str]:
        """Return the names of everything that would fill the model at a load; known before anything is built."""
        own = [f"{type(self).__name__}.external_weights"] if self.external_weights is not None else []
        callbacks = (*self.user_callbacks, *self.named_callbacks)
        return own + [
            f"{type(callback).__name__}.on_external_load"
            for callback in callbacks
            if type(callback).on_external_load is not Callback.on_external_load
        ]

    def _take_weights(self, event: ExternalLoad) -> None:
        if self.external_weights is not None:
            self.external_weights(event)
        self.callbacks.on_external_load(self, event)  # type: ignore[arg-type]  # these are a Trainer's build steps

    def read_shape(self) -> Any:
        """Return the shape of the model; called before anything is built. Override it together with `build_model`."""
        model = self.config.model
        return read_config(model.name, flavor=model.flavor, folder=model.folder)

    def own_function(self, name: Literal["parallelize", "clip_gradients"]) -> Any:
        """Return the function that the model's Architecture has in place of the default; None without one."""
        return getattr(find_architecture(self.config.model.name), name, None)

    def find_degrees(self) -> Degrees:
        """Return how many ranks each kind of parallelism has. Raises: ConfigError for all that does not fit."""
        own = self.own_function("parallelize") is not None
        return find_degrees(self.config, world_size(), self.read_shape(), parallelizes_itself=own)

    @property
    def accumulation(self) -> int:
        """Return the number of micro-batches per optimizer step."""
        return micro_batches(self.config.training, self.ranks.data_size)

    @property
    def global_batch_size(self) -> int:
        """Return the number of sequences per optimizer step over all ranks."""
        return self.config.training.batch_size * self.accumulation * self.ranks.data_size

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of an optimizer step whose batches are full, over all ranks; of other data, its samples."""
        length = self.config.data.sequence_length if isinstance(self.model, LanguageModel) else 1
        return self.global_batch_size * length

    def build_pipeline(self) -> Pipeline | None:
        """Return the object that runs the pipeline stages, or None without pipeline parallelism."""
        if self.ranks.degrees.pp == 1:
            return None
        dtype = self._compute_dtype if is_sharded(self.ranks) else torch.float32
        return Pipeline(self.model_parts, self.ranks, self.config, summed_cross_entropy, self.accumulation, dtype)

    def trainable(self) -> list[nn.Parameter]:
        """Return the parameters that are trained, each once."""
        parts = getattr(self, "model_parts", [self.model])
        return [p for part in parts for p in part.parameters() if p.requires_grad]

    def held_out(self) -> IndexedDataset:
        """Return all of the data that [evaluation] measures. Raises: ConfigError if it is shorter than one sequence."""
        if not isinstance(self.model, LanguageModel):
            found = f"it measures text, and {type(self.model).__name__} is no LanguageModel"
            raise ConfigError([f"evaluation: {found}; measure in a callback of your own"])
        return make_held_out(self.config, self.tokenizer, self.encode)

    def is_log_due(self, step: int) -> bool:
        """Return whether the end of a step is reported even if no callback measured anything in it."""
        return step % self.config.training.log_interval == 0 or step in (1, self.num_steps)

    @property
    def epoch(self) -> int:
        """Return the epoch of the next sequence, a pass over the data. A loader of your own may have one, too."""
        return int(getattr(self.dataloader, "epoch", 0))

    @property
    def _compute_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.config.training.compute_dtype)
        return dtype

    def _taken_settings(self, stored: Mapping[str, Any]) -> frozenset[str]:
        """Return the settings of the optimizer that a resume takes from the run file, because they have changed.

        A schedule of one's own has rates that nobody else can compute, and goes on with those of the checkpoint.
        """
        changed = changed_settings(stored, self.state.optimizer)
        return changed - {"lr"} if is_import_name(self.config.schedule.kind) else changed

    def find_transforms(self) -> StateDictTransforms:
        """Return the names of the model's tensors in files, and what lies beside them in a Hugging Face folder."""
        tokenizer = self.tokenizer
        special = tokenizer.special_ids if tokenizer is not None else {}
        assets = tokenizer.folder if tokenizer is not None else None
        titan = self.model.torchtitan_key_map()
        return StateDictTransforms(self.model.key_map(), self.model.hf_config() | special, assets, titan)

    def build_manager(self) -> CheckpointManager:
        """Return the checkpoint manager of everything that was built."""
        manager = CheckpointManager(
            checkpoint_settings(self.config),
            model_parts=self.model_parts,
            optimizers=[self.optimizer],
            lr_schedulers=[self.lr_scheduler] if self.lr_scheduler is not None else [],
            dataloader=self.dataloader,
            states={"train": self.state},
            sd_transforms=self.find_transforms(),
            model_converters=self.converters,
            external_weights=self._take_weights if self.config.checkpoint.external else None,
            own_settings=lambda stored: self._taken_settings(stored.get("train", {}).get("optimizer", {})),
            base_folder=self.config.output_folder,
        )
        converters = self.converters.describe() if self.converters is not None else []
        manager.telemetry.settings = {**asdict(self.config), "converters": converters, "numerics": self.state.numerics}
        manager.telemetry.add_sink(self._tell)
        return manager

    def _tell(self, event: Mapping[str, Any]) -> None:
        """Call what callbacks do when a step is committed, or an export published."""
        calls = {"save": ("on_committed", ("step", "folder", "digest")), "export": ("on_exported", ("step", "folder"))}
        if event["event"] not in calls or event["error"]:
            return
        name, about = calls[event["event"]]
        for callback in self.callbacks:
            try:
                getattr(callback, name)(self, *(event[key] for key in about))
            except (Exception, StopRun, SystemExit):  # no other rank would hear that the run is to end
                logger.exception("%s.%s(step %d) has failed; the run goes on", type(callback), name, event["step"])
