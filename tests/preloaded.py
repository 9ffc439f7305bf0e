"""This module imports what ranks and programs of the tests need, once, in the server that they are forked from."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

from tests.forked import take_huge_pages
from titan_ckpt.errors import ConfigError
from titan_ckpt.process import freeze_imports

_MODULES = (
    "titan_ckpt.cli.commands",
    "titan_ckpt.converting",
    "titan_ckpt.models.qwen3",
    "titan_ckpt.models.qwen3_moe",
    "titan_ckpt.training.trainer",
    "titan_ckpt.training.launch.command",
    "titan_ckpt.converters.float8.converter",
    "titan_ckpt.converters.lora.converter",
    "titan_ckpt.converters.qat.converter",
    "torchao.float8",
    "torchao.optim",
    "torchao.quantization.qat",
    "torchdata.stateful_dataloader",
    "peft",
    "hypothesis",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)

for _name in _MODULES:
    with suppress(ImportError, ConfigError):  # the tests of the core run without the extras
        import_module(_name)

freeze_imports()  # a collection in a forked process would walk, and so copy, all of this before a test's code runs
take_huge_pages()
