"""Started by torchrun: a rank that dies once is started again with all others, and the run goes on by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_run import write_toml
from titan_ckpt.directory.manifest import MANIFEST_NAME, Manifest
from titan_ckpt.training.callbacks.console import read_metrics
from titan_ckpt.training.run_file import read_run
from titan_ckpt.training.trainer import Trainer

ROOT = Path(__file__).parents[2]
PROGRAM = """\
import os, signal
from titan_ckpt.training.callbacks import Callback
from titan_ckpt.training.run_file import read_run
from titan_ckpt.training.trainer import Trainer

class DieOnce(Callback):
    def on_step_end(self, trainer, metrics):
        first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if metrics.step == 6 and trainer.ranks.rank == 1 and first_life:
            os.kill(os.getpid(), signal.SIGKILL)

Trainer(*read_run("run.toml"), callbacks=[DieOnce()]).run()
"""


def test_a_rank_that_dies_once_costs_only_the_steps_since_the_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun --max-restarts resumes at step 4, and the course is that of one process in which nobody died."""
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM)
    checkpoint = {"save": {"interval": 4}, "stop": {"exception_seconds": 1}}
    training = {"steps": 8, "batch_size": 2}
    write_toml(Path(), output_folder="ranks", training=training, checkpoint=checkpoint)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    environment = {**os.environ} | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*launcher, "program.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    step = Path("ranks/checkpoints/step-8")
    resumed_from = Manifest.from_bytes((step / MANIFEST_NAME).read_bytes()).resumed_from
    assert resumed_from is not None
    assert resumed_from["step"] == 4
    alone, _ = read_run("run.toml", ["--output_folder", "alone", "--training.batch_size", "4"])
    Trainer(alone).run()
    courses = [list(read_metrics(Path(folder) / "metrics.jsonl")) for folder in ("ranks", "alone")]
    assert [row["step"] for row in courses[0]] == [*range(1, 9)]
    assert [row["loss"] for row in courses[0]] == pytest.approx([row["loss"] for row in courses[1]], abs=2e-5)
