"""Causal language models of the installed transformers: exact, or refused by name before the first step."""

from __future__ import annotations

import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.zoo.model_runs import Outcome, full_run, judge, lora_run, quiet
from tests.zoo.sample import chosen
from tests.zoo.tiny_models import NotTiedError, Species, species, tiny_config

RUNS = {"all weights": full_run, "LoRA": lora_run}


@pytest.mark.parametrize("kind", chosen(species(), 5), ids=str)
def test_a_model_of_transformers_is_exact_or_refused(kind: Species, tmp_path: Path) -> None:
    """Loaded, trained, resumed, exported and reloaded bit for bit; with LoRA merged and through PEFT as trained."""
    outcomes = verdicts(kind, tmp_path)
    if not outcomes:
        pytest.skip("transformers cannot build it tiny, or its ties have no other setting")
    different = {name: outcome.note for name, outcome in outcomes.items() if outcome.verdict == "different"}
    assert not different


def verdicts(kind: Species, folder: Path) -> dict[str, Outcome]:
    """Return the verdict of each run of a model; empty if it cannot be built. Other ties leave LoRA as it is."""
    with quiet():
        try:
            config = tiny_config(kind)
        except NotTiedError:
            return {}
        except Exception:  # any error: a model that transformers cannot build is no case of the zoo
            return {}
        runs = {name: run for name, run in RUNS.items() if name == "all weights" or not kind.other_ties}
        return {name: judge(run, config, folder / name) for name, run in runs.items()}


def rows() -> list[tuple[str, str, str]]:
    """Return (configuration, verdict, note) of every run of every model, made in two processes."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), max_tasks_per_child=20) as pool:
        return [row for found in pool.map(_rows_of, species()) for row in found]


def _rows_of(kind: Species) -> list[tuple[str, str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        outcomes = verdicts(kind, Path(folder))
    return [(f"{kind}: {name}", outcome.verdict, outcome.note) for name, outcome in outcomes.items()]
