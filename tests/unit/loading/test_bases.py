"""The base that a PEFT folder names is compared with the run's base: accepted, warned about, or refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from titan_ckpt.errors import BaseMismatchError
from titan_ckpt.loading.adapters import check_named_base
from titan_ckpt.loading.plan import LoadSource

LLAMA, COMMIT = "meta-llama/Llama-3.2-1B", "4e20de362430cd3b72f300e6b0f18e50e7166e08"


def write_model(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def in_cache(root: Path, name: str = LLAMA, commit: str = COMMIT) -> Path:
    return write_model(root / f"models--{name.replace('/', '--')}" / "snapshots" / commit)


def said_of(base: Path, caplog: pytest.LogCaptureFixture, config: dict[str, Any], revision: str | None = None) -> str:
    """Return the warnings about an adapter with this config over this base."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        check_named_base(Path("adapter"), config, LoadSource(base, "hf", revision=revision))
    return caplog.text


def test_names_that_agree_or_say_nothing_are_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same folder, a link to it, a folder of the same files, the same hub id, and a folder without any name."""
    base = write_model(tmp_path / "base")
    (tmp_path / "link").symlink_to(base)
    (tmp_path / "files").mkdir()
    (tmp_path / "files/model.safetensors").symlink_to(base / "model.safetensors")
    named = write_model(tmp_path / "named", _name_or_path=LLAMA)
    for folder, name in [
        (base, str(base)),
        (base, str(tmp_path / "link")),
        (base, str(tmp_path / "files")),
        (base / "model.safetensors", str(base)),
        (base, LLAMA),
        (base, None),
        (named, LLAMA),
        (named, "Llama-3.2-1B"),
        (in_cache(tmp_path / "cache"), LLAMA),
    ]:
        assert not said_of(folder, caplog, {"base_model_name_or_path": name}), (folder, name)


def test_names_that_contradict_each_other_are_warned_of_with_both(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another folder, a folder that is not here, another hub id in config.json or in the cache's path."""
    base, other = write_model(tmp_path / "base"), write_model(tmp_path / "other")
    named = write_model(tmp_path / "named", _name_or_path="Qwen/Qwen3-0.6B")
    cached = in_cache(tmp_path / "cache", "meta-llama/Llama-3.1-8B")
    for folder, name, found in [
        (base, str(other), str(base)),
        (base, "/home/somebody/models/base", str(base)),
        (named, LLAMA, "Qwen/Qwen3-0.6B"),
        (cached, LLAMA, "meta-llama/Llama-3.1-8B"),
    ]:
        said = said_of(folder, caplog, {"base_model_name_or_path": name})
        assert f"adapter was trained on {name}" in said and found in said, said


def test_revisions_that_both_sides_state_must_agree(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another one is refused, with a way out; a shortened commit and a moving branch are not another one."""
    base = write_model(tmp_path / "base")
    with pytest.raises(BaseMismatchError, match=r"at revision v1\n.*at revision v10\n.*leave `revision` out"):
        said_of(base, caplog, {"revision": "v1"}, "v10")
    for given, recorded in [(COMMIT[:8], COMMIT), (COMMIT, "main"), (None, "v1"), ("v1", None)]:
        assert not said_of(base, caplog, {"revision": recorded}, given), (given, recorded)
    said = said_of(in_cache(tmp_path / "cache"), caplog, {"base_model_name_or_path": LLAMA, "revision": "a" * 40})
    assert "revision aaaa" in said and f"is revision {COMMIT}" in said


def test_f9_a_recorded_digest_makes_names_needless(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An adapter of this package is compared by its base's weights, wherever they are and whatever they are called."""
    record = {"digest": "ab" * 16, "path": "elsewhere"}
    config = {"base_model_name_or_path": "/elsewhere", "revision": "v1", "titan_ckpt_base": record}
    assert not said_of(write_model(tmp_path / "base"), caplog, config, "v2")
