"""Messages that a user of torchtitan's Trainer may meet name the settings that his config has."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

import titan_ckpt
from tests.torchtitan.runs import config, distributed, train
from tests.world import heard
from titan_ckpt.errors import ConfigError, LoadMismatchError
from titan_ckpt.integrations.torchtitan import TitanCheckpointer
from titan_ckpt.integrations.torchtitan.wording import WORDS, reworded

ROOT = Path(titan_ckpt.__file__).parent
ELSEWHERE = ("training", "cli", "tools", "testing", "converters", "integrations")
"""Rooms whose messages no run of torchtitan reaches, but for integrations/torchtitan."""
UNREACHABLE = {
    "config.py": "rules of run files, and of settings that TitanCheckpointer does not have",
    "formats/reading/shared.py:share_reads": "TitanCheckpointer lets ranks share what they read",
    "loading/external.py": "torchtitan's steps hold the model",
    "loading/plan.py:pattern(s)": "TitanCheckpointer sets no initialize and no ignore",
    "loading/misfits.py:set cast": "TitanCheckpointer lets every initial load convert",
    "loading/origin.py:prefix": "TitanCheckpointer sets no prefix",
    "loading/plan.py:model": "torchtitan's steps hold the model",
    "manager.py:save_step": "a method that a subclass of the manager calls",
}
"""Place of a message and a word in it -> why a run of torchtitan does not meet it."""
OWN = re.compile(
    r"checkpoint\.(\w+)|\[\[?checkpoint|\[\[converters|(?:cast|merge) = true|training_state|initial_load\b|\(ignore\)"
)
"""Settings in a message."""
KEPT = {field.name for field in dataclasses.fields(TitanCheckpointer.Config)}


def _text(node: ast.expr) -> str:
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(p.value if isinstance(p, ast.Constant) and isinstance(p.value, str) else "X" for p in parts)


def _messages() -> Iterator[tuple[str, str]]:
    """Yield (path in the package, text) of each string that is no docstring."""
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.partition("/")[0] in ELSEWHERE and not name.startswith("integrations/torchtitan"):
            continue
        tree = ast.parse(path.read_text())
        inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        inner |= {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
        for node in ast.walk(tree):
            if isinstance(node, (ast.Constant, ast.JoinedStr)) and id(node) not in inner:
                yield name, _text(node)


def test_every_message_names_settings_of_torchtitans_config() -> None:
    """Each that names one of this package's own is worded anew, or no run of torchtitan meets it."""
    left: list[str] = []
    used: set[str] = set()
    messages = [*_messages()]
    for name, text in messages:
        if name.startswith("integrations/torchtitan/") and name.endswith(("settings.py", "wording.py")):
            continue  # the table of the settings, and that of the words
        excuse = [k for k in UNREACHABLE if k.partition(":")[0] == name and k.partition(":")[2] in text]
        found = [
            m[0] for m in OWN.finditer(reworded(text)) if m[1] not in KEPT | {"X"} and "torch.distributed" not in text
        ]
        if found and " " in text and not excuse:
            left.append(f"{name}: {found}: {text}")
        used |= {k for k in excuse if found}
    assert left == [], "\n".join(left)
    assert UNREACHABLE.keys() - used == set()
    unused = [p for p in WORDS if not any(re.search(p, text) for _, text in messages)]
    assert unused == []


@distributed(2)
def _trained_by_two(assets: Path, folder: Path) -> None:
    made = config(assets, folder / "run", steps=2, layers=1, degrees={"data_parallel_shard": 2})
    train(made)


@distributed(1)
def _resumed_by_one(assets: Path, folder: Path) -> None:
    assert dist.get_world_size() == 1
    with pytest.raises(LoadMismatchError) as error:
        train(config(assets, folder / "run", steps=4, layers=1))
    assert 'start the data afresh: checkpoint.exclude_from_loading = ["dataloader"]' in str(error.value)
    made = config(assets, folder / "run", steps=4, layers=1, exclude_from_loading=["dataloader"])
    made.optimizer.param_groups[0].optimizer_kwargs["weight_decay"] = 0.5
    with heard() as lines:
        assert train(made).step == 4
    (line,) = [line for line in lines if "goes on with the checkpoint's" in line]
    assert line.endswith("""with checkpoint.exclude_from_loading = ["optimizer"] it starts afresh with this run's""")
    made.checkpoint.exclude_from_loading = ["dataloader", "optimiser"]
    with pytest.raises(ConfigError, match=r"checkpoint.exclude_from_loading: the run has no 'optimiser'"):
        made.build()


def test_an_error_and_a_line_of_a_run_name_what_its_user_can_write(assets: Path, tmp_path: Path) -> None:
    """The run resumes on another number of data-parallel ranks, and with other settings of the optimizer."""
    _trained_by_two(assets, tmp_path)
    _resumed_by_one(assets, tmp_path)
