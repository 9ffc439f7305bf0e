"""Detecting the format of a path and opening the reader for it. A format's modules are imported when they are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from titan_ckpt.directory.names import COMMITS, holds_attempt, is_set_aside_name, step_name, step_of
from titan_ckpt.directory.steps import open_steps
from titan_ckpt.encoding.paths import how_to_get, require_local
from titan_ckpt.errors import CheckpointNotFoundError, NotACheckpointError, listed
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.stores.store import Place, local_path, store_of
from titan_ckpt.types import Format


def detect_format(path: Place) -> Format:
    """Return the format of a path, detected from its content.

    Raises: ConfigError for a URI; CheckpointNotFoundError; NotACheckpointError if it has no known format, or several.
    """
    from titan_ckpt.formats.huggingface import reader as huggingface

    path = locate(path)
    if (path / "MANIFEST.json").exists() or holds_attempt(path):
        return "native"
    if (path / "rank-00000.safetensors").exists():
        raise NotACheckpointError(
            f"{path} holds files of a step without the MANIFEST.json that is written last: a save or a copy was cut "
            "short. Copy the folder again, or take another step"
        )
    found: dict[Format, str] = {}
    if (path / ".metadata").exists() or (path / "metadata.pkl").exists():
        found["dcp"] = "a DCP checkpoint"
    if huggingface.is_huggingface(path):
        found["hf"] = "a model"
    if (path / "adapter_config.json").exists() or (path / "adapter_model.safetensors").exists():
        found["peft"] = "a PEFT adapter"
    if len(found) > 1:
        raise NotACheckpointError(
            f"{path} holds {' and '.join(found.values())}: move one of them out, or say which one a run means with "
            + " or ".join(f'format = "{kind}"' for kind in found)
        )
    if found:
        return next(iter(found))
    raise NotACheckpointError(f"{path} is no checkpoint: {_what_is_there(path)}")


def open_reader(
    path: Place,
    format: Format | None = None,  # noqa: A002 - the name in the config
    *,
    ignore: Sequence[str] = (),
) -> TensorReader:
    """Open the checkpoint at a path, in the given format or the detected one.

    `ignore`: patterns of tensors that the caller leaves out.
    Raises: ConfigError for a URI; CheckpointNotFoundError; NotACheckpointError; CorruptCheckpointError.
    """
    if format == "native" and holds_attempt(path):
        from titan_ckpt.formats.native.reader import NativeReader

        return NativeReader(path)
    path = locate(path)
    kind = format or detect_format(path)
    match kind:
        case "native":
            from titan_ckpt.formats.native.reader import NativeReader

            return NativeReader(path)
        case "dcp":
            from titan_ckpt.formats.dcp.dcp import DcpReader
            from titan_ckpt.formats.dcp.torch_checkpointing import TorchCheckpointingReader

            if (path / "metadata.pkl").exists():
                if (folder := local_path(path)) is None:
                    raise NotACheckpointError(
                        f"{path} is a folder of torch_checkpointing, which is not read from a bucket: copy it to a "
                        "mounted file system"
                    )
                return TorchCheckpointingReader(folder)
            if not (path / ".metadata").exists():
                raise NotACheckpointError(f"{path}: holds no .metadata, so no checkpoint of this format")
            return DcpReader(path)
        case "hf":
            from titan_ckpt.formats.huggingface.reader import HuggingFaceReader

            return HuggingFaceReader(path, ignore=ignore)
        case "peft":
            from titan_ckpt.formats.huggingface.peft import PeftReader

            return PeftReader(path)
        case _:
            assert_never(kind)


def locate(path: Place) -> Place:
    """Return a place as it is read. In a bucket it is listed, and the name of a step leads to the place of its files.

    The id of a model that was downloaded leads to its folder in Hugging Face's cache.

    Raises: ConfigError for a URI; CheckpointNotFoundError; CorruptCheckpointError for a damaged step; StoreError.
    """
    require_local({"path": local_path(path)})
    store = store_of(path)
    found: Place = store.seen(path)
    if not found.exists() and (step := step_of(path.name)) is not None:
        found = store.seen(open_steps(path.parent).files_of(step))
    if not found.exists():
        expected = "name an existing checkpoint folder or .safetensors file"
        raise CheckpointNotFoundError(f"{path} is not there; {expected}{how_to_get(str(path))}")
    return found


def _steps_in(path: Place) -> list[str]:
    """Return the names of the steps in a folder, the newest one last. Raises: StoreError."""
    try:
        names = [entry.name for entry in path.iterdir()]
    except PermissionError:  # nobody here can read what is in it
        return []
    steps = [name for name in names if name.startswith("step-") and not is_set_aside_name(name)]
    if COMMITS in names:
        steps += [step_name(committed.step) for committed in open_steps(path).survey().steps]
    return sorted(steps, key=lambda name: (step_of(name) or 0, name))


def _what_is_there(path: Place) -> str:
    """Return a description of a path that holds no checkpoint, with the next step. Raises: StoreError."""
    if path.is_file():
        return "a single file must be a .safetensors file"
    if not path.is_dir():
        return "it is neither a folder nor a file of bytes; name a checkpoint folder or a .safetensors file"
    if steps := _steps_in(path):
        return f"it holds steps; name one of them, such as {path / steps[-1]}"
    names = sorted(entry.name for entry in path.iterdir())
    found = {name: steps for name in names if (path / name).is_dir() and (steps := _steps_in(path / name))}
    if below := [f"{name}/{step}" for name, steps in found.items() for step in steps]:
        newest = path / next(f"{name}/{steps[-1]}" for name, steps in found.items())
        return f"it holds {listed(below, ', ')}; name one of them, as in titan-ckpt inspect {newest}"
    if pickles := [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]:
        return (
            f"{pickles[0]} is a pickle, which can run code when it is loaded; convert it to safetensors first "
            "(transformers: from_pretrained, then save_pretrained)"
        )
    first = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "") if names else "nothing"
    return (
        f"it holds {first}; expected MANIFEST.json (native), .metadata or metadata.pkl (dcp), "
        f"model.safetensors or model.safetensors.index.json (hf), or adapter_config.json (peft){how_to_get(str(path))}"
    )
