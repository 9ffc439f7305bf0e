"""Quantised folders that are unknown, incomplete or contradict themselves: one typed error that names all of it."""

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
from titan_ckpt.geometry.chunks import Chunk
from titan_ckpt.geometry.requests import ReadRequest

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


def refused(folder: Path, tensors: Tensors, settings: dict[str, Any], error: type[CheckpointError]) -> str:
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


@pytest.mark.parametrize("method", ["gptq", "awq", "nvfp4", "", None])
def test_an_unknown_method_is_named(tmp_path: Path, method: str | None) -> None:
    """A method that is not known is refused, and the known ones are listed."""
    message = refused(tmp_path, fp8(), {"quant_method": method, "bits": 4}, LoadMismatchError)
    assert f"quant_method = {str(method)!r}" in message
    assert "bitsandbytes, compressed-tensors, fp8, mxfp4, torchao" in message


def test_settings_of_another_kind_are_refused(tmp_path: Path) -> None:
    """A quantization_config that is no object is refused as the method it seems to name."""
    save_file(fp8(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": "fp8-ish"}))
    with pytest.raises(LoadMismatchError, match="'fp8-ish'"):
        open_reader(tmp_path)


def test_an_old_bitsandbytes_config_is_recognised(tmp_path: Path) -> None:
    """load_in_8bit says enough, as it does to transformers; the method is named."""
    message = refused(tmp_path, {"a.weight": torch.ones(4, 4)}, {"load_in_8bit": True}, LoadMismatchError)
    assert "'bitsandbytes'" in message


@pytest.mark.parametrize("method", ["fp8", "mxfp4", "bitsandbytes"])
def test_plain_floats_under_a_quantised_config_are_questioned(tmp_path: Path, method: str) -> None:
    """config.json says quantised and nothing is: that is a stale setting, and the next step is said."""
    message = refused(tmp_path, {"a.weight": torch.ones(4, 4)}, {"quant_method": method}, LoadMismatchError)
    assert "remove quantization_config" in message


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
    assert "10 tensor(s) cannot be dequantised" in message
    assert "layers.0.weight" in message
    assert "and 2 more" in message


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        (without(fp8(), "a.weight_scale_inv"), "no scale: no a.weight_scale_inv or a.weight_scale"),
        (without(fp8(), "a.weight"), "a.weight_scale_inv: there is no float8 weight"),
        (fp8() | {"a.weight_scale_inv": torch.ones(2, 2)}, r"expected \[3, 2\]"),
        (fp8() | {"a.weight_scale_inv": torch.ones(1, 1)}, r"expected \[3, 2\]"),
        (fp8() | {"a.weight_scale_inv": torch.ones(2, 3)}, r"expected \[3, 2\]"),
        (fp8() | {"a.weight_scale_inv": torch.ones(3, 2, dtype=torch.int32)}, "expected a float or E8M0 dtype"),
        (fp8() | {"a.weight_scale": torch.ones(3, 2)}, "a.weight_scale_inv and a.weight_scale"),
        (fp8() | {"b.weight": torch.ones(4, 4).to(torch.int8)}, "b.weight: int8"),
        (fp8() | {"b.stray": torch.ones(4).to(torch.float8_e8m0fnu)}, r"b.stray: float8_e8m0fnu\[4\] without a scale"),
    ],
)
def test_fp8_scales_must_fit(tmp_path: Path, tensors: Tensors, expected: str) -> None:
    """A scale that is missing, alone, twice, of another grid or of another kind is named with what was expected."""
    message = refused(tmp_path, tensors, BLOCKS, CorruptCheckpointError)
    assert re.search(expected, message), message


def test_without_a_block_size_a_grid_is_no_scale(tmp_path: Path) -> None:
    """Blocks whose size nobody says cannot be guessed, even where they would divide."""
    tensors = {"a.weight": torch.ones(32, 32).to(FLOAT8), "a.weight_scale_inv": torch.ones(2, 2)}
    assert "no weight_block_size" in refused(tmp_path, tensors, {"quant_method": "fp8"}, CorruptCheckpointError)


@pytest.mark.parametrize("block", [[16], [0, 16], "16x16", [16.0, 16], [True, 16]])
def test_a_block_size_that_is_none_is_refused(tmp_path: Path, block: Any) -> None:
    """weight_block_size must be two positive integers."""
    settings = {"quant_method": "fp8", "weight_block_size": block}
    assert "weight_block_size" in refused(tmp_path, fp8(), settings, LoadMismatchError)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        (without(mxfp4(), "e.w_scales"), "e.w_blocks: there is no e.w_scales"),
        (without(mxfp4(), "e.w_blocks"), "e.w_scales: there is no e.w_blocks"),
        (mxfp4() | {"e.w_scales": torch.zeros(2, 4, 2, dtype=torch.uint8)}, "expected uint8[2, 4, 3]"),
        (mxfp4() | {"e.w_scales": torch.zeros(2, 4, 3)}, "expected uint8[2, 4, 3]"),
        (mxfp4() | {"e.w_blocks": torch.zeros(2, 4, 48, dtype=torch.uint8)}, "expected uint8 [experts, rows"),
    ],
)
def test_mxfp4_blocks_and_scales_must_fit(tmp_path: Path, tensors: Tensors, expected: str) -> None:
    """Blocks and scales come in pairs of matching shapes."""
    assert expected in refused(tmp_path, tensors, {"quant_method": "mxfp4"}, CorruptCheckpointError)


def scheme(**changes: Any) -> dict[str, Any]:
    weights = PACK4["config_groups"]["group_0"]["weights"] | changes  # type: ignore[index]
    return PACK4 | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (PACK4 | {"format": "dense"}, "format 'dense'"),
        (PACK4 | {"format": "marlin-24"}, "format 'marlin-24'"),
        (PACK4 | {"format": None}, "format 'None'"),
        (PACK4 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        (PACK4 | {"transform_config": {"config_groups": {"R1": {}}}}, "rotated"),
        (PACK4 | {"config_groups": {}}, "config_groups describe no weights"),
        (PACK4 | {"config_groups": {"W4A16": ["Linear"]}}, "config_groups describe no weights"),
    ],
)
def test_other_variants_of_compressed_tensors_are_named(
    tmp_path: Path, settings: dict[str, Any], expected: str
) -> None:
    """Sparse, rotated, not compressed or not described: refused with the reason."""
    assert expected in refused(tmp_path, pack4(), settings, LoadMismatchError)


def test_columns_in_another_order_are_refused(tmp_path: Path) -> None:
    """Groups by order of activation would need each column's group."""
    tensors = pack4() | {"a.weight_g_idx": torch.zeros(32, dtype=torch.int32)}
    assert "a.weight_g_idx" in refused(tmp_path, tensors, PACK4, LoadMismatchError)


@pytest.mark.parametrize(
    ("tensors", "settings", "expected"),
    [
        (pack4(), scheme(group_size=8), r"a.weight_scale is float32[6, 2], and by config.json it is [6, 4]"),
        (pack4(), scheme(num_bits=8), "packed to 4 words per row does not fit 8 bits"),
        (pack4(), scheme(symmetric=False), "no a.weight_zero_point, and by config.json the weight is not symmetric"),
        (pack4() | {"a.weight_shape": torch.tensor([6, 40])}, PACK4, "does not fit 4 bits"),
        (pack4() | {"a.weight_shape": torch.tensor([5, 32])}, PACK4, "weight_shape is [5, 32]"),
        (without(pack4(), "a.weight_shape"), PACK4, "no a.weight_shape"),
        (without(pack4(), "a.weight_scale"), PACK4, "no a.weight_scale"),
        (without(pack4(), "a.weight_packed"), PACK4, "a.weight_scale: there is no quantised weight"),
        (
            pack4() | {"a.weight_zero_point": torch.zeros(2, 2, dtype=torch.int32)},
            scheme(symmetric=False),
            "a.weight_zero_point is int32[2, 2], expected [1, 2]",
        ),
        (
            {"a.weight": torch.ones(6, 32), "a.weight_scale": torch.ones(6, 2)},
            PACK4,
            "a.weight: float32[6, 32]: has a scale and is not quantised",
        ),
    ],
)
def test_packed_weights_must_fit_the_config(
    tmp_path: Path, tensors: Tensors, settings: dict[str, Any], expected: str
) -> None:
    """Packing, groups, zero points and shape are held against config.json, and nothing is guessed."""
    assert expected in refused(tmp_path, tensors, settings, CorruptCheckpointError)


def test_three_bits_are_not_guessed(tmp_path: Path) -> None:
    """Three bits are packed differently by different versions of the library."""
    tensors = pack4() | {"a.weight_packed": torch.zeros(6, 3, dtype=torch.int32)}
    assert "3 bits are not dequantised" in refused(tmp_path, tensors, scheme(num_bits=3), CorruptCheckpointError)


def test_tiled_int8_is_refused(tmp_path: Path) -> None:
    """LLM.int8() weights in the layout of an old GPU are no matrix."""
    tensors = {
        "a.weight": torch.ones(4, 4, dtype=torch.int8),
        "a.SCB": torch.ones(4),
        "a.weight_format": torch.tensor(1, dtype=torch.uint8),
    }
    message = refused(tmp_path, tensors, {"quant_method": "bitsandbytes"}, LoadMismatchError)
    assert "a.weight is tiled" in message


def state(**changes: Any) -> torch.Tensor:
    made = {"quant_type": "nf4", "blocksize": 16, "dtype": "float32", "shape": [4, 16]} | changes
    return torch.tensor(list(json.dumps(made).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"shape": None}, "expected a list"),
        ({"shape": [5, 16]}, "two values of [5, 16] make one"),
        ({"blocksize": 0}, "blocksize is 0"),
        ({"blocksize": 32}, "expected 2 floats"),
        ({"nested_blocksize": 256}, "nested_offset"),
        ({"nested_blocksize": 256, "nested_offset": "x"}, "expected 4 bytes"),
    ],
)
def test_a_four_bit_state_must_fit_its_weight(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    """The JSON beside a weight is checked against the weight and its maxima."""
    tensors = {
        "a.weight": torch.zeros(32, 1, dtype=torch.uint8),
        "a.weight.absmax": torch.ones(4),
        "a.weight.quant_map": torch.linspace(-1, 1, 16),
        "a.weight.quant_state.bitsandbytes__nf4": state(**changes),
    }
    message = refused(tmp_path, tensors, {"quant_method": "bitsandbytes"}, CorruptCheckpointError)
    assert "a.weight" in message
    assert expected in message


def test_a_file_cut_short_after_opening_is_one_error(tmp_path: Path) -> None:
    """A file that ends early while it is read is named."""
    save_file(fp8(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": BLOCKS}))
    with open_reader(tmp_path) as reader:
        path = tmp_path / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
            reader.read([ReadRequest("a.weight", Chunk.whole((40, 24)), torch.zeros(40, 24))])


def test_a_nested_config_is_unwrapped(tmp_path: Path) -> None:
    """Old compressed-tensors folders have the settings one level deeper, as transformers unwraps them."""
    nested = {"quant_method": "compressed-tensors", "quantization_config": scheme(group_size=8)}
    assert "by config.json it is [6, 4]" in refused(tmp_path, pack4(), nested, CorruptCheckpointError)
    sparse = nested | {"sparsity_config": {"format": "sparse-bitmask"}}
    assert "sparse-bitmask" in refused(tmp_path, pack4(), sparse, LoadMismatchError)


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
