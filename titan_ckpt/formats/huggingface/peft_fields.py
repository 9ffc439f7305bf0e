"""The fields of adapter_config.json: those that are honoured, those without effect on the result, and the refused ones.

PEFT has many kinds of LoRA whose folders look alike. Some presuppose a changed base, others act on some tokens only, so
their tensors in an ordinary LoRA would be a different model. Every field of PEFT's LoraConfig is in one of the tables
below, and a field that is in none is refused, because nobody has looked at it. Reads no file.
Source: peft 0.21.2, tuners/lora/config.py and layer.py; tests/zoo/test_peft_settings.py compares the results.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from titan_ckpt.encoding.foreign_pattern import ForeignPatterns, pattern_fault

HONOURED: Mapping[str, str] = {
    "peft_type": "only LORA is read",
    "r": "the rank, compared with the tensors' shapes",
    "lora_alpha": "the scale is lora_alpha / r",
    "use_rslora": "the scale is lora_alpha / sqrt(r)",
    "rank_pattern": "ranks by module, looked up as PEFT does",
    "alpha_pattern": "alphas by module, looked up as PEFT does",
    "use_dora": "rows are scaled to the trained magnitudes",
    "target_modules": "a tensor of a module that it does not select is refused, because PEFT would ignore it",
    "exclude_modules": "as target_modules",
    "layers_to_transform": "as target_modules",
    "layers_pattern": "as target_modules",
    "target_parameters": "matrices (`q_proj.weight`) are read as modules are; stacked experts as PEFT nests them",
    "modules_to_save": "the trained copies replace the base's modules",
    "init_lora_weights": "initial values that leave the base as it is are accepted, others are refused",
    "ensure_weight_tying": "the modules that share a weight change together",
    "bias": "the trained biases replace the base's",
    "lora_bias": "the bias of B is added to the module's, at the pair's scale",
    "trainable_token_indices": "the trained rows replace those of the table",
    "use_bdlora": "accepted with one block, which is ordinary LoRA",
    "base_model_name_or_path": "compared with the base of the run",
    "revision": "compared with the revision of the base",
}
WITHOUT_EFFECT: Mapping[str, str] = {
    "task_type": "chooses PEFT's class around the model",
    "auto_mapping": "chooses the class of the base, which the run names itself",
    "peft_version": "the version that wrote the folder",
    "inference_mode": "decides whether PEFT trains the adapter",
    "fan_in_fan_out": "the class of the module decides, as in PEFT, which corrects the field",
    "lora_dropout": "acts in training only, where the run's own dropout counts",
    "loftq_config": "read with init_lora_weights alone",
    "eva_config": "as loftq_config; the ranks and alphas that EVA chose are in the patterns",
    "corda_config": "as loftq_config",
    "lora_ga_config": "as loftq_config",
    "megatron_core": "read with megatron_config alone",
    "qalora_group_size": "read with use_qalora alone",
    "use_qalora": "acts on GPTQ layers alone, whose tensors have other shapes and are refused by these",
    "runtime_config": "where PEFT computes",
}
REFUSED: Mapping[str, str] = {
    "alora_invocation_tokens": "the adapter acts after these tokens only",
    "layer_replication": "it presupposes a base with repeated layers",
    "megatron_config": "it presupposes Megatron's modules",
    "arrow_config": "it routes tokens between several adapters",
    "kasa_config": "it presupposes a truncated base and has a diagonal between A and B",
    "velora_config": "it holds tensors of a changed backward pass",
    "monteclora_config": "it holds tensors of a random sampler",
}
"""Refused if the value is true or not empty."""

OWN = "titan_ckpt_"
"""Prefix of the fields that this package adds to the config in memory; they have a file of their own."""
_HARMLESS_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
_CHANGES_BASE = (
    "such adapters presuppose a base from which their initial values were subtracted. Save it again with PEFT's "
    "save_pretrained(path_initial_model_for_weight_conversion=...), which makes it an ordinary LoRA, or merge it with "
    "PEFT. If the base of this run is the changed one, set init_lora_weights to true in adapter_config.json"
)
_TYPES: Mapping[str, tuple[type, ...]] = {
    "use_rslora": (bool,),
    "use_dora": (bool,),
    "lora_bias": (bool,),
    "ensure_weight_tying": (bool,),
    "target_modules": (list, str),
    "exclude_modules": (list, str),
    "layers_to_transform": (list, int),
    "layers_pattern": (list, str),
    "target_parameters": (list,),
    "modules_to_save": (list,),
    "base_model_name_or_path": (str,),
    "revision": (str,),
}
"""Types of the fields whose values are used; each may be null too."""
_NAMES = re.compile(r"(?:[\w/|-]|\\[.-])+")
"""Full names, escaped and with "|" between them; there may be more of them than an expression may be long."""
_TEXTS = ("target_modules", "exclude_modules")
"""Fields that are a list of names, or a text that is a regular expression."""


def unsupported(config: Mapping[str, Any]) -> list[str]:
    """Return one line for each field whose value this package cannot honour."""
    known = HONOURED.keys() | WITHOUT_EFFECT.keys()
    lines = [f"{name} = {config[name]!r:.80}: {why}" for name, why in REFUSED.items() if config.get(name)]
    lines += [f"{name} = {config[name]!r:.80}: {why}" for name, why in _refused_values(config)]
    lines += [
        f"{name} = {value!r:.80}: this version does not know the field; if it has no effect, remove it"
        for name, value in config.items()
        if value and name not in known | REFUSED.keys() and not name.startswith(OWN)
    ]
    return lines


def wrong_types(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each field that has a type which PEFT does not write."""
    for name, types in _TYPES.items():
        value = config.get(name)
        entries = value if isinstance(value, list) else []
        item = int if name == "layers_to_transform" else str
        if value is not None and not (isinstance(value, types) and all(isinstance(entry, item) for entry in entries)):
            yield f"{name} is {value!r:.80}, expected {' or '.join(kind.__name__ for kind in types)}"
    if config.get("bias") not in (None, "none", "all", "lora_only"):
        yield f"bias is {config['bias']!r:.80}, expected none, all or lora_only"
    rows = config.get("trainable_token_indices")
    lists = [*rows.values()] if isinstance(rows, dict) else [rows or []]
    if not all(
        isinstance(r, list) and all(type(i) is int and i >= 0 for i in r) and len({*r}) == len(r) for r in lists
    ):
        yield f"trainable_token_indices is {rows!r:.80}, expected different rows, from 0, or a map from tables to these"
    for name in _TEXTS:
        text = config.get(name)
        if isinstance(text, str) and not _whole_names(text) and (fault := pattern_fault(f"^(?:{text})")):
            yield f"{name} is {text!r:.80}, which is no regular expression that is matched here: {fault}"


class Selection:
    """The modules on which PEFT would put an adapter.

    Source: peft, tuners/tuners_utils.py check_target_module_exists.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        texts = {name: text for name in _TEXTS if isinstance(text := config.get(name), str)}
        self._whole = {name: _whole_names(text) for name, text in texts.items()}
        # the table matches ends of names, so "^" makes it compare whole ones
        self._patterns = {name: ForeignPatterns({f"^(?:{text})": 1.0}) for name, text in texts.items()}

    def holds(self, module: str) -> bool:
        """Return whether the config selects the module; without target_modules, for which PEFT has a table, it does.

        Raises: ValueError for regular expressions that take too long.
        """
        targets = self._config.get("target_modules")
        if self._names("exclude_modules", module):
            return False
        if targets is None or targets == "all-linear" or targets_parameter(self._config, module):
            return True
        if targets_stacks(self._config, module):
            return True
        return self.targets(module)

    def targets(self, module: str) -> bool:
        """Return whether target_modules names the module, in one of the chosen layers."""
        targets = self._config.get("target_modules") or ()
        exact = isinstance(targets, str) or module in targets
        return self._names("target_modules", module) and (exact or self._in_chosen_layer(module))

    def _names(self, field: str, module: str) -> bool:
        """Return whether a regular expression, or one of several last parts of names, names the module."""
        if whole := self._whole.get(field):
            return module in whole
        if field in self._patterns:
            return self._patterns[field].first(module) is not None
        return _is_one_of(self._config.get(field) or (), module)

    def _in_chosen_layer(self, module: str) -> bool:
        chosen, lists = self._config.get("layers_to_transform"), self._config.get("layers_pattern") or ()
        if chosen is None or chosen == []:
            return True
        names = [re.escape(name) for name in ([lists] if isinstance(lists, str) else lists)] or ["[^.]*"]
        start = r"(?:^|.*?\.)" if lists else r".*?\."
        match = next((match for name in names if (match := re.match(rf"{start}{name}\.(\d+)\.", module))), None)
        return match is not None and int(match[1]) in (chosen if isinstance(chosen, list) else [chosen])


def targets_parameter(config: Mapping[str, Any], module: str) -> bool:
    """Return whether the adapter is on the module's parameter `weight`, and not on the module."""
    return _is_one_of(config.get("target_parameters") or (), f"{module}.weight")


def targets_stacks(config: Mapping[str, Any], module: str) -> bool:
    """Return whether the adapter may be on a parameter of the module that has another name than `weight`."""
    names = [str(name).rpartition(".") for name in config.get("target_parameters") or ()]
    inner = module.replace(".base_layer", "")
    parents = {parent for parent, _, name in names if name != "weight"}
    if _is_one_of([*parents - {""}], inner):
        return True
    return "" in parents and not Selection(config).targets(inner)


def target_parameters_of(config: Mapping[str, Any], module: str, parameters: Sequence[str]) -> list[str]:
    """Return which of a module's parameters have an adapter by `target_parameters`, in their order in the module."""
    return [name for name in parameters if _is_one_of(config.get("target_parameters") or (), f"{module}.{name}")]


def saves(config: Mapping[str, Any], key: str) -> bool:
    """Return whether `modules_to_save` names a tensor's module, or one that contains it.

    As in PEFT, "norm" also matches "input_layernorm".
    """
    modules = list(accumulate(key.split(".")[:-1], lambda a, b: f"{a}.{b}"))
    return any(module.endswith(name) for name in config.get("modules_to_save") or () for module in modules)


def _whole_names(text: str) -> frozenset[str]:
    """Return the names of an expression that is nothing but names, as exports write it; else an empty set."""
    return frozenset(text.replace("\\", "").split("|")) if _NAMES.fullmatch(text) else frozenset()


def _is_one_of(names: Sequence[str], module: str) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _refused_values(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (field, reason) for each field of which some values are honoured and this one is not."""
    init = config.get("init_lora_weights")
    if not (init is None or isinstance(init, bool) or str(init).lower() in _HARMLESS_INITS):
        yield "init_lora_weights", _CHANGES_BASE
    blocks = config.get("use_bdlora")
    if blocks and not (isinstance(blocks, dict) and blocks.get("nblocks") == 1):
        yield "use_bdlora", "A or B is block diagonal"


def is_trained_bias(config: Mapping[str, Any], key: str) -> bool:
    """Return whether the setting `bias` has PEFT train this tensor of the base."""
    return key.endswith(".bias") and config.get("bias") not in (None, "none") and not saves(config, key)


def trained_rows(config: Mapping[str, Any], module: str) -> tuple[int, ...]:
    """Return the indices of the rows of a table that were trained; a list is for the input embeddings."""
    indices = config.get("trainable_token_indices") or ()
    if isinstance(indices, dict):
        indices = next((rows for name, rows in indices.items() if _is_one_of([name], module)), ())
    return tuple(indices)
