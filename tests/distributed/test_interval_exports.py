"""Exports of intervals: made in the background of what a save has staged, while the weights change under it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.faults.shim import Counter, intercepted
from tests.world import adamw, contents, llama, names_in, step_on, write_hf
from tests.world import manager as build
from titan_ckpt import CheckpointManager, ExportConfig, StateDictTransforms
from titan_ckpt.config import InitialLoadConfig
from titan_ckpt.converters import from_tables
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import ExportError
from titan_ckpt.formats.dcp.dcp import DcpReader
from titan_ckpt.geometry.chunks import Block
from titan_ckpt.geometry.keymap import Identity, KeyMap, KeyRule
from titan_ckpt.models.llama3 import FLAVORS, Llama3
from titan_ckpt.testing import distributed

Mode = Literal["disabled", "thread", "process"]
CONFIG = replace(
    FLAVORS["debug-0.5m"], vocab_size=64, num_layers=1, dim=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=64,
    max_seq_len=16, tie_embeddings=False,
)  # fmt: skip
HF_CONFIG = {"model_type": "x", "architectures": ["X"]}
QAT = {"kind": "qat", "scheme": "int4_weight_only"}
LORA = {"kind": "lora", "rank": 2, "target_modules": ["wq", "wk", "wo", "w2"]}


class Gate(Identity):
    """Lets an export in another thread wait until the weights it is of have changed."""

    def __init__(self) -> None:
        self.changed = threading.Event()
        self.threads: set[str] = set()

    def pieces(self, *arguments: Any) -> Iterator[Block]:
        name = threading.current_thread().name
        self.threads.add(name)
        if name.startswith("titan_ckpt export"):
            assert self.changed.wait(60)
        yield from super().pieces(*arguments)


def linear(gate: Gate, folder: Path, mode: Mode, *exports: ExportConfig) -> tuple[nn.Linear, CheckpointManager]:
    model = nn.Linear(300, 200)
    table = KeyMap(tuple(KeyRule.of(name, f"model.{name}", gate) for name in ("weight", "bias")))
    transforms = StateDictTransforms(table, HF_CONFIG)
    return model, build(folder, model, interval=2, async_mode=mode, export=exports, sd_transforms=transforms)


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_f6_training_goes_on_while_the_staged_copy_is_exported(tmp_path: Path, mode: Mode) -> None:
    """The export waits for weights that change after the save was called, and holds those of before."""
    gate = Gate()
    model, manager = linear(gate, tmp_path, mode, ExportConfig("hf", interval=4, dtype="bfloat16"))
    with manager:
        manager.load()
        for step in range(1, 6):
            with torch.no_grad():
                model.weight.fill_(step), model.bias.fill_(-step)
            manager.save(step)
            manager.maybe_wait_for_staging()
            if step == 4:
                expected = {f"model.{fqn}": value.clone().bfloat16() for fqn, value in model.state_dict().items()}
                with torch.no_grad():
                    model.weight.zero_(), model.bias.zero_()
                gate.changed.set()
    assert gate.threads == {"titan_ckpt export 4"}
    assert [p.name for p in (tmp_path / "exports").iterdir()] == ["step-4"]
    write_hf(tmp_path / "same", expected, config=HF_CONFIG)
    assert contents(tmp_path / "exports" / "step-4") == contents(tmp_path / "same")


def test_f6_a_failed_export_is_raised_once_and_its_step_is_committed(tmp_path: Path) -> None:
    """A file in the way of the exports: the step is there, the next wait raises, and close does not again."""
    gate = Gate()
    gate.changed.set()
    exports = ExportConfig("hf", interval=2), ExportConfig("dcp", interval=2, folder="dcp")
    _, manager = linear(gate, tmp_path, "thread", *exports)
    with manager:
        manager.load()
        (tmp_path / "exports").write_text("in the way")
        manager.save(2)
        with pytest.raises(ExportError, match="nothing was published"):
            manager.wait()
        assert (tmp_path / "checkpoints" / "step-2" / "MANIFEST.json").exists()
        assert (tmp_path / "dcp" / "step-2").exists(), "the other export was made"
        (tmp_path / "exports").unlink()
        assert not manager.save(2), "it is saved already"
        manager.wait()
        assert (tmp_path / "exports" / "step-2").exists(), "what was owed was made, of the copy that is still there"
        (tmp_path / "exports" / "step-4").write_text("in the way")
        manager.save(4)
        with pytest.raises(ExportError, match="there already"):
            manager.save(6)
    assert (tmp_path / "checkpoints" / "step-6" / "MANIFEST.json").exists(), "the error of one costs no other"


def test_only_the_newest_interval_exports_are_kept(tmp_path: Path) -> None:
    """keep = 2 of the exports up to this step; other names, other steps and later ones stay."""
    gate = Gate()
    gate.changed.set()
    exports = tmp_path / "exports"
    others = ["step-2-backup", "step-02", "step-3", "step-20", "step-2-peft", "notes"]
    for name in others:
        (exports / name).mkdir(parents=True)
    (exports / "step-0").write_text("a file")
    _, manager = linear(gate, tmp_path, "thread", ExportConfig("hf", interval=2, keep=2))
    with manager:
        manager.load()
        for step in range(1, 8):
            manager.save(step)
        manager.save(8, last_step=True)
    assert names_in(exports) == sorted([*others, "step-0", "step-6", "step-8"])


def lora_run(
    folder: Path, base: Path, mode: Mode, tables: Sequence[dict[str, Any]], include_base: bool, other: ExportConfig
) -> None:
    """Two steps with exports of each, merged and in another form; sharded over all ranks."""
    converters = from_tables(list(tables))
    model = llama(CONFIG, converters=converters)
    if dist.is_initialized():
        for layer in model.layers.values():
            fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = adamw(model)
    settings: dict[str, Any] = {"async_mode": mode, "include_base": include_base, "model_converters": converters}
    settings |= {"initial_load": (InitialLoadConfig(str(base), cast=True),)}
    exports = (ExportConfig("hf", interval=1, dtype="original"), other)
    with build(folder, model, optimizer, export=exports, **settings) as manager:
        manager.load()
        for step in (1, 2):
            step_on(model, optimizer, torch.arange(16)[None] * step % 64)
            manager.save(step)


PEFT = ExportConfig("peft", interval=1)
INT4 = ExportConfig("hf_quantized", interval=1)


def same_in_the_background(
    root: Path, tables: Sequence[dict[str, Any]], include_base: bool = False, other: ExportConfig = PEFT
) -> None:
    """Compare all exports of a run that makes them at once with those of runs that make them in the background.

    The base has norms in float32 and the rest in bfloat16, and so has an export of it.
    """
    model = llama(CONFIG, 1)
    keys = [key for fqn in model.state_dict() for key in model.key_map().group_of_fqn(fqn).keys]
    dtypes = {key: torch.float32 if "norm" in key else torch.bfloat16 for key in keys}
    write_hf(root / "base", dict(model.state_dict()), model.key_map(), dtype=dtypes, config=model.hf_config())
    lora_run(root / "disabled", root / "base", "disabled", tables, include_base, other)
    lora_run(root / "thread", root / "base", "thread", tables, include_base, other)
    Coordinator.current(60.0).barrier("compared")
    expected, found = contents(root / "disabled" / "exports"), contents(root / "thread" / "exports")
    suffix = "-quantized" if other.quantized else "-peft"
    assert {name.split("/")[0] for name in found} == {f"step-{n}{s}" for n in (1, 2) for s in ("", suffix)}
    assert expected.keys() == found.keys()
    assert [name for name in found if found[name] != expected[name]] == []
    assert found["step-1/model.safetensors"] != found["step-2/model.safetensors"]
    stored = load(found["step-1/model.safetensors"])
    assert {key: value.dtype for key, value in stored.items()} == dtypes


def test_f1_merged_adapters_are_exported_in_the_background(tmp_path: Path) -> None:
    """On one process: LoRA and trained copies, from saves of the adapter alone; and merged weights as int4."""
    same_in_the_background(tmp_path / "lora", [{**LORA, "modules_to_save": ["norm"]}])
    same_in_the_background(tmp_path / "int4", [QAT, LORA], other=INT4)


@distributed(nproc=2)
def test_f6_sharded_adapters_are_exported_in_the_background(tmp_path: Path) -> None:
    """Merging gathers the adapters before training goes on: DoRA, LoRA with saves of the base too, and int4."""
    same_in_the_background(tmp_path / "dora", [{**LORA, "use_dora": True, "modules_to_save": ["norm"]}])
    same_in_the_background(tmp_path / "full", [{"kind": "float8", "emulate": True}, LORA], include_base=True)
    same_in_the_background(tmp_path / "int4", [QAT, LORA], other=INT4)


def laid_out(layout: str) -> tuple[nn.Module, StateDictTransforms]:
    """This rank's part of the same model."""
    if layout == "replicas":  # large enough that its rows are shared out among them
        torch.manual_seed(2)
        return nn.Linear(1024, 600), StateDictTransforms(KeyMap(identity=True), HF_CONFIG)
    model = llama(CONFIG, 2)
    if layout == "stages":
        for name in ("norm", "output") if dist.get_rank() == 0 else ("tok_embeddings", "layers"):
            setattr(model, name, None)
    elif layout == "tensor parallel":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        plan = {"attention.wq": ColwiseParallel(), "attention.wo": RowwiseParallel()}
        parallelize_module(model.layers["0"], mesh, plan)
    return model, StateDictTransforms(Llama3(CONFIG).key_map(), Llama3(CONFIG).hf_config())


@distributed(nproc=2)
def test_f6_every_layout_is_exported_from_what_it_staged(tmp_path: Path) -> None:
    """Replicas, each rank with a half of them staged, stages and tensor parallelism: what one process writes."""
    for layout in ("replicas", "stages", "tensor parallel"):
        model, transforms = laid_out(layout)
        exports = (ExportConfig("hf", interval=1), ExportConfig("dcp", interval=1, folder="dcp"))
        root = tmp_path / layout
        operations = Counter()
        with (
            intercepted(operations),
            build(root, model, sd_transforms=transforms, export=exports) as manager,
        ):
            manager.load()
            manager.save(1)
            manager.maybe_wait_for_staging()
            for parameter in model.parameters():
                (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().zero_()
        assert "map_shared" not in operations.names, "shards of columns were not put together"
        if dist.get_rank() == 0:
            whole, _ = laid_out(layout if layout == "replicas" else "whole")
            alone = Coordinator(0, 1, None, "", 60.0)
            about = dict(transforms.hf_config or {})
            write_hf(root / "one", dict(whole.state_dict()), transforms.key_map, config=about, line=alone)
            assert contents(root / "exports" / "step-1") == contents(root / "one"), layout
            with DcpReader(root / "dcp" / "step-1") as reader:
                for fqn, value in whole.state_dict().items():
                    assert torch.equal(reader.whole(fqn), value), (layout, fqn)
