"""`make demo`: the whole life of a model on real text; at the end every claim is checked.

It pretrains, kills the run with SIGKILL, resumes, exports, trains LoRA on the export, trains LoRA on base and adapter,
merges, and loads every result with transformers and PEFT. An uninterrupted run goes on in parallel, to be compared with
the resumed one. Owns the story; demo_checks.py has the comparisons. Exits with 1 if one of them fails.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from titan_ckpt.training.callbacks.console import read_metrics

if TYPE_CHECKING:
    from docs.examples.demo_checks import Story

ROOT = Path(__file__).resolve().parents[2]
OUTPUTS = Path("outputs/demo")
CHECKS = "docs.examples.demo_checks"
PRETRAIN_STEPS, LORA_STEPS, SAVE_EVERY, KILL_AT = 240, 60, 60, 150
CONSOLE = Console()

Overrides = Mapping[str, object]


class RunFailedError(Exception):
    """A run of train.py did not end as expected. The message has the end of its log."""


@dataclass(frozen=True)
class Run:
    """One run of train.py: a file of configs/ and overrides for the command line."""

    name: str
    config: str
    num_steps: int
    overrides: Overrides

    @property
    def folder(self) -> Path:
        return OUTPUTS / self.name

    @property
    def arguments(self) -> list[str]:
        """Return the command line after `train.py`."""
        settings: Overrides = {
            "output_folder": self.folder.as_posix(),
            "data.cache_folder": (OUTPUTS / "cache").as_posix(),
            "training.steps": self.num_steps,
            "training.batch_size": 8,
            "training.device": "cpu",
            "training.log_interval": 1,
            "checkpoint.save.interval": SAVE_EVERY,
            **self.overrides,
        }
        return [
            str(ROOT / "configs" / f"{self.config}.toml"),
            *(w for k, v in settings.items() for w in (f"--{k}", toml(v))),
        ]

    def start(self) -> subprocess.Popen[bytes]:
        """Start train.py in a new process with one thread; its output goes to <folder>.log."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with self.folder.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, str(ROOT / "train.py"), *self.arguments],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def course(self) -> list[tuple[int, float]]:
        """Return (step, loss) of every logged step."""
        return [(row["step"], row["loss"]) for row in read_metrics(self.folder / "metrics.jsonl")]


def toml(value: object) -> str:
    """Return a value in the syntax of train.py's command line."""
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{k} = {toml(v)}' for k, v in value.items())} }}"
    return json.dumps(value)


class Stage:
    """Runs any number of train.py processes with progress bars. On exit, processes that still run are killed."""

    def __init__(self) -> None:
        title, loss = TextColumn("  {task.description:<34}"), TextColumn("{task.fields[loss]}")
        wide = (BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(title, *(wide if CONSOLE.width >= 80 else wide[1:2]), loss, console=CONSOLE)
        self._running: list[tuple[Attempt, subprocess.Popen[bytes], TaskID]] = []

    def __enter__(self) -> Stage:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        for _, process, _ in self._running:  # a different run failed, or the demo was interrupted
            process.kill()
            process.wait()
        self._progress.stop()

    def start(self, attempt: Attempt) -> None:
        """Start a run without waiting for it."""
        task = self._progress.add_task(attempt.title, total=attempt.run.num_steps, loss="")
        self._running.append((attempt, attempt.run.start(), task))

    def train(self, attempt: Attempt) -> None:
        """Start a run and wait for it. Raises: RunFailedError, also for a parallel run."""
        self.start(attempt)
        while any(running is attempt for running, _, _ in self._running):
            self._look()

    def finish(self) -> None:
        """Wait for every run. Raises: RunFailedError."""
        while self._running:
            self._look()

    def _look(self) -> None:
        """Show the progress of each run, kill runs that are due, and remove runs that have ended."""
        time.sleep(0.05)
        for attempt, process, task in [*self._running]:
            ended = process.poll() is not None
            course = attempt.run.course()
            if course:
                self._progress.update(task, completed=course[-1][0], loss=f"loss {course[-1][1]:.3f}")
            if not ended and attempt.kill_at is not None and course and course[-1][0] >= attempt.kill_at:
                process.send_signal(signal.SIGKILL)
            if ended:
                self._running.remove((attempt, process, task))
                self._progress.stop_task(task)
                attempt.check(process.returncode)


@dataclass(frozen=True)
class Attempt:
    """One process of a run; it ends by itself, or is killed after it has logged step `kill_at`."""

    title: str
    run: Run
    kill_at: int | None = None

    def check(self, returncode: int) -> None:
        """Raises: RunFailedError with the end of the log if the exit code is not the expected one."""
        expected = 0 if self.kill_at is None else -signal.SIGKILL
        if returncode != expected:
            log = self.run.folder.with_suffix(".log").read_text()[-3000:]
            raise RunFailedError(f"{self.title}: exit code {returncode}, expected {expected}\n{log}")


def docstrings() -> Iterator[str]:
    """Yield the documentation of standard library modules: text that the base was not trained on."""
    for name in ("asyncio", "collections", "concurrent", "email", "http", "json", "logging", "unittest"):
        package = import_module(name)
        inner = [i.name for i in pkgutil.iter_modules(package.__path__) if not i.name.startswith(("__", "windows"))]
        for module in (package, *(import_module(f"{name}.{i}") for i in inner)):
            members = [m for _, m in inspect.getmembers(module) if inspect.isclass(m) or inspect.isfunction(m)]
            texts = [inspect.getdoc(m) for m in (module, *members)]
            yield "\n\n".join(dict.fromkeys(text for text in texts if text))


def train() -> Story | None:
    """Make all runs of the demo and return them; None if one of them failed, which is said."""
    logging.disable(logging.WARNING)  # hide the logs of loads for the comparisons
    shutil.rmtree(OUTPUTS, ignore_errors=True)
    OUTPUTS.mkdir(parents=True)
    corpus = OUTPUTS / "docstrings.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in docstrings() if text))

    exports = [{"format": "hf"}, {"format": "hf", "dtype": "bfloat16", "folder": "exports-bf16"}]
    pretrain: Overrides = {"model.flavor": "debug-0.5m", "optimizer.lr": 4e-3, "checkpoint.export": exports}
    whole = Run("uninterrupted", "pretrain_hf_export", PRETRAIN_STEPS, pretrain)
    killed = Run("pretrain", "pretrain_hf_export", PRETRAIN_STEPS, pretrain)
    base = killed.folder / "exports" / f"step-{PRETRAIN_STEPS}"
    on_base: Overrides = {
        "model.folder": base.as_posix(),
        "data.tokenizer": base.as_posix(),
        "data.corpus": corpus.as_posix(),
        "checkpoint.initial_load.0.path": base.as_posix(),
        "optimizer.lr": 4e-3,
    }
    first = Run("lora", "lora_from_hf", LORA_STEPS, on_base)
    adapter = first.folder / "exports" / f"step-{LORA_STEPS}-peft"
    continued = {**on_base, "checkpoint.initial_load.1.path": adapter.as_posix()}
    second = Run("lora-continued", "lora_from_base_and_adapter", LORA_STEPS, continued)
    CONSOLE.rule("[bold]Train", align="left")
    CONSOLE.print(
        "  A small Llama on the Python reference, by train.py and a TOML file:\n"
        "  killed by SIGKILL, resumed, exported; then LoRA on that export and\n"
        "  other text, and once more on base and adapter.\n",
        highlight=False,
    )
    try:
        with Stage() as stage:
            stage.start(Attempt("pretrain, uninterrupted", whole))
            stage.train(Attempt(f"pretrain, SIGKILL at step {KILL_AT}", killed, KILL_AT))
            before_kill = killed.course()
            stage.train(Attempt("pretrain, resumed", killed))
            # transformers and PEFT take seconds to import; a core will be idle meanwhile
            threading.Thread(target=import_module, args=(CHECKS,), daemon=True).start()
            stage.train(Attempt("LoRA on the base", first))
            stage.train(Attempt("LoRA on base + adapter", second))
            stage.finish()
    except RunFailedError as error:
        CONSOLE.print(str(error), style="red", markup=False)
        return None
    from docs.examples.demo_checks import Story

    return Story(whole, killed, first, second, before_kill, new_text="\n\n".join(docstrings()))


def main() -> int:
    """Run the whole demo and return the exit code."""
    started = time.perf_counter()
    story = train()
    if story is None:
        return 1
    from docs.examples.demo_checks import report

    passed = report(story, CONSOLE)
    CONSOLE.print(f"{time.perf_counter() - started:.0f} s in all\n", highlight=False)
    CONSOLE.print(f"Go on: titan-ckpt inspect {story.first.folder}/checkpoints/step-{LORA_STEPS}", highlight=False)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
