"""A URI is not a folder: every setting and argument that names one refuses it, and no folder of that name appears."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from titan_ckpt import CheckpointConfig, CheckpointManager, SaveConfig, StateDictTransforms
from titan_ckpt.cli.main import main
from titan_ckpt.config import StoreConfig, from_dict
from titan_ckpt.converting import convert
from titan_ckpt.directory.directory import CheckpointDirectory
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.encoding.paths import is_uri
from titan_ckpt.errors import ConfigError
from titan_ckpt.formats.open import detect_format, open_reader
from titan_ckpt.training.config import RunConfig
from titan_ckpt.training.run_file import read_run

URIS = ("s3://b/x", "gs://b", "memory://", "file:///tmp/x", "az://c/x", "hf://org/model", "abfss://c@a/x")


PATHS = {
    "output_folder", "model.folder", "data.corpus", "data.cache_folder", "data.tokenizer",
    "evaluation.corpus", "tensorboard.folder", "checkpoint.folder",
    "checkpoint.initial_load.0.path", "checkpoint.initial_load.2.path", "checkpoint.export.folder",
    "checkpoint.export.assets",
}  # fmt: skip


def settings_with(path: str) -> dict[str, Any]:
    """Return a run file whose settings are this path, wherever one names a folder or a file."""
    return {
        "output_folder": path,
        "model": {"folder": path},
        "data": {"corpus": path, "cache_folder": path, "tokenizer": path},
        "evaluation": {"interval": 1, "corpus": path},
        "tensorboard": {"folder": path},
        "checkpoint": {
            "folder": path,
            "initial_load": [{"path": path}, {"path": "base"}, {"path": f"{path}/model"}],
            "export": {"format": "hf", "folder": path, "assets": path},
        },
    }


def problems_with(path: str) -> dict[str, str]:
    """Return what is said of each setting that has this path; nothing else of the table is at fault."""
    with pytest.raises(ConfigError) as raised:
        from_dict(RunConfig, settings_with(path))
    return {line.partition(":")[0]: line for line in raised.value.problems}


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_uri_is_known_in_both_forms() -> None:
    """`Path` joins the slashes of a URI, and a path that has a colon elsewhere is none."""
    assert all(is_uri(uri) and is_uri(Path(uri)) for uri in URIS)
    assert not any(map(is_uri, ("runs/a", "/data/x", "a:b", "C:/x", "runs/s3://x", "/data/s3:/x", "10:30/run", ".")))


def test_every_setting_that_names_a_folder_refuses_a_uri() -> None:
    """One error lists all of them by their keys."""
    problems = problems_with("hf://bucket/x")
    assert problems.keys() == PATHS
    in_buckets = ("checkpoint.folder", "checkpoint.initial_load", "checkpoint.export.folder")
    for line in problems.values():
        known = "or s3://bucket/key, gs://bucket/key or az://container/key, found"
        assert (known if line.startswith(in_buckets) else '(no URI such as s3:// is supported), found "') in line


@pytest.mark.parametrize(
    "path", ["~/x", "~", "~me/x", "$HOME/x", "runs/${RUN}", "run-$SLURM_JOB_ID", "$(pwd)/x", "`pwd`/x"]
)
def test_every_setting_that_names_a_folder_refuses_what_only_a_shell_replaces(path: str) -> None:
    """It would be a folder of that name in the current one."""
    problems = problems_with(path)
    assert problems.keys() == PATHS
    said = "expected a path without ~ and $NAME, which only a shell replaces: write it out, found "
    assert all(f'{said}"{path}' in line for line in problems.values())


@pytest.mark.parametrize("path", ["a ", " a", "a\n", "a\nb", "a\x00b", "\ta", "a\x7f", "a\udcff", "ü" * 128])
def test_every_setting_that_names_a_folder_refuses_what_was_pasted_with_too_much(path: str) -> None:
    """A space at an end is not seen in a message or a listing; no path has a null byte or a name of 256 bytes.

    A manifest is UTF-8, and could not name a folder of other bytes.
    """
    problems = problems_with(path)
    problems.pop("checkpoint.initial_load.2.path", None)
    assert problems.keys() == PATHS - {"checkpoint.initial_load.2.path"}
    assert all("expected a path without spaces around it, control" in line for line in problems.values())


def test_a_name_that_a_shell_leaves_alone_is_a_path() -> None:
    """Also where it has the same characters at another place."""
    names = ("./~x", "a~", "a/~/b", "b$", "a$1", "price$usd", "/data/x", "a b", "数据/x")
    assert [CheckpointConfig(folder=name).folder for name in names] == [*names]


def manager(**settings: object) -> CheckpointManager:
    return CheckpointManager(
        CheckpointConfig(save=SaveConfig(interval=1)), model_parts=[nn.Linear(1, 1)], **settings  # type: ignore[arg-type]
    )  # fmt: skip


CALLS: dict[str, tuple[Callable[[str], object], str]] = {
    "manager": (lambda uri: manager(base_folder=uri), "base_folder: expected"),
    "manager, a Path": (lambda uri: manager(base_folder=Path(uri)), "base_folder: expected"),
    "assets": (lambda uri: manager(sd_transforms=StateDictTransforms(assets=Path(uri))), r"sd_transforms\.assets: "),
    "directory": (lambda uri: CheckpointDirectory(Path(uri), Coordinator.current()), "root: expected"),
    "convert": (lambda uri: convert(uri, uri, "hf"), r"(?s)2 problem.*source: .*target: "),
    "detect": (lambda uri: detect_format(Path(uri)), "path: expected"),
    "open": (lambda uri: open_reader(Path(uri), "hf"), "path: expected"),
    "read_run": (lambda uri: read_run(uri), "config: expected"),
}


@pytest.mark.parametrize("uri", ["s3://bucket/x", "memory://x", "~/x"])
@pytest.mark.parametrize("call", CALLS)
def test_every_argument_that_names_a_folder_refuses_a_uri(call: str, uri: str, tmp_path: Path) -> None:
    """The error names the argument, and no local folder appears."""
    act, message = CALLS[call]
    with pytest.raises(ConfigError, match=message):
        act(uri)
    assert [*tmp_path.iterdir()] == []


def test_the_checkpoint_folder_may_be_in_a_bucket_of_a_known_scheme() -> None:
    """Another scheme is refused with the list of those that are known; a store's settings need a bucket."""
    for uri in ("s3://bucket/x", "gs://bucket/x", "az://container"):
        assert CheckpointConfig(folder=uri, store=StoreConfig(retry_seconds=60.0)).folder == uri
    for uri in ("memory://x", "s3:/", "s3://a/../b", "hf://a/b"):
        with pytest.raises(ConfigError, match="or s3://bucket/key, gs://bucket/key or az://container/key"):
            CheckpointConfig(folder=uri)
    with pytest.raises(ConfigError, match="store: for buckets, and folder"):
        CheckpointConfig(store=StoreConfig(retry_seconds=60.0))


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "save --run", "prune --set-aside", "diff --weights a"])
def test_every_command_refuses_a_uri(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and a message that says what is supported, also if a folder of that name is there."""
    takes_buckets = command in ("ls", "inspect", "verify", "prune --set-aside", "diff --weights a")
    uri = "hf://bucket" if takes_buckets else "s3://bucket"
    (tmp_path / uri[:3] / "bucket").mkdir(parents=True)
    assert main([*command.split(), uri]) == 2
    known = "or s3://bucket/key, gs://bucket/key or az://container/key"
    supported = known if takes_buckets else "mounted file system (no URI such as s3:// is supported)"
    assert supported in capsys.readouterr().err


def test_an_endpoint_of_the_environment_that_is_none_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is asked; the line says which variable it is."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://me:password-of-mine@host")
    assert main(["ls", "s3://bucket/run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "AWS_ENDPOINT_URL_S3: expected an http(s) URL without user" in line and "password-of-mine" not in line
