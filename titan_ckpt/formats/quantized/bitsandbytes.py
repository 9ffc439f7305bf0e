"""quant_method "bitsandbytes": nf4 and fp4 with block maxima, which may be quantized themselves, and LLM.int8().

Owns the names of a weight's companions, the packed JSON with its shape, and both layouts.
Source: bitsandbytes, `functional.py` (QuantState.from_dict, int8_vectorwise_dequant), `backends/default/ops.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from titan_ckpt.encoding import strict_json
from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.formats.quantized.folder import FLOATS, Findings, QuantizedFolder
from titan_ckpt.formats.quantized.values import Codes, Constant, Numbers, Scaled, Unflattened, Values, nibbles
from titan_ckpt.geometry.chunks import Shape, TensorInfo

_STATE = ".quant_state.bitsandbytes__"
_COMPANIONS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_MAX_STATE_BYTES = 1 << 16
_ROW_LAYOUT = 0
"""`weight_format` of a plain matrix; other weights are tiled for the kernels of old GPUs."""


def find(folder: QuantizedFolder) -> Findings:
    """Gather each weight's companions, read the small ones, and check them against each other."""
    findings = Findings()
    states = {key.partition(_STATE)[0]: key for key in folder.infos if _STATE in key}
    companions = [
        key
        for weight in states
        for key in (states[weight], f"{weight}.quant_map", f"{weight}.nested_quant_map")
        if key in folder.infos and folder.infos[key].nbytes <= _MAX_STATE_BYTES
    ]
    formats = [key for key, info in folder.infos.items() if key.endswith(".weight_format") and info.nbytes <= 8]
    small = folder.read_whole([*companions, *formats])
    for weight, key in states.items():
        try:
            findings.add(weight, _four_bit(folder, weight, key, small))
        except (TypeError, ValueError) as error:
            findings.faults[weight] = str(error)
        findings.hidden.update((key, *(f"{weight}.{part}" for part in _COMPANIONS)))
    for key in folder.infos:
        weight, _, part = key.rpartition(".")
        if part == "SCB":
            _add_int8(findings, folder, key, small)
        elif part in _COMPANIONS and weight not in states:
            findings.faults[key] = f"there is no {weight}{_STATE}nf4, nor fp4"
    return findings


def _add_int8(findings: Findings, folder: QuantizedFolder, scb: str, small: Mapping[str, torch.Tensor]) -> None:
    stem = scb.removesuffix("SCB")
    key, format_key = f"{stem}weight", f"{stem}weight_format"
    weight, maxima = folder.infos.get(key), folder.infos[scb]
    findings.hidden.update((scb, format_key))
    if weight is None or weight.dtype != torch.int8 or len(weight.shape) != 2:
        findings.faults[scb] = f"beside {key} {weight}, expected an int8 matrix"
    elif maxima.dtype not in FLOATS or prod(maxima.shape) != weight.shape[0]:
        findings.faults[key] = f"{weight} with {scb} {maxima}, expected {weight.shape[0]} floats"
    elif format_key in folder.infos and (
        format_key not in small or small[format_key].reshape(-1).tolist() != [_ROW_LAYOUT]
    ):
        findings.unsupported.append(f"{key} is tiled for old GPUs ({format_key} is not {_ROW_LAYOUT})")
    else:
        rows, columns = weight.shape
        scaled = Scaled(Numbers(key, weight), Numbers(scb, TensorInfo((rows, 1), maxima.dtype)), (1, columns))
        # bitsandbytes multiplies with this reciprocal, after the row's maximum
        findings.add(key, Scaled(scaled, Constant((1, 1), 1 / 127), weight.shape))


def _four_bit(folder: QuantizedFolder, key: str, state_key: str, small: Mapping[str, torch.Tensor]) -> Values:
    """Return a 4-bit weight, checked against its companions. Its bytes are one run, the first value in the high nibble.

    Raises: ValueError, TypeError saying what is wrong.
    """
    infos = folder.infos
    parts = [key, f"{key}.absmax", f"{key}.quant_map"]
    if missing := [name for name in parts if name not in infos]:
        raise ValueError(f"no {', '.join(missing)}")
    if infos[state_key].dtype != torch.uint8 or state_key not in small:
        raise ValueError(f"{state_key} is {infos[state_key]}, expected JSON as bytes")
    state = _state(small[state_key], state_key)
    shape, blocksize = strict_json.as_shape(state["shape"]), _positive(state, "blocksize")
    numel = prod(shape)
    if not shape or infos[key].nbytes != -(-numel // 2):
        raise ValueError(f"{infos[key]} holds {infos[key].nbytes} bytes, and two values of {list(shape)} make one")
    absmax = _maxima(folder, key, state, -(-numel // blocksize), small)
    table = _table(_codes(small, f"{key}.quant_map", 16))
    *lead, columns = shape
    if columns % 2 == 0 and columns % blocksize == 0:
        codes = Codes(key, TensorInfo((*lead, columns // 2), torch.uint8), shape, table)
        maxima = _reshaped(absmax, (*lead, columns // blocksize))
        return Scaled(codes, maxima, (*(1 for _ in lead), blocksize))
    flat = Codes(key, TensorInfo((-(-numel // 2),), torch.uint8), (numel,), table)
    return Unflattened(Scaled(flat, absmax, (blocksize,)), shape)


def _maxima(
    folder: QuantizedFolder, key: str, state: dict[str, Any], num_blocks: int, small: Mapping[str, torch.Tensor]
) -> Values:
    """Return the block maxima [num_blocks]."""
    name, nested = f"{key}.absmax", f"{key}.nested_absmax"
    info = folder.infos[name]
    quantized = "nested_blocksize" in state
    if prod(info.shape) != num_blocks or (info.dtype != torch.uint8 if quantized else info.dtype not in FLOATS):
        raise ValueError(f"{name} is {info}, expected {num_blocks} {'bytes' if quantized else 'floats'}")
    if not quantized:
        return Numbers(name, TensorInfo((num_blocks,), info.dtype))
    length, outer = _positive(state, "nested_blocksize"), folder.infos.get(nested)
    if outer is None or outer.dtype not in FLOATS or prod(outer.shape) != -(-num_blocks // length):
        raise ValueError(f"{nested} is {outer}, expected {-(-num_blocks // length)} floats")
    table = _table(_codes(small, f"{key}.nested_quant_map", 256))
    codes = Codes(name, TensorInfo((num_blocks,), torch.uint8), (num_blocks,), table)
    offset = state["nested_offset"]
    if not isinstance(offset, float | int) or isinstance(offset, bool):
        raise TypeError(f"nested_offset is {offset!r:.40}, expected a number")
    scale = Numbers(nested, TensorInfo((-(-num_blocks // length),), outer.dtype))
    return Scaled(codes, scale, (length,), offset=Constant(scale.shape, float(offset)))


def _reshaped(flat: Values, shape: Shape) -> Values:
    if isinstance(flat, Numbers):
        return Numbers(flat.key, TensorInfo(shape, flat.stored.dtype))
    return Unflattened(flat, shape)


def _state(value: torch.Tensor, key: str) -> dict[str, Any]:
    state = strict_json.parse(bytes(value.numpy().tobytes()), _MAX_STATE_BYTES, key)
    if not isinstance(state, dict):
        raise CorruptCheckpointError(f"{key}: expected a JSON object")
    for name in ("shape", "blocksize", *(("nested_offset",) if "nested_blocksize" in state else ())):
        if name not in state:
            raise ValueError(f"{key} does not have {name}")
    return state


def _positive(state: dict[str, Any], name: str) -> int:
    value = strict_json.as_int(state[name])
    if value <= 0:
        raise ValueError(f"{name} is {value}")
    return value


def _codes(small: Mapping[str, torch.Tensor], key: str, num: int) -> bytes:
    values = small.get(key)
    if values is None or values.numel() != num or values.dtype not in FLOATS:
        raise ValueError(f"{key} is {'not there' if values is None else list(values.shape)}, expected {num} floats")
    return values.float().numpy().tobytes()


@functools.lru_cache(maxsize=64)
def _table(codes: bytes) -> torch.Tensor:
    """Return the table of 16 or 256 codes. It is cached, because all weights of a folder have the same codes."""
    values = torch.frombuffer(bytearray(codes), dtype=torch.float32)
    return values.view(256, 1) if len(values) == 256 else nibbles(values, high_first=True)
