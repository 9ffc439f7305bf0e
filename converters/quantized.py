"""Shared parts of Float8 and QAT: the modules they replace, their needs of the machine, and the list of plain modules.

Owns no scheme; each converter has its own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titan_ckpt.converters.targets import in_lines, select
from titan_ckpt.errors import ConverterError
from titan_ckpt.geometry.chunks import TensorInfo
from titan_ckpt.weights.lora import matches
from titan_ckpt.weights.names import clean_fqn

_EXPERT = re.compile(r"(.*\.experts)\.\d+\..*")


def require_torchao(kind: str) -> None:
    """Check that torchao, of the extra `train`, can be imported. Raises: ConverterError."""
    try:
        import_module("torchao")
    except ImportError as error:
        raise ConverterError(f'{kind} needs torchao ({error}); pip install "titan-ckpt[train]"') from error


def require_gpu(who: str, needed: tuple[int, int], otherwise: str) -> None:
    """Check that a GPU has the `needed` compute capability. Raises: ConverterError that ends with `otherwise`."""
    found = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if found is None or found < needed:
        gpu = "no GPU" if found is None else f"a GPU of compute capability {found[0]}.{found[1]}"
        capability = f"{needed[0]}.{needed[1]}"
        raise ConverterError(f"{who} needs a GPU of compute capability {capability} or more, found {gpu}. {otherwise}")


def replaceable_linears(model: nn.Module, excluded: Sequence[str] | None) -> dict[str, nn.Linear]:
    """Return the linear modules to replace, by fqn: all but the `excluded` ones (None: the output head, tied or not).

    Raises: ConverterError for names that match nothing, and for modules that are sharded or are no plain nn.Linear.
    """
    linears = {clean_fqn(name): m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    users = Counter(id(value) for _, value in model.named_parameters(remove_duplicate=False))
    tied = {fqn for fqn, module in linears.items() if users[id(module.weight)] > 1}
    if excluded is None:
        kept = {fqn for fqn in linears if fqn == "output" or matches(fqn, "lm_head")} | tied
    else:
        kept = set(select(list(linears), excluded, "linear module"))
    chosen = {fqn: module for fqn, module in linears.items() if fqn not in kept}
    problems = []
    for fqn, module in chosen.items():
        if type(module) is not nn.Linear:
            kind = type(module).__name__
            problems.append(f"{fqn}: is a {kind}, whose own computation would be lost; add it to exclude_modules")
        elif fqn in tied:
            problems.append(f"{fqn}: shares its weight with another module, from which it would part; exclude it")
        elif isinstance(module.weight, DTensor):
            problems.append(f"{fqn}: is sharded already; convert the model first, then parallelize it")
    if problems:
        raise ConverterError(f"{len(problems)} module(s) cannot be exchanged{in_lines(problems)}")
    if not chosen:
        raise ConverterError(f"no linear module to exchange: the model has {len(linears)}, all excluded")
    return chosen


def plain_modules(infos: Mapping[str, TensorInfo], quantized: Collection[str]) -> list[str]:
    """Return config.json's modules_to_not_convert: the file names of the modules whose weights are not quantized.

    All experts of a layer count as one module, because transformers holds them as one. The output head is listed unless
    it is quantized: where it is tied, no file has it, and yet it is a module.
    """
    names = {"lm_head"} - {key.removesuffix(".weight") for key in quantized}
    for key, info in infos.items():
        if key.endswith(".weight") and len(info.shape) >= 2 and key not in quantized:
            name = key.removesuffix(".weight")
            expert = _EXPERT.fullmatch(name)
            names.add(expert[1] if expert else name)
    return sorted(names)
