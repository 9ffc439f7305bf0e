"""Tables and operations: every operation places every value exactly once, on any chunk, and undoes itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_ckpt.errors import KeyMapError
from titan_ckpt.geometry.chunks import Block, Chunk, Shape
from titan_ckpt.geometry.keymap import (
    IDENTITY,
    Chain,
    Concat,
    Identity,
    KeyGroup,
    KeyMap,
    KeyRule,
    PermuteRotary,
    PermuteRows,
    Repeat,
    Split,
    TensorOp,
    Tie,
    Transpose,
    Unstack,
)

Case = tuple[TensorOp, list[Shape]]


def reference(op: TensorOp, natives: list[torch.Tensor]) -> list[torch.Tensor]:
    """Compute the file tensors the obvious way, on whole tensors."""
    match op:
        case Identity():
            return natives
        case PermuteRotary(num_heads):
            (w,) = natives
            halves = w.reshape(num_heads, w.shape[0] // num_heads // 2, 2, *w.shape[1:]).transpose(1, 2)
            return [halves.reshape(w.shape)]
        case PermuteRows(order):
            return [natives[0][list(order)]]
        case Unstack(_, transpose):
            return [w.T if transpose else w for w in natives[0]]
        case Transpose():
            return [natives[0].transpose(-1, -2)]
        case Concat():
            return [torch.cat(natives)]
        case Split(rows):
            return list(torch.split(natives[0], list(rows)))
        case Chain(first, then):
            return [made for between in reference(first, natives) for made in reference(then, [between])]
        case Repeat(num):
            return natives * num
    raise AssertionError(op)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """An operation and native shapes that fit it; sizes are small and include one and zero where they are legal."""
    size = st.integers(1, 5)
    tail: Shape = draw(st.sampled_from([(), (draw(size),), (draw(size), draw(size))]))
    kind = draw(
        st.sampled_from(["identity", "rotary", "rows", "unstack", "transpose", "concat", "split", "chain", "repeat"])
    )
    if kind == "identity":
        return IDENTITY, [draw(st.sampled_from([(), tail, (draw(size), *tail)]))]
    if kind == "rotary":
        heads, half = draw(size), draw(size)
        return PermuteRotary(heads), [(heads * half * 2, *tail)]
    if kind == "rows":
        return PermuteRows(order := tuple(draw(st.permutations(range(draw(size) * 2))))), [(len(order), *tail)]
    if kind == "unstack":
        return Unstack(num := draw(size), draw(st.booleans())), [(num, draw(size), draw(size))]
    if kind == "repeat":
        return Repeat(draw(size)), [tail]
    if kind == "transpose":
        stack = draw(st.lists(size, max_size=2))
        return Transpose(), [(*stack, draw(size), draw(size))]
    if kind == "chain":
        num, rows = draw(size), tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
        transpose = draw(st.booleans())
        one = (draw(size), sum(rows)) if transpose else (sum(rows), *draw(st.sampled_from([(), (3,), (2, 3)])))
        if draw(st.booleans()):
            order = tuple(draw(st.permutations(range(sum(rows)))))
            return Chain(PermuteRows(order), Split(rows)), [(sum(rows), *tail)]
        then = draw(st.sampled_from([Split(rows), IDENTITY, *([Transpose()] if len(one) == 2 else [])]))
        return Chain(Unstack(num, transpose), then), [(num, *one)]
    rows = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    if kind == "concat":
        return Concat(rows), [(n, *tail) for n in rows]
    return Split(rows), [(sum(rows), *tail)]


def numbered(shapes: Sequence[Shape]) -> list[torch.Tensor]:
    """Native tensors in which every value is different."""
    start, made = 0, []
    for shape in shapes:
        made.append(torch.arange(start, start + math.prod(shape)).reshape(shape))
        start += math.prod(shape)
    return made


def boxes(data: st.DataObject, shape: Shape) -> Iterator[Chunk]:
    """Cut a shape at random places along every dim."""
    cuts = []
    for n in shape:
        inner = sorted(data.draw(st.sets(st.integers(1, max(n - 1, 1)), max_size=3)) - {n})
        cuts.append(list(itertools.pairwise([0, *inner, n])))
    for box in itertools.product(*cuts):
        yield Chunk(tuple(a for a, _ in box), tuple(b - a for a, b in box))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_every_value_lands_once_where_it_belongs_and_comes_back(data: st.DataObject) -> None:
    """For each operation and chunking the pieces tile the file tensors, equal the reference, and undo themselves."""
    op, shapes = data.draw(cases())
    natives = numbered(shapes)
    expected = reference(op, natives)
    file_shapes = list(op.file_shapes(shapes))
    assert file_shapes == [tuple(t.shape) for t in expected]
    assert list(op.native_shapes(file_shapes)) == shapes
    keys = [*map(str, range(len(file_shapes)))]
    files = [torch.full(s, -1) for s in file_shapes]
    times = [torch.zeros(s, dtype=torch.int64) for s in file_shapes]
    restored = [torch.full_like(t, -1) for t in natives]
    for index, (native, back) in enumerate(zip(natives, restored, strict=True)):
        for chunk in boxes(data, tuple(native.shape)):
            where = chunk.within(Chunk.whole(native.shape))
            block, target = native[where], back[where]
            for region, view, key in op.pieces(index, shapes, Block(chunk, block), keys):
                spot = region.within(Chunk.whole(file_shapes[int(key)]))
                assert view.untyped_storage().data_ptr() == block.untyped_storage().data_ptr()
                files[int(key)][spot] = view.reshape(region.sizes)
                times[int(key)][spot] += 1
            for region, view, key in op.pieces(index, shapes, Block(chunk, target), keys):
                spot = region.within(Chunk.whole(file_shapes[int(key)]))
                view.copy_(expected[int(key)][spot].reshape(view.shape))
    assert all(bool((t == 1).all()) for t in times)
    for found, wanted in zip(files, expected, strict=True):
        assert torch.equal(found, wanted)
    for found, wanted in zip(restored, natives, strict=True):
        assert torch.equal(found, wanted)


def test_whole_heads_make_one_piece() -> None:
    """A shard of whole heads is a single region of the file, so it is written in one run."""
    pieces = list(PermuteRotary(4).pieces(0, [(32, 8)], Block(Chunk((8, 0), (16, 8)), torch.zeros(16, 8)), "x"))
    assert [(p.chunk.offsets, p.chunk.sizes) for p in pieces] == [((8, 0), (16, 8))]


@pytest.mark.parametrize(
    ("of", "op", "shapes"),
    [
        ("native", PermuteRotary(4), [(12, 8)]),
        ("native", PermuteRotary(4), [()]),
        ("native", Unstack(4), [(3, 2, 2)]),
        ("native", Unstack(4), [()]),
        ("native", Unstack(4, transpose=True), [(4,)]),
        ("native", Transpose(), [(2,)]),
        ("native", Concat((2, 2)), [(2, 3), (2, 4)]),
        ("native", Concat((2, 2)), [(2, 3), (3, 3)]),
        ("native", Concat((2, 2)), [(), ()]),
        ("native", Split((2, 2)), [(5, 3)]),
        ("native", Split((2, 2)), [()]),
        ("native", Chain(Unstack(2), Split((2, 2))), [(3, 4, 2)]),
        ("native", Chain(Unstack(2), Split((2, 2))), [(2, 5, 2)]),
        ("native", Chain(Unstack(2), Split((2, 2))), [(2,)]),
        ("file", PermuteRotary(4), [(12, 8)]),
        ("file", Unstack(2), [(3, 2), (2, 3)]),
        ("file", Concat((2, 2)), [(5, 3)]),
        ("file", Concat((2, 2)), [()]),
        ("file", Split((2, 2)), [(2, 3), (2, 4)]),
        ("file", Split((2, 2)), [(), ()]),
        ("file", Chain(Unstack(2), Split((2, 2))), [(2, 3), (2, 3), (2, 3), (1, 3)]),
        ("file", Chain(Unstack(2), Split((2, 2))), [(2, 3), (2, 3), (2, 4), (2, 4)]),
    ],
)
def test_shapes_that_do_not_fit_are_refused(of: str, op: TensorOp, shapes: list[Shape]) -> None:
    """A native shape the operation cannot place, or a file tensor it cannot have made: never an index error."""
    with pytest.raises(KeyMapError):
        (op.file_shapes if of == "native" else op.native_shapes)(shapes)


def table() -> KeyMap:
    return KeyMap(
        (
            KeyRule.of("layers.{i}.attention.wq.weight", "model.layers.{i}.self_attn.q_proj.weight", PermuteRotary(4)),
            KeyRule.of("layers.{i}.ffn.{w}.weight", "model.layers.{i}.mlp.{w}.weight"),
            KeyRule.of(
                ("layers.{i}.gate.weight", "layers.{i}.up.weight"), "model.layers.{i}.gate_up.weight", Concat((4, 4))
            ),
            KeyRule.of(
                "layers.{i}.moe.w1",
                [f"model.layers.{{i}}.mlp.experts.{e}.gate_proj.weight" for e in range(3)],
                Unstack(3),
            ),
            KeyRule.of("norm.weight", "model.norm.weight"),
        )
    )


@pytest.mark.parametrize(
    ("fqn", "keys"),
    [
        ("layers.11.attention.wq.weight", ("model.layers.11.self_attn.q_proj.weight",)),
        ("layers.0.ffn.down.weight", ("model.layers.0.mlp.down.weight",)),
        ("layers.2.up.weight", ("model.layers.2.gate_up.weight",)),
        ("layers.2.moe.w1", tuple(f"model.layers.2.mlp.experts.{e}.gate_proj.weight" for e in range(3))),
        ("norm.weight", ("model.norm.weight",)),
    ],
)
def test_names_go_both_ways(fqn: str, keys: tuple[str, ...]) -> None:
    """A name's group is the same from either side, with every placeholder filled."""
    group = table().group_of_fqn(fqn)
    assert group.keys == keys
    assert fqn in group.fqns
    assert all(table().group_of_key(key) == group for key in keys)


def test_an_unknown_name_is_answered_with_the_nearest_known_ones() -> None:
    """A misspelt key raises with the pattern it was most likely meant to be."""
    with pytest.raises(KeyMapError, match=r"nearest known: .*layers\.\{i\}\.self_attn\.q_proj\.weight"):
        table().group_of_key("model.layers.3.self_atn.q_proj.weight")
    with pytest.raises(KeyMapError) as caught:
        table().group_of_fqn("layers.0.attention.wz.weight")
    assert caught.value.unknown == ("layers.0.attention.wz.weight",)


def test_placeholders_match_one_segment_and_dots_are_literal() -> None:
    """A pattern never swallows a deeper path, and its dots stand for dots alone."""
    for name in ("layers.0.1.attention.wq.weight", "layers.attention.wq.weight", "layersX0.attention.wq.weight"):
        with pytest.raises(KeyMapError):
            table().group_of_fqn(name)


def test_identity_keeps_names_that_no_rule_knows() -> None:
    """With identity set, known names still follow their rules and the rest keep theirs."""
    both = KeyMap(table().rules, identity=True)
    assert both.group_of_fqn("visual.weight").keys == ("visual.weight",)
    assert both.group_of_fqn("norm.weight").keys == ("model.norm.weight",)


def test_a_placeholder_used_twice_must_agree() -> None:
    """`{e}` twice in one pattern stands for the same segment both times."""
    twice = KeyMap((KeyRule.of("a.{e}.b.{e}.w", "x.{e}.w"),))
    assert twice.group_of_fqn("a.7.b.7.w").keys == ("x.7.w",)
    with pytest.raises(KeyMapError):
        twice.group_of_fqn("a.7.b.8.w")


def test_a_rule_whose_sides_differ_in_placeholders_is_refused() -> None:
    """A one-way row cannot be written: the table is reversible by construction."""
    with pytest.raises(KeyMapError, match="not reversible"):
        KeyRule.of("layers.{i}.w", "model.w")


def test_a_rule_with_the_wrong_number_of_names_is_refused() -> None:
    """Names and operation must agree in number."""
    with pytest.raises(KeyMapError, match="does not fit"):
        KeyRule.of(("a", "b"), "c", PermuteRotary(2))


def test_braces_in_a_name_are_kept() -> None:
    """A segment's text is carried over as it is."""
    assert table().group_of_fqn("layers.0.ffn.a+b.weight").keys == ("model.layers.0.mlp.a+b.weight",)


def test_tied_names_share_a_file_tensor_and_each_goes_its_own_way() -> None:
    """Every name leads to the one key, the key to the first name; shapes that differ are refused."""
    table = KeyMap((KeyRule.of(("{part}.in", "{part}.out"), "model.{part}.embed", Tie(2)),))
    for name in ("a.in", "a.out"):
        assert table.group_of_fqn(name) == KeyGroup((name,), ("model.a.embed",), IDENTITY)
    assert table.group_of_key("model.a.embed").fqns == ("a.in",)
    assert table.ties("model.a.embed")
    assert not table.ties("model.a.other")
    (native,) = numbered([(4, 3)])
    assert Tie(2).native_shapes(Tie(2).file_shapes([(4, 3), (4, 3)])) == [(4, 3), (4, 3)]
    for index in (0, 1):
        (piece,) = Tie(2).pieces(index, [(4, 3), (4, 3)], Block(Chunk((1, 0), (2, 3)), native[1:3]), "x")
        assert (piece.chunk, piece.data.data_ptr()) == (Chunk((1, 0), (2, 3)), native[1:3].data_ptr())
    with pytest.raises(KeyMapError, match=r"tensors that are one in the file differ in shape: \[4, 3\] and \[4, 2\]"):
        Tie(2).file_shapes([(4, 3), (4, 2)])
