"""Initial values come from one CPU, from the device in shards, or from nowhere, and follow patterns of names."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.tiny_run import losses, settings
from tests.unit.weights import test_initialize as on_meta
from tests.unit.weights.test_initialize import MODELS, Plain, different, load, save, spoil, tensors
from titan_ckpt.errors import ConfigError, LoadMismatchError
from titan_ckpt.geometry.chunks import Chunk
from titan_ckpt.testing import distributed
from titan_ckpt.training.trainer import Trainer
from titan_ckpt.weights import initialize
from titan_ckpt.weights.initialize import InitialValues, NamePattern, construct, materialize
from titan_ckpt.weights.shard_fills import ShardFills, scrambled, tile_of, tiles_in
from titan_ckpt.weights.wrapper import ModelWrapper


def built(build: Callable[[], Any], values: InitialValues, *patterns: NamePattern, seed: int = 3) -> Any:
    """Return a model that is whole and in memory, without values."""
    torch.manual_seed(seed)
    model = construct(build, values, patterns)
    materialize(model, "cpu")
    spoil(model)
    return model


def on_device(name: str, folder: Path) -> Any:
    model = built(MODELS[name], "device")
    load(model, folder / name)
    return model


@distributed(nproc=2)
def test_b5_values_drawn_in_shards_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    """FSDP2, tensor parallel and a pipeline stage hold their part of what a single process draws, tied or not."""
    for name, layout in on_meta.LAYOUTS:
        model = on_meta.laid_out(name, layout, "device")
        torch.manual_seed(100 + torch.distributed.get_rank())
        load(model, tmp_path / f"{name} {layout}")
        alone = built(MODELS[name], "device")
        initialize.initialize_missing(ModelWrapper([alone]))
        assert different(model, alone) == [], layout


@pytest.mark.parametrize("name", MODELS)
def test_b5_values_drawn_on_the_device_have_the_distributions_of_one_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantiles agree within the noise of that many draws, constants and buffers exactly; no matrix is ever whole."""
    open_whole = ShardFills._open_whole

    def only_vectors(mode: ShardFills, record: Any, in_use: Any, *, fresh: bool) -> None:
        assert record.seen.dim() < 2, f"{record.name} is whole"
        open_whole(mode, record, in_use, fresh=fresh)

    monkeypatch.setattr(ShardFills, "_open_whole", only_vectors)
    found, expected = tensors(on_device(name, tmp_path)), tensors(on_meta.on_one_device(name))
    for fqn, cpu in expected.items():
        device = found[fqn]
        if cpu.dtype.is_floating_point and len(cpu.unique()) > 4 and "freq" not in fqn:
            assert not torch.equal(device, cpu), f"{fqn}: it was drawn on the device"
            assert same_distribution(device.detach(), cpu.detach()), fqn
        else:
            assert torch.equal(device, cpu), fqn
    drawn = torch.cat(
        [value.detach().flatten() for value in found.values() if value.dim() > 1 and value.is_floating_point()]
    )
    assert len(drawn.unique()) > 0.5 * len(drawn), "no two tiles have the same values"


def same_distribution(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare two samples by the largest distance of their distribution functions (Kolmogorov and Smirnov)."""
    a, b = a.flatten().sort().values, b.flatten().sort().values
    points = torch.cat([a, b])
    shares = [torch.searchsorted(x, points, right=True).double() / len(x) for x in (a, b)]
    distance = float((shares[0] - shares[1]).abs().max())
    return distance < float(2.3 * (1 / len(a) + 1 / len(b)) ** 0.5)  # by chance: 5e-5


class Odd(nn.Module):
    """Is initialized in ways that tiles have no part in: rows, other tensors, assignments, draws of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(48, 8, padding_idx=3)
        self.square = nn.Linear(8, 8, bias=False)
        self.scaled = nn.Linear(8, 600)
        self.assigned = nn.Linear(8, 8)
        self.untouched = nn.Linear(8, 100)

    def init_weights(self) -> None:
        nn.init.normal_(self.table.weight, std=0.5)
        self.table.weight.data[3].zero_()
        nn.init.orthogonal_(self.square.weight)
        nn.init.trunc_normal_(self.scaled.weight, std=0.1)
        self.scaled.weight.data.mul_(3).clamp_(-0.2, 0.2)
        self.scaled.bias.data.copy_(torch.linspace(0, 1, 600))
        self.assigned.weight = nn.Parameter(torch.randn(8, 8))


@distributed(nproc=2)
def test_b5_code_that_needs_whole_values_still_has_them() -> None:
    """Code that tiles cannot run fills whole tensors, with the same values on one rank and on shards."""
    alone = built(Odd, "device")
    initialize.initialize_missing(ModelWrapper([alone]))
    torch.manual_seed(3)
    sharded = construct(Odd, "device")
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    materialize(sharded, "cpu")
    spoil(sharded)
    initialize.initialize_missing(ModelWrapper([sharded]))
    assert different(sharded, alone) == []
    assert not alone.table.weight[3].any() and alone.table.weight[4].any()
    assert torch.allclose(alone.square.weight @ alone.square.weight.T, torch.eye(8), atol=1e-5)
    assert float(alone.scaled.weight.detach().abs().max()) == pytest.approx(0.2)
    assert alone.assigned.bias.abs().max() <= 8**-0.5, "the constructor's fill"
    assert 0.98 < float(alone.untouched.weight.detach().abs().max()) * 8**0.5 <= 1, (
        "kaiming_uniform_ of the constructor"
    )


def test_b5_tiles_cover_every_shape_once() -> None:
    """Every element of any box lies in one tile, whose number does not depend on the box; no seed comes twice."""
    for shape in [(), (7,), (5, 700), (3, 4, 1030), (2, 9, 3, 3), (1, 1)]:
        tile = tile_of(shape, 1024)
        whole = torch.full(shape, -1)
        for number, box in tiles_in(shape, tile, Chunk.whole(shape)):
            assert (whole[box.within(Chunk.whole(shape))] == -1).all()
            whole[box.within(Chunk.whole(shape))] = number
        assert (whole >= 0).all()
        part = Chunk(tuple(n // 2 for n in shape), tuple(n - n // 2 for n in shape))
        inside = {number for number, _ in tiles_in(shape, tile, part)}
        assert inside == set(whole[part.within(Chunk.whole(shape))].flatten().tolist())
    assert len({scrambled(n) for n in range(2**32 - 500, 2**32 + 500)}) == 1000


def test_b5_a_model_that_is_constructed_for_a_load_is_never_initialized(tmp_path: Path) -> None:
    """A tensor that a source lacks is named in an error; buffers that no checkpoint holds are computed."""
    with pytest.raises(LoadMismatchError, match=r'4 tensors were not loaded: first.*construct = "meta"'):
        load(built(Plain, "meta"), tmp_path)
    source = Plain()
    source.init_weights()
    save(source, tmp_path)
    model = built(Plain, "meta")
    load(model, tmp_path)
    assert different(model, source) == []
    assert torch.equal(model.table, torch.arange(4.0))


def test_b5_each_choice_says_what_it_skips(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the log of a load, and where a model cannot be built on meta, which only the default can do without."""
    with caplog.at_level(logging.INFO):
        load(built(Plain, "device"), tmp_path / "a")
        load(built(Plain, "default"), tmp_path / "b")
    assert "on the device, in shards: they are not those of one CPU" in caplog.text
    assert "as one CPU would" in caplog.text

    class Reads(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.scale = float(torch.full((3,), 0.5).sum().item())

    for values in ("device", "meta"):
        with pytest.raises(ConfigError, match=f"'{values}' needs a model that can be built on meta"):
            construct(Reads, values)


def fill(value: float) -> Callable[[torch.Tensor], object]:
    return lambda tensor: nn.init.constant_(tensor, value)


@pytest.mark.parametrize("values", ["default", "device"])
def test_b5_patterns_of_names_fill_what_was_not_loaded(values: InitialValues, tmp_path: Path) -> None:
    """The first pattern that matches counts, buffers are the model's own, and loaded tensors keep their values."""
    patterns = (NamePattern(r".*bias", fill(1)), NamePattern(r"first\..*", fill(2)), NamePattern(r".*", fill(3)))
    build = MODELS["llama3"]
    of_llama = NamePattern(r".*norm.*", fill(1)), NamePattern(r".*w[qkv].*", nn.init.normal_)
    model = built(build, values, *of_llama, NamePattern(".*", fill(3)))
    load(model, tmp_path / "llama3")
    assert torch.equal(model.get_buffer("rope_table"), build().get_buffer("rope_table"))
    assert (model.layers["0"].attention.wo.weight == 3).all() and (model.norm.weight == 1).all()
    assert float(model.layers["0"].attention.wq.weight.detach().std()) == pytest.approx(1, abs=0.05)

    model = built(lambda: nn.ModuleDict({n: nn.Linear(4, 4) for n in ("first", "second")}), values, *patterns)
    nn.init.constant_(model["first"].weight, 9)
    wrapper = ModelWrapper([model])
    initialize.flag_loaded(wrapper, ["first.weight"])
    initialize.initialize_missing(wrapper)
    found = {fqn: {*value.flatten().tolist()} for fqn, value in model.state_dict().items()}
    assert found == {"first.weight": {9}, "first.bias": {1}, "second.weight": {3}, "second.bias": {1}}


def test_b5_every_tensor_matches_a_pattern_and_every_pattern_a_tensor() -> None:
    """Both faults are in one error, before anything has memory."""
    with pytest.raises(ConfigError) as caught:
        construct(Plain, "default", [NamePattern(r".*weight", fill(1)), NamePattern(r"third\..*", fill(2))])
    bare, unused = caught.value.problems
    assert "first.bias, second.bias" in bare and "initial_values: 'third" in unused


def test_b5_a_run_file_names_where_values_come_from_and_what_fills_them(tmp_path: Path) -> None:
    """Both settings reach the model of a run, and settings that do not fit are told before anything is built."""
    tables = {
        ".*norm.*": {"function": "torch.nn.init:ones_"},
        ".*": {"function": "torch.nn.init:normal_", "std": 1e-4},
    }
    model = {"construct": "device", "initial_values": tables}
    trainer = Trainer(settings(tmp_path, model=model, training={"steps": 1}, optimizer={"lr": 1e-9}))
    trainer.run()
    weight = trainer.model.get_parameter("layers.0.attention.wq.weight").detach()
    assert float(weight.std()) == pytest.approx(1e-4, rel=0.05)
    assert losses(tmp_path) == [pytest.approx(7.6246, abs=1e-3)], "almost even logits: log(2048)"
    bad = {"initial_values": {".*": {"function": "torch.nn.init:normal_", "sdt": 1.0}}}
    with pytest.raises(ConfigError, match=r"model\.initial_values\.'\.\*'.*sdt"):
        Trainer(settings(tmp_path / "bad", model=bad)).run()
    with pytest.raises(ConfigError, match="a regular expression"):
        settings(tmp_path, model={"initial_values": {"(": {"function": "torch.nn.init:ones_"}}})
    with pytest.raises(ConfigError, match=r"initial_values\.'\.\*'\.function: expected a name"):
        settings(tmp_path, model={"initial_values": {".*": {"std": 1.0}}})
