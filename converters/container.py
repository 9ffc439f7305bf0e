"""ModelConvertersContainer: several converters as one, in a checked order, with one owner per key.

Owns the rules of combination. Knows no particular converter.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from titan_ckpt.converters.parallel import converted_plan
from titan_ckpt.errors import ConverterError, listed
from titan_ckpt.geometry.chunks import TensorInfo
from titan_ckpt.geometry.keymap import KeyMap
from titan_ckpt.types import ModelConverter, StateDict, StateDictAdapter
from titan_ckpt.weights.names import clean_fqn
from titan_ckpt.weights.quantize import WeightQuantizer

logger = logging.getLogger(__name__)


class ModelConvertersContainer(ModelConverter):
    """Converters in the order in which they are applied, as one converter. It has no settings of its own.

    Raises: ConverterError listing every broken rule of combination.
    """

    def __init__(self, converters: Sequence[ModelConverter] = ()) -> None:
        problems = [*_order_problems(converters), *_duplicates(converters), *_adapters_without_filter(converters)]
        if problems:
            raise ConverterError("these converters cannot be combined\n  " + "\n  ".join(problems))
        self._converters = tuple(converters)

    def __iter__(self) -> Iterator[ModelConverter]:
        return iter(self._converters)

    def __len__(self) -> int:
        return len(self._converters)

    def convert(self, model: nn.Module) -> None:
        """Apply every converter in place, in order, and check after each that it kept the laws of ModelConverter.

        Raises: ConverterError from a converter, or naming the converter that dropped keys, did not claim a key that it
            added, or claims a key that it did not add.
        """
        replaced: dict[str, str] = {}
        for converter in self._converters:
            keys, types = _keys(model), _types(model)
            converter.convert(model)
            self._check_keys(converter, keys, _keys(model))
            if converter.stage == "replace":
                _check_replacements(converter, replaced, types, _types(model))
        logger.info("model converters: %s", ", ".join(c.kind for c in self._converters) or "none")

    def key_filter(self, fqn: str) -> bool:
        """Return whether any converter owns the key."""
        return any(converter.key_filter(fqn) for converter in self._converters)

    def state_dict_transform(self, state_dict: StateDict, last_step: bool) -> StateDict:
        """Apply the converters' transforms, the last converter's first."""
        result = dict(state_dict)
        for converter in reversed(self._converters):
            result = converter.state_dict_transform(result, last_step)
        return result

    def state_dict_adapter(self) -> StateDictAdapter | None:
        """Return the adapter that names all owned keys in files; None if no converter has one."""
        adapters = [a for a in (converter.state_dict_adapter() for converter in self._converters) if a is not None]
        if len(adapters) > 1:
            return _JoinedAdapters(adapters)
        return adapters[0] if adapters else None

    def weight_quantizer(self) -> WeightQuantizer | None:
        """Return the scheme of quantized weights, or None. Raises: ConverterError if two converters have one."""
        quantizers = {c.kind: quantizer for c in self._converters if (quantizer := c.weight_quantizer()) is not None}
        if len(quantizers) > 1:
            raise ConverterError(
                f"{' and '.join(quantizers)} both quantize weights, and one folder says how in one way"
            )
        return next(iter(quantizers.values()), None)

    def describe(self) -> list[dict[str, Any]]:
        """Return one JSON object per converter, in order."""
        return [description for converter in self._converters for description in converter.describe()]

    def initialize(self, model_parts: Sequence[nn.Module], fqns: Collection[str] | None = None) -> None:
        """Set the added tensors among `fqns` (None: all) to their initial values."""
        for converter in self._converters:
            converter.initialize(model_parts, fqns)

    def parallel_plan(self, plan: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
        """Return the tensor-parallel plan adapted to the modules as these converters changed them."""
        return converted_plan(plan)

    def post_optimizer_hook(self, model_parts: Sequence[nn.Module]) -> None:
        """Run every converter's hook, in order."""
        for converter in self._converters:
            converter.post_optimizer_hook(model_parts)

    def _check_keys(self, converter: ModelConverter, before: set[str], after: set[str]) -> None:
        added = after - before
        problems = []
        if lost := sorted(before - after):
            problems.append(f"dropped or renamed {_listed(lost)}")
        if foreign := sorted(fqn for fqn in before if converter.key_filter(fqn)):
            problems.append(f"claims keys that it did not add: {_listed(foreign)}")
        if hidden := sorted(fqn for fqn in added if not converter.key_filter(fqn)):
            problems.append(f"added keys that it does not claim: {_listed(hidden)}")
        others = [other for other in self._converters if other is not converter]
        if shared := sorted(fqn for fqn in added if any(other.key_filter(fqn) for other in others)):
            problems.append(f"added keys that another converter claims too: {_listed(shared)}")
        if problems:
            raise ConverterError(f"converter {converter.kind!r} " + "; it ".join(problems))


class _JoinedAdapters:
    """Several adapters' tables as one. Another tool's folder holds one adapter, so this has no file config."""

    def __init__(self, adapters: Sequence[StateDictAdapter]) -> None:
        self._adapters = adapters

    def key_map(self, base: KeyMap, found: Mapping[str, TensorInfo] | None = None) -> KeyMap:
        tables = [adapter.key_map(base, found) for adapter in self._adapters]
        return KeyMap(tuple(rule for table in tables for rule in table.rules), any(table.identity for table in tables))

    def misfits(self, base: KeyMap, found: Mapping[str, Any]) -> list[str]:
        # the folder holds one adapter, so it fits if it fits any of them
        return min((adapter.misfits(base, found) for adapter in self._adapters), key=len)

    def file_config(self, base: KeyMap) -> dict[str, Any]:
        raise ConverterError(
            f"{len(self._adapters)} converters own keys, and one adapter folder describes one: export them one by one"
        )


def _order_problems(converters: Sequence[ModelConverter]) -> list[str]:
    right = sorted(converters, key=lambda c: c.stage == "adapt")
    if [c.stage for c in right] == [c.stage for c in converters]:
        return []
    given, wanted = (", ".join(c.kind for c in some) for some in (converters, right))
    why = "a converter that replaces modules drops what others have attached to them"
    return [f"order {given}: {why}. Write them in this order: {wanted}"]


def _duplicates(converters: Sequence[ModelConverter]) -> list[str]:
    kinds = [c.kind for c in converters]
    twice = sorted({kind for kind in kinds if kinds.count(kind) > 1})
    return [f"{kind!r} appears {kinds.count(kind)} times: give it once" for kind in twice]


def _adapters_without_filter(converters: Sequence[ModelConverter]) -> list[str]:
    return [
        f"{c.kind!r} has a state_dict_adapter and no key_filter: without the filter nothing says which keys it names"
        for c in converters
        if type(c).state_dict_adapter is not ModelConverter.state_dict_adapter
        and type(c).key_filter is ModelConverter.key_filter
    ]


def _keys(model: nn.Module) -> set[str]:
    return {clean_fqn(name) for name in model.state_dict()}


def _types(model: nn.Module) -> dict[str, type[nn.Module]]:
    return {clean_fqn(name): type(module) for name, module in model.named_modules()}


def _check_replacements(
    converter: ModelConverter,
    replaced: dict[str, str],
    before: dict[str, type[nn.Module]],
    after: dict[str, type[nn.Module]],
) -> None:
    """Record in `replaced` which converter replaced which module.

    Raises: ConverterError if a module is replaced twice: the second replacement would silently undo the first.
    """
    changed = [name for name, kind in before.items() if after.get(name) is not kind]
    if twice := [name for name in changed if name in replaced]:
        raise ConverterError(
            f"converter {converter.kind!r} replaces what {replaced[twice[0]]!r} has replaced: {_listed(twice)}. "
            "Use one of them, or exclude these modules from one"
        )
    replaced.update(dict.fromkeys(changed, converter.kind))


def _listed(names: Sequence[str]) -> str:
    return listed(names, ", ", " ", most=4)
