"""No operation escapes the matrix: files change through disk/posix.py alone, by what is written and what runs."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import titan_ckpt
from tests.faults.scenarios import SCENARIOS, Scenario, quick_folder
from tests.faults.shim import intercepted
from tests.faults.writers import DirectoryWriter
from tests.forked import answer
from titan_ckpt.disk import posix

PACKAGE = Path(titan_ckpt.__file__).parent
NOT_CHECKPOINTS = {"training", "cli", "testing", "models", "telemetry"}
"""Packages that write logs, tokenizer caches and reports, never checkpoints."""

CHANGES = {
    "os": "mkdir makedirs rename renames replace unlink remove rmdir removedirs link symlink truncate ftruncate write "
    "writev pwrite pwritev fsync fdatasync posix_fallocate sendfile copy_file_range chmod utime mkfifo",
    "shutil": "rmtree move copy copy2 copyfile copytree copyfileobj",
    "torch": "save",
    "tempfile": "mkdtemp mkstemp NamedTemporaryFile TemporaryDirectory TemporaryFile",
}
METHODS = {"write_text", "write_bytes", "touch", "symlink_to", "hardlink_to", "save_file"}


def changes_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, call) of every call that changes files by another way than the seam."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        module, _, function = name.rpartition(".")
        if function in CHANGES.get(module, "").split() or function in METHODS:
            yield node.lineno, name
        if module != "posix" and function == "mkdir":
            yield node.lineno, name
        if (name == "open" or function == "open") and opens_for_writing(node):
            yield node.lineno, ast.unparse(node)


def opens_for_writing(node: ast.Call) -> bool:
    """Say whether an open() call has a writing mode, or os.open a flag that creates or empties."""
    constants = [
        part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    modes = [text for text in constants if 0 < len(text) <= 3 and set(text) <= set("rwaxbt+")]
    return any(set(mode) & set("wax+") for mode in modes) or any(
        flag in ast.unparse(node) for flag in ("O_CREAT", "O_TRUNC")
    )


def test_no_module_changes_files_by_another_way() -> None:
    """Every call in the package that could change a file is a call of the seam, or does not concern checkpoints."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        if relative.name == "posix.py" or relative.parts[0] in NOT_CHECKPOINTS:
            continue
        found += [f"{relative}:{line}: {call}" for line, call in changes_in(ast.parse(path.read_text()))]
    no_files = {  # memory, a pipe between threads, standard error; what is no checkpoint
        ("exporting/torchtitan_state.py", "torch.save"),
        ("formats/dcp/writer.py", "torch.save"),
        ("disk/kernel.py", "os.ftruncate"),
        ("formats/native/writer_process.py", "os.write"),
        ("guard/notices.py", "os.write"),
        ("guard/run_guard.py", "os.write"),
        ("integrations/transformers/attach.py", "tempfile.TemporaryDirectory"),  # what exports copy beside the weights
        ("integrations/transformers/attach.py", "shutil.copy"),
        ("tools/report.py", "draft.write_text"),  # a page about a run
        ("tools/report.py", "os.replace"),
        ("tools/verifying.py", "Path(folder, file.name).write_bytes"),  # a temporary copy of a bucket's config.json
        ("converting.py", "torch.save"),  # a draft without values: torch alone knows that format
    }
    assert [line for line in found if (line.split(":")[0], line.split(": ")[1]) not in no_files] == []


def test_the_seam_is_called_by_its_module() -> None:
    """`from titan_ckpt.disk.posix import f` would keep a name that the shim cannot replace."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.ImportFrom) and node.module == "titan_ckpt.disk.posix"), path


def test_everything_in_the_seam_that_changes_files_is_numbered() -> None:
    """Each function of posix.py that calls a changing function of the system is in MUTATING."""
    tree = ast.parse(Path(posix.__file__).read_text())
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and function.name not in posix.MUTATING:
            changing = [call for _, call in changes_in(function) if call not in posix.MUTATING]
            assert changing == [], function.name
    names = "open_exclusive open_or_create pwrite_all truncate fallocate fsync close"
    assert {*names.split(), "fsync_folder", "mkdir", "unlink", "rmdir", "rename_noreplace"} <= posix.MUTATING


def test_the_check_itself_can_fail() -> None:
    """A sample of each way of changing files behind the seam's back is seen."""
    changing = (
        *("import os; os.replace(a, b)", "open(p, 'wb')", "p.write_bytes(b'')", "shutil.rmtree(p)", "p.mkdir()"),
        *("os.open(p, os.O_RDWR | os.O_CREAT)", "p.open('a')", "os.pwritev(fd, [b], 0)", "torch.save(x, p)"),
        "safetensors.torch.save_file(t, p)",
    )
    harmless = ("open(p)", "open(p, 'rb')", "p.open()", "os.open(p, os.O_RDONLY)", "posix.mkdir(p)", "s.replace(a, b)")
    assert [code for code in changing if not list(changes_in(ast.parse(code)))] == []
    assert [code for code in harmless if list(changes_in(ast.parse(code)))] == []


AUDITED = {f"os.{name}" for name in ["mkdir", "rename", "remove", "rmdir", "truncate", "link", "symlink", "chmod"]} | {
    "shutil.rmtree"
}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_what_the_interpreter_reports_is_what_the_shim_counts(scenario: Scenario) -> None:
    """Python's own audit events for changed files occur only inside a numbered operation, while real saves run."""
    with quick_folder() as folder:
        root = folder / "checkpoints"
        scenario.prepare(DirectoryWriter(), root)
        escaped = in_audited_child(
            lambda: DirectoryWriter().run(root, scenario.saves, lambda _: None, scenario.resume), folder
        )
    assert escaped == ["audited"]


def in_audited_child(act: Callable[[], object], folder: Path) -> Any:
    """Run `act` in a forked process under an audit hook; return "audited" and every change that escaped the seam."""
    inside = [0]
    escaped = ["audited"]

    def around(name: str, operation: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        inside[0] += 1
        try:
            return operation(*args)
        finally:
            inside[0] -= 1

    def hook(event: str, args: tuple[Any, ...]) -> None:
        writing = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if (event in AUDITED or writing) and not inside[0] and str(folder) in str(args[0]):
            escaped.append(f"{event} {args[0]}")

    def audited() -> list[str]:
        sys.addaudithook(hook)
        with intercepted(around):
            act()
        return escaped

    return answer(audited)[0]


def test_the_audit_can_fail() -> None:
    """A change behind the seam's back is reported."""
    with quick_folder() as folder:
        assert in_audited_child((folder / "escape").mkdir, folder) == ["audited", f"os.mkdir {folder / 'escape'}"]
