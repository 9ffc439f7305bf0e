"""Meta construction: materialize, load, then initialize what no source provided, and nothing else."""

from __future__ import annotations

import copy
import json
import logging
import struct
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests import world
from tests.forked import memory_of
from tests.world import shard
from titan_ckpt import CheckpointConfig, CheckpointManager, InitialLoadConfig
from titan_ckpt.converters import LoRAConfig, LoRAConverter, ModelConvertersContainer
from titan_ckpt.errors import CheckpointNotFoundError, LoadMismatchError
from titan_ckpt.geometry.chunks import blocks_of
from titan_ckpt.loading import restore
from titan_ckpt.models import hf
from titan_ckpt.models.decoder import Decoder
from titan_ckpt.models.language_model import Model
from titan_ckpt.models.qwen3_moe import FLAVORS, Router
from titan_ckpt.models.registry import build_model
from titan_ckpt.testing import distributed
from titan_ckpt.weights.initialize import (
    InitialValues,
    construct,
    empty_tensors,
    flag_loaded,
    initialize_missing,
    materialize,
)
from titan_ckpt.weights.transforms import StateDictTransforms
from titan_ckpt.weights.wrapper import ModelWrapper

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, Callable[[], Model]] = {
    "llama3": lambda: build_model("llama3", flavor="debug-0.5m"),
    "qwen3 tied": lambda: build_model("qwen3", flavor="debug-0.5m"),
    "qwen3_moe": lambda: build_model("qwen3_moe", flavor="debug-1m"),
    "transformers": lambda: hf.build(LLAMA),
    "transformers tied": lambda: hf.build({**LLAMA, "tie_word_embeddings": True}),
}


def on_one_device(name: str) -> Model:
    """Return what a model is without any of this: built whole on the CPU, and initialized."""
    torch.manual_seed(3)
    model = MODELS[name]()
    model.init_weights()
    return model


def on_meta(name: str, values: InitialValues = "default") -> Model:
    torch.manual_seed(3)
    return construct(MODELS[name], values)


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def different(model: nn.Module, expected: nn.Module) -> list[str]:
    """Return the tensors of which this rank holds anything but the expected values."""
    return world.misplaced(tensors(model), tensors(expected))


def spoil(model: nn.Module) -> None:
    """Fill fresh memory with what it may hold: anything."""
    for value in tensors(model).values():
        for block in blocks_of(value):
            block.data.fill_(True if value.dtype is torch.bool else 77)


def load(model: nn.Module, folder: Path, **options: Any) -> None:
    world.load(world.manager(folder, model, sd_transforms=None, **options))


def save(model: nn.Module, folder: Path) -> None:
    world.save(world.manager(folder, model, sd_transforms=None))


@pytest.mark.parametrize("name", MODELS)
def test_b4_values_from_scratch_are_those_of_one_device(name: str, tmp_path: Path) -> None:
    """Built on meta, a model gets bit for bit what building it on the CPU gives, the constructor's draws included."""
    expected, model = on_one_device(name), on_meta(name)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    materialize(model, "cpu")
    spoil(model)
    torch.manual_seed(99)
    generators = torch.get_rng_state()
    load(model, tmp_path)
    assert different(model, expected) == []
    assert torch.equal(generators, torch.get_rng_state()), "initialization must not move the run's generators"


def laid_out(name: str, layout: str, values: InitialValues = "default") -> Model:
    """Return what this one of two ranks has of a model: on meta until it is laid out, then in memory that is spoilt."""
    model, mesh = on_meta(name, values), init_device_mesh("cpu", (2,))
    if layout == "sharded":
        shard(model, mesh)
    elif layout == "tensor parallel":
        plan = {"layers.*.feed_forward.w1": ColwiseParallel(), "layers.*.feed_forward.w2": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
    else:
        assert isinstance(model, Decoder)
        if mesh.get_rank() == 0:
            model.norm = model.output = None
            del model.layers["2"]
        else:
            model.tok_embeddings = None
            del model.layers["0"], model.layers["1"]
    materialize(model, "cpu")
    spoil(model)
    return model


LAYOUTS = [
    ("llama3", "sharded"), ("transformers tied", "sharded"), ("llama3", "tensor parallel"), ("llama3", "a stage of two")
]  # fmt: skip


@distributed(nproc=2)
def test_b4_values_from_scratch_are_the_same_sharded_split_in_stages_and_whole(tmp_path: Path) -> None:
    """FSDP2, tensor parallel and a pipeline stage hold their part of what one device has."""
    for name, layout in LAYOUTS:
        model = laid_out(name, layout)
        torch.manual_seed(100 + torch.distributed.get_rank())
        load(model, tmp_path / f"{name} {layout}")
        assert different(model, on_one_device(name)) == [], layout


@distributed(nproc=2)
def test_b1_shards_and_stages_are_loaded_and_the_rest_is_computed(tmp_path: Path) -> None:
    """The mechanism is that of whole models: each layout has its part of the checkpoint, and whole rotary tables."""
    for name, layout in LAYOUTS:
        source, folder = on_one_device(name), tmp_path / f"{name} {layout}"
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.mul_(1.5)
        save(source, folder)
        model = laid_out(name, layout)
        load(model, folder)
        assert different(model, source) == [], layout
        assert empty_tensors([model]) == []


@pytest.mark.parametrize("name", MODELS)
def test_b1_what_the_checkpoint_holds_is_loaded_and_the_rest_is_computed(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Parameters come from the checkpoint, rotary tables from the model's code, in float32; the logits are right.

    The rest is computed in place: no second model is built for it.
    """
    source = on_one_device(name).eval()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(1.5)
    save(source, tmp_path)
    model = on_meta(name).eval()
    materialize(model, "cpu")
    spoil(model)
    load(model, tmp_path)
    assert different(model, source) == []
    assert empty_tensors([model]) == []
    assert "builds the whole model" not in caplog.text
    tokens = torch.arange(12).view(1, 12)
    assert torch.equal(model(tokens), source(tokens))


def test_b1_a_pure_transformers_model_computes_the_right_logits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """from_config on meta, materialized and loaded from its own folder: what from_pretrained computes, bit for bit."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"})
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    build: Any = AutoModelForCausalLM.from_config
    model = construct(lambda: build(config))
    materialize(model, "cpu")
    spoil(model)
    load(model, tmp_path / "run", initial_load=[tmp_path / "base"])
    tokens = torch.arange(40).view(1, 40)
    assert torch.equal(model(tokens).logits, expected(tokens).logits)
    assert "builds the whole model" not in caplog.text
    garbage = copy.deepcopy(model)
    garbage.model.rotary_emb.inv_freq.fill_(77)
    assert not torch.allclose(garbage(tokens).logits, expected(tokens).logits), "the logits must depend on inv_freq"


def test_b1_a_converters_own_tensors_are_initialized_by_it(tmp_path: Path) -> None:
    """After the base is loaded, LoRA draws A and takes DoRA's magnitudes from the base; nothing else is touched."""
    base = on_one_device("llama3")
    save(base, tmp_path / "base")
    found = []
    for meta in (True, False):
        torch.manual_seed(3)
        model = construct(MODELS["llama3"]) if meta else MODELS["llama3"]()
        converters = ModelConvertersContainer(
            [LoRAConverter(LoRAConfig(rank=4, target_modules=("wq",), use_dora=True))]
        )
        converters.convert(model)
        if meta:
            materialize(model, "cpu")
            spoil(model)
        source = InitialLoadConfig(path=str(tmp_path / "base" / "checkpoints" / "step-1"))
        world.load(
            world.manager(
                tmp_path,
                model,
                initial_load=[source],
                sd_transforms=StateDictTransforms(model.key_map()),
                model_converters=converters,
            )
        )
        assert empty_tensors([model]) == []
        found.append(model)
    assert different(found[0], found[1]) == []


class Plain(nn.Module):
    """A model whose init_weights knows of no marks, and overwrites everything in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.touched: list[str] = []

    def init_weights(self) -> None:
        self.touched.append("init_weights")
        for linear in (self.first, self.second):
            nn.init.normal_(linear.weight)
            linear.weight.data.zero_()
            linear.weight.data[0] = 5.0
            linear.bias = nn.Parameter(torch.full((4,), 7.0))
        self.second.weight.data = torch.ones(4, 4)
        self.table = torch.arange(4.0)


def test_b2_a_mark_per_tensor_protects_what_was_loaded(tmp_path: Path) -> None:
    """If a module's weight is loaded and its bias is not, only the bias gets a value, whatever the init writes."""
    model = construct(Plain)
    materialize(model, "cpu")
    wrapper = ModelWrapper([model])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3.0)
    objects = dict(model.named_parameters())
    assert len(empty_tensors([model])) == 5
    flag_loaded(wrapper, ["first.weight", "first.bias", "second.weight"])
    assert empty_tensors([model]) == ["table", "second.bias"]
    del model.__dict__["_titan_ckpt_origin"]  # as if by torch.device("meta") alone
    initialize_missing(wrapper)
    assert {fqn: value.mean().item() for fqn, value in tensors(model).items()} == {
        "first.weight": 3.0, "first.bias": 3.0, "second.weight": 3.0, "second.bias": 7.0, "table": 1.5,
    }  # fmt: skip
    assert all(objects[fqn] is value for fqn, value in model.named_parameters()), "an optimizer may hold them"


def test_b2_what_a_load_leaves_may_be_filled_by_a_subclass(tmp_path: Path) -> None:
    """CheckpointManager.initialize_missing is called when all is read; what it flags keeps its values."""
    save(nn.ModuleDict({"first": nn.Linear(4, 4)}), tmp_path / "a")

    class Own(CheckpointManager):
        def initialize_missing(self, owned: Collection[str] = ()) -> None:
            assert empty_tensors([model]) == ["table", "second.weight", "second.bias"]
            with torch.no_grad():
                model.second.weight.fill_(3.0)
            flag_loaded(ModelWrapper([model]), ["second.weight"])
            super().initialize_missing(owned)

    model = construct(Plain)
    materialize(model, "cpu")
    source = InitialLoadConfig(str(tmp_path / "a/checkpoints/step-1"), initialize=("second.*",))
    with Own(CheckpointConfig(initial_load=(source,)), model_parts=[model], base_folder=tmp_path) as manager:
        manager.load()
    assert model.second.weight.eq(3.0).all() and model.second.bias.eq(7.0).all()


def test_b2_a_model_without_an_unmarked_tensor_is_not_touched(tmp_path: Path) -> None:
    """Its init is not even called, and a second load marks and initializes nothing."""
    model = construct(Plain)
    materialize(model, "cpu")
    load(model, tmp_path)
    assert empty_tensors([model]) == []
    model.touched.clear()
    save(model, tmp_path)
    load(model, tmp_path)
    assert model.touched == []


def test_b2_tensors_are_marked_once_per_load_not_once_per_source(tmp_path: Path, monkeypatch: Any) -> None:
    """Two sources are one load: marked after both were read."""
    marked = []

    def noted(wrapper: ModelWrapper, fqns: Collection[str]) -> None:
        marked.append(sorted(fqns))
        flag_loaded(wrapper, fqns)

    monkeypatch.setattr(restore, "flag_loaded", noted)
    save(nn.ModuleDict({"a": nn.Linear(2, 2)}), tmp_path / "a")
    save(nn.ModuleDict({"b": nn.Linear(2, 2)}), tmp_path / "b")
    both = construct(lambda: nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}))
    materialize(both, "cpu")
    sources = [tmp_path / name / "checkpoints" / "step-1" for name in "ab"]
    load(both, tmp_path, initial_load=sources)
    assert marked == [["a.bias", "a.weight", "b.bias", "b.weight"]]


def test_b3_everything_is_read_before_anything_is_initialized(tmp_path: Path, monkeypatch: Any) -> None:
    """The order of events, as the reader and the model's own code see them: of a resume, and of an initial load."""
    save(on_one_device("llama3"), tmp_path / "old")
    source = tmp_path / "old" / "checkpoints" / "step-1"
    order: list[str] = []
    read = restore.fill_in_order
    reset = Decoder.reset_buffers

    def noted(what: str, act: Callable[..., object]) -> Callable[..., None]:
        def run(self: Any) -> None:
            order.append(what)
            act(self)

        return run

    monkeypatch.setattr(restore, "fill_in_order", noted("read", read))
    monkeypatch.setattr(Decoder, "reset_buffers", noted("initialize", reset))
    for folder, options in (("old", {}), ("new", {"initial_load": (source,)})):
        model = on_meta("llama3")
        materialize(model, "cpu")
        order.clear()  # building a model computes its tables too
        load(model, tmp_path / folder, **options)
        assert order == ["read", "initialize"], folder


def test_b3_tied_parameters_are_tied_again() -> None:
    """to_empty gives each alias memory of its own; materialize makes them one tensor, parameters and buffers alike."""

    class Tied(nn.Module):
        here: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("here", torch.zeros(2))
            self.head.register_buffer("there", self.here)

    model = construct(Tied)
    materialize(model, "cpu")
    assert model.head.weight is model.embedding.weight
    assert model.head.there is model.here
    flag_loaded(ModelWrapper([model]), ["embedding.weight"])
    assert "head.weight" not in empty_tensors([model])


def test_b3_a_stage_without_an_init_resets_its_buffers_only(tmp_path: Path) -> None:
    """A stage cut out of a transformers model, without its `_init_weights`: weights loaded, frequencies computed.

    Of other models what modules can reset is reset: `reset_buffers` of a router, not `reset_parameters` beside it.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"})
    whole = LlamaForCausalLM(config)

    def stage_of(model: nn.Module) -> nn.Module:
        parts = {"layer": "model.layers.1", "rotary": "model.rotary_emb"}
        return nn.ModuleDict({name: model.get_submodule(fqn) for name, fqn in parts.items()})

    save(stage_of(whole), tmp_path)
    with torch.device("meta"):
        stage = stage_of(LlamaForCausalLM(config))
    materialize(stage, "cpu")
    spoil(stage)
    load(stage, tmp_path)
    assert different(stage, stage_of(whole)) == []

    def counting() -> nn.Module:
        return nn.ModuleDict({"router": Router(FLAVORS["debug-1m"]), "linear": nn.Linear(2, 2)})

    expected = counting()
    nn.init.normal_(expected.get_parameter("router.weight"))
    save(expected, tmp_path / "ours")
    with torch.device("meta"):
        stage = counting()
    materialize(stage, "cpu")
    spoil(stage)
    load(stage, tmp_path / "ours")
    assert different(stage, expected) == []


def test_b3_a_buffer_that_nothing_computes_is_an_error(tmp_path: Path) -> None:
    """Garbage is never computed with: the message names the buffer and what the model lacks."""

    class Forgetful(nn.Module):
        scale: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("scale", torch.ones(2), persistent=False)

    save(Forgetful(), tmp_path)
    with torch.device("meta"):
        model = Forgetful()
    materialize(model, "cpu")
    with pytest.raises(LoadMismatchError, match=r"1 tensor has no values.*scale.*reset_buffers"):
        load(model, tmp_path)
    model = construct(Forgetful)
    materialize(model, "cpu")
    load(model, tmp_path)
    assert torch.equal(model.scale, torch.ones(2)), "a constructed model can be asked again for what it computes"


def test_b4_values_that_only_the_constructor_gives_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model with no init of its own starts as its constructor leaves it, and the log says what that costs."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))

    torch.manual_seed(3)
    expected = build()
    torch.manual_seed(3)
    model = construct(build)
    materialize(model, "cpu")
    spoil(model)
    with caplog.at_level(logging.WARNING):
        load(model, tmp_path)
    assert different(model, expected) == []
    assert "only the constructor gives values to 0.weight" in caplog.text


@pytest.mark.parametrize(("layers", "named"), [(1, "0.weight ("), (5, "0.weight, 1.weight, 2.weight and 2 more (")])
def test_the_log_names_what_is_initialized(layers: int, named: str, caplog: pytest.LogCaptureFixture) -> None:
    """One line has the first three names, and how many more there are."""
    model = construct(lambda: nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(layers))))
    materialize(model, "cpu")
    with caplog.at_level(logging.INFO):
        initialize_missing(ModelWrapper([model]))
    assert f"initializing what is not in the checkpoint: {named}" in caplog.text


def test_b4_a_model_that_cannot_be_built_on_meta_is_built_on_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    """With the values it would have had, and a warning that says why."""

    class Reads(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.noise = float(torch.rand((), device="cpu"))  # moves the generators before it fails on meta
            self.scale = float(torch.full((3,), 0.5).sum().item())

    torch.manual_seed(3)
    expected = Reads()
    expected.init_weights()
    torch.manual_seed(3)
    with caplog.at_level(logging.WARNING):
        model = construct(Reads)
    assert different(model, expected) == [] and empty_tensors([model]) == []
    assert model.noise == expected.noise
    assert "cannot be built on meta" in caplog.text and "item()" in caplog.text


def test_d6_a_weights_path_that_cannot_be_loaded_stops_the_run(tmp_path: Path) -> None:
    """Never a silent random start, on meta as elsewhere: nothing is initialized, nothing is marked."""
    model = construct(Plain)
    materialize(model, "cpu")
    with pytest.raises(CheckpointNotFoundError, match=r"nowhere is not there; name an existing checkpoint folder"):
        load(model, tmp_path, initial_load=(InitialLoadConfig(path=str(tmp_path / "nowhere")),))
    assert model.touched == [] and len(empty_tensors([model])) == 5


def test_b1_loading_takes_the_models_memory_the_largest_tensor_and_64_mib_at_most(tmp_path: Path) -> None:
    """A Hugging Face folder of 1.07 GB into a model from meta, in a process of its own; the kernel counts the peak."""
    shapes = {f"{i}.weight": [4096, 4096] for i in range(12)} | {"12.weight": [16384, 4096]}
    header, end = {}, 0
    for name, (rows, columns) in shapes.items():
        start, end = end, end + rows * columns * 4
        header[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with (folder / "model.safetensors").open("wb") as file:  # sparse: zeros, but for the last number
        file.write(len(text).to_bytes(8, "little") + text)
        file.seek(8 + len(text) + end - 4)
        file.write(struct.pack("<f", 0.5))

    def build() -> nn.Module:
        return nn.ModuleList([nn.Linear(4096, 4096, bias=False) for _ in range(12)] + [nn.Embedding(16384, 4096)])

    def act() -> tuple[float, list[int]]:
        model: Any = construct(build)
        materialize(model, "cpu")
        load(model, tmp_path, initial_load=[folder])
        return model[12].weight[-1, -1].item(), [p.nbytes for p in model.parameters()]

    peak, (last, sizes) = memory_of(act, before=lambda: load(nn.ModuleList([nn.Linear(2, 2)]), tmp_path))
    assert sum(sizes) > 1e9 and last == 0.5
    assert sum(sizes) < peak <= sum(sizes) + max(sizes) + 64 * 2**20, peak
