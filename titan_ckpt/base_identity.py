"""Which base an adapter was trained on: path, revision and a digest of the base weights as they are in memory.

Owns the identity and its comparison. The digest is logical: the same from a Hugging Face folder, a native checkpoint or
a DCP folder, under any sharding, as long as the values and dtypes in the model are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from titan_ckpt.digest import logical_digests
from titan_ckpt.distributed import Coordinator
from titan_ckpt.errors import BaseMismatchError
from titan_ckpt.model_wrapper import ModelWrapper
from titan_ckpt.plan import LoadSource

BaseIdentity = dict[str, Any]
"""{"path": str | None, "revision": str | None, "format": str | None, "digest": hex}; path is None for a base that was
initialised here and never loaded."""


def identify_base(
    model: ModelWrapper, sources: Sequence[LoadSource], recorded: Mapping[str, Any] | None, coordinator: Coordinator
) -> BaseIdentity:
    """Digest the base weights in memory and say where they came from. Collective; reads each weight once.

    `recorded`: the identity in the step being resumed, where that step holds the base itself: its origin stands.
    """
    digests = logical_digests(model.state_dict("base"), coordinator)
    total = xxhash.xxh3_128_hexdigest("\n".join(f"{fqn} {digests[fqn]}" for fqn in sorted(digests)).encode())
    if recorded is not None:
        return {**recorded, "digest": total}
    base = next((source for source in sources if not source.adapter), None)
    if base is None:
        return {"path": None, "revision": None, "format": None, "digest": total}
    return {"path": str(base.path), "revision": base.revision, "format": base.format, "digest": total}


def check_base(found: Mapping[str, Any], expected: Mapping[str, Any], adapter: str) -> None:
    """Raise unless the base at hand is the one that the adapter records. Raises: BaseMismatchError with both."""
    if found["digest"] != expected["digest"]:
        where = expected.get("path") or "a base initialised by its own run"
        raise BaseMismatchError(
            f"{adapter} was trained on another base\n"
            f"  expected {where} (revision {expected.get('revision')}), weights {expected['digest']}\n"
            f"  found    {found['path']} (revision {found['revision']}), weights {found['digest']}\n"
            "  Load that base, in the dtype it had then (see cast), or retrain the adapter on this one",
            expected,
            found,
        )
