"""Causal language models of the installed transformers: exact, or refused by name before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zoo.model_runs import Outcome, full_run, judge, lora_run, quiet
from tests.zoo.sample import chosen
from tests.zoo.tiny_models import NotTiedError, Species, species, tiny_config
from tests.zoo.worlds import Row, judged

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


def rows() -> list[Row]:
    """Return the rows of every run of every model."""
    return judged(rows_of, [str(kind) for kind in species()])


def rows_of(name: str, folder: Path) -> list[Row]:
    """Return a row for each run of a model."""
    (kind,) = (kind for kind in species() if str(kind) == name)
    outcomes = verdicts(kind, folder)
    return [(f"{kind}: {run}", outcome.verdict, outcome.note) for run, outcome in outcomes.items()]
