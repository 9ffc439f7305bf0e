"""The extra `train` (torchao, torchdata, tokenizers): what works without it, and the error that names it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = 'pip install "titan-ckpt[train]"'

RUN = """
import json, os, sys, torch

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

assert not [name for name in sys.modules if name.startswith("titan_ckpt")]
for names, code, out in json.load(sys.stdin):
    assert not {*names} & sys.modules.keys()
    if (pid := os.fork()) == 0:
        for number, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{out}.{kind}", os.O_WRONLY | os.O_CREAT), number)
        sys.meta_path.insert(0, Refuse())
        ended = 0
        try:
            exec(code)
        except SystemExit as end:
            ended = end.code
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended)  # to free all that was imported takes long
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)  # a fork would write it again
"""
"""Runs code in forks of a process that has imported torch, where some packages cannot be imported."""

LORA_AND = """
from titan_ckpt.converters import from_tables
from titan_ckpt.errors import ConverterError
from titan_ckpt.models.registry import build_model

from_tables([{"kind": "lora", "target_modules": ["wq"]}]).convert(build_model("llama3", flavor="debug-0.5m"))
try:
    from_tables([%r]).convert(build_model("llama3", flavor="debug-0.5m"))
except ConverterError as error:
    print(error)
"""
TRAIN = "from titan_ckpt.cli.main import main; sys.exit(main(['train', 'configs/debug_pretrain.toml']))"
QUANTIZING = {"float8": {"kind": "float8", "emulate": True}, "qat": {"kind": "qat", "scheme": "mxfp8"}}
CASES: dict[str, tuple[list[str], str]] = {
    **{
        kind: (["torchao", "torchdata", "tokenizers", "transformers", "peft"], LORA_AND % table)
        for kind, table in QUANTIZING.items()
    },
    **{missing: ([missing], TRAIN) for missing in ("torchdata", "tokenizers")},
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """Return the exit code of each case, and what it has written to both streams."""
    folder = tmp_path_factory.mktemp("said")
    given = json.dumps([(*case, str(folder / name)) for name, case in CASES.items()])
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=ROOT, input=given, text=True, capture_output=True, check=False
    )
    codes = map(int, done.stdout.split())
    texts = [[(folder / f"{name}.{kind}").read_text() for kind in ("out", "err")] for name in CASES]
    return {name: (code, out, err) for name, code, (out, err) in zip(CASES, codes, texts, strict=True)}


@pytest.mark.parametrize("kind", QUANTIZING)
def test_a_quantizing_converter_names_the_extra(kind: str, said: dict[str, tuple[int, str, str]]) -> None:
    """Without torchao, converters import and LoRA converts; Float8 and QAT raise one error with the pip command."""
    code, out, err = said[kind]
    assert code == 0, err
    assert out.startswith(f"{kind} needs torchao (")
    assert out.rstrip().endswith(PIP)


@pytest.mark.parametrize("missing", ["torchdata", "tokenizers"])
def test_the_trainer_names_the_extra(missing: str, said: dict[str, tuple[int, str, str]]) -> None:
    """Without torchdata or tokenizers, train.py ends with one error that has the pip command, and no traceback."""
    code, _, err = said[missing]
    assert code == 2
    assert PIP in err
    assert f"No module named {missing!r}" in err
    assert "Traceback" not in err
