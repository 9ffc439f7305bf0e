"""Queries, keys and values as one matrix: in transformers' Phi-3 and not here, here and not there, and in both."""

from __future__ import annotations

import json
import re
import uuid
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from transformers import AutoModelForCausalLM

import tests.memory_store  # noqa: F401 - it names the scheme
from tests import world
from tests.interop.folders import disturb, gap, theirs, tuned
from tests.world import assert_same_bytes
from titan_ckpt import CheckpointManager, ExportConfig, InitialLoadConfig
from titan_ckpt.converters.lora.fused import BlockDiagonal
from titan_ckpt.converters.lora.layers import LoRALinear
from titan_ckpt.converters.parallel import ConvertedParallel
from titan_ckpt.converters.stack import stack_adapters
from titan_ckpt.errors import ConverterError, KeyMapError, LoadMismatchError
from titan_ckpt.geometry.boxes import overlap
from titan_ckpt.geometry.chunks import Block, Chunk, chunks_at
from titan_ckpt.geometry.keymap import KeyMap, KeyRule, Split
from titan_ckpt.models import hf
from titan_ckpt.models.layers import Attention, rotate_halves
from titan_ckpt.models.qwen3 import Qwen3, Qwen3Config
from titan_ckpt.stores.objects import object_path
from titan_ckpt.stores.store import open_location
from titan_ckpt.testing import distributed

PAGE = Path(__file__).parents[2] / "docs" / "add-a-model.md"
SCOPE: dict[str, Any] = {"__name__": __name__}
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
exec(compile("\n".join(BLOCKS[:2]), PAGE.name, "exec"), SCOPE)

SHAPE: dict[str, Any] = {
    "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_dim": 48, "vocab_size": 96,
    "max_seq_len": 64,
}  # fmt: skip
PARTS = ["wq", "wk", "wv", "wo", "w1", "w3"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj"]


def phi3() -> Any:
    return SCOPE["Phi3"](SCOPE["Phi3Config"](**SHAPE)).eval()


def phi3_base(folder: Path) -> Any:
    return theirs(SCOPE["Phi3Config"](**SHAPE).to_hf(), folder)


def randomise(model: nn.Module, seed: int = 2) -> None:
    torch.manual_seed(seed)
    disturb(model, lambda name, _: "lora_" in name)


EXPORTS = (ExportConfig("peft"), ExportConfig("hf"))


def adapted(
    model: Any, folder: Path, *sources: Path, exports: tuple[ExportConfig, ...] = EXPORTS, **lora: Any
) -> CheckpointManager:
    """Return the manager of a model with adapters; its last step exports them, merged and apart."""
    converters = world.convert(model, {"kind": "lora", "rank": 4, "alpha": 8.0, "target_modules": PARTS, **lora})
    if dist.is_initialized():
        for layer in model.layers.children():
            fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return world.manager(folder, model, initial_load=sources, export=exports, model_converters=converters)


@distributed(nproc=2)
def export_shards(root: Path) -> None:
    model = phi3()
    world.finish(adapted(model, root / "shards", root / "base", root / "run/exports/step-1-peft", **MIXED))


MIXED: dict[str, Any] = {"rank_pattern": {"wk": 2, "w1": 3}, "alpha_pattern": {"wk": 4.0, "w1": 6.0}}


@pytest.mark.parametrize(
    ("lora", "ranks"),
    [
        (MIXED, [10, 7]),
        ({"use_dora": True}, [12, 8]),
        ({"use_rslora": True}, [12, 8]),
        ({"target_modules": ["wq", "wv", "w3"], "rank_pattern": {"w3": 2}, "alpha_pattern": {"w3": 4.0}}, [8, 2]),
    ],
    ids=["ranks", "dora", "rslora", "some"],
)
def test_pairs_of_parts_are_one_block_diagonal_pair_in_peft(
    lora: dict[str, Any], ranks: list[int], tmp_path: Path
) -> None:
    """Different A's of q, k and v: their ranks add up, PEFT gives our logits, and the folder comes back bit for bit."""
    base = phi3_base(tmp_path / "base")
    model = phi3()
    with adapted(model, tmp_path / "run", tmp_path / "base", **lora) as manager:
        manager.load()
        randomise(model)
        manager.save(1, last_step=True)
    folder = tmp_path / "run/exports/step-1-peft"
    assert gap(model, base) > 1e-2
    assert gap(AutoModelForCausalLM.from_pretrained(tmp_path / "run/exports/step-1"), model) <= 1e-5
    assert gap(PeftModel.from_pretrained(base, str(folder)).eval(), model) <= 1e-5
    config = json.loads((folder / "adapter_config.json").read_text())
    modules = ("model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.gate_up_proj")
    assert [config["rank_pattern"][name] for name in modules] == ranks
    other = phi3()
    world.load(adapted(other, tmp_path / "other", tmp_path / "base", folder, **lora))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    if lora is MIXED:
        export_shards(tmp_path)
        for name in ("step-1", "step-1-peft"):
            assert_same_bytes(tmp_path / "run/exports" / name, tmp_path / "shards/exports" / name)


def test_a_block_diagonal_pair_in_a_bucket_is_that_of_a_folder(tmp_path: Path) -> None:
    """The zeros around its blocks are uploaded, also those of the parts that have no pair."""
    phi3_base(tmp_path / "base")
    model, place = phi3(), open_location(f"ram://box/{uuid.uuid4().hex}")
    converters = world.convert(model, {"kind": "lora", "rank": 4, "target_modules": ["wk", "w1"]})
    given: dict[str, Any] = {
        "initial_load": [tmp_path / "base"],
        "export": (ExportConfig("peft"), ExportConfig("peft", folder=str(place))),
        "model_converters": converters,
        "timeout_seconds": 600.0,
    }
    with world.manager(tmp_path / "run", model, **given) as manager:
        manager.load()
        randomise(model)
        manager.save(1, last_step=True)
    name = "step-1-peft/adapter_model.safetensors"
    assert object_path(place / name).read() == (tmp_path / "run/exports" / name).read_bytes()


@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        (BlockDiagonal((4, 6), (2, 3)), [(4, 2), (6, 3)]),
        (BlockDiagonal((5, 4, 3, 6), (0, 2, 0, 1)), [(4, 2), (6, 1)]),
        (BlockDiagonal((3, 4, 2), (0, 2, 0)), [(4, 2)]),
    ],
)
def test_blocks_and_zeros_of_any_chunks_make_up_the_matrix(op: BlockDiagonal, shapes: list[tuple[int, int]]) -> None:
    """Each element once: of shards of rows, of columns, and of both."""
    for rows, columns in ((1, 1), (3, 1), (1, 2), (2, 2)):
        parts: list[Chunk] = []
        for index, shape in enumerate(shapes):
            for part in boxes_of(shape, rows, columns):
                block = torch.ones(part.sizes)
                parts += [piece.chunk for piece in op.pieces(index, shapes, Block(part, block), "x")]
                parts += [region for _, region in op.zeros(index, part)]
        (whole,) = op.file_shapes(shapes)
        assert sum(part.numel for part in parts) == Chunk.whole(whole).numel
        assert overlap(parts) is None


def boxes_of(shape: tuple[int, int], rows: int, columns: int) -> list[Chunk]:
    """Return the chunks of a mesh of so many ranks along each dim."""
    places = product(range(rows), range(columns))
    return [c for at in places for c, _ in chunks_at(shape, (Shard(0), Shard(1)), (rows, columns), at) if c.numel]


@pytest.mark.parametrize("lora", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_one_pair_of_peft_gives_every_part_its_own_copy(lora: dict[str, Any], tmp_path: Path) -> None:
    """A goes to q, k and v, B's rows to each; the logits are PEFT's, as are those of the base it is merged into."""
    adapted_there = tuned(phi3_base(tmp_path / "base"), tmp_path / "adapter", *FUSED, **lora)
    model = phi3()
    assert not world.load(
        adapted(model, tmp_path / "run", tmp_path / "base", tmp_path / "adapter", **lora)
    ).report.initialized
    assert gap(model, adapted_there) <= 1e-5
    attention = model.layers["0"].attention
    assert torch.equal(attention.wq.lora_a.weight, attention.wv.lora_a.weight)
    merged = phi3()
    sources = [tmp_path / "base", InitialLoadConfig(str(tmp_path / "adapter"), load="merge")]
    world.load(world.manager(tmp_path / "m", merged, initial_load=sources))
    assert gap(merged, adapted_there) <= 1e-5


def test_what_one_pair_cannot_be_is_refused(tmp_path: Path) -> None:
    """DoRA of some parts, other scales, a pair that would have to be cut: named before training."""
    base = phi3_base(tmp_path / "base")
    tuned(base, tmp_path / "adapter", *FUSED, r=12, lora_alpha=24)
    cases: list[tuple[dict[str, Any], list[Path], type[Exception], str]] = [
        ({"target_modules": ["wq", "wv"], "use_dora": True}, [], KeyMapError, "adapt layers.0.attention.wk.weight as"),
        (
            {"target_modules": ["wq", "wo"], "rank": 12, "alpha": 24.0},
            [tmp_path / "adapter"],
            LoadMismatchError,
            "qkv_proj: rank 12 scaled by 2, expected rank 12 scaled by 2 of layers.0.attention.wq alone",
        ),
        ({"alpha_pattern": {"wk": 2.0}}, [], KeyMapError, r"one scale, and here .*wq by 2, .*wk by 0\.5"),
        ({}, [tmp_path / "adapter"], LoadMismatchError, "qkv_proj: rank 12 scaled by 2, expected rank 4 scaled by 2"),
    ]
    for lora, sources, kind, fault in cases:
        with pytest.raises(kind, match=fault):
            adapted(phi3(), tmp_path / "run", tmp_path / "base", *sources, **lora).load()


def test_other_scales_of_parts_matter_to_peft_alone(tmp_path: Path) -> None:
    """A run that reads and writes no adapter folder needs no name for its pairs: it trains, resumes and is merged."""
    phi3_base(tmp_path / "base")
    scales: dict[str, Any] = {"alpha_pattern": {"wk": 2.0}}
    model = phi3()
    exports = (ExportConfig("hf"),)
    with adapted(model, tmp_path / "run", tmp_path / "base", exports=exports, **scales) as manager:
        assert len(manager.load().report.initialized) == 2 * 2 * len(PARTS)
        randomise(model)
        manager.save(1, last_step=True)
    assert gap(AutoModelForCausalLM.from_pretrained(tmp_path / "run/exports/step-1"), model) <= 1e-5


def test_a_stack_of_block_diagonal_pairs_is_one(tmp_path: Path) -> None:
    """Two exports of ours, stacked: what both add, in PEFT, and here with their ranks added part by part."""
    base = phi3_base(tmp_path / "base")
    folders, added = [], []
    for i, ranks in enumerate(({"wk": 2}, {"wq": 3, "w1": 2})):
        scaled = {name: 2.0 * rank for name, rank in ranks.items()}  # a scale of 2, as the others have
        model = phi3()
        lora: dict[str, Any] = {"rank_pattern": ranks, "alpha_pattern": scaled}
        with adapted(model, tmp_path / f"run{i}", tmp_path / "base", **lora) as manager:
            manager.load()
            randomise(model, i)
            manager.save(1, last_step=True)
        folders.append(tmp_path / f"run{i}/exports/step-1-peft")
        merged = load_file(tmp_path / f"run{i}/exports/step-1/model.safetensors")
        added.append({key: value - base.state_dict()[key] for key, value in merged.items() if "_proj" in key})
    stack_adapters(folders, tmp_path / "stack")
    both = phi3()
    ranks = {"wq": 7, "wk": 6, "w1": 6}
    lora = {"rank": 8, "alpha": 16.0, "rank_pattern": ranks, "alpha_pattern": {n: 2.0 * r for n, r in ranks.items()}}
    with adapted(both, tmp_path / "both", tmp_path / "base", tmp_path / "stack", **lora) as manager:
        assert not manager.load().report.initialized
        manager.save(1, last_step=True)
    merged = load_file(tmp_path / "both/exports/step-1/model.safetensors")
    for key, value in added[0].items():
        torch.testing.assert_close(merged[key], base.state_dict()[key] + value + added[1][key], rtol=0, atol=1e-5)
    assert gap(PeftModel.from_pretrained(base, str(tmp_path / "stack")).eval(), both) <= 1e-5


def test_transformers_own_fused_matrix_has_one_pair(tmp_path: Path) -> None:
    """Trained under its own names, Phi-3's qkv_proj is adapted as PEFT adapts it: there and back, the same files."""
    adapted_there = tuned(phi3_base(tmp_path / "base"), tmp_path / "adapter", *FUSED)
    model: Any = hf.build(tmp_path / "base").eval()
    lora: dict[str, Any] = {"target_modules": FUSED}
    world.finish(adapted(model, tmp_path / "run", tmp_path / "base", tmp_path / "adapter", **lora))
    assert gap(model, adapted_there) <= 1e-5
    assert_same_bytes(tmp_path / "run/exports/step-1-peft", tmp_path / "adapter")


class FusedAttention(Attention):
    """One matrix for queries, keys and values."""

    def __init__(self, config: Qwen3Config) -> None:
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        super().__init__(config.dim, *heads, rotate_halves, qk_norm_eps=config.norm_eps)
        self.rows = [w.out_features for w in (self.wq, self.wk, self.wv)]
        self.wqkv = nn.Linear(config.dim, sum(self.rows), bias=False)
        del self.wq, self.wk, self.wv

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.wqkv(x).split(self.rows, -1))
        assert self.q_norm is not None and self.k_norm is not None
        q, k = (self.rotate(part, table[: x.shape[1]]) for part in (self.q_norm(q), self.k_norm(k)))
        result: torch.Tensor = self.wo(self.attend(q, k, v).flatten(-2))
        return result


class FusedQwen3(Qwen3):
    """A Qwen3 whose attention has one matrix where the folder has three."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        for layer in self.layers.values():
            layer.add_module("attention", FusedAttention(config))

    def key_map(self) -> KeyMap:
        c = self.config
        rows = (c.num_heads * c.head_dim, *(c.num_kv_heads * c.head_dim,) * 2)
        parts = [f"model.layers.{{i}}.self_attn.{name}_proj.weight" for name in "qkv"]
        mine = KeyRule.of("layers.{i}.attention.wqkv.weight", parts, Split(rows))
        return KeyMap((mine, *(rule for rule in super().key_map().rules if rule.file[0] not in parts)))


def fused_qwen3() -> FusedQwen3:
    return FusedQwen3(Qwen3Config(**{**SHAPE, "tie_embeddings": False}))


@pytest.mark.parametrize("lora", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_a_matrix_that_is_fused_here_alone_has_a_pair_per_part(lora: dict[str, Any], tmp_path: Path) -> None:
    """PEFT's three adapters of q, k and v, of other A's and lengths, go in and out bit for bit, and merge."""
    model = fused_qwen3().eval()
    base = theirs(model.hf_config(), tmp_path / "base")
    adapted_there = tuned(base, tmp_path / "adapter", "q_proj", "k_proj", "v_proj", **lora)
    targets = {"target_modules": ["wqkv"], **lora}
    world.finish(adapted(model, tmp_path / "run", tmp_path / "base", tmp_path / "adapter", **targets))
    assert gap(model, adapted_there) <= 1e-5
    assert gap(AutoModelForCausalLM.from_pretrained(tmp_path / "run/exports/step-1"), model) <= 1e-5
    assert_same_bytes(tmp_path / "run/exports/step-1-peft", tmp_path / "adapter")


def test_a_cut_across_the_parts_of_a_fused_weight_is_refused() -> None:
    """Tensor parallelism would give a rank some parts of the adapter whole and others not at all."""
    model = fused_qwen3()
    world.convert(model, {"kind": "lora", "target_modules": ["wqkv"], "rank": 2})
    (fused, *_) = [m for m in model.modules() if isinstance(m, LoRALinear) and m.adapter.rows]
    mesh: Any = None  # refused before it is looked at
    with pytest.raises(ConverterError, match="cut across the parts"):
        ConvertedParallel(ColwiseParallel())._apply(fused, mesh)
