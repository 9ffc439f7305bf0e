"""Started by torchrun: a rank that dies once is started again with all others, and the run goes on by itself."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed.run
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.forked import Program
from tests.tiny_run import settings, write_toml
from titan_ckpt.directory.manifest import MANIFEST_NAME, Manifest
from titan_ckpt.training.callbacks.console import read_metrics
from titan_ckpt.training.trainer import Trainer

CALLBACK = """\
import os, signal, time
from titan_ckpt.training.callbacks import Callback

class DieOnce(Callback):
    def on_step_end(self, trainer, metrics):
        first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if metrics.step == 6 and trainer.ranks.rank == 1 and first_life:
            while not os.path.exists("ranks/checkpoints/step-4"):  # steps are quicker than a save's commit may be
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
"""

PAGE = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text()
LATE_AFTER = """
import os, time
time.sleep(2.0 * (os.environ["TORCHELASTIC_RESTART_COUNT"] == os.environ["RANK"] == "1"))
"""
DIE_ONCE = """
import signal, torch

if (start, rank) == ("start-0", 1):
    os.kill(os.getpid(), signal.SIGKILL)
ones = torch.ones(1)
dist.all_reduce(ones)
open(f"{start}-{rank}", "w").write(str(ones.item()))
dist.destroy_process_group()
"""


def rank(unbuffered: str, as_module: str, module: str, *words: str) -> None:
    """Do in this process what `python -u -m module words` does."""
    assert (unbuffered, as_module) == ("-u", "-m")
    sys.path.insert(0, "")
    sys.argv[1:] = words
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise


def torchrun(*words: str) -> None:
    """Do what the command does; its agent forks the ranks, because each that imports torch anew takes seconds."""

    def launch(config: LaunchConfig, entrypoint: str) -> elastic_launch:
        assert entrypoint == sys.executable
        config.start_method = "fork"
        return elastic_launch(config, rank)

    with mock.patch.object(torch.distributed.run, "elastic_launch", launch):
        torch.distributed.run.main(words)


def test_a_rank_that_dies_once_costs_only_the_steps_since_the_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun --max-restarts resumes at step 4, and the course is that of one process in which nobody died."""
    monkeypatch.chdir(tmp_path)
    Path("dying.py").write_text(CALLBACK)
    checkpoint = {"save": {"interval": 4}, "stop": {"grace_seconds": 1}}
    tables: dict[str, Any] = {"checkpoint": checkpoint, "optimizer": {"lr": 3e-4}}
    training = {"steps": 8, "batch_size": 2}
    write_toml(Path(), output_folder="ranks", training=training, callbacks=["dying:DieOnce"], **tables)
    words = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "-m", "titan_ckpt", "train", "run.toml"]
    done = Program(torchrun, *words, output=tmp_path / "out.txt")
    assert done.wait(240) == 0, done.text()
    step = Path("ranks/checkpoints/step-8")
    resumed_from = Manifest.from_bytes((step / MANIFEST_NAME).read_bytes()).resumed_from
    assert resumed_from is not None
    assert resumed_from["step"] == 4
    Trainer(settings(Path("alone"), training={**training, "batch_size": 4}, **tables)).run()
    courses = [list(read_metrics(Path(folder) / "metrics.jsonl")) for folder in ("ranks", "alone/run")]
    assert [row["step"] for row in courses[0]] == [*range(1, 9)]
    assert [row["loss"] for row in courses[0]] == pytest.approx([row["loss"] for row in courses[1]], abs=2e-5)


def test_the_pages_process_group_has_a_prefix_for_each_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/parallel.md's program: ranks of a second start meet one another, and not those of the first."""
    monkeypatch.chdir(tmp_path)
    [group] = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    Path("own_group.py").write_text(LATE_AFTER + group + DIE_ONCE)
    words = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "-m", "own_group"]
    done = Program(torchrun, *words, output=tmp_path / "out.txt")
    assert done.wait(120) == 0, done.text()
    sums = {path.name: path.read_text() for path in tmp_path.glob("start-*")}
    assert sums == {"start-1-0": "2.0", "start-1-1": "2.0"}
