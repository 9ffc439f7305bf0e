"""LoRA's keys and settings as PEFT writes them, derived from the base model's key table.

Owns the names and adapter_config.json. Reads and writes no files; does not need PEFT.
Source: peft, utils/save_and_load.py and tuners/lora/config.py.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

from titan_ckpt.converters.lora.config import LoRAConfig
from titan_ckpt.converters.lora.fused import AlsoTransposed, StackedFactor, Target, modules_of, targets_of
from titan_ckpt.converters.lora.placement import misplaced
from titan_ckpt.converters.targets import ends_of, last_part, pattern_of
from titan_ckpt.errors import ConfigError, KeyMapError
from titan_ckpt.formats.huggingface.peft import BASE_LAYER, BASE_OF_ROWS, PREFIX, ROWS, ModuleNumbers
from titan_ckpt.formats.huggingface.peft_fields import targets_parameter, trained_rows
from titan_ckpt.geometry.chunks import TensorInfo
from titan_ckpt.geometry.keymap import (
    IDENTITY,
    Chain,
    Concat,
    Identity,
    KeyGroup,
    KeyMap,
    KeyRule,
    PermuteRotary,
    PermuteRows,
    Repeat,
    Split,
    TensorOp,
    Unstack,
)
from titan_ckpt.weights.lora import COPY, PARTS, A, B, TrainedRows, lora_tensor, matches
from titan_ckpt.weights.low_rank import LowRank, Stack, WeightUpdate

_OF_ROWS = (Identity, PermuteRotary, PermuteRows, Split)
"""Operations that move whole rows, so that B follows them and A stays."""
_EXPERT = re.compile(r"\.experts\.\d+\.")
_FUSED = ({"gate_proj", "up_proj"}, {"w1", "w3"})
"""Projections of experts that are one parameter in transformers 5. Source: peft, _MOE_FUSED_TARGETS."""


class PeftAdapter:
    """LoRA's StateDictAdapter (titan_ckpt.types), and what LoRA has added to a model: all names are fqns."""

    config: LoRAConfig

    def __init__(self) -> None:
        """Begin with nothing."""
        self.adapted: dict[str, LowRank] = {}
        """The adapter of each adapted module, or parameter of stacked experts."""
        self.stacks: dict[str, Stack] = {}
        """Adapted parameters of stacked experts, in the order of each module's parameters -> their form in PEFT."""
        self.added: list[WeightUpdate] = []
        """Updates beside the pairs: of biases, and rows of tables."""
        self.copied: dict[str, str] = {}
        """A trained copy's tensor -> the base's tensor."""
        self.frozen: list[str] = []
        """The modules whose copies are not trained."""
        self.following: dict[str, str] = {}
        """Linear modules that follow a table, whose weight they share -> that table."""
        self.shares = False
        """Whether an adapter or a copy is on a module that shares its weight."""
        self.others: list[str] = []
        """The base's tensors without an adapter: nothing that is written may select their modules."""

    def key_map(self, base: KeyMap, found: Mapping[str, TensorInfo] | None = None) -> KeyMap:
        """Return the table of the owned keys. If the base's table permutes a weight's rows, B's rows are permuted too.

        The table has no rules if `found` holds no adapter, as in a base's folder.
        Raises: KeyMapError listing modules that the other tool's model stores in a form that has no adapter.
        """
        if found is not None and not any(key.startswith(PREFIX) for key in found):
            return KeyMap(identity=True)
        rules: list[KeyRule] = []
        repeats: list[tuple[str, str]] = []
        problems: list[str] = []
        parameters = self._parameters(base, found)
        for target in self._targets(base, found):
            try:
                made = _rules(target, found)
                rules += made if found is None else [_first_of_equals(rule, repeats) for rule in made]
            except KeyMapError as error:
                problems.append(str(error))
        for trained, fqn in self.copied.items():
            group = base.group_of_fqn(fqn)
            if len(group.keys) == len(group.fqns) == 1:
                rules.append(KeyRule.of(trained, PREFIX + self._beside_pair(group.keys[0], fqn), group.op))
            else:
                problems.append(f"{fqn}: stored as {', '.join(group.keys)}, and a copy of it cannot be")
        rules += [
            rule
            for site, path in parameters.items()
            for rule in _parameter_rules(self.adapted[site], path, self.stacks[site])
        ]
        for update in self._rows():
            group = base.group_of_fqn(update.weight)
            if isinstance(group.op, Identity):
                (module,) = modules_of(group)
                rules.append(KeyRule.of(update.rows, PREFIX + module + ROWS))
            else:
                problems.append(f"{update.weight}: stored as {', '.join(group.keys)}, and rows of it cannot be")
        rules = [self._repeated(rule, base) for rule in rules] if found is None else rules
        if problems:
            raise KeyMapError(f"{len(problems)} adapter(s) have no name in PEFT\n  " + "\n  ".join(problems))
        return KeyMap(tuple(rules), repeats=tuple(repeats))

    def _parameters(self, base: KeyMap, found: Mapping[str, TensorInfo] | None = None) -> dict[str, str]:
        """Return the parameters of stacked experts that are PEFT's target_parameters -> the path of their pair.

        These are all in a model with transformers' own names; a folder may have a pair for each expert instead.
        """
        paths: dict[str, str] = {}
        if base.identity:
            for site in reversed([*self.stacks]):
                module, _, parameter = site.rpartition(".")
                if parameter == "weight":  # as such a parameter a reader takes the matrix of a linear module
                    continue
                path = f"{PREFIX}{module}"
                while path in paths.values():
                    path += BASE_LAYER.rstrip(".")
                paths[site] = path
        if found is not None and not any(f"{path}.lora_A.weight" in found for path in paths.values()):
            return {}
        return {site: paths[site] for site in self.stacks if site in paths}

    def _targets(self, base: KeyMap, found: Mapping[str, TensorInfo] | None = None) -> list[Target]:
        """Return the adapted weights that PEFT has as modules."""
        parameters = self._parameters(base, found)
        return targets_of((a for site, a in self.adapted.items() if site not in parameters), base)

    def _heads(self, base: KeyMap) -> dict[str, str]:
        """Return the tables that PEFT has tied modules to -> such a module's name there."""
        tied = self.following.items() if self.config.ensure_weight_tying else ()
        return {table: module for fqn, table in tied for module in modules_of(base.group_of_fqn(f"{fqn}.weight"))}

    def _repeated(self, rule: KeyRule, base: KeyMap) -> KeyRule:
        """Return the rule by which PEFT stores a tensor of a table once more for the module that is tied to it."""
        part = lora_tensor(rule.native[0])
        head = "" if part is None else self._heads(base).get(part.weight.rpartition(".")[0])
        if part is None or not head:
            return rule
        if part.role == COPY and part.weight.endswith(".weight"):
            inner = BASE_LAYER if BASE_LAYER in rule.file[0] else "."
            return KeyRule.of(rule.native, [*rule.file, f"{PREFIX}{head}{inner}weight"], Repeat(2))
        ending = {A: "lora_B.weight", B: "lora_A.weight"}.get(part.role)
        return KeyRule.of(rule.native, [*rule.file, f"{PREFIX}{head}.{ending}"], AlsoTransposed()) if ending else rule

    def _rows(self) -> list[TrainedRows]:
        return [update for update in self.added if isinstance(update, TrainedRows)]

    def _is_by_another_setting(self, fqn: str) -> bool:
        """Return whether a copied tensor is one that `modules_to_save` does not name."""
        module, _, parameter = fqn.rpartition(".")
        is_bias = parameter == "bias" and self.config.bias != "none"
        by_name = any(matches(module, name) for name in self.config.modules_to_save)
        return (is_bias and not by_name) or module in self.frozen

    def _beside_pair(self, key: str, fqn: str) -> str:
        """Return PEFT's name of a tensor of the base, which stands below the adapter if its module has one."""
        module, _, parameter = key.rpartition(".")
        site = fqn.rpartition(".")[0]
        if any(update.weight == fqn for update in self._rows()):
            return f"{module}{BASE_OF_ROWS}{parameter}"
        return f"{module}{BASE_LAYER}{parameter}" if site in self.adapted else key

    def file_config(self, base: KeyMap) -> dict[str, Any]:
        """Return adapter_config.json without the base's identity: the keys that PEFT reads and vLLM requires."""
        config = self.config
        modules = {module: t for t in self._targets(base) for module in t.modules}
        heads = {module: head for module, t in modules.items() if (head := self._heads(base).get(t.adapters[0].site))}
        stacks = [self.adapted[site] for site in self._parameters(base)]
        in_memory = {m: t.adapters[0].site for m, t in modules.items() if _is_renamed(t.group, base)}
        names = {module: [module, *([in_memory[module]] if module in in_memory else [])] for module in modules}
        by_weight = self._beside_experts(base, [*chain(*names.values())])
        known = {*chain(*names.values()), *self._other_modules(base)}
        every = {parent for module in known for parent in accumulate(module.split("."), lambda a, b: f"{a}.{b}")}
        named = {m: [*names[m], *([heads[m]] if m in heads else [])] for m in modules}
        keys = {m: [pattern_of(key, every) for n in named[m] for key in (n, by_weight.get(n)) if key] for m in modules}
        alphas = {module: json_number(t.alpha(config.use_rslora)) for module, t in modules.items()}
        parts = {module: t.ranks for module, t in modules.items() if t.is_fused}
        whole = [fqn for fqn in self.copied.values() if not self._is_by_another_setting(fqn)]
        copied = {key for fqn in whole for key in modules_of(base.group_of_fqn(fqn))}
        rows = {key: [*u.indices] for u in self._rows() for key in modules_of(base.group_of_fqn(u.weight))}
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": config.rank,
            "lora_alpha": json_number(config.alpha),
            "target_modules": ends_of({*chain(*names.values())} - by_weight.keys(), every - by_weight.keys()),
            **(
                {"target_parameters": parameters}
                if (parameters := sorted([*by_weight.values(), *(s.site for s in stacks)]))
                else {}
            ),
            "lora_dropout": config.dropout,
            "bias": config.bias,
            "use_rslora": config.use_rslora,
            "use_dora": config.use_dora,
            "fan_in_fan_out": any(adapted.operation == "conv1d" for adapted in self.adapted.values()),
            "inference_mode": True,
            "rank_pattern": {key: t.rank for m, t in modules.items() if t.rank != config.rank for key in keys[m]}
            | {stack.site: stack.rank for stack in stacks if stack.rank != config.rank},
            "alpha_pattern": {key: alpha for m, alpha in alphas.items() if alpha != config.alpha for key in keys[m]}
            | {stack.site: json_number(stack.alpha) for stack in stacks if stack.alpha != config.alpha},
            "modules_to_save": sorted(copied) or None,
            **({"lora_bias": True} if config.lora_bias else {}),
            **({"trainable_token_indices": rows} if rows else {}),
            **({"ensure_weight_tying": True} if config.ensure_weight_tying else {}),
            **({PARTS: parts} if parts else {}),
        }

    def misplaced(
        self, base: KeyMap, shapes: Mapping[str, Sequence[int]], hf_config: Mapping[str, Any] | None
    ) -> list[str]:
        """Return why PEFT would not put every tensor of an export on exactly one module of transformers' model.

        `shapes`: those of all file tensors. `hf_config`: config.json of the base, if it has one. Without transformers,
        PEFT or such a model, the names alone are judged.
        """
        if hf_config is not None:
            public = {name: value for name, value in self.file_config(base).items() if name != PARTS}
            with contextlib.suppress(ImportError, ConfigError):
                return misplaced(shapes, public, hf_config)
        return list(self._halves_of_experts(base))

    def _beside_experts(self, base: KeyMap, modules: Sequence[str]) -> dict[str, str]:
        """Return the dense modules that are named like the experts' -> the parameter that PEFT has to adapt instead.

        PEFT takes every module of such a name for one of the experts, which transformers 5 fuses on load.
        Source: peft, utils/transformers_weight_conversion.py _convert_peft_config_moe, which compares last parts.
        """
        adapted = [module for target in targets_of(self.adapted.values(), base) for module in target.modules]
        experts = {last_part(module) for module in (*adapted, *self._other_modules(base)) if _EXPERT.search(module)}
        return {m: f"{m}.weight" for m in modules if last_part(m) in experts and not _EXPERT.search(m)}

    def _halves_of_experts(self, base: KeyMap) -> Iterator[str]:
        """Yield a line if one of two projections of experts is adapted that transformers 5 fuses."""
        modules = [m for t in self._targets(base) for m in t.modules]
        adapted = {last_part(module) for module in modules if _EXPERT.search(module)}
        for fused in _FUSED:
            if missing := sorted(fused - adapted) if fused & adapted else []:
                yield f"PEFT fuses {' and '.join(sorted(fused))} of experts, and {missing[0]} has no adapter"

    def _other_modules(self, base: KeyMap) -> set[str]:
        """Return the modules of the base's other tensors, by their names in the folder and in transformers' memory."""
        names = {key for fqn in self.others for key in _known(fqn, base)} | {*(self.others if base.identity else ())}
        return {name.removesuffix(".weight").removesuffix(".bias") for name in names}

    def misfits(self, base: KeyMap, found: Mapping[str, Any]) -> list[str]:
        """Return why an adapter_config.json would compute something different from this converter with its tensors.

        The load checks keys and shapes; a wrong scale would pass those checks, so it is found by this method.
        """
        modules: dict[str, list[str]] = {}
        if found.get("peft_type", "LORA") != "LORA":
            return [f"peft_type is {found['peft_type']!r}, and this converter is LoRA"]
        problems = [
            f"{flag} is {bool(found.get(flag))}, expected {getattr(self.config, flag)}"
            for flag in ("use_dora", *(["ensure_weight_tying"] if self.shares else []), "lora_bias")
            if bool(found.get(flag)) != getattr(self.config, flag)
        ]
        of_tables = [(m, u.indices) for u in self._rows() for m in modules_of(base.group_of_fqn(u.weight))]
        problems += [
            f"{module}: trainable_token_indices are {[*rows]}, expected {[*indices]}"
            for module, indices in of_tables
            if (rows := trained_rows(found, module)) != indices
        ]
        numbers = ModuleNumbers(found)
        wanted = set(found.get("target_parameters") or ())
        stacks = [self.adapted[s] for s in self.stacks if any(s == w or s.endswith(f".{w}") for w in wanted)]
        try:
            for stack in stacks:
                rank, scaling = numbers.rank(stack.site), numbers.scaling(stack.site)
                if rank != stack.rank or not math.isclose(scaling, stack.scaling):
                    cause = f"rank {rank} scaled by {scaling:g}, expected rank {stack.rank} scaled by {stack.scaling:g}"
                    modules.setdefault(cause, []).append(stack.site)
            of_modules = [adapted for adapted in self.adapted.values() if adapted not in stacks]
            for target, key in ((t, key) for t in targets_of(of_modules, base) for key in t.modules):
                if target.adapters[0].operation == "embedding" and targets_parameter(found, key):
                    problems.append(
                        f"{key}: target_parameters adapts its weight as a matrix, and here it is an embedding, whose "
                        'product is stored another way round: merge the adapter into its base (load = "merge", or '
                        "titan-ckpt merge BASE ADAPTER TARGET)"
                    )
                rank, scaling = numbers.rank(key), numbers.scaling(key)
                fits = target.accepts(rank, key, found.get(PARTS) or {})
                if not fits or not math.isclose(scaling, target.scaling):
                    cause = f"rank {rank} scaled by {scaling:g}, expected {target.expected}"
                    modules.setdefault(cause, []).append(key)
        except ValueError as error:  # an expression takes too long
            problems.append(f"rank_pattern and alpha_pattern: {error}")
        for cause, keys in modules.items():
            others = f" (and {len(keys) - 1} other modules)" if len(keys) > 1 else ""
            problems.append(f"{keys[0]}: {cause}{others}")
        return problems


def _rules(target: Target, found: Mapping[str, TensorInfo] | None) -> Iterator[KeyRule]:
    """Yield rules for A, B and the magnitude that follow the base's operation on the weight.

    Raises: KeyMapError if they cannot follow it.
    """
    group, (adapted, *_) = target.group, target.adapters
    a, b, of_a, of_b = "lora_A.weight", "lora_B.weight", group.op, group.op
    if adapted.operation == "embedding" and isinstance(group.op, Identity):
        a, b = "lora_embedding_A", "lora_embedding_B"
    elif adapted.operation == "stack" and isinstance(group.op, Unstack):
        # if the file has W transposed, (B A)^T = A^T B^T: A and B change places
        a, b = (b, a) if group.op.transpose else (a, b)
    elif adapted.operation == "linear" and isinstance(group.op, Concat):
        of_a, of_b = target.operations((found or {}).get(f"{PREFIX}{target.modules[0]}.{a}"))
    elif adapted.operation == "linear" and _keeps_rows(group, adapted.rows):
        of_a = _parts_of_a(adapted, len(group.keys))
    elif adapted.operation != "conv1d" or not isinstance(group.op, Identity):
        files = f"{', '.join(group.keys[:2])}{', ...' if len(group.keys) > 2 else ''}"
        what = f"{adapted.site}: stored as {files} ({type(group.op).__name__})"
        raise KeyMapError(f"{what}, and a low-rank product cannot follow", (adapted.site,))
    names_of = [(*each.tensors, *([each.bias] if each.bias else [])) for each in target.adapters]
    parts = zip(*names_of, strict=True)
    endings = ((a, of_a), (b, of_b), ("lora_B.bias" if adapted.bias else "lora_magnitude_vector", group.op))
    for names, (ending, op) in zip(parts, endings, strict=False):
        yield KeyRule.of(names, [f"{PREFIX}{module}.{ending}" for module in target.modules], op)


def _parameter_rules(adapted: LowRank, path: str, stack: Stack) -> Iterator[KeyRule]:
    """Yield rules for the factors of stacked experts, which PEFT has as one pair of matrices."""
    names = reversed(adapted.tensors) if stack.in_first else adapted.tensors
    for name, ending, by_rows in zip(names, ("lora_A.weight", "lora_B.weight"), (True, False), strict=True):
        yield KeyRule.of(name, f"{path}.{ending}", StackedFactor(stack.experts, by_rows, stack.in_first))


def _parts_of_a(adapted: LowRank, num_keys: int) -> TensorOp:
    """Return how A is stored: cut if each part of a fused weight has its own, repeated if they share one."""
    if adapted.rows:
        return Split((adapted.rank,) * len(adapted.rows))
    return Repeat(num_keys) if num_keys > 1 else IDENTITY


def _first_of_equals(rule: KeyRule, repeats: list[tuple[str, str]]) -> KeyRule:
    """Return the rule to read, from the first of several equal file tensors; note the others in `repeats`."""
    if not isinstance(rule.op, Repeat):
        return rule
    repeats += [(key, rule.file[0]) for key in rule.file[1:]]
    return KeyRule.of(rule.native, rule.file[0])


def _keeps_rows(group: KeyGroup, rows: tuple[int, ...]) -> bool:
    """Return whether B can follow the operation: it reorders rows, or splits them where the adapter is split."""
    op = group.op
    if rows:
        return isinstance(op, Split) and op.rows == rows
    while isinstance(op, Chain):
        if not isinstance(op.then, _OF_ROWS):
            return False
        op = op.first
    return isinstance(op, _OF_ROWS)


def _is_renamed(group: KeyGroup, base: KeyMap) -> bool:
    """Return whether a model with transformers' own names has another name for the module than its folder."""
    return base.identity and isinstance(group.op, Identity) and group.fqns != group.keys


def _known(fqn: str, base: KeyMap) -> tuple[str, ...]:
    """Return the keys of the other tool's tensors that hold this one; empty if it has no such tensor."""
    try:
        return base.group_of_fqn(fqn).keys
    except KeyMapError:
        return ()


def json_number(value: float) -> float | int:
    """Return a whole number as an int, as vLLM requires."""
    return int(value) if float(value).is_integer() else value
