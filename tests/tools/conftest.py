"""The same weights in every format, made once for all tests of the command line tools; no test changes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.steps import LORA, save_sharded, save_step
from tests.world import write_adapter, write_llama
from titan_ckpt.converters import from_tables


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all others are; see the functions above."""
    folder = tmp_path_factory.mktemp("tools")
    write_llama(folder / "hf", max_shard_size="200KB")
    save_step(folder / "hf", folder / "run1")
    save_step(folder / "hf", folder / "lora", converters=from_tables([LORA]))
    save_sharded(folder)
    for seed, modules in ((1, ["q_proj", "down_proj"]), (2, ["q_proj", "up_proj"])):
        write_adapter(folder / f"peft{seed}", folder / "hf", *modules, seed=seed)
    return folder
