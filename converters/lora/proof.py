"""Proof that an adapted module computes what its merged weight computes: once for each class, on a small random copy.

Owns the copies, the comparison, and how an embedding scales. Never runs a live module and moves none of its memory;
every generator is restored. Modules that compute with the merged weight itself (stacks of experts, fake-quantized
linears) need no proof.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import nn

from titan_ckpt.converters.lora.config import LoRAConfig
from titan_ckpt.converters.lora.copies import without_hooks
from titan_ckpt.converters.lora.layers import attach
from titan_ckpt.converters.lora.sites import Site
from titan_ckpt.converters.qat.converter import quantized_forward
from titan_ckpt.errors import listed
from titan_ckpt.geometry.chunks import blocks_of
from titan_ckpt.process import RandomState, generators_kept
from titan_ckpt.weights.lora import LoRARecord
from titan_ckpt.weights.low_rank import LowRank, merged

_MAX_ELEMENTS = 2 << 20
"""Most elements of the copied weight: 8 MiB in float32, of which a proof holds less than eight at a time."""
_SCALE = "embed_scale"
"""Attribute by which an embedding multiplies what it looks up, in transformers and in PEFT."""
_SIZES = {
    "linear": ("out_features", "in_features"),
    "embedding": ("num_embeddings", "embedding_dim"),
    "conv1d": ("nx", "nf"),
}
"""Form -> the attributes that hold the sizes of the weight's dims."""
_OF_TORCH = frozenset(vars(nn.Module()))
_MAX_COMPARED = 1 << 12
_MAGNITUDES = (1.0, 2.0**20)
"""Sizes of the inputs of linear modules: large ones show limits that ordinary ones do not reach."""
_TOLERANCE = 1e-3
_FLOAT8_TOLERANCE = 0.3
"""A float8 product rounds each factor to 3 or 4 significant bits, and the adapter's own path does not."""
_MOST_SHOWN = 10
_TOO_LARGE = "it holds more than a copy of 64 MiB can"
_SEED = 0


@dataclass(frozen=True, slots=True)
class Proof:
    """The result for all sites of a model."""

    scaled_by: dict[str, str]
    """fqn of an embedding -> the attribute by which its forward multiplies, which its adapter does too."""
    problems: list[str]
    """One line for each class whose adapted forward is not that of its merged weight, with the modules' names."""


def prove(sites: Sequence[Site], config: LoRAConfig) -> Proof:
    """Compare, for each class and settings among the sites, the adapted forward with that of the merged weight."""
    groups: dict[Any, list[Site]] = {}
    for site in sites:
        if site.update.operation != "stack" and quantized_forward(site.module) is None:
            groups.setdefault(_kind(site), []).append(site)
    proof = Proof({}, [])
    with generators_kept():
        for group in groups.values():
            smallest = min(group, key=lambda site: site.weight.numel())
            scaled_by, reason = _compare(smallest, config)
            if reason:
                names = listed([site.fqn for site in group], ", ", " ", most=3)
                proof.problems.append(f"{names}: {reason}. Leave such modules out of target_modules")
            proof.scaled_by.update({site.fqn: scaled_by for site in group if scaled_by})
    return proof


def _kind(site: Site) -> tuple[Any, ...]:
    """Return what a module's computation depends on: its class and, unless it is torch's own, all that it holds.

    Parameters do not count, because the copies have random ones; sizes do not matter to torch's own classes.
    """
    kind = type(site.module)
    return (
        (kind,) if kind in (nn.Linear, nn.Embedding) else (kind, *_content(site.module, _SIZES[site.update.operation]))
    )


def _content(module: nn.Module, without: Collection[str]) -> Iterator[Any]:
    """Yield the attributes, buffers and children of a module as values that can be compared."""
    own = {name: value for name, value in vars(module).items() if name not in _OF_TORCH and name not in without}
    for name, value in sorted((own | module._buffers).items()):  # noqa: SLF001
        yield name, _comparable(value)
    for name, child in module.named_children():
        yield name, type(child), *_content(child, ())


def _comparable(value: Any) -> Any:
    """Return a value that is equal for equal content; the identity of an object whose content is not known."""
    if isinstance(value, torch.Tensor) and (value.is_meta or value.numel() <= _MAX_COMPARED):
        known = None if value.is_meta else value.double() if value.is_floating_point() else value
        return value.dtype, value.shape, None if known is None else str(known.tolist())
    if isinstance(value, tuple | list):
        return (*map(_comparable, value),)
    if isinstance(value, dict):
        return tuple((str(key), _comparable(item)) for key, item in value.items())
    return str(value) if isinstance(value, str | int | float | torch.dtype | None) else id(value)


def _compare(site: Site, config: LoRAConfig) -> tuple[str, str]:
    """Return the attribute by which the adapter must scale, and why no adapter is right; empty if there is none."""
    scales = ["", _SCALE] if site.update.operation == "embedding" and hasattr(site.module, _SCALE) else [""]
    name, differences = type(site.module).__name__, []
    for scaled_by in reversed(scales):  # a scale that happens to be 1 is still followed
        rank = min(config.rank, 4, *site.weight.shape)
        update = LoRARecord(rank, rank / 2, False, config.use_dora, {}, {}).low_rank("m", site.update.operation)
        try:
            differences.append(_difference(site, update, scaled_by))
        except Exception as error:
            cause = (str(error).splitlines() or [type(error).__name__])[0]
            return "", f"no adapter can be proved right on {name} ({cause:.160})"
        if differences[-1] <= (_FLOAT8_TOLERANCE if name == "Float8Linear" else _TOLERANCE):
            return scaled_by, ""
    percent = f"{min(differences):.0%}" if min(differences) < _MOST_SHOWN else "everything"
    return "", f"{name} does more than multiply by its weight: an adapter is off by {percent} from its merged weight"


@torch.no_grad()
def _difference(site: Site, update: LowRank, scaled_by: str) -> float:
    """Return the largest distance of the adapted from the merged forward, relative to the adapter's effect."""
    random_state = RandomState()
    before, distances = random_state.state_dict(), []
    with torch.device("cpu"), torch.autocast("cpu", enabled=False):
        base, ours, exported = (_twin(site) for _ in range(3))
        generator = torch.Generator("cpu").manual_seed(_SEED + 1)
        attach(ours, update, torch.float32, scaled_by=scaled_by)
        for name, part in ours.named_children():
            if name.startswith("lora_"):
                values = torch.randn(part.weight.shape, generator=generator).abs_().add_(0.1)
                part._parameters["weight"] = nn.Parameter(values)  # noqa: SLF001 - accelerate patches the public way
        exported._parameters["weight"] = nn.Parameter(_merged(update, ours))  # noqa: SLF001
        given = _input(site, ours, generator)
        magnitudes = _MAGNITUDES if given.is_floating_point() else (1,)
        for magnitude, training in product(magnitudes, (True, False)):
            outputs = []
            for module in (base, ours, exported):
                random_state.load_state_dict(before)
                outputs.append(module.train(training)(given * magnitude))
                if not isinstance(outputs[-1], torch.Tensor):
                    raise TypeError(f"it returns a {type(outputs[-1]).__name__}")
            plain, got, wanted = outputs
            if got.shape != wanted.shape:
                raise ValueError(f"it returns {list(wanted.shape)}, and with an adapter {list(got.shape)}")
            if magnitude > 1 and not (wanted.isfinite().all() and plain.isfinite().all()):
                continue  # the module itself cannot take such inputs
            effect = (wanted - plain).norm()
            distances.append(float((got - wanted).norm() / effect) if effect else math.inf)
    return max(distances, key=lambda d: math.inf if math.isnan(d) else d)


def _merged(update: LowRank, adapted: nn.Module) -> torch.Tensor:
    """Return the weight that an export would write."""
    tensors = {f"m.{name}": parameter for name, parameter in adapted.named_parameters()}
    (block,) = blocks_of(merged(update, tensors))
    return block.data


def _input(site: Site, module: nn.Module, generator: torch.Generator) -> torch.Tensor:
    shape = module.get_parameter("weight").shape
    if site.update.operation == "embedding":
        return torch.randint(0, shape[0], (2, 3), generator=generator)
    return torch.randn(2, 3, shape[1 if site.update.operation == "linear" else 0], generator=generator)


def _twin(site: Site) -> Any:
    """Return a copy of the site's module on the CPU with random float32 parameters, cut to fewer rows if it is large.

    Raises: ValueError if it is too large all the same.
    """
    generator = torch.Generator("cpu").manual_seed(_SEED)
    twin: Any = _copied(site.module, generator)
    dim = 1 if site.update.operation == "conv1d" else 0
    rows, total = site.weight.shape[dim], site.weight.numel()
    size = min(rows, max(1, _MAX_ELEMENTS * rows // total))
    for name, parameter in site.module.named_parameters(recurse=False):
        shape, cut = list(parameter.shape), dim if name == "weight" else 0
        if shape and shape[cut] == rows:
            shape[cut] = size
        twin._parameters[name] = nn.Parameter(_random(shape, generator), requires_grad=False)  # noqa: SLF001
    setattr(twin, _SIZES[site.update.operation][dim], size)
    if site.update.operation == "embedding" and twin.padding_idx is not None:
        twin.padding_idx = min(twin.padding_idx, size - 1)
    if hasattr(twin, "linear_mm_config"):  # torchao's Float8Linear: the same rounding on any machine
        mm = twin.linear_mm_config
        twin.linear_mm_config = type(mm)(*(part._replace(emulate=True) for part in mm))
        twin.config = replace(twin.config, emulate=True)
    return twin


def _copied(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """Return a module with the same attributes and no hooks and no own parameters; buffers keep their values."""
    twin = without_hooks(module)
    state = vars(twin)
    state.update({name: _value(value, generator) for name, value in state.items() if isinstance(value, torch.Tensor)})
    for name, buffer in module._buffers.items():  # noqa: SLF001 - torch registers no copies
        state["_buffers"][name] = None if buffer is None else _value(buffer, generator)
    for name, child in module.named_children():
        state["_modules"][name] = inner = _copied(child, generator)
        for parameter_name, parameter in child.named_parameters(recurse=False):
            inner._parameters[parameter_name] = nn.Parameter(_random(parameter.shape, generator))  # noqa: SLF001
    return twin


def _value(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a copy of a buffer on the CPU; positive random numbers for one that has no values yet."""
    if tensor.is_meta:
        return _random(tensor.shape, generator).abs_().add_(0.5).to(tensor.dtype)
    if tensor.numel() > _MAX_ELEMENTS:
        raise ValueError(_TOO_LARGE)
    return tensor.detach().to("cpu", copy=True)


def _random(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    if math.prod(shape) > _MAX_ELEMENTS:
        raise ValueError(_TOO_LARGE)
    return torch.randn(list(shape), generator=generator)
