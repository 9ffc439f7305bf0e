"""Reading and writing PEFT adapter folders: adapter_model.safetensors and adapter_config.json.

Owns the meaning of such a folder to PEFT and vLLM, and every check of it: PEFT itself ignores keys that it does not
know, fills in a missing rank, and hardly warns when an adapter does nothing. Knows no model.
Source: peft, utils/save_and_load.py, tuners/lora/config.py; vLLM, vllm/lora/peft_helper.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from titan_ckpt.disk.workers import batches
from titan_ckpt.encoding.foreign_pattern import MAX_PATTERNS, ForeignPatterns, pattern_fault
from titan_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ExportError,
    LoadMismatchError,
    NotACheckpointError,
    listed,
)
from titan_ckpt.formats.huggingface.peft_fields import (
    OWN,
    Selection,
    is_trained_bias,
    saves,
    target_parameters_of,
    targets_parameter,
    targets_stacks,
    trained_rows,
    unsupported,
    wrong_types,
)
from titan_ckpt.formats.huggingface.reader import read_config, to_json
from titan_ckpt.formats.publish.plan import Infos
from titan_ckpt.formats.publish.run import Companions, FolderFormat
from titan_ckpt.formats.safetensors.container import SafetensorsFiles, read_header
from titan_ckpt.geometry.chunks import Block, Chunk, TensorInfo
from titan_ckpt.geometry.requests import Fill, TensorReader
from titan_ckpt.stores.store import Place
from titan_ckpt.weights import low_rank
from titan_ckpt.weights.identity import BASE_RECORD
from titan_ckpt.weights.lora import TrainedRows, scale
from titan_ckpt.weights.low_rank import AddedBias, LowRank, Operation, WeightUpdate
from titan_ckpt.weights.transforms import CASTABLE

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
RECORD = "titan_ckpt.json"
"""Holds what this package records of an adapter beyond PEFT's fields; PEFT warns of fields that it does not know."""
PREFIX = "base_model.model."
_PARTNERS = {
    ".lora_A.weight": ".lora_B.weight",
    ".lora_B.weight": ".lora_A.weight",
    ".lora_embedding_A": ".lora_embedding_B",
    ".lora_embedding_B": ".lora_embedding_A",
}
PAIRS = {a: b for a, b in _PARTNERS.items() if a.endswith(("_A.weight", "_A"))}
"""End of the name of an A matrix -> end of the name of its B matrix."""
MAGNITUDE = ".lora_magnitude_vector"
LORA_BIAS = ".lora_B.bias"
ROWS = ".token_adapter.trainable_tokens_delta"
BASE_LAYER = ".base_layer."
"""In the name of a base's tensor whose module has an adapter."""
BASE_OF_ROWS = ".token_adapter.base_layer."
"""In the name of a table that has trained rows."""
_INNER = re.compile(r"\.(?:modules_to_save|original_module)(?=\.[^.]+$)")
"""Between a module that was trained in full and a parameter: the same tensor once more, and what it was before."""
_DEFAULTS: Mapping[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "lora_dropout": 0.0,
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "base_model_name_or_path": None,
    "revision": None,
}
_ENDINGS = (*_PARTNERS, MAGNITUDE, LORA_BIAS, ROWS)
_NUMBERS = {"rank_pattern": "positive number", "alpha_pattern": "number"}
_AGAIN = "Save the adapter again, or take another"
_BATCH_BYTES = 32 << 20
_BATCH_TENSORS = 256
"""Tensors that are read at once, because a bucket gives neighbours by one request."""


class PeftReader(TensorReader):
    """A LoRA adapter folder. Names are the file's own; nothing is stripped."""

    format = "peft"
    path: Place

    def __init__(self, path: Place) -> None:
        """Check config and names; read no tensor, but the pairs of tables that are to be tied.

        An adapter with settings that cannot be honoured opens, to be looked at; `require_supported` refuses it.
        Raises: CheckpointNotFoundError; NotACheckpointError without safetensors or if it is no LoRA adapter;
        CorruptCheckpointError listing names and shapes that PEFT would ignore or misread.
        """
        self.path = path
        if not path.is_dir():
            raise CheckpointNotFoundError(f"{path} is not there; name a PEFT adapter folder")
        self._config = _read_adapter_config(path)
        if not (path / WEIGHTS).exists():
            hint = "; adapter_model.bin is a pickle: save it again as safetensors" if list(path.glob("*.bin")) else ""
            raise NotACheckpointError(f"{path}: no {WEIGHTS} beside {CONFIG}{hint}")
        self._files = SafetensorsFiles([read_header(path / WEIGHTS)])
        self._tensors = {key: entry.info for key, entry in self._files.entries.items()}
        inner = {key for key in self._tensors if _INNER.search(key) and _INNER.sub("", key) in self._tensors}
        self._tensors = {key: info for key, info in self._tensors.items() if key not in inner}
        self._unsupported = unsupported(self._config)  # such adapters may have tensors of other names
        self._tensors = {key: info for key, info in self._tensors.items() if key != self._rows_again()}
        if faults := [] if self._unsupported else check_adapter(self._tensors, self._config):
            raise CorruptCheckpointError(f"{path / WEIGHTS}: {listed(faults)}. {_AGAIN}", str(path / WEIGHTS))
        if self._config.get("ensure_weight_tying") and not (self._unsupported or self.repeated):
            self._config = {**self._config, "ensure_weight_tying": False}  # PEFT has found no module to tie

    def _rows_again(self) -> str:
        """Return the tensor that is the trained rows of the embeddings once more, for a module that is tied to them."""
        rows = sorted((key for key in self._tensors if key.endswith(ROWS)), key=lambda key: key.count("."))
        indices = self._config.get("trainable_token_indices")
        if self._unsupported or len(rows) != 2 or not self.are_equal(*rows):
            return ""
        unnamed = [key for key in rows if not trained_rows(self._config, key.removesuffix(ROWS).removeprefix(PREFIX))]
        return rows[0] if isinstance(indices, list) else next(iter(unnamed), "")

    def leave_out(self, repeats: Sequence[tuple[str, str]]) -> None:
        """List no tensor that repeats a second one, as the A of parts that are one weight in this run's model.

        Raises: LoadMismatchError listing those that differ.
        """
        both = [(key, other) for key, other in repeats if {key, other} <= self._tensors.keys()]
        if differing := [f"{key} and {other}" for key, other in both if not self.are_equal(key, other)]:
            raise LoadMismatchError(
                f"{self.path}: the model has one A for weights that it fuses, and these differ: {listed(differing)}. "
                "Train it with separate weights, or merge the adapter into the base"
            )
        self._tensors = {key: info for key, info in self._tensors.items() if key not in dict(both)}

    def pass_by(self, keys: Container[str] = (), known: Container[str] = ()) -> None:
        """List none of these keys, nor one of `repeated` that is not known."""
        left_out = {key for key in self._tensors if key in keys or (key in self.repeated and key not in known)}
        self._tensors = {key: info for key, info in self._tensors.items() if key not in left_out}

    @cached_property
    def repeated(self) -> frozenset[str]:
        """The tensors that are those of the embeddings once more, because PEFT has tied their module to these."""
        if not self._config.get("ensure_weight_tying"):
            return frozenset()
        partners = {".lora_A.weight": ".lora_embedding_B", ".lora_B.weight": ".lora_embedding_A"}
        tables = {other: [k for k in self.tensors if k.endswith(other)] for other in partners.values()}
        saved = [key for key in self.copies() if saves(self._config, key)]
        found = {
            key
            for key in self.tensors
            for end, other in partners.items()
            if key.endswith(end) and any(torch.equal(self.whole(key), self.whole(k).t()) for k in tables[other])
        }
        others = [key for key in self.copies() if key not in saved and BASE_LAYER not in key]
        return frozenset(found | {key for key in others if any(self.are_equal(key, k) for k in saved)})

    def are_equal(self, key: str, other: str) -> bool:
        """Return whether the folder has both tensors, with the same values."""
        if not {key, other} <= self._tensors.keys():
            return False
        return self._tensors[key] == self._tensors[other] and torch.equal(self.whole(key), self.whole(other))

    def plan(self, requests: Sequence[Block]) -> Fill:
        """Open the files of all requests; return the function that fills them.

        Raises: CorruptCheckpointError; OSError; as `require_supported`. The function raises CorruptCheckpointError for
        values that are not finite.
        """
        self.require_supported()

        def check() -> None:
            bad = {r.key for r in requests if r.data.dtype in CASTABLE and not bool(torch.isfinite(r.data).all())}
            if bad:
                file = self.path / WEIGHTS
                raise CorruptCheckpointError(f"{file}: not finite: {listed(sorted(bad))}. {_AGAIN}", str(self.path))

        return replace(self._files.plan(requests), check=check)

    def updates(self) -> list[WeightUpdate]:
        """Return the updates of the base's weights, by their names in its own files."""
        numbers, updates = ModuleNumbers(self._config), list[WeightUpdate](self.pairs())
        for key in self.tensors:
            path = key.removeprefix(PREFIX)
            if key.endswith(LORA_BIAS):
                module = path.removesuffix(LORA_BIAS)
                updates.append(AddedBias(f"{module}.bias", key, numbers.scaling(module)))
            elif key.endswith(ROWS):
                module = path.removesuffix(ROWS)
                updates.append(TrainedRows(f"{module}.weight", key, trained_rows(self._config, module)))
        return updates

    def pairs(self) -> list[LowRank]:
        """Return the updates by pairs of A and B. Embeddings alone are known by their names."""
        numbers, use_dora = ModuleNumbers(self._config), bool(self._config.get("use_dora"))
        found = []
        for key, suffix in ((key, suffix) for key in self.tensors for suffix in PAIRS if key.endswith(suffix)):
            path = key.removesuffix(suffix)
            module = path.removeprefix(PREFIX)
            rank, alpha, scaling = numbers.rank(module), numbers.alpha(module), numbers.scaling(module)
            operation: Operation = "embedding" if suffix == ".lora_embedding_A" else "linear"
            magnitude = path + MAGNITUDE if use_dora else None
            b = path + PAIRS[suffix]
            found.append(LowRank(f"{module}.weight", key, b, rank, alpha, scaling, operation, magnitude))
        return found

    def copies(self) -> dict[str, str]:
        """Return key -> the name in the base's own files, of each tensor of the modules that were trained in full."""
        names = {key: key.removeprefix(PREFIX) for key in self.tensors if not key.endswith(_ENDINGS)}
        return {key: name.replace(BASE_OF_ROWS, ".").replace(BASE_LAYER, ".") for key, name in names.items()}

    def beside(self) -> dict[str, str]:
        """Return those of `copies` that PEFT has saved of the base as they were, such as tables, by no setting."""
        return {
            key: name
            for key, name in self.copies().items()
            if not (saves(self._config, key) or is_trained_bias(self._config, key) or key in self.repeated)
        }

    def on_parameter(self, update: LowRank, modules: Mapping[str, nn.Module]) -> LowRank:
        """Return a pair that PEFT has put on a parameter by `target_parameters` as the update of that parameter.

        PEFT nests several of a module in the order that they have there, the first one innermost.
        `modules`: transformers' names and modules. Raises: LoadMismatchError for a model that has no such module.
        """
        site, nested = update.site.replace(".base_layer", ""), update.site.count(".base_layer")
        names = target_parameters_of(self._config, site, [n for n, _ in _parameters(modules.get(site))])
        if len(names) <= nested:
            raise LoadMismatchError(
                f"{self.path}: target_parameters has adapters on parameters of {site}, and this run's model has no "
                "such module: build it by transformers (architecture hf), whose names these are"
            )
        name = names[len(names) - 1 - nested]
        numbers, weight = ModuleNumbers(self._config), f"{site}.{name}"
        rank, alpha, scaling = numbers.rank(weight), numbers.alpha(weight), numbers.scaling(weight)
        stack = low_rank.stack_of(modules[site], name)
        if (found := self.tensors[update.a].shape[0]) != rank * stack.experts:
            raise LoadMismatchError(
                f"{self.path}: {update.a}: expected {rank * stack.experts} rows, rank {rank} for each of "
                f"{stack.experts} experts of {weight}, found {found}"
            )
        return replace(update, weight=weight, rank=rank, alpha=alpha, scaling=scaling, operation="stack", stack=stack)

    def is_on_parameter(self, update: LowRank) -> bool:
        """Return whether a pair is one that `on_parameter` reads."""
        return not targets_parameter(self._config, update.site) and targets_stacks(self._config, update.site)

    def keeps_tied(self, key: str, *, is_alias: bool) -> bool:
        """Return whether PEFT lets a tensor act on all modules that share the weight that it changes.

        `is_alias`: its module is not the one that the others are tied to, as the embeddings are.
        """
        if key.endswith(ROWS):  # PEFT ties them to those of the embeddings
            return not is_alias and sum(name.endswith(ROWS) for name in self.tensors) == 1
        if self._config.get("use_dora") and key.endswith(tuple(PAIRS)):  # each module has lengths of its own
            return False
        return bool(self._config.get("ensure_weight_tying"))

    def require_supported(self) -> None:
        """Check that every setting can be honoured. Raises: NotACheckpointError listing those that cannot."""
        if self._unsupported:
            raise NotACheckpointError(
                f"{self.path / CONFIG}: {len(self._unsupported)} setting(s) cannot be honoured; nothing was loaded\n  "
                + listed(self._unsupported, "\n  ")
            )

    def metadata(self) -> dict[str, Any]:
        """Return adapter_config.json, merged with this package's record if there is one."""
        return self._config

    def close(self) -> None:
        self._files.close()


@dataclass(frozen=True, slots=True)
class PeftFormat(FolderFormat):
    """The format of an adapter folder that PEFT and vLLM open. An adapter that changes nothing is refused."""

    last = CONFIG
    config: Mapping[str, Any]
    """adapter_config.json; r, lora_alpha and target_modules are required, the others have PEFT's defaults. Fields named
    `titan_ckpt_*` go to titan_ckpt.json."""

    def pack(self, infos: Infos) -> Mapping[str, Sequence[str]]:
        return {WEIGHTS: sorted(infos)}

    def companions(self, infos: Infos, file_of: Mapping[str, str], quantized: Mapping[str, str]) -> Companions:
        own = {name: value for name, value in self.config.items() if name.startswith(OWN)}
        if faults := self.faults(infos):
            raise ExportError(listed(faults))
        return {CONFIG: to_json(self._public()), **({RECORD: to_json(own)} if own else {})}

    def faults(self, infos: Mapping[str, TensorInfo]) -> list[str]:
        """Return one line for each setting or tensor that PEFT would not read as intended."""
        public = self._public()
        return list(_config_faults(public)) or check_adapter(infos, public)

    def _public(self) -> dict[str, Any]:
        return {**_DEFAULTS, **{name: value for name, value in self.config.items() if not name.startswith(OWN)}}

    def open(self, folder: Place, *, dequantize: bool) -> PeftReader:
        return PeftReader(folder)

    def check(self, reader: TensorReader) -> None:
        assert isinstance(reader, PeftReader), "`open` returns one"
        _check_values(reader)


def check_adapter(infos: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[str]:
    """Return one line for each tensor that PEFT would ignore, or that contradicts its partner or the config."""
    try:
        return list(_adapter_faults(infos, config, ModuleNumbers(config)))
    except ValueError as error:  # an expression takes too long
        return [f"{' and '.join(name for name in _NUMBERS if config.get(name))}: {error}"]


def _adapter_faults(
    infos: Mapping[str, TensorInfo], config: Mapping[str, Any], numbers: ModuleNumbers
) -> Iterator[str]:
    ranks: dict[tuple[int, str], list[str]] = {}
    for key, info in infos.items():
        if not key.startswith(PREFIX):
            yield f"{key} does not start with {PREFIX}: PEFT would ignore it, and the adapter would do nothing"
            continue
        suffix = next((suffix for suffix in _ENDINGS if key.endswith(suffix)), None)
        if suffix is None:
            if not (saves(config, key) or is_trained_bias(config, key) or _is_table(key, info, infos)):
                yield f"{key} is no LoRA tensor, nor of a module that modules_to_save names, nor a table of the base"
            continue
        module = key.removesuffix(suffix)
        if suffix == ROWS:
            if not trained_rows(config, module.removeprefix(PREFIX)):
                yield f"{key} has rows of a table, and trainable_token_indices does not say which"
            continue
        if suffix == LORA_BIAS:
            if not config.get("lora_bias"):
                yield f"{key} is a bias of B, and the config does not say lora_bias"
            continue
        if suffix == MAGNITUDE:
            if not config.get("use_dora"):
                yield f"{key} is a DoRA magnitude, and the config does not say use_dora"
            continue
        if (partner := module + _PARTNERS[suffix]) not in infos:
            yield f"{key} has no partner {partner}"
        rank = numbers.rank(module.removeprefix(PREFIX))
        numbers.scaling(module.removeprefix(PREFIX))  # so that one that takes too long is refused here
        dim = 0 if suffix.endswith(("_A", "_A.weight")) else 1
        if targets_stacks(config, module.removeprefix(PREFIX)):
            other = infos.get(module + _PARTNERS[suffix])
            if len(info.shape) != 2 or (other and other.shape[1 - dim : 2 - dim] != info.shape[dim : dim + 1]):
                yield f"{key}: {list(info.shape)} does not fit its partner, and stacked experts have one pair"
        elif len(info.shape) < 2 or info.shape[dim] != rank:
            found = str(info.shape[dim]) if len(info.shape) > 1 else f"{len(info.shape)} dims"
            ranks.setdefault((rank, found), []).append(key)
        if config.get("use_dora") and module + MAGNITUDE not in infos and ".lora_embedding_" not in key:
            yield f"{key} has no {module + MAGNITUDE}, and the config says use_dora"
    for (rank, found), keys in ranks.items():
        what = f"expected {rank} in dim 0 of A and in dim 1 of B, the rank that the config gives, found {found}"
        yield f"{len(keys)} tensor(s): {what}: {listed(keys, ', ', ' ')}"


def _parameters(module: nn.Module | None) -> Iterator[tuple[str, nn.Parameter]]:
    return iter(()) if module is None else module.named_parameters(recurse=False)


def _is_table(key: str, info: TensorInfo, infos: Mapping[str, TensorInfo]) -> bool:
    """Return whether this may be a table that PEFT saves as the base has it: of a module with a pair or without one."""
    module, _, parameter = key.rpartition(".")
    if ".lora_" in key or parameter not in ("weight", "bias") or len(info.shape) != (2 if parameter == "weight" else 1):
        return False
    inner = module.removesuffix(BASE_LAYER.rstrip("."))
    if BASE_OF_ROWS in key:
        return any(other.endswith(ROWS) for other in infos)
    has_pair = any(inner + suffix in infos for suffix in PAIRS)
    return has_pair if inner != module else parameter == "weight" and not has_pair


def unselected(reader: PeftReader) -> list[str]:
    """Return the names of tensors that PEFT would ignore, because the config does not select their module.

    Raises: NotACheckpointError for settings that cannot be honoured; CorruptCheckpointError for regular expressions
    that take too long.
    """
    reader.require_supported()
    suffixes, selection = (*_PARTNERS, MAGNITUDE), Selection(reader.metadata())
    modules = {key: key.removesuffix(s) for key in reader.tensors for s in suffixes if key.endswith(s)}
    try:
        others = [key for key, module in modules.items() if not selection.holds(module.removeprefix(PREFIX))]
        return [key for key in others if key not in reader.repeated]
    except ValueError as error:
        raise CorruptCheckpointError(f"{reader.path}: target_modules: {error}. {_AGAIN}", str(reader.path)) from None


class ModuleNumbers:
    """The rank and the scale of each module by an adapter_config.json, as PEFT looks them up.

    Each method raises ValueError for regular expressions that take too long; for names that `check_adapter` has looked
    up, they do not.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._ranks = ForeignPatterns(config.get("rank_pattern") or {})
        self._alphas = ForeignPatterns(config.get("alpha_pattern") or {})

    def rank(self, module: str) -> int:
        """Return the module's rank: by pattern, else `r`, else PEFT's default."""
        rank = self._ranks.first(module)
        return int(self._config.get("r", 8) if rank is None else rank)

    def alpha(self, module: str) -> float:
        """Return the module's alpha: by pattern, else `lora_alpha`, else PEFT's default."""
        alpha = self._alphas.first(module)
        return float(self._config.get("lora_alpha", 8) if alpha is None else alpha)

    def scaling(self, module: str) -> float:
        """Return the factor of the module's product B @ A."""
        return scale(self.rank(module), self.alpha(module), use_rslora=bool(self._config.get("use_rslora")))


def _read_adapter_config(path: Place) -> dict[str, Any]:
    file = path / CONFIG
    if not file.exists():
        raise NotACheckpointError(f"{path}: no {CONFIG}, so nothing says the adapter's kind and scale")
    config = read_config(file)
    if config.get("peft_type") != "LORA":
        raise NotACheckpointError(f"{file}: peft_type is {config.get('peft_type')!r}; only LORA adapters can be read")
    if faults := [*_pattern_faults(config), *wrong_types(config)]:
        raise CorruptCheckpointError(f"{file}: {listed(faults)}. {_AGAIN}", str(file))
    own = read_config(path / RECORD)
    if faults := [f"{name} is {value!r:.80}" for name, value in own.items() if not _is_record(name, value)]:
        raise CorruptCheckpointError(
            f"{path / RECORD}: {listed(faults)}, expected what an export writes. Without the file the adapter opens, "
            "with less known of it",
            str(path / RECORD),
        )
    return config | own


def _is_record(name: str, value: object) -> bool:
    """Return whether this is the identity of a base, or under any other name a map from modules to ranks of parts."""
    if not isinstance(value, dict):
        return False
    if name != BASE_RECORD:
        return all(isinstance(v, list) and all(type(rank) is int for rank in v) for v in value.values())
    merged = value.get("merged", [])
    if not isinstance(value.get("digest"), str) or not isinstance(merged, list):
        return False
    texts = [text for name, text in value.items() if name != "merged" and text is not None] + merged
    return all(isinstance(text, str) for text in texts)


def _config_faults(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each setting that PEFT or vLLM would not read as intended."""
    if config["peft_type"] != "LORA":
        yield f"peft_type is {config['peft_type']!r}, expected 'LORA'"
    for name in ("r", "lora_alpha"):
        if name not in config:
            yield f"{name} is left out, and PEFT would take 8"
    if not config.get("target_modules") and not config.get("target_parameters"):
        yield "target_modules is empty: PEFT would adapt nothing"
    yield from _pattern_faults(config)


def _pattern_faults(config: Mapping[str, Any]) -> Iterator[str]:
    for name in _NUMBERS:
        patterns = config.get(name) or {}
        if not isinstance(patterns, dict):
            yield f"{name} is {patterns!r:.80}, expected a map from module names to numbers"
            continue
        if len(patterns) > MAX_PATTERNS:
            yield f"{name} has {len(patterns)} regular expressions, at most {MAX_PATTERNS} are compared with names"
            continue
        for pattern, value in patterns.items():
            if cause := pattern_fault(pattern):
                yield f"{name} has {pattern!r:.80}, which is no regular expression that can be used: {cause}"
            if type(value) not in (int, float) or not math.isfinite(value) or (name == "rank_pattern" and value < 1):
                yield f"{name} has {value!r:.80} for {pattern!r}, expected a {_NUMBERS[name]}"
    if "r" in config and not (type(config["r"]) is int and config["r"] > 0):
        yield f"r is {config['r']!r:.80}, expected a positive integer"
    alpha = config.get("lora_alpha", 8)
    if type(alpha) not in (int, float) or not math.isfinite(alpha):
        yield f"lora_alpha is {alpha!r:.80}, expected a number"


def _check_values(reader: PeftReader) -> None:
    """Read the written adapter once more, some tensors at a time, and refuse one that would change nothing.

    A pair adds B @ A, so it does nothing where either is all zero; DoRA magnitudes scale by themselves.
    Raises: CorruptCheckpointError for values that are not finite; ExportError.
    """
    zero: set[str] = set()
    for tensors in batches(reader.tensors.items(), lambda item: item[1].nbytes, _BATCH_BYTES, _BATCH_TENSORS):
        parts = [Block(Chunk.whole(i.shape), torch.empty(i.shape, dtype=i.dtype), k) for k, i in tensors]
        reader.read(parts)
        zero |= {part.key for part in parts if not bool(part.data.any())}
    updates = reader.pairs()
    others = any(not key.endswith(tuple(_PARTNERS)) for key in reader.tensors)
    if not others and all(update.a in zero or update.b in zero for update in updates):
        raise ExportError(
            f"the adapter changes nothing: of all {len(updates)} modules lora_A or lora_B is zero. Was it trained?"
        )
