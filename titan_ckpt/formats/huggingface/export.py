"""Writing Hugging Face folders: the files' names, the index, config.json, and the files copied from the base.

Owns the folder's content besides tensors. formats/publish writes and proves the tensors.
Source: transformers, `modeling_utils.py` save_pretrained; huggingface_hub, `serialization/_base.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import ExportError, KeyMapError, listed
from titan_ckpt.formats.huggingface.reader import CONFIG, INDEX, TIED, HuggingFaceReader, read_config, to_json
from titan_ckpt.formats.publish.plan import Infos, pack_as, pack_model_files
from titan_ckpt.formats.publish.run import Companions, FolderExport, FolderFormat
from titan_ckpt.geometry.chunks import TensorInfo, dtype_name
from titan_ckpt.geometry.keymap import KeyMap, selected
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.stores.store import Place
from titan_ckpt.weights.quantize import WeightQuantizer
from titan_ckpt.weights.transforms import CASTABLE, FileGroup

GENERATION_CONFIG = "generation_config.json"
_COPIED = (
    GENERATION_CONFIG,
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "*vocab*.json",
    "vocab.txt",
    "merges.txt",
    "dict.txt",
    "bpe.codes",
    "byte_maps.json",
    "emoji.json",
    "normalizer.json",
    "word_pronunciation.json",
    "word_shape.json",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "*.tokenizer",
    "tekken.json",
    "chat_template*",
    "additional_chat_templates/*",
    "audio_tokenizer_config.json",
    "*preprocessor_config.json",
    "processor_config.json",
    "*.py",
    "LICENSE*",
)
"""Files of the base's folder that are copied. The README is not: it describes other weights."""
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_FROM_BASE = ("auto_map", *_TOKENS)
"""Fields of config.json that are taken from the base's if the model has none: they belong to the copied files."""
_OF_SHAPE = ("tie_word_embeddings", "vocab_size", "hidden_size", "num_hidden_layers")
"""Fields of config.json that decide which keys and shapes transformers expects; absent ones have their defaults."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_OUTPUT = "lm_head.weight"
"""Name of the output matrix of nearly all models; a dozen have names of their own."""
_IN_LAYER = re.compile(r"\.\d+\.")


@dataclass(frozen=True, slots=True)
class Base:
    """The folder that the weights came from, with which an export of them has to agree."""

    path: Place
    key_map: KeyMap
    """The model's table, with the names of this folder."""
    tensors: Mapping[str, TensorInfo]
    """The tensors that a load sees: dequantized, without those that the model does not use and without copies."""
    file_of: Mapping[str, str]
    config: Mapping[str, Any]
    """Its config.json."""
    initialize: Sequence[str] = ()
    """Patterns of the model's tensors that did not come from it (InitialLoadConfig.initialize)."""

    @staticmethod
    def read(path: Place, key_map: KeyMap, initialize: Sequence[str] = (), ignore: Sequence[str] = ()) -> Base:
        """Read the folder's headers. `key_map`: the model's table. Raises: as HuggingFaceReader.

        `initialize`, `ignore`: the patterns of tensors that a load of the folder leaves out.
        """
        with HuggingFaceReader(path, ignore=ignore) as reader:
            used = reader.tensors.keys() - selected(reader.tensors, ignore)
            table = key_map.of_folder(used)
            tensors = {k: reader.tensors[k] for k in used if not table.ignores(k)}
            base = Base(path, table, tensors, reader.file_of, reader.metadata(), initialize)
            return base.without(key for key, _ in table.repeats)

    def without(self, keys: Iterable[str]) -> Base:
        """Return the base without some tensors, such as copies of tied ones."""
        left = {*keys}
        return replace(self, tensors={key: info for key, info in self.tensors.items() if key not in left})

    def lacks(self, key: str) -> bool:
        """Return whether a file tensor did not come from this folder, whatever the folder has under its key."""
        try:
            return bool(self.initialize and selected(self.key_map.group_of_key(key).fqns, self.initialize))
        except KeyMapError:  # a key that the model does not know
            return False

    def describes(self, config: Mapping[str, Any]) -> bool:
        """Return whether its config.json agrees with a model's on all that decides about keys and shapes."""
        return all(self.config.get(name, config.get(name)) == config.get(name) for name in _OF_SHAPE)


@dataclass(frozen=True, slots=True)
class HuggingFaceFormat(FolderFormat):
    """The format of a folder that transformers opens."""

    last = CONFIG
    config: Mapping[str, Any]
    """The model's config.json; if empty, the one in `assets`."""
    assets: Place | None
    """A Hugging Face folder whose tokenizer, chat template, generation config and custom code are copied."""
    max_shard_bytes: int
    """Limit of one file's tensors."""
    quantizer: WeightQuantizer | None = None
    """The scheme by which weights are stored (weights/quantize.py)."""
    base: Base | None = None
    """A folder that must have the same keys and shapes."""
    as_base: bool = False
    """Every tensor goes into the file of the same name as in the base."""
    verified: bool = False
    """Names and config.json come from the same library (KeyMap.verified)."""
    generation_config: Mapping[str, Any] | None = None
    """The model's generation_config.json, if `assets` has none; absent: one made from config.json."""

    def pack(self, infos: Infos) -> Mapping[str, Sequence[str]]:
        if self.base is not None and self.as_base:
            return pack_as(self.base.file_of, infos)
        return pack_model_files(infos, self.max_shard_bytes)

    def header(self, infos: Infos, quantized: Mapping[str, str]) -> Mapping[str, str]:
        return {} if self.quantizer is None else self.quantizer.header(infos, quantized)

    def open(self, folder: Place, *, dequantize: bool) -> HuggingFaceReader:
        return HuggingFaceReader(folder, dequantize=dequantize)

    def check(self, reader: TensorReader) -> None:
        if self.base is not None and self.quantizer is not None:  # before that the stored tensors are others
            _compare(reader.tensors, self.base)

    def companions(self, infos: Infos, file_of: Mapping[str, str], quantized: Mapping[str, str]) -> Companions:
        if self.base is not None and self.quantizer is None:
            _compare(infos, self.base)
        beside: dict[str, bytes | Place] = dict(_assets(self.assets))
        made = _config(self.config, read_config(self.assets / CONFIG) if self.assets is not None else {})
        made["dtype"] = _dtype(infos, self.base)
        if self.quantizer is not None:
            made["quantization_config"] = self.quantizer.config(infos, quantized)
        if not (self.verified or (self.base is not None and self.base.describes(made))):
            _check_tied(made, infos, quantized)
            _check_shape(made, infos, quantized)
        beside[CONFIG] = _as_json(made)
        if GENERATION_CONFIG not in beside:
            tokens = {name: made[name] for name in _TOKENS if made.get(name) is not None}
            derived = {"_from_model_config": True, **tokens}  # as transformers derives it
            beside[GENERATION_CONFIG] = to_json(derived if self.generation_config is None else self.generation_config)
        if len({*file_of.values()}) > 1:
            beside[INDEX] = to_json(_index(infos, file_of, quantized))
        return beside


def export_huggingface(folder: Place, groups: Sequence[FileGroup], *, coordinator: Coordinator, **options: Any) -> None:
    """Write a Hugging Face folder; `options` are the fields of HuggingFaceFormat. Collective. Raises: ExportError."""
    FolderExport(groups, HuggingFaceFormat(**options)).write(folder, coordinator)


def _compare(infos: Mapping[str, TensorInfo], base: Base) -> None:
    """Raise ExportError unless the export has the base's keys, each with the base's shape."""
    infos = {key: info for key, info in infos.items() if not base.lacks(key)}
    faults = [f"{key} is not in the base" for key in infos if key not in base.tensors]
    faults += [f"{key} is only in the base" for key in base.tensors if key not in infos and not base.lacks(key)]
    shapes = [(key, info, base.tensors[key]) for key, info in infos.items() if key in base.tensors]
    faults += [f"{key}: base {of_base}, export {info}" for key, info, of_base in shapes if info.shape != of_base.shape]
    if faults:
        raise ExportError(
            f"{len(faults)} tensor(s) are not those of {base.path}, from which the weights came: "
            f"{listed(faults)}. Is the model's table of names the right one?"
        )


def _assets(folder: Place | None) -> Iterator[tuple[str, Place]]:
    """Yield (relative name, file) of each file to copy. Raises: ExportError if the folder is not there."""
    if folder is None:
        return
    if not folder.is_dir():
        raise ExportError(f"assets folder {folder} is not there; name a Hugging Face folder to copy the tokenizer from")
    for pattern in _COPIED:
        found: Iterable[Place] = folder.glob(pattern)
        for path in sorted(found, key=str):
            if path.is_file():
                yield str(path).removeprefix(f"{folder}/"), path


def _config(config: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of these weights as if they were not quantized, without their dtype."""
    made = dict(config) if config else dict(base)
    if not made.get("model_type"):
        raise ExportError("no config.json can be written: give the model's Hugging Face config, or an assets folder")
    if not made.get("architectures"):
        if not base.get("architectures"):
            raise ExportError('config has no "architectures", so nothing says which class opens it: add it')
        made["architectures"] = base["architectures"]
    for name in _FROM_BASE:
        if made.get(name) is None and base.get(name) is not None:
            made[name] = base[name]
    for name in ("quantization_config", "compression_config", "torch_dtype"):
        made.pop(name, None)
    return made


def _as_json(config: Mapping[str, Any]) -> bytes:
    """Return config.json. Raises: ExportError for values that JSON cannot hold, such as a dtype of torch."""
    try:
        return to_json(config)
    except (TypeError, ValueError) as error:
        raise ExportError(
            f"config holds what {CONFIG} cannot: {error}. Give the model's Hugging Face config as plain "
            "values, as its to_dict() does"
        ) from error


def _dtype(infos: Mapping[str, TensorInfo], base: Base | None) -> str:
    """Return the base's dtype if all tensors have the base's dtypes; else the floating dtype of most bytes."""
    named = None if base is None else base.config.get("dtype") or base.config.get("torch_dtype")
    if named and base is not None and all(info == base.tensors.get(key) for key, info in infos.items()):
        return str(named)
    num_bytes: dict[torch.dtype, int] = {}
    for info in infos.values():
        if info.dtype in CASTABLE:
            num_bytes[info.dtype] = num_bytes.get(info.dtype, 0) + info.nbytes
    return dtype_name(max(num_bytes, key=num_bytes.__getitem__, default=torch.float32))


def _check_tied(config: Mapping[str, Any], infos: Infos, quantized: Mapping[str, str]) -> None:
    """Raise if config and weights disagree on the output matrix: transformers would untie it, or initialize one."""
    tied = config.get("tie_word_embeddings")
    causal = any(str(name).endswith("ForCausalLM") for name in config["architectures"])
    has_output = _OUTPUT in infos or _OUTPUT in quantized
    wrong = f"config says tie_word_embeddings = {str(tied).lower()} and the export has"
    if tied and has_output:
        raise ExportError(f"{wrong} a {_OUTPUT}: one of them is wrong")
    if tied is False and causal and not has_output and len(_tables(config, infos, quantized)) < 2:
        raise ExportError(
            f"{wrong} no {_OUTPUT}, nor two matrices outside its layers with vocab_size = {_vocabulary(config)} rows, "
            "as embeddings and an output with a name of its own would be: one of them is wrong"
        )


def _tables(config: Mapping[str, Any], infos: Infos, quantized: Mapping[str, str]) -> list[str]:
    """Return the matrices outside numbered layers that have a row for each token, or are quantized.

    An output matrix is one of them, whatever its name is.
    """
    rows = _vocabulary(config)
    plain = [key for key, info in infos.items() if len(info.shape) == 2 and info.shape[0] == rows]
    return [key for key in (*plain, *quantized) if not _IN_LAYER.search(key)]


def _vocabulary(config: Mapping[str, Any]) -> Any:
    """Return the number of tokens: of models that read images, too, it is in a table of its own."""
    return config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))


def _check_shape(config: Mapping[str, Any], infos: Infos, quantized: Mapping[str, str]) -> None:
    """Raise if config.json describes a model of a different size: transformers would initialize or drop weights."""
    faults = []
    wanted = tuple(config.get(name) for name in ("vocab_size", "hidden_size"))
    embeddings = infos.get(TIED[1])
    if embeddings is not None and None not in wanted and embeddings.shape != wanted:
        faults.append(f"vocab_size = {wanted[0]} and hidden_size = {wanted[1]}, and {TIED[1]} is {embeddings}")
    layers = {match[1] for key in (*infos, *quantized) if (match := _LAYER.match(key))}
    if layers and config.get("num_hidden_layers") not in (None, len(layers)):
        faults.append(f"num_hidden_layers = {config['num_hidden_layers']}, and there are {len(layers)}")
    if faults:
        raise ExportError(f"config says {'; '.join(faults)}: is it another model's?")


def _index(infos: Infos, file_of: Mapping[str, str], quantized: Mapping[str, str]) -> dict[str, Any]:
    metadata = {"total_size": sum(info.nbytes for info in infos.values())}
    if not quantized:  # scales and zero points are no parameters
        metadata["total_parameters"] = sum(torch.Size(info.shape).numel() for info in infos.values())
    return {"metadata": metadata, "weight_map": {key: file_of[key] for key in sorted(infos)}}
