"""Causal language models of the installed transformers: exact, or refused by name before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.zoo.model_runs import Outcome, full_outcome, is_first, lora_outcomes, quiet, write_base
from tests.zoo.sample import chosen
from tests.zoo.tiny_models import NotTiedError, Species, species, tiny_config
from tests.zoo.worlds import Row, judged

FLOORS = {": all weights": 185, ": LoRA": 150}
"""Configurations that are exact at the least; one with other ties is a configuration, too."""


@pytest.mark.parametrize("kind", chosen(species(), 5, unbuilt=["musicgen, other ties"]), ids=str)
def test_a_model_of_transformers_is_exact_or_refused(kind: Species, tmp_path: Path) -> None:
    """Loaded, trained, resumed, exported and reloaded bit for bit; with LoRA merged and through PEFT as trained."""
    outcomes = verdicts(kind, tmp_path)
    if not outcomes:
        pytest.skip("transformers cannot build it tiny, or its ties have no other setting")
    different = {name: outcome.line for name, outcome in outcomes.items() if outcome.verdict == "different"}
    assert not different


def verdicts(kind: Species, folder: Path) -> dict[str, Outcome]:
    """Return the verdict of each run of a model; empty if it cannot be built. Other ties leave LoRA as it is.

    Collective in a process group.
    """
    if not _is_built(kind, folder / "base"):
        return {}
    outcomes = {"all weights": full_outcome(folder / "base", folder / "all weights")}
    return outcomes if kind.other_ties else outcomes | lora_outcomes(folder / "base", folder / "LoRA")


def _is_built(kind: Species, folder: Path) -> bool:
    """Let rank 0 write the model's folder and return whether it could."""
    built = [False]
    if is_first():
        with quiet():
            try:
                write_base(tiny_config(kind), folder)
                built = [True]
            except NotTiedError:
                pass
            except Exception:
                pass
    if dist.is_initialized():
        dist.broadcast_object_list(built)
    return built[0]


def rows() -> list[Row]:
    """Return the rows of every run of every model."""
    return judged(rows_of, [str(kind) for kind in species()])


def rows_of(name: str, folder: Path) -> list[Row]:
    """Return a row for each run of a model."""
    (kind,) = (kind for kind in species() if str(kind) == name)
    return [(f"{kind}: {run}", outcome.verdict, outcome.line) for run, outcome in verdicts(kind, folder).items()]
