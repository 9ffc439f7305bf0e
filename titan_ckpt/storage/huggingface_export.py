"""Hugging Face folders, written: the files' names, the index, config.json, and what is copied from the base.

Owns what such a folder holds besides tensors. How tensors get there and are proved is staged_export's.
Source: transformers, `modeling_utils.py` save_pretrained; huggingface_hub, `serialization/_base.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from titan_ckpt.distributed import Coordinator
from titan_ckpt.errors import ExportError
from titan_ckpt.storage.export_plan import ExportPlan, pack_model_files
from titan_ckpt.storage.huggingface import CONFIG, INDEX, HuggingFaceReader, read_config
from titan_ckpt.storage.staged_export import ExportSummary, FolderFormat, export_folder
from titan_ckpt.tensors import TensorInfo
from titan_ckpt.transforms import CASTABLE, FileGroup

GENERATION_CONFIG = "generation_config.json"
_COPIED = (
    GENERATION_CONFIG,
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "tekken.json",
    "chat_template*",
    "additional_chat_templates/*",
    "preprocessor_config.json",
    "processor_config.json",
    "*.py",
    "LICENSE*",
)
"""What of the base's folder belongs to an export of it. Not its README, which describes other weights."""
_FROM_BASE = ("auto_map", "bos_token_id", "eos_token_id", "pad_token_id")
"""What config.json takes from the base's where the model itself does not say: it goes with the copied files."""
_OUTPUT = "lm_head.weight"
_OUTPUTS = (_OUTPUT, "embed_out.weight", "head.weight", "decoder.weight", "output_projection.weight")
"""What the output matrix is called: almost always the first; in GPT-NeoX, RWKV, ModernBERT and BioGPT the others."""


def export_huggingface(
    folder: Path,
    groups: Sequence[FileGroup],
    *,
    config: Mapping[str, Any],
    assets: Path | None,
    max_shard_bytes: int,
    coordinator: Coordinator,
    fsync: bool = True,
) -> ExportSummary:
    """Write a folder that transformers opens, prove it, and publish it atomically. Collective.

    `config`: the model's config.json; where empty, the one in `assets`. `assets`: a Hugging Face folder whose
    tokenizer, chat template, generation config and custom code are copied. `max_shard_bytes`: of one file's tensors.
    Memory: one tensor's shard at most, as lazy tensors resolve it, and less than 64 MiB.
    Raises: ExportError on every rank, with nothing under the folder's name.
    """

    def companions(plan: ExportPlan) -> dict[str, bytes | Path]:
        files: dict[str, bytes | Path] = dict(_assets(assets))
        base = read_config(assets / CONFIG) if assets is not None else {}
        made = _config(config, base, plan.infos)
        _check_tied(made, plan.infos)
        files[CONFIG] = _json(made)
        if GENERATION_CONFIG not in files:
            files[GENERATION_CONFIG] = _json(_generation_config(made))
        if len(plan.layouts) > 1:
            files[INDEX] = _json(_index(plan))
        return files

    def pack(infos: Mapping[str, TensorInfo]) -> dict[str, list[str]]:
        return pack_model_files(infos, max_shard_bytes)

    layout = FolderFormat(pack, companions, HuggingFaceReader, lambda reader: None)
    return export_folder(folder, groups, layout, coordinator, fsync=fsync)


def _assets(folder: Path | None) -> Iterator[tuple[str, Path]]:
    """Yield (relative name, file) of everything to be copied. Raises: ExportError if the folder is not there."""
    if folder is None:
        return
    if not folder.is_dir():
        raise ExportError(f"assets folder {folder} is not there; name a Hugging Face folder to copy the tokenizer from")
    for pattern in _COPIED:
        for path in sorted(folder.glob(pattern)):
            if path.is_file():
                yield str(path.relative_to(folder)), path


def _config(config: Mapping[str, Any], base: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Return the config.json of these weights: the model's own, with the dtype that they have, not quantised."""
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
    made["dtype"] = str(_main_dtype(infos)).removeprefix("torch.")
    return made


def _main_dtype(infos: Mapping[str, TensorInfo]) -> torch.dtype:
    """Return the floating dtype that most bytes have."""
    num_bytes: dict[torch.dtype, int] = {}
    for info in infos.values():
        if info.dtype in CASTABLE:
            num_bytes[info.dtype] = num_bytes.get(info.dtype, 0) + info.nbytes
    return max(num_bytes, key=num_bytes.__getitem__, default=torch.float32)


def _check_tied(config: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> None:
    """Raise where config and weights disagree on the output matrix: transformers would untie it, or make one up."""
    tied = config.get("tie_word_embeddings")
    causal = any(str(name).endswith("ForCausalLM") for name in config["architectures"])
    wrong = "config says tie_word_embeddings = {} and the export has {} {}: one of them is wrong"
    if tied and _OUTPUT in infos:
        raise ExportError(wrong.format("true", "a", _OUTPUT))
    if tied is False and causal and not any(key in infos for key in _OUTPUTS):
        raise ExportError(wrong.format("false", "no", _OUTPUT))


def _generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what transformers derives from a config when it saves a model that has none."""
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {"_from_model_config": True, **{name: config[name] for name in tokens if config.get(name) is not None}}


def _index(plan: ExportPlan) -> dict[str, Any]:
    parameters = sum(torch.Size(info.shape).numel() for info in plan.infos.values())
    return {
        "metadata": {"total_parameters": parameters, "total_size": plan.num_bytes},
        "weight_map": {key: plan.file_of[key] for key in sorted(plan.infos)},
    }


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
