"""Refuses the optional packages in every process that has this folder in PYTHONPATH, as if they were not installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

REFUSED = {"accelerate", "datasets", "lightning", "lightning_fabric", "obstore", "peft", "pytorch_lightning"}
REFUSED |= {"tensorboard", "tokenizers", "torchao", "torchdata", "transformers", "trl", "wandb"}


class _Refuse(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"No module named {fullname!r} (refused by tests/without_extras)", name=fullname)
        return None


sys.meta_path.insert(0, _Refuse())
