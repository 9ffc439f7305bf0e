"""The scripts of docs/parallel.md for Slurm and Kubernetes, run by bash with stand-ins for the cluster's programs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

PAGE = (Path(__file__).parents[1] / "docs" / "parallel.md").read_text()
DIRECT, BY_TORCHRUN = re.findall(r"^```bash\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
(MANIFESTS,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
_, JOB = yaml.safe_load_all(MANIFESTS)
POD = JOB["spec"]["template"]["spec"]["containers"][0]


def cluster(folder: Path, program: str, text: str) -> dict[str, str]:
    """Put programs into a folder: srun runs its words, scontrol notes a requeue, `program` is what is trained with."""
    scripts = {
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NTASKS=4 "$@"',
        "scontrol": f'if [ "$1" = requeue ]; then echo "$2" >> {folder}/requeued; else echo node-0; fi',
        program: f'echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $*" >> {folder}/words; {text}',
    }
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node-[0-3]", "SLURM_JOB_ID": "77", "SLURM_NNODES": "4"}
    return {**os.environ, **job, "PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (75, True), (2, False), (1, False)])
def test_slurm_with_a_task_for_each_gpu_goes_by_the_exit_code(code: int, requeued: bool, tmp_path: Path) -> None:
    """Only a run that was stopped is put back; the job has the run's exit code."""
    environment = cluster(tmp_path, "titan-ckpt", f"exit {code}")
    done = subprocess.run(["bash", "-c", DIRECT], env=environment, check=False)
    assert done.returncode == code
    assert (tmp_path / "requeued").exists() == requeued
    assert (tmp_path / "words").read_text().startswith("3 1 4 node-0 train run.toml --output_folder")


@pytest.mark.parametrize(("code", "stopped"), [(0, False), (0, True), (1, True), (1, False)])
def test_slurm_with_torchrun_goes_by_the_file(code: int, stopped: bool, tmp_path: Path) -> None:
    """torchrun's exit code says nothing of a stop; the file that a run leaves does."""
    script = BY_TORCHRUN.replace("/shared/runs/pretrain", str(tmp_path))
    environment = cluster(tmp_path, "torchrun", f"{f'touch {tmp_path}/stopped.json;' if stopped else ''} exit {code}")
    done = subprocess.run(["bash", "-c", script], env=environment, check=False)
    assert done.returncode == code
    assert (tmp_path / "requeued").exists() == stopped
    assert "--rdzv-endpoint node-0:29500" in (tmp_path / "words").read_text()


@pytest.mark.parametrize(("code", "stopped", "expected"), [(0, False, 0), (0, True, 75), (1, False, 1)])
def test_kubernetes_replaces_a_pod_that_was_stopped(code: int, stopped: bool, expected: int, tmp_path: Path) -> None:
    """75 is the code that the Job's policy does not count as a failure."""
    (rule,) = JOB["spec"]["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("Ignore", [75])
    assert rule["onExitCodes"]["containerName"] == POD["name"]
    touch = f"touch {tmp_path}/stopped.json;" if stopped else ""
    environment = {**cluster(tmp_path, "torchrun", f"{touch} exit {code}"), "RUN": str(tmp_path)}
    done = subprocess.run([*POD["command"], *POD["args"]], env=environment, check=False)
    assert done.returncode == expected


def test_kubernetes_hands_the_signal_on(tmp_path: Path) -> None:
    """The pod's shell gets SIGTERM, and waits until the run has saved and ended."""
    save = f"sleep 0.3; touch {tmp_path}/stopped.json; exit 1"
    text = f"trap '{save}' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done"
    environment = {**cluster(tmp_path, "torchrun", text), "RUN": str(tmp_path)}
    pod = subprocess.Popen([*POD["command"], *POD["args"]], env=environment)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    pod.send_signal(signal.SIGTERM)
    assert pod.wait(timeout=30) == 75
