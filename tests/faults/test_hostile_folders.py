"""Folders that somebody made to harm: `titan-ckpt inspect` answers in bounded time, with a table or with one line."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import Phase, find, settings
from hypothesis.strategies import from_regex
from safetensors.torch import save_file

from tests.world import load_fails
from tests.world import manager as build
from titan_ckpt import ExportConfig, KeepConfig
from titan_ckpt.cli.main import main
from titan_ckpt.directory import names
from titan_ckpt.disk import unpublished_folder
from titan_ckpt.disk.kernel import Holder
from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.formats.open import open_reader
from titan_ckpt.geometry.chunks import Block, Chunk
from titan_ckpt.tools.retention import prune

GOLDEN = Path(__file__).parents[1] / "golden" / "native-1"

MODULE = "base_model.model." + "a" * 40 + "!"


def adapter(folder: Path, pattern: str) -> Path:
    """Write a PEFT adapter whose config gives the ranks of modules by this expression."""
    folder.mkdir()
    save_file(
        {f"{MODULE}.lora_A.weight": torch.ones(2, 3), f"{MODULE}.lora_B.weight": torch.ones(3, 2)},
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": {pattern: 8}, "alpha_pattern": {pattern: 8}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*$", "(.*)*x", "((a*)*)*b", "a{1,999}" * 30 + "b"])
def test_a_regular_expression_of_a_folder_does_not_hang(tmp_path: Path, pattern: str) -> None:
    """An expression on which `re` backtracks for ever matches nothing here, and the folder is listed."""
    started = time.monotonic()
    assert main(["inspect", str(adapter(tmp_path / "adapter", pattern))]) == 0
    assert time.monotonic() - started < 60


def test_a_regular_expression_that_needs_backtracking_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the file, the setting, the expression and the cause."""
    folder = adapter(tmp_path / "adapter", r"(a+)\1")
    assert main(["inspect", str(folder)]) == 2
    assert capsys.readouterr().err == (
        f"titan-ckpt: {folder}/adapter_config.json: rank_pattern has '(a+)\\\\1', which is no regular expression that "
        "can be used: it holds a backreference, which is not matched in bounded time; alpha_pattern has '(a+)\\\\1', "
        "which is no regular expression that can be used: it holds a backreference, which is not matched in bounded "
        "time. Save the adapter again, or take another\n"
    )


@pytest.mark.parametrize("name", ["[/x]", "[red]x", "[link=file:///etc]x[/link]", ":smile:", "\x1b[2Jx", "x\nF32[7]"])
def test_the_name_of_a_tensor_is_shown_and_not_interpreted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Markup and control characters in a name end no command, and change no terminal."""
    save_file({name: torch.ones(1)}, tmp_path / "model.safetensors")
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert name.replace("\x1b", "\\x1b").replace("\n", "\\n") in shown


def resealed(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change a step's manifest and seal it again, as anybody can who knows docs/format.md."""
    path = folder / "MANIFEST.json"
    manifest = json.loads(path.read_text())
    del manifest["digest"]
    for file in manifest["files"]:
        data = (folder / file["name"]).read_bytes()
        if file["name"].endswith(".json"):
            file |= {"num_bytes": len(data), "digest": xxhash.xxh3_128_hexdigest(data)}
    change(manifest)
    body = json.dumps(manifest)[:-1].encode()
    path.write_bytes(body + f',\n"digest": "{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'.encode())
    return folder


def without_rank_1(manifest: dict[str, Any]) -> None:
    manifest["files"] = [file for file in manifest["files"] if "00001" not in file["name"]]


def alone(manifest: dict[str, Any]) -> None:
    without_rank_1(manifest)
    manifest["world_size"] = 1


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda m: m.update(world_size=3), "world_size is 3, and files lacks rank-00002.safetensors"),
        (lambda m: m.update(world_size=1), "world_size is 1, and files lists rank-00001.safetensors"),
        (without_rank_1, "world_size is 2, and files lacks rank-00001.safetensors"),
        (lambda m: m["files"].pop(), "world_size is 2, and files lacks rank-00001.json"),
        (alone, "rank-00000.safetensors: is of a checkpoint of 2 ranks, and the manifest lists the files of 1. "),
        (lambda m: m["components"].append("scaler"), "this version knows no scaler; it restores model, optimizer"),
    ],
)
def test_a_step_of_other_ranks_or_with_an_unknown_component_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], cause: str
) -> None:
    """Each is one error of the manifest or of the file, before a tensor is read."""
    folder = Path(shutil.copytree(GOLDEN / "two-ranks/checkpoints/step-2", tmp_path / "step-2"))
    with pytest.raises(CorruptCheckpointError, match=cause) as caught:
        open_reader(resealed(folder, change))
    assert str(folder) in str(caught.value)


GROUP = '"optimizer": [[], [{"fqns": [], "hyperparameters": {}, "shared": {}, "stateless": []}, '
STATES: list[tuple[str, str, str]] = [
    ('"step": 2,', '"step": 2, "scaler": {},', "'scaler' is none of lr_scheduler, model, optimizer, "),
    ('"optimizer": [[', GROUP, "own of a group is a NoneType, not a dict, an optimizer without parameter groups"),
    ('{"hyperp', '{"classes": "AdamW", "hyperp', "classes of a group is a str, not a list"),
    ('"step": 2,', '"step": 3,', "step is 3, and the manifest says 2"),
    ('"step": 2,', "", "step is None, and the manifest says 2"),
    ('"step": 2,', '"step": 2, "step": 2,', "a key is there twice: 'step'"),
    ('"tokens": 14', '"tokens": NaN', "NaN is not JSON"),
    ('"layout"', '"amplifier": 1, "layout"', "'amplifier' is none of data_parallel, dataloader"),
]
"""Text of the state of a run, or of a rank, what is in its place, and why it is refused."""


@pytest.mark.parametrize(("old", "new", "cause"), STATES)
def test_a_state_file_with_what_no_run_writes_is_refused(tmp_path: Path, old: str, new: str, cause: str) -> None:
    """State that a resume would leave out is refused by name, even if the digests of the file hold."""
    folder = Path(shutil.copytree(GOLDEN / "external/checkpoints", tmp_path / "checkpoints")) / "step-2"
    name = "rank-00000.json" if "layout" in old else "state.json"
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new, 1))
    resealed(folder, lambda manifest: None)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    external: Any = {"components": ("rng", "states"), "external_weights": lambda e: e.fill(model.state_dict())}
    said = load_fails(build(tmp_path, model, save=None, **external), CorruptCheckpointError, cause)
    assert str(folder / name) in said


def rank_file_with(folder: Path, rank: int, old: bytes, new: bytes) -> None:
    """Change a rank's header, and seal it and the manifest again."""
    path = folder / f"rank-{rank:05d}.safetensors"
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    assert len(old) == len(new) and data.count(old, 0, start) == 1
    data[:start] = data[:start].replace(old, new)
    data[46:78] = b"0" * 32
    digest = xxhash.xxh3_128_hexdigest(bytes(data[:start]))
    data[46:78] = digest.encode()
    path.write_bytes(data)
    resealed(folder, lambda m: [f.update(digest=digest) for f in m["files"] if f["name"] == path.name])


def test_ranks_that_disagree_about_a_tensor_are_named(tmp_path: Path) -> None:
    """A row of integers in the file of one rank does not become floats in a load."""
    folder = Path(shutil.copytree(GOLDEN / "two-ranks/checkpoints/step-2", tmp_path / "step-2"))
    row = b'"model.rows.weight":{"dtype":"%s","shape":[3,4]'
    rank_file_with(folder, 1, row % b"F32", row % b"I32")
    into = torch.zeros(7, 4)
    cause = r"rank-00001\.safetensors: model\.rows\.weight is int32\[7, 4\], rank 0's file says float32\[7, 4\]"
    with open_reader(folder) as reader, pytest.raises(CorruptCheckpointError, match=cause):
        reader.read([Block(Chunk.whole((7, 4)), into, "model.rows.weight")])
    assert not into.any()


def written(folder: Path, name: str, text: str) -> Path:
    """Write a folder of a published model or of an adapter, one of whose JSON files holds this."""
    folder.mkdir()
    weights = "adapter_model.safetensors" if name == "adapter_config.json" else "model.safetensors"
    save_file({"w": torch.ones(2)}, folder / weights)
    (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    return folder


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "adapter_config.json"])
@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ('{"a": {"b": 1, "b": 2}}', "a key is there twice: 'b'"),
        ('{"a": ' + "[" * 100_000, "nested too deeply|recursion"),
        ('{"a": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ("[1]", "expected a JSON object|no weight_map"),
    ],
)
def test_a_json_file_of_a_published_folder_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, cause: str
) -> None:
    """The file is named, and why it is none; whatever reads it, `ls` of a run with such an export included."""
    folder = written(tmp_path / "folder", name, text)
    assert main(["inspect", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(folder / name) in line
    assert re.search(cause, line)


def test_exports_and_rows_that_are_nested_without_end_do_not_end_ls_or_report(tmp_path: Path) -> None:
    """A listing says what it can; a damaged row of a log is passed over."""
    shutil.copytree(GOLDEN / "external/checkpoints", tmp_path / "checkpoints")
    (tmp_path / "exports").mkdir()
    written(tmp_path / "exports/step-2", "config.json", "[" * 100_000)
    for name in ("metrics.jsonl", "telemetry.jsonl"):
        (tmp_path / name).write_text("[" * 100_000 + "\n")
    assert main(["ls", str(tmp_path)]) == 0
    assert main(["report", str(tmp_path)]) == 0


def test_a_name_that_is_no_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half a character cannot be printed, sorted into a digest or written to a file."""
    header = rb'{"\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert main(["diff", str(tmp_path), str(tmp_path)]) == 2
    assert "lone surrogate" in capsys.readouterr().err
    whole = rb'{"\ud83d\ude00":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'  # a pair is a character
    (tmp_path / "model.safetensors").write_bytes(len(whole).to_bytes(8, "little") + whole + bytes(8))
    assert main(["diff", str(tmp_path), str(tmp_path)]) == 0


def owned_names() -> set[str]:
    """Return a name of each kind that this package takes for its own, as its modules spell them."""
    values = [value for module in (names, unpublished_folder) for value in vars(module).values()]
    patterns: list[re.Pattern[str]] = [value for value in values if isinstance(value, re.Pattern)]
    any_name = settings(max_examples=1, phases=(Phase.generate,))  # not the shortest one, which takes seconds to find
    return {find(from_regex(pattern, fullmatch=True), lambda _: True, settings=any_name) for pattern in patterns}


def train(run: Path, steps: range, resume: int = -1) -> None:
    """Save and export every step, keep few of them, and delete what a rollback has set aside."""
    keep, exports = KeepConfig(latest=2), (ExportConfig("dcp", interval=1, keep=1),)
    with build(run, torch.nn.Linear(2, 2), keep=keep, async_mode="disabled", export=exports) as manager:
        manager.load(resume)
        for step in steps:
            manager.save(step)
    prune(run, KeepConfig(latest=2), set_aside=True, dry_run=False)


def test_nothing_of_ours_is_reached_through_a_link(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Links of every owned name in every owned folder lead to another run: it stays whole, and so do the links."""
    run, other = tmp_path / "run", tmp_path / "other"
    train(run, range(1, 3))
    shutil.copytree(run / "checkpoints/step-2", other)
    shutil.copytree(run / "exports/step-2", other, dirs_exist_ok=True)
    (other / "evals").mkdir()
    (other / "evals" / "results.txt").write_text("42")
    links, ours = [], owned_names()
    for folder in ("checkpoints", "checkpoints/.staging", "checkpoints/.trash", "exports", ".titan_ckpt-exports"):
        for name in ours:
            link = run / folder / name.removesuffix(".lock")
            link.symlink_to(other)
            links.append(link)
            if name.endswith(".lock"):
                (run / folder / name).write_text(json.dumps(asdict(Holder.current())))  # of this host, not locked
    whole = {path: path.is_dir() or path.read_bytes() for path in other.rglob("*")}
    train(run, range(3, 6))
    train(run, range(5, 7), resume=4)
    assert {path: path.is_dir() or path.read_bytes() for path in other.rglob("*")} == whole
    assert [link for link in links if not link.is_symlink()] == []
    assert "stays as it is" in caplog.text
