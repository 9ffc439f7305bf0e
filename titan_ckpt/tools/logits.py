"""What a checkpoint's model computes from random tokens, to compare a converted checkpoint with its source.

Owns how a checkpoint becomes a model that runs: a Hugging Face folder by transformers itself, so that no table of ours
is on both sides of a comparison; any other one by the model of its names. Whole models are in memory, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from titan_ckpt.config import CheckpointConfig, InitialLoadConfig
from titan_ckpt.errors import ConfigError
from titan_ckpt.formats.open import open_reader
from titan_ckpt.loading.adapters import holds_adapter_alone
from titan_ckpt.manager import CheckpointManager
from titan_ckpt.models import hf
from titan_ckpt.models.config import read_config_json
from titan_ckpt.models.registry import build_model
from titan_ckpt.stores.store import local_path
from titan_ckpt.tools.models import find_table, require_config
from titan_ckpt.tools.weights import model_keys
from titan_ckpt.weights.initialize import construct, flag_loaded, initialize_missing, materialize
from titan_ckpt.weights.transforms import CASTABLE, StateDictTransforms
from titan_ckpt.weights.wrapper import ModelWrapper

_NUM_TOKENS = 64
_ALLOWED = torch.finfo(torch.float32).eps ** 0.5
"""Share of the largest logit by which two programs for one model may differ in float32."""


@dataclass(frozen=True, slots=True)
class ComparedLogits:
    """The logits of both sides for the same random tokens."""

    num_tokens: int
    largest_difference: float
    largest_logit: float
    allowed: float

    @property
    def same(self) -> bool:
        """Return whether they differ by rounding alone; values that are not finite never do."""
        return self.largest_difference <= self.allowed


class LogitsCheck:
    """The logits of a source. Made before the conversion, it refuses what computes none before anything is written."""

    def __init__(
        self, source: Path, config: Path | None, architecture: str | None, dtype: torch.dtype | None, *, to: str
    ) -> None:
        """Compute them, from weights that are rounded to `dtype` as the target's are. `to`: the target's format.

        Raises: ConfigError for what computes no logits; NotACheckpointError without a config.json; as a load does.
        """
        with open_reader(source) as reader:
            if to == "peft" or holds_adapter_alone(reader):
                problem = (
                    "an adapter computes nothing by itself; merge it into its base and check that, or leave it out"
                )
                raise ConfigError([f"--check-logits: {source}: {problem}"])
            folder = local_path(require_config(reader, config))
            assert folder is not None, "a source on a disk has its config.json there"
            self._folder = folder
            names = None if reader.format == "hf" else list(model_keys(reader))
            form = reader.format
        found = read_config_json(self._folder)
        if "quantization_config" in found:
            problem = "its weights are quantized, and the target's are not; leave it out"
            raise ConfigError([f"--check-logits: {source}: {problem}"])
        self._architecture = find_table(self._folder, names, architecture).architecture
        if self._architecture == "hf" and hf.names_another_class(found):
            problem = f"{', '.join(found['architectures'])} computes no logits of tokens; leave it out"
            raise ConfigError([f"--check-logits: {source}: {problem}"])
        model = self._opened(source, form)
        if dtype is not None:
            _round(model, dtype)
        text = hf.transformers_config(self._folder).get_text_config()
        length = min(_NUM_TOKENS, getattr(text, "max_position_embeddings", None) or _NUM_TOKENS)
        self._tokens = torch.randint(text.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
        self._logits = self._of(model)

    def compare(self, target: Path, to: str) -> ComparedLogits:
        """Compare with what the target computes. Raises: as a load does."""
        logits = self._of(self._opened(target, to))
        largest = float(self._logits.abs().max())
        fits = logits.shape == self._logits.shape
        difference = float((logits - self._logits).abs().max()) if fits else float("inf")
        return ComparedLogits(self._tokens.numel(), difference, largest, _ALLOWED * largest)

    @torch.no_grad()
    def _of(self, model: nn.Module) -> torch.Tensor:
        found = model.eval()(self._tokens)
        logits: torch.Tensor = getattr(found, "logits", found)
        return logits.float()

    def _opened(self, path: Path, form: str) -> nn.Module:
        if form == "hf":
            return hf.open_pretrained(path)
        model = construct(lambda: build_model(self._architecture, folder=self._folder))
        materialize(model, "cpu")
        if form == "torch":
            _fill(model, torch.load(path, weights_only=True, mmap=True))
            return model
        source = CheckpointConfig(initial_load=(InitialLoadConfig(str(path), cast=True),))
        with (
            TemporaryDirectory() as empty,
            CheckpointManager(
                source, model_parts=[model], sd_transforms=StateDictTransforms(model.key_map()), base_folder=empty
            ) as manager,
        ):
            manager.load()
        return model


@torch.no_grad()
def _fill(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Copy the values of a torch.save file into a model, and compute its buffers."""
    wrapper = ModelWrapper([model])
    for fqn, tensor in wrapper.state_dict().items():
        tensor.copy_(values[fqn])
    flag_loaded(wrapper, values)
    initialize_missing(wrapper)


@torch.no_grad()
def _round(model: nn.Module, dtype: torch.dtype) -> None:
    for value in model.state_dict().values():
        if value.dtype in CASTABLE:
            value.copy_(value.to(dtype))
