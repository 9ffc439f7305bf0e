"""The base that a PEFT folder names, compared with the source of the run's base.

A name proves nothing about weights, so a contradiction is a warning; only revisions that both sides state are compared
strictly. A digest, which folders of this package have, makes the comparison needless (weights/identity.py).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from titan_ckpt.errors import BaseMismatchError
from titan_ckpt.formats.huggingface.reader import CONFIG, read_config
from titan_ckpt.loading.plan import LoadSource
from titan_ckpt.stores.mounted import local_path
from titan_ckpt.stores.store import Place
from titan_ckpt.weights.identity import BASE_RECORD

logger = logging.getLogger(__name__)
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_IN_CACHE = re.compile(r"models--([^/]+)/snapshots/([^/]+)")
"""Part of a path in Hugging Face's cache: the id with "--" for "/", and the commit."""
_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_MOVING = ("main", "master")
"""Revisions that name another commit tomorrow, and so say nothing."""


def check_named_base(adapter: Place, config: Mapping[str, Any], base: LoadSource | None) -> None:
    """Compare the base that adapter_config.json names with the run's; warn if the names contradict each other.

    Raises: BaseMismatchError if the adapter and `base` both state a revision and they differ.
    """
    if base is None or BASE_RECORD in config:
        return
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if revision and base.revision and not _same_revision(revision, base.revision):
        raise BaseMismatchError(
            f"{adapter} was trained on another revision of its base\n"
            f"  expected {name or 'its base'} at revision {revision}\n"
            f"  found    {base.path} at revision {base.revision}\n"
            "  Load that revision. If both hold the same weights, leave `revision` out of [[checkpoint.initial_load]]",
            {"path": name, "revision": revision},
            {"path": str(base.path), "revision": base.revision},
        )
    path = local_path(base.path)
    for doubt in _doubts(name, revision, path) if path is not None else ():
        logger.warning("load: %s was trained on %s. Nothing shows that the weights are the same", adapter, doubt)


def _doubts(name: str | None, revision: str | None, base: Path) -> Iterator[str]:
    """Yield what the adapter says of its base and the run's folder contradicts."""
    cached = _IN_CACHE.search(base.resolve().as_posix())
    folder = base if base.is_dir() else base.parent
    if name and _exists(name):
        if not _is_same_folder(Path(name), folder):
            yield f"{name}, and the base of this run is another folder, {base}"
    elif name and _HUB_ID.fullmatch(name):
        stated = [read_config(folder / CONFIG).get("_name_or_path"), cached[1].replace("--", "/") if cached else None]
        names = [other for other in stated if isinstance(other, str) and other]
        if names and not any(_is_same_name(name, other) for other in names):
            yield f"{name}, and the base of this run, {base}, is called {' or '.join(dict.fromkeys(names))}"
    elif name:
        yield f"{name}, which is not here, and the base of this run is {base}"
    if revision and cached and not _same_revision(revision, cached[2]):
        yield f"revision {revision}, and the base of this run is revision {cached[2]}"


def _same_revision(one: str, other: str) -> bool:
    """Return whether two revisions may be the same: equal, one a shortened commit of the other, or a moving branch."""
    shortened = all(map(_COMMIT.fullmatch, (one, other))) and (one.startswith(other) or other.startswith(one))
    return one == other or shortened or one in _MOVING or other in _MOVING


def _is_same_name(one: str, other: str) -> bool:
    """Return whether two names of a model are the same; an organisation counts if both have one."""
    parts = [name.rstrip("/").casefold().split("/")[-2:] for name in (one, other)]
    return parts[0] == parts[1] if len(parts[0]) == len(parts[1]) else parts[0][-1] == parts[1][-1]


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # such as a name that is too long
        return False


def _is_same_folder(one: Path, other: Path) -> bool:
    """Return whether two paths hold the same files, directly or through links."""
    pairs = [(one, other), *((one / name, other / name) for name in _WEIGHTS)]
    return any(a.exists() and b.exists() and a.samefile(b) for a, b in pairs)
