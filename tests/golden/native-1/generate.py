"""Writes the golden folders beside it with the code of its day; nobody runs it but to add a case.

    python tests/golden/native-1/generate.py CASE...

A case whose folder exists is refused, because a golden folder is worth something only as its old code wrote it. The
runs are in runs.py, and tests/test_golden_native.py resumes them; `expected.json` is taken from their live objects.
The first eight were written with torch 2.13, before the modules were moved into folders; lora-adapter and peft-export
need hf-export. memory-order came last.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runs import External, Llama, OneProcess, Ordered, Run, TwoRanks, described
from safetensors import safe_open
from safetensors.torch import load_file

from titan_ckpt import ExportConfig, SaveConfig
from titan_ckpt.converting import convert
from titan_ckpt.testing import distributed

HERE = Path(__file__).parent
HF = Path("hf-export/exports/step-2")
NOT_KEPT = (".lease", ".staging", ".trash", "telemetry.jsonl")


def write_expected(case: str, found: dict[str, Any]) -> None:
    (HERE / case / "expected.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def saved(run: Run, case: str, step: int, **settings: Any) -> dict[str, Any]:
    """Train up to a step that is saved, and return what a resume of it must give."""
    save = SaveConfig(interval=2, timeout_seconds=30, **settings)
    with run.manager(Path(case), save=save) as manager:
        run.train(manager, step)
        facts = run.facts()
    run.settle(step)
    return facts | {"tensors": run.facts()["tensors"]}


def names_in(step: Path) -> set[str]:
    """Return the names of the tensors in a step's rank files, as the format describes them."""
    names: set[str] = set()
    for path in step.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            fqns = json.loads(file.metadata().get("titan_ckpt.fqns", "{}"))
            names |= {fqns.get(key, key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    return names


def completed(case: str, steps: dict[str, Any], run: Run) -> None:
    """Write down the facts of each step, which of the tensors are not in its rank files, and how the run goes on."""
    for step, facts in steps.items():
        facts["elsewhere"] = sorted(facts["tensors"].keys() - names_in(HERE / case / "checkpoints" / f"step-{step}"))
    write_expected(case, {"steps": steps, "continued": run.go_on()})


def one_process(case: str) -> None:
    """Train two steps, resume them with other objects, and train two more."""
    first = saved(OneProcess(first=True), case, 2)
    run = OneProcess()
    completed(case, {"2": first, "4": saved(run, case, 4)}, run)


def process(case: str) -> None:
    """Train two steps, and let a process write them."""
    run = OneProcess(first=True)
    completed(case, {"2": saved(run, case, 2, async_mode="process")}, run)


def external(case: str) -> None:
    """Train two steps, and save them without the weights."""
    run = External(first=True)
    completed(case, {"2": saved(run, case, 2)}, run)


def memory_order(case: str) -> None:
    """Train two steps beside arrays and tensors that are not row-major."""
    run = Ordered(first=True)
    completed(case, {"2": saved(run, case, 2)}, run)


@distributed(nproc=2)
def two_ranks(case: str) -> None:
    """Train two steps on two ranks."""
    run = TwoRanks(first=True)
    steps = {"2": saved(run, case, 2)}
    if run.rank == 0:
        completed(case, steps, run)
    else:
        run.go_on()


def lora_adapter(case: str) -> None:
    """Train two steps of adapters, over a native folder of weights that is converted from the exported ones."""
    base = Path(case, "base", "step-0")
    base.parent.mkdir(parents=True)
    convert(HF, base, "native", key_map=Llama().model.key_map())
    run = Llama(first=True, lora=True, sources=(base,))
    completed(case, {"2": saved(run, case, 2)}, run)


def exported(run: Run, case: str, export: ExportConfig) -> dict[str, Any]:
    """Train two steps, export the last one, and return the model's tensors."""
    with run.manager(Path(case), save=None, export=(export,)) as manager:
        run.train(manager, 2, ends=True)
    return {name: value for name, value in run.facts()["tensors"].items() if name.startswith("model.")}


def hf_export(case: str) -> None:
    """Export a Hugging Face folder of several files."""
    tensors = exported(Llama(first=True), case, ExportConfig("hf", max_shard_bytes=5_000))
    write_expected(case, {"tensors": tensors, "files": in_safetensors(case)})


def peft_export(case: str) -> None:
    """Export adapters over the Hugging Face folder."""
    run = Llama(first=True, lora=True, sources=(HF,))
    write_expected(case, {"tensors": exported(run, case, ExportConfig("peft")), "files": in_safetensors(case)})


def in_safetensors(case: str) -> dict[str, str]:
    """Describe what the library that owns the format reads."""
    paths = sorted((HERE / case / "exports").glob("*/*.safetensors"))
    return {name: described(value) for path in paths for name, value in load_file(path).items()}


@distributed(nproc=2)
def dcp_export(case: str) -> None:
    """Export a folder of torch.distributed.checkpoint from two ranks."""
    run = TwoRanks(first=True)
    tensors = exported(run, case, ExportConfig("dcp"))
    if run.rank == 0:
        files = {name.removeprefix("model."): value for name, value in tensors.items()}
        write_expected(case, {"tensors": tensors, "files": files})


CASES: dict[str, Callable[[str], None]] = {
    "one-process": one_process,
    "process": process,
    "external": external,
    "memory-order": memory_order,
    "two-ranks": two_ranks,
    "hf-export": hf_export,
    "lora-adapter": lora_adapter,
    "peft-export": peft_export,
    "dcp-export": dcp_export,
}


def tidy(case: str) -> None:
    """Remove what belongs to the process that wrote. Raises: ValueError for a trace of this machine in any file."""
    for name in NOT_KEPT:
        for path in (HERE / case).rglob(name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    traces = [str(Path.home()), tempfile.gettempdir(), f'"{socket.gethostname()}"', str(HERE.parents[2])]
    for path in (HERE / case).rglob("*"):
        if path.is_file() and (found := [trace for trace in traces if trace.encode() in path.read_bytes()]):
            raise ValueError(f"{path} names this machine: {found}")


if __name__ == "__main__":
    with contextlib.chdir(HERE):  # so that the paths of bases are recorded relative to this folder
        for name in sys.argv[1:]:
            os.mkdir(name)
            CASES[name](name)
            tidy(name)
