"""The recipes of docs/parallel.md for Slurm, Kubernetes, SageMaker and Ray, run with stand-ins for their programs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.tiny_run import rows, write_toml
from titan_ckpt.training.trainer import Trainer

PAGE = (Path(__file__).parents[1] / "docs" / "parallel.md").read_text()
DIRECT, BY_TORCHRUN, SAGEMAKER = re.findall(r"^```bash\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
(MANIFESTS,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
_, JOB = yaml.safe_load_all(MANIFESTS)
POD = JOB["spec"]["template"]["spec"]["containers"][0]
(SAGEMAKER_JOB,) = re.findall(r"^```json\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
(RAY,) = re.findall(r"^```py\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
SAVES_AND_ENDS = "trap 'sleep 0.3; touch {0}/stopped.json; exit 1' TERM; touch {0}/ready; while :; do sleep 0.05; done"


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
    environment = {**cluster(tmp_path, "torchrun", SAVES_AND_ENDS.format(tmp_path)), "RUN": str(tmp_path)}
    pod = subprocess.Popen([*POD["command"], *POD["args"]], env=environment)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    pod.send_signal(signal.SIGTERM)
    assert pod.wait(timeout=30) == 75


def sagemaker(folder: Path, program: str) -> dict[str, str]:
    """Return the environment of a container on the first of two instances."""
    config = folder / "resourceconfig.json"
    config.write_text('{"current_host": "algo-1", "hosts": ["algo-1", "algo-2"], "network_interface_name": "eth0"}')
    environment = cluster(folder, "torchrun", program)
    return {**environment, "RESOURCE_CONFIG": str(config), "TRAINING_JOB_NAME": "pretrain-1"}


@pytest.mark.parametrize("code", [0, 1])
def test_sagemaker_joins_the_instances_of_a_job(code: int, tmp_path: Path) -> None:
    """They meet at the first one, and the container has the run's exit code; the job's request names what it must."""
    done = subprocess.run(["bash", "-c", SAGEMAKER], env=sagemaker(tmp_path, f"exit {code}"), check=False)
    assert done.returncode == code
    words = (tmp_path / "words").read_text()
    assert "--nnodes 2 " in words
    assert "--rdzv-endpoint algo-1:29500 --rdzv-id pretrain-1 " in words
    job = json.loads(SAGEMAKER_JOB)
    assert job["StoppingCondition"]["MaxWaitTimeInSeconds"] >= job["StoppingCondition"]["MaxRuntimeInSeconds"]
    assert job["EnableManagedSpotTraining"]


def test_sagemaker_hands_the_signal_on(tmp_path: Path) -> None:
    """The script is process 1, which alone gets SIGTERM; it waits until the run has saved and ended."""
    environment = sagemaker(tmp_path, SAVES_AND_ENDS.format(tmp_path))
    container = subprocess.Popen(["bash", "-c", SAGEMAKER], env=environment)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    container.send_signal(signal.SIGTERM)
    assert container.wait(timeout=30) == 1
    assert (tmp_path / "stopped.json").exists()


def test_ray_starts_a_run_again_and_it_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's part is played: it calls the function in a thread, again after an error, as often as it was told."""
    run = write_toml(tmp_path, training={"steps": 6})
    starts: list[int] = []

    class TorchTrainer:
        def __init__(self, function: Any, **settings: Any) -> None:
            self.function, self.settings = function, settings

        def fit(self) -> None:
            for _ in range(1 + self.settings["run_config"].failure_config.max_failures):
                errors: list[Exception] = []

                def call(errors: list[Exception] = errors) -> None:
                    try:
                        self.function(self.settings["train_loop_config"])
                    except Exception as error:
                        errors.append(error)

                thread = threading.Thread(target=call)
                thread.start()
                thread.join()
                if not errors:
                    return
            raise errors[0]

    def compute_loss(self: Trainer, batch: Any) -> Any:
        if self.state.step == 4 and len(starts) == 1:
            raise RuntimeError("a GPU fell off the bus")
        return loss(self, batch)

    def load(self: Trainer) -> Any:
        result = resume(self)
        starts.append(self.state.step)
        return result

    loss, resume = Trainer.compute_loss, Trainer.load
    monkeypatch.setattr(Trainer, "compute_loss", compute_loss)
    monkeypatch.setattr(Trainer, "load", load)
    modules = {name: ModuleType(name) for name in ("ray", "ray.train", "ray.train.torch")}
    modules["ray.train"].__dict__.update(
        dict.fromkeys(("FailureConfig", "RunConfig", "ScalingConfig"), SimpleNamespace)
    )
    modules["ray.train.torch"].__dict__.update(TorchTrainer=TorchTrainer, TorchConfig=SimpleNamespace)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    exec(RAY.replace("/shared/run.toml", str(run)).replace("/shared/runs/pretrain", str(tmp_path / "run")), {})
    assert starts == [0, 4]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6]
