"""Quantized folders that are unknown, incomplete or contradict themselves: one typed error that names all of it."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from titan_ckpt.errors import CheckpointError, CorruptCheckpointError, LoadMismatchError
from titan_ckpt.formats.open import open_reader
from titan_ckpt.geometry.chunks import Block, Chunk

Tensors = dict[str, torch.Tensor]
FLOAT8 = torch.float8_e4m3fn
BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 16]}
PACK4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16},
        }
    },
}


def refused(folder: Path, tensors: Tensors, settings: Any, error: type[CheckpointError]) -> str:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    with pytest.raises(error) as caught:
        open_reader(folder, "hf")
    assert str(folder) in str(caught.value)
    return str(caught.value)


def fp8() -> Tensors:
    return {"a.weight": torch.ones(40, 24).to(FLOAT8), "a.weight_scale_inv": torch.ones(3, 2)}


def pack4() -> Tensors:
    return {
        "a.weight_packed": torch.zeros(6, 4, dtype=torch.int32),
        "a.weight_scale": torch.ones(6, 2),
        "a.weight_shape": torch.tensor([6, 32]),
    }


def mxfp4() -> Tensors:
    return {
        "e.w_blocks": torch.zeros(2, 4, 3, 16, dtype=torch.uint8),
        "e.w_scales": torch.zeros(2, 4, 3, dtype=torch.uint8),
    }


def without(tensors: Tensors, key: str) -> Tensors:
    return {name: value for name, value in tensors.items() if name != key}


CODES = {
    "a.weight": (FLOAT8, "a.weight_scale_inv"),
    "b.weight": (FLOAT8, "b.weight_scale"),
    "c.weight": (torch.uint8, "c.weight.absmax"),
    "d.weight": (torch.int8, "d.SCB"),
    "e.w_blocks": (torch.uint8, "e.w_scales"),
    "f.weight_packed": (torch.int32, "f.weight_scale"),
    "g._weight_qdata": (torch.int8, "g._weight_scale"),
}


@pytest.mark.parametrize("key", list(CODES))
@pytest.mark.parametrize("config", [None, {"model_type": "llama"}])
def test_codes_that_no_config_explains_are_refused(tmp_path: Path, key: str, config: dict[str, str] | None) -> None:
    """A config.json that was lost, or is the plain model's: never unscaled; floats beside a scale are floats."""
    dtype, scale = CODES[key]
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({key: torch.ones(4, 4).to(dtype), scale: torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(LoadMismatchError, match=re.escape(f"with {scale})")):
        open_reader(tmp_path)
    save_file({key: torch.ones(4, 4), scale: torch.ones(4)}, tmp_path / "model.safetensors")
    with open_reader(tmp_path) as reader:
        assert {key, scale} == set(reader.tensors)


def test_every_fault_is_in_one_message(tmp_path: Path) -> None:
    """Ten weights without scales are ten faults, of which the first are listed."""
    tensors = {f"layers.{i}.weight": torch.ones(16, 16).to(FLOAT8) for i in range(10)} | fp8()
    message = refused(tmp_path, tensors, BLOCKS, CorruptCheckpointError)
    assert "10 tensor(s) cannot be dequantized" in message
    assert "layers.0.weight" in message
    assert "and 2 more" in message


def scheme(**changes: Any) -> dict[str, Any]:
    weights = PACK4["config_groups"]["group_0"]["weights"] | changes  # type: ignore[index]
    return PACK4 | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


def tiled_int8() -> Tensors:
    return {
        "a.weight": torch.ones(4, 4, dtype=torch.int8),
        "a.SCB": torch.ones(4),
        "a.weight_format": torch.tensor(1, dtype=torch.uint8),
    }


def nf4(**changes: Any) -> Tensors:
    """Return a weight of four bits with some of its state changed."""
    state = {"quant_type": "nf4", "blocksize": 16, "dtype": "float32", "shape": [4, 16]} | changes
    return {
        "a.weight": torch.zeros(32, 1, dtype=torch.uint8),
        "a.weight.absmax": torch.ones(4),
        "a.weight.quant_map": torch.linspace(-1, 1, 16),
        "a.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


PLAIN: Tensors = {"a.weight": torch.ones(4, 4)}
FP8, MXFP4, BITS = ({"quant_method": method} for method in ("fp8", "mxfp4", "bitsandbytes"))
NESTED: dict[str, Any] = {"quant_method": "compressed-tensors", "quantization_config": scheme(group_size=8)}
"""Old compressed-tensors folders have the settings one level deeper, as transformers unwraps them."""
UNKNOWN: list[tuple[Tensors, Any, str]] = [
    *(
        (fp8(), {"quant_method": method, "bits": 4}, f"quant_method = {str(method)!r}")
        for method in ("gptq", "awq", "nvfp4", "", None)
    ),
    (fp8(), {"quant_method": "gptq"}, "bitsandbytes, compressed-tensors, fp8, mxfp4, torchao"),
    (fp8(), "fp8-ish", "'fp8-ish'"),
    (PLAIN, {"load_in_8bit": True}, "'bitsandbytes'"),
    *((PLAIN, settings, "remove quantization_config") for settings in (FP8, MXFP4, BITS)),
    *(
        (fp8(), FP8 | {"weight_block_size": block}, "weight_block_size")
        for block in ([16], [0, 16], "16x16", [16.0, 16], [True, 16])
    ),
    (pack4(), PACK4 | {"format": "dense"}, "format 'dense'"),
    (pack4(), PACK4 | {"format": "marlin-24"}, "format 'marlin-24'"),
    (pack4(), PACK4 | {"format": None}, "format 'None'"),
    (pack4(), PACK4 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    (pack4(), NESTED | {"sparsity_config": {"format": "sparse-bitmask"}}, "sparse-bitmask"),
    (pack4(), PACK4 | {"transform_config": {"config_groups": {"R1": {}}}}, "rotated"),
    (pack4(), PACK4 | {"config_groups": {}}, "config_groups describe no weights"),
    (pack4(), PACK4 | {"config_groups": {"W4A16": ["Linear"]}}, "config_groups describe no weights"),
    (pack4() | {"a.weight_g_idx": torch.zeros(32, dtype=torch.int32)}, PACK4, "a.weight_g_idx"),
    (tiled_int8(), BITS, "a.weight is tiled"),
]
"""Methods and variants that are not known, and settings that mean nothing."""
DAMAGED: list[tuple[Tensors, Any, str]] = [
    (without(fp8(), "a.weight_scale_inv"), BLOCKS, "no scale: no a.weight_scale_inv or a.weight_scale"),
    (without(fp8(), "a.weight"), BLOCKS, "a.weight_scale_inv: there is no float8 weight"),
    *(
        (fp8() | {"a.weight_scale_inv": torch.ones(grid)}, BLOCKS, "expected [3, 2]")
        for grid in ((2, 2), (1, 1), (2, 3))
    ),
    (fp8() | {"a.weight_scale_inv": torch.ones(3, 2, dtype=torch.int32)}, BLOCKS, "expected a float or E8M0 dtype"),
    (fp8() | {"a.weight_scale": torch.ones(3, 2)}, BLOCKS, "a.weight_scale_inv and a.weight_scale"),
    (fp8() | {"b.weight": torch.ones(4, 4).to(torch.int8)}, BLOCKS, "b.weight: int8"),
    (
        fp8() | {"b.stray": torch.ones(4).to(torch.float8_e8m0fnu)},
        BLOCKS,
        "b.stray: float8_e8m0fnu[4] without a scale",
    ),
    (
        {"a.weight": torch.ones(32, 32).to(FLOAT8), "a.weight_scale_inv": torch.ones(2, 2)},  # 16 would divide both
        FP8,
        "no weight_block_size",
    ),
    (without(mxfp4(), "e.w_scales"), MXFP4, "e.w_blocks: there is no e.w_scales"),
    (without(mxfp4(), "e.w_blocks"), MXFP4, "e.w_scales: there is no e.w_blocks"),
    (mxfp4() | {"e.w_scales": torch.zeros(2, 4, 2, dtype=torch.uint8)}, MXFP4, "expected uint8[2, 4, 3]"),
    (mxfp4() | {"e.w_scales": torch.zeros(2, 4, 3)}, MXFP4, "expected uint8[2, 4, 3]"),
    (mxfp4() | {"e.w_blocks": torch.zeros(2, 4, 48, dtype=torch.uint8)}, MXFP4, "expected uint8 [experts, rows"),
    (pack4(), scheme(group_size=8), "a.weight_scale is float32[6, 2], and by config.json it is [6, 4]"),
    (pack4(), NESTED, "by config.json it is [6, 4]"),
    (pack4(), scheme(num_bits=8), "packed to 4 words per row does not fit 8 bits"),
    (pack4(), scheme(symmetric=False), "no a.weight_zero_point, and by config.json the weight is not symmetric"),
    (pack4() | {"a.weight_shape": torch.tensor([6, 40])}, PACK4, "does not fit 4 bits"),
    (pack4() | {"a.weight_shape": torch.tensor([5, 32])}, PACK4, "weight_shape is [5, 32]"),
    *((without(pack4(), f"a.weight_{part}"), PACK4, f"no a.weight_{part}") for part in ("shape", "scale")),
    (without(pack4(), "a.weight_packed"), PACK4, "a.weight_scale: there is no quantized weight"),
    (
        pack4() | {"a.weight_zero_point": torch.zeros(2, 2, dtype=torch.int32)},
        scheme(symmetric=False),
        "a.weight_zero_point is int32[2, 2], expected [1, 2]",
    ),
    (
        {"a.weight": torch.ones(6, 32), "a.weight_scale": torch.ones(6, 2)},
        PACK4,
        "a.weight: float32[6, 32]: has a scale and is not quantized",
    ),
    (
        pack4() | {"a.weight_packed": torch.zeros(6, 3, dtype=torch.int32)},
        scheme(num_bits=3),  # versions of the library pack them differently
        "3 bits are not dequantized",
    ),
    (nf4(shape=None), BITS, "expected a list"),
    (nf4(shape=[5, 16]), BITS, "two values of [5, 16] make one"),
    (nf4(blocksize=0), BITS, "blocksize is 0"),
    (nf4(blocksize=32), BITS, "expected 2 floats"),
    (nf4(nested_blocksize=256), BITS, "nested_offset"),
    (nf4(nested_blocksize=256, nested_offset="x"), BITS, "expected 4 bytes"),
]
"""Tensors that do not fit each other or config.json."""


@pytest.mark.parametrize(
    ("fault", "error"),
    [*((fault, LoadMismatchError) for fault in UNKNOWN), *((fault, CorruptCheckpointError) for fault in DAMAGED)],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_a_folder_that_cannot_be_dequantized_is_refused(
    tmp_path: Path, fault: tuple[Tensors, Any, str], error: type[CheckpointError]
) -> None:
    """Each is told with what was expected and found; nothing is guessed."""
    tensors, settings, said = fault
    message = refused(tmp_path, tensors, settings, error)
    assert said in message
    assert error is LoadMismatchError or any(key in message for key in tensors), "the tensor is named"


def test_a_file_cut_short_after_opening_is_one_error(tmp_path: Path) -> None:
    """A file that ends early while it is read is named."""
    save_file(fp8(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": BLOCKS}))
    with open_reader(tmp_path) as reader:
        path = tmp_path / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
            reader.read([Block(Chunk.whole((40, 24)), torch.zeros(40, 24), "a.weight")])


HOSTILE: tuple[Any, ...] = (None, 0, -1, 2**40, "x", "", [], {}, [1], [0, 0], 1.5, True, {"a": 1})
GOLDEN = Path(__file__).parents[3] / "golden" / "quantised"


def test_mutated_folders_give_values_or_the_typed_error(tmp_path: Path) -> None:
    """Settings and tensors of other kinds, shapes, dtypes: a reader that reads all it lists, or a CheckpointError."""
    sources = [(BLOCKS, fp8()), ({"quant_method": "mxfp4"}, mxfp4()), (PACK4, pack4())]
    for config in sorted(GOLDEN.glob("*/config.json")):
        settings = json.loads(config.read_text())["quantization_config"]
        sources.append((settings, load_file(config.parent / "model.safetensors")))
    generator = random.Random(7)
    outcomes = set()
    for _ in range(300):
        settings, tensors = copy.deepcopy(generator.choice(sources))
        settings = mutated(settings, generator) if generator.random() < 0.4 else settings
        for key in generator.sample(sorted(tensors), 1):
            tensors[key] = generator.choice(MUTATIONS)(tensors[key], generator)
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
        try:
            with open_reader(tmp_path) as reader:
                for key in reader.tensors:
                    reader.whole(key)
            outcomes.add("read")
        except CheckpointError as error:
            outcomes.add(type(error).__name__)
    assert outcomes == {"read", "CorruptCheckpointError", "LoadMismatchError"}


def mutated(value: Any, generator: random.Random) -> Any:
    """Replace, remove or descend."""
    if isinstance(value, dict) and value and generator.random() < 0.9:
        key = generator.choice(list(value))
        if generator.random() < 0.2:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: mutated(value[key], generator)}
    return copy.deepcopy(generator.choice(HOSTILE))


MUTATIONS: tuple[Callable[[torch.Tensor, random.Random], torch.Tensor], ...] = (
    lambda value, generator: value.reshape(-1)[: generator.randint(0, value.numel())].clone(),
    lambda value, generator: torch.zeros([generator.randint(0, 4) for _ in range(generator.randint(0, 4))]).to(
        value.dtype
    ),
    lambda value, generator: value.float().to(generator.choice((torch.uint8, torch.int8, torch.bfloat16, torch.int32))),
    lambda value, generator: torch.randint(0, 256, value.shape).to(torch.uint8).to(value.dtype),
    lambda value, generator: value,
)
