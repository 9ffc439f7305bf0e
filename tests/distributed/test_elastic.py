"""Started by torchrun: a rank that dies once is started again with all others, and the run goes on by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan_ckpt.manifest import MANIFEST_NAME, Manifest
from titan_ckpt.training.reporting import read_metrics

ROOT = Path(__file__).parents[2]
PROGRAM = """\
import os, signal, sys
import train
from titan_ckpt.training.callbacks import Callback
from titan_ckpt.training.trainer import Trainer

class DieOnce(Callback):
    def on_step_end(self, trainer, metrics):
        first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if metrics.step == 6 and trainer.ranks.rank == 1 and first_life and sys.argv[1] == "die":
            os.kill(os.getpid(), signal.SIGKILL)

train.configure_logging()
Trainer(*train.read_run("run.toml", sys.argv[2:]), callbacks=[DieOnce()]).run()
"""
CONFIG = """\
output_folder = "whole"
model = { flavor = "debug-0.5m" }
data = { sequence_length = 16, tokenizer = { vocab_size = 300 }, cache_folder = "cache" }
training = { steps = 8, batch_size = 2, device = "cpu" }
checkpoint = { save = { interval = 4 } }
"""


def test_a_rank_that_dies_once_costs_only_the_steps_since_the_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun --max-restarts resumes at step 4, and the course is that of a run in which nobody died."""
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM)
    Path("run.toml").write_text(CONFIG)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    courses = {}
    for word in ("live", "die"):
        command = [*launcher, "program.py", word, "--output_folder", word]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        courses[word] = [(row["step"], row["loss"]) for row in read_metrics(Path(word) / "metrics.jsonl")]
    assert courses["die"] == courses["live"]
    assert len(courses["die"]) == 8
    resumed_from = {word: manifest(Path(word)).resumed_from for word in courses}
    assert resumed_from["live"] is None
    assert (resumed_from["die"] or {})["step"] == 4


def manifest(output: Path) -> Manifest:
    return Manifest.from_bytes((output / "checkpoints" / "step-8" / MANIFEST_NAME).read_bytes())
