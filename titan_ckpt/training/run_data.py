"""The data of a run: from [data] to the sequences that a rank takes, and those that [evaluation] measures.

Owns which kind of data the settings ask for. How each is read, cut and ordered is in data/.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from titan_ckpt.errors import ConfigError, counted
from titan_ckpt.models.language_model import LanguageModel, Model
from titan_ckpt.training.config import RunConfig
from titan_ckpt.training.data.batch import Batch
from titan_ckpt.training.data.chat import ChatTemplate
from titan_ckpt.training.data.corpus import Corpus, open_corpus
from titan_ckpt.training.data.files import DUMMY
from titan_ckpt.training.data.sequences import ConversationDataset, DummyDataset, IndexedDataset, PackedDataset
from titan_ckpt.training.data.stream import Encoder, StreamDataset
from titan_ckpt.training.data.tokenizer import VOCAB_SIZE, TextTokenizer, read_tokenizer, train_tokenizer
from titan_ckpt.training.data.tokens import tokenise, tokenise_conversations
from titan_ckpt.training.model_folder import refuse_new_tokenizer, tokenizer_folder
from titan_ckpt.training.own_code import make_dataset
from titan_ckpt.training.parallel.ranks import Ranks

_WINDOW = 1024
"""Number of neighbouring rows of a stream that are shuffled together."""


def find_tokenizer(config: RunConfig, vocab_size: int | None) -> TextTokenizer | None:
    """Return the tokenizer, by default that of the pretrained model; None if the data comes without any.

    `vocab_size`: the model's; None if it is no LanguageModel. Raises: ConfigError if it is too small, for pretrained
        weights without a tokenizer, and for text that is given to a model of other data.
    """
    data, folder = config.data, tokenizer_folder(config)
    if data.dataset is None and vocab_size is None:
        raise ConfigError(["data.dataset: the model is no LanguageModel and takes no text; name data of your own"])
    if folder is not None:
        tokenizer = read_tokenizer(folder)
    elif data.tokenizer is None and (data.dataset is not None or data.corpus == DUMMY):
        return None
    else:
        if data.streaming or data.messages is not None or data.corpus == DUMMY:
            why = (
                "conversations need a chat template"
                if data.messages
                else "none is trained on a stream or random tokens"
            )
            raise ConfigError([f"data.tokenizer: {why}; name the folder of a tokenizer"])
        if data.tokenizer is None:
            refuse_new_tokenizer(config)
        corpus = open_corpus(data.corpus, field=data.field)
        size = data.tokenizer if isinstance(data.tokenizer, int) else VOCAB_SIZE
        tokenizer = train_tokenizer(corpus, size, Path(data.cache_folder))
    if vocab_size is not None and (need := tokenizer.num_ids) > vocab_size:
        misfit = f"the {need} tokens of {tokenizer.folder} do not fit the model's vocabulary of {vocab_size}"
        raise ConfigError([f"data.tokenizer: {misfit}; take the tokenizer of the weights, or a smaller one"])
    return tokenizer


def make_data(
    config: RunConfig,
    ranks: Ranks,
    tokenizer: TextTokenizer | None,
    encode: Encoder | None,
    model: Model,
) -> IterableDataset[Batch]:
    """Return this rank's share of the data that the model is trained on.

    Raises: ConfigError for a length that does not fit, and for data that cannot be used, as far as it is read here.
    """
    data, seed = config.data, config.seed
    share = {"rank": ranks.data_rank, "num_ranks": ranks.data_size}
    longest = model.max_seq_len if isinstance(model, LanguageModel) else None
    if longest is not None and data.sequence_length > longest:
        raise ConfigError(
            [f"data.sequence_length: {data.sequence_length} is longer than the model's {longest}; shorten it"]
        )
    if data.dataset is not None:
        return make_dataset(config, ranks, tokenizer)
    assert isinstance(model, LanguageModel), "find_tokenizer() refuses others"
    if data.corpus == DUMMY:
        return DummyDataset(model.vocab_size, data.sequence_length, seed, **share)
    if not data.streaming:
        return _indexed(config, data.corpus, "data.corpus", tokenizer, encode, part="trained", **share)
    tokenizer, encode, corpus = _needed(config, data.corpus, "data.corpus", tokenizer, encode)
    return StreamDataset(
        corpus,
        encode,
        data.sequence_length,
        seed,
        window=_WINDOW if data.shuffle is True else int(data.shuffle),
        too_long=data.too_long,
        encoding=_encoding(tokenizer, encode),
        **share,
    )


def make_held_out(config: RunConfig, tokenizer: TextTokenizer | None, encode: Encoder | None) -> IndexedDataset:
    """Return all of the data that [evaluation] measures. Raises: ConfigError if it is shorter than one sequence."""
    assert config.evaluation is not None, "asked for with [evaluation] alone"
    if config.evaluation.corpus is not None:
        return _indexed(config, config.evaluation.corpus, "evaluation.corpus", tokenizer, encode, part="all")
    return _indexed(config, config.data.corpus, "data.held_out", tokenizer, encode, part="held out")


def _needed(
    config: RunConfig, name: str, setting: str, tokenizer: TextTokenizer | None, encode: Encoder | None
) -> tuple[TextTokenizer, Encoder, Corpus]:
    """Return what reading a corpus takes. Raises: ConfigError without a tokenizer."""
    if tokenizer is None or encode is None:
        raise ConfigError([f"{setting}: {name} needs a tokenizer; override build_dataset, and held_out()"])
    data = config.data
    corpus = open_corpus(name, setting, field=data.messages or data.field, messages=data.messages is not None)
    return tokenizer, encode, corpus


def _encoding(tokenizer: TextTokenizer, encode: Encoder) -> str:
    """Return a digest of what makes ids of text: ids in the cache, and positions in a stream, are of one encoding.

    Raises: ConfigError for a data transform of one's own without a digest.
    """
    if encode == tokenizer.encode_document:
        return tokenizer.digest
    digest = getattr(encode, "digest", None)
    if not isinstance(digest, str):
        problem = f"it returns a {type(encode).__name__}, and its ids are kept in data.cache_folder by what made them"
        raise ConfigError([f"build_data_transform: {problem}: give it a `digest`, a text that other ids change"])
    return digest if isinstance(encode, ChatTemplate) else f"{digest} {tokenizer.digest}"


def _indexed(
    config: RunConfig,
    name: str,
    setting: str,
    tokenizer: TextTokenizer | None,
    encode: Encoder | None,
    *,
    part: str,
    **share: int,
) -> IndexedDataset:
    """Return a corpus, or what data.held_out leaves ("trained") or keeps back of it, as sequences found by number."""
    data, cache = config.data, Path(config.data.cache_folder)
    tokenizer, encode, corpus = _needed(config, name, setting, tokenizer, encode)
    order: dict[str, Any] = {**share, "shuffle": data.shuffle}
    if isinstance(encode, ChatTemplate):
        conversations = tokenise_conversations(corpus, encode, data.sequence_length + 1, data.too_long, cache)
        chosen = range(*_bounds(len(conversations), data.held_out, part))
        if not chosen:
            what = counted(len(conversations), "conversation leaves", "conversations leave")
            raise ConfigError([f"{setting}: {what} none to be {part}"])
        return ConversationDataset(conversations, chosen, config.seed, **order)
    tokens = tokenise(corpus, encode, {"tokenizer": _encoding(tokenizer, encode)}, cache)
    begin, end = _bounds(len(tokens), data.held_out, part)
    if part != "trained" and end - begin <= data.sequence_length:
        misfit = f"its {end - begin} tokens are no sequence of {data.sequence_length} to evaluate"
        raise ConfigError([f"{setting}: {misfit}"])
    return PackedDataset(tokens[begin:end], data.sequence_length, config.seed, **order)


def _bounds(size: int, held_out: float, part: str) -> tuple[int, int]:
    kept_back = int(size * held_out)
    return {"all": (0, size), "trained": (0, size - kept_back), "held out": (size - kept_back, size)}[part]
