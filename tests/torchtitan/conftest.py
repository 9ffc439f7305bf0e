"""One tokenizer and one text for all runs; ranks are forked from a server that has imported torchtitan."""

from __future__ import annotations

import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # to compile what torchtitan compiles takes minutes, and proves nothing here
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"  # torch asks for the name of a peer at every connection

import pytest

from titan_ckpt.testing import ranks

os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="torchtitan-")  # datasets keeps what it has read there
# importing these takes longer than most of these tests
ranks._PRELOADED += ["tests.torchtitan.runs", "peft"]
ranks._PRELOADED += [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3")]
ranks._context()  # the server imports them on the second core while pytest imports the same to collect the tests


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tokenizer, and a text under data/."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("assets")
    words = {"<unk>": 0, "<bos>": 1, "<eos>": 2} | {f"w{i}": i for i in range(3, 500)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    drawn = random.Random(0)
    lines = [" ".join(f"w{drawn.randrange(3, 500)}" for _ in range(100)) for _ in range(64)]
    (folder / "data").mkdir()
    (folder / "data" / "text.json").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    return folder


@pytest.fixture(scope="session")
def base(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the settings that load a base of two layers from its Hugging Face folder."""
    from tests.torchtitan.runs import make_base

    folder = tmp_path_factory.mktemp("base")
    make_base(assets, folder)
    return {"layers": 2, "initial_load_in_hf": True, "initial_load_path": str(folder / "exports/step-1")}
