"""LoRA's keys and settings as PEFT writes them, derived from the base model's own table.

Owns names and adapter_config.json. Reads and writes no files; PEFT itself is not needed.
Source: peft, utils/save_and_load.py and tuners/lora/config.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from converters.lora_config import LoRAConfig
from converters.lora_merge import AdaptedModule
from titan_ckpt.errors import KeyMapError
from titan_ckpt.keymap import IDENTITY, Identity, KeyGroup, KeyMap, KeyRule, PermuteRotary

_PREFIX = "base_model.model."
_ROW_OPS = (Identity, PermuteRotary)
"""What may happen to a weight's rows so that the same can happen to B's: no more than a change of their order."""


class PeftAdapter:
    """The adapter's side of a StateDictAdapter; see titan_ckpt.types."""

    def __init__(
        self,
        config: LoRAConfig,
        adapted: Mapping[str, AdaptedModule],
        copied: Mapping[str, str],
        others: Sequence[str],
    ) -> None:
        self._config = config
        self._adapted = adapted
        self._copied = copied
        self._others = others

    def key_map(self, base: KeyMap) -> KeyMap:
        """Return the table of the owned keys. Where the base permutes a weight's rows, B's go the same way, A's do not.

        Raises: KeyMapError listing modules that the other tool's model stores in a form no adapter can follow.
        """
        rules: list[KeyRule] = []
        problems: list[str] = []
        for module in self._adapted.values():
            try:
                rules += _adapter_rules(module, base)
            except KeyMapError as error:
                problems.append(str(error))
        for trained, fqn in self._copied.items():
            group = base.group_of_fqn(fqn)
            if len(group.keys) == len(group.fqns) == 1:
                rules.append(KeyRule.of(trained, _PREFIX + group.keys[0], group.op))
            else:
                problems.append(f"{fqn}: stored as {', '.join(group.keys)}, and a copy of it cannot be")
        if problems:
            raise KeyMapError(f"{len(problems)} adapted module(s) have no name in PEFT\n  " + "\n  ".join(problems))
        return KeyMap(tuple(rules))

    def file_config(self, base: KeyMap) -> dict[str, Any]:
        """Return adapter_config.json without the base's identity: what PEFT reads, and what vLLM insists on."""
        config = self._config
        names = {fqn: _module_key(fqn, base) for fqn in self._adapted}
        own = self._adapted
        copied = {_module_key(fqn.rpartition(".")[0], base) for fqn in self._copied.values()}
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": config.rank,
            "lora_alpha": _json_number(config.alpha),
            "target_modules": _shortest(list(names.values()), list(_known(self._others, base))),
            "lora_dropout": config.dropout,
            "bias": "none",
            "use_rslora": config.use_rslora,
            "use_dora": config.use_dora,
            "fan_in_fan_out": False,
            "inference_mode": True,
            "rank_pattern": {names[f]: m.rank for f, m in own.items() if m.rank != config.rank},
            "alpha_pattern": {names[f]: _json_number(m.alpha) for f, m in own.items() if m.alpha != config.alpha},
            "modules_to_save": sorted(copied) or None,
        }

    def misfits(self, base: KeyMap, found: Mapping[str, Any]) -> list[str]:
        """Return how an adapter_config.json computes something else than this converter would with its tensors.

        Keys and shapes are the load's to check; a wrong scale has the right keys and shapes and says nothing.
        """
        problems = []
        if found.get("peft_type", "LORA") != "LORA":
            return [f"peft_type is {found['peft_type']!r}, and this converter is LoRA"]
        expected = {"use_dora": self._config.use_dora, "fan_in_fan_out": False, "bias": "none", "lora_bias": False}
        for name, value in expected.items():
            if found.get(name, "none" if name == "bias" else False) != value:
                problems.append(f"{name} is {found[name]!r}, expected {value!r}")
        for fqn, module in self._adapted.items():
            key = _module_key(fqn, base)
            rank = _from_pattern(found.get("rank_pattern") or {}, key, found.get("r", 8))
            alpha = _from_pattern(found.get("alpha_pattern") or {}, key, found.get("lora_alpha", 8))
            scaling = alpha / (math.sqrt(rank) if found.get("use_rslora") else rank)
            if rank != module.rank or not math.isclose(scaling, module.scaling):
                expected_here = f"rank {module.rank} scaled by {module.scaling:g}"
                problems.append(f"{key}: rank {rank} scaled by {scaling:g}, expected {expected_here}")
        return problems


def _adapter_rules(module: AdaptedModule, base: KeyMap) -> Iterator[KeyRule]:
    group = _group(module.fqn, base)
    key = _PREFIX + group.keys[0].removesuffix(".weight")
    if module.embedding:
        yield KeyRule.of(module.lora_a, f"{key}.lora_embedding_A")
        yield KeyRule.of(module.lora_b, f"{key}.lora_embedding_B")
        return
    yield KeyRule.of(module.lora_a, f"{key}.lora_A.weight", IDENTITY)
    yield KeyRule.of(module.lora_b, f"{key}.lora_B.weight", group.op)
    if module.dora:
        yield KeyRule.of(module.lora_magnitude, f"{key}.lora_magnitude_vector", group.op)


def _group(fqn: str, base: KeyMap) -> KeyGroup:
    group = base.group_of_fqn(f"{fqn}.weight")
    if not isinstance(group.op, _ROW_OPS) or not group.keys[0].endswith(".weight"):
        raise KeyMapError(
            f"{fqn}: stored as {', '.join(group.keys[:2])}{', ...' if len(group.keys) > 2 else ''} "
            f"({type(group.op).__name__}), and a low-rank product cannot follow",
            (fqn,),
        )
    return group


def _module_key(fqn: str, base: KeyMap) -> str:
    return base.group_of_fqn(f"{fqn}.weight").keys[0].removesuffix(".weight")


def _known(fqns: Iterable[str], base: KeyMap) -> Iterator[str]:
    """Yield the other tool's names of modules that it has."""
    for fqn in fqns:
        try:
            yield from (key.removesuffix(".weight") for key in base.group_of_fqn(f"{fqn}.weight").keys)
        except KeyMapError:
            continue


def _shortest(adapted: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return last parts of names where they mean the adapted modules and no others, else the full names.

    A last part that also means another module would have PEFT put an untrained adapter there.
    """
    last = sorted({key.rpartition(".")[2] for key in adapted})
    if not {key.rpartition(".")[2] for key in others}.intersection(last):
        return last
    return sorted(adapted)


def _from_pattern(pattern: Mapping[str, Any], key: str, default: Any) -> Any:
    """Look a module up as PEFT does. Source: peft, tuners/tuners_utils.py get_pattern_key."""
    return next((value for name, value in pattern.items() if re.match(rf"(.*\.)?({name})$", key)), default)


def _json_number(value: float) -> float | int:
    """Return whole numbers as integers, which vLLM insists on."""
    return int(value) if float(value).is_integer() else value
