"""Ids of models that were downloaded into Hugging Face's cache, wherever a folder can be named."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM

from tests import world
from tests.chats import write_chats, write_model
from titan_ckpt.cli.main import main
from titan_ckpt.encoding.paths import hub_folder, snapshot_of
from titan_ckpt.errors import CheckpointNotFoundError, LoadMismatchError
from titan_ckpt.models import hf
from titan_ckpt.testing import distributed

OLD, NEW = "0" * 40, "1" * 40
ID = "acme/tiny-0.1B"


def download(cache: Path, commit: str, ref: str | None, *, name: str = ID, seed: int = 0) -> Path:
    """Put a model where `hf download` does: files by digest, a snapshot of links to them, and a ref to the commit."""
    place = cache / f"models--{name.replace('/', '--')}"
    snapshot, blobs = place / "snapshots" / commit, place / "blobs"
    for folder in (snapshot, blobs, place / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    made = write_model(cache.parent / f"made-{commit[:4]}-{seed}", rope_theta=10_000.0 + seed)
    for file in made.iterdir():
        blob = blobs / f"{commit[:4]}-{seed}-{file.name}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    if ref is not None:
        (place / "refs" / ref).write_text(commit)
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, which is the machine's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_an_id_leads_where_the_hubs_own_library_finds_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An id means the snapshot of a branch, a tag or a commit, wherever the cache is; a folder comes first."""
    download(cache, OLD, "v1")
    newest = download(cache, NEW, "main", seed=1)
    for revision, commit in ((None, NEW), ("main", NEW), ("v1", OLD), (OLD, OLD)):
        theirs = snapshot_download(ID, revision=revision, cache_dir=cache, local_files_only=True)
        assert str(hub_folder(ID, revision)) == theirs
        assert snapshot_of(theirs) == (ID, commit)
    with pytest.raises(CheckpointNotFoundError, match=rf"its revision v2, and has {OLD}, {NEW}: hf download .* v2$"):
        hub_folder(ID, "v2")
    monkeypatch.delenv("HF_HUB_CACHE")
    for variable, place in (("HF_HOME", cache.parent), ("XDG_CACHE_HOME", cache.parent / "x")):
        monkeypatch.setenv(variable, str(place))
        (cache.parent / "x").mkdir(exist_ok=True)
        (cache.parent / "x" / "huggingface").symlink_to(cache.parent) if variable == "XDG_CACHE_HOME" else None
        assert hub_folder(ID).resolve() == newest
        monkeypatch.delenv(variable)
    assert hub_folder(ID) == Path(ID), "not downloaded"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    Path(ID).mkdir(parents=True)
    assert hub_folder(ID) == Path(ID)


@pytest.mark.parametrize("files", [(), ("README.md",)])
def test_an_interrupted_download_is_told_from_one_that_was_never_begun(
    cache: Path, capsys: pytest.CaptureFixture[str], files: tuple[str, ...]
) -> None:
    """The message names the snapshot's files and the command that fetches the rest; a link without a target is none."""
    snapshot = download(cache, NEW, "main")
    (cache / f"models--{ID.replace('/', '--')}" / "blobs" / "1111-0-tokenizer.json").unlink()
    (snapshot / "README.md").write_text("tiny")
    for path in snapshot.iterdir():
        if path.name not in (*files, "tokenizer.json"):
            path.unlink()
    Path("run.toml").write_text(f'output_folder = "run"\nmodel = {{ folder = "{ID}" }}\n')
    Path("data.jsonl").write_text('{"text": "hello"}\n')
    for command in (["train", "run.toml"], ["init", "lora", "--model", ID, "--data", "data.jsonl", "--file", "x.toml"]):
        assert main(command) == 2
        said = " ".join(capsys.readouterr().err.split())
        there = ", ".join(files) or "nothing"
        assert f"the snapshot in the cache holds {there}: hf download {ID} --revision {NEW}" in said


def test_an_empty_ref_is_no_commit(cache: Path) -> None:
    """A download that was interrupted while it wrote the ref names nothing; the error says what is there."""
    download(cache, NEW, "main")
    (cache / f"models--{ID.replace('/', '--')}" / "refs" / "main").write_text("")
    with pytest.raises(CheckpointNotFoundError, match=rf"its revision main, and has {NEW}: hf download {ID}$"):
        hub_folder(ID)


def test_an_id_is_taken_wherever_a_folder_is(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """init, train with model and tokenizer, plan, an own base for the adapter, convert and diff."""
    folder = download(cache, NEW, "main")
    write_chats(Path("chat.jsonl"), 20)
    assert main(["init", "lora", "--model", ID, "--data", "chat.jsonl"]) == 0
    assert main(["plan", "run.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["sources"][0]["path"] == str(folder)
    assert main(["train", "run.toml", "--training.steps", "2", "--training.batch_size", "2"]) == 0
    about = json.loads(Path("outputs/lora/exports/step-2-peft/adapter_config.json").read_text())
    assert (about["base_model_name_or_path"], about["revision"]) == (ID, NEW), "as PEFT finds it on any machine"
    assert main(["convert", "outputs/lora/checkpoints/step-2", "adapter", "--to", "peft"]) == 0
    assert main(["merge", ID, "adapter", "merged"]) == 0
    AutoModelForCausalLM.from_pretrained("merged")
    assert main(["convert", ID, "native", "--to", "native"]) == 0
    assert main(["diff", "native", ID, "--weights"]) == 0
    assert main(["train", "run.toml", "--training.steps", "3", "--training.batch_size", "2"]) == 0


def test_a_source_is_of_the_revision_that_it_names(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And one that was not downloaded is no other one."""
    old, _ = download(cache, OLD, "v1"), download(cache, NEW, "main", seed=1)
    text = 'output_folder = "run"\nmodel = {{ flavor = "debug-0.5m" }}\n[[checkpoint.initial_load]]\npath = "{}"\n'
    Path("run.toml").write_text(text.format(ID) + 'revision = "v1"\n')
    assert main(["plan", "run.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sources"][0]["path"] == str(old)
    Path("run.toml").write_text(text.format(ID) + 'revision = "v2"\n')
    assert main(["plan", "run.toml"]) == 1
    assert "hf download acme/tiny-0.1B --revision v2" in " ".join(capsys.readouterr().out.split())


@distributed(nproc=2)
def load_from_caches_that_differ(folder: Path) -> None:
    os.chdir(folder)
    os.environ["HF_HUB_CACHE"] = str(folder / f"hub-{dist.get_rank()}")
    model = hf.build(hub_folder(ID))
    manager = world.manager(Path("run"), model, initial_load=[ID])
    found = rf"hosts differ: {ID} at {OLD}, {ID} at {NEW}\. Download the same"
    with manager, pytest.raises(LoadMismatchError, match=found):
        manager.load()


def test_ranks_whose_caches_differ_load_no_mixture(tmp_path: Path) -> None:
    """As of two hosts that downloaded a model on different days."""
    for rank, commit in enumerate((OLD, NEW)):
        download(tmp_path / f"hub-{rank}", commit, "main")
    load_from_caches_that_differ(tmp_path)


def test_an_id_without_a_download_is_told_with_the_command(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By every command and setting; so is a download without weights. A path that is wrong is not called a model."""
    Path("run.toml").write_text(f'output_folder = "run"\nmodel = {{ name = "hf", folder = "{ID}" }}\n')
    commands = [
        ["init", "lora", "--model", ID, "--file", "x.toml"],
        ["train", "run.toml"],
        ["plan", "run.toml"],
        ["convert", ID, "out", "--to", "native"],
    ]

    def said() -> list[tuple[int, str]]:
        return [(main(words), " ".join("".join(capsys.readouterr()).split())) for words in commands]

    expected = f"hf download {ID}"
    assert [(code, expected in text) for code, text in said()] == [(2, True), (2, True), (1, True), (2, True)]
    (download(cache, NEW, "main") / "model.safetensors").unlink()
    assert [(code, expected in text) for code, text in said()] == [(2, True), (2, True), (2, True), (2, True)]
    Path("acme").mkdir()
    shutil.rmtree(cache)
    assert main(["convert", ID, "out", "--to", "native"]) == 2
    assert "hf download" not in capsys.readouterr().err
