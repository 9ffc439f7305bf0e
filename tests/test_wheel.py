"""The wheel alone: built, installed into an environment of its own, and used from an empty folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "-q"]


def outside() -> dict[str, str]:
    """Return an environment in which this checkout is not importable."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of what a source distribution has."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, source)
    for name in ("converters", "docs", "titan_ckpt"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
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
    """Licence, platforms, extras, entry points, templates, types and pages; nothing but the two packages."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        entries = archive.read(f"{info}/entry_points.txt").decode()
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert f"{info}/licenses/LICENSE" in names
    assert set(metadata.get_all("Provides-Extra") or ()) >= {"train", "hf", "tensorboard", "wandb"}
    assert "Operating System :: POSIX :: Linux" in (metadata.get_all("Classifier") or ())
    assert {"titan_ckpt/py.typed", "converters/py.typed", "titan_ckpt/cli/templates/lora.toml"} <= names
    pages = f"{info.removesuffix('.dist-info')}.data"
    assert {name.partition("/")[0] for name in names} == {"titan_ckpt", "converters", info, pages}
    assert {f"{pages}/data/share/doc/titan-ckpt/{name}" for name in ("README.md", "docs/configuration.md")} <= names
    description = str(metadata.get_payload())
    assert "docs/configuration.md lists" in description
    assert re.findall(r"\]\((?!https?:)", description) == [], "a link that leads nowhere on a package index"
    assert "titan-ckpt = titan_ckpt.cli.main:main" in entries
    assert "[titan_ckpt.tables]\nconverters = converters" in entries


@pytest.mark.timeout(900)  # a dozen processes, each of which imports torch, beside other tests
def test_the_tutorial_leads_from_an_empty_folder_to_an_answer(installed: Path, tmp_path: Path) -> None:
    """All commands and programs of docs/tutorial.md run in order; the page's listings show what `ls` prints."""
    environment = outside()
    environment["PATH"] = f"{installed / 'bin'}:{environment['PATH']}"
    page = (ROOT / "docs" / "tutorial.md").read_text()
    blocks = re.findall(r"(?<!-->\n)^```(sh|python)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    script = "\n".join(text if kind == "sh" else f"python - <<'EOF'\n{text}EOF" for kind, text in blocks)
    words = ["bash", "-euc", script]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=840, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in done.stderr.lower(), done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines if line[-2:] == ["resumed", "from"]] == ["20"]
    assert [line[0] for line in lines if line[-1:] == ["proved"]] == [
        "exports/step-20", "exports/step-30", "exports/step-20", "exports/step-20-peft",
    ]  # fmt: skip
    assert "checkpoints/step-20 is whole" in done.stdout
    _, question, answer = done.stdout.partition("The square of 12")
    assert question
    assert answer.strip()
