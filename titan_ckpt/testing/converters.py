"""The laws of model converters as a test class. Inherit it to test a converter.

Owns the promises of every converter to checkpoints, in one process and on FSDP2 shards. Knows no particular converter.
"""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

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
from titan_ckpt.types import ModelHooks, StateDict
from titan_ckpt.weights.names import clean_fqn
from titan_ckpt.weights.wrapper import ModelWrapper

_TINY = Llama3Config(
    dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, ffn_dim=128, vocab_size=96, max_seq_len=32
)


class Converter(ModelHooks, Protocol):
    """A converter or a container of converters: the hooks, and the methods that a training run calls."""

    def convert(self, model: nn.Module) -> None: ...

    def initialize(self, model_parts: Sequence[nn.Module], fqns: Collection[str] | None = None) -> None: ...


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
    converter: Converter
    base: dict[str, TensorInfo]
    """Shapes and dtypes in the model's state dict before the conversion."""

    def state_dict(self, last_step: bool = False) -> StateDict:
        return ModelWrapper([self.model], self.converter).state_dict("full", last_step=last_step)

    @property
    def raw(self) -> StateDict:
        """Return the model's state dict without the converter's transform, as a converter is given it."""
        return {clean_fqn(name): value for name, value in self.model.state_dict().items()}


class ConverterTests(ABC):
    """Tests of every law. Inherit from it, name the subclass Test..., and define `make_converter`.

    The sharded laws run in two processes, so the subclass must be importable by name from the project's root.
    `make_model`, `make_input`, `key_map` and `shard` may be overridden.
    """

    @abstractmethod
    def make_converter(self) -> Converter:
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

    def test_full_is_base_and_what_was_added(self) -> None:
        """Every base key keeps name, shape and dtype; base mode has exactly these; the filter claims all other keys."""
        specimen = self._specimen()
        wrapper = ModelWrapper([specimen.model], specimen.converter)
        full, base = wrapper.state_dict("full"), wrapper.state_dict("base")
        assert {fqn: info_of(base[fqn]) for fqn in base} == specimen.base
        added = set(full) - set(base)
        assert {fqn for fqn in full if specimen.converter.key_filter(fqn)} == added
        assert set(full) == set(base) | added

    def test_filter_is_a_function_of_the_whole_name(self) -> None:
        """A key that only resembles an added key, or has a different prefix, belongs to the base."""
        specimen = self._specimen()
        claims = specimen.converter.key_filter
        assert not any(map(self.make_converter().key_filter, specimen.state_dict())), "nothing was added yet"
        for fqn in [f for f in specimen.state_dict() if claims(f)]:
            assert claims(fqn), "the same question has one answer"
            others = {f"x{fqn}", f"outer.{fqn}", f"{fqn}.x", f"{fqn}_x", fqn.upper(), fqn.partition(".")[2]} - {fqn}
            assert not any(claims(other) for other in others), others

    def test_export_is_the_base_in_plain_tensors(self) -> None:
        """The export has the base's keys, shapes and dtypes, and all values are plain tensors."""
        specimen = self._specimen()
        export = specimen.state_dict(last_step=True)
        assert {fqn: info_of(value) for fqn, value in export.items()} == specimen.base
        for fqn, value in export.items():
            blocks = list(blocks_of(value))
            assert {type(block.data) for block in blocks} <= {torch.Tensor}, fqn
            assert {block.data.dtype for block in blocks} <= {specimen.base[fqn].dtype}, fqn
            assert all(tuple(block.data.shape) == block.chunk.sizes for block in blocks), fqn
            assert isinstance(value, LazyTensor) or _is_plain(value), fqn

    def test_export_does_not_depend_on_sharding(self) -> None:
        """Every chunk equals that of the unsharded model's export, up to the order of summation."""
        specimen, whole = self._specimen(), self._specimen(sharded=False)
        expected = {f: next(iter(blocks_of(v))).data for f, v in whole.state_dict(last_step=True).items()}
        for fqn, value in specimen.state_dict(last_step=True).items():
            for block in blocks_of(value):
                unsharded = expected[fqn][block.chunk.within(Chunk.whole(expected[fqn].shape))]
                assert torch.allclose(block.data, unsharded, rtol=1e-5, atol=1e-6), fqn

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
            assert not (isinstance(value, LazyTensor) and value.collective), fqn
            assert all(torch.equal(b.data, then) for b, then in zip(blocks_of(value), before[fqn], strict=True)), fqn

    def test_saved_tensors_are_plain_and_alias_the_model(self) -> None:
        """An interval save gets all keys as plain tensors that alias live memory: writing to them changes the model."""
        specimen = self._specimen()
        tensors = specimen.state_dict()
        assert list(tensors) == list(specimen.raw)
        assert all(_is_plain(value) for value in tensors.values())
        for value in tensors.values():
            for block in blocks_of(value):
                block.data.fill_(0.5)
        for value in specimen.state_dict().values():
            assert all(bool((block.data == 0.5).all()) for block in blocks_of(value))

    def test_saved_tensors_fill_another_model(self) -> None:
        """The saved tensors, copied into a newly converted model, give the same output bit for bit."""
        specimen, other = self._specimen(), self._specimen(fill=False)
        _copy(other.state_dict(), specimen.state_dict())
        assert torch.equal(self._output(other), self._output(specimen))

    def test_transforms_change_neither_their_input_nor_the_model(self) -> None:
        """A transform, and reading its lazy results, changes neither the given dict, nor its tensors, nor the model."""
        specimen = self._specimen()
        for last_step in (False, True):
            given = specimen.raw
            before = {fqn: copy.deepcopy(value) for fqn, value in given.items()}
            names, values = list(given), list(given.values())
            transformed = specimen.converter.state_dict_transform(given, last_step)
            for value in transformed.values():
                list(blocks_of(value))
            assert transformed is not given
            assert list(given) == names and all(a is b for a, b in zip(given.values(), values, strict=True))
            for fqn, value in specimen.raw.items():
                assert _same(value, before[fqn]), fqn
            assert list(specimen.raw) == names

    def test_description_is_stable_json(self) -> None:
        """The description for a manifest survives JSON, names the kinds, and never changes."""
        specimen = self._specimen()
        described = specimen.converter.describe()
        assert described == json.loads(json.dumps(described)) == self.make_converter().describe()
        assert described and all(isinstance(converter["kind"], str) for converter in described)

    def test_adapter_names_are_reversible(self) -> None:
        """If there is an adapter, every added key has its own names in files, and they lead back to the key."""
        specimen = self._specimen()
        owned = [fqn for fqn in specimen.state_dict() if specimen.converter.key_filter(fqn)]
        adapter = specimen.converter.state_dict_adapter()
        if adapter is None:
            return
        base = self.key_map(specimen.model)
        table = adapter.key_map(base)
        groups = [table.group_of_fqn(fqn) for fqn in owned]
        keys = [key for group in dict.fromkeys(groups) for key in group.keys]
        assert len(set(keys)) == len(keys)
        assert all(table.group_of_key(key) == group for group in groups for key in group.keys)
        json.dumps(adapter.file_config(base))

    def test_model_trains(self) -> None:
        """At least one parameter is trainable, and all gradients are finite."""
        specimen = self._specimen()
        self._output(specimen).float().square().mean().backward()
        gradients = [p.grad for p in specimen.model.parameters() if p.requires_grad and p.grad is not None]
        assert gradients
        for gradient in gradients:
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            assert bool(torch.isfinite(local).all())

    def test_conversion_on_meta_is_the_same(self) -> None:
        """A model that was converted on meta, materialised and loaded has the same values as one built with values."""
        specimen = self._specimen(fill=False)
        with torch.device("meta"):
            model = self.make_model()
        converter = self.make_converter()
        converter.convert(model)
        if dist.is_initialized():
            self.shard(model)
        other = _Specimen(model.to_empty(device="cpu"), converter, specimen.base)
        expected, tensors = specimen.state_dict(), other.state_dict()
        assert {f: info_of(v) for f, v in tensors.items()} == {f: info_of(v) for f, v in expected.items()}
        _copy({fqn: value for fqn, value in tensors.items() if fqn in specimen.base}, expected)
        _copy(dict(model.named_buffers()), dict(specimen.model.named_buffers()))
        converter.initialize([model])
        assert [fqn for fqn, value in tensors.items() if not _same(value, expected[fqn])] == []
        assert torch.equal(self._output(other), self._output(specimen))

    @distributed(nproc=2)
    def test_all_laws_hold_on_shards(self) -> None:
        """Every law above also holds on two ranks with a model sharded by `shard`."""
        self.check_laws()

    def check_laws(self) -> None:
        """Check every law except `test_all_laws_hold_on_shards`; for several converters in one launch of ranks.

        Raises: the error of the broken law, with a note that names the law.
        """
        for name in (n for n in vars(ConverterTests) if n.startswith("test_") and n != "test_all_laws_hold_on_shards"):
            try:
                getattr(self, name)()
            except Exception as error:
                error.add_note(f"{name} of {[converter['kind'] for converter in self.make_converter().describe()]}")
                raise
            if dist.is_initialized():
                dist.barrier()

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
