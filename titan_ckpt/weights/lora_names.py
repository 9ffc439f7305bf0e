"""LoRA's tensors in this package's own checkpoints: their names, and the settings that a manifest records of them.

Owns both for the converter that adds the tensors (converters/lora) and for loads that merge them without a converter.
Computes nothing and reads no file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Self, TypeVar

from torch import nn

KIND = "lora"
"""`kind` of the converter in a manifest."""
PARTS = "titan_ckpt_parts"
"""Record beside adapter_config.json: module -> the ranks of the blocks of its pair, if the pair is block diagonal."""
A, B, MAGNITUDE, COPY = "lora_a", "lora_b", "lora_magnitude", "trained"
_OF_MODULE = re.compile(rf"(?P<module>.+)\.(?P<role>{A}|{B}|{MAGNITUDE})\.weight")
_OF_STACK = re.compile(rf"(?P<module>.+)\.lora_(?P<parameter>[^.]+)\.(?P<role>{A}|{B})")
_OF_COPY = re.compile(rf"(?P<module>.+)\.{COPY}\.(?P<parameter>[^.]+)")
_WILD = frozenset("*?[")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class LoRATensor:
    """A tensor's part in an adapter, as its name says it."""

    role: str
    """A, B, MAGNITUDE or COPY."""
    site: str
    """The adapted part, as patterns name it: a module, or a parameter of stacked experts."""
    weight: str
    """The tensor of the base that it changes."""


def lora_tensor(name: str) -> LoRATensor | None:
    """Return the part of a tensor in an adapter; None for a name that LoRA does not give."""
    if match := _OF_MODULE.fullmatch(name):
        return LoRATensor(match["role"], match["module"], f"{match['module']}.weight")
    if match := _OF_STACK.fullmatch(name):
        site = f"{match['module']}.{match['parameter']}"
        return LoRATensor(match["role"], site, site)
    if match := _OF_COPY.fullmatch(name):
        return LoRATensor(COPY, match["module"], f"{match['module']}.{match['parameter']}")
    return None


def lora_name(role: str, site: str, *, stack: bool) -> str:
    """Return the name of a tensor of the adapter on a module, or on a parameter of stacked experts."""
    if not stack:
        return f"{site}.{role}.weight"
    module, _, parameter = site.rpartition(".")
    return f"{module}.lora_{parameter}.{role}"


def is_conv1d(module: nn.Module | None) -> bool:
    """Return whether this is GPT-2's linear module, or a sharded form of it, whose weight is (in, out).

    It is found by name, because transformers is optional.
    """
    return any((c.__module__, c.__name__) == ("transformers.pytorch_utils", "Conv1D") for c in type(module).__mro__)


def matches(fqn: str, target: str) -> bool:
    """Return whether `target` selects the module: a pattern must match its full name, other text a dotted suffix."""
    if _WILD.intersection(target):
        return fnmatchcase(fqn, target)
    return fqn == target or fqn.endswith(f".{target}")


def from_patterns(fqn: str, patterns: Mapping[str, Value], default: Value) -> Value:
    """Return a module's value: that of the first name or pattern which selects it, else the default."""
    return next((value for name, value in patterns.items() if matches(fqn, name)), default)


def scale(rank: int, alpha: float, *, use_rslora: bool) -> float:
    """Return the factor of an adapter's product."""
    return alpha / (math.sqrt(rank) if use_rslora else rank)


@dataclass(frozen=True, slots=True)
class LoRARecord:
    """The settings in a manifest that decide what an adapter's tensors mean."""

    rank: int
    alpha: float
    use_rslora: bool
    use_dora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    @classmethod
    def of(cls, description: Mapping[str, Any]) -> Self:
        """Read a converter's description. Raises: ValueError naming a setting that is missing or has a wrong type."""
        values: dict[str, Any] = {name: description.get(name) for name in cls.__slots__}
        if faults := list(_faults(values)):
            raise ValueError("; ".join(faults))
        return cls(**values)

    def rank_of(self, site: str) -> int:
        return from_patterns(site, self.rank_pattern, self.rank)

    def scaling_of(self, site: str) -> float:
        """Return the factor by which the adapter's product on this site is multiplied."""
        alpha = from_patterns(site, self.alpha_pattern, self.alpha)
        return scale(self.rank_of(site), alpha, use_rslora=self.use_rslora)


def _faults(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each setting that no run would have recorded."""
    numbers = {name: values[name] for name in ("rank", "alpha")}
    for name in ("rank_pattern", "alpha_pattern"):
        if isinstance(table := values[name], Mapping):
            numbers |= {f"{name}.{pattern}": value for pattern, value in table.items()}
        else:
            yield f"{name} is {table!r:.80}, expected a table"
    for name, number in numbers.items():
        kinds, expected = ((int,), "integer") if name.startswith("rank") else ((int, float), "number")
        if type(number) not in kinds or not 0 < number < math.inf:
            yield f"{name} is {number!r:.80}, expected a positive {expected}"
    for name in ("use_rslora", "use_dora"):
        if not isinstance(values[name], bool):
            yield f"{name} is {values[name]!r:.80}, expected true or false"
