"""`ls`, `inspect`, `verify` and `diff` on every format, as a user calls them."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from tests import world
from tests.forked import answer
from tests.tools.steps import LORA, save_step
from tests.unit.formats.native.test_verify import write_step
from titan_ckpt import ExportConfig, progress
from titan_ckpt.cli.main import main
from titan_ckpt.converters import from_tables
from titan_ckpt.formats.native import reader
from titan_ckpt.formats.native.reader import NativeReader
from titan_ckpt.formats.publish.record import MadeExports
from titan_ckpt.stores.answers import StoreError
from titan_ckpt.training.train_state import TrainState

FORMATS = {
    "native": ("run1/checkpoints/step-1", "native"),
    "native of two ranks": ("run2/checkpoints/step-1", "native"),
    "dcp.save": ("dcp", "dcp"),
    "torchtitan": ("titan/step-1", "dcp"),
    "hf": ("hf", "hf"),
    "peft": ("peft1", "peft"),
    "adapter step": ("lora/checkpoints/step-1", "native"),
}
MODELS = [name for name in FORMATS if name not in ("peft", "adapter step")]
"""The kinds of folder that hold the model's weights, which are the same in all of them."""

Answer = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Answer:
    """Run a command with --json; return its exit code and the object it printed."""

    def call(*words: object) -> tuple[int, dict[str, Any]]:
        code = main([*map(str, words), "--json"])
        printed = capsys.readouterr()
        assert code != 2, printed.err
        return code, json.loads(printed.out)

    return call


@pytest.mark.parametrize("kind", FORMATS)
def test_f4_every_format_is_inspected_and_verified(root: Path, kind: str, ask: Answer) -> None:
    """The tree has all tensors, and the folder is whole."""
    place, format_ = FORMATS[kind]
    code, content = ask("inspect", root / place)
    assert (code, content["format"]) == (0, format_)
    model = next(c for c in content["components"] if c["component"] in ("model", "adapter"))
    assert model["num_tensors"] == {"peft": 8, "adapter step": 8}.get(kind, 21)
    assert sum(group["count"] for group in model["groups"]) == model["num_tensors"]
    code, verified = ask("verify", root / place)
    assert code == 0
    assert verified["whole"]


def test_tables_fit_80_columns(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line of every table, with all that a step has to show; without COLUMNS, what is piped is not cut."""
    monkeypatch.chdir(root)
    assert main(["inspect", "run2/checkpoints/step-1"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) > 80
    monkeypatch.setenv("COLUMNS", "80")
    for words in ("ls run1", "inspect run2/checkpoints/step-1", "inspect hf --all", "inspect peft1", "diff dcp hf"):
        assert main(words.split()) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines
        assert max(map(len, lines)) <= 80, words


def test_ls_says_everything_about_a_step(root: Path, tmp_path: Path, ask: Answer) -> None:
    """Loss, kind, converters, pin, the best one; torchtitan's steps; broken ones with the reason; exports."""
    run = tmp_path / "run"
    shutil.copytree(root / "lora", run)
    shutil.copytree(root / "titan/step-1", run / "checkpoints/step-9")
    (run / "checkpoints/step-7").mkdir()
    shutil.copytree(root / "hf", run / "exports/step-1")
    beside_hf = Path(shutil.copytree(root / "dcp", run / "exports/dcp/step-1"))
    MadeExports(run).record(ExportConfig("dcp", folder="exports/dcp"), 1, what=beside_hf)
    (run / "checkpoints/step-1/PINNED").touch()
    for folder in (run, run / "checkpoints"):
        code, listing = ask("ls", folder)
        assert code == 0
        ours, theirs = listing["steps"]
        assert (ours["kind"], ours["converters"], ours["pinned"], ours["best"]) == ("adapter", ["lora"], True, True)
        assert ours["metrics"] == {"loss": 2.5}
        assert (theirs["step"], theirs["kind"]) == (9, "dcp")
        assert listing["rejected"][0][0] == "step-7"
        assert "no MANIFEST.json" in listing["rejected"][0][1]
        exports = [(export["format"], export["path"]) for export in listing["exports"]]
        assert exports == ([("hf", str(run / "exports/step-1")), ("dcp", str(beside_hf))] if folder == run else [])


def test_inspect_shows_the_sharding_and_the_state(root: Path, ask: Answer) -> None:
    """A step of two ranks has its rows in two parts; its optimizer and hyperparameters are listed."""
    _, content = ask("inspect", root / "run2/checkpoints/step-1", "--all")
    groups = {g["pattern"]: g for c in content["components"] for g in c["groups"]}
    assert groups["model.layers.*.attention.wq.weight"]["sharding"] == "2 x rows"
    assert groups["optimizer.layers.*.attention.wq.weight.exp_avg"]["count"] == 2
    assert content["state"]["optimizer.0.0.hyperparameters.lr"] == "0.0"
    assert content["manifest"]["world_size"] == 2


@pytest.mark.parametrize("kind", ["native of two ranks", "torchtitan", "hf"])
def test_figures_of_a_tensor_are_those_of_torch(root: Path, kind: str, ask: Answer) -> None:
    """Minimum, maximum, mean, deviation, norm and histogram, however the tensor is stored."""
    place, format_ = FORMATS[kind]
    name = "model.embed_tokens.weight" if format_ == "hf" else "tok_embeddings.weight"
    _, figures = ask("inspect", root / place, name)
    files = [load_file(path) for path in (root / "hf").glob("*.safetensors")]
    value = next(file["model.embed_tokens.weight"] for file in files if "model.embed_tokens.weight" in file).double()
    expected = [value.min(), value.max(), value.mean(), value.std(correction=0), torch.linalg.vector_norm(value)]
    found = [figures[key] for key in ("minimum", "maximum", "mean", "std", "norm")]
    torch.testing.assert_close(torch.tensor(found), torch.stack(expected).float())
    counts = [count for _, _, count in figures["histogram"]]
    assert sum(counts) == value.numel()
    assert counts == torch.histc(value, 20, float(value.min()), float(value.max())).int().tolist()


@pytest.mark.parametrize("kind", MODELS)
def test_the_same_weights_are_identical_in_every_format(root: Path, kind: str, ask: Answer) -> None:
    """FSDP2 on two ranks, DCP, torchtitan's layout, one rank and Hugging Face: equal digests, exit code 0."""
    for other in ("native of two ranks", "hf"):
        code, found = ask("diff", root / FORMATS[kind][0], root / FORMATS[other][0], "--weights")
        (model,) = found["components"]
        assert (code, found["same"], model["num_equal"], model["tensors"]) == (0, True, 21, [])
        assert model["digests"][0] == model["digests"][1]
        assert model["num_unread"] == 0 or other == "native of two ranks"


def test_f4_diff_does_not_read_what_the_digests_of_two_steps_show(
    tmp_path: Path, ask: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of four ranks and of two are compared by digest; other cuts are read, and so is what may differ."""
    big, small, read = (4096, 256), (3, 2), list[str]()
    cuts = {4: [0, 1024, 2048, 3072, 4096], 2: [0, 2048, 4096], 3: [0, 1000, 2000, 4096]}

    def step(name: str, ranks: int, *, first: float = 0.0) -> Path:
        shares: list[Any] = [{"model.w": (big, *rows)} for rows in pairwise(cuts[ranks])]
        shares[-1]["model.b"] = (small, 0, 3)
        return write_step(tmp_path / name, *shares, first=first)

    plan = NativeReader.plan

    def watched(reader: NativeReader, parts: Any) -> Any:
        read.extend(part.key for part in parts)
        return plan(reader, parts)

    monkeypatch.setattr(NativeReader, "plan", watched)
    four, two, three, other = step("a", 4), step("b", 2), step("c", 3), step("d", 2, first=7.0)
    code, found = ask("diff", four, two)
    (model,) = found["components"]
    assert (code, model["num_equal"], model["num_unread"], model["digests"], read) == (0, 2, 2, [None, None], [])
    code, found = ask("diff", two, three)
    (model,) = found["components"]
    assert (code, model["num_equal"], model["num_unread"], {*read}) == (0, 2, 0, {"model.w", "model.b"})
    code, found = ask("diff", four, other)
    (model,) = found["components"]
    assert code == 1 and [(d["name"], d["num_different"]) for d in model["tensors"]] == [("b", 1), ("w", 1)]
    assert main(["diff", str(four), str(two)]) == 0


def test_f4_diff_finds_one_changed_element_in_any_format(root: Path, tmp_path: Path, ask: Answer) -> None:
    """One element, one row in the table: its tensor's name, one element, the largest difference."""
    changed = tmp_path / "hf"
    shutil.copytree(root / "hf", changed)
    path = next(p for p in changed.glob("*.safetensors") if "model.layers.1.mlp.up_proj.weight" in load_file(p))
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] += 0.5
    save_file(tensors, path, {"format": "pt"})
    for kind in MODELS:
        code, found = ask("diff", root / FORMATS[kind][0], changed, "--weights")
        ((difference,),) = [c["tensors"] for c in found["components"]]
        name = "model.layers.1.mlp.up_proj.weight" if kind == "hf" else "layers.1.feed_forward.w3.weight"
        assert (code, difference["name"], difference["num_different"]) == (1, name, 1)
        assert difference["max_abs"] == pytest.approx(0.5)
        assert 0.9 < difference["cosine"] < 1


def test_diff_tells_missing_extra_and_reshaped_tensors_apart(root: Path, tmp_path: Path, ask: Answer) -> None:
    """Each has its kind; a tensor of another dtype has figures; a NaN is no small difference; -0.0 is not 0.0."""
    one, other = tmp_path / "one", tmp_path / "other"
    values = {"a": torch.ones(2, 6), "b": torch.ones(4), "gone": torch.ones(1), "nan": torch.zeros(2)}
    values |= {"zero": torch.zeros(2), "same": torch.tensor([float("nan"), 1.0])}
    for folder in (one, other):
        folder.mkdir()
    save_file(values, one / "model.safetensors")
    changed = values | {"a": torch.ones(3, 4), "b": torch.ones(4).bfloat16(), "nan": torch.tensor([0.0, float("nan")])}
    changed["zero"] = torch.tensor([0.0, -0.0])
    del changed["gone"]
    save_file(changed | {"new": torch.ones(1)}, other / "model.safetensors")
    code, found = ask("diff", one, other)
    (model,) = found["components"]
    kinds = {d["name"]: d["kind"] for d in model["tensors"]}
    expected = {"a": "reshaped", "b": "dtype", "gone": "missing", "new": "extra", "nan": "values", "zero": "values"}
    assert (code, kinds) == (1, expected)
    figures = {d["name"]: (d["num_different"], d["max_abs"]) for d in model["tensors"]}
    assert figures["a"] == figures["b"] == (0, 0.0)
    assert figures["zero"] == (1, 0.0)
    assert str(figures["nan"][1]) == "nan"


def test_diff_compares_training_state_and_settings(root: Path, tmp_path: Path, ask: Answer) -> None:
    """A moment of the optimizer that differs, a hyperparameter and a converter are all named."""
    code, found = ask("diff", root / "run1/checkpoints/step-1", root / "run1/checkpoints/step-1")
    assert (code, [c["component"] for c in found["components"]]) == (0, ["model", "training state"])
    code, found = ask("diff", root / "run1/checkpoints/step-1", root / "run2/checkpoints/step-1")
    assert found["components"][0]["tensors"] == []
    assert any("of the ranks" in line for line in found["not_compared"])
    save_step(root / "hf", tmp_path / "lora", converters=from_tables([LORA | {"alpha": 4.0}]))
    code, found = ask("diff", root / "lora/checkpoints/step-1", tmp_path / "lora/checkpoints/step-1")
    assert code == 1
    assert any(d["name"] == "converters.0.alpha" and d["left"] == "8.0" for d in found["settings"])
    shutil.copytree(root / "peft1", tmp_path / "peft")
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    (tmp_path / "peft/adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 99}))
    code, found = ask("diff", root / "peft1", tmp_path / "peft")
    assert (code, [d["name"] for d in found["settings"]]) == (1, ["lora_alpha"])


def test_equal_runs_differ_in_their_times_alone(
    tmp_path: Path, ask: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The seconds that a run has spent are shown, and do not count; its tokens do."""
    for name, seconds, num_tokens in (("a", 1.5, 8), ("b", 2.5, 8), ("c", 1.5, 9)):
        torch.manual_seed(0)
        state = TrainState()
        state.seconds, state.num_tokens = seconds, num_tokens
        world.save(world.manager(tmp_path / name, torch.nn.Linear(4, 4), states={"train": state}))
    a, b, c = (tmp_path / name / "checkpoints/step-1" for name in "abc")
    code, found = ask("diff", a, b)
    assert (code, found["same"], found["state"]) == (0, True, [])
    assert found["times"] == [{"name": "states.train.seconds", "left": "1.5", "right": "2.5"}]
    assert main(["diff", str(a), str(b)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("the same")
    assert re.search("a time, which does not count .*\nstates.train.seconds +1.5 +2.5", shown)
    code, found = ask("diff", a, c)
    assert (code, [one["name"] for one in found["state"]]) == (1, ["states.train.num_tokens"])


def test_f4_verify_finds_a_flipped_bit_in_any_native_file(root: Path, tmp_path: Path, ask: Answer) -> None:
    """Manifest, state, rank files: a bit anywhere is found, its file is named, and the exit code is 1."""
    source = root / "run2/checkpoints/step-1"
    shutil.copytree(source, tmp_path / "step-1")
    names = sorted(path.name for path in source.iterdir())
    assert len(names) == 6
    for name in names:
        path = tmp_path / "step-1" / name
        good = path.read_bytes()
        for position in (0, len(good) // 2, len(good) - 1):
            bad = bytearray(good)
            bad[position] ^= 4
            path.write_bytes(bad)
            code, found = ask("verify", tmp_path / "step-1")
            assert (code, found["whole"]) == (1, False)
            assert name in str(found["faults"])
        path.write_bytes(good)
    assert ask("verify", tmp_path / "step-1")[0] == 0


@pytest.mark.parametrize("name", ["MANIFEST.json", "state.json", "rank-*.safetensors", "model*.safetensors"])
def test_a_lack_of_rights_is_no_damage(
    root: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever file of a checkpoint it is, `verify` ends with 2, and names the file."""
    found = next((root / ("hf" if name.startswith("model") else "run1/checkpoints/step-1")).glob(name))
    opened = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if os.path.basename(os.fspath(path)) == found.name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    assert main(["verify", str(found.parent)]) == 2
    said = capsys.readouterr()
    assert found.name in said.err and "Permission denied" in said.err and not said.out


def test_a_bucket_that_does_not_answer_is_no_damage(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`verify` ends with 2 while it reads a rank's file, as a bad sector's errno is also that of a lost answer."""

    def refuse(*_: object) -> None:
        raise StoreError(errno.EIO, "s3://box/rank-00000.safetensors: no answer", is_final=False)

    monkeypatch.setattr(reader, "execute", refuse)
    assert main(["verify", str(root / "run1/checkpoints/step-1")]) == 2
    said = capsys.readouterr()
    assert "no answer" in said.err and not said.out


def test_verify_finds_what_a_hugging_face_folder_lacks(root: Path, tmp_path: Path, ask: Answer) -> None:
    """A tensor that the config's model has and the folder lacks, a stray one, a file that the index does not name."""
    folder = tmp_path / "hf"
    folder.mkdir()
    tensors = {k: v for path in (root / "hf").glob("*.safetensors") for k, v in load_file(path).items()}
    shutil.copy(root / "hf/config.json", folder)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    code, found = ask("verify", folder)
    assert code == 1
    assert "norm.weight is not there" in str(found["faults"])
    shutil.copy(root / "hf/model.safetensors.index.json", folder)
    code, found = ask("verify", folder)
    assert (code, found["whole"]) == (1, False)
    assert "missing" in str(found["faults"])


def test_input_that_is_no_checkpoint_is_one_line_and_exit_code_2(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing there, an empty folder, a pickle, two formats, a cut file, a newer schema: the reason in a line."""
    kinds = ("nowhere", "empty", "pickle", "mixed", "mixed dcp", "cut", "newer", "unsealed", "file", "fifo", "loop")
    cases = {name: tmp_path / name for name in kinds}
    for name, path in cases.items():
        if name not in ("nowhere", "file", "fifo", "loop"):
            path.mkdir()
    cases["file"].write_text("text")
    os.mkfifo(cases["fifo"])
    cases["loop"].symlink_to(cases["loop"])
    shutil.copytree(root / "run1/checkpoints/step-1", cases["unsealed"], dirs_exist_ok=True)
    (cases["unsealed"] / "MANIFEST.json").unlink()
    shutil.copytree(root / "dcp", cases["mixed dcp"], dirs_exist_ok=True)
    shutil.copytree(root / "hf", cases["mixed dcp"], dirs_exist_ok=True)
    (cases["pickle"] / "pytorch_model.bin").touch()
    for source in ("hf", "peft1"):
        for path in (root / source).iterdir():
            shutil.copy(path, cases["mixed"])
    (cases["cut"] / "model.safetensors").write_bytes(b"\x80\0\0\0\0\0\0\0{")
    shutil.copytree(root / "run1/checkpoints/step-1", cases["newer"], dirs_exist_ok=True)
    manifest = (cases["newer"] / "MANIFEST.json").read_text().replace('"schema_version": 1', '"schema_version": 99')
    import xxhash

    body = manifest[: manifest.rindex(',\n"digest"')]
    seal = xxhash.xxh3_128_hexdigest(body.encode())
    (cases["newer"] / "MANIFEST.json").write_text(f'{body},\n"digest": "{seal}"\n}}\n')
    reasons = {
        "mixed": "a model and a PEFT adapter", "mixed dcp": "a DCP checkpoint and a model", "pickle": "pickle",
        "newer": "schema_version 99", "unsealed": "a save or a copy was cut short", "fifo": "neither a folder nor a",
    }  # fmt: skip
    for name, path in cases.items():
        commands = [["inspect", path], ["diff", path, root / "hf"], ["convert", path, tmp_path / "out", "--to", "dcp"]]
        commands += [["verify", path], ["pin", path]] if name not in ("cut", "newer") else []
        for command in commands:
            assert main([*map(str, command)]) == 2, command
            error = capsys.readouterr().err
            assert error.count("\n") == 1, error
            assert reasons.get(name, str(path)) in error or (command[0] == "pin" and str(path) in error), error
        assert not (tmp_path / "out").exists()
    hf, step, out = root / "hf", root / "run1/checkpoints/step-1", tmp_path / "out"
    wrong_use: list[tuple[list[Any], str]] = [
        (["ls", cases["empty"]], "is empty; name a run's folder"),
        (["ls", hf], "is one checkpoint" if (hf / ".metadata").exists() else "holds no checkpoints"),
        (["inspect", hf, "no.such.tensor"], "near it"),
        (["pin", "hf://bucket/step-1", step], "or s3://bucket/key, gs://bucket/key or az://container/key"),
        (["diff", hf, hf, "--top", "-1"], "--top: expected a positive integer"),
        (["save", "--run", root / "run1", "--timeout-seconds", "nan"], "--timeout-seconds: expected a positive number"),
        (["convert", step, step / "in", "--to", "dcp"], "which is only read"),
        (["merge", hf, root / "peft1", hf / "in"], "which is only read"),
        (["convert", step, out, "--to", "hf", "--config", "/nowhere"], "--config /nowhere: holds no config.json"),
    ]
    for command, reason in wrong_use:
        assert main([*map(str, command)]) == 2, command
        error = capsys.readouterr().err
        assert (error.count("\n"), reason in error) == (1, True), error
    run = tmp_path / "run"
    shutil.copytree(root / "run1", run)
    (run / "exports").write_text("no folder")
    assert main(["ls", str(run)]) == 0
    (run / "checkpoints/step-1/PINNED").symlink_to("nowhere")
    assert main(["pin", str(run / "checkpoints/step-1")]) == 0


@pytest.mark.parametrize(
    "words",
    ["verify run2/checkpoints/step-1", "verify hf", "verify dcp", "diff dcp hf", "convert hf OUT --to native",
     "diff run1/checkpoints/step-1 run2/checkpoints/step-1", "diff run1/checkpoints/step-1 hf --weights",
     "convert dcp OUT --to torch", "convert run1/checkpoints/step-1 OUT --to dcp", "merge hf peft1 OUT",
     "convert run1/checkpoints/step-1 OUT --to native", "convert run2/checkpoints/step-1 OUT --to hf --config hf",
     "merge hf lora/checkpoints/step-1 OUT", "inspect run2/checkpoints/step-1 tok_embeddings.weight"],
)  # fmt: skip
def test_a_command_that_takes_long_shows_bytes_speed_and_time_left(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """On a console, after the delay, and at the end every byte was counted once; into a pipe nothing is drawn."""
    bars: list[tuple[str, int, int]] = []
    close = progress._Bar.close

    def closed(bar: progress._Bar) -> None:
        bars.append((bar._title, bar._done, bar._total))
        close(bar)

    monkeypatch.setattr(progress._Bar, "close", closed)
    monkeypatch.chdir(root)
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0.0)
    for terminal in (True, False):
        shown = io.StringIO()
        monkeypatch.setattr(progress, "CONSOLE", Console(file=shown, force_terminal=terminal, width=80))
        assert main(words.replace("OUT", str(tmp_path / f"out-{terminal}")).split()) in (0, 1)
        drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
        bar = re.search(r"[\d.]+/[\d.]+ (bytes|kB|MB) ([\d.]+ (bytes|kB|MB)/s|\?) (\d+:\d\d:\d\d|-:--:--)", drawn)
        assert (bar is not None) is terminal, drawn
    for title, done, total in bars:
        assert 0.99 * total <= done <= total, title
    of_adapter = "loading peft1" if "peft1" in words else "loading"  # its factors are read before the base
    assert [title for title, *_ in bars if title != of_adapter][1:] == ["exporting out-True"] * ("lora" in words)


def let_pass(folder: Path) -> None:
    """Let other users pass to a folder of pytest; another session that begins takes that right away."""
    for path in (folder, *folder.parents):
        if path.stat().st_mode & 0o001 == 0:
            path.chmod(0o755)


def test_a_folder_or_file_without_permission_is_one_line(root: Path, tmp_path: Path) -> None:
    """Another user's folder, and one such file in a readable one: path and reason, exit code 2, nothing written."""
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    sources = {name: tmp_path / name for name in ("hf", "dcp", "peft1")}
    for name, path in sources.items():
        shutil.copytree(root / name, path)
    step = tmp_path / "run/checkpoints/step-1"
    shutil.copytree(root / "run1/checkpoints/step-1", step)
    files = [
        next(sources["hf"].glob("*.safetensors")), sources["dcp"] / ".metadata", step / "MANIFEST.json",
        sources["peft1"] / "adapter_config.json", step / "rank-00000.safetensors",
    ]  # fmt: skip
    for file in files:
        folder = file.parent
        commands = [["inspect", folder], ["diff", folder, folder], ["convert", folder, tmp_path / "out", "--to", "dcp"]]
        for locked in (file, folder):
            mode = locked.stat().st_mode
            locked.chmod(0)
            let_pass(tmp_path)
            try:
                codes, said = as_nobody(commands)
            finally:
                locked.chmod(mode)
            assert set(codes) == {2}, (locked, codes, said)
            assert len(said) == len(commands), said
            for line in said:
                assert re.search("Permission denied|not readable|cannot be read", line), line
                assert str(folder) in line
            assert not (tmp_path / "out").exists()
    shutil.copytree(step, step.with_name("step-2"))
    step.chmod(0)
    let_pass(tmp_path)
    try:
        codes, said = as_nobody([["ls", tmp_path / "run", "--json"], ["ls", step.parent]])
    finally:
        step.chmod(0o755)
    assert codes == [0, 0], said  # one such step hides no other
    assert said == []


def as_nobody(commands: list[list[Any]]) -> tuple[list[int], list[str]]:
    """Run commands in a forked process of a user without rights; return their exit codes and lines of errors."""

    def act() -> tuple[list[int], list[str]]:
        os.chdir("/")
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        with redirect_stderr(io.StringIO()) as errors:
            return [main([*map(str, words)]) for words in commands], errors.getvalue().splitlines()

    (codes, said), _ = answer(act)
    return codes, said
