"""Opening quantized Hugging Face weights as floats.

Owns the choice of the method by config.json. Each method is a module of this folder that turns names and shapes into
expressions (values.py). Here they are computed in float32, for the requested regions only: requests are cut into
bounded pieces and fetched in batches, and one batch is computed while the next is read.

A dequantized tensor is listed as float32, whatever dtype config.json gives the model, because float32 is what scale
times code gives without another rounding. The planner decides whether it may be rounded to bfloat16, as for any file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from titan_ckpt.disk.files import IO_BYTES
from titan_ckpt.disk.workers import batches, run_workers
from titan_ckpt.errors import LoadMismatchError, listed
from titan_ckpt.formats.quantized import bitsandbytes, compressed_tensors, fp8_block, mxfp4, torchao_flat
from titan_ckpt.formats.quantized.folder import Findings, QuantizedFolder
from titan_ckpt.formats.quantized.values import Values
from titan_ckpt.formats.reading.slices import put
from titan_ckpt.formats.safetensors.container import Layout, SafetensorsFiles
from titan_ckpt.geometry.boxes import boxes
from titan_ckpt.geometry.chunks import Block, Chunk, TensorInfo
from titan_ckpt.geometry.requests import Fill
from titan_ckpt.process import gc_paused
from titan_ckpt.stores.store import Place

METHODS: Mapping[str, Callable[[QuantizedFolder], Findings]] = {
    "bitsandbytes": bitsandbytes.find,
    "compressed-tensors": compressed_tensors.find,
    "fp8": fp8_block.find,
    "mxfp4": mxfp4.find,
    "torchao": torchao_flat.find,
}
"""By config.json's quantization_config.quant_method."""
_PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_SCALES_OF = {
    "": ("_scale_inv", "_scale", ".absmax"),
    "weight": ("SCB",),
    "_blocks": ("_scales",),
    "_packed": ("_scale",),
    "qdata": ("scale",),
}
"""End of the name of codes -> ends of the names of their scales, over all methods."""


def open_quantized(path: Place, config: Mapping[str, Any], headers: Sequence[Layout]) -> DequantizedFiles | None:
    """Return the folder's tensors as floats; None if config.json does not mention quantization.

    Raises: LoadMismatchError for an unknown method or variant, and for codes with scales without any method;
    CorruptCheckpointError for scales that are missing or do not fit. The errors name the tensors.
    """
    settings = quantization_of(config)
    infos = {key: entry.info for header in headers for key, entry in header.entries.items()}
    if settings is None:
        _refuse_codes(path, infos)
        return None
    method = _method(settings)
    if method not in METHODS:
        raise LoadMismatchError(
            f"{path}: its weights are quantized (quantization_config.quant_method = {method!r}), and this version "
            f"does not dequantize them; it knows {', '.join(METHODS)}. Use a folder with plain float weights"
        )
    metadata = [header.metadata for header in headers]
    folder = QuantizedFolder(path, method, settings, infos, metadata, lambda keys: _read_whole(headers, infos, keys))
    with gc_paused():
        findings = METHODS[method](folder)
        findings.raise_faults(folder)
        return DequantizedFiles(headers, findings.values, findings.hidden)


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantization_config of a config.json, or that of a nested part such as the text model."""
    for part in (config, *(part for part in config.values() if isinstance(part, dict))):
        for name in ("quantization_config", "compression_config"):
            if settings := part.get(name):
                return settings if isinstance(settings, dict) else {"quant_method": settings}
    return None


def _refuse_codes(path: Place, infos: Mapping[str, TensorInfo]) -> None:
    """Raise if codes have scales beside them: the config.json, which does not mention them, may be the wrong one."""
    codes = [
        f"{key} ({str(info.dtype).removeprefix('torch.')}, with {scale})"
        for key, info in infos.items()
        if info.dtype not in _PLAIN
        for suffix, scales in _SCALES_OF.items()
        for scale in (key.removesuffix(suffix) + name for name in scales)
        if key.endswith(suffix) and scale in infos
    ]
    if codes:
        raise LoadMismatchError(
            f"{path}: {len(codes)} tensor(s) are codes with scales beside them, and config.json has no "
            f"quantization_config that says how to read them: {listed(codes)}. "
            "Restore the folder's own config.json; without it the weights would be loaded unscaled"
        )


def _method(settings: Mapping[str, Any]) -> str:
    method = settings.get("quant_method")
    if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        return "bitsandbytes"  # as transformers reads configs from before there was quant_method
    return str(method)


def _read_whole(
    headers: Sequence[Layout], infos: Mapping[str, TensorInfo], keys: Sequence[str]
) -> dict[str, torch.Tensor]:
    tensors = {key: torch.empty(infos[key].shape, dtype=infos[key].dtype) for key in keys}
    with contextlib.closing(SafetensorsFiles(headers)) as files:
        files.read([Block(Chunk.whole(infos[key].shape), tensor, key) for key, tensor in tensors.items()])
    return tensors


_FETCHED_ELEMENTS = 4 << 20
"""Elements of a request that are read at a time: 2 or 4 MiB in the file."""
_COMPUTED_ELEMENTS = 1 << 17
"""Elements that are computed at a time: they fit a processor's cache and need no fresh pages."""


_Wanted = tuple[Block, Chunk]
"""A request for a dequantized tensor, and a box of it."""


class DequantizedFiles:
    """Open safetensors files, some of whose tensors are computed from several stored ones."""

    def __init__(self, headers: Sequence[Layout], values: Mapping[str, Values], hidden: Set[str]) -> None:
        """Open the files. `hidden`: stored tensors that are not listed, because they mean nothing by themselves."""
        self._values = values
        seen_as = {leaf.key: leaf.stored for value in values.values() for leaf in value.leaves()}
        self._files = SafetensorsFiles([_looked_at(header, seen_as) for header in headers])
        plain = {key: e.info for key, e in self._files.entries.items() if key not in hidden and key not in values}
        self.tensors = plain | {key: TensorInfo(value.shape, torch.float32) for key, value in values.items()}

    def plan(self, requests: Sequence[Block]) -> Fill:
        """Open the files of all requests; return the function that fills them. Raises: as SafetensorsFiles.plan.

        Dequantized values are computed in float32, then cast to the dtype of the memory.
        """
        fill_plain = self._files.plan([request for request in requests if request.key not in self._values])
        computed = [request for request in requests if request.key in self._values]
        self._files.open({leaf.key for request in computed for leaf in self._values[request.key].leaves()})

        def fill() -> None:
            fill_plain()
            wanted = ((r, box) for r in computed for box in self._boxes(r, r.chunk, _FETCHED_ELEMENTS))
            with gc_paused():
                # one thread fetches while another computes: items are made under the workers' lock
                run_workers(map(self._fetch, batches(wanted, self._needed, 2 * IO_BYTES)), self._compute)

        return fill

    def close(self) -> None:
        """Close all files; idempotent."""
        self._files.close()

    def _boxes(self, request: Block, box: Chunk, max_elements: int) -> Iterator[Chunk]:
        """Cut a box in the file's order; in that of the memory if it has not the shape of what is requested."""
        kept = request.data.shape == request.chunk.sizes
        return cut(box, max_elements, self._values[request.key].order if kept else tuple(range(len(box.sizes))))

    def _needed(self, wanted: _Wanted) -> int:
        """Return the bytes that are read for a box."""
        needs = self._values[wanted[0].key].needs(wanted[1])
        return sum(part.numel * leaf.stored.dtype.itemsize for leaf, part in needs)

    def _fetch(self, wanted: Sequence[_Wanted]) -> list[tuple[_Wanted, dict[str, Block]]]:
        """Read, at once, the stored regions from which boxes are computed; return these by their keys, for each box."""
        fetched: list[tuple[_Wanted, dict[str, Block]]] = [(one, {}) for one in wanted]
        for (request, box), regions in fetched:
            for leaf, part in self._values[request.key].needs(box):
                regions[leaf.key] = Block(part, torch.empty(part.sizes, dtype=leaf.stored.dtype), leaf.key)
        self._files.read([part for _, regions in fetched for part in regions.values()])
        return fetched

    def _compute(self, fetched: Sequence[tuple[_Wanted, Mapping[str, Block]]]) -> None:
        for (request, whole), regions in fetched:
            load = partial(_stored, regions)
            for box in self._boxes(request, whole, _COMPUTED_ELEMENTS):
                put(request.data, request.chunk, box, self._values[request.key].read(box, load))


def _stored(regions: Mapping[str, Block], key: str, box: Chunk) -> torch.Tensor:
    return regions[key].data[box.within(regions[key].chunk)]


def cut(box: Chunk, max_elements: int, order: tuple[int, ...]) -> Iterator[Chunk]:
    """Cut a box into parts of at most `max_elements` that follow `order`, the dims from the slowest to the fastest."""
    if not box.numel:
        return
    back = [order.index(dim) for dim in range(len(order))]
    turned = Chunk(tuple(box.offsets[dim] for dim in order), tuple(box.sizes[dim] for dim in order))
    for part in boxes(turned, max_elements):
        yield Chunk(tuple(part.offsets[dim] for dim in back), tuple(part.sizes[dim] for dim in back))


def _looked_at(header: Layout, seen_as: Mapping[str, TensorInfo]) -> Layout:
    """Return the header with stored tensors described as the expressions view their bytes."""
    entries = {}
    for key, entry in header.entries.items():
        info = seen_as.get(key, entry.info)
        assert info.nbytes == entry.info.nbytes, (key, info, entry.info)
        entries[key] = entry._replace(info=info)
    return replace(header, entries=entries)
