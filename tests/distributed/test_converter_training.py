"""Every converter trains on two FSDP2 ranks, resumes bit for bit, and exports what one process would export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

from tests.converter_sets import FLOAT8, INT4, LORA
from tests.world import TINY, adamw, convert, llama, read_all, same, shard, whole, write_llama
from tests.world import manager as build
from titan_ckpt import ExportConfig, InitialLoadConfig
from titan_ckpt.errors import ConverterError, ExportError
from titan_ckpt.testing import distributed

DORA = {**LORA, "use_dora": True, "dropout": 0.1, "modules_to_save": ["norm"]}
GATHERED = {**FLOAT8, "fsdp_all_gather": True}
SETS: dict[str, list[dict[str, Any]]] = {
    "lora": [LORA],
    "dora": [DORA],
    "qat": [INT4],
    "qat_lora": [INT4, LORA],
    "float8_gathered": [GATHERED],
    "float8_rowwise": [{**FLOAT8, "recipe": "rowwise"}],
    "float8_gathered_lora": [GATHERED, LORA],
}


class Run:
    """A run as train.py does it, small: base from Hugging Face, converters, FSDP2 where there are ranks, AdamW."""

    def __init__(
        self, tables: list[dict[str, Any]], base: Path, folder: Path, dtype: torch.dtype = torch.float32
    ) -> None:
        self.model: Any = llama().to(dtype)
        self.converters = convert(self.model, *tables)
        shard(self.model)
        self.optimizer = adamw(self.model)
        self.manager = build(
            folder,
            self.model,
            self.optimizer,
            initial_load=(InitialLoadConfig(str(base), cast=True),),
            export=tuple(ExportConfig(kind) for kind in ("hf", "peft") if kind == "hf" or tables[-1]["kind"] == "lora"),
            model_converters=self.converters,
        )

    def load(self) -> int:
        return self.manager.load().step

    def step(self) -> float:
        """Take one step on tokens that the saved generator draws, rank by rank."""
        tokens = torch.randint(0, TINY.vocab_size, (4, 12))
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.converters.post_optimizer_hook([self.model])
        return float(loss.item())

    def whole(self) -> Any:
        """Return everything trained, gathered."""
        return whole(dict(self.converters.state_dict_transform(self.model.state_dict(), last_step=False)))


@distributed(nproc=2, timeout_seconds=240)
def train_all(base: Path, root: Path) -> None:
    for name, tables in SETS.items():
        try:
            train_resume_export(tables, base, root / name)
        except Exception as error:
            error.add_note(f"with {name}")
            raise


def train_resume_export(tables: list[dict[str, Any]], base: Path, folder: Path) -> None:
    unbroken = Run(tables, base, folder / "whole")
    unbroken.load()
    torch.manual_seed(10 + dist.get_rank())
    losses = [unbroken.step() for _ in range(4)]
    assert sum(losses[-2:]) < sum(losses[:2]), losses
    first = Run(tables, base, folder / "run")
    with first.manager:
        assert first.load() == 0
        torch.manual_seed(10 + dist.get_rank())
        assert [first.step() for _ in range(2)] == losses[:2]
        first.manager.save(2)
    second = Run(tables, base, folder / "run")
    with second.manager:
        assert second.load() == 2
        assert [second.step() for _ in range(2)] == losses[2:]
        assert same(second.whole(), unbroken.whole())
        second.manager.save(4, last_step=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where two ranks have trained with each set, and the base: one world, whose first steps take long."""
    root = tmp_path_factory.mktemp("trained")
    train_all(write_llama(root / "base", seed=3), root)
    return root


@pytest.mark.parametrize("name", SETS)
def test_a8_two_ranks_train_resume_and_export(name: str, trained: Path) -> None:
    """2 + 2 steps equal 4, bit for bit; one process resumes the ranks' step and exports the same as they did."""
    folder = trained / name
    alone = Run(SETS[name], trained / "base", folder / "run")
    with alone.manager:
        assert alone.load() == 4
        for kind, step in (("hf", "step-4"), ("peft", "step-4-peft")):
            by_ranks = folder / "run/exports" / step
            if not by_ranks.exists():
                continue
            export = ExportConfig(kind, folder="alone")  # type: ignore[arg-type]
            alone.manager._exporter.export(export, 4, alone.manager._content.identity)
            exported = alone.manager.exported[export]
            assert isinstance(exported, Path)
            ours, theirs = read_all(exported), read_all(by_ranks)
            assert list(ours) == list(theirs)
            for key, value in ours.items():
                assert torch.allclose(value, theirs[key], rtol=1e-6, atol=1e-7), key
    tokens = torch.arange(24).reshape(2, 12)
    merged = LlamaForCausalLM.from_pretrained(folder / "run/exports/step-4")
    if name in ("lora", "dora"):  # elsewhere the live model rounds what the export has in full
        with torch.no_grad():
            assert (merged(tokens).logits - alone.model.eval()(tokens)).abs().max() <= 1e-5


@distributed(nproc=2)
def refuse_on_all_ranks(base: Path, folder: Path) -> None:
    run = Run([LORA], base, folder)
    with run.manager:
        run.load()
        with pytest.raises(ExportError, match="none of the 14 adapters has any effect"):
            run.manager.save(1, last_step=True)
        for name, parameter in run.model.named_parameters():
            if name.endswith("wo.lora_a.weight"):
                whole = parameter.detach()
                assert isinstance(whole, DTensor)
                # the second rank's rows alone: the first must raise too
                whole.to_local().fill_(float("nan") if dist.get_rank() else 1.0)
        with pytest.raises(ExportError, match=r"2 adapter tensor\(s\) hold NaN .*1\.attention\.wo\.lora_a\.weight"):
            run.manager.save(2, last_step=True)
    assert not (folder / "exports").exists() or not list((folder / "exports").glob("step-*"))


def test_a_useless_or_broken_adapter_is_refused_on_every_rank(tmp_path: Path) -> None:
    """The verdict is one, wherever the bad values lie, and nothing is published."""
    refuse_on_all_ranks(write_llama(tmp_path / "base", seed=3), tmp_path / "run")


@distributed(nproc=2)
def float32_adapters_over_bfloat16(base: Path, folder: Path) -> None:
    run = Run([LORA], base, folder, torch.bfloat16)
    with run.manager:
        run.load()
        losses = [run.step() for _ in range(6)]
        assert losses[-1] < losses[0]
        kinds = {run.converters.key_filter(n): p.dtype for n, p in run.model.named_parameters()}
        assert kinds == {True: torch.float32, False: torch.bfloat16}
        run.manager.save(6, last_step=True)


def test_float32_adapters_train_over_a_bfloat16_base(tmp_path: Path) -> None:
    """Two dtypes in one FSDP2 group: the frozen base stays bfloat16 on disk, adapters float32."""
    float32_adapters_over_bfloat16(write_llama(tmp_path / "base", seed=3), tmp_path / "run")
    exports = tmp_path / "run/exports"
    assert {v.dtype for v in read_all(exports / "step-6").values()} == {torch.bfloat16}
    assert {v.dtype for v in read_all(exports / "step-6-peft").values()} == {torch.float32}


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.down(self.up(x)))


@distributed(nproc=2)
def gather_float8_alone() -> None:
    torch.manual_seed(0)
    model = TwoLayers()
    converters = convert(model, GATHERED)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(8, 32)
    losses = []
    for _ in range(4):
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        converters.post_optimizer_hook([model])
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    up: Any = model.up.weight
    assert up._local_tensor._precomputed_scale is not None, "one reduction for all scales, after every step"
    sharded = TwoLayers()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    for table in ({**LORA, "target_modules": ["up"]}, {"kind": "qat", "scheme": "int8_weight_only"}):
        with pytest.raises(ConverterError, match="up: is sharded already; convert the model first"):
            convert(sharded, table)


def test_float8_weights_are_gathered_by_gloo() -> None:
    """A group of nothing but float8 weights is gathered as bytes, since gloo has no float8 collectives.

    What is sharded before it is converted is refused.
    """
    gather_float8_alone()
