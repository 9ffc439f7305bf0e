"""The weights and the tokenizer that a run takes from its model's folder, unless its config chooses others.

Owns these two defaults, and the warnings about other choices. Reads no weights and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from titan_ckpt.config import CheckpointConfig, InitialLoadConfig
from titan_ckpt.encoding.paths import how_to_get, hub_folder, snapshot_of
from titan_ckpt.errors import CheckpointNotFoundError, ConfigError, NotACheckpointError
from titan_ckpt.formats.huggingface.reader import is_huggingface
from titan_ckpt.formats.open import detect_format, locate
from titan_ckpt.stores.store import open_source, split_url, store_of
from titan_ckpt.training.config import RunConfig

TOKENIZER = "tokenizer.json"
_OTHER_WEIGHTS = ("pytorch_model*.bin", "consolidated*.pth", "*.gguf", "tf_model.h5", "flax_model.msgpack")
"""Patterns of weights in a Hugging Face folder that are not read here."""


def checkpoint_settings(config: RunConfig) -> CheckpointConfig:
    """Return [checkpoint]; if it names no sources and the model's folder holds weights, the folder is the source.

    The source is cast, because trained parameters are float32 and most folders are not.
    Raises: ConfigError for a folder whose weights are all in files that are not read here.
    """
    name, checkpoint = config.model.folder, config.checkpoint
    if name is None or not config.model.load_weights or checkpoint.initial_load or checkpoint.external:
        return checkpoint
    folder, random = hub_folder(name), "or start from random values: model.load_weights = false"
    if is_huggingface(folder):
        return replace(checkpoint, initial_load=(InitialLoadConfig(name, format="hf", cast=True),))
    if unread := sorted(path.name for pattern in _OTHER_WEIGHTS for path in folder.glob(pattern)):
        problem = f"{folder} holds weights that are not read here, such as {unread[0]}; convert them to safetensors"
        raise ConfigError([f"model.folder: {problem}, {random}"])
    if snapshot_of(folder):
        raise ConfigError([f"model.folder: {folder} holds no weights, {random}{how_to_get(folder)}"])
    return checkpoint


def tokenizer_folder(config: RunConfig) -> Path | None:
    """Return the folder of the run's tokenizer; None if it names none and its weights bring none.

    Without data.tokenizer, it is the tokenizer of the pretrained model.
    """
    chosen = config.data.tokenizer
    if isinstance(chosen, str):
        return hub_folder(chosen)
    return _own_tokenizer(config) if chosen is None else None


def refuse_new_tokenizer(config: RunConfig) -> None:
    """Raises: ConfigError if the run starts from weights, which mean nothing under a new tokenizer; StoreError."""
    for source in checkpoint_settings(config).initial_load:
        place = open_source(source.path, config.checkpoint.store, source.revision)
        try:
            (locate if source.format else detect_format)(place)
        except (CheckpointNotFoundError, NotACheckpointError):
            continue  # the load says why
        why = f"holds weights and no {TOKENIZER}"
        if not store_of(place).is_mounted:
            why = "holds weights, and tokenizers are read from mounted file systems alone"
        choices = "name the folder of their tokenizer, or the number of tokens of one that is trained on the corpus"
        raise ConfigError([f"data.tokenizer: {place} {why}; {choices}"])


def other_choices(config: RunConfig, tokenizer: Path | None, *, resumed: bool) -> Iterator[str]:
    """Yield a warning if the run takes another tokenizer or other weights than those of the pretrained model.

    `tokenizer`: the folder of the tokenizer that the run uses, None without one. `resumed`: the weights come from the
    run's own checkpoint.
    """
    own = _own_tokenizer(config)
    if tokenizer is not None and own is not None:
        there = tokenizer / TOKENIZER
        if not there.is_file() or there.read_bytes() != (own / TOKENIZER).read_bytes():
            yield f"data.tokenizer: this run uses and exports the tokenizer in {tokenizer}, and not that of {own}"
    folder = config.model.folder
    if resumed or config.checkpoint.external or folder is None:
        return
    sources = [hub_folder(s.path, s.revision).resolve() for s in checkpoint_settings(config).initial_load]
    start = "the sources of [[checkpoint.initial_load]]" if sources else "random values"
    if not is_huggingface(hub_folder(folder)):
        if not sources and config.model.load_weights:
            yield f"model.folder: {folder} holds no weights; this run starts from {start}"
    elif hub_folder(folder).resolve() not in sources:
        yield f"model.folder: the weights in {folder} are not loaded; this run starts from {start}"


def _own_tokenizer(config: RunConfig) -> Path | None:
    """Return the first folder with a tokenizer, of the model's own and of those that weights are loaded from."""
    own = [] if config.model.folder is None else [hub_folder(config.model.folder)]
    sources = [hub_folder(s.path, s.revision) for s in config.checkpoint.initial_load if split_url(s.path) is None]
    return next((folder for folder in [*own, *sources] if (folder / TOKENIZER).is_file()), None)
