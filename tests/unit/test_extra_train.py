"""The extra `train` (torchao, torchdata, tokenizers): what works without it, and the error that names it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = 'pip install "titan-ckpt[train]"'

REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
"""


def run_without(names: set[str], code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process in which these packages cannot be imported."""
    command = [sys.executable, "-c", REFUSE.format(names=names) + code, *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)


@pytest.mark.parametrize(
    ("table", "kind"), [({"kind": "float8", "emulate": True}, "float8"), ({"kind": "qat", "scheme": "mxfp8"}, "qat")]
)
def test_a_quantizing_converter_names_the_extra(table: dict[str, object], kind: str) -> None:
    """Without torchao, converters import and LoRA converts; Float8 and QAT raise one error with the pip command."""
    code = f"""
from titan_ckpt.converters import from_tables
from titan_ckpt.errors import ConverterError
from titan_ckpt.models.registry import build_model

from_tables([{{"kind": "lora", "target_modules": ["wq"]}}]).convert(build_model("llama3", flavor="debug-0.5m"))
try:
    from_tables([{table!r}]).convert(build_model("llama3", flavor="debug-0.5m"))
except ConverterError as error:
    print(error)
"""
    done = run_without({"torchao", "torchdata", "tokenizers", "transformers", "peft"}, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{kind} needs torchao (")
    assert done.stdout.rstrip().endswith(PIP)


@pytest.mark.parametrize("missing", ["torchdata", "tokenizers"])
def test_the_trainer_names_the_extra(missing: str) -> None:
    """Without torchdata or tokenizers, train.py ends with one error that has the pip command, and no traceback."""
    code = "from titan_ckpt.cli.main import main; sys.exit(main(['train', 'configs/debug_pretrain.toml']))"
    done = run_without({missing}, code)
    assert done.returncode == 2
    assert PIP in done.stderr
    assert f"No module named {missing!r}" in done.stderr
    assert "Traceback" not in done.stderr
