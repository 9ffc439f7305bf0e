"""torchtitan's state-dict adapter as a key map: found by running it on index tensors, and proved on every element.

An adapter is code that turns a state dict into another. It runs here on one layer at a time, on tensors that hold the
position of each element, so the table is what the adapter does and not what its names suggest. A layer of which it
computes the same as of an earlier one, operation by operation, is arranged as that one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from titan_ckpt.errors import KeyMapError, listed
from titan_ckpt.geometry import keymap
from titan_ckpt.geometry.chunks import Shape
from titan_ckpt.geometry.keymap import IDENTITY, KeyMap, KeyRule, TensorOp
from titan_ckpt.models.hf_keys import makes, unrepeated
from titan_ckpt.weights.own_state import HookedSubtree


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
    known: dict[tuple[Shape, ...], dict[tuple[object, ...], _Arrangement]] = {}
    for fqns in () if empty else _layers(shapes).values():
        of_layer = {fqn: shapes[fqn] for fqn in fqns}
        alike = known.setdefault((*of_layer.values(),), {})
        # after a call on values, or what the adapter keeps for its later calls would be without values
        steps, keys = _traced(adapter, of_layer) if alike else ((), [])
        arrangement = alike.get(steps)
        if arrangement is None:
            arrangement, keys = _arrangement(adapter, of_layer)
            steps, traced = _traced(adapter, of_layer)
            if traced == keys:
                alike[steps] = arrangement
        dropped = [fqns[i] for i in arrangement.dropped]
        nameless.update(fqn for fqn in dropped if fqn in buffers)
        problems += [f"{fqn}: the adapter's to_hf() drops it" for fqn in dropped if fqn not in buffers]
        for natives, made, op in arrangement.groups:
            names, files = [fqns[i] for i in natives], [keys[i] for i in made]
            if op is None:
                problems.append(f"{', '.join(names)}: to_hf() makes {listed(files, ', ', ' ')} of it in a way that is "
                                "no permutation of rows, split or stack")  # fmt: skip
            else:
                aliases = [alias for alias, fqn in tied.items() if [fqn] == names and op == IDENTITY]
                rules.append(KeyRule.of([*names, *aliases], files, keymap.Tie(1 + len(aliases)) if aliases else op))
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
    if others := [key for key, value in made.items() if not isinstance(value, torch.Tensor) or not value.numel()]:
        raise KeyMapError(f"{where} returns no tensor, or an empty one, as {listed(others)}")
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


def _layers(shapes: Mapping[str, Shape]) -> dict[str, list[str]]:
    """Return the names of each layer, by the first number in them; names without a number are alone."""
    layers: dict[str, list[str]] = {}
    for fqn in shapes:
        number = next((part for part in fqn.split(".") if part.isdecimal()), None)
        layers.setdefault(fqn if number is None else number, []).append(fqn)
    return layers


class _Arrangement(NamedTuple):
    """Says what an adapter makes of a layer, by the positions of the parameters and of the keys that it returns."""

    groups: list[tuple[list[int], list[int], TensorOp | None]]
    """Parameters and keys that share elements; the operation is None if there is none that arranges them so."""
    dropped: list[int]
    """Parameters of which no key has any element."""


def _traced(adapter: Any, shapes: Mapping[str, Shape]) -> tuple[tuple[object, ...], list[str]]:
    """Return every operation of to_hf() on parameters of these shapes, and the keys that it returns; computes nothing.

    The operations are equal for two layers only if the same is computed of their parameters, in the same order. They
    are equal to no others if they depend on values, or take a tensor that is neither a parameter nor made of these: no
    keys are returned then.
    """
    fakes = FakeTensorMode()
    values = {fqn: fakes.from_tensor(value) for fqn, value in _probes(shapes)[0].items()}
    with fakes, _Recorder(values.values()) as recorder:
        try:
            made = _call(adapter, "to_hf", values)
        except KeyMapError:  # raised again on values, if they are not what it lacks
            return (object(),), []
    results = [recorder.name(value) for value in made.values()]
    return (*recorder.steps, *results), [] if object in map(type, recorder.steps) else [*made]


class _Recorder(TorchDispatchMode):
    """Records the operations of torch, with tensors by their numbers: those of the beginning, and those made since."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[object] = []
        self._kept: list[torch.Tensor] = []  # an id is that of another object if its own one is gone
        self._numbers: dict[tuple[int, ...], int] = {}
        self._add(tensors)

    def _add(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                self._numbers[_identity(value)] = len(self._kept)
                self._kept.append(value)

    def name(self, tensor: torch.Tensor) -> str:
        """Return a tensor's number. With one from elsewhere, whose values are unknown, the steps equal no others."""
        number = self._numbers.get(_identity(tensor))
        if number is None:
            self.steps.append(object())
        return f"tensor {number}"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        taken = repr(tree_map_only(torch.Tensor, self.name, (args, kwargs)))
        try:
            made = func(*args, **(kwargs or {}))
        except Exception:
            self.steps.append(object())  # the adapter may catch it
            raise
        self._add(tree_leaves(made))
        self.steps.append((func, taken))
        return made


def _identity(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return what makes a tensor this one; to assign its `data` is no operation and changes the rest alone."""
    storage = tensor.untyped_storage()._cdata  # noqa: SLF001 - torch has no public name for it
    return id(tensor), storage, tensor.storage_offset(), *tensor.stride()


def _arrangement(adapter: Any, shapes: Mapping[str, Shape]) -> tuple[_Arrangement, list[str]]:
    """Return how to_hf() arranges each element of parameters of these shapes, and its keys. Raises: KeyMapError."""
    fqns, probes = [*shapes], _probes(shapes)
    made = [_call(adapter, "to_hf", probe) for probe in probes]
    if differing := {key for other in made for key in other.keys() ^ made[0].keys()}:
        raise KeyMapError(f"{name_of(adapter)}.to_hf() returns other keys at each call: {listed(sorted(differing))}")
    keys = [*made[0]]
    groups: list[tuple[set[int], list[int]]] = []
    for number, value in enumerate(made[0].values()):
        (once,) = unrepeated(value)
        low, high = once.aminmax()
        there = {low.item()} if low == high else {*once.unique().tolist()}  # sorting a large tensor takes long
        every = range(len(fqns))
        origins = {*every} if there - {*every} else {i for i in every if i in there}  # others are computed, of whatever
        same = [group for group in groups if group[0] & origins]
        groups = [group for group in groups if group not in same]
        groups.append((origins.union(*(o for o, _ in same)), [n for _, found in same for n in found] + [number]))
    arranged: list[tuple[list[int], list[int], TensorOp | None]] = []
    for origins, found in groups:
        natives = [[probe[fqns[i]] for i in sorted(origins)] for probe in probes]
        wanted = [[values[keys[i]] for i in found] for values in made]
        candidates = _candidates([tuple(native.shape) for native in natives[0]], wanted[1])
        op = next((op for op in candidates if all(map(makes, [op] * len(wanted), natives, wanted))), None)
        arranged.append((sorted(origins), found, op))
    for probe in _digits(shapes) if any(value.dtype.itemsize < 4 for value in made[0].values()) else ():
        values = _call(adapter, "to_hf", probe)
        for number, (taken, found, op) in enumerate(arranged):
            if op and not makes(op, [probe[fqns[i]] for i in taken], [values[keys[i]] for i in found]):
                arranged[number] = taken, found, None
    return _Arrangement(arranged, [i for i in range(len(fqns)) if not any(i in o for o, _ in groups)]), keys


def _probes(shapes: Mapping[str, Shape]) -> list[dict[str, torch.Tensor]]:
    """Return tensors of these shapes that take no memory: each has one value, or one per index of a dim.

    The first say which tensor an element comes from, the others its position in each dim. All but the first are of one
    use: together they say where every element of a file tensor comes from.
    """
    origin = {fqn: torch.tensor(i, dtype=torch.int32).expand(shape) for i, (fqn, shape) in enumerate(shapes.items())}
    dims = range(max(1, *map(len, shapes.values())))
    return [origin, *({fqn: _index(shape, dim) for fqn, shape in shapes.items()} for dim in dims)]


def _digits(shapes: Mapping[str, Shape]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield further probes for an adapter that makes a small dtype, which rounds positions.

    They are the last two digits of each position to the base 256; rounded positions differ in one of these, or by more.
    """
    for dim in range(max(map(len, shapes.values()))):
        for unit in (1, 256):
            yield {fqn: _index(shape, dim, unit) for fqn, shape in shapes.items()}


def _index(shape: Shape, dim: int, unit: int | None = None) -> torch.Tensor:
    """Return the position of each element in `dim`, or its digit of this unit; zeros if the shape does not have it."""
    if dim >= len(shape):
        return torch.zeros((), dtype=torch.int32).expand(shape)
    sizes = [-1 if d == dim else 1 for d in range(len(shape))]
    places = torch.arange(shape[dim], dtype=torch.int32)
    return (places if unit is None else places // unit % 256).view(sizes).expand(shape)


def _candidates(shapes: Sequence[Shape], rows: Sequence[torch.Tensor]) -> Iterator[TensorOp]:
    """Yield the operations to try. `rows`: the file tensors, holding the first index of each element's origin."""
    if len(shapes) > 1:
        if len(rows) == 1 and all(shapes):
            yield keymap.Concat(tuple(shape[0] for shape in shapes))
        return
    every: Any = ...
    # where the first element of each row comes from, in the dtype that the adapter makes; a number has no rows
    order: list[float] = [n for row in rows for n in row[(every, *[0] * (row.dim() - 1))].flatten().tolist()]
    sizes = tuple(row.shape[0] for row in rows if row.dim())
    moved = [keymap.PermuteRows((*map(int, order),))] if sizes and sorted(order) == list(range(len(order))) else []
    if len(rows) == 1:
        yield IDENTITY
        yield keymap.Transpose()
        if 1 in order[1:] and (heads := len(order) // (2 * order.index(1, 1))):
            yield keymap.PermuteRotary(heads)
        yield from moved
        return
    if len(sizes) == len(rows):
        yield keymap.Split(sizes)
        yield from (keymap.Chain(op, keymap.Split(sizes)) for op in moved)
    yield keymap.Unstack(len(rows))
    yield keymap.Unstack(len(rows), transpose=True)


_CODES = "_blocks"
_RENAMED = {
    "mlp1_weight_EGD": "mlp1_weight", "mlp1_bias_EG": "mlp1_bias", "mlp2_weight_EDF": "mlp2_weight",
    "mlp2_bias_ED": "mlp2_bias",
}  # fmt: skip
"""Last part of a parameter's name -> as the adapter has it."""


def with_experts(adapter: Any) -> Any:
    """Return an adapter that has all of gpt_oss; any other adapter as it is."""
    keys = getattr(adapter, "from_hf_map", {})
    return _GptOss(adapter) if any(key.endswith(f"experts.gate_up_proj{_CODES}") for key in keys) else adapter


class _GptOss:
    """torchtitan's adapter of gpt_oss, with the experts that torchtitan 0.3's own one loses.

    torchtitan 0.3 renamed their parameters and not the adapter, so its to_hf() drops them, and its own load leaves them
    at their initial values. Its keys are those of MXFP4 codes; a folder that transformers writes, and a reader of
    codes, have each expert's matrix transposed and under a shorter key.
    Source: torchtitan 0.3, models/gpt_oss/state_dict_adapter.py; transformers, models/gpt_oss/modeling_gpt_oss.py.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        known = {name.rpartition(".")[2] for name in inner.from_hf_map.values()}
        self._old = {new: old for new, old in _RENAMED.items() if old in known}
        self._new = {old: new for new, old in self._old.items()}

    def to_hf(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors as folders hold them."""
        made: dict[str, Any] = self.inner.to_hf({_renamed(name, self._old): v for name, v in values.items()})
        return {k.removesuffix(_CODES): v.transpose(-1, -2) if k.endswith(_CODES) else v for k, v in made.items()}

    def from_hf(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors as the model holds them."""
        coded = {key.rpartition(".")[2].removesuffix(_CODES) for key in self.inner.from_hf_map if key.endswith(_CODES)}
        turned = {k: k.rpartition(".")[2] in coded for k in values}
        taken = {k + _CODES if turned[k] else k: v.transpose(-1, -2) if turned[k] else v for k, v in values.items()}
        made: dict[str, Any] = self.inner.from_hf(taken)
        return {_renamed(name, self._new): v for name, v in made.items()}


def _renamed(name: str, names: Mapping[str, str]) -> str:
    before, _, last = name.rpartition(".")
    return f"{before}.{names[last]}" if last in names else name
