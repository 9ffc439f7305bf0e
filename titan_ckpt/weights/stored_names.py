"""The names of a model in a native or DCP folder: nested, torchtitan's own, or twice for a tied tensor.

Owns which stored tensor is which of the model. Reads no value but those of tensors that a folder has twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from titan_ckpt.errors import LoadMismatchError, listed
from titan_ckpt.geometry.chunks import Block, TensorInfo, blocks_of
from titan_ckpt.geometry.keymap import selected
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.types import StateDict
from titan_ckpt.weights.live_memory import is_same

MODEL = "model."
"""Prefix of a model tensor's name."""
OTHER_COMPONENTS = ("optimizer.", "optim.", "lr_scheduler", "dataloader", "train_state", "states.")
"""Prefixes of the names that are not the model's, in checkpoints that keep the model at the top level."""


@dataclass(frozen=True, slots=True)
class StoredNames:
    """The tensors of a folder by native name, and the way back to its own names."""

    available: Mapping[str, TensorInfo]
    _prefix: str
    _theirs: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def find(
        cls,
        reader: TensorReader,
        wanted: StateDict,
        theirs: Mapping[str, Sequence[str]],
        tied: Mapping[str, str],
        prefix: str | None,
        ignore: Sequence[str] = (),
    ) -> StoredNames:
        """Find the names of the wanted tensors. Reads the tensors that the folder has twice, this rank's parts of them.

        `theirs`: native name -> torchtitan's names, taken if the folder has more of them. `tied`: alias -> name of the
        same tensor of the model. `prefix`, `ignore`: the prefix, and patterns of unused tensors, that settings name.
        Raises: LoadMismatchError for an ambiguous or unknown prefix, and for tied tensors that differ in the folder.
        """
        names = {*wanted, *(name for names in theirs.values() for name in names)}
        prefix, available = model_tensors(reader, names, prefix)
        theirs = theirs if _count(available, (n[0] for n in theirs.values())) > _count(available, wanted) else {}
        own = {name: fqn for fqn, names in theirs.items() for name in names[:1]}
        repeats = {name: fqn for fqn, names in theirs.items() for name in names[1:]} | dict(tied)
        if ignore:
            repeats = {name: repeats[name] for name in repeats.keys() - selected(repeats, ignore)}
        once = {own.get(k, k): info for k, info in available.items() if k not in repeats or k in wanted}
        found = cls(once, prefix, theirs)
        twice = [(alias, fqn) for alias, fqn in repeats.items() if alias in available and alias not in once]
        live = [pair for pair in twice if pair[1] in wanted]
        differing = [pair for pair in live if not found._is_one(reader, *pair, wanted[pair[1]])]
        if differing and once.keys() >= wanted.keys():
            raise LoadMismatchError(
                f"{reader.path}: {' and '.join(differing[0])} are one tensor in this model and differ there: untie "
                "them, take a checkpoint of a tied model, or name the one that is not used in "
                "checkpoint.initial_load.ignore"
            )
        once |= {alias: available[alias] for alias, _ in differing}  # another model's is listed with all that differs
        return found

    def to_file_names(self, requests: Sequence[Block]) -> list[Block]:
        """Return the requests by the names in the folder."""
        return [Block(chunk, into, self._key(key)) for chunk, into, key in requests]

    def _key(self, name: str) -> str:
        return self._prefix + self._theirs.get(name, (name,))[0]

    def _is_one(self, reader: TensorReader, alias: str, fqn: str, live: torch.Tensor) -> bool:
        """Return whether the folder has the same bits under both names, as far as this rank holds the live tensor."""
        first, second = reader.tensors.get(self._key(fqn)), reader.tensors[self._prefix + alias]
        if first != second or second.shape != tuple(live.shape):
            return False
        for block in blocks_of(live):
            parts = [torch.empty(block.chunk.sizes, dtype=second.dtype) for _ in range(2)]
            keys = (self._key(fqn), self._prefix + alias)
            reader.read([Block(block.chunk, part, key) for key, part in zip(keys, parts, strict=True)])
            if not is_same(*parts):
                return False
        return True


def model_tensors(
    reader: TensorReader, wanted: Collection[str] | None = None, prefix: str | None = None
) -> tuple[str, dict[str, TensorInfo]]:
    """Return the prefix of the model in a native or DCP checkpoint, and its tensors by name without the prefix.

    A DCP checkpoint may nest the model. `prefix` names the place; without it, the place with the most of the `wanted`
    names is taken, and the top level if that has as many; without `wanted`, `model.` if the top level has nothing else.
    Raises: LoadMismatchError for several places with as many of the names, and for a `prefix` that nothing has.
    Source of the names at the top: torchtitan, components/checkpoint.py, which flattens the model there.
    """
    stored = reader.tensors
    if reader.format == "native":
        prefix = MODEL
    elif prefix is None and wanted is not None:
        prefix = _find_prefix(stored, wanted)
    elif prefix is None:
        top = _under(stored, "")
        prefix = MODEL if len(_under(stored, MODEL)) == len(top) else ""
    elif prefix and not any(key.startswith(prefix) for key in stored):
        first = listed(sorted({key.partition(".")[0] + "." for key in stored}), ", ", " ")
        raise LoadMismatchError(f"no tensor has the prefix {prefix!r}; the names there begin with {first}")
    return prefix, _under(stored, prefix)


def _under(stored: Mapping[str, TensorInfo], prefix: str) -> dict[str, TensorInfo]:
    inside = {key.removeprefix(prefix): info for key, info in stored.items() if key.startswith(prefix)}
    return inside if prefix == MODEL else {k: info for k, info in inside.items() if not k.startswith(OTHER_COMPONENTS)}


def _find_prefix(stored: Mapping[str, TensorInfo], wanted: Collection[str]) -> str:
    found: Counter[str] = Counter()
    for key in stored:
        if key.startswith(OTHER_COMPONENTS):
            continue
        parts = key.split(".")
        names = (".".join(parts[start:]) for start in range(len(parts)))
        found.update(key.removesuffix(name) for name in names if name in wanted)
    most = max(found.values(), default=0)
    best = [prefix for prefix, count in found.items() if count == most]
    if not best or "" in best:
        return ""
    if len(best) > 1:
        raise LoadMismatchError(
            f"the model may be in {len(best)} places, each with {most} of its tensors: "
            f'{", ".join(sorted(best))}. Name one: checkpoint.initial_load.prefix = "{min(best)}"'
        )
    return best[0]


def _count(available: Mapping[str, TensorInfo], names: Iterable[str]) -> int:
    return sum(name in available for name in names)
