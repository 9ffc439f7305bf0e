"""The wheel alone: built, installed into an environment of its own, and used from an empty folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from titan_ckpt.training.data.corpus import open_corpus
from titan_ckpt.training.data.tokenizer import train_tokenizer

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "-q"]


def outside() -> dict[str, str]:
    """Return an environment in which this checkout is not importable."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of what a source distribution has."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, source)
    for name in ("converters", "titan_ckpt"):
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
    """Licence, platforms, extras, entry points, templates and types; nothing but the two packages."""
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
    assert {name.partition("/")[0] for name in names} == {"titan_ckpt", "converters", info}
    assert "titan-ckpt = titan_ckpt.cli.main:main" in entries
    assert "[titan_ckpt.tables]\nconverters = converters" in entries


def base_model(folder: Path) -> Path:
    """Write a tiny model of transformers, with a tokenizer."""
    tokenizer = train_tokenizer(open_corpus("builtin"), 300, Path(os.environ["TITAN_CKPT_TESTS_CACHE"]))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(folder)
    for file in tokenizer.folder.iterdir():
        shutil.copy(file, folder)
    return folder


def test_from_an_empty_folder_to_an_answer(installed: Path, tmp_path: Path) -> None:
    """Text of one's own and a Hugging Face model, to a merged model that transformers' pipeline answers from."""
    base_model(tmp_path / "base")
    lines = [json.dumps({"text": f"The answer to question {n} is {n * n}."}) for n in range(60)]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    environment = outside()
    environment["PATH"] = f"{installed / 'bin'}:{environment['PATH']}"

    def shell(command: str) -> str:
        words = ["bash", "-c", command]
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    shell("titan-ckpt init lora --model base --data mine.jsonl")
    small = "--training.steps 4 --training.batch_size 2 --data.sequence_length 16 --training.device cpu"
    shell(f"titan-ckpt train run.toml {small}")
    assert "adapter" in shell("titan-ckpt ls outputs/lora/checkpoints")
    ask = "pipeline('text-generation', 'outputs/lora/exports/step-4')('The answer', max_new_tokens=4, do_sample=False)"
    answer = shell(f"python -c \"from transformers import pipeline; print({ask}[0]['generated_text'])\"")
    assert answer.startswith("The answer")
    assert len(answer.strip()) > len("The answer")
