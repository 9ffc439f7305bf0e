"""The base that an adapter was trained on and the run's converters, as a step records them.

This module compares both records with a run. A base is identified by path, revision and a logical digest of its
weights in memory. The digest is the same from a Hugging Face folder, a native checkpoint or a DCP folder, under any
sharding, as long as the values and dtypes in the model are the same. Converters are compared by their descriptions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import BaseMismatchError, ConverterError, listed
from titan_ckpt.geometry.chunks import dtype_name, info_of
from titan_ckpt.weights.digest import logical_digests
from titan_ckpt.weights.live_memory import Watched
from titan_ckpt.weights.transforms import CASTABLE
from titan_ckpt.weights.wrapper import ModelWrapper

BaseIdentity = dict[str, Any]
"""{"path": str | None, "revision": str | None, "format": str | None, "digest": hex | None}; path is None for a base
that the run initialized and never loaded, digest for that of a converted adapter which names its base alone.
"merged": [path], only if the run has merged adapters into it. "dtype": that of all its float tensors in memory, if they
have one in common, so that who digests the base again need not guess how its run had cast it."""
BASE_RECORD = "titan_ckpt_base"
"""Key of the base's identity in an adapter folder's metadata."""
Description = Mapping[str, Any]
"""A converter's description of itself (`describe()`), decoded from JSON: its kind and every setting."""


def identify_base(model: ModelWrapper, origin: Mapping[str, Any] | None, coordinator: Coordinator) -> BaseIdentity:
    """Digest the base weights in memory. Collective; reads each weight once.

    `origin`: path, revision and format of the base's source; None for a base that this run initialized.
    """
    base = model.state_dict("base")
    digests = logical_digests(base, coordinator)
    dtypes = {info_of(value).dtype for value in base.values()} & CASTABLE
    names = {
        name for n in coordinator.gather_results("base dtypes", lambda: sorted(map(dtype_name, dtypes))) for name in n
    }
    cast = {"dtype": names.pop()} if len(names) == 1 else {}
    return {"path": None, "revision": None, "format": None, **(origin or {}), "digest": base_digest(digests), **cast}


def base_digest(digests: Mapping[str, str]) -> str:
    """Return the digest of a base, given the logical digest of each of its tensors by native name."""
    return xxhash.xxh3_128_hexdigest("\n".join(f"{fqn} {digests[fqn]}" for fqn in sorted(digests)).encode())


def base_settings(base: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an adapter folder's settings say of a base: its name, and its record if that has a digest."""
    named = {"base_model_name_or_path": base.get("path"), "revision": base.get("revision")}
    return named if base.get("digest") is None else {**named, BASE_RECORD: dict(base)}


def named_base(settings: Mapping[str, Any]) -> BaseIdentity | None:
    """Return the base that an adapter folder's settings record or name; None if they do neither."""
    name = settings.get("base_model_name_or_path")
    by_name = {"path": name, "revision": settings.get("revision"), "format": None, "digest": None} if name else None
    return settings.get(BASE_RECORD) or by_name


def check_base(found: Mapping[str, Any], expected: Mapping[str, Any], adapter: str, merged: Sequence[str] = ()) -> None:
    """Check that the base found in this run is the one that the adapter records. Raises: BaseMismatchError.

    `merged`: the adapters that this run has merged into its base. A converted adapter may know its base by name alone,
    which proves nothing (loading/adapters.py).
    """
    if expected["digest"] not in (None, found["digest"]):
        raise another_base(found, expected, adapter, "or retrain the adapter on this one", merged)


def another_base(
    found: Mapping[str, Any], expected: Mapping[str, Any], adapter: str, otherwise: str, merged: Sequence[str] = ()
) -> BaseMismatchError:
    """Return the error that an adapter records another base than the one found; a merge may be all the difference."""
    where = expected.get("path") or "a base initialized by its own run"
    recorded = expected.get("merged", ())  # not in the steps of earlier versions
    before, after = (f", after the merge of {listed(paths, ', ')}" if paths else "" for paths in (recorded, merged))
    if recorded:
        merges = f"with {listed(recorded, ', ')} merged into it, in this order, and nothing else (merge)"
    elif merged:
        merges = f"without {listed(merged, ', ')}, unless its run had merged the same (merge)"
    else:
        merges = "with what its run had merged into it (merge)"
    return BaseMismatchError(
        f"{adapter} was trained on another base\n"
        f"  expected {where} (revision {expected.get('revision')}), weights {expected.get('digest')}{before}\n"
        f"  found    {found['path']} (revision {found.get('revision')}), weights {found['digest']}{after}\n"
        f"  Load that base, in the dtype it had then (see cast) and {merges}, {otherwise}",
        expected,
        found,
    )


class TrackedBase:
    """A base under a run's adapters: its identity, and whether training has changed it since it was identified."""

    def __init__(self, model: ModelWrapper, coordinator: Coordinator, identity: BaseIdentity) -> None:
        self._model = model
        self._coordinator = coordinator
        self.identity = identity
        self._note()

    def _note(self) -> None:
        self._buffers = self._model.base_buffers()
        self._parameters = Watched(self._model.base_parameters())

    def changes(self) -> list[str]:
        """Return the tensors of the base on this rank that are trained, or have changed since it was identified."""
        now = self._model.base_buffers()
        changed = self._parameters.changed() + [fqn for fqn in now if now[fqn] != self._buffers.get(fqn)]
        return list(dict.fromkeys(self._model.trained_base() + changed))

    def changes_of_ranks(self) -> list[str]:
        """Return the tensors that any rank has changed; none if their values are the same again. Collective."""
        changed = [fqn for of_rank in self._coordinator.gather_results("base", self.changes) for fqn in of_rank]
        if changed and not self._coordinator.anywhere("trained base", self._model.trained_base):
            now = identify_base(self._model, None, self._coordinator)
            if now["digest"] == self.identity["digest"]:
                self._note()  # as after a wrapper has sent rank 0's weights
                return []
        return changed


def check_converters(saved: Sequence[Description], running: Sequence[Description], step: int) -> None:
    """Check that a run has the converters that the step was saved with, in the same order and with the same settings.

    Raises: ConverterError listing each difference.
    """
    if lines := differences(saved, running):
        raise ConverterError(
            f"step {step} was saved with converters {_kinds(saved)}, this run has {_kinds(running)}\n  "
            + "\n  ".join(lines)
            + "\n  Resume with the same [[converters]], or start from the step in another folder, named in "
            "[[checkpoint.initial_load]]"
        )


def differences(saved: Sequence[Description], running: Sequence[Description]) -> list[str]:
    """Return one line per converter or setting that is not the same."""
    before, now = ({d["kind"]: d for d in descriptions} for descriptions in (saved, running))
    lines = [f"{kind}: only in the checkpoint" for kind in before if kind not in now]
    lines += [f"{kind}: only in this run" for kind in now if kind not in before]
    common, common_now = [kind for kind in before if kind in now], [kind for kind in now if kind in before]
    for kind in common:
        names = dict.fromkeys([*before[kind], *now[kind]])
        lines += [
            f"{kind}.{name}: {_show(before[kind], name)} in the checkpoint, {_show(now[kind], name)} in this run"
            for name in names
            if _show(before[kind], name) != _show(now[kind], name)
        ]
    if common != common_now:
        lines.append(f"order: {', '.join(common)} in the checkpoint, {', '.join(common_now)} in this run")
    return lines


def _show(description: Description, name: str) -> str:
    return repr(description[name]) if name in description else "nothing"


def _kinds(descriptions: Sequence[Description]) -> str:
    return ", ".join(description["kind"] for description in descriptions) or "none"
