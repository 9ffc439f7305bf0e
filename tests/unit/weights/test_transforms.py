"""State dicts to file tensors and back: names, dtypes, laziness, and a verdict on every key."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.world import Bare
from titan_ckpt.errors import ConverterError, KeyMapError
from titan_ckpt.geometry.chunks import Block, Chunk, LazyTensor, Shape, TensorInfo
from titan_ckpt.geometry.keymap import Concat, Identity, KeyMap, KeyRule, PermuteRotary, Unstack
from titan_ckpt.loading.plan import Partial
from titan_ckpt.models.llama3 import FLAVORS, Llama3
from titan_ckpt.types import LoadReport, Mismatch, StateDict
from titan_ckpt.weights.transforms import FileGroup, ReadPlan, StateDictTransforms

TABLE = KeyMap(
    (
        KeyRule.of("layers.{i}.wq.weight", "model.layers.{i}.q_proj.weight", PermuteRotary(2)),
        KeyRule.of(
            ("layers.{i}.gate.weight", "layers.{i}.up.weight"), "model.layers.{i}.gate_up.weight", Concat((3, 3))
        ),
        KeyRule.of("layers.{i}.experts", [f"model.layers.{{i}}.experts.{e}.weight" for e in range(3)], Unstack(3)),
        KeyRule.of("norm.weight", "model.norm.weight"),
        KeyRule.of("count", "model.count"),
    )
)


def tensors() -> StateDict:
    torch.manual_seed(0)
    return {
        "layers.0.wq.weight": torch.randn(8, 4),
        "layers.0.gate.weight": torch.randn(3, 4),
        "layers.0.up.weight": torch.randn(3, 4),
        "layers.0.experts": torch.randn(3, 2, 5),
        "norm.weight": torch.randn(4),
        "count": torch.tensor([7]),
    }


def assembled(groups: list[FileGroup]) -> dict[str, torch.Tensor]:
    """Put the pieces of groups together, cast as a writer casts them."""
    files: dict[str, torch.Tensor] = {}
    for group in groups:
        for key, info in group.infos.items():
            files[key] = torch.zeros(info.shape, dtype=info.dtype)
        for piece in (p for index, block in group.blocks() for p in group.cut(index, block)):
            where = piece.chunk.within(Chunk.whole(files[piece.key].shape))
            files[piece.key][where] = piece.data.reshape(piece.chunk.sizes).to(files[piece.key].dtype)
    return files


def fill(plan: ReadPlan, files: dict[str, torch.Tensor]) -> None:
    """Carry out a plan's requests on tensors in memory."""
    for r in plan.requests:
        r.data.copy_(files[r.key][r.chunk.within(Chunk.whole(files[r.key].shape))].reshape(r.data.shape))


def infos_of(files: dict[str, torch.Tensor]) -> dict[str, TensorInfo]:
    return {key: TensorInfo(tuple(value.shape), value.dtype) for key, value in files.items()}


def test_a1_there_and_back_is_bit_equal() -> None:
    """Every operation of the table, written and read again, restores every bit."""
    transforms = StateDictTransforms(TABLE)
    files = assembled(transforms.to_file(tensors(), None, None))
    assert set(files) == {
        "model.layers.0.q_proj.weight",
        "model.layers.0.gate_up.weight",
        "model.layers.0.experts.0.weight",
        "model.layers.0.experts.1.weight",
        "model.layers.0.experts.2.weight",
        "model.norm.weight",
        "model.count",
    }
    wanted = {fqn: torch.zeros_like(value) for fqn, value in tensors().items()}
    plan = transforms.from_file(wanted, infos_of(files), None, cast=False)
    fill(plan, files)
    assert plan.report == LoadReport(loaded=tuple(wanted))
    assert all(torch.equal(wanted[fqn], value) for fqn, value in tensors().items())


def test_the_true_shapes_are_laid_out_on_meta() -> None:
    """A model of 8 billion parameters without memory: every file tensor and its bytes, every value at one place."""
    with torch.device("meta"):
        model = Llama3(FLAVORS["8B"])
    groups = StateDictTransforms(model.key_map()).to_file(dict(model.state_dict()), None, torch.bfloat16)
    infos = {key: info for group in groups for key, info in group.infos.items()}
    assert len(infos) == 291
    assert sum(info.nbytes for info in infos.values()) == 16_060_522_496, "the index of the published folder says so"
    for group in groups:
        pieces = [p for index, block in group.blocks() for p in group.cut(index, block)]
        assert all(piece.data.is_meta for piece in pieces)
        assert sum(piece.chunk.numel for piece in pieces) == sum(piece.data.numel() for piece in pieces)
        assert {p.key for p in pieces} == set(group.infos)


def test_a7_a_dtype_casts_floats_only() -> None:
    """Integers and types that mean nothing without a scale keep their dtype."""
    mixed = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.float16), "i": torch.ones(2, dtype=torch.int32)}
    mixed["f8"] = torch.ones(2).to(torch.float8_e4m3fn)
    groups = StateDictTransforms().to_file(mixed, None, torch.bfloat16)
    dtypes = {key: info.dtype for group in groups for key, info in group.infos.items()}
    assert dtypes == {"a": torch.bfloat16, "b": torch.bfloat16, "i": torch.int32, "f8": torch.float8_e4m3fn}


def test_lazy_tensors_are_resolved_one_at_a_time_and_not_before() -> None:
    """Planning computes nothing; walking a group computes its tensors in order, each when it is reached."""
    made: list[str] = []

    def lazy(name: str) -> LazyTensor:
        def blocks() -> list[Block]:
            made.append(name)
            return [Block(Chunk.whole((3, 4)), torch.ones(3, 4))]

        return LazyTensor(TensorInfo((3, 4), torch.float32), blocks)

    state = {"layers.0.gate.weight": lazy("gate"), "layers.0.up.weight": lazy("up")}
    (group,) = StateDictTransforms(TABLE).to_file(state, None, torch.bfloat16)
    assert made == []
    walk = (p for index, block in group.blocks() for p in group.cut(index, block))
    next(walk)
    assert made == ["gate"]
    next(walk)
    assert made == ["gate", "up"]


def test_all_problems_of_an_export_are_in_one_error() -> None:
    """Unknown names, incomplete groups and misfits are listed together."""
    bad = tensors() | {"layers.0.wz.weight": torch.zeros(1), "layers.1.experts": torch.zeros(4, 2, 5)}
    del bad["layers.0.up.weight"]
    with pytest.raises(KeyMapError) as caught:
        StateDictTransforms(TABLE).to_file(bad, None, None)
    text = str(caught.value)
    assert "3 problem(s)" in text
    assert "'layers.0.wz.weight'" in text
    assert "model.layers.0.gate_up.weight cannot be made without layers.0.up.weight" in text
    assert "dim 0 of [4, 2, 5] is not 3 experts" in text
    assert caught.value.unknown == ("layers.0.wz.weight", "layers.0.up.weight")


def test_one_file_tensor_has_one_dtype() -> None:
    """Tensors that are fused in the file must agree on its dtype."""
    mixed = {"layers.0.gate.weight": torch.zeros(3, 4), "layers.0.up.weight": torch.zeros(3, 4).bfloat16()}
    with pytest.raises(KeyMapError, match="cannot hold bfloat16, float32"):
        StateDictTransforms(TABLE).to_file(mixed, None, None)
    (group,) = StateDictTransforms(TABLE).to_file(mixed, None, torch.float16)
    assert [info.dtype for info in group.infos.values()] == [torch.float16]


class Lossy(Identity):
    """An operation whose shapes do not lead back."""

    def native_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [(shape[0] + 1, *shape[1:]) for shape in shapes]


def test_an_operation_that_does_not_lead_back_is_refused_both_ways() -> None:
    """An export that no load could read, or a load that fills something else, is not begun."""
    table = StateDictTransforms(KeyMap((KeyRule.of("a", "b", Lossy()),)))
    with pytest.raises(KeyMapError, match=r"\(3, 2\).* do not fit .*Lossy"):
        table.to_file({"a": torch.zeros(3, 2)}, None, None)
    report = table.from_file({"a": torch.zeros(3, 2)}, infos_of({"b": torch.zeros(2, 2)}), None, cast=False).report
    (mismatch,) = report.mismatched
    assert "do not fit" in mismatch.found


def test_two_tensors_for_one_key_are_refused() -> None:
    """A name that keeps itself must not meet a name that becomes it."""
    table = KeyMap((KeyRule.of("a", "b"),), identity=True)
    with pytest.raises(KeyMapError, match="b would be made from a and from b"):
        StateDictTransforms(table).to_file({"a": torch.zeros(1), "b": torch.zeros(1)}, None, None)


def test_an_owned_name_without_a_table_is_a_converter_error() -> None:
    """A converter that owns keys and cannot name them is told so."""

    class Nameless(Bare):
        def key_filter(self, fqn: str) -> bool:
            return "lora" in fqn

    with pytest.raises(ConverterError, match="lora_b"):
        StateDictTransforms(TABLE).to_file({"layers.0.wq.lora_b.weight": torch.zeros(1)}, Nameless(), None)


def test_every_key_of_a_load_is_accounted_for() -> None:
    """Loaded, missing, unexpected and mismatched are all listed, each with what was expected and found."""
    files = assembled(StateDictTransforms(TABLE).to_file(tensors(), None, None))
    del files["model.norm.weight"], files["model.layers.0.experts.1.weight"]
    files["model.nrom.weight"] = torch.zeros(4)
    files["model.layers.0.q_proj.weight"] = torch.zeros(8, 5)
    files["model.count"] = torch.tensor([7.0])
    wanted = {fqn: torch.zeros_like(value) for fqn, value in tensors().items()}
    plan = StateDictTransforms(TABLE).from_file(wanted, infos_of(files), None, cast=True)
    assert plan.report.loaded == ("layers.0.gate.weight", "layers.0.up.weight")
    assert plan.report.missing == ("norm.weight",)
    assert plan.report.unexpected == ("model.nrom.weight",)
    assert plan.near("model.nrom.weight") == ["model.norm.weight"]
    assert plan.report.mismatched == (
        Mismatch("layers.0.wq.weight", "float32[8, 4]", "float32[8, 5]"),
        Mismatch("layers.0.experts", "float32[3, 2, 5]", "no model.layers.0.experts.1.weight"),
        Mismatch("count", "int64[1]", "float32[1]", "dtype"),
    )
    assert {request.key for request in plan.requests} == {"model.layers.0.gate_up.weight"}


def test_another_float_dtype_is_a_mismatch_until_a_cast_is_asked_for() -> None:
    """The message names the setting; with it the cast is done and reported."""
    state: StateDict = {"w": torch.zeros(4)}
    files = {"w": torch.tensor([1.0, 2.0, 3.0, 1 / 3]).bfloat16()}
    plan = StateDictTransforms().from_file(state, infos_of(files), None, cast=False)
    assert not plan.requests
    (mismatch,) = plan.report.mismatched
    assert "set cast = true" in mismatch.found
    plan = StateDictTransforms().from_file(state, infos_of(files), None, cast=True)
    fill(plan, files)
    assert plan.report.cast == {"w": "bfloat16 -> float32"}
    assert torch.equal(state["w"], files["w"].float())


@pytest.mark.parametrize(
    ("own", "found"),
    [
        (torch.float32, torch.int64),
        (torch.int32, torch.float32),
        (torch.int32, torch.int64),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.bool, torch.float32),
    ],
)
def test_no_setting_casts_what_a_cast_would_falsify(own: torch.dtype, found: torch.dtype) -> None:
    """Between integers and floats, and from or to float8, there is no plain cast."""
    infos = {"w": TensorInfo((4,), found)}
    plan = StateDictTransforms().from_file({"w": torch.zeros(4).to(own)}, infos, None, cast=True)
    assert [m.key for m in plan.report.mismatched] == ["w"]
    assert "cast" not in plan.report.mismatched[0].found


def test_part_of_a_fused_tensor_is_loaded_alone() -> None:
    """A rank that wants only one of two fused tensors needs no place for the other."""
    files = assembled(StateDictTransforms(TABLE).to_file(tensors(), None, None))
    wanted: StateDict = {"layers.0.up.weight": torch.zeros(3, 4)}
    plan = StateDictTransforms(TABLE).from_file(wanted, infos_of(files), None, cast=False)
    fill(plan, files)
    assert torch.equal(wanted["layers.0.up.weight"], tensors()["layers.0.up.weight"])


def test_experts_of_different_shapes_are_a_mismatch() -> None:
    """File tensors that cannot have come from one native tensor are not read as if they had."""
    files = assembled(StateDictTransforms(TABLE).to_file(tensors(), None, None))
    files["model.layers.0.experts.2.weight"] = torch.zeros(2, 6)
    wanted: StateDict = {"layers.0.experts": torch.zeros(3, 2, 5)}
    (mismatch,) = StateDictTransforms(TABLE).from_file(wanted, infos_of(files), None, cast=False).report.mismatched
    assert "experts differ in shape" in mismatch.found


def test_wanted_names_that_the_table_lacks_are_all_named() -> None:
    """A model whose names the table does not know is told which, at once."""
    with pytest.raises(KeyMapError) as caught:
        StateDictTransforms(TABLE).from_file({"x": torch.zeros(1), "y": torch.zeros(1)}, {}, None, cast=False)
    assert caught.value.unknown == ("x", "y")


def test_parameters_are_filled_in_place_without_their_graph() -> None:
    """A parameter that requires gradients is read into where it lies."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    files = {"w": torch.arange(4.0)}
    fill(StateDictTransforms().from_file({"w": parameter}, infos_of(files), None, cast=False), files)
    assert torch.equal(parameter.detach(), files["w"])
    assert parameter.is_leaf


def test_a_buffer_without_a_name_in_files_is_left_out() -> None:
    """An export leaves it out, and a load keeps it and says so."""
    table = KeyMap((KeyRule.of("norm.weight", "model.norm.weight"),), nameless=frozenset({"bias"}))
    (group,) = StateDictTransforms(table).to_file({"norm.weight": torch.ones(4), "bias": torch.ones(2)}, None, None)
    assert group.fqns == ("norm.weight",)
    (line,) = Partial(nameless=table.nameless).lines()
    assert line == "1 buffer keeps its initial values, because such a folder has no name for them: bias"
