"""The laws of stores, for a mounted file system and for one in memory; tests/stores has them for buckets."""

from __future__ import annotations

import ast
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import world
from tests.memory_store import MemoryStore
from tests.stores.export_runs import CONFIG
from tests.test_manager import Run, seeded
from tests.world import read_all, same
from titan_ckpt.config import ExportConfig, KeepConfig, SaveConfig
from titan_ckpt.directory.names import manifest_path
from titan_ckpt.errors import ExportError, PreflightError
from titan_ckpt.formats.huggingface.reader import HuggingFaceReader
from titan_ckpt.formats.open import locate
from titan_ckpt.models.llama3 import Llama3
from titan_ckpt.stores.object_files import ObjectWriter
from titan_ckpt.stores.objects import ObjectFacts, Version
from titan_ckpt.stores.store import OTHERS, Place, open_location, store_of
from titan_ckpt.testing import StoreTests
from titan_ckpt.tools.listing import list_run
from titan_ckpt.tools.verifying import verify_step

PACKAGE = Path(__file__).parents[3] / "titan_ckpt"
SEAM = ("stores", "disk")
MOUNTED_ALONE = {
    "converting.py": "native and torch targets are written on a disk alone",
    "directory/names.py": "a bucket has the manifest of a step apart from its files",
    "directory/steps.py": "how a commit is made: by a rename, or by creating an object",
    "formats/open.py": "torch_checkpointing's own reader opens paths",
    "formats/publish/plan.py": "whether ranks write into one file",
    "formats/publish/record.py": "how an export is published: by a rename, or by its last file",
    "integrations/torchtitan/checkpointer.py": "a path is compared by its absolute name",
    "loading/adapters.py": "the hub's cache and a base's name are paths",
    "testing/stores.py": "a file that is given up stays in its folder, and an upload leaves nothing",
    "tools/listing.py": "where a run keeps steps and exports",
    "tools/retention.py": "a step that was renamed away comes back with its pin",
    "tools/conversion.py": "a target is compared with its source by its real path",
    "tools/logits.py": "transformers opens paths",
    "tools/models.py": "transformers and the hub's cache open paths",
    "training/folders.py": "rights of a folder are known before the run",
    "training/model_folder.py": "tokenizers opens paths",
}
"""Modules that ask whether a place has a path on this machine, and what for. None asks what else it is."""


class TestPosix(StoreTests):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self._root = tmp_path

    def make_place(self) -> Path:
        return self._root / uuid.uuid4().hex


class TestMemory(StoreTests):
    def make_place(self) -> Place:
        return open_location(f"ram://box/{uuid.uuid4().hex}")


def _of_any_version(store: MemoryStore, key: str, data: bytes, version: Version) -> None:
    store.put(key, data)


def _without_a_slash(store: MemoryStore, prefix: str) -> list[ObjectFacts]:
    return [facts for facts in MemoryStore.list_objects(store, "") if facts.key.startswith(prefix)]


def _in_part(store: MemoryStore, key: str, parts: Iterable[memoryview], part_bytes: int) -> None:
    sent = b""
    try:
        for part in parts:
            sent += part
    finally:
        store.put(key, sent)


def _first_alone(store: MemoryStore, keys: Sequence[str]) -> None:
    MemoryStore.delete(store, keys[:1])


def _what_there_is(store: MemoryStore, key: str, start: int, stop: int) -> memoryview:
    return memoryview(store.read(key)[0])[start:stop]


@pytest.mark.parametrize(
    ("verb", "broken", "law"),
    [
        ("replace", _of_any_version, "a_step_is_there_whole_or_not_at_all"),
        ("list_objects", _without_a_slash, "a_name_is_not_what_begins_with_it"),
        ("upload", _in_part, "a_file_that_is_not_finished_is_given_up"),
        ("delete", _first_alone, "a_name_is_not_what_begins_with_it"),
        ("read_range", _what_there_is, "a_file_that_is_replaced_while_it_is_open_is_read_as_it_was_or_not_at_all"),
    ],
)
def test_a_store_that_breaks_a_law_fails_its_test(
    monkeypatch: pytest.MonkeyPatch, verb: str, broken: Callable[..., object], law: str
) -> None:
    """Each of these would lose or mix checkpoints."""
    monkeypatch.setitem(OTHERS, "ram", type("Broken", (MemoryStore,), {verb: broken}))
    with pytest.raises((AssertionError, PreflightError)):
        getattr(TestMemory(), f"test_{law}")()


@pytest.mark.parametrize("num_bytes", [8, 12])
def test_an_object_has_the_bytes_that_were_written_and_no_others(num_bytes: int) -> None:
    """Its upload has begun when its size is told: where that is another one, it ends, and leaves no object."""
    place = open_location(f"ram://box/{uuid.uuid4().hex}")
    store = store_of(place)
    with store.new_file(place / "a.bin", 10) as file:
        file.write(memoryview(b"0123456789"), 0)
        with pytest.raises(EOFError, match=f"10 of {num_bytes} bytes were written"):
            file.finish(num_bytes)
    assert store.names_in(place) == []


def test_a_companion_that_is_replaced_while_it_is_copied_is_one_of_the_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer of ten megabytes comes from a bucket to a disk; another one of that size is uploaded meanwhile."""
    place = open_location(f"ram://box/{uuid.uuid4().hex}")
    store, old, new = store_of(place), b"a" * (10 << 20), b"b" * (10 << 20)
    store.put_companion(place / "tokenizer.json", old)
    answers: list[str] = []

    def replaced(verb: str) -> Callable[..., Any]:
        ask = getattr(store, verb)

        def answer(*arguments: Any) -> Any:
            answers.append(verb)
            found = ask(*arguments)
            store.put_companion(place / "tokenizer.json", new) if len(answers) == 1 else None
            return found

        return answer

    for verb in ("read", "read_head", "read_range"):
        monkeypatch.setattr(store, verb, replaced(verb))
    store_of(tmp_path).put_companion(tmp_path / "tokenizer.json", place / "tokenizer.json")
    assert answers and (tmp_path / "tokenizer.json").read_bytes() in (old, new)


@pytest.mark.parametrize(("scheme", "mode"), [("ram", "disabled"), ("ram", "thread"), ("dir", "process")])
def test_a_run_in_a_third_store_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, mode: Any
) -> None:
    """Three steps, new objects, three more: every bit as six in a row; old steps expire, and `ls` shows the others."""
    (tmp_path / "objects").mkdir()
    monkeypatch.setenv("TESTED_OBJECTS", str(tmp_path / "objects"))
    folder = f"{scheme}://box/{uuid.uuid4().hex}"
    save = SaveConfig(interval=1, async_mode=mode, keep=KeepConfig(latest=2))
    whole = seeded(6)
    first = seeded()
    with first.manager(tmp_path, folder=folder, save=save) as manager:
        first.train(manager, 6, stop=3)
    second = Run(seed=3)
    with second.manager(tmp_path, folder=folder, save=save) as manager:
        second.train(manager, 6)
    assert same(second.state(), whole.state())
    listed = [facts.step for facts in list_run(open_location(folder)).steps]
    assert listed == [3, 5, 6]  # the run went on from step 3
    assert not any(tmp_path.rglob("step-*"))


def test_a_step_that_is_deleted_while_it_is_verified_is_not_damaged(tmp_path: Path) -> None:
    """Its commit goes first: whoever has found it by its name does not find it any more."""
    folder = f"ram://box/{uuid.uuid4().hex}"
    run = seeded()
    with run.manager(tmp_path, folder=folder, save=SaveConfig(interval=1)) as manager:
        run.train(manager, 1)
    files = locate(open_location(folder) / "step-1")
    verify_step(files)
    commit = manifest_path(files)
    store_of(commit).remove([commit])
    with pytest.raises(FileNotFoundError, match="no such object"):
        verify_step(files)


def test_a_run_in_memory_exports_and_its_export_is_a_source(tmp_path: Path) -> None:
    """A Hugging Face folder and a DCP folder are published there, are read back, and begin another run."""
    folder = f"ram://box/{uuid.uuid4().hex}"
    model = Llama3(CONFIG)
    exports = tuple(ExportConfig(kind, folder=f"{folder}/{kind}") for kind in ("hf", "dcp"))
    steps = f"{folder}/checkpoints"
    with world.manager(tmp_path, model, folder=steps, timeout_seconds=600.0, export=exports) as manager:
        manager.load()
        manager.save(1, last_step=True)
        manager.wait()
        exported = dict(manager.exported)
    for export, place in exported.items():
        assert str(place).startswith("ram://box/"), export
    with HuggingFaceReader(locate(exported[exports[0]])) as reader:
        assert reader.tensors


@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_an_export_that_was_stopped_writes_over_no_later_one(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on while it uploads, when another run has made the same export meanwhile."""
    config = ExportConfig(kind, folder=f"ram://box/{uuid.uuid4().hex}")

    def export(seed: int) -> Place:
        torch.manual_seed(seed)
        with world.manager(tmp_path, Llama3(CONFIG), save=None, export=(config,)) as manager:
            manager.save(1, last_step=True)
            return manager.exported[config]

    write, later = ObjectWriter.write, list[dict[str, torch.Tensor]]()

    def stopped(writer: ObjectWriter, view: memoryview, offset: int) -> None:
        monkeypatch.setattr(ObjectWriter, "write", write)
        later.append(read_all(export(1)))
        write(writer, view, offset)

    monkeypatch.setattr(ObjectWriter, "write", stopped)
    with pytest.raises(ExportError, match="another run exports to this name"):
        export(0)
    assert same(read_all(open_location(f"{config.folder}/step-1")), later[0])


def test_nothing_above_the_seam_asks_which_store_it_has() -> None:
    """No module but those of the stores names their kinds in a test of type, or a union of them."""
    forks = []
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        if name.startswith(SEAM):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                kinds = ast.unparse(node.args[1])
                if any(kind in kinds for kind in ("BucketPath", "ObjectStore", "Posix", "ObjectReader", "FileReader")):
                    forks.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
            if isinstance(node, (ast.Name, ast.alias)) and (getattr(node, "id", "") or getattr(node, "name", "")) in (
                "Location", "ListedPath",
            ):  # fmt: skip
                forks.append(f"{name}: {ast.unparse(node)}")
    assert not forks, "\n".join(forks)


def test_what_a_mounted_file_system_alone_does_is_known_by_module() -> None:
    """The list of such modules grows by no accident."""
    asking = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\blocal_path\(|\.is_mounted\b", path.read_text())
    }
    assert {name for name in asking if not name.startswith(SEAM)} == {*MOUNTED_ALONE}
