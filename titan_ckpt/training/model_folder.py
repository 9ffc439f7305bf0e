"""The weights and the tokenizer that a run takes from its model's folder, unless its config chooses others.

Owns these two defaults, and the warnings about other choices. Reads no weights and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from titan_ckpt.config import CheckpointConfig, InitialLoadConfig
from titan_ckpt.errors import CheckpointNotFoundError, ConfigError
from titan_ckpt.formats.huggingface.reader import is_huggingface
from titan_ckpt.formats.open import locate
from titan_ckpt.stores.bucket import BucketPath, open_location
from titan_ckpt.stores.settings import split_url
from titan_ckpt.training.config import RunConfig

TOKENIZER = "tokenizer.json"
_OTHER_WEIGHTS = ("pytorch_model*.bin", "consolidated*.pth", "*.gguf", "tf_model.h5", "flax_model.msgpack")
"""Patterns of weights in a Hugging Face folder that are not read here."""


def checkpoint_settings(config: RunConfig) -> CheckpointConfig:
    """Return [checkpoint]; if it names no sources and the model's folder holds weights, the folder is the source.

    The source is cast, because trained parameters are float32 and most folders are not.
    Raises: ConfigError for a folder whose weights are all in files that are not read here.
    """
    folder, checkpoint = config.model.folder, config.checkpoint
    if folder is None or not config.model.load_weights or checkpoint.initial_load or checkpoint.external:
        return checkpoint
    if is_huggingface(Path(folder)):
        return replace(checkpoint, initial_load=(InitialLoadConfig(folder, format="hf", cast=True),))
    if unread := sorted(path.name for pattern in _OTHER_WEIGHTS for path in Path(folder).glob(pattern)):
        problem = f"{folder} holds weights that are not read here, such as {unread[0]}; convert them to safetensors"
        raise ConfigError([f"model.folder: {problem}, or start from random values: model.load_weights = false"])
    return checkpoint


def tokenizer_folder(config: RunConfig) -> Path | None:
    """Return the folder of the run's tokenizer, or None if it is trained on the corpus.

    Without data.tokenizer.folder and data.tokenizer.vocab_size, it is the tokenizer of the pretrained model.
    Raises: ConfigError if the pretrained model has none on a mounted file system, because its weights mean nothing
    under another tokenizer; StoreError.
    """
    chosen = config.data.tokenizer
    if chosen.folder is not None:
        return Path(chosen.folder)
    if chosen.vocab_size is not None:
        return None
    if (own := _own_tokenizer(config)) is not None:
        return own
    choices = "name the folder of their tokenizer (folder), or the size of a new one (vocab_size)"
    if pretrained := [folder for folder in _folders(config) if _gives_weights(folder, config)]:
        raise ConfigError([f"data.tokenizer: {pretrained[0]} holds weights and no {TOKENIZER}; {choices}"])
    for source in config.checkpoint.initial_load:
        place = open_location(source.path, settings=config.checkpoint.store)
        if isinstance(place, BucketPath) and _holds_weights(place):
            why = "holds weights, and tokenizers are read from mounted file systems alone"
            raise ConfigError([f"data.tokenizer: {place} {why}; {choices}"])
    return None


def other_choices(config: RunConfig, tokenizer: Path | None, *, resumed: bool) -> Iterator[str]:
    """Yield a warning if the run takes another tokenizer or other weights than those of the pretrained model.

    `tokenizer`: the folder of the tokenizer that the run uses, None without one. `resumed`: the weights come from the
    run's own checkpoint.
    """
    own = _own_tokenizer(config)
    if tokenizer is not None and own is not None and not _same_file(own / TOKENIZER, tokenizer / TOKENIZER):
        yield f"data.tokenizer: this run uses and exports the tokenizer in {tokenizer}, and not that of {own}"
    folder = config.model.folder
    if resumed or config.checkpoint.external or folder is None or not is_huggingface(Path(folder)):
        return
    sources = [Path(source.path).resolve() for source in checkpoint_settings(config).initial_load]
    if Path(folder).resolve() not in sources:
        start = "the sources of [[checkpoint.initial_load]]" if sources else "random values"
        yield f"model.folder: the weights in {folder} are not loaded; this run starts from {start}"


def _own_tokenizer(config: RunConfig) -> Path | None:
    """Return the first folder of the pretrained model that has a tokenizer."""
    return next((folder for folder in _folders(config) if (folder / TOKENIZER).is_file()), None)


def _folders(config: RunConfig) -> list[Path]:
    """Return the Hugging Face folders that describe the pretrained model; the model's own comes first."""
    sources = [Path(source.path) for source in config.checkpoint.initial_load if split_url(source.path) is None]
    own = [] if config.model.folder is None else [Path(config.model.folder)]
    return own + [path for path in sources if path.is_dir() and is_huggingface(path)]


def _gives_weights(folder: Path, config: RunConfig) -> bool:
    sources = checkpoint_settings(config).initial_load
    return is_huggingface(folder) and any(Path(source.path) == folder for source in sources)


def _holds_weights(place: BucketPath) -> bool:
    """Return whether there is a Hugging Face folder, or a step of this package. Raises: StoreError."""
    with suppress(CheckpointNotFoundError):  # the load says so
        return is_huggingface(locate(place))
    return False


def _same_file(first: Path, second: Path) -> bool:
    return second.is_file() and first.read_bytes() == second.read_bytes()
