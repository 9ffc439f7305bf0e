"""The key table between the parameters of a transformers model and the tensors of its folder.

transformers 5 holds some weights in a different form than its folders do (stacked experts, fused gate and up, renamed
modules), and converts them with code that runs over a state dict. This module runs that code, which save_pretrained
uses, over small tensors of distinct numbers, and derives the table from where each number went. It also owns the way
from the keys of one folder to that table: old names, and names with and without the base's prefix, by the rules and the
lists with which from_pretrained renames and ignores keys.
Source: transformers, `core_model_loading.py` convert_and_load_state_dict_in_model; `modeling_utils.py`
_adjust_missing_and_unexpected_keys.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule

from titan_ckpt.errors import KeyMapError, listed
from titan_ckpt.geometry.chunks import Block, Chunk, Shape
from titan_ckpt.geometry.keymap import IDENTITY, Chain, Concat, KeyMap, KeyRule, Split, TensorOp, Transpose, Unstack
from titan_ckpt.weights.wrapper import ModelWrapper

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE_SIZE = 24
"""Longest row of a numbered tensor. It is divisible by 2, 3, 4, 6, 8 and 12, the likely numbers of parts."""


_Group = tuple[tuple[str, ...], tuple[str, ...]]
"""The fqns of some parameters, and the keys of all file tensors that hold their values and no others."""


def find_key_map(model: PreTrainedModel) -> KeyMap:
    """Return the model's table; names that are equal on both sides are left to `identity`. Reads no values.

    Raises: KeyMapError listing parameters that the folder holds in a form that no operation produces.
    """
    from transformers.core_model_loading import revert_weight_conversion

    wrapper = ModelWrapper([model])
    tied = wrapper.tied
    saved = {first: alias for alias, first in tied.items() if alias not in model.all_tied_weights_keys}
    shapes = {saved.get(fqn, fqn): tuple(value.shape) for fqn, value in wrapper.state_dict().items()}
    first = {alias: fqn for fqn, alias in saved.items()}
    rules: list[KeyRule] = []
    problems: list[str] = []
    with torch.device("cpu"):  # the caller may be building on meta
        probes = _numbered(shapes)
        with _classes_of_transformers(model):
            files: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(probes))
        for fqns, keys in _groups(probes, files):
            op = _operation((fqns, keys), shapes, probes, files)
            if op is None:
                problems.append(f"{', '.join(fqns)} as {listed(keys, ', ', ' ')}")
            else:
                rules.append(KeyRule.of([first.get(fqn, fqn) for fqn in fqns], keys, op))
    if problems:
        raise KeyMapError(
            f"{type(model).__name__}: no operation arranges {len(problems)} parameter(s) as the folder has them\n  "
            + "\n  ".join(problems),
            problems,
        )
    with _classes_of_transformers(model):
        names = FolderNames.of(model, tied) if hasattr(model, "base_model_prefix") else None
    return HuggingFaceKeyMap(
        tuple(generalised(rules)),
        identity=True,
        nameless=frozenset(shapes.keys() & (getattr(model, "_keys_to_ignore_on_save", None) or ())),
        verified=True,
        exact=tuple(rules),
        names=names,
        float32={dtype: _kept_in_float32(model, shapes, dtype) for dtype in (torch.float16, torch.bfloat16)},
    )


@contextmanager
def _classes_of_transformers(model: PreTrainedModel) -> Iterator[None]:
    """Give modules that FSDP2 has sharded their own classes back, by whose names transformers finds conversions."""
    sharded = [(module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        for module, kind in sharded:
            module.__class__ = kind.__bases__[1]  # FSDP2 derives a class from its own one and the module's
        yield
    finally:
        for module, kind in sharded:
            module.__class__ = kind


def _kept_in_float32(model: PreTrainedModel, fqns: Iterable[str], dtype: torch.dtype) -> frozenset[str]:
    """Return the tensors that from_pretrained holds in float32 when it loads a folder in this dtype.

    Source: transformers, `core_model_loading.py` convert_and_load_state_dict_in_model, on `dtype_plan`.
    """
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(dtype) if hasattr(model, "_get_dtype_plan") else {}  # noqa: SLF001 - no public name
    if not plan:
        return frozenset()
    pattern, *_ = build_glob_alternation(list(plan))
    return frozenset(fqn for fqn in fqns if pattern.search(fqn))


def _numbered(shapes: Mapping[str, Shape]) -> dict[str, torch.Tensor]:
    """Return small tensors in which every number occurs once. A first dim that may count experts keeps its size.

    None is empty: a parameter without elements, such as the tokens that a model has none of, is found as any other.
    """
    start, made = 0, {}
    for fqn, shape in shapes.items():
        whole = shape[:1] if len(shape) > 2 else ()
        small = torch.Size([*(max(n, 1) for n in whole), *(max(1, min(n, _PROBE_SIZE)) for n in shape[len(whole) :])])
        made[fqn] = torch.arange(start, start + small.numel()).view(small)
        start += small.numel()
    return made


def _groups(probes: Mapping[str, torch.Tensor], files: Mapping[str, torch.Tensor]) -> list[_Group]:
    """Group file tensors with the parameters whose numbers they hold, both in the order of their first numbers."""
    fqns = list(probes)
    starts = torch.tensor([int(probe.flatten()[0]) for probe in probes.values()])
    groups: dict[str, tuple[list[str], list[str]]] = {}
    for key in sorted(files, key=lambda key: int(files[key].flatten()[0])):
        owners = torch.searchsorted(starts, files[key].flatten(), right=True) - 1
        names = [fqns[i] for i in dict.fromkeys(owners.tolist())]
        merged = [groups[name] for name in names if name in groups]
        group = merged[0] if merged else ([], [])
        for name in names:
            if name not in groups:
                group[0].append(name)
            groups[name] = group
        group[1].append(key)
    unique = {id(group): group for group in groups.values()}
    return [(tuple(natives), tuple(keys)) for natives, keys in unique.values()]


def _operation(
    group: _Group,
    shapes: Mapping[str, Shape],
    probes: Mapping[str, torch.Tensor],
    files: Mapping[str, torch.Tensor],
) -> TensorOp | None:
    """Return the operation that produces exactly the file tensors from the parameters; None if there is none."""
    fqns, keys = group
    natives, wanted = [probes[fqn] for fqn in fqns], [files[key] for key in keys]
    for kind, op in _candidates([tuple(native.shape) for native in natives], len(wanted)).items():
        if makes(op, natives, wanted):
            return _candidates([shapes[fqn] for fqn in fqns], len(wanted)).get(kind)
    return None


def _candidates(natives: Sequence[Shape], num_file: int) -> dict[str, TensorOp]:
    """Return the operations that could turn parameters of these shapes into `num_file` file tensors, by kind."""
    if len(natives) > 1:
        return {"concat": Concat(tuple(shape[0] for shape in natives))} if num_file == 1 and all(natives) else {}
    (shape,) = natives
    if num_file == 1:
        alone = {"unstack": Unstack(1), "unstack transposed": Unstack(1, transpose=True)} if shape[:1] == (1,) else {}
        return {"identity": IDENTITY, "transpose": Transpose(), **alone}
    found: dict[str, TensorOp] = {}
    num, parts = shape[0], num_file // shape[0]
    if num % num_file == 0:
        found["split"] = Split((num // num_file,) * num_file)
    if num == num_file:
        found |= {"unstack": Unstack(num), "unstack transposed": Unstack(num, transpose=True)}
    if len(shape) == 3 and num_file == num * parts:
        found["unstack, split"] = Chain(Unstack(num), Split((shape[1] // parts,) * parts))
        found["unstack transposed, split"] = Chain(Unstack(num, transpose=True), Split((shape[2] // parts,) * parts))
    return found


def makes(op: TensorOp, natives: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    """Return whether the operation puts exactly the wanted values into every element of the file tensors."""
    shapes = [tuple(native.shape) for native in natives]
    try:
        if op.file_shapes(shapes) != [tuple(tensor.shape) for tensor in wanted]:
            return False
    except KeyMapError:
        return False
    left, files = sum(value.numel() for value in wanted), {str(i): value for i, value in enumerate(wanted)}
    for index, native in enumerate(natives):
        for chunk, view, file in op.pieces(index, shapes, Block(Chunk.whole(native.shape), native), [*files]):
            region = files[file][chunk.within(Chunk.whole(files[file].shape))]
            if not torch.equal(*unrepeated(view.reshape(region.shape), region)):
                return False
            left -= region.numel()
    return left == 0


def unrepeated(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return tensors of one shape without what all of them repeat, which a stride of 0 says."""
    strides = zip(*(tensor.stride() for tensor in tensors), strict=True)
    parts = tuple(slice(None) if any(of_dim) else slice(1) for of_dim in strides)
    return [tensor[parts] for tensor in tensors]


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
        known = [*buffers, *(declared or ())]
        moved = [pattern for end, pattern in _MOVED.items() if any(name.endswith(end) for name in known)]
        patterns = [*sorted(declared or ()), *moved]
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

    def of_folder(self, keys: Collection[str]) -> KeyMap:
        """Return the table with the names of this folder, as from_pretrained would find them.

        Keys that lead nowhere keep their names, so that a load refuses them. `left_out` has those that are ignored.
        """
        own_keys = [key for rule in self.exact for key in rule.file]
        if self.names is None or set(keys) == set(own_keys) - self.nameless:  # the usual case
            return self
        own = {source: key for key, source in self.names.sources(own_keys).items()}
        found: dict[Source, list[str]] = {}
        for key, source in self.names.sources(keys).items():
            found.setdefault(source, []).append(key)
        spelled: dict[str, str] = {}
        in_memory: dict[str, str] = {}
        left_out: set[str] = set()
        repeats: list[tuple[str, str]] = []
        for source, same in found.items():
            written = own.get(source)  # by save_pretrained
            first = written if written in same else same[0]
            others = [key for key in same if key != first]
            if source in own:
                spelled[own[source]] = first
            elif source.name in self.names.kept and not source.part:
                in_memory[source.name] = first
            elif self.names.leaves_out(source.name):
                left_out |= {first, *others}
                continue
            if source.name in self.names.tied:
                repeats += [(other, first) for other in others]
        table = replace(self, nameless=self.nameless - {source.name for source in found})
        if all(key == name for key, name in spelled.items()) and not (in_memory or left_out or repeats):
            return table
        rules = [rule for own_rule in self.exact for rule in _spelled(own_rule, spelled, in_memory)]
        return replace(table, rules=tuple(generalised(rules)), left_out=frozenset(left_out), repeats=tuple(repeats))


def _spelled(rule: KeyRule, spelled: Mapping[str, str], in_memory: Mapping[str, str]) -> Iterator[KeyRule]:
    """Yield the rules of one rule's tensors for a folder.

    `spelled`: key of the table -> key of the folder. `in_memory`: parameter -> key, if the folder has it as it is in
    memory, and no file tensor of the rule.
    """
    if in_memory.keys() & set(rule.native) and not any(key in spelled for key in rule.file):
        yield from (KeyRule.of(fqn, in_memory.get(fqn, fqn)) for fqn in rule.native)
    else:
        yield KeyRule.of(rule.native, [spelled.get(key, key) for key in rule.file], rule.op)


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
