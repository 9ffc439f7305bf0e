"""`titan-ckpt ls`, `inspect` and `verify` on URLs of steps and exports, with settings of the environment."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.stores.conftest import flip_last_bit, place_in
from tests.stores.export_runs import CONFIG
from tests.stores.servers import CREDENTIALS, Server
from tests.stores.test_exports_in_bucket import export
from tests.test_manager import Run
from titan_ckpt import ResumeConfig, SaveConfig
from titan_ckpt.cli.main import main
from titan_ckpt.converters import from_tables
from titan_ckpt.converting import write_native
from titan_ckpt.directory.directory import CheckpointDirectory
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.geometry.chunks import cast
from titan_ckpt.models.llama3 import Llama3


def said(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, Any]:
    """Run a command with --json; return the exit code and its answer, or the text of its error."""
    code = main([*map(str, args), "--json"])
    shown = capsys.readouterr()
    return code, json.loads(shown.out) if shown.out else shown.err


@pytest.fixture(autouse=True)
def _endpoint(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "AWS_ENDPOINT_URL" if server.url.startswith("s3") else "AZURE_STORAGE_ENDPOINT"
    monkeypatch.setenv(name, server.endpoint)


def test_steps_and_exports_are_listed_shown_and_verified(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a disk: the same facts, and exit code 1 for a flipped bit, named."""
    place, run = place_in(server), Run()
    folder = place / "checkpoints"
    with run.manager(tmp_path, folder=str(folder), store=place.bucket.settings, save=SaveConfig(interval=1)) as saves:
        run.train(saves, 2)
    made = export(Llama3(CONFIG), place / "exports", tmp_path)
    beside_hf = export(Llama3(CONFIG), place / "exports" / "dcp", tmp_path, format="dcp")
    code, found = said(capsys, "ls", place)
    assert code == 0 and found["checkpoints"] == str(folder)
    assert [(step["step"], step["kind"], step["path"]) for step in found["steps"]] == [
        (n, "full", f"{folder}/step-{n}") for n in (1, 2)
    ]
    exports = [(e["path"], e["format"], e["changed"]) for e in found["exports"]]
    assert exports == [(str(beside_hf), "dcp", None), (str(made), "hf", None)]
    assert said(capsys, "ls", folder)[1]["steps"] == found["steps"]
    assert main(["ls", str(place)]) == 0 and "exports/step-1" in capsys.readouterr().out
    code, content = said(capsys, "inspect", folder / "step-2")
    assert code == 0 and content["format"] == "native" and {c["component"] for c in content["components"]} >= {"model"}
    assert content["manifest"]["step"] == 2 and content["state"]
    assert said(capsys, "inspect", made, "model.norm.weight")[1]["shape"] == [CONFIG.dim]
    code, whole = said(capsys, "verify", folder / "step-2")
    assert code == 0 and whole["path"] == f"{folder}/step-2" and "every digest" in whole["checks"][0]
    code, whole = said(capsys, "verify", made)
    assert code == 0 and any("the tensors are those of the model" in check for check in whole["checks"])
    (file,) = [f for f in place.bucket.list_objects((folder / "data" / "step-1").key) if f.key.endswith(".safetensors")]
    flip_last_bit(place, file.key)
    code, damaged = said(capsys, "verify", folder / "step-1")
    assert code == 1 and not damaged["whole"] and any("do not have the digest" in line for line in damaged["faults"])


def test_steps_are_pinned_and_pruned(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As on a disk: a policy keeps what is pinned, a rollback's steps go when it is asked for, a live run refuses."""
    place = place_in(server)
    folder = place / "checkpoints"
    settings: dict[str, Any] = {"folder": str(folder), "store": place.bucket.settings, "save": SaveConfig(interval=1)}
    with Run().manager(tmp_path, **settings) as saves:
        Run().train(saves, 4)
        code, error = said(capsys, "prune", place, "--keep", "latest = 1")
        assert code == 1 and "already writes here" in error
    assert said(capsys, "pin", folder / "step-1", folder / "step-2") == (0, {"steps": [1, 2], "pinned": True})
    assert said(capsys, "unpin", folder / "step-2") == (0, {"steps": [2], "pinned": False})
    run = Run()
    with run.manager(tmp_path, **settings, resume=ResumeConfig(step=3)) as saves:
        saves.load()
        run.train(saves, 4)
    assert [s["step"] for s in said(capsys, "ls", place)[1]["steps"]] == [1, 2, 3, 4]

    before = place.bucket.list_objects(place.key)
    code, found = said(capsys, "prune", place, "--keep", "latest = 1", "--set-aside", "--dry-run")
    assert (code, found["deleted"], found["kept"], len(found["set_aside"])) == (0, [2], [1, 3, 4], 1)
    assert found["num_bytes"] > 0 and found["set_aside_bytes"] > 0 and found["checkpoints"] == str(folder)
    assert place.bucket.list_objects(place.key) == before, "a dry run deletes nothing"
    assert said(capsys, "prune", folder, "--keep", "latest = 1", "--set-aside") == (0, {**found, "dry_run": False})
    left = {f.key.removeprefix(f"{folder.key}/").rpartition("/")[0] for f in place.bucket.list_objects(folder.key)}
    assert {name.split("/")[1] for name in left if name.startswith("data/")} == {"step-1", "step-3", "step-4"}
    assert len([name for name in left if name.startswith("data/step-4/")]) == 1, "not that of the rollback"
    code, found = said(capsys, "prune", place, "--keep", "latest = 1", "--set-aside")
    assert (code, found["deleted"], found["kept"], found["set_aside"]) == (0, [], [1, 3, 4], [])
    assert main(["verify", str(folder / "step-4")]) == 0


def test_a_run_that_has_saved_nothing_is_listed_as_empty(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """As on a disk; a run that was interrupted before its first commit leaves a folder without steps."""
    place = place_in(server)
    with closing(CheckpointDirectory(place / "checkpoints", Coordinator.current())) as directory:
        directory.begin(1)
    for named in (place, place / "checkpoints"):
        code, found = said(capsys, "ls", named)
        assert (code, found["steps"], found["exports"], found["writer"]) == (0, [], [], None)


def test_what_is_not_there_is_one_line(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2; no line holds a credential; other commands refuse a URL."""
    place = place_in(server)
    lines = {
        ("ls", place): "nothing is there",
        ("inspect", place / "x"): "is not there",
        ("verify", place / "step-3"): "step 3 is not there; committed steps: none",
        ("ls", f"{server.url}-none/x"): "Create the bucket",
        ("convert", place / "x", "out", "--to", "dcp"): "is not there",
        ("report", place): "no URI such as s3:// is supported",
        ("prune", place, "--set-aside"): "nothing is there",
        ("pin", place / "step-3"): "step 3 is not there; committed steps: none",
        ("unpin", place / "model"): "is no step of titan_ckpt",
    }
    for args, expected in lines.items():
        code, error = said(capsys, *args)
        assert code == 2 and expected in error and error.count("\n") == 1, (args, error)
        assert not [secret for secret in CREDENTIALS.values() if len(secret) > 20 and secret in error]


def test_f4_diff_convert_and_merge_take_urls(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a disk, from buckets and into them; what cannot appear whole there is refused."""
    place = place_in(server)
    made = export(Llama3(CONFIG), place / "exports", tmp_path)
    native, hf = tmp_path / "native", tmp_path / "hf"
    assert said(capsys, "convert", made, native, "--to", "native")[0] == 0
    code, written = said(capsys, "convert", native, place / "hf", "--to", "hf", "--config", made)
    assert (code, written["target"], written["format"]) == (0, f"{place}/hf", "hf")
    assert said(capsys, "convert", native, hf, "--to", "hf", "--config", made)[0] == 0
    assert said(capsys, "convert", place / "hf", place / "dcp", "--to", "dcp")[0] == 0
    for one, other in ((made, place / "hf"), (place / "hf", hf), (native, place / "dcp"), (place / "dcp", made)):
        code, found = said(capsys, "diff", one, other, "--config", made)
        assert (code, found["same"], found["components"][0]["tensors"]) == (0, True, [])
    assert said(capsys, "convert", native, place / "run/exports/mine", "--to", "hf", "--config", made)[0] == 0
    (listed,) = said(capsys, "ls", place / "run")[1]["exports"]
    assert (listed["format"], listed["changed"]) == ("hf", "there is no record that a run made it"), "as on a disk"
    code, error = said(capsys, "convert", native, place / "hf", "--to", "dcp")
    assert code == 2 and "is there already" in error
    for to in ("native", "torch"):
        code, error = said(capsys, "convert", made, place / "not", "--to", to)
        assert code == 2 and "a bucket takes the formats hf, peft and dcp" in error
    assert not (place / "not").exists()

    model = Llama3(CONFIG)
    converters = from_tables([{"kind": "lora", "target_modules": ["wq", "w2"], "rank": 4, "alpha": 8.0}])
    converters.convert(model)
    owned = {n: v.detach().normal_() for n, v in model.state_dict().items() if converters.key_filter(n)}
    adapter = {name: cast(value, value.dtype, name) for name, value in owned.items()}
    write_native(tmp_path / "adapter", adapter, kind="adapter", converters=converters.describe())
    assert said(capsys, "convert", tmp_path / "adapter", place / "peft", "--to", "peft", "--config", made)[0] == 0
    assert said(capsys, "diff", place / "peft", tmp_path / "adapter", "--config", made)[0] == 0
    code, merged = said(capsys, "merge", place / "hf", place / "peft", place / "merged")
    assert code == 0 and merged["merged"] == 2 * CONFIG.num_layers
    assert said(capsys, "merge", hf, place / "peft", tmp_path / "merged")[0] == 0
    assert said(capsys, "diff", place / "merged", tmp_path / "merged")[0] == 0
    assert said(capsys, "diff", place / "merged", place / "hf")[0] == 1


def test_a_plan_reads_run_files_that_name_buckets(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The endpoint is the run file's own: a base, a step over it, a step that is not there, no bucket."""
    place = place_in(server)
    made = export(Llama3(CONFIG), place / "exports", tmp_path)
    toml = tmp_path / "run.toml"

    def plan(folder: object, *settings: str) -> tuple[int, Any]:
        toml.write_text(
            f'output_folder = "{tmp_path}/run"\nmodel = {{ flavor = "debug-0.5m" }}\n'
            f'[checkpoint]\nfolder = "{folder}"\n[checkpoint.save]\ninterval = 2\n'
            f'[checkpoint.store]\nendpoint = "{server.endpoint}"\nretry_seconds = 5.0\n'
            f'[[checkpoint.initial_load]]\npath = "{made}"\n'
        )
        return said(capsys, "plan", toml, *settings)

    code, found = plan(place / "checkpoints")
    assert (code, found["action"], found["sources"][0]["path"]) == (0, "load initial weights", str(made))
    run = Run()
    with run.manager(
        tmp_path, folder=str(place / "checkpoints"), store=place.bucket.settings, save=SaveConfig(interval=1)
    ) as saves:
        run.train(saves, 2)
    code, found = plan(place / "checkpoints")
    assert (code, found["step"], found["action"]) == (0, 2, "resume step 2 (full)")
    assert [s["path"] for s in found["sources"]] == [f"{place}/checkpoints/step-2"]
    code, found = plan(place / "checkpoints", "checkpoint.resume.step=7")
    assert code == 1 and "step 7 is not in" in found["problems"][0]
    code, error = plan(f"{server.url}-none/x")
    assert code == 2 and "Create the bucket" in error
    code, error = plan("hdfs://a/b")
    assert code == 2 and "s3://bucket/key, gs://bucket/key or az://container/key" in error
