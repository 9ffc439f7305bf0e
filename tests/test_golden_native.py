"""Folders of schema version 1 under tests/golden/native-1: every later version opens them, resumes them and goes on.

generate.py there wrote them, by training the runs of runs.py; `expected.json` beside each folder was taken from the
live objects of those runs. What was stored comes back bit for bit; steps made after that may round otherwise on another
processor.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shutil
from collections import defaultdict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.world import flip_bit, read_all
from titan_ckpt import KeepConfig, ResumeConfig, SaveConfig
from titan_ckpt.cli.main import main
from titan_ckpt.errors import BaseMismatchError, CorruptCheckpointError
from titan_ckpt.geometry.nested import memory_order
from titan_ckpt.testing import distributed

GOLDEN = Path(__file__).parent / "golden" / "native-1"
ALONE = ("external", "lora-adapter", "memory-order", "one-process", "process")
RESUMED = (*ALONE, "two-ranks")
EXPORTS = {
    "dcp-export": Path("exports/step-2"),
    "hf-export": Path("exports/step-2"),
    "peft-export": Path("exports/step-2-peft"),
}


def load_runs() -> Any:
    """Import runs.py by its path: the name of its folder is no module's."""
    spec = importlib.util.spec_from_file_location("golden_native_1_runs", GOLDEN / "runs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


runs = load_runs()


def digests(folder: Path) -> dict[str, str]:
    return {name: runs.described(value) for name, value in read_all(folder).items()}


@functools.cache
def expected(case: str) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((GOLDEN / case / "expected.json").read_text())
    return made


def same(a: Any, b: Any) -> bool:
    """Say whether two values have the same types all the way down and the same bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        factories = [value.default_factory for value in (a, b) if isinstance(value, defaultdict)]
        return len({*factories}) < 2 and same([*a.items()], [*b.items()])
    if isinstance(a, deque):
        return a.maxlen == b.maxlen and same([*a], [*b])
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if isinstance(a, torch.Tensor):
        return bool(runs.described(a) == runs.described(b)) and memory_order(a) == memory_order(b)
    if isinstance(a, (np.ndarray, np.generic)):
        facts = [
            (
                v.dtype.str,
                v.shape,
                v.tobytes(),
                [s for s, n in zip(v.strides, v.shape, strict=True) if n > 1 and v.size],
            )
            for v in (a, b)
        ]
        return facts[0] == facts[1]
    return repr(a) == repr(b)


def copied(case: str, to: Path) -> Path:
    """Return a copy of a golden folder, for a run writes into it."""
    return Path(shutil.copytree(GOLDEN / case, to / case))


def assert_rounded_alike(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    assert len(found["losses"]) == len(wanted["losses"])
    for mine, theirs in zip(found["losses"], wanted["losses"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-6)


def manifests() -> dict[str, dict[str, Any]]:
    paths = sorted(GOLDEN.rglob("MANIFEST.json"))
    return {path.parent.relative_to(GOLDEN).as_posix(): json.loads(path.read_text()) for path in paths}


# The folders


def test_every_case_is_there() -> None:
    """Each folder has its tests here, and all four kinds of steps of schema version 1 are among them."""
    assert sorted(path.name for path in GOLDEN.glob("[!_]*") if path.is_dir()) == sorted([*RESUMED, *EXPORTS])
    found = manifests()
    assert found.keys() == {
        "external/checkpoints/step-2",
        "lora-adapter/base/step-0",
        "lora-adapter/checkpoints/step-2",
        "memory-order/checkpoints/step-2",
        "one-process/checkpoints/step-2",
        "one-process/checkpoints/step-4",
        "process/checkpoints/step-2",
        "two-ranks/checkpoints/step-2",
    }
    assert {manifest["schema_version"] for manifest in found.values()} == {1}
    assert {manifest["kind"] for manifest in found.values()} == {"full", "adapter", "model", "external"}
    assert found["one-process/checkpoints/step-4"]["resumed_from"]["step"] == 2
    assert found["lora-adapter/checkpoints/step-2"]["base"]["path"] == "lora-adapter/base/step-0"


def test_every_tag_of_typed_json_is_there() -> None:
    """The state files hold each type that schema version 1 has a tag for, and no other tag."""
    states = [path for path in GOLDEN.glob("one-process/checkpoints/*/*.json") if path.name != "MANIFEST.json"]
    found = {tag for path in states for tag in re.findall(r'"(\$[A-Za-z.]+)":', path.read_text())}
    assert sorted(found) == sorted(" ".join(runs.TAGS).split())


def test_values_that_are_not_row_major_are_there() -> None:
    """Their payloads have the axes in memory order after dtype, shape and bytes: other readers refuse the length."""
    folder = GOLDEN / "memory-order/checkpoints/step-2"
    state, rank = (json.loads((folder / name).read_text()) for name in ("state.json", "rank-00000.json"))
    arrays = [array["$numpy"][3:] for array in state["states"]["ordered"]["arrays"]]
    tensors = [tensor["$tensor"][3:] for tensor in rank["dataloader"]["tensors"]]
    assert arrays == [[[2, 1, 0]], [[2, 0, 1]], [[1, 0, 2]], [], [[1, 0]]]
    assert tensors == [[[1, 2, 0]], [], []]


def test_two_ranks_have_stored_rows_columns_and_several_chunks_of_one_tensor() -> None:
    """Their files tile tensors in every way that the format has, and pass over a number that a tensor's name takes."""
    chunks, numbered = set(), []
    for rank in (0, 1):
        data = (GOLDEN / f"two-ranks/checkpoints/step-2/rank-0000{rank}.safetensors").read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        about = header.pop("__metadata__")
        kinds = [(tuple(shape), tuple(offsets)) for shape, offsets in json.loads(about["titan_ckpt.kinds"])]
        places = zip(header, json.loads(about["titan_ckpt.kind_of"]), strict=True)
        chunks |= {(name, *kinds[kind - 1]) for name, kind in places if kind}
        numbered.append(sorted(name.removeprefix("states.average.") for name in json.loads(about["titan_ckpt.fqns"])))
    assert {("model.rows.weight", (7, 4), (row, 0)) for row in (0, 4)} < chunks
    assert {("model.columns.weight", (3, 4), (0, column)) for column in (0, 2)} < chunks
    assert sorted(numbered) == [["strided#1", "strided#2"], ["strided#2", "strided#3"]]


# Steps

STEPS = [(case, int(step)) for case in RESUMED for step in expected(case)["steps"]]


def test_steps_are_those_on_disk() -> None:
    """Nothing that lies there is left out of what is expected."""
    on_disk = {(path.parts[-3], int(path.name.removeprefix("step-"))) for path in GOLDEN.glob("*/checkpoints/step-*")}
    assert set(STEPS) == on_disk


@pytest.mark.parametrize(("case", "step"), STEPS)
def test_every_tensor_of_a_step_has_the_bytes_it_had(case: str, step: int) -> None:
    """Read without a run, a step verifies, and holds what the run held, but for what it was told to leave out."""
    folder = GOLDEN / case / "checkpoints" / f"step-{step}"
    assert main(["verify", str(folder)]) == 0
    told = expected(case)["steps"][str(step)]
    wanted = {name: value for name, value in told["tensors"].items() if name not in told["elsewhere"]}
    assert digests(folder) == wanted
    assert len(told["elsewhere"]) < len(told["tensors"])


@pytest.mark.parametrize(("case", "step"), STEPS)
def test_a_flipped_bit_of_a_step_is_noticed(tmp_path: Path, case: str, step: int) -> None:
    """One bit of the last tensor in each rank's file is another one: the step cannot be read."""
    files = sorted((GOLDEN / case / "checkpoints" / f"step-{step}").glob("*.safetensors"))
    assert files
    for file in files:
        folder = copied(case, tmp_path / file.stem) / "checkpoints" / f"step-{step}"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        (folder / file.name).write_bytes(data)
        assert main(["verify", str(folder)]) == 1
        with pytest.raises(CorruptCheckpointError, match=file.name):
            read_all(folder)


def assert_is_as_saved(run: Any, told: Mapping[str, Any]) -> None:
    """Compare everything a run has with what the run that saved the step had, on as many ranks."""
    found = run.facts()
    assert found["tensors"] == told["tensors"]
    assert found["values"] == told["values"]
    assert found["ranks"] == told["ranks"]
    if "typed" in run.states:
        assert same(run.states["typed"].value, runs.typed())
    if "ordered" in run.states:
        assert same(run.states["ordered"].value | run.data.kept, runs.ordered())


def resume_go_on_and_save(case: str, folder: Path) -> None:
    """Resume the newest step, make and save two more, load these, and then every older step, which is pinned."""
    steps, last = expected(case)["steps"], max(map(int, expected(case)["steps"]))
    for step in steps:
        (folder / "checkpoints" / f"step-{step}" / "PINNED").touch()
    run = runs.another(case, folder)
    save = SaveConfig(interval=2, keep=KeepConfig(latest=1), timeout_seconds=30)
    with run.manager(folder, save=save) as manager:
        result = manager.load()
        assert result.step == last
        assert not result.report.initialized
        assert_is_as_saved(run, steps[str(last)])
        assert_rounded_alike(run.go_on(), expected(case)["continued"])
        assert manager.save(last + 2)
        run.settle(last + 2)
        saved = run.facts()
    newer = runs.another(case, folder)
    with newer.manager(folder, save=None) as manager:
        assert manager.load().step == last + 2
        assert_is_as_saved(newer, saved)
    for step, told in steps.items():
        older = runs.another(case, folder)
        with older.manager(folder, save=None, resume=ResumeConfig(step=int(step))) as manager:
            assert manager.load().step == int(step)
            assert_is_as_saved(older, told)


@pytest.mark.parametrize("case", ALONE)
def test_a_run_of_one_process_goes_on(tmp_path: Path, case: str) -> None:
    """Everything comes back, the next two steps are those of the run that was not stopped, and saving works."""
    resume_go_on_and_save(case, copied(case, tmp_path))


@distributed(nproc=2)
def go_on_with_two_ranks(folder: Path) -> None:
    resume_go_on_and_save("two-ranks", folder)


def test_a_run_of_two_ranks_goes_on(tmp_path: Path) -> None:
    """Shards, each rank's generators, data and own state come back, and training goes on from them."""
    go_on_with_two_ranks(copied("two-ranks", tmp_path))


def assert_is_carried_over(run: Any, told: Mapping[str, Any]) -> None:
    """Compare what does not depend on the number of ranks; the data goes on where all ranks together had stopped."""
    found = run.facts()
    assert found["tensors"] == told["tensors"]
    assert found["values"] == told["values"]
    assert run.data.next == min(rank["data"]["next"] for rank in told["ranks"]) + run.rank


def test_one_process_takes_over_from_two_ranks(tmp_path: Path) -> None:
    """Rows, columns and empty shards are put together to whole tensors with the same bits."""
    run = runs.TwoRanks()
    with run.manager(copied("two-ranks", tmp_path), save=None) as manager:
        assert manager.load().step == 2
    assert_is_carried_over(run, expected("two-ranks")["steps"]["2"])


@distributed(nproc=2)
def take_over_from_one_process(folder: Path) -> None:
    run = runs.OneProcess()
    with run.manager(folder, save=None) as manager:
        assert manager.load().step == 4
    assert isinstance(run.model.embed.weight, DTensor)
    assert_is_carried_over(run, expected("one-process")["steps"]["4"])
    assert same(run.states["typed"].value, runs.typed())


def test_two_ranks_take_over_from_one_process(tmp_path: Path) -> None:
    """Whole tensors are sharded, tied weights stay tied, and typed values are the same on both ranks."""
    take_over_from_one_process(copied("one-process", tmp_path))


# Bases


def changed_base(to: Path) -> Path:
    """Return a Hugging Face folder that differs from the golden one in a bit of one weight."""
    folder = copied("hf-export", to) / EXPORTS["hf-export"]
    file = min(folder.glob("*.safetensors"))
    flip_bit(file, -2)
    return folder


def test_f9_an_adapter_resumes_over_its_base_in_another_format_and_over_no_other(tmp_path: Path) -> None:
    """The base is known by its values: a Hugging Face folder with the same is taken, one with another bit is not."""
    folder = copied("lora-adapter", tmp_path)
    run = runs.Llama(lora=True, sources=(GOLDEN / "hf-export" / EXPORTS["hf-export"],))
    with run.manager(folder, save=None) as manager:
        assert manager.load().step == 2
    assert_is_as_saved(run, expected("lora-adapter")["steps"]["2"])
    run = runs.Llama(lora=True, sources=(changed_base(tmp_path),))
    message = r"step 2 was trained on another base\n  expected lora-adapter/base/step-0"
    with run.manager(folder, save=None) as manager, pytest.raises(BaseMismatchError, match=message):
        manager.load()


# Exports


@pytest.mark.parametrize("case", EXPORTS)
def test_every_tensor_of_an_export_has_the_bytes_it_had(case: str) -> None:
    """Each file key has the values that were exported."""
    assert digests(GOLDEN / case / EXPORTS[case]) == expected(case)["files"]


@pytest.mark.parametrize("case", EXPORTS)
def test_a_flipped_bit_of_an_export_gives_other_values(tmp_path: Path, case: str) -> None:
    """Exports carry no digests: the comparison with what is expected is what notices a change."""
    folder = copied(case, tmp_path) / EXPORTS[case]
    places = (  # a tensor of several ranks is in no place as a whole
        (name, path, path.read_bytes().find(runs.raw(value)))
        for name, value in read_all(folder).items()
        for path in sorted(folder.iterdir())
    )
    name, path, at = next(place for place in places if place[2] >= 0)
    flip_bit(path, at)
    differs = {key for key, digest in digests(folder).items() if digest != expected(case)["files"][key]}
    assert differs == {name}


@pytest.mark.parametrize("case", EXPORTS)
def test_an_export_is_a_source_of_weights(tmp_path: Path, case: str) -> None:
    """A new run starts from the weights of the run that exported, an adapter's over its base."""
    base = (GOLDEN / "hf-export" / EXPORTS["hf-export"],) if case == "peft-export" else ()
    run = runs.another(case, tmp_path)
    run.sources = (*base, GOLDEN / case / EXPORTS[case])
    with run.manager(tmp_path, save=None) as manager:
        result = manager.load()
    assert result.step == 0
    assert not result.report.initialized
    found = {name: value for name, value in run.facts()["tensors"].items() if name.startswith("model.")}
    assert found == expected(case)["tensors"]


def test_f9_an_exported_adapter_knows_its_base(tmp_path: Path) -> None:
    """An adapter is refused over a base with another bit."""
    run = runs.Llama(lora=True, sources=(changed_base(tmp_path), GOLDEN / "peft-export" / EXPORTS["peft-export"]))
    message = r"step-2-peft was trained on another base\n  expected hf-export/exports/step-2"
    with run.manager(tmp_path, save=None) as manager, pytest.raises(BaseMismatchError, match=message):
        manager.load()
