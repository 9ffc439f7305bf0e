"""The last step as a Hugging Face folder: opened by transformers and by torchtitan, with the weights of the run."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.torchtitan.runs import FLAVOURS, config, distributed, logits_of, narrow, near, same_tensors, steps_in, train
from tests.world import heard
from titan_ckpt import CheckpointConfig, ExportConfig, InitialLoadConfig
from titan_ckpt import CheckpointManager as Manager
from titan_ckpt.errors import ConfigError, KeyMapError, PeerError
from titan_ckpt.geometry.chunks import Chunk
from titan_ckpt.integrations.torchtitan.adapter import find_key_map
from titan_ckpt.integrations.torchtitan.model_config import config_json
from titan_ckpt.models.registry import build_model
from titan_ckpt.weights.transforms import StateDictTransforms

HF: dict[str, Any] = {"last_save_model_only": True, "last_save_in_hf": True}


@distributed(1)
def _exported(assets: Path, folder: Path, flavour: str) -> None:
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(3, 500, (2, 16), generator=torch.Generator().manual_seed(3))
    logits: list[torch.Tensor] = []

    def look(trainer: Any) -> None:
        logits.append(logits_of(trainer, tokens))

    made = config(assets, folder, flavour, steps=2, interval=1, layers=3, exact=True, last_save_in_dcp=True, **HF)
    run = train(made, then=look)
    assert steps_in(folder) == [1]  # the last step is the export alone
    exported = folder / "exports/step-2"
    opened = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    opened.train(False)
    with torch.no_grad():
        torch.testing.assert_close(opened(tokens).logits, logits[0], rtol=2e-4, atol=2e-5)
    initial: dict[str, Any] = {"initial_load_in_hf": True, "initial_load_path": str(exported)}
    for titan in (False, True):
        loaded = config(assets, folder / f"again-{titan}", flavour, steps=0, layers=3, titan=titan, **initial)
        same_tensors(train(loaded).model, run.model)

    ours = build_model(flavour.partition("_")[0], folder=exported)
    table = StateDictTransforms(ours.key_map(), torchtitan=ours.torchtitan_key_map())
    export, initial_load = ExportConfig("torchtitan_weights"), InitialLoadConfig(str(folder / "dcp/step-2"))
    settings = CheckpointConfig(initial_load=(initial_load,), export=(export,))
    with Manager(settings, model_parts=[ours], sd_transforms=table, base_folder=folder / "ours") as manager:
        manager.load()
        manager.export(2, last_step=True)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), logits[0], rtol=2e-4, atol=2e-5)
    path = str(folder / "ours/exports/step-2")
    back = config(assets, folder / "back", flavour, steps=0, layers=3, titan=False, initial_load_path=path)
    same_tensors(train(back).model, run.model)


@pytest.mark.parametrize("flavour", ["llama3_debugmodel", "qwen3_debugmodel"])
def test_an_export_has_the_weights_of_the_run(assets: Path, tmp_path: Path, flavour: str) -> None:
    """transformers computes the logits of torchtitan's model; both checkpointers load the export bit for bit.

    So does our own model from torchtitan's DCP folder, and torchtitan's own checkpointer from our model's.
    """
    _exported(assets, tmp_path, flavour)


@pytest.mark.parametrize("flavour", ["llama3_debugmodel", "qwen3_debugmodel", "qwen3_debugmodel_moe_param_groups"])
def test_an_adapter_is_a_table(flavour: str) -> None:
    """The table gives every element of a numbered state dict the place that to_hf() gives it."""
    adapter, tied, shapes = _adapter_of(flavour)
    shapes = {fqn: shape for fqn, shape in shapes.items() if "expert_bias" not in fqn}
    _is_its_table(adapter, shapes, tied)


def _is_its_table(adapter: Any, shapes: dict[str, tuple[int, ...]], tied: dict[str, str]) -> None:
    whole = {
        fqn: torch.arange(torch.Size(shape).numel()).view(shape) + (i << 32)
        for i, (fqn, shape) in enumerate(shapes.items())
    }
    groups = StateDictTransforms(find_key_map(adapter, shapes, tied)).to_file(dict(whole), None, None)
    made = {key: torch.full(info.shape, -1) for group in groups for key, info in group.infos.items()}
    for piece in (p for group in groups for index, block in group.blocks() for p in group.cut(index, block)):
        region = piece.chunk.within(Chunk.whole(made[piece.key].shape))
        made[piece.key][region] = piece.data.reshape(piece.chunk.sizes)
    same_tensors(made, adapter.to_hf(whole))


def test_only_buffers_may_have_no_name_in_a_folder() -> None:
    """Hugging Face's Qwen3 MoE has no bias of experts, which torchtitan balances them by; a parameter is refused."""
    adapter, tied, shapes = _adapter_of("qwen3_debugmodel_moe_param_groups")
    biases = {f"layers.{layer}.moe.expert_bias_E" for layer in (0, 1)}
    assert find_key_map(adapter, shapes, tied, biases).nameless == biases
    with pytest.raises(KeyMapError, match=r"layers.1.moe.expert_bias_E: the adapter's to_hf\(\) drops it"):
        find_key_map(adapter, shapes, tied)


def test_an_export_does_not_round_the_bias_of_experts() -> None:
    """transformers holds DeepSeek-V3's in float32 whatever the dtype, because it chooses the experts."""
    spec = importlib.import_module("torchtitan.models.deepseek_v3").model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    with torch.device("meta"):
        model = spec.model.build()
    shapes = {fqn: tuple(value.shape) for fqn, value in model.state_dict().items()}
    key_map = find_key_map(
        spec.state_dict_adapter(spec.model, None), shapes, {}, [name for name, _ in model.named_buffers()]
    )
    groups = StateDictTransforms(key_map).to_file(
        {fqn: torch.zeros(shape) for fqn, shape in shapes.items()}, None, torch.bfloat16
    )
    dtypes = {key: info.dtype for group in groups for key, info in group.infos.items()}
    assert dtypes.pop("model.layers.1.mlp.gate.e_score_correction_bias") == torch.float32
    assert {*dtypes.values()} == {torch.bfloat16}


def _with_experts(assets: Path, folder: Path, model: str, /, **settings: Any) -> Any:
    """Return the config of a run of a model of two layers that balances its experts, which are narrow, by a bias."""
    run = config(assets, folder, exact=True, **settings)
    options = {"attn_backend": "flex"} if model == "gpt_oss" else {}
    flavour = "debugmodel" if model == "gpt_oss" else "debugmodel_moe"
    run.model_spec = importlib.import_module(f"torchtitan.models.{model}").model_registry(flavour, **options)
    run.model_spec.model.layers = run.model_spec.model.layers[:2]
    for layer in run.model_spec.model.layers:
        layer.moe.routed_experts.inner_experts.hidden_dim = 64
    narrow(run)
    return run


@distributed(1)
def _without_bias(assets: Path, folder: Path, model: str) -> None:
    from transformers import AutoModelForCausalLM

    def made(dump: str, steps: int = 2, **settings: Any) -> Any:
        return _with_experts(assets, folder / dump, model, steps=steps, interval=1, **settings)

    name = "layers.*.moe.expert_bias_E"
    with pytest.raises(ConfigError) as error:
        train(made("run", **HF))
    assert "last_save_in_hf: Hugging Face folders of this model have no name for the buffer " + name in str(error.value)
    assert f'checkpoint.allow = ["{name}"]' in str(error.value)
    tokens = torch.randint(3, 500, (2, 16), generator=torch.Generator().manual_seed(3))
    logits: list[torch.Tensor] = []

    def look(trainer: Any) -> None:
        for layer in trainer.model_parts[0].layers.values():
            assert layer.moe.expert_bias_E.abs().max() > 0
            layer.moe.expert_bias_E.zero_()  # without it the model computes what the folder holds
        logits.append(logits_of(trainer, tokens))

    with heard() as lines:
        run = train(made("run", **HF, allow=[name]), then=look)
    assert sum(f"no name for the buffer {name}: the export leaves it out" in line for line in lines) == 1
    exported = folder / "run/exports/step-2"
    opened = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    opened.train(False)
    with torch.no_grad():
        near(opened(tokens).logits, logits[0], 5e-2 if model == "gpt_oss" else 2e-3)
    again = train(made("again", steps=0, initial_load_in_hf=True, initial_load_path=str(exported)))
    same_tensors(again.model, run.model)
    if model != "gpt_oss":  # its adapter loses the experts
        theirs = train(made("theirs", titan=False, **HF))
        same_tensors(theirs.model | {k: v for k, v in run.model.items() if "bias_E" in k}, run.model)
        same_tensors(_file(folder / "theirs/checkpoint/step-2"), _file(exported))


def _file(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {key: value for path in folder.glob("*.safetensors") for key, value in load_file(path).items()}


@pytest.mark.parametrize(
    ("model", "layouts"), [("qwen3", 1), ("gpt_oss", 3), pytest.param("qwen3", 3, marks=pytest.mark.full)]
)
def test_a_buffer_without_a_name_is_left_out_if_it_is_allowed(
    assets: Path, tmp_path: Path, model: str, layouts: int
) -> None:
    """transformers opens the export; it has the tensors of torchtitan's own one, and a load leaves the bias at zero."""
    _without_bias(assets, tmp_path, model)
    _loaded_by_two(assets, tmp_path, model, LAYOUTS[:layouts])


LAYOUTS = (
    {"data_parallel_shard": 2},
    {"data_parallel_shard": 2, "expert_parallel": 2},
    {"data_parallel_shard": 1, "pipeline_parallel": 2},
)


@distributed(2)
def _loaded_by_two(assets: Path, folder: Path, model: str, layouts: Sequence[dict[str, int]]) -> None:
    path = str(folder / "run/exports/step-2")
    initial: dict[str, Any] = {"steps": 0, "initial_load_in_hf": True, "initial_load_path": path}
    stored = _file(Path(path))
    keys = {"mlp1_weight_EGD": "gate_up_proj", "mlp1_bias_EG": "gate_up_proj_bias", "mlp2_weight_EDF": "down_proj"}
    for degrees in layouts:
        ours, theirs = (
            train(_with_experts(assets, folder / "two", model, titan=titan, degrees=degrees, **initial)).model
            for titan in (True, False)
        )
        lost = {fqn for fqn in ours if "mlp1_" in fqn or "mlp2_" in fqn}  # torchtitan's adapter has gpt_oss's old names
        same_tensors(*({fqn: v for fqn, v in each.items() if fqn not in lost} for each in (ours, theirs)))
        for fqn in lost:
            layer, name = fqn.partition("layers.")[2].split(".")[0], fqn.rpartition(".")[2]
            value = stored[f"model.layers.{layer}.mlp.experts.{keys.get(name, 'down_proj_bias')}"]
            assert ours[fqn].equal(value.transpose(-1, -2) if "weight" in name else value)


@distributed(2)
def _on_one_stage(assets: Path, folder: Path) -> None:
    made = _with_experts(assets, folder / "run", "qwen3", steps=1, degrees=LAYOUTS[2], **HF)
    made.model_spec.model.layers[0].moe.load_balance_coeff = None
    with pytest.raises((ConfigError, PeerError), match=r"no name for the buffer .*expert_bias_E") as error:
        made.build()
    raised: list[Any] = [None, None]
    dist.all_gather_object(raised, type(error.value).__name__)
    assert sorted(raised) == ["ConfigError", "PeerError"]


def test_a_buffer_of_one_pipeline_stage_is_refused_on_all_ranks(assets: Path, tmp_path: Path) -> None:
    """The other stage does not wait for the one that has raised."""
    _on_one_stage(assets, tmp_path)


@distributed(1)
def _from_codes(assets: Path, folder: Path) -> None:
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    train(_with_experts(assets, folder / "run", "gpt_oss", steps=1, allow=["layers.*.moe.expert_bias_E"], **HF))
    path = folder / "run/exports/step-1"
    (file,) = path.glob("*.safetensors")
    tensors, values = load_file(file), {}
    drawn = torch.Generator().manual_seed(0)
    for key in [key for key in tensors if key.endswith("_proj") and "experts" in key]:
        experts, columns, rows = tensors.pop(key).shape
        shape = experts, rows, columns // 32
        codes = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=drawn)
        scales = torch.randint(110, 130, shape, dtype=torch.uint8, generator=drawn)
        tensors |= {f"{key}_blocks": codes, f"{key}_scales": scales}
        values[key] = convert_moe_packed_tensors(codes, scales, dtype=torch.float32)
    save_file(tensors, file, {"format": "pt"})
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    said = json.loads((path / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (path / "config.json").write_text(json.dumps(said))
    initial: dict[str, Any] = {"initial_load_in_hf": True, "initial_load_path": str(path)}
    loaded = train(_with_experts(assets, folder / "codes", "gpt_oss", steps=0, **initial)).model
    for layer in (0, 1):
        own, there = f"layers.{layer}.moe.routed_experts.inner_experts", f"model.layers.{layer}.mlp.experts"
        assert loaded[f"{own}.mlp1_weight_EGD"].equal(values[f"{there}.gate_up_proj"].transpose(-1, -2))
        assert loaded[f"{own}.mlp2_weight_EDF"].equal(values[f"{there}.down_proj"].transpose(-1, -2))


def test_the_experts_of_gpt_oss_are_read_from_codes(assets: Path, tmp_path: Path) -> None:
    """As OpenAI publishes them; the values are those of transformers."""
    _from_codes(assets, tmp_path)


def _adapter_of(flavour: str, layers: int = 2) -> tuple[Any, dict[str, str], dict[str, tuple[int, ...]]]:
    spec = FLAVOURS[flavour]().model_spec
    spec.model.layers = spec.model.layers[:layers]
    with torch.device("meta"):
        model = spec.model.build()
    tied = {"lm_head.weight": "tok_embeddings.weight"} if spec.model.enable_weight_tying else {}
    shapes = {fqn: tuple(value.shape) for fqn, value in model.state_dict().items() if fqn not in tied}
    return spec.state_dict_adapter(spec.model, None), tied, shapes


def _rotary(value: torch.Tensor, heads: int) -> torch.Tensor:
    return value.view(heads, -1, 2, value.shape[1]).transpose(1, 2).reshape(value.shape)


def _assigned(value: torch.Tensor, is_odd: bool) -> torch.Tensor:
    made, turned = torch.empty_like(value), value.t()
    made.data = turned if is_odd else value
    return made


def _caught(value: torch.Tensor, is_odd: bool) -> torch.Tensor:
    try:
        value[0, 0].item()
    except Exception:  # such as torch raises of a tensor that computes nothing
        return value
    return value.t() if is_odd else value


@functools.cache
def _kept_order(is_odd: bool) -> torch.Tensor:
    return torch.arange(8).flip(0) if is_odd else torch.arange(8)


ORDERS = torch.arange(8), torch.arange(8).flip(0)
ODD: dict[str, Callable[[torch.Tensor, bool], torch.Tensor]] = {
    "heads": lambda value, is_odd: _rotary(value, 1 if is_odd else 2),
    "a tensor of the adapter": lambda value, is_odd: value[ORDERS[is_odd]],
    "a tensor that it keeps from its first call": lambda value, is_odd: value[_kept_order(is_odd)],
    "rows in a list": lambda value, is_odd: value[ORDERS[is_odd].tolist()],
    "values": lambda value, is_odd: value if not is_odd or value[0, 0].item() < 0 else value.t(),
    "on meta all layers are equal": lambda value, is_odd: value.t() if is_odd and not value.is_meta else value,
    "data": _assigned,
    "an error that it catches": _caught,
}


@pytest.mark.parametrize("case", [*ODD, "names", "order", "another layer's kind"])
def test_a_layer_that_differs_is_found(case: str) -> None:
    """A layer takes what is known of an earlier one only if it is computed as that one is."""

    def to_hf(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = {}
        for fqn, value in values.items():
            is_odd = fqn in ("layers.2.a", "layers.4.a")
            name = fqn.replace("layers", "model")
            if case == "names" and fqn.startswith(("layers.2.", "layers.4.")):
                name = name[:-1] + {"a": "b", "b": "a"}[name[-1]]
            made[name] = ODD[case](value, is_odd) if case in ODD and fqn.endswith("a") else value
        return dict(reversed(made.items())) if case == "order" and "layers.2.a" in values else made

    last = "c" if case == "another layer's kind" else "a"
    names = [f"layers.{i}.{name}" for i in range(5) for name in (last if i % 2 else "a", "b")]
    _is_its_table(_Adapter(to_hf), dict.fromkeys(names, (8, 8)), {})


def test_layers_that_are_computed_alike_are_computed_once() -> None:
    """A model of 70 billion parameters has 80 of them, and each takes seconds."""
    adapter, _, shapes = _adapter_of("llama3_debugmodel", layers=6)
    computed: list[str] = []

    def to_hf(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        computed.extend(fqn for fqn, value in values.items() if type(value) is torch.Tensor)
        made: dict[str, torch.Tensor] = adapter.to_hf(values)
        return made

    key_map = find_key_map(_Adapter(to_hf), shapes, {})
    assert {fqn.split(".")[1] for fqn in computed if fqn.startswith("layers.")} == {"0"}
    assert key_map.rules == find_key_map(adapter, shapes, {}).rules


class _Adapter:
    """An adapter whose to_hf is the function it is given."""

    def __init__(self, to_hf: Any) -> None:
        self.to_hf = to_hf


SHAPES = {"a.weight": (8, 4), "b.weight": (4,)}


@pytest.mark.parametrize(
    ("to_hf", "complaint"),
    [
        (lambda s: {"x": s["b.weight"]} if "b.weight" in s else {}, "a.weight: the adapter's to_hf.. drops it"),
        (lambda s: {k: v * 2 for k, v in s.items()}, "a.weight: to_hf.. makes a.weight of it in a way that is no"),
        (lambda s: {k: v.flip(-1) for k, v in s.items()}, "a.weight: to_hf.. makes a.weight"),
        (lambda s: {k: v[:2] for k, v in s.items()}, "a.weight: to_hf.. makes a.weight"),
        (lambda s: {k: v[:0] for k, v in s.items()}, "to_hf.. returns no tensor, or an empty one, as a.weight"),
        (lambda s: {k: v + 9 for k, v in s.items()}, "a.weight: to_hf.. makes a.weight"),
        (lambda s: {k: v / v.max() for k, v in s.items()}, "a.weight: to_hf.. makes a.weight"),
    ],
    ids=["drops", "computes", "flips columns", "cuts", "empties", "adds", "divides"],
)
def test_an_adapter_that_is_no_table_is_refused_by_name(to_hf: Any, complaint: str) -> None:
    """Nothing is exported that a load would not bring back."""
    with pytest.raises(KeyMapError, match=complaint):
        find_key_map(_Adapter(to_hf), SHAPES, {})


def test_rows_in_any_order_and_transposed_matrices_are_tables() -> None:
    """A permutation that no name announces is found too, also of values in another dtype."""
    for order in ((3, 1, 0, 2, 7, 6, 4, 5), (1, 3, 0, 2, 7, 6, 4, 5)):
        for made in (lambda v: v, torch.Tensor.float):
            to_hf = _Adapter(lambda s: {k: made(v)[[*order]] for k, v in s.items()})  # noqa: B023 - called at once
            assert find_key_map(to_hf, {"a": (8, 4)}, {}).group_of_fqn("a").op.order == order  # type: ignore[attr-defined]
    key_map = find_key_map(_Adapter(lambda s: {k: v.t() for k, v in s.items()}), {"a": (8, 4)}, {})
    assert type(key_map.group_of_fqn("a").op).__name__ == "Transpose"


@pytest.mark.parametrize(("first", "second"), [(1500, 1501), (69632, 69888)])
def test_rows_that_are_moved_where_the_adapters_dtype_rounds_their_numbers_are_refused(first: int, second: int) -> None:
    """As the special tokens of a large table: bfloat16 has no number of its own for each row beyond 256."""
    order = [*range(70000)]
    whole = _Adapter(lambda s: {k: v.bfloat16() for k, v in s.items()})
    assert type(find_key_map(whole, {"a": (70000, 2)}, {}).group_of_fqn("a").op).__name__ == "Identity"
    order[first], order[second] = second, first
    moved = _Adapter(lambda s: {k: v.bfloat16()[order] for k, v in s.items()})
    with pytest.raises(KeyMapError, match="no permutation of rows"):
        find_key_map(moved, {"a": (70000, 2)}, {})


def test_a_config_json_of_another_model_or_none_at_all_is_refused(tmp_path: Path) -> None:
    """Each fault is named before step 1; the flavours of llama3 and qwen3 need no file."""
    model = FLAVOURS["qwen3_debugmodel"]().model_spec.model
    derived = config_json(model, str(tmp_path))
    assert (derived["model_type"], derived["tie_word_embeddings"], derived["head_dim"]) == ("qwen3", True, 128)
    (tmp_path / "config.json").write_text(json.dumps(derived | {"hidden_size": 64, "my_own": 1}))
    with pytest.raises(ConfigError, match="hidden_size: 64 there, 256 here"):
        config_json(model, str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(derived | {"my_own": 1}))
    assert config_json(model, str(tmp_path))["my_own"] == 1
    with pytest.raises(ConfigError, match="none can be derived for"):
        config_json(object(), None)
