"""The names that folders have for the tensors of a transformers model: old ones, with and without the base's prefix.

Owns the way from the keys of one folder to the model's table, by the rules and the lists with which from_pretrained
renames and ignores keys. hf_keys.py makes the table of the names that save_pretrained writes.
Source: transformers, `core_model_loading.py` convert_and_load_state_dict_in_model; `modeling_utils.py`
_adjust_missing_and_unexpected_keys.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from titan_ckpt.geometry.keymap import IDENTITY, KeyMap, KeyRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOVED = {
    "rotary_emb.inv_freq": r"rotary_emb\.inv_freq",
    "position_ids": r"(^|\.)position_ids$",
    "attn.bias": r"\.attn\.masked_bias$",  # GPT-2
    "attn.attention.bias": r"\.attn\.attention\.masked_bias$",  # GPT-Neo
    "attn.embed_positions": r"\.attn\.(masked_bias|bias|causal_mask)$",  # GPT-J and CodeGen
}
"""End of the name of a buffer, or of a declared leftover -> pattern of older leftovers in folders of such a model."""


class Source(NamedTuple):
    """The part of a model that a file tensor holds."""

    name: str
    """The parameter; the first one, if a conversion makes several."""
    part: str
    """The name that the conversion knows the file tensor by; empty if it is the parameter as it is in memory."""


@dataclass(frozen=True)
class FolderNames:
    """The rules of from_pretrained for the keys of one model's folders."""

    kept: Mapping[str, str]
    """Name in the model's state dict -> the first of the names that share its tensor."""
    computed: frozenset[str]
    """Buffers that no folder needs to hold."""
    prefix: str
    tied: frozenset[str]
    """The first names of tensors that have several."""
    conversions: Sequence[Any]
    ignored: re.Pattern[str] | None
    """The keys that the model's class declares as leftovers, by their names in the model."""

    @staticmethod
    def of(model: PreTrainedModel, tied: Mapping[str, str]) -> FolderNames:
        """Return the rules for a model. `tied`: alias -> first name of the same tensor."""
        from transformers.conversion_mapping import get_model_conversion_mapping

        kept = {name: tied.get(name, name) for name in model.state_dict()}
        buffers = [name for name, _ in model.named_buffers()]
        declared: Any = model._keys_to_ignore_on_load_unexpected  # noqa: SLF001 - where transformers declares them
        patterns = [*sorted(declared or ()), *_moved_buffers([*buffers, *(declared or ())])]
        return FolderNames(
            kept,
            frozenset(buffers) - kept.keys(),
            model.base_model_prefix,
            frozenset(tied.values()),
            get_model_conversion_mapping(model),
            re.compile("|".join(f"({pattern})" for pattern in patterns)) if patterns else None,
        )

    def sources(self, keys: Collection[str]) -> dict[str, Source]:
        """Return what each file tensor holds, by its key; the names of unknown ones are in no model."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

        rules = copy.deepcopy(self.conversions)  # some of them remember the keys that they have seen
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        return {key: self._source(key, renamings, converters) for key in sorted(keys, key=dot_natural_key)}

    def _source(self, key: str, renamings: list[Any], converters: list[Any]) -> Source:
        from transformers.core_model_loading import apply_converters, apply_renamings

        renamed = apply_renamings(key, renamings)
        name, pattern = apply_converters(renamed, converters)
        before, after = self._prefix_change(name)
        if after + name.removeprefix(before) not in self.kept and key in self.kept:
            return Source(self.kept[key], "")
        name, renamed = after + name.removeprefix(before), after + renamed.removeprefix(before)
        return Source(self.kept.get(name, name), "" if pattern is None else renamed)

    def _prefix_change(self, name: str) -> tuple[str, str]:
        """Return the prefix to remove from a name and the one to add: a folder may be of the base model, or have it."""
        prefix = f"{self.prefix}."
        if self.prefix and name.startswith(prefix) and name.removeprefix(prefix) in self.kept:
            return prefix, ""
        return ("", prefix) if self.prefix and prefix + name in self.kept else ("", "")

    def leaves_out(self, name: str) -> bool:
        """Return whether from_pretrained ignores a tensor, because the model computes it or declares it left over."""
        forms = (name, f"{self.prefix}.{name}", name.removeprefix(f"{self.prefix}."))
        return not self.computed.isdisjoint(forms) or bool(self.ignored and self.ignored.search(name))


@dataclass(frozen=True)
class HuggingFaceKeyMap(KeyMap):
    """The table of the names that save_pretrained writes; `of_folder` knows the other names that are read."""

    exact: tuple[KeyRule, ...] = field(default=(), repr=False, compare=False)
    """The rule of each tensor, without placeholders."""
    names: FolderNames | None = field(default=None, repr=False, compare=False)
    float32: Mapping[torch.dtype, Collection[str]] = field(default_factory=dict, repr=False, compare=False)
    """dtype of a folder -> the tensors that from_pretrained(dtype=...) holds in float32 all the same."""

    def casts(self, fqns: Collection[str], dtype: object) -> bool:
        """Return False for tensors that transformers keeps in float32: rounded in the file, they stay wrong."""
        return not isinstance(dtype, torch.dtype) or not set(fqns) & set(self.float32.get(dtype, ()))

    def of_folder(self, keys: Collection[str]) -> KeyMap:
        """Return the table with the names of this folder, as from_pretrained would find them.

        Keys that lead nowhere keep their names, so that a load refuses them. `left_out` has those that are ignored.
        """
        own_keys = [key for rule in self.exact for key in rule.file]
        if self.names is None or set(keys) == set(own_keys):  # the usual case
            return self
        own = {source: key for key, source in self.names.sources(own_keys).items()}
        found: dict[Source, list[str]] = {}
        for key, source in self.names.sources(keys).items():
            found.setdefault(source, []).append(key)
        spelled: dict[str, str] = {}
        in_memory: dict[str, str] = {}
        left_out: set[str] = set()
        repeats: list[tuple[str, str]] = []
        for source, (first, *others) in ((source, _own_first(same, own.get(source))) for source, same in found.items()):
            if source in own:
                spelled[own[source]] = first
            elif source.name in self.names.kept and not source.part:
                in_memory[source.name] = first
            elif self.names.leaves_out(source.name):
                left_out |= {first, *others}
                continue
            if source.name in self.names.tied:
                repeats += [(other, first) for other in others]
        if all(key == name for key, name in spelled.items()) and not (in_memory or left_out or repeats):
            return self
        rules = [rule for own_rule in self.exact for rule in _spelled(own_rule, spelled, in_memory)]
        return replace(self, rules=tuple(generalised(rules)), left_out=frozenset(left_out), repeats=tuple(repeats))


def _own_first(same: Sequence[str], own: str | None) -> list[str]:
    """Return the keys of the same tensor, with the one that save_pretrained writes first."""
    return sorted(same, key=lambda key: key != own)


def _spelled(rule: KeyRule, spelled: Mapping[str, str], in_memory: Mapping[str, str]) -> Iterator[KeyRule]:
    """Yield the rules of one rule's tensors for a folder.

    `spelled`: key of the table -> key of the folder. `in_memory`: parameter -> key, if the folder has it as it is in
    memory, and no file tensor of the rule.
    """
    if in_memory.keys() & set(rule.native) and not any(key in spelled for key in rule.file):
        yield from (KeyRule.of(fqn, in_memory.get(fqn, fqn)) for fqn in rule.native)
    else:
        yield KeyRule.of(rule.native, [spelled.get(key, key) for key in rule.file], rule.op)


def _moved_buffers(buffers: Iterable[str]) -> list[str]:
    """Return the patterns of buffers that moved to other modules, or were persistent once."""
    return [pattern for end, pattern in _MOVED.items() if any(buffer.endswith(end) for buffer in buffers)]


def generalised(rules: Sequence[KeyRule]) -> Iterable[KeyRule]:
    """Yield one rule for all layers if they agree, else their own rules, and none for names that are equal."""
    rows: dict[tuple[str, ...], list[tuple[KeyRule, KeyRule | None]]] = {}
    for rule in rules:
        general = _general(rule)
        template = tuple(_template(fqn, _numbers(fqn)) or fqn for fqn in rule.native)
        rows.setdefault(template, []).append((rule, general))
    for same in rows.values():
        agreed = {general for _, general in same}
        chosen = [rule for rule, _ in same] if None in agreed or len(agreed) > 1 else agreed
        yield from (
            rule for rule in chosen if rule is not None and not (rule.native == rule.file and rule.op == IDENTITY)
        )


def _general(rule: KeyRule) -> KeyRule | None:
    """Return the rule with placeholders for the numbers in its names; None if its names have different numbers."""
    numbers = _numbers(rule.native[0])
    names = [_template(name, numbers) for name in (*rule.native, *rule.file)]
    templates = [name for name in names if name is not None]
    if len(templates) < len(names) or any(_numbers(fqn) != numbers for fqn in rule.native):
        return None
    return KeyRule.of(templates[: len(rule.native)], templates[len(rule.native) :], rule.op)


def _numbers(name: str) -> list[str]:
    return [part for part in name.split(".") if part.isdecimal()]


def _template(name: str, numbers: Sequence[str]) -> str | None:
    """Return the name with these numbers, in this order, replaced by placeholders; None if it lacks one of them."""
    parts, left = [], list(enumerate(numbers))
    for part in name.split("."):
        if left and part == left[0][1]:
            part = f"{{n{left.pop(0)[0]}}}"
        parts.append(part)
    return None if left else ".".join(parts)
