"""The wheel alone: built, installed into an environment of its own, and used away from this checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

from tests.test_bad_input import write_config
from tests.test_docs import PAGES, program

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "-q"]


def outside() -> dict[str, str]:
    """Return an environment in which this checkout is not importable."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy what a distribution is made of, with the link that leads to the converters."""
    source = tmp_path_factory.mktemp("source")
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, source)
    for name in ("converters", "docs", "titan_ckpt"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel."""
    out = tmp_path_factory.mktemp("wheel")
    command = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a new environment, which has the test's own packages as its dependencies."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    install = [*PIP, "--python", str(folder / "bin" / "python"), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, env=outside(), cwd=folder, check=True, timeout=120)
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    """Licence, platforms, extras, entry points, templates, types and pages; nothing but the one package."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        entries = archive.read(f"{info}/entry_points.txt").decode()
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert f"{info}/licenses/LICENSE" in names
    assert set(metadata.get_all("Provides-Extra") or ()) >= {"train", "hf", "tensorboard", "wandb"}
    assert "Operating System :: POSIX :: Linux" in (metadata.get_all("Classifier") or ())
    folders = {"titan_ckpt": ROOT / "titan_ckpt", "titan_ckpt/converters": ROOT / "converters"}
    ours = {f"{at}/{p.relative_to(folder)}" for at, folder in folders.items() for p in folder.rglob("*") if p.is_file()}
    assert {name for name in ours if "__pycache__" not in name} <= names
    assert {"titan_ckpt/py.typed", "titan_ckpt/converters/stack.py", "titan_ckpt/cli/templates/lora.toml"} <= ours
    pages = f"{info.removesuffix('.dist-info')}.data"
    assert {name.partition("/")[0] for name in names} == {"titan_ckpt", info, pages}
    assert {f"{pages}/data/share/doc/titan-ckpt/{name}" for name in ("README.md", "docs/configuration.md")} <= names
    description = str(metadata.get_payload())
    assert "docs/configuration.md lists" in description
    assert re.findall(r"\]\((?!https?:)", description) == [], "a link that leads nowhere on a package index"
    assert "titan-ckpt = titan_ckpt.cli.main:main" in entries
    assert "[titan_ckpt.tables]\nconverters = titan_ckpt.converters" in entries


def test_a_source_distribution_has_files_in_place_of_the_link(source: Path, tmp_path: Path) -> None:
    """The converters' files lie in titan_ckpt/converters, where the wheel that is built from it finds them."""
    command = [
        sys.executable,
        "-c",
        "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])",
    ]
    subprocess.run([*command, str(tmp_path)], cwd=source, env=outside(), check=True, capture_output=True, timeout=120)
    (built,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        members = {member.name.partition("/")[2]: member for member in archive}
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "converters").rglob("*.py")}
    assert {name for name in members if f"/{name}".startswith("/converters")} == set()
    assert all(members[f"titan_ckpt/{name}"].isreg() for name in ours)


def test_no_code_of_a_project_runs_that_its_run_file_does_not_name(installed: Path, tmp_path: Path) -> None:
    """A project with a converters, a tests and a train.py of its own trains LoRA and lists its steps."""
    for name in ("converters/__init__.py", "tests/__init__.py", "train.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('code of the project ran: ' + __name__)\n")
    lora = {"kind": "lora", "rank": 2, "target_modules": ["wq"]}
    run = write_config(tmp_path, {"converters": [lora], "training": {"steps": 1}})
    for words in (
        ["python", "-m", "titan_ckpt", "train", str(run)],
        ["titan-ckpt", "ls", "run/checkpoints"],
    ):
        done = subprocess.run(
            [str(installed / "bin" / words[0]), *words[1:]],
            cwd=tmp_path, env=outside(), capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split()[:1] == ["step"]
    assert re.search(r"^ *1 .*lora", done.stdout, flags=re.MULTILINE), done.stdout


RUN = """
import atexit, gc, json, os, runpy, sys, threading
import accelerate, titan_ckpt.manager, torch._dynamo, transformers.models.llama.modeling_llama
assert titan_ckpt.__file__.startswith(sys.argv[1]), titan_ckpt.__file__
gc.freeze()
for line in sys.stdin:
    output, programs = json.loads(line)
    failed = []
    for folder, *sys.argv in programs:
        if (pid := os.fork()) == 0:
            for number, kind in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{output}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
            os.chdir(folder)
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
            except SystemExit as end:
                assert not end.code, sys.argv
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            os._exit(0)  # to free all that was imported takes an interpreter a second
        if os.waitpid(pid, 0)[1]:
            failed.append(sys.argv)
            break
    print(json.dumps(failed), flush=True)
"""


@pytest.fixture(scope="module")
def interpreter(installed: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process of the new environment that has imported torch, for the programs of all tests here."""
    command = [str(installed / "bin" / "python"), "-c", RUN, str(installed)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=installed, env=outside(), text=True, **pipes) as process:
        yield process


def run(interpreter: subprocess.Popen[str], output: Path, programs: list[list[str]]) -> tuple[str, str]:
    """Run programs, each a folder, a file and arguments, one after another in forks; return what all have written."""
    assert interpreter.stdin is not None and interpreter.stdout is not None
    interpreter.stdin.write(json.dumps([str(output), programs]) + "\n")
    interpreter.stdin.flush()
    answer = interpreter.stdout.readline()
    out, err = (output.with_suffix(suffix).read_text() for suffix in (".out", ".err"))
    assert answer == "[]\n", answer + out + err
    return out, err


@pytest.mark.timeout(900)  # every page's blocks, one after another
def test_the_pages_blocks_run_with_the_wheel(interpreter: subprocess.Popen[str], tmp_path: Path) -> None:
    """Each page's Python in a folder of its own, where only the wheel answers."""
    programs = []
    for page in PAGES:
        folder = tmp_path / page.stem
        folder.mkdir()
        (folder / "page.py").write_text(program(page))
        programs.append([str(folder), "page.py"])
    run(interpreter, tmp_path / "pages", programs)


@pytest.mark.timeout(900)  # a dozen programs, one after another
def test_the_tutorial_leads_from_an_empty_folder_to_an_answer(
    installed: Path, interpreter: subprocess.Popen[str], tmp_path: Path
) -> None:
    """All commands and programs of docs/tutorial.md run in order; the page's listings show what `ls` prints."""
    page = (ROOT / "docs" / "tutorial.md").read_text()
    blocks = re.findall(r"(?<!-->\n)^```(sh|python)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    lines = ["titan-ckpt() { printf '%s\\0' titan-ckpt \"$@\" end; }"]
    for number, (kind, text) in enumerate(blocks):
        if kind == "python":
            (tmp_path / f"{number}.py").write_text(text)
        lines.append(text if kind == "sh" else f"printf '%s\\0' {number}.py end")
    told = subprocess.run(["bash", "-euc", "\n".join(lines)], cwd=tmp_path, capture_output=True, text=True, check=True)
    commands = [words.split("\0")[:-1] for words in told.stdout.split("end\0")[:-1]]
    command = str(installed / "bin" / "titan-ckpt")
    programs = [[str(tmp_path), *(command if w == "titan-ckpt" else w for w in words)] for words in commands]
    out, err = run(interpreter, installed / "tutorial", programs)
    assert "warning" not in err.lower(), err
    said = [line.split() for line in out.splitlines()]
    assert [line[0] for line in said if line[-2:] == ["resumed", "from"]] == ["20"]
    assert [line[0] for line in said if line[-1:] == ["proved"]] == [
        "exports/step-20", "exports/step-30", "exports/step-20", "exports/step-20-peft",
    ]  # fmt: skip
    assert "checkpoints/step-20 is whole" in out
    _, question, answer = out.partition("The square of 12")
    assert question
    assert answer.strip()
