"""Find the key table between the parameters of a transformers model and the tensors of its folder.

transformers 5 holds some weights in a different form than its folders do (stacked experts, fused gate and up, renamed
modules), and converts them with code that runs over a state dict. This module runs that code, which save_pretrained
uses, over small tensors of distinct numbers, and derives the table from where each number went.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from titan_ckpt.errors import KeyMapError, listed
from titan_ckpt.geometry.chunks import Chunk, Shape
from titan_ckpt.geometry.keymap import IDENTITY, Chain, Concat, KeyMap, KeyRule, Split, TensorOp, Transpose, Unstack
from titan_ckpt.models.hf_folder import FolderNames, HuggingFaceKeyMap, generalised
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
    names = FolderNames.of(model, tied) if hasattr(model, "base_model_prefix") else None
    return HuggingFaceKeyMap(
        tuple(generalised(rules)),
        identity=True,
        verified=True,
        exact=tuple(rules),
        names=names,
        float32={dtype: _kept_in_float32(model, shapes, dtype) for dtype in (torch.float16, torch.bfloat16)},
    )


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
    """Return small tensors in which every number occurs once. A first dim that may count experts keeps its size."""
    start, made = 0, {}
    for fqn, shape in shapes.items():
        whole = shape[:1] if len(shape) > 2 else ()
        small = torch.Size([*whole, *(min(n, _PROBE_SIZE) for n in shape[len(whole) :])])
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
    left = sum(value.numel() for value in wanted)
    for index, native in enumerate(natives):
        for piece in op.pieces(index, shapes, Chunk.whole(native.shape), native):
            value = wanted[piece.file_index]
            region = value[piece.chunk.within(Chunk.whole(value.shape))]
            if not torch.equal(piece.view.reshape(region.shape), region):
                return False
            left -= region.numel()
    return left == 0
