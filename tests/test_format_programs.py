"""The two programs of tests/format_programs, written from docs/format.md alone: they need nothing of this package.

Each runs in a process that refuses to import titan_ckpt, torch and safetensors.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests import world
from tests.format_programs.read_step import Tensor, Torch, described
from tests.test_golden_native import GOLDEN, digests, manifests
from tests.world import manager as build
from titan_ckpt import CheckpointManager
from titan_ckpt.cli.main import main
from titan_ckpt.encoding import typed_json

PROGRAMS = Path(__file__).parent / "format_programs"
ALONE = """
import runpy, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("titan_ckpt", "converters", "torch", "safetensors"):
            raise ImportError(f"the program imports {name}")
sys.meta_path.insert(0, Refuse())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program in whose process some packages cannot be imported."""


def run(program: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(PROGRAMS / program), *map(str, arguments)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def converted(value: Any) -> Any:
    """Return a value with what is torch's in the types of the program."""
    if isinstance(value, torch.Tensor):
        raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return Tensor(str(value.dtype).removeprefix("torch."), tuple(value.shape), raw)
    if isinstance(value, torch.dtype):
        return Torch("$torch.dtype", str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return Torch("$torch.device", str(value))
    if isinstance(value, torch.Size):
        return Torch("$torch.Size", str(list(value)))
    if isinstance(value, dict):
        made = {converted(key): converted(item) for key, item in value.items()}
        kind = type(value)
        if isinstance(value, defaultdict):
            return defaultdict(value.default_factory, made)
        return OrderedDict(made) if kind is OrderedDict else Counter(made) if kind is Counter else made
    if isinstance(value, deque):
        return deque(map(converted, value), value.maxlen)
    return type(value)(map(converted, value)) if isinstance(value, list | tuple | set | frozenset) else value


def test_a_program_that_imports_the_package_fails(tmp_path: Path) -> None:
    """The hook works: without it the tests below would show nothing."""
    program = tmp_path / "program.py"
    program.write_text("import titan_ckpt")
    with pytest.raises(AssertionError, match="the program imports titan_ckpt"):
        run(str(program))


@pytest.mark.parametrize("step", manifests())
def test_a_reader_written_from_the_page_reads_every_golden_step(step: str) -> None:
    """Every tensor has the bytes, and every state the types and values, that titan_ckpt reads."""
    folder = GOLDEN / step
    found = json.loads(run("read_step.py", folder))
    tensors = {name: text.removeprefix("tensor ") for name, text in found["tensors"].items()}
    assert tensors == digests(folder)
    names = [file["name"] for file in manifests()[step]["files"] if file["name"].endswith(".json")]
    assert found["states"].keys() == set(names)
    for name in names:
        assert found["states"][name] == described(converted(typed_json.loads((folder / name).read_bytes())))


def test_a_reader_written_from_the_page_recognises_the_base_of_an_adapter() -> None:
    """The digest in the adapter's manifest is the one that the page defines."""
    found = json.loads(run("read_step.py", GOLDEN / "lora-adapter/base/step-0"))
    assert found["base_digest"] == manifests()["lora-adapter/checkpoints/step-2"]["base"]["digest"]


class Data:
    """The numbers of the steps, and how far they are used."""

    def __init__(self, start: int = 0) -> None:
        self.next = start

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.next = state_dict["next"]


class Training:
    """A run whose steps depend on everything that a step stores."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the generator that is stored
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
        named = dict(self.model.named_parameters())
        biases = [p for name, p in named.items() if name.endswith("bias")]
        weights = [p for name, p in named.items() if not name.endswith("bias")]
        self.names = {p: name for name, p in named.items()}
        groups: list[dict[str, Any]] = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.data, self.counts = Data(seed), Data(seed)

    def step(self) -> float:
        noise = torch.rand(6, 4) + random.random() + float(np.random.rand())  # noqa: NPY002
        loss: torch.Tensor = (self.model(noise + self.data.next) - self.counts.next).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.data.next += 1
        self.counts.next += 3
        return loss.item()

    def dump(self, folder: Path, step: int, ranks: int = 1) -> list[Path]:
        """Write what a step stores, as plain JSON and arrays."""
        arrays = {name: value.detach().numpy() for name, value in self.model.state_dict().items()}
        for parameter, state in self.optimizer.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                arrays[f"{self.names[parameter]}|{name}"] = state[name].numpy()  # type: ignore[index]
        numpy_state: Any = np.random.get_state()  # noqa: NPY002
        arrays |= {"random|torch": torch.get_rng_state().numpy(), "random|numpy": numpy_state[1]}
        left_out = ("params", "foreach", "fused", "capturable", "differentiable")
        groups = [
            {
                "hyperparameters": {k: v for k, v in group.items() if k not in left_out},
                "fqns": [self.names[p] for p in group["params"]],
                "step": self.optimizer.state[group["params"][0]]["step"].item(),
            }
            for group in self.optimizer.param_groups
        ]
        facts = {
            "step": step,
            "ranks": ranks,
            "seconds": 1.5e9,
            "groups": groups,
            "lr_scheduler": self.schedule.state_dict(),
            "dataloader": self.data.state_dict(),
            "states": {"counts": self.counts.state_dict()},
            "random": {"python": random.getstate(), "numpy": [numpy_state[0], *numpy_state[2:]]},
        }
        paths = [folder / "facts.json", folder / "arrays.npz"]
        paths[0].write_text(json.dumps(facts))
        np.savez(paths[1], **arrays)
        return paths

    def manager(self, folder: Path) -> CheckpointManager:
        return build(
            folder,
            self.model,
            self.optimizer,
            interval=2,
            lr_schedulers=[self.schedule],
            dataloader=self.data,
            states={"counts": self.counts},
        )


def test_a_step_that_was_written_from_the_page_resumes_exactly(tmp_path: Path) -> None:
    """Two steps in plain torch, a step written by the program, two steps more: the same bits as four steps in a row."""
    reference = Training(seed=1)
    reference.step()
    reference.step()
    root = tmp_path / "checkpoints"
    run("write_step.py", *reference.dump(tmp_path, 2), root)
    wanted = [reference.step(), reference.step()]
    resumed = Training(seed=7)
    with resumed.manager(tmp_path) as manager:
        assert manager.load().step == 2
        found = [resumed.step(), resumed.step()]
        assert manager.save(4)
    assert found == wanted
    for name, value in reference.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
    assert resumed.optimizer.param_groups[0]["lr"] == reference.optimizer.param_groups[0]["lr"]
    assert [main(["verify", str(root / f"step-{step}")]) for step in (2, 4)] == [0, 0]


def test_a_step_that_was_written_from_the_page_for_three_ranks_loads_exactly(tmp_path: Path) -> None:
    """Rows in uneven parts, ranks without a tensor, and numbers that rank 0 names and another rank has."""
    reference = Training(seed=1)
    reference.step()
    run("write_step.py", *reference.dump(tmp_path, 1, ranks=3), tmp_path / "checkpoints")
    resumed = Training(seed=7)
    assert world.load(resumed.manager(tmp_path)).step == 1
    for name, value in reference.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
    for mine, wanted in zip(resumed.model.parameters(), reference.model.parameters(), strict=True):
        for name, value in reference.optimizer.state[wanted].items():
            assert torch.equal(resumed.optimizer.state[mine][name], value), name
    assert (resumed.data.next, resumed.counts.next) == (reference.data.next, reference.counts.next)
    assert main(["verify", str(tmp_path / "checkpoints/step-1")]) == 0


class Odd(nn.Module):
    """Dtypes, shapes and names that need the less usual parts of the page, and state beside tensors."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = [torch.bool, torch.uint16, torch.bfloat16, torch.complex64, torch.complex128]
        dtypes += [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2]
        for dtype in dtypes:
            for shape in [(), (0, 2), (3, 2)]:
                bits = torch.arange(1, 1 + dtype.itemsize * math.prod(shape), dtype=torch.uint8)
                value = torch.empty(shape, dtype=dtype)
                value.view(-1).view(torch.uint8).copy_(bits % 2 if dtype == torch.bool else bits)
                self.register_buffer(f"{str(dtype)[6:]}#{len(shape) + 1 if 0 not in shape else 1}", value)
        for name in ("__metadata__", "ü/λ 名", 'x"\\', "line\nbreak", "'"):
            self.register_parameter(name, nn.Parameter(torch.randn(2)))
        self.more = {"nested": [(1, 2**70), float("nan")], 3: torch.arange(2)}

    def get_extra_state(self) -> Any:
        return self.more

    def set_extra_state(self, state: Any) -> None:
        self.more = state


def test_a_reader_written_from_the_page_reads_a_seed_of_odd_tensors(tmp_path: Path) -> None:
    """A step of kind "model" with a state file; carried dtypes, numbers, empty tensors, names of any text."""
    model = Odd()
    with build(tmp_path, model) as manager:
        manager.load()
        manager.save_seed()
    found = json.loads(run("read_step.py", tmp_path / "checkpoints/step-0"))
    wanted = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    assert found["tensors"] == {f"model.{name}": described(converted(value)) for name, value in wanted.items()}
    run_state = {"step": 0, "model": {"_extra_state": model.more}}
    assert found["states"]["state.json"] == described(converted(run_state))
