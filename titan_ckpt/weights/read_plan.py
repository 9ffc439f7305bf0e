"""Requests by which a source's file tensors fill the model's memory, and the verdict on every key.

This module applies a key map to the memory of live tensors. It reads nothing: it makes requests, which the formats
fill.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from titan_ckpt.errors import KeyMapError
from titan_ckpt.geometry.chunks import Shape, TensorInfo, blocks_of, dtype_name, info_of
from titan_ckpt.geometry.keymap import IDENTITY, KeyGroup, KeyMap, TensorOp
from titan_ckpt.geometry.requests import ReadRequest
from titan_ckpt.types import LoadReport, Mismatch
from titan_ckpt.weights.write_view import CASTABLE

logger = logging.getLogger(__name__)

_MAX_COMPARED_CHARS = 1_000
"""Longer names of a foreign file are not compared with the model's, because that takes the square of their length."""


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The requests for the wanted tensors, and a report on every key.

    Under pipeline parallelism the report also lists other ranks' keys as unexpected; only keys that every rank reports
    are.
    """

    requests: list[ReadRequest]
    report: LoadReport
    absent_keys: tuple[str, ...] = ()
    """File keys that the wanted tensors would come from and that the source does not have."""

    def near(self, key: str) -> list[str]:
        """Return the absent keys most similar to an unexpected one, such as a misspelt or wrongly prefixed name."""
        if len(key) > _MAX_COMPARED_CHARS:
            return []
        return difflib.get_close_matches(key, self.absent_keys, n=2, cutoff=0.6)


class ReadPlanner:
    """Collects the requests and verdicts of one load, tensor by tensor."""

    def __init__(self, available: Mapping[str, TensorInfo], cast: bool) -> None:
        self.available = available
        self.may_cast = cast
        self.requests: list[ReadRequest] = []
        self.loaded: list[str] = []
        self.missing: list[str] = []
        self.mismatched: list[Mismatch] = []
        self.cast: dict[str, str] = {}
        self.known: set[str] = set()
        self.absent: dict[str, None] = {}

    def add(self, fqn: str, value: torch.Tensor, group: KeyGroup) -> None:
        self.known.update(group.keys)
        absent = [key for key in group.keys if key not in self.available]
        if absent:
            self.absent.update(dict.fromkeys(absent))
        if len(absent) == len(group.keys):
            self.missing.append(fqn)
            return
        expected = info_of(value)
        if group.op is IDENTITY and self.available[group.keys[0]] == expected:  # the usual case, and a hot path
            self.requests += [ReadRequest(group.keys[0], block.chunk, block.data) for block in blocks_of(value)]
            self.loaded.append(fqn)
            return
        fault = self._misfit(fqn, expected, group, absent)
        if fault is not None:
            self.mismatched.append(fault)
            return
        index = group.fqns.index(fqn)
        shapes = group.op.native_shapes([self.available[key].shape for key in group.keys])
        for block in blocks_of(value):
            for piece in group.op.pieces(index, shapes, block.chunk, block.data):
                self.requests.append(ReadRequest(group.keys[piece.file_index], piece.chunk, piece.view))
        self.loaded.append(fqn)

    def _misfit(self, fqn: str, expected: TensorInfo, group: KeyGroup, absent: list[str]) -> Mismatch | None:
        """Return how the file's tensors do not fit, or None; note allowed casts in `cast`."""
        if absent:
            return Mismatch(fqn, str(expected), f"no {', '.join(absent)}")
        infos = [self.available[key] for key in group.keys]
        in_file = ", ".join(dict.fromkeys(map(str, infos)))
        try:
            shape = _native_shapes(group.op, [info.shape for info in infos])[group.fqns.index(fqn)]
        except KeyMapError as error:
            return Mismatch(fqn, str(expected), f"{in_file}: {error}")
        if shape != expected.shape:
            return Mismatch(fqn, str(expected), in_file)
        others = {info.dtype for info in infos} - {expected.dtype}
        castable = expected.dtype in CASTABLE and others <= CASTABLE
        if others and castable and self.may_cast:
            self.cast[fqn] = f"{', '.join(sorted(map(dtype_name, others)))} -> {dtype_name(expected.dtype)}"
        elif others and castable:
            return Mismatch(fqn, str(expected), f"{in_file} (set cast = true to convert while loading)", "cast")
        elif others:
            return Mismatch(fqn, str(expected), in_file, "dtype")
        return None

    def result(self, key_map: KeyMap) -> ReadPlan:
        """Return the plan after every wanted tensor was added."""
        unknown = [key for key in self.available if key not in self.known]
        ignored = [key for key in unknown if key_map.ignores(key)]
        if ignored:
            logger.info("load: %d keys are ignored, which the model does not use, such as %s", len(ignored), ignored[0])
        report = LoadReport(
            loaded=tuple(self.loaded),
            missing=tuple(self.missing),
            unexpected=tuple(key for key in unknown if not key_map.ignores(key)),
            mismatched=tuple(self.mismatched),
            cast=self.cast,
            ignored=tuple(ignored),
        )
        return ReadPlan(self.requests, report, tuple(self.absent))


def _native_shapes(op: TensorOp, shapes: list[Shape]) -> list[Shape]:
    """Return the native shapes for file shapes. Raises: KeyMapError unless they map back to the same file shapes."""
    native = op.native_shapes(shapes)
    if list(op.file_shapes(native)) != shapes:
        raise KeyMapError(f"shapes {[list(s) for s in shapes]} do not fit {op}")
    return native
