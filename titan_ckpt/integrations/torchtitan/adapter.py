"""torchtitan's state-dict adapter as a key map: found by running it on index tensors, and proved on every element.

An adapter is code that turns a state dict into another. It runs here on one layer at a time, on tensors that hold the
position of each element, so the table is what the adapter does and not what its names suggest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from titan_ckpt.errors import KeyMapError, listed
from titan_ckpt.geometry.chunks import Shape
from titan_ckpt.geometry.keymap import (
    IDENTITY,
    Chain,
    Concat,
    KeyMap,
    KeyRule,
    PermuteRotary,
    PermuteRows,
    Split,
    TensorOp,
    Tie,
    Transpose,
    Unstack,
)
from titan_ckpt.models.hf_keys import makes
from titan_ckpt.weights.own_state import HookedSubtree

_Probes = Sequence[Mapping[str, torch.Tensor]]
"""Name -> tensor: which tensor an element comes from, then its position in each dim. All but the first are of one use:
together they say where every element of a file tensor comes from."""


def find_key_map(
    adapter: Any, shapes: Mapping[str, Shape], tied: Mapping[str, str], buffers: Collection[str] = ()
) -> KeyMap:
    """Return the table between the names of a model's state dict and the adapter's Hugging Face names.

    `tied`: alias -> name in `shapes` of the same tensor. `buffers`: names that the adapter may drop, and that are
    nameless in the table then; exports leave the others in float32, as transformers holds DeepSeek-V3's expert bias.
    Reads no values; memory is that of a layer's largest tensor.
    Raises: KeyMapError listing each parameter that is empty or that the adapter drops, and each name that it arranges
    in a way that is no permutation or split.
    """
    rules: list[KeyRule] = []
    empty = {fqn: list(shape) for fqn, shape in shapes.items() if 0 in shape}
    problems = [f"{fqn}: its shape is {shape}, which has no elements" for fqn, shape in empty.items()]
    nameless: set[str] = set()
    for layer in () if empty else _layers(shapes).values():
        probes = _probes({fqn: shapes[fqn] for fqn in layer})
        made = [_call(adapter, "to_hf", probe) for probe in probes]
        if differing := {key for other in made for key in other.keys() ^ made[0].keys()}:
            raise KeyMapError(
                f"{name_of(adapter)}.to_hf() returns other keys at each call: {listed(sorted(differing))}"
            )
        groups, dropped = _groups(layer, made[0])
        nameless.update(fqn for fqn in dropped if fqn in buffers)
        problems += [f"{fqn}: the adapter's to_hf() drops it" for fqn in dropped if fqn not in buffers]
        for fqns, keys in groups:
            op = _operation([shapes[fqn] for fqn in fqns], fqns, keys, probes, made)
            if op is None:
                problems.append(f"{', '.join(fqns)}: to_hf() makes {listed(keys, ', ', ' ')} of it in a way that is no "
                                "permutation of rows, split or stack")  # fmt: skip
            else:
                rules.append(_with_aliases(fqns, keys, op, tied))
    if problems:
        raise KeyMapError(
            f"{name_of(adapter)}: {len(problems)} problem(s)\n  " + "\n  ".join(problems),
            problems,
        )
    kept = frozenset(shapes.keys() & set(buffers))
    return KeyMap(
        tuple(rules), nameless=frozenset(nameless), float32=dict.fromkeys((torch.float16, torch.bfloat16), kept)
    )


def name_of(adapter: Any) -> str:
    """Return the class of an adapter, also of one that stands behind another."""
    while hasattr(adapter, "inner"):
        adapter = adapter.inner
    return type(adapter).__name__


def check_reads(adapter: Any, shapes: Mapping[str, Shape], tied: Mapping[str, str]) -> None:
    """Call the adapter's from_hf() on tensors without values, for what it checks before torchtitan would load a folder.

    `shapes`, `tied`: as for `find_key_map`. Raises: KeyMapError with what from_hf() raised, or does not bring back.
    """
    whole = {fqn: torch.empty(shape, device="meta") for fqn, shape in shapes.items()}
    back = {fqn: tuple(v.shape) for fqn, v in _call(adapter, "from_hf", _call(adapter, "to_hf", whole)).items()}
    wrong = [fqn for fqn, shape in shapes.items() if back.get(fqn) != tuple(shape)]
    wrong += [fqn for fqn in back if fqn not in shapes and fqn not in tied]
    if wrong:
        raise KeyMapError(f"{name_of(adapter)}: from_hf() does not give back what to_hf() took: {listed(wrong)}", wrong)


def _call(adapter: Any, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Call a method of the adapter, which may be the user's code.

    Raises: KeyMapError with what it raised, or gave back that is no state dict of tensors.
    """
    where = f"{name_of(adapter)}.{name}()"
    try:
        made: dict[str, Any] = getattr(adapter, name)(dict(values))
    except Exception as error:
        raise KeyMapError(
            f"{where} does not take this model: {type(error).__name__}: {error}; it was given {listed([*values])}"
        ) from error
    if not isinstance(made, dict):
        raise KeyMapError(f"{where} returns {type(made).__name__}, expected a dict of tensors")
    if others := [key for key, value in made.items() if not isinstance(value, torch.Tensor)]:
        raise KeyMapError(f"{where} returns no tensor as {listed(others)}")
    return made


def with_stored_forms(
    key_map: KeyMap, adapter: Any, subtrees: Sequence[HookedSubtree], fqns: Collection[str]
) -> KeyMap:
    """Return the table with rules for parameters that the model's own state_dict() stores in another form.

    `fqns`: parameters that have adapters, which have the form of the parameter. `subtrees`: of the model's state.
    Raises: KeyMapError.
    """
    rules = list(key_map.rules)
    for subtree in subtrees:
        shapes = {fqn: tuple(value.shape) for fqn, value in subtree.hidden.items() if fqn in fqns}
        if shapes:
            rules += find_key_map(_Stored(adapter, subtree), shapes, {}).rules
    return replace(key_map, rules=tuple(rules))


class _Stored:
    """An adapter behind the model's own state_dict()."""

    def __init__(self, adapter: Any, subtree: HookedSubtree) -> None:
        self.inner, self._subtree = adapter, subtree

    def to_hf(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the file tensors that are made of these values of hidden parameters."""
        made = self._subtree.with_values(values).made
        dtypes = {value.dtype for value in values.values()}  # other hidden parameters keep their values and dtype
        result: dict[str, torch.Tensor] = self.inner.to_hf({n: v for n, v in made.items() if v.dtype in dtypes})
        return result


def _with_aliases(fqns: Sequence[str], keys: Sequence[str], op: TensorOp, tied: Mapping[str, str]) -> KeyRule:
    aliases = [alias for alias, fqn in tied.items() if [fqn] == [*fqns]]
    if aliases and op == IDENTITY:
        return KeyRule.of([*fqns, *aliases], keys, Tie(1 + len(aliases)))
    return KeyRule.of(fqns, keys, op)


def _layers(shapes: Mapping[str, Shape]) -> dict[str, list[str]]:
    """Return the names of each layer, by the first number in them; names without a number are alone."""
    layers: dict[str, list[str]] = {}
    for fqn in shapes:
        number = next((part for part in fqn.split(".") if part.isdecimal()), None)
        layers.setdefault(fqn if number is None else number, []).append(fqn)
    return layers


def _probes(shapes: Mapping[str, Shape]) -> list[dict[str, torch.Tensor]]:
    """Return tensors of these shapes that take no memory: each has one value, or one per index of a dim."""
    origin = {fqn: torch.tensor(i, dtype=torch.int32).expand(shape) for i, (fqn, shape) in enumerate(shapes.items())}
    dims = range(max(1, *map(len, shapes.values())))
    return [origin, *({fqn: _index(shape, dim) for fqn, shape in shapes.items()} for dim in dims)]


def _index(shape: Shape, dim: int) -> torch.Tensor:
    """Return the position of each element in `dim`; zeros if the shape does not have it."""
    if dim >= len(shape):
        return torch.zeros((), dtype=torch.int32).expand(shape)
    sizes = [-1 if d == dim else 1 for d in range(len(shape))]
    return torch.arange(shape[dim], dtype=torch.int32).view(sizes).expand(shape)


def _groups(
    layer: Sequence[str], made: Mapping[str, torch.Tensor]
) -> tuple[list[tuple[list[str], list[str]]], list[str]]:
    """Return the names and the keys that share elements, and the names of which no key has any."""
    groups: list[tuple[list[str], list[str]]] = []
    for key, value in made.items():
        low, high = value.aminmax()
        origins = [int(low)] if low == high else value.unique().tolist()  # sorting a large tensor takes long
        fqns = [layer[i] for i in origins]
        same = [group for group in groups if set(group[0]) & set(fqns)]
        for group in same:
            groups.remove(group)
        names = {fqn for group in same for fqn in group[0]} | {*fqns}
        groups.append(([fqn for fqn in layer if fqn in names], [k for group in same for k in group[1]] + [key]))
    found = {fqn for fqns, _ in groups for fqn in fqns}
    return groups, [fqn for fqn in layer if fqn not in found]


def _operation(
    shapes: Sequence[Shape], fqns: Sequence[str], keys: Sequence[str], probes: _Probes, made: _Probes
) -> TensorOp | None:
    """Return the operation that arranges every element as the adapter does; None if there is none."""
    pairs = [([p[f] for f in fqns], [m[k] for k in keys]) for p, m in zip(probes, made, strict=True)]
    for op in _candidates(shapes, [made[1][key] for key in keys]):
        if all((op == IDENTITY and natives[0] is wanted[0]) or makes(op, natives, wanted) for natives, wanted in pairs):
            return op
    return None


def _candidates(shapes: Sequence[Shape], rows: Sequence[torch.Tensor]) -> Iterator[TensorOp]:
    """Yield the operations to try. `rows`: the file tensors, holding the first index of each element's origin."""
    if len(shapes) > 1:
        if len(rows) == 1 and all(shapes):
            yield Concat(tuple(shape[0] for shape in shapes))
        return
    if len(rows) > 1:
        if all(row.dim() for row in rows):
            parts = Split(tuple(row.shape[0] for row in rows))
            yield parts
            order = [first for row in rows for first in _first_of_rows(row)]
            if sorted(order) == list(range(len(order))):
                yield Chain(PermuteRows(tuple(order)), parts)
        yield Unstack(len(rows))
        yield Unstack(len(rows), transpose=True)
        return
    yield IDENTITY
    yield Transpose()
    if rows[0].dim() and rows[0].numel():
        order = _first_of_rows(rows[0])
        if 1 in order and (heads := len(order) // (2 * order.index(1))):
            yield PermuteRotary(heads)
        if sorted(order) == list(range(len(order))):
            yield PermuteRows(tuple(order))


def _first_of_rows(rows: torch.Tensor) -> list[int]:
    return [int(row) for row in rows.reshape(len(rows), -1)[:, 0]] if rows.numel() else []
