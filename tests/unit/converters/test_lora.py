"""LoRA: what is adapted, what it computes, what merging gives and takes, and every input that is refused."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests import world
from tests.forked import memory_of
from tests.world import TINY
from titan_ckpt.converters import LoRAConfig, LoRAConverter, ModelConvertersContainer, build, from_tables
from titan_ckpt.errors import ConverterError, ExportError, KeyMapError
from titan_ckpt.geometry.chunks import LazyTensor, blocks_of
from titan_ckpt.geometry.keymap import Chain, KeyMap, KeyRule, Split, Unstack
from titan_ckpt.models import qwen3_moe
from titan_ckpt.models.llama3 import Llama3
from titan_ckpt.types import StateDict
from titan_ckpt.weights.transforms import StateDictTransforms
from titan_ckpt.weights.wrapper import ModelWrapper

TOKENS = torch.arange(20).reshape(2, 10)


def llama(tied: bool = False) -> Llama3:
    return world.llama(replace(TINY, tie_embeddings=tied))


def converted(model: nn.Module, *targets: str, **settings: Any) -> ModelConvertersContainer:
    converters = build([LoRAConfig(targets or ("wq", "wv"), **{"rank": 4, **settings})])
    converters.convert(model)
    return converters


def randomise(model: nn.Module, converters: ModelConvertersContainer, std: float = 0.1) -> None:
    """Train, in effect: give every adapter tensor values that matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if converters.key_filter(name):
                parameter.normal_(0, std).add_(1.0 if "magnitude" in name else 0.0)


def resolved(tensors: StateDict) -> dict[str, torch.Tensor]:
    return {fqn: next(iter(blocks_of(value))).data.clone() for fqn, value in tensors.items()}


def test_a_fresh_adapter_changes_nothing() -> None:
    """B starts at zero, so a converted model computes what it computed, bit for bit, DoRA up to its division."""
    base = llama()
    for settings, exact in (({}, True), ({"use_dora": True}, False)):
        model = copy.deepcopy(base)
        converted(model, "wq", "w1", "tok_embeddings" if exact else "w2", **settings)
        torch.testing.assert_close(model(TOKENS), base(TOKENS), rtol=0, atol=0 if exact else 1e-5)


def test_initial_values_depend_on_name_and_seed_alone() -> None:
    """A has the spread of a linear module's initial values; another seed or name gives others; the generator rests."""

    def owned(**settings: Any) -> dict[str, torch.Tensor]:
        model = llama()
        state = torch.get_rng_state()
        converters = converted(model, **settings)
        assert torch.equal(torch.get_rng_state(), state)
        return resolved(ModelWrapper([model], converters).owned_state_dict())

    tensors, other = [owned(), owned()], owned(seed=1)
    name = "layers.0.attention.wq.lora_a.weight"
    assert torch.equal(tensors[0][name], tensors[1][name])
    assert not torch.equal(tensors[0][name], other[name])
    assert not torch.equal(tensors[0][name], tensors[0]["layers.1.attention.wq.lora_a.weight"])
    a = tensors[0][name]
    assert a.abs().max() <= 1 / math.sqrt(64) and a.std() == pytest.approx(1 / math.sqrt(3 * 64), rel=0.2)
    assert not tensors[0]["layers.0.attention.wq.lora_b.weight"].any()


def test_experts_start_alike_and_without_effect() -> None:
    """Earlier content of the memory is overwritten: A of a stack has its initial values, B is zero."""
    model = qwen3_moe.Qwen3Moe(replace(qwen3_moe.FLAVORS["debug-1m"], num_layers=2))
    converters = converted(model, "experts.w2")
    owned = ModelWrapper([model], converters).owned_state_dict()
    before = resolved(owned)
    with torch.no_grad():
        for value in owned.values():
            assert isinstance(value, torch.Tensor)
            value.fill_(7.0)
    converters.initialize([model])
    after = resolved(owned)
    assert all(torch.equal(value, before[fqn]) for fqn, value in after.items())
    assert {fqn.rpartition(".")[2]: bool(value.any()) for fqn, value in after.items()} == {
        "lora_a": True,
        "lora_b": False,
    }


@pytest.mark.parametrize(
    ("targets", "adapted"),
    [
        (("wq",), ["layers.0.attention.wq", "layers.1.attention.wq"]),
        (("attention.wq", "output"), ["layers.0.attention.wq", "layers.1.attention.wq", "output"]),
        (("layers.1.feed_forward.w2",), ["layers.1.feed_forward.w2"]),
        (("layers.0.*.w[13]",), ["layers.0.feed_forward.w1", "layers.0.feed_forward.w3"]),
    ],
)
def test_targets_are_names_suffixes_and_patterns(targets: tuple[str, ...], adapted: list[str]) -> None:
    """A target means a last part, a dotted suffix, a whole name, or a pattern over the whole name."""
    model = llama()
    converters = converted(model, *targets)
    claimed = {fqn.removesuffix(".lora_a.weight") for fqn in model.state_dict() if fqn.endswith("lora_a.weight")}
    assert claimed == set(adapted)
    assert sum(map(converters.key_filter, model.state_dict())) == 2 * len(adapted)


def test_unmatched_targets_are_listed_with_near_misses() -> None:
    """Every name that means nothing is answered with what was probably meant."""
    with pytest.raises(ConverterError) as caught:
        converted(llama(), "wq", "wkk", "atention.wv", "q_proj", "layers.9.*", "q")
    assert "5 name(s) match nothing" in str(caught.value)
    assert "'wkk' matches no weight to adapt. Did you mean wk" in str(caught.value)
    assert "Did you mean attention.wv" in str(caught.value)
    assert "'q' matches no weight" in str(caught.value)  # the end of a name, but no whole part of it
    assert "'q_proj' matches no weight to adapt. There are: tok_embeddings, wq, wk" in str(caught.value)


def test_patterns_give_ranks_and_alphas() -> None:
    """rank_pattern and alpha_pattern hold for the modules they match, and the scale follows from both."""
    model = llama()
    converters = converted(
        model, "wq", "w1", alpha=8.0, rank_pattern={"layers.0.*": 2}, alpha_pattern={"w1": 6.0}, use_rslora=True
    )
    shapes = {fqn: tuple(p.shape) for fqn, p in model.state_dict().items() if converters.key_filter(fqn)}
    assert shapes["layers.0.attention.wq.lora_a.weight"] == (2, 64)
    assert shapes["layers.1.feed_forward.w1.lora_b.weight"] == (128, 4)
    module: Any = model.get_submodule("layers.0.feed_forward.w1")
    assert module.adapter.scaling == pytest.approx(6 / math.sqrt(2))


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"use_dora": True}, {"use_dora": True, "dropout": 0.5}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_export_is_the_ideal_rounding(settings: dict[str, Any], dtype: torch.dtype) -> None:
    """Each merged weight is the product of double precision, rounded once: no further off than half a step."""
    model = llama().to(dtype)
    converters = converted(model, "wq", "w2", "output", **settings)
    randomise(model, converters)
    export = ModelWrapper([model], converters).state_dict("export")
    live = dict(model.named_parameters())
    for fqn in ("layers.0.attention.wq", "layers.1.feed_forward.w2", "output"):
        value = export[f"{fqn}.weight"]
        assert isinstance(value, LazyTensor) and not value.collective
        module: Any = model.get_submodule(fqn)
        w, a, b = (live[f"{fqn}.{n}"].detach().double() for n in ("weight", "lora_a.weight", "lora_b.weight"))
        ideal = w + module.adapter.scaling * (b @ a)
        if settings.get("use_dora"):
            ideal *= (live[f"{fqn}.lora_magnitude.weight"].double() / ideal.norm(dim=1))[:, None]
        error = (next(iter(blocks_of(value))).data.double() - ideal).abs()
        half_step = torch.finfo(dtype).eps / 2 * ideal.abs()
        assert bool((error <= half_step * (1.001 if dtype == torch.bfloat16 else 1) + 3e-7).all())


@pytest.mark.parametrize("use_dora", [False, True])
def test_a_bias_is_neither_scaled_nor_lost(use_dora: bool) -> None:
    """An adapter changes the weight; DoRA's lengths are those of weight rows, whatever is added after the product."""
    model = nn.ModuleDict({"up": nn.Linear(8, 6)})
    converters = converted(model, "up", use_dora=use_dora)
    randomise(model, converters)
    weight = resolved(ModelWrapper([model], converters).state_dict("export"))["up.weight"]
    x = torch.randn(5, 8)
    up: Any = model["up"]
    torch.testing.assert_close(up(x), F.linear(x, weight, up.bias))
    others = {name: 2 * value.detach() for name, value in up.named_parameters()}  # tensors that are no parameters
    expected = torch.func.functional_call(up, {name: nn.Parameter(value) for name, value in others.items()}, (x,))
    assert torch.equal(torch.func.functional_call(up, others, (x,)), expected)


def test_merged_model_computes_what_the_adapted_one_does() -> None:
    """Adapters on every kind of module, with patterns and DoRA off, merge into the same logits."""
    model = llama()
    converters = converted(model, "wq", "wk", "wv", "wo", "w1", "w2", "w3", "output", "tok_embeddings")
    randomise(model, converters, 0.05)
    merged = llama()
    merged.load_state_dict(resolved(ModelWrapper([model], converters).state_dict("export")))
    torch.testing.assert_close(merged(TOKENS), model.eval()(TOKENS), rtol=0, atol=1e-5)
    assert not torch.equal(llama()(TOKENS), merged(TOKENS))


def test_trained_modules_are_copies_that_the_export_puts_in_place() -> None:
    """modules_to_save trains a copy; base mode has the untouched base, the export the trained values in its dtype."""
    model = llama().to(torch.bfloat16)
    before = model.get_parameter("norm.weight").detach().clone()
    converters = converted(model, "wq", modules_to_save=("norm", "output"))
    assert converters.key_filter("norm.trained.weight")
    parameter = model.get_parameter("norm.trained.weight")
    assert parameter.dtype == torch.float32 and parameter.requires_grad
    with torch.no_grad():
        parameter.fill_(3.0)
    model(TOKENS).float().sum().backward()
    assert parameter.grad is not None and model.get_parameter("norm.weight").grad is None
    wrapper = ModelWrapper([model], converters)
    assert torch.equal(wrapper.state_dict("base")["norm.weight"], before)
    exported = next(iter(blocks_of(wrapper.state_dict("export")["norm.weight"]))).data
    assert exported.dtype == torch.bfloat16 and bool((exported == 3.0).all())


def test_magnitudes_and_copies_take_over_a_base_that_comes_later() -> None:
    """Converted before the base is loaded, they are the loaded base's after `initialize` with what was not loaded."""
    model = llama()
    converters = converted(model, "wq", use_dora=True, modules_to_save=("norm",))
    loaded = torch.randn(64, 64)
    with torch.no_grad():
        model.get_parameter("layers.0.attention.wq.weight").copy_(loaded)
        model.get_parameter("norm.weight").fill_(2.0)
        trained = model.get_parameter("layers.1.attention.wq.lora_magnitude.weight").fill_(7.0)
    converters.initialize([model], ["layers.0.attention.wq.lora_magnitude.weight", "norm.trained.weight"])
    assert torch.equal(model.get_parameter("layers.0.attention.wq.lora_magnitude.weight"), loaded.norm(dim=1))
    assert bool((model.get_parameter("norm.trained.weight") == 2.0).all())
    assert bool((trained == 7.0).all())


def test_an_adapter_without_effect_is_not_exported() -> None:
    """B at zero everywhere means nothing was trained or loaded: the export would be the base under another name."""
    model = llama()
    converters = converted(model)
    with pytest.raises(ExportError, match="none of the 4 adapters has any effect"):
        ModelWrapper([model], converters).state_dict("export")
    with torch.no_grad():
        model.get_parameter("layers.1.attention.wv.lora_b.weight")[3, 1] = 1e-3
    ModelWrapper([model], converters).state_dict("export")


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["layers.1.attention.wv.lora_a.weight", "norm.trained.weight"])
def test_broken_values_are_named_and_not_exported(value: float, name: str) -> None:
    """NaN or infinity in an adapter, or in a module that is trained in full, names its tensor."""
    model = llama()
    converters = converted(model, modules_to_save=("norm",))
    randomise(model, converters)
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] = value
    with pytest.raises(ExportError, match=rf"1 adapter tensor\(s\) .* {re.escape(name)}"):
        ModelWrapper([model], converters).state_dict("export")


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.lm_head = nn.Linear(8, 16, bias=False)
        self.lm_head.weight = self.embed.weight


@pytest.mark.parametrize(("model", "target"), [(TiedHead(), "lm_head"), (llama(tied=True), "tok_embeddings")])
def test_merging_into_a_shared_weight_is_refused(
    model: nn.Module, target: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A merge would change the other module too; training is allowed, with a warning, and the adapter can be saved."""
    with caplog.at_level("WARNING"):
        converters = converted(model, target)
    assert f"{target} shares its weight" in caplog.text
    randomise(model, converters)
    wrapper = ModelWrapper([model], converters)
    assert len(wrapper.owned_state_dict()) == 2
    with pytest.raises(ExportError, match=f"{target} shares its weight with another module"):
        wrapper.state_dict("export")
    copied = llama(tied=True)
    converters = converted(copied, "wq", modules_to_save=("tok_embeddings",))
    with pytest.raises(ExportError, match="tok_embeddings shares its weight with another module"):
        ModelWrapper([copied], converters).state_dict("export")


def test_what_cannot_be_adapted_is_listed() -> None:
    """Ranks that do not fit, DoRA on embeddings and double use are all found at once, before anything is changed."""
    model = llama()
    names = list(model.state_dict())
    with pytest.raises(ConverterError) as caught:
        converted(
            model, "wq", "w1", "tok_embeddings",
            use_dora=True, rank_pattern={"w1": 65, "w9": 2}, modules_to_save=("w1",),
        )  # fmt: skip
    for fault in (
        "layers.0.feed_forward.w1: rank 65 is more than its [128, 64] can hold",
        "tok_embeddings: DoRA is for linear modules; leave this embedding out",
        "layers.0.feed_forward.w1: is in target_modules and in modules_to_save",
        "rank_pattern: 'w9' matches none of the adapted weights",
    ):
        assert fault in str(caught.value)
    assert list(model.state_dict()) == names and all(p.requires_grad for p in model.parameters())


def test_a_second_adapter_on_a_module_is_refused() -> None:
    """A model that is adapted already is not adapted again."""
    model = llama()
    converted(model)
    with pytest.raises(ConverterError, match="wq: has an adapter already"):
        LoRAConverter(LoRAConfig(("wq",), rank=2)).convert(model)


def test_dropout_under_quantization_is_refused() -> None:
    """A merged weight that is quantized has no adapter input to drop from."""
    converters = from_tables(
        [{"kind": "qat", "scheme": "int8_weight_only"}, {"kind": "lora", "target_modules": ["wq"], "dropout": 0.1}]
    )
    with pytest.raises(ConverterError, match="set dropout = 0"):
        converters.convert(llama())


def test_dropout_acts_while_training_only() -> None:
    """In eval mode dropout does nothing; in training it changes the adapter's share."""
    model = llama()
    converters = converted(model, dropout=0.5)
    randomise(model, converters)
    assert not torch.equal(model.train()(TOKENS), model(TOKENS))
    assert torch.equal(model.eval()(TOKENS), model(TOKENS))


def test_stages_cut_from_a_copy_are_merged_stage_by_stage() -> None:
    """Pipeline stages are cut from copies of the converted model: what a stage holds, it merges, by names alone."""
    model = llama()
    converters = converted(model, "wq", "output", modules_to_save=("norm",))
    randomise(model, converters)
    whole = resolved(ModelWrapper([model], converters).state_dict("export"))
    first, last = copy.deepcopy(model), copy.deepcopy(model)
    del first.layers["1"], last.layers["0"]
    first.norm = first.output = last.tok_embeddings = None
    parts = [resolved(ModelWrapper([part], converters).state_dict("export")) for part in (first, last)]
    assert sorted([*parts[0], *parts[1]]) == sorted(whole)
    assert all(torch.equal(value, whole[fqn]) for part in parts for fqn, value in part.items())


def test_wrapped_and_compiled_models_keep_their_names() -> None:
    """Activation checkpointing and torch.compile put segments into names; hooks and initial values see through them."""
    model = llama()
    converters = converted(model, "wq", use_dora=True)
    randomise(model, converters)
    expected = resolved(ModelWrapper([model], converters).state_dict("export"))
    out = model(TOKENS)
    for name in list(model.layers):
        model.layers[name] = checkpoint_wrapper(model.layers[name])
    compiled: Any = torch.compile(model, backend="eager")
    wrapper = ModelWrapper([compiled], converters)
    assert any("_checkpoint_wrapped_module" in name for name, _ in compiled.named_modules())
    assert torch.equal(compiled(TOKENS), out)
    export = resolved(wrapper.state_dict("export"))
    assert list(export) == list(expected) and all(torch.equal(export[fqn], expected[fqn]) for fqn in export)
    converters.initialize([compiled])
    assert not any(wrapper.owned_state_dict()[f"layers.{i}.attention.wq.lora_b.weight"].any() for i in range(2))


# names in other tools' files


def test_peft_config_says_everything() -> None:
    """adapter_config.json names every field that a reader would otherwise fill with a default of its own."""
    model = llama()
    converters = converted(
        model, "wq", "wv", alpha=8.0, use_rslora=True, rank_pattern={"layers.0.*.wq": 2}, alpha_pattern={"wv": 3.5}
    )
    adapter = converters.state_dict_adapter()
    assert adapter is not None
    first, second = (f"model.layers.{i}.self_attn.v_proj" for i in (0, 1))
    assert adapter.file_config(model.key_map()) == {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"],
        "lora_dropout": 0.0, "bias": "none", "use_rslora": True, "use_dora": False, "fan_in_fan_out": False,
        "inference_mode": True, "rank_pattern": {"model.layers.0.self_attn.q_proj": 2},
        "alpha_pattern": {first: 3.5, second: 3.5}, "modules_to_save": None,
    }  # fmt: skip


def test_what_a_peft_config_leaves_out_is_pefts_default() -> None:
    """A rank and an alpha that are not there are 8, for PEFT and here."""
    model = llama()
    for settings, lines in (({"rank": 8, "alpha": 8.0}, 0), ({"rank": 8, "alpha": 4.0}, 1), ({"alpha": 4.0}, 1)):
        adapter = converted(llama(), "wq", **settings).state_dict_adapter()
        assert adapter is not None
        assert len(adapter.misfits(model.key_map(), {"peft_type": "LORA", "target_modules": ["q_proj"]})) == lines


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(3, 6, 4))


def test_factors_change_places_where_the_file_has_experts_transposed() -> None:
    """(B A)^T is A^T B^T: what is A here is B in files of the transposed weight, and the other way round."""
    converters = converted(model := nn.ModuleDict({"experts": Experts()}), "experts.down", rank=2)
    files = [f"experts.{i}.down.weight" for i in range(3)]
    table = KeyMap((KeyRule.of("experts.down", files, Unstack(3, transpose=True)),))
    adapter = converters.state_dict_adapter()
    assert adapter is not None
    randomise(model, converters)
    tensors = ModelWrapper([model], converters).owned_state_dict()
    groups = StateDictTransforms(table).to_file(tensors, converters, None)
    pieces = {p.key: p.data for group in groups for i, block in group.blocks() for p in group.cut(i, block)}
    merged = resolved(ModelWrapper([model], converters).state_dict("export"))["experts.down"]
    names = (f"base_model.model.experts.1.down.lora_{factor}.weight" for factor in "BA")
    left, right = (pieces[name].reshape(-1, 2) if "_B" in name else pieces[name].reshape(2, -1) for name in names)
    delta = (left @ right) * 8.0
    torch.testing.assert_close(model.get_parameter("experts.down")[1].t() + delta, merged[1].t())


@pytest.mark.parametrize("op", [Unstack(32), Chain(Unstack(2), Split((8, 8)))])
def test_weights_stored_in_pieces_have_no_adapter_name(op: Unstack | Chain) -> None:
    """Where another tool cuts the weight up, a low-rank pair cannot follow: an error, and not wrong logits."""
    files = [f"part.{i}.weight" for i in range(op.num_file)]
    adapter = converted(nn.ModuleDict({"wq": nn.Linear(8, 32)}), "wq").state_dict_adapter()
    assert adapter is not None
    with pytest.raises(KeyMapError, match=r"wq: stored as part\.0\.weight, part\.1\.weight.* cannot follow"):
        adapter.key_map(KeyMap((KeyRule.of("wq.weight", files, op),)))


WIDTH, LAYERS = 2048, 8


@pytest.mark.parametrize(("dtype", "dora"), [(torch.float32, False), (torch.bfloat16, True)], ids=["lora", "dora"])
def test_a_merge_takes_the_memory_of_one_tensor(dtype: torch.dtype, dora: bool) -> None:
    """The peak while a model is merged and dropped is one weight above it, and 4 MiB for float32 values of parts."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(LAYERS)))
    converters = build([LoRAConfig(tuple(str(i) for i in range(LAYERS)), rank=4, use_dora=dora)])
    converters.convert(model)
    for name, parameter in model.named_parameters():
        if "lora_b" in name:
            nn.init.normal_(parameter)
    wrapper = ModelWrapper([model], converters)

    def export() -> None:
        for value in wrapper.state_dict("export").values():
            for block in blocks_of(value):
                assert block.data.shape == (WIDTH, WIDTH)
                del block  # as a writer does before it asks for the next

    peak, _ = memory_of(export, before=export)
    assert peak - WIDTH * WIDTH * dtype.itemsize < 4 << 20
