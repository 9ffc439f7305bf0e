"""The same models sharded over two ranks: what was loaded is exported again, byte for byte."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests.interop.folders import assert_same_bytes
from tests.zoo.model_runs import quiet, write_base
from tests.zoo.sample import chosen
from tests.zoo.tiny_models import Species, species, tiny_config
from titan_ckpt import CheckpointConfig, CheckpointManager, ExportConfig, InitialLoadConfig, StateDictTransforms
from titan_ckpt.errors import CheckpointError
from titan_ckpt.models.registry import build_model
from titan_ckpt.testing import distributed
from titan_ckpt.weights.initialize import construct, materialise

PLAIN = [kind for kind in species() if not kind.other_ties]


@pytest.mark.timeout(3000)
def test_sharded_models_are_exact_or_refused(tmp_path: Path) -> None:
    """Every rank reads its slices of the folder and writes them to their places in the export."""
    outcomes = verdicts(chosen(PLAIN, 6), tmp_path)
    assert outcomes
    assert not {name: note for name, (verdict, note) in outcomes.items() if verdict == "different"}


def verdicts(kinds: list[Species], folder: Path) -> dict[str, tuple[str, str]]:
    """Return name -> (verdict, note) of the models that can be built tiny, run by two processes one after another."""
    with quiet():
        for kind in kinds:
            try:
                config = tiny_config(kind)
            except Exception:  # any error: a model that transformers cannot build is no case of the zoo
                continue
            write_base(config, folder / kind.model_type / "base")
    _on_two_ranks(folder)
    return json.loads((folder / "outcomes.json").read_text())  # type: ignore[no-any-return]  # as it was written


def rows() -> list[tuple[str, str, str]]:
    """Return (configuration, verdict, note) of every model."""
    with tempfile.TemporaryDirectory() as folder:
        return [(name, *outcome) for name, outcome in verdicts(PLAIN, Path(folder)).items()]


@distributed(nproc=2, timeout_seconds=3000.0)
def _on_two_ranks(folder: Path) -> None:
    outcomes: dict[str, tuple[str, str]] = {}
    for case in sorted(path for path in folder.iterdir() if path.is_dir()):
        try:
            with quiet():
                _load_and_export(case / "base", case / "run")
                if dist.get_rank() == 0:
                    assert_same_bytes(case / "base", case / "run/exports/step-1")
            outcomes[case.name] = ("exact", "")
        except CheckpointError as error:
            outcomes[case.name] = ("refused", " ".join(str(error).replace(f"{folder}/", "").split())[:300])
        except (Exception, AssertionError) as error:  # a result, too
            outcomes[case.name] = ("different", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        dist.barrier()
    if dist.get_rank() == 0:
        (folder / "outcomes.json").write_text(json.dumps(outcomes))


def _load_and_export(base: Path, folder: Path) -> None:
    model: Any = construct(lambda: build_model("hf", folder=base))
    for layer in model.layers.children():
        fully_shard(layer)
    fully_shard(model)
    materialise(model, "cpu")
    config = CheckpointConfig(initial_load=(InitialLoadConfig(str(base)),), export=(ExportConfig("hf"),))
    transforms = StateDictTransforms(model.key_map(), model.hf_config())
    with CheckpointManager(config, model_parts=[model], sd_transforms=transforms, base_folder=folder) as manager:
        manager.load()
        manager.save(1, last_step=True)
