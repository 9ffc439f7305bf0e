"""The names of a model in a native or DCP folder: nested, torchtitan's own, or twice for a tied tensor.

Owns which stored tensor is which of the model. Reads no value but those of tensors that a folder has twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from titan_ckpt.components.files import model_tensors
from titan_ckpt.errors import LoadMismatchError
from titan_ckpt.geometry.chunks import TensorInfo, blocks_of
from titan_ckpt.geometry.keymap import selected
from titan_ckpt.geometry.requests import ReadRequest, TensorReader
from titan_ckpt.types import StateDict


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
        prefix, available = model_tensors(reader.tensors, reader.format, names, prefix)
        theirs = theirs if _count(available, (n[0] for n in theirs.values())) > _count(available, wanted) else {}
        own = {name: fqn for fqn, names in theirs.items() for name in names[:1]}
        repeats = {name: fqn for fqn, names in theirs.items() for name in names[1:]} | dict(tied)
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
        once |= {alias: available[alias] for alias, _ in differing}  # of another model: listed with all that differs
        return found

    def there(self, requests: Sequence[ReadRequest]) -> list[ReadRequest]:
        """Return the requests by the names in the folder."""
        return [ReadRequest(self._key(key), chunk, into) for key, chunk, into in requests]

    def _key(self, name: str) -> str:
        return self._prefix + self._theirs.get(name, (name,))[0]

    def _is_one(self, reader: TensorReader, alias: str, fqn: str, live: torch.Tensor) -> bool:
        """Return whether the folder has the same values under both names, as far as this rank holds the live tensor."""
        first, second = reader.tensors.get(self._key(fqn)), reader.tensors[self._prefix + alias]
        if first != second or second.shape != tuple(live.shape):
            return False
        for block in blocks_of(live):
            parts = [torch.empty(block.chunk.sizes, dtype=second.dtype) for _ in range(2)]
            keys = (self._key(fqn), self._prefix + alias)
            reader.read([ReadRequest(key, block.chunk, part) for key, part in zip(keys, parts, strict=True)])
            if not torch.equal(*parts):
                return False
        return True


def _count(available: Mapping[str, TensorInfo], names: Iterable[str]) -> int:
    return sum(name in available for name in names)
