"""No tensor escapes the proof: of every kind of model and of every form of export each one is compared."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import world
from tests.interop.test_models_hf import CONFIGS
from titan_ckpt import ExportConfig
from titan_ckpt.errors import ExportError
from titan_ckpt.formats.huggingface import export as huggingface_export
from titan_ckpt.formats.huggingface.reader import HuggingFaceReader
from titan_ckpt.formats.safetensors.container import read_header
from titan_ckpt.models import hf, llama3, qwen3, qwen3_moe

INT4 = {"kind": "qat", "scheme": "int4_weight_only", "group_size": 16}


MODELS: dict[str, Callable[[], Any]] = {
    "llama3": lambda: llama3.Llama3(llama3.FLAVORS["debug-0.5m"]),
    "qwen3": lambda: qwen3.Qwen3(qwen3.FLAVORS["debug-0.5m"]),
    "qwen3_moe": lambda: qwen3_moe.Qwen3Moe(qwen3_moe.FLAVORS["debug-1m"]),
    **{f"hf {name}": partial(hf.build, CONFIGS[name]) for name in ("llama_tied", "gpt2", "mixtral", "gpt_oss")},
}
EXPORTS: dict[str, tuple[ExportConfig, list[dict[str, Any]]]] = {
    "plain": (ExportConfig("hf"), []),
    "bfloat16": (ExportConfig("hf", dtype="bfloat16"), []),
    "int4": (ExportConfig("hf_quantized"), [INT4]),
    "float8": (ExportConfig("hf_quantized", dtype="bfloat16"), [{"kind": "float8", "emulate": True}]),
}
CASES = [
    *((model, "plain") for model in MODELS),
    ("hf mixtral", "bfloat16"),
    ("llama3", "bfloat16"),
    ("hf llama_tied", "int4"),
    ("llama3", "int4"),
    ("llama3", "float8"),
]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_a_flipped_bit_in_any_tensor_is_found(
    name: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last byte of every stored tensor is damaged before the files are read again: the error names every one."""
    export, tables = EXPORTS[form]
    model = MODELS[name]()
    model.init_weights()
    converters = world.convert(model, *tables)
    damaged: list[str] = []

    def open_damaged(path: Path, **how: Any) -> HuggingFaceReader:
        for file in path.glob("*.safetensors") if not damaged else ():
            data = bytearray(file.read_bytes())
            for key, entry in read_header(file).entries.items():
                data[entry.at + entry.info.nbytes - 1] ^= 1
                damaged.append(key)
            file.write_bytes(data)
        return HuggingFaceReader(path, **how)

    monkeypatch.setattr(huggingface_export, "HuggingFaceReader", open_damaged)
    manager = world.manager(tmp_path, model, export=(export,), model_converters=converters)
    with manager, pytest.raises(ExportError, match="read back differ from what was written, of ") as caught:
        manager.save(1, last_step=True)
    found = re.split("written, of ", str(caught.value))[1].split(", ")
    assert len(damaged) > 10
    assert sorted(found) == sorted(damaged)
    assert list((tmp_path / "exports").iterdir()) == []
