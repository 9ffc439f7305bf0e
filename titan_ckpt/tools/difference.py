"""The differences between two checkpoints of any formats and any sharding.

Tensors are compared bit by bit, block by block, so memory is bounded; figures are made only of those that differ.
Tensors of two steps are not read where the digests in both show that they are the same.
Equal bits under one name, dtype and shape are an equal logical digest (weights/digest.py), which is given for both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import xxhash

from titan_ckpt import progress
from titan_ckpt.errors import counted
from titan_ckpt.formats.native.reader import NativeReader
from titan_ckpt.formats.open import open_reader
from titan_ckpt.geometry.chunks import LazyTensor, as_bytes
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.stores.store import Place
from titan_ckpt.tools.adapters import effects
from titan_ckpt.tools.inspecting import numbers_of, pieces, rank_state, run_state, settings, settings_as_read
from titan_ckpt.tools.weights import Aligned, Tensors, align, model_keys, other_keys, stored
from titan_ckpt.weights import digest

_TIMES = frozenset({"states.train.seconds"})
"""Values of the state that are wall-clock times, in which two equal runs differ."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How one tensor differs. Figures are over all elements; they are None if the shapes do not allow any."""

    name: str
    kind: Literal["values", "dtype", "reshaped", "shape", "missing", "extra"]
    """missing: the second checkpoint lacks it; extra: the first one does; reshaped: as many elements."""
    left: str | None
    right: str | None
    num_different: int | None = None
    max_abs: float | None = None
    mean_abs: float | None = None
    cosine: float | None = None


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """A value beside the tensors that differs; None where a side lacks it."""

    name: str
    left: str | None
    right: str | None


@dataclass(frozen=True, slots=True)
class ComponentDifference:
    """The comparison of one component: the model, or everything else that a training needs."""

    component: str
    num_equal: int
    num_unread: int
    """Those of the equal ones that were not read, because the digests in both steps are the same."""
    num_bytes: int
    """Bytes of the first side's tensors."""
    digests: tuple[str | None, str | None]
    """A digest over the names and logical digests of all tensors of each side, if all were read."""
    tensors: tuple[TensorDifference, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """All differences of two checkpoints."""

    left: str
    right: str
    left_format: str
    right_format: str
    names: str
    """Whose tensor names the comparison uses."""
    components: tuple[ComponentDifference, ...]
    state: tuple[SettingDifference, ...] = ()
    """Differences of run state, if both sides have one."""
    times: tuple[SettingDifference, ...] = ()
    """Differences of wall-clock times in the state; they do not make two checkpoints different."""
    settings: tuple[SettingDifference, ...] = ()
    """Differences of converters and base, or of config.json."""
    not_compared: tuple[str, ...] = field(default=())
    """The things that one side has and the other has not, in words."""

    @property
    def same(self) -> bool:
        return not (self.state or self.settings or any(component.tensors for component in self.components))


def compare(left: Place, right: Place, *, config: Place | None = None, weights_only: bool = False) -> Difference:
    """Compare two checkpoints. `config`: the folder of the model's config.json, if it is in neither.

    Optimizer and run state are compared if both have them; `weights_only` leaves them out.
    Raises: CheckpointNotFoundError; NotACheckpointError; CorruptCheckpointError; OSError.
    """
    with open_reader(left) as a, open_reader(right) as b:
        aligned = align(a, b, config)
        not_compared: list[str] = []
        sides: dict[str, tuple[Tensors, Tensors]] = {"model": (aligned.left, aligned.right)}
        if not weights_only:
            sides |= _others(a, b, not_compared)
        total = sum(value.info.nbytes for pair in sides.values() for side in pair for value in side.values())
        with progress.shown("comparing", total) as count:
            components = tuple(_component(name, *pair, _known(a, b, name), count) for name, pair in sides.items())
        state = () if weights_only else _states(a, b, not_compared)
        described = () if weights_only else _described(a, b, aligned, not_compared)
        times = tuple(one for one in state if one.name in _TIMES)
        state = tuple(one for one in state if one not in times)
        return Difference(
            str(left), str(right), a.format, b.format, aligned.names, components, state, times, described,
            tuple(not_compared),
        )  # fmt: skip


def _described(
    a: TensorReader, b: TensorReader, aligned: Aligned, not_compared: list[str]
) -> tuple[SettingDifference, ...]:
    """Compare the settings of two checkpoints of one format, or what those of two adapters do to their tensors."""
    if a.format == b.format:
        differing = _settings(settings(a), settings(b))
        if not differing or a.format != "hf":
            return differing
        as_read = settings_as_read(a), settings_as_read(b)
        return _settings(*as_read) if all(as_read) else differing
    if aligned.adapters is None:
        return ()
    both = [effects(adapter, reader.path) for adapter, reader in zip(aligned.adapters, (a, b), strict=True)]
    common = both[0].keys() & both[1].keys()
    for reader, effect, other in zip((a, b), both, reversed(both), strict=True):
        if lacking := other.keys() - effect.keys():
            what = "base" if lacking == {"base.digest"} else "scale"
            not_compared.append(f"{reader.path} does not say the {what} of its adapter")
    mine, theirs = ({name: value for name, value in effect.items() if name in common} for effect in both)
    return _settings(mine, theirs)


def _others(a: TensorReader, b: TensorReader, not_compared: list[str]) -> dict[str, tuple[Tensors, Tensors]]:
    """Return the tensors that are not the model's as one more component, if both sides have some of the same names."""
    mine, theirs = other_keys(a), other_keys(b)
    for reader, keys, other in ((a, mine, theirs), (b, theirs, mine)):
        if keys and not other:
            not_compared.append(f"{counted(len(keys), 'tensor')} of training state in {reader.path}")
    if mine and theirs:
        if mine.keys() & theirs.keys():
            return {"training state": (stored(a, mine), stored(b, theirs))}
        not_compared.append("the training states name their tensors differently")
    return {}


def _states(a: TensorReader, b: TensorReader, not_compared: list[str]) -> tuple[SettingDifference, ...]:
    mine, theirs = run_state(a), run_state(b)
    not_compared += [f"run state in {reader.path}" for reader, own in ((a, mine), (b, theirs)) if own]
    if not mine or not theirs or a.format != b.format:
        return ()
    del not_compared[-2:]
    found = [*_settings(mine, theirs)]
    manifests = [getattr(reader, "manifest", None) for reader in (a, b)]
    worlds = {None if manifest is None else manifest.world_size for manifest in manifests}
    if len(worlds) == 1:
        (world_size,) = worlds
        for rank in range(world_size or 0):
            found += _settings(rank_state(a, rank), rank_state(b, rank), f"rank {rank}: ")
    else:
        not_compared.append("generators and data positions of the ranks, of which there are different numbers")
    return tuple(found)


def _settings(left: Mapping[str, Any], right: Mapping[str, Any], prefix: str = "") -> tuple[SettingDifference, ...]:
    names = dict.fromkeys((*left, *right))
    return tuple(
        SettingDifference(prefix + name, left.get(name), right.get(name))
        for name in names
        if left.get(name) != right.get(name)
    )


def _known(a: TensorReader, b: TensorReader, component: str) -> Callable[[str], bool]:
    """Return what tells, of a tensor in two steps, whether their digests show that its values are the same."""
    if not (isinstance(a, NativeReader) and isinstance(b, NativeReader)):
        return lambda _: False
    of_model = component == "model"
    mine, theirs = ((model_keys if of_model else other_keys)(reader) for reader in (a, b))
    return lambda name: a.blocks_of(mine[name]) == b.blocks_of(theirs[name])


def _component(
    component: str, left: Tensors, right: Tensors, is_known_same: Callable[[str], bool], count: progress.Count
) -> ComponentDifference:
    differences: list[TensorDifference] = []
    digests: tuple[dict[str, str], dict[str, str]] = ({}, {})
    num_equal = num_unread = 0
    for name in dict.fromkeys((*left, *right)):
        a, b = left.get(name), right.get(name)
        if a is not None and b is not None and a.info == b.info and is_known_same(name):
            num_equal, num_unread = num_equal + 1, num_unread + 1
            count(a.info.nbytes + b.info.nbytes)
            continue
        if a is not None and b is not None and a.info == b.info:
            difference = _same_info(name, a, b, digests, count)
        else:
            for value, table in zip((a, b), digests, strict=True):
                if value is not None:
                    table[name] = digest.digest_of(value)
                    count(value.info.nbytes)
            difference = _other_info(name, a, b)
        if difference is None:
            num_equal += 1
        else:
            differences.append(difference)
    return ComponentDifference(
        component,
        num_equal,
        num_unread,
        sum(value.info.nbytes for value in left.values()),
        (None, None) if num_unread else (_joined(digests[0]), _joined(digests[1])),
        tuple(sorted(differences, key=_importance)),
    )


def _importance(difference: TensorDifference) -> tuple[bool, float, str]:
    """Sort differences without figures first, then the largest difference first."""
    largest = difference.max_abs
    if largest is None:
        return False, 0.0, difference.name
    return True, -math.inf if math.isnan(largest) else -largest, difference.name


def _same_info(
    name: str, a: LazyTensor, b: LazyTensor, digests: tuple[dict[str, str], dict[str, str]], count: progress.Count
) -> TensorDifference | None:
    """Compare two tensors of the same shape and dtype in one pass; differing ones are read again for the figures."""
    sums = [(0, 0), (0, 0)]
    equal = True
    for one, other in zip(a.blocks(), b.blocks(), strict=True):
        first = digest.partial_digest(a.info, one.chunk, one.data)
        same = torch.equal(as_bytes(one.data), as_bytes(other.data))
        equal &= same
        second = first if same else digest.partial_digest(b.info, other.chunk, other.data)
        sums = [digest.add(sums[0], first), digest.add(sums[1], second)]
        count(one.data.nbytes + other.data.nbytes)
    for table, total in zip(digests, sums, strict=True):
        table[name] = digest.finish(a.info, total)
    return None if equal else TensorDifference(name, "values", str(a.info), str(b.info), *_figures(a, b))


def _other_info(name: str, a: LazyTensor | None, b: LazyTensor | None) -> TensorDifference:
    left, right = (None if value is None else str(value.info) for value in (a, b))
    if a is None or b is None:
        return TensorDifference(name, "missing" if b is None else "extra", left, right)
    if math.prod(a.info.shape) != math.prod(b.info.shape):
        return TensorDifference(name, "shape", left, right)
    kind: Literal["dtype", "reshaped"] = "dtype" if a.info.shape == b.info.shape else "reshaped"
    return TensorDifference(name, kind, left, right, *_figures(a, b))


def _joined(digests: Mapping[str, str]) -> str | None:
    """Return one digest for all tensors of a side; None if it has none."""
    lines = "\n".join(f"{name} {value}" for name, value in sorted(digests.items()))
    return xxhash.xxh3_128_hexdigest(lines.encode()) if digests else None


def _figures(a: LazyTensor, b: LazyTensor) -> tuple[int, float, float, float | None]:
    """Return the number of elements that differ, the largest and the mean difference, and the cosine.

    Elements that are equal bit by bit have no difference, infinite ones and NaN too.
    """
    count, largest, total, dot, square_a, square_b = 0, 0.0, 0.0, 0.0, 0.0, 0.0
    for one, other in _paired(a, b):
        x, y = numbers_of(one), numbers_of(other)
        same = (x == y) | (x.isnan() & y.isnan())
        if one.dtype == other.dtype:  # then the bits decide: -0.0 is not 0.0
            width = one.dtype.itemsize
            same = (as_bytes(one).view(-1, width) == as_bytes(other).view(-1, width)).all(1)
            same = same if len(same) == len(x) else same.repeat_interleave(2)  # a complex number is two
        distance = torch.where(same, 0.0, (x - y).abs())
        count += int((~same).sum())
        top = float(distance.max()) if len(distance) else 0.0
        largest = math.nan if math.isnan(top) or math.isnan(largest) else max(largest, top)
        total += float(distance.sum())
        dot, square_a, square_b = dot + float(x @ y), square_a + float(x @ x), square_b + float(y @ y)
    length = math.sqrt(square_a) * math.sqrt(square_b)
    elements = math.prod(a.info.shape)
    return count, largest, total / elements if elements else 0.0, dot / length if length > 0 else None


def _paired(a: LazyTensor, b: LazyTensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield equally long pieces of two tensors with as many elements, in row-major order."""
    left, right = pieces(a), pieces(b)
    one = other = torch.empty(0)
    while True:
        if not one.numel():
            one = next(left, one)
        if not other.numel():
            other = next(right, other)
        length = min(one.numel(), other.numel())
        if not length:
            return
        yield one[:length], other[:length]
        one, other = one[length:], other[length:]
