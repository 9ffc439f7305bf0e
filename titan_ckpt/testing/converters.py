"""The laws of model converters as a test class. Inherit it to test a converter.

Owns the promises of every converter to checkpoints, in one process and on FSDP2 shards. Knows no particular converter.
"""

from __future__ import annotations

import copy
import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from titan_ckpt.geometry.chunks import (
    Chunk,
    LazyTensor,
    TensorInfo,
    blocks_of,
    can_freeze,
    frozen,
    info_of,
    local_tensor,
)
from titan_ckpt.geometry.keymap import KeyMap
from titan_ckpt.models.llama3 import Llama3, Llama3Config
from titan_ckpt.testing.ranks import distributed
from titan_ckpt.types import ModelConverter, StateDict
from titan_ckpt.weights.names import clean_fqn
from titan_ckpt.weights.wrapper import ModelWrapper

_TINY = Llama3Config(
    dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, ffn_dim=128, vocab_size=96, max_seq_len=32
)


class LookalikeLlama(Llama3):
    """A Llama whose own parameters include names like those of an adapter."""

    def __init__(self, config: Llama3Config) -> None:
        super().__init__(config)
        self.lora_a = nn.Linear(config.vocab_size, config.vocab_size, bias=False)
        self.lora_magnitude = nn.Parameter(torch.ones(config.vocab_size))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Shape: (batch, seq) token ids in, (batch, seq, vocab) logits out."""
        out: torch.Tensor = self.lora_a(super().forward(tokens)) * self.lora_magnitude
        return out

    def init_weights(self) -> None:
        """Fill every parameter in place."""
        super().init_weights()
        nn.init.normal_(self.lora_a.weight, std=0.1)
        nn.init.ones_(self.lora_magnitude)


@dataclass(frozen=True, slots=True)
class _Specimen:
    """A converted model, sharded if there are ranks. Unless `fill` is False, its added tensors have an effect."""

    model: nn.Module
    converter: ModelConverter
    base: dict[str, TensorInfo]
    """Shapes and dtypes in the model's state dict before the conversion."""

    def state_dict(self, last_step: bool = False) -> StateDict:
        return ModelWrapper([self.model], self.converter).state_dict("full", last_step=last_step)

    @property
    def raw(self) -> StateDict:
        """Return the model's state dict without the converter's transform, as a converter is given it."""
        return {clean_fqn(name): value for name, value in self.model.state_dict().items()}


def _law(test: Callable[[Any], None]) -> Callable[[Any], None]:
    """Add to an error of a law's test which law it is, and of which converters."""

    @functools.wraps(test)
    def told(self: ConverterTests) -> None:
        try:
            test(self)
        except Exception as error:
            kinds = [converter["kind"] for converter in self.make_converter().describe()]
            error.add_note(f"law of {', '.join(map(str, kinds))}: {test.__doc__} ({test.__name__})")
            raise

    return told


class ConverterTests(ABC):
    """Tests of every law. Inherit from it, name the subclass Test..., and define `make_converter`.

    The sharded laws run in two processes, so the subclass must be importable by name from the project's root.
    `make_model`, `make_input`, `key_map` and `shard` may be overridden.
    """

    _kept: list[_Specimen] | None = None
    """The specimen of laws that only read, while several of them are checked."""

    @abstractmethod
    def make_converter(self) -> ModelConverter:
        """Return a new converter, or a container of several."""

    def make_model(self) -> nn.Module:
        """Return a new model on the default device; it must have a method `init_weights()`."""
        return LookalikeLlama(_TINY)

    def make_input(self) -> torch.Tensor:
        """Return an input for the model."""
        return torch.arange(24).reshape(2, 12) % _TINY.vocab_size

    def shard(self, model: nn.Module) -> None:
        """Shard the model over all ranks in place, as training does: FSDP2 for each block, then for the rest."""
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for blocks in [m for m in model.modules() if isinstance(m, nn.ModuleDict | nn.ModuleList)]:
            for block in blocks.values() if isinstance(blocks, nn.ModuleDict) else blocks:
                fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def key_map(self, model: nn.Module) -> KeyMap:
        """Return the model's key table, from which an adapter derives its own."""
        key_map = getattr(model, "key_map", None)
        table = KeyMap(identity=True) if key_map is None else key_map()
        assert isinstance(table, KeyMap)
        return table

    # the laws

    @_law
    def test_full_is_base_and_what_was_added(self) -> None:
        """Every base key keeps name, shape and dtype; base mode has exactly these; the filter claims all other keys."""
        specimen = self._shared()
        wrapper = ModelWrapper([specimen.model], specimen.converter)
        full, base = wrapper.state_dict("full"), wrapper.state_dict("base")
        _agree("base mode's keys, shapes and dtypes", {fqn: info_of(base[fqn]) for fqn in base}, specimen.base)
        claimed = {fqn for fqn in full if specimen.converter.key_filter(fqn)}
        _agree("keys that key_filter claims, beside those that convert added", claimed, set(full) - set(base))

    @_law
    def test_filter_is_a_function_of_the_whole_name(self) -> None:
        """A key that only resembles an added key, or has a different prefix, belongs to the base."""
        specimen = self._shared()
        claims = specimen.converter.key_filter
        early = self.make_converter().key_filter
        _agree("keys claimed before convert added any", {f for f in specimen.state_dict() if early(f)}, set())
        for fqn in [f for f in specimen.state_dict() if claims(f)]:
            _agree(f"the second answer of key_filter to {fqn}", claims(fqn), True)
            others = {f"x{fqn}", f"outer.{fqn}", f"{fqn}.x", f"{fqn}_x", fqn.upper(), fqn.partition(".")[2]} - {fqn}
            _agree(f"names like {fqn} that key_filter claims", {other for other in others if claims(other)}, set())

    @_law
    def test_export_is_the_base_in_plain_tensors(self) -> None:
        """The export has the base's keys, shapes and dtypes, and all values are plain tensors."""
        specimen = self._shared()
        export = specimen.state_dict(last_step=True)
        found = {fqn: info_of(value) for fqn, value in export.items()}
        _agree("the export's keys, shapes and dtypes", found, specimen.base)
        for fqn, value in export.items():
            for block in blocks_of(value):
                _agree(f"type of a block of {fqn}", type(block.data), torch.Tensor)
                _agree(f"dtype of a block of {fqn}", block.data.dtype, specimen.base[fqn].dtype)
                _agree(f"shape of a block of {fqn}", tuple(block.data.shape), tuple(block.chunk.sizes))
            _agree(f"{fqn} is plain or lazy", isinstance(value, LazyTensor) or _is_plain(value), True)

    @_law
    def test_export_does_not_depend_on_sharding(self) -> None:
        """Every chunk equals that of the unsharded model's export, up to the order of summation."""
        specimen, whole = self._shared(), self._specimen(sharded=False)
        expected = {f: next(iter(blocks_of(v))).data for f, v in whole.state_dict(last_step=True).items()}
        for fqn, value in specimen.state_dict(last_step=True).items():
            for block in blocks_of(value):
                unsharded = expected[fqn][block.chunk.within(Chunk.whole(expected[fqn].shape))]
                _close(f"{fqn} at {block.chunk.offsets}, sharded and whole", block.data, unsharded, tolerance=1e-5)

    @_law
    def test_a_frozen_export_is_that_of_its_time(self) -> None:
        """A tensor frozen for a background export keeps its values when the model changes, and is not collective."""
        specimen = self._specimen()
        export = {fqn: v for fqn, v in specimen.state_dict(last_step=True).items() if can_freeze(v)}
        before = {fqn: [block.data.clone() for block in blocks_of(value)] for fqn, value in export.items()}
        kept = {fqn: frozen(value, lambda live: live.detach().clone()) for fqn, value in export.items()}
        for value in specimen.state_dict().values():
            for block in blocks_of(value):
                block.data.fill_(0.5)
        for fqn, value in kept.items():
            collective = isinstance(value, LazyTensor) and value.collective
            _agree(f"the frozen {fqn} is collective", collective, False)
            for block, then in zip(blocks_of(value), before[fqn], strict=True):
                _close(f"the frozen {fqn} after the model changed", block.data, then)

    @_law
    def test_saved_tensors_are_plain_and_alias_the_model(self) -> None:
        """An interval save gets all keys as plain tensors that alias live memory: writing to them changes the model."""
        specimen = self._specimen()
        tensors = specimen.state_dict()
        _agree("an interval save's keys, in their order", list(tensors), list(specimen.raw))
        _agree("keys that are no plain tensors", {f for f, value in tensors.items() if not _is_plain(value)}, set())
        for value in tensors.values():
            for block in blocks_of(value):
                block.data.fill_(0.5)
        for fqn, value in specimen.state_dict().items():
            for block in blocks_of(value):
                _close(f"the live {fqn} after a write to the saved one", block.data, torch.full_like(block.data, 0.5))

    @_law
    def test_saved_tensors_fill_another_model(self) -> None:
        """The saved tensors, copied into a newly converted model, give the same output bit for bit."""
        specimen, other = self._specimen(), self._specimen(fill=False)
        _copy(other.state_dict(), specimen.state_dict())
        _close("the output of both models", self._output(other), self._output(specimen))

    @_law
    def test_transforms_change_neither_their_input_nor_the_model(self) -> None:
        """A transform, and reading its lazy results, changes neither the given dict, nor its tensors, nor the model."""
        specimen = self._shared()
        for last_step in (False, True):
            given = specimen.raw
            before = {fqn: copy.deepcopy(value) for fqn, value in given.items()}
            names, values = list(given), list(given.values())
            transformed = specimen.converter.state_dict_transform(given, last_step)
            for value in transformed.values():
                list(blocks_of(value))
            _agree("the transform returned the dict that it was given", transformed is given, False)
            _agree("keys of the given dict after the transform", list(given), names)
            replaced = {f for f, a, b in zip(names, given.values(), values, strict=True) if a is not b}
            _agree("tensors that the transform replaced in the given dict", replaced, set())
            changed = {fqn for fqn, value in specimen.raw.items() if not _same(value, before[fqn])}
            _agree("live tensors that the transform changed", changed, set())
            _agree("keys of the model after the transform", list(specimen.raw), names)

    @_law
    def test_description_is_stable_json(self) -> None:
        """The description for a manifest survives JSON, names the kinds, and never changes."""
        specimen = self._shared()
        described = specimen.converter.describe()
        _agree("describe() after JSON", json.loads(json.dumps(described)), described)
        _agree("describe() of another converter with the same settings", self.make_converter().describe(), described)
        kinds = [converter.get("kind") for converter in described]
        _agree(f"describe() names kinds ({kinds})", bool(kinds) and all(isinstance(k, str) for k in kinds), True)

    @_law
    def test_adapter_names_are_reversible(self) -> None:
        """If there is an adapter, every added key has its own names in files, and they lead back to the key."""
        specimen = self._shared()
        owned = [fqn for fqn in specimen.state_dict() if specimen.converter.key_filter(fqn)]
        adapter = specimen.converter.state_dict_adapter()
        if adapter is None:
            return
        base = self.key_map(specimen.model)
        table = adapter.key_map(base)
        groups = [table.group_of_fqn(fqn) for fqn in owned]
        keys = [key for group in dict.fromkeys(groups) for key in group.keys]
        _agree("file keys that two groups of added keys share", {key for key in keys if keys.count(key) > 1}, set())
        for group in groups:
            for key in group.keys:
                _agree(f"what the file key {key} leads back to", table.group_of_key(key), group)
        json.dumps(adapter.file_config(base))

    @_law
    def test_model_trains(self) -> None:
        """At least one parameter is trainable, and all gradients are finite."""
        specimen = self._specimen()
        self._output(specimen).float().square().mean().backward()
        gradients = {n: p.grad for n, p in specimen.model.named_parameters() if p.requires_grad and p.grad is not None}
        _agree("some parameter has a gradient", bool(gradients), True)
        for name, gradient in gradients.items():
            _agree(f"the gradient of {name} is finite", bool(local_tensor(gradient).isfinite().all()), True)

    @_law
    def test_conversion_on_meta_is_the_same(self) -> None:
        """A model that was converted on meta, materialized and loaded has the same values as one built with values."""
        specimen = self._specimen(fill=False)
        with torch.device("meta"):
            model = self.make_model()
        converter = self.make_converter()
        converter.convert(model)
        if dist.is_initialized():
            self.shard(model)
        other = _Specimen(model.to_empty(device="cpu"), converter, specimen.base)
        expected, tensors = specimen.state_dict(), other.state_dict()
        found = {f: info_of(v) for f, v in tensors.items()}
        _agree("keys, shapes and dtypes on meta", found, {f: info_of(v) for f, v in expected.items()})
        _copy({fqn: value for fqn, value in tensors.items() if fqn in specimen.base}, expected)
        _copy(dict(model.named_buffers()), dict(specimen.model.named_buffers()))
        converter.initialize([model])
        differ = {fqn for fqn, value in tensors.items() if not _same(value, expected[fqn])}
        _agree("tensors with other values than without meta", differ, set())
        _close("the output of both models", self._output(other), self._output(specimen))

    @distributed(nproc=2)
    def test_all_laws_hold_on_shards(self) -> None:
        """Every law above also holds on two ranks with a model sharded by `shard`."""
        self.check_laws()

    def check_laws(self) -> None:
        """Check every law except `test_all_laws_hold_on_shards`; for several converters in one launch of ranks.

        Raises: AssertionError, or the converter's own error, with a note that says the broken law.
        """
        self._kept = []
        try:
            for name in [
                n for n in vars(ConverterTests) if n.startswith("test_") and n != "test_all_laws_hold_on_shards"
            ]:
                getattr(self, name)()
                if dist.is_initialized():
                    dist.barrier()
        finally:
            self._kept = None

    def _shared(self) -> _Specimen:
        """Return a specimen for a law that only reads; `check_laws` has one for all of these."""
        if self._kept is None:
            return self._specimen()
        if not self._kept:
            self._kept.append(self._specimen())
        return self._kept[0]

    def _specimen(self, *, fill: bool = True, sharded: bool = True) -> _Specimen:
        torch.manual_seed(0)
        model = self.make_model()
        model.init_weights()  # type: ignore[operator]
        base = {fqn: info_of(value) for fqn, value in ModelWrapper([model]).state_dict("full").items()}
        converter = self.make_converter()
        converter.convert(model)
        if sharded and dist.is_initialized():
            self.shard(model)
        specimen = _Specimen(model, converter, base)
        if fill:
            _fill({fqn: v for fqn, v in specimen.state_dict().items() if converter.key_filter(fqn)})
        return specimen

    def _output(self, specimen: _Specimen) -> torch.Tensor:
        specimen.model.eval()
        out: torch.Tensor = specimen.model(self.make_input())
        return out


def _agree(what: str, found: Any, expected: Any) -> None:
    """Raises: AssertionError that says what differs, entry by entry for sets and dicts."""
    if found == expected:
        return
    lines = [f"expected {expected!r}", f"found    {found!r}"]
    if isinstance(found, set):
        lines = [f"too many: {sorted(found - expected)}", f"missing: {sorted(expected - found)}"]
    elif isinstance(found, dict):
        keys = [key for key in {**expected, **found} if found.get(key) != expected.get(key)]
        lines = [f"{key}: expected {expected.get(key, 'no such key')}, found {found.get(key, 'none')}" for key in keys]
    raise AssertionError(f"{what}:\n  " + "\n  ".join(lines))


def _close(what: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float = 0.0) -> None:
    """Raises: AssertionError with the largest difference."""
    if found.shape == expected.shape and torch.allclose(found, expected, rtol=tolerance, atol=tolerance / 10):
        return
    if found.shape != expected.shape:
        raise AssertionError(f"{what}: expected shape {list(expected.shape)}, found {list(found.shape)}")
    far = (found.double() - expected.double()).abs()
    place = int(far.argmax())
    values = f"expected {expected.flatten()[place].item():g}, found {found.flatten()[place].item():g}"
    raise AssertionError(f"{what}: {int((far > 0).sum())} of {far.numel()} values differ; {values} at {place}")


def _fill(tensors: StateDict) -> None:
    """Fill every tensor with positive values that depend only on its name, under any sharding."""
    for fqn, value in tensors.items():
        generator = torch.Generator().manual_seed(sum(fqn.encode()))
        whole = torch.rand(tuple(value.shape), generator=generator) * 0.1 + 0.05
        for block in blocks_of(value):
            block.data.copy_(whole[block.chunk.within(Chunk.whole(whole.shape))])


def _copy(targets: StateDict, sources: StateDict) -> None:
    """Copy this rank's values between tensors with equal sharding."""
    for fqn, target in targets.items():
        for block, source in zip(blocks_of(target), blocks_of(sources[fqn]), strict=True):
            block.data.copy_(source.data)


def _is_plain(value: torch.Tensor) -> bool:
    return type(local_tensor(value)) in (torch.Tensor, nn.Parameter)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(torch.equal(x.data, y.data) for x, y in zip(blocks_of(a), blocks_of(b), strict=True))
