"""Formats: what lies at a path, and the reader for it. Each format is a module here; they are imported when used."""

from __future__ import annotations

from pathlib import Path
from typing import assert_never

from titan_ckpt.errors import CheckpointNotFoundError, NotACheckpointError
from titan_ckpt.storage.base import TensorReader
from titan_ckpt.types import Format


def detect_format(path: Path) -> Format:
    """Say which format lies at a path, from its content.

    Raises: CheckpointNotFoundError; NotACheckpointError if it is of no known format, or of several.
    """
    from titan_ckpt.storage import huggingface

    path = Path(path)
    if not path.exists():
        raise CheckpointNotFoundError(f"{path} is not there; name an existing checkpoint folder or .safetensors file")
    if (path / "MANIFEST.json").exists():
        return "native"
    if (path / ".metadata").exists():
        return "dcp"
    adapter = (path / "adapter_config.json").exists() or (path / "adapter_model.safetensors").exists()
    weights = huggingface.is_huggingface(path)
    if adapter and weights:
        raise NotACheckpointError(
            f'{path} holds a model and a PEFT adapter: say which one is meant with format = "hf" or format = "peft"'
        )
    if adapter:
        return "peft"
    if weights:
        return "hf"
    raise NotACheckpointError(f"{path} is no checkpoint: {_what_is_there(path)}")


def open_reader(path: Path, format: Format | None = None) -> TensorReader:  # noqa: A002 - the name in the config
    """Open what lies at a path, in the given format or the one its content has.

    Raises: CheckpointNotFoundError; NotACheckpointError; CorruptCheckpointError.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointNotFoundError(f"{path} is not there; name an existing checkpoint folder or .safetensors file")
    found = format or detect_format(path)
    match found:
        case "native":
            from titan_ckpt.storage.native import NativeReader

            return NativeReader(path)
        case "dcp":
            from titan_ckpt.storage.dcp import DcpReader

            if not (path / ".metadata").exists():
                raise NotACheckpointError(f"{path}: holds no .metadata, so no checkpoint of this format")
            return DcpReader(path)
        case "hf":
            from titan_ckpt.storage.huggingface import HuggingFaceReader

            return HuggingFaceReader(path)
        case "peft":
            from titan_ckpt.storage.peft import PeftReader

            return PeftReader(path)
        case _:
            assert_never(found)


def _what_is_there(path: Path) -> str:
    """Say what a path holds instead, with the next step."""
    if path.is_file():
        return "a single file must be a .safetensors file"
    names = sorted(entry.name for entry in path.iterdir())
    if steps := [name for name in names if name.startswith("step-")]:
        return f"it holds steps; name one of them, such as {path / steps[-1]}"
    if pickles := [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]:
        return (
            f"{pickles[0]} is a pickle, which can run code when it is loaded; convert it to safetensors first "
            "(transformers: from_pretrained, then save_pretrained)"
        )
    listed = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "") if names else "nothing"
    return (
        f"it holds {listed}; expected MANIFEST.json (native), .metadata (dcp), model.safetensors or "
        "model.safetensors.index.json (hf), or adapter_config.json (peft)"
    )
