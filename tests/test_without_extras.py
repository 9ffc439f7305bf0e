"""`pip install titan-ckpt` works alone: no optional package is imported, and help imports no torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOOK = ROOT / "tests" / "without_extras"
EXTRAS = ["datasets", "obstore", "peft", "tokenizers", "torchao", "torchdata", "transformers", "wandb"]


def python(code: str, folder: Path) -> str:
    """Run code in a process that refuses the optional packages; return what it printed."""
    environment = {**os.environ, "PYTHONPATH": f"{HOOK}:{ROOT}"}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_core_needs_seven_packages() -> None:
    """Everything else is an extra, and `train` has what train.py and all converters need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [requirement.partition(">")[0] for requirement in project["dependencies"]]
    assert names == ["numpy", "rich", "safetensors", "tomli", "torch", "tyro", "xxhash"]
    assert [r.partition(">")[0] for r in project["optional-dependencies"]["train"]] == [
        "datasets",
        "tokenizers",
        "torchao",
        "torchdata",
    ]


def test_the_hook_refuses(tmp_path: Path) -> None:
    """If the hook is in PYTHONPATH, as it is for all tests of the core, an installed extra cannot be imported."""
    code = f"for name in {EXTRAS}:\n try:\n  __import__(name)\n except ImportError as e:\n  print(name, e)"
    said = python(code, tmp_path).splitlines()
    assert [line.split()[0] for line in said if "refused by tests/without_extras" in line] == EXTRAS


def test_make_runs_the_tests_of_the_core_with_the_hook() -> None:
    """`make test` names the hook for these tests, and in a process that has it, an import is refused."""
    plan = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (core,) = [line for line in plan.splitlines() if line.startswith("PYTHONPATH=tests/without_extras ")]
    assert "-m pytest" in core
    assert "tests/test_without_extras.py" in core
    is_named = "tests/without_extras" in os.environ.get("PYTHONPATH", "")
    assert is_named == any(type(finder).__name__ == "_Refuse" for finder in sys.meta_path)


def test_torchtitans_part_fails_without_its_environment(tmp_path: Path) -> None:
    """`make test-torchtitan` leaves nothing out if the environment cannot be made, and `make test` runs it."""
    command = ["make", f"TITAN={tmp_path}/none", "PYTHON=false", "test-torchtitan"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 2
    assert "-m pytest" not in made.stdout
    plan = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "pytest -c tests/torchtitan/pytest.ini  tests/torchtitan" in plan


def test_help_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    """`titan-ckpt --help` and `import titan_ckpt` do not wait for torch; a public name brings it."""
    code = """
import sys
import titan_ckpt
from titan_ckpt.cli.main import main
try:
    main(["--help"])
except SystemExit as end:
    assert end.code == 0
assert not {"torch", "numpy"} & set(sys.modules)
assert set(titan_ckpt.__all__) <= set(dir(titan_ckpt))
for name in titan_ckpt.__all__:
    assert getattr(titan_ckpt, name).__name__ == name
assert "torch" in sys.modules
print("checked")
"""
    assert python(code, tmp_path).endswith("checked\n")


def test_a_lora_run_needs_no_extra(tmp_path: Path) -> None:
    """A model with LoRA is trained, saved adapter-only over its base, resumed and exported merged."""
    code = """
import torch
from titan_ckpt.converters import LoRAConfig, build
from titan_ckpt import CheckpointConfig, CheckpointManager, ExportConfig, InitialLoadConfig, SaveConfig


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.second(self.first(x))


torch.manual_seed(0)
config = CheckpointConfig(save=SaveConfig(interval=1))
with CheckpointManager(config, model_parts=[Model()], base_folder="base") as base:
    base.save(1)


def run(steps):
    model = Model()
    converters = build([LoRAConfig(rank=2, target_modules=("first", "second"))])
    converters.convert(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    config = CheckpointConfig(
        save=SaveConfig(interval=1),
        initial_load=(InitialLoadConfig("base/checkpoints/step-1"),),
        export=(ExportConfig(format="dcp"),),
    )
    with CheckpointManager(
        config, model_parts=[model], optimizers=[optimizer], model_converters=converters, base_folder="run"
    ) as manager:
        start = manager.load().step
        for step in range(start + 1, steps + 1):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.save(step, last_step=step == 4)
    return start


assert run(2) == 0
assert run(4) == 2
print("checked")
"""
    assert python(code, tmp_path) == "checked\n"
    assert (tmp_path / "run" / "exports" / "step-4" / ".metadata").exists()
