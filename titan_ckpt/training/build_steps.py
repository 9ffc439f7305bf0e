"""The default versions of a trainer's thirteen build steps, and what they share.

Owns what is built from which settings. Knows neither the order of the steps nor the loop (trainer.py).
"""

from __future__ import annotations

import fnmatch
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import IterableDataset

from titan_ckpt.encoding.named import is_import_name
from titan_ckpt.errors import ConfigError
from titan_ckpt.guard.run_guard import RunGuard
from titan_ckpt.loading.external import ExternalWeights
from titan_ckpt.manager import CheckpointManager
from titan_ckpt.models.language_model import LanguageModel
from titan_ckpt.models.registry import build_model, read_config
from titan_ckpt.training.callbacks import Callback, Callbacks, LogValue
from titan_ckpt.training.callbacks.base import import_callbacks
from titan_ckpt.training.callbacks.checkpoint import Checkpointing, Export
from titan_ckpt.training.callbacks.console import Logging, ProgressBar
from titan_ckpt.training.callbacks.evaluation import Evaluation
from titan_ckpt.training.callbacks.health import GradientHealth
from titan_ckpt.training.callbacks.monitors import LoadBalance, MemoryMonitor
from titan_ckpt.training.callbacks.process import GarbageCollection, Profiler
from titan_ckpt.training.callbacks.trackers import TensorBoard, Wandb
from titan_ckpt.training.config import RunConfig
from titan_ckpt.training.data.corpus import open_corpus
from titan_ckpt.training.data.loader import Batch, PackedDataset, build_dataloader, collate, tokenise
from titan_ckpt.training.data.tokenizer import VOCAB_SIZE, TextTokenizer, read_tokenizer, train_tokenizer
from titan_ckpt.training.folders import check_folders
from titan_ckpt.training.loss import summed_cross_entropy
from titan_ckpt.training.model_folder import checkpoint_settings, tokenizer_folder
from titan_ckpt.training.own_code import check_names, make_dataset, make_optimizer, make_scheduler
from titan_ckpt.training.parallel.apply import parallelise
from titan_ckpt.training.parallel.data_parallel import is_sharded
from titan_ckpt.training.parallel.degrees import Degrees, find_degrees
from titan_ckpt.training.parallel.pipeline import Pipeline
from titan_ckpt.training.parallel.ranks import Ranks, process_group, world_size
from titan_ckpt.training.parallel.tensor_parallel import Plan
from titan_ckpt.training.precision import keep_stored_dtypes
from titan_ckpt.training.schedule import rate_factor, schedule_record
from titan_ckpt.training.train_state import TrainState
from titan_ckpt.types import ModelHooks
from titan_ckpt.weights.initialize import construct, materialise
from titan_ckpt.weights.transforms import StateDictTransforms

METRICS = "metrics.jsonl"


def seed_generators(seed: int) -> None:
    """Seed Python, NumPy and torch on all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the legacy global generator is what libraries draw from
    torch.manual_seed(seed)


class Converters(ModelHooks, Protocol):
    """The methods of model converters that the trainer calls, in addition to those that checkpoints call."""

    def convert(self, model: nn.Module) -> None: ...

    def parallel_plan(self, plan: Plan) -> Plan: ...

    def post_optimizer_hook(self, model_parts: Sequence[nn.Module]) -> None: ...


class BuildSteps:
    """The build steps of a trainer; each attribute below holds the result of one step."""

    ranks: Ranks
    model: LanguageModel
    """The whole model until it is distributed over the ranks, then the first of `model_parts`."""
    num_parameters: tuple[int, int]
    """Elements of the whole model's parameters, and how many of them are trained."""
    tokenizer: TextTokenizer | None
    encode: Callable[[str], list[int]] | None
    dataset: IterableDataset[Batch] | None
    collate: Callable[[Sequence[Batch]], Batch]
    dataloader: Any
    model_parts: Sequence[nn.Module]
    """This rank's parts of the model: its pipeline stages, or the one model."""
    pipeline: Pipeline | None
    optimizer: Optimizer
    lr_scheduler: LRScheduler | None
    training_context: Callable[[], AbstractContextManager[object]]
    callbacks: Callbacks
    manager: CheckpointManager
    guard: RunGuard

    external_weights: ExternalWeights | None = None
    """Fills the model at every load if checkpoint.components excludes it; a subclass may define it as a method."""

    def __init__(
        self, config: RunConfig, converters: Converters | None = None, callbacks: Sequence[Callback] = ()
    ) -> None:
        """Store the settings; nothing is built before `run`."""
        self.config = config
        self.converters = converters
        self.user_callbacks = tuple(callbacks)
        self.state = TrainState(schedule_record(config))
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
        torch.use_deterministic_algorithms(self.config.training.deterministic)
        # warning filters that a step adds end with the run
        with process_group(self.config.training.device, self.find_degrees()) as ranks, warnings.catch_warnings():
            seed_generators(self.config.seed)
            yield ranks

    def build_model(self) -> LanguageModel:
        """Return the whole, converted model on meta; a model that cannot be built on meta has its initial values.

        Raises: ConfigError for an unknown flavor, or a folder without a config.json of this architecture.
        """
        config = self.config.model
        shape: dict[str, Any] = {"flavor": config.flavor, "folder": config.folder, "settings": config.settings}
        model = construct(lambda: build_model(config.name, **shape))
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
            problems.append("model.freeze: leaves nothing to train")
        if problems:
            raise ConfigError(problems)
        if self._compute_dtype is torch.bfloat16:
            keep_stored_dtypes(self.model, checkpoint_settings(self.config), Path(self.config.output_folder))

    def build_assets(self) -> TextTokenizer | None:
        """Return the tokenizer, by default that of the pretrained model; None if one's own data comes without any.

        Raises: ConfigError if the model's vocabulary is too small for it, and for pretrained weights without one.
        """
        data, folder = self.config.data, tokenizer_folder(self.config)
        if folder is not None:
            setting = "data.tokenizer" if data.tokenizer.folder is None else "data.tokenizer.folder"
            tokenizer = read_tokenizer(folder, setting)
        elif data.dataset is not None and data.tokenizer.vocab_size is None:
            return None
        else:
            size = data.tokenizer.vocab_size or VOCAB_SIZE
            tokenizer = train_tokenizer(open_corpus(data.corpus), size, Path(data.cache_folder))
        need, have = tokenizer.num_ids, self.model.vocab_size
        if need > have:
            misfit = f"the {need} tokens of {tokenizer.folder} do not fit the model's vocabulary of {have}"
            raise ConfigError([f"data.tokenizer: {misfit}; take the tokenizer of the weights, or a smaller one"])
        return tokenizer

    def build_data_transform(self) -> Callable[[str], list[int]] | None:
        """Return the function that turns a document into token ids."""
        return self.tokenizer.encode_document if self.tokenizer is not None else None

    def build_dataset(self) -> IterableDataset[Batch] | None:
        """Return this rank's share of the packed corpus. Raises: ConfigError for a length that does not fit."""
        data = self.config.data
        longest = self.model.max_seq_len
        if longest is not None and data.sequence_length > longest:
            raise ConfigError([f"data.sequence_length: {data.sequence_length} is longer than the model's {longest}"])
        if data.dataset is not None:
            return make_dataset(self.config, self.ranks.data_rank, self.ranks.data_size, self.tokenizer)
        tokens = self.tokens_of(data.corpus)
        trained = tokens[: len(tokens) - int(len(tokens) * data.held_out)]
        ranks = self.ranks
        return PackedDataset(
            trained, data.sequence_length, self.config.seed, rank=ranks.data_rank, num_ranks=ranks.data_size
        )

    def build_collate(self) -> Callable[[Sequence[Batch]], Batch]:
        """Return the function that turns sequences into a batch."""
        return collate

    def build_dataloader(self) -> Any:
        """Return a loader whose state_dict holds the position in the data. It must not end before the run does."""
        assert self.dataset is not None, "who builds no dataset builds a loader"
        return build_dataloader(self.dataset, self.config.training.batch_size, self.collate, self.config.seed)

    def parallelise_model(self) -> Sequence[nn.Module]:
        """Return this rank's parts of the model, with memory; reseed ranks with different data differently.

        Parameters that were on meta before this step get their values from `load`.
        """
        fit = self.converters.parallel_plan if self.converters is not None else dict
        length = self.config.data.sequence_length
        parts = parallelise(self.model, self.ranks, self.config.parallel, self._compute_dtype, length, fit)
        for part in parts:
            materialise(part, self.ranks.device)
        assert isinstance(parts[0], LanguageModel), "a stage is a model"
        self.model = parts[0]
        place = self.ranks.place
        seed_generators(self.config.seed + 1 + self.ranks.data_rank * self.ranks.degrees.pp + place.pp)
        return parts

    def build_optimizer(self) -> Optimizer:
        """Return the optimizer over the trained parameters: matrices with weight decay, vectors without."""
        config = self.config.optimizer
        matrices = [p for p in self.trainable() if p.dim() >= 2]
        vectors = [p for p in self.trainable() if p.dim() < 2]
        # every rank has both groups, even if its pipeline stage trains no parameter of one
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        if is_import_name(config.name):
            return make_optimizer(config, groups)
        return AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)

    def build_lr_scheduler(self) -> LRScheduler | None:
        """Return the scheduler of the learning rate."""
        if is_import_name(self.config.schedule.kind):
            return make_scheduler(self.config, self.optimizer)
        return LambdaLR(self.optimizer, rate_factor(self.config.schedule, self.config.training.steps))

    def build_training_context(self) -> Callable[[], AbstractContextManager[object]]:
        """Return the context of every forward pass: autocast, unless FSDP2 already computes in bfloat16."""
        if self._compute_dtype is torch.float32 or is_sharded(self.ranks):
            return nullcontext
        return lambda: torch.autocast(self.ranks.device.type, self._compute_dtype)

    def build_callbacks(self) -> Callbacks:
        """Return the callbacks that the config requests, each under its name, and the user's callbacks last.

        Raises: ConfigError for a library that is not installed, for held-out text that is too short, and for names that
            are no callbacks.
        """
        config, folder = self.config, Path(self.config.output_folder)
        monitoring, profiling, collection = config.monitoring, config.profiling, config.garbage_collection
        return Callbacks(
            gradient_health=GradientHealth(),
            load_balance=LoadBalance() if monitoring.load_balance else None,
            memory=MemoryMonitor() if monitoring.memory else None,
            evaluation=Evaluation(config.evaluation, self.held_out()) if config.evaluation else None,
            logging=Logging(folder / METRICS),
            tensorboard=TensorBoard(config.tensorboard, folder) if config.tensorboard else None,
            wandb=Wandb(config.wandb, folder) if config.wandb else None,
            progress=ProgressBar(),
            checkpoint=Checkpointing(),
            export=Export(),
            profiler=Profiler(profiling, folder) if profiling else None,
            garbage_collection=GarbageCollection(collection) if collection else None,
            user=(*self.user_callbacks, *import_callbacks(config.callbacks)),
        )

    # Shared by the build steps

    def read_shape(self) -> Any:
        """Return the shape of the model; called before anything is built. Override it together with `build_model`."""
        model = self.config.model
        return read_config(model.name, flavor=model.flavor, folder=model.folder)

    def find_degrees(self) -> Degrees:
        """Return how many ranks each kind of parallelism has. Raises: ConfigError for all that does not fit."""
        training = self.config.training
        return find_degrees(
            self.config.parallel,
            world_size(),
            self.read_shape(),
            batch_size=training.batch_size,
            accumulation=training.accumulation,
            sequence_length=self.config.data.sequence_length,
        )

    def build_pipeline(self) -> Pipeline | None:
        """Return the object that runs the pipeline stages, or None without pipeline parallelism."""
        if self.ranks.degrees.pp == 1:
            return None
        training = self.config.training
        return Pipeline(
            self.model_parts,
            self.ranks,
            self.config.parallel,
            summed_cross_entropy,
            batch_size=training.batch_size,
            accumulation=training.accumulation,
            sequence_length=self.config.data.sequence_length,
            dtype=self._compute_dtype if is_sharded(self.ranks) else torch.float32,
        )

    def trainable(self) -> list[nn.Parameter]:
        """Return the parameters that are trained, each once."""
        parts = getattr(self, "model_parts", [self.model])
        return [p for part in parts for p in part.parameters() if p.requires_grad]

    def tokens_of(self, corpus: str, setting: str = "data.corpus") -> torch.Tensor:
        """Return the token ids of a corpus, one document after the other; `setting` is the key that errors name.

        Raises: ConfigError without a tokenizer, and for a file without text.
        """
        if self.tokenizer is None or self.encode is None:
            raise ConfigError([f"{setting}: {corpus} needs a tokenizer; override build_dataset, and held_out()"])
        documents = open_corpus(corpus, setting)
        key: dict[str, object] = {"corpus": documents.digest, "tokenizer": self.tokenizer.digest}
        return tokenise(documents.documents, self.encode, key, Path(self.config.data.cache_folder))

    def held_out(self) -> PackedDataset:
        """Return all of the text that [evaluation] measures. Raises: ConfigError if it is shorter than one sequence."""
        data, config = self.config.data, self.config.evaluation
        assert config is not None, "asked for with [evaluation] alone"
        setting = "evaluation.corpus" if config.corpus else "data.held_out"
        tokens = self.tokens_of(config.corpus or data.corpus, setting)
        kept_back = len(tokens) if config.corpus else int(len(tokens) * data.held_out)
        if kept_back <= data.sequence_length:
            raise ConfigError(
                [f"{setting}: its {kept_back} tokens are no sequence of {data.sequence_length} to evaluate"]
            )
        return PackedDataset(tokens[len(tokens) - kept_back :], data.sequence_length, self.config.seed)

    def is_log_due(self, step: int) -> bool:
        """Return whether the end of a step is reported even if no callback measured anything in it."""
        training = self.config.training
        return step % training.log_interval == 0 or step in (1, training.steps)

    @property
    def epoch(self) -> int:
        """Return the epoch of the next sequence, a pass over the data. Override it for your own dataset."""
        return self.dataset.epoch if isinstance(self.dataset, PackedDataset) else 0

    @property
    def _compute_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.config.training.compute_dtype == "bfloat16" else torch.float32

    def build_manager(self) -> CheckpointManager:
        """Return the checkpoint manager of everything that was built."""
        tokenizer = self.tokenizer
        special = tokenizer.special_ids if tokenizer is not None else {}
        manager = CheckpointManager(
            checkpoint_settings(self.config),
            model_parts=self.model_parts,
            optimizers=[self.optimizer],
            lr_schedulers=[self.lr_scheduler] if self.lr_scheduler is not None else [],
            dataloader=self.dataloader,
            states={"train": self.state},
            sd_transforms=StateDictTransforms(
                self.model.key_map(),
                self.model.hf_config() | special,
                tokenizer.folder if tokenizer is not None else None,
                self.model.torchtitan_key_map(),
            ),
            model_converters=self.converters,
            external_weights=self.external_weights,
            base_folder=self.config.output_folder,
        )
        converters = self.converters.describe() if self.converters is not None else []
        manager.telemetry.settings = {**asdict(self.config), "converters": converters}
        return manager
