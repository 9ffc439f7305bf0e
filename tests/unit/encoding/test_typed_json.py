"""Typed JSON gives back exactly what it was given, lists what it cannot hold, and survives any bytes."""

from __future__ import annotations

import datetime
import enum
import json
import math
import os
import pathlib
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from titan_ckpt.encoding.typed_json import MAX_INLINE_BYTES, dumps, encode, loads
from titan_ckpt.encoding.typed_json_reader import TENSOR_DTYPES
from titan_ckpt.errors import CorruptCheckpointError, StateEncodingError


def same(a: Any, b: Any) -> bool:
    """Say whether two values have the same types all the way down and the same bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or not a.numel():
            return bool(a.dtype == b.dtype and a.shape == b.shape)
        return a.reshape(-1).contiguous().view(torch.uint8).equal(b.reshape(-1).contiguous().view(torch.uint8))
    if isinstance(a, np.ndarray | np.generic):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        if isinstance(a, defaultdict) and a.default_factory is not b.default_factory:
            return False
        pairs = list(zip(a.items(), b.items(), strict=True)) if len(a) == len(b) else [((0, 0), (1, 1))]
        return all(same(x, y) for x, y in pairs)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, deque):
        return a.maxlen == b.maxlen and same(list(a), list(b))
    if isinstance(a, set | frozenset):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if isinstance(a, datetime.datetime | datetime.time):
        return bool(a == b and a.fold == b.fold and a.tzinfo == b.tzinfo)
    return bool(a == b)


def assert_round_trip(value: Any) -> None:
    data = dumps(value)
    assert same(loads(data), value)
    assert dumps(loads(data)) == data
    json.loads(data, parse_constant=pytest.fail)


NAIVE = datetime.datetime(2024, 10, 27, 2, 30, 0, 123456, fold=1)  # noqa: DTZ001 - what a state may hold.
Named = namedtuple("Named", "a b")


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    pass


hashable: st.SearchStrategy[Any] = st.deferred(
    lambda: (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text(st.characters(exclude_categories=()))
        | st.binary(max_size=20)
        | st.complex_numbers(allow_nan=False)
        | st.dates()
        | st.timedeltas()
        | st.datetimes(timezones=st.none() | st.just(datetime.UTC))
        | st.builds(pathlib.Path, st.text("abc/.", min_size=1))
        | st.tuples(hashable, hashable)
        | st.frozensets(hashable, max_size=3)
    )
)
arrays = hnp.arrays(
    hnp.boolean_dtypes()
    | hnp.integer_dtypes(endianness="?")
    | hnp.floating_dtypes(sizes=(16, 32, 64), endianness="?")
    | hnp.complex_number_dtypes(sizes=(64, 128))
    | hnp.byte_string_dtypes()
    | hnp.datetime64_dtypes(max_period="s")
    | hnp.timedelta64_dtypes(max_period="s"),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
leaves: st.SearchStrategy[Any] = hashable | st.floats() | st.complex_numbers() | st.binary().map(bytearray) | arrays
values: st.SearchStrategy[Any] = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(hashable, inner, max_size=4).map(lambda items: defaultdict(list, items))
        | st.dictionaries(hashable, st.integers(), max_size=4).map(Counter)
        | st.sets(hashable, max_size=4)
        | st.tuples(st.lists(inner, max_size=4), st.none() | st.integers(4, 9)).map(lambda pair: deque(*pair))
    ),
    max_leaves=20,
)


@settings(
    max_examples=20_000 if os.environ.get("TITAN_CKPT_SOAK") == "1" else 300,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(values)
def test_any_value_comes_back_with_its_types_and_bits(value: Any) -> None:
    """Generated nestings of every supported type round-trip, twice to the same bytes."""
    assert_round_trip(value)


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -0.0,
        2**63 - 1,
        2**63,
        -(2**200),
        10**5000,
        {1: "a", "1": "b"},
        {True: 1},
        {None: 1},
        {"$tuple": [1]},
        {"$": 1},
        {"a": {"$x": {}}},
        pytest.param({math.nan: 1, float("nan"): 2}, id="two keys that are NaN"),
        pytest.param({math.nan, float("nan")}, id="a set of two NaN"),
        complex(-0.0, math.nan),
        range(3, 10, 2),
        "\ud800",
        "\ud83d\ude00",
        {"\ud800": 1},
        "line\nbreak \u2028 \x00",
        defaultdict(int, {"a": 1}),
        defaultdict(None, {1: 2}),
        NAIVE,
        datetime.datetime(2026, 11, 21, 2, 30, 0, 7, tzinfo=datetime.UTC),
        datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=5, minutes=30))),
        datetime.time(23, 59, 59, 999999),
        torch.float8_e4m3fn,
        torch.Size([2, 3]),
        torch.Size([]),
        torch.device("cuda:1"),
        torch.device("cpu"),
        pathlib.PurePosixPath("x"),
        np.float64(0.1),
        np.int8(-3),
        np.bool_(True),
        np.str_("ü"),
        np.str_(""),
        np.bytes_(b"ab"),
        np.float16("nan"),
        np.datetime64("2024-01-01T00:00:00.123"),
        np.array(["a", "bc"]),
        np.array(5, ">i4"),
    ],
    ids=lambda value: ascii(value)[:60] if type(value) is not int else f"{value.bit_length()} bits",
)
def test_each_kind_of_value_comes_back(value: Any) -> None:
    """Numpy's scalars, key types, `$` keys, NaN as a key and time zones: the drawn values have none of them."""
    assert_round_trip(value)
    assert_round_trip({"here": [value]})


@pytest.mark.parametrize("dtype", sorted(TENSOR_DTYPES.values(), key=str), ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_tensors_of_every_dtype_and_shape_come_back(dtype: torch.dtype) -> None:
    """Random bits of each dtype that holds plain data, as a vector, a matrix, a scalar, empty, and strided."""
    bits = torch.arange(24 * dtype.itemsize, dtype=torch.uint8)
    vector = (bits % 2 if dtype == torch.bool else bits).view(dtype)
    matrix = vector.reshape(4, 6)
    for tensor in (vector, matrix, vector[3], vector[:0], matrix.t(), vector[1:1].reshape(3, 0)):
        assert_round_trip({"t": tensor})


@settings(max_examples=100, deadline=None)
@given(st.data(), hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=3), st.booleans())
def test_the_order_of_axes_in_memory_comes_back(draw: st.DataObject, shape: tuple[int, ...], of_torch: bool) -> None:
    """Column-major arrays and tensors, and any other order, have the strides of a copy; gaps of a view are closed."""
    axes = draw.draw(st.permutations(range(len(shape))))
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape).transpose(axes)[..., :2]
    value: Any = torch.from_numpy(array) if of_torch else array
    dense: Any = value.clone() if of_torch else value.copy("K")
    assert_round_trip(value)
    back = loads(dumps(value))
    strides = [(v.stride() if of_torch else v.strides) for v in (back, dense)]
    assert all(a == b for a, b, size in zip(*strides, value.shape, strict=True) if size > 1 and array.size)


@pytest.mark.parametrize("array", [np.arange(6).reshape(2, 3)[:, ::-1], np.broadcast_to(np.arange(3), (2, 3))])
def test_a_reversed_or_broadcast_array_is_refused(array: Any) -> None:
    """Their memory would be another after a resume; a copy is stored."""
    with pytest.raises(StateEncodingError, match="a reversed or broadcast view; return a copy of it"):
        dumps({"a": array})
    assert_round_trip({"a": array.copy()})


def test_every_dtype_a_model_may_have_is_known() -> None:
    """The list of dtypes is closed but not short."""
    names = (
        "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex64 complex128"
    )
    assert set(names.split()) | {"float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2"} <= set(TENSOR_DTYPES)


def test_conjugate_and_negative_views_keep_their_values() -> None:
    """Lazy bits are resolved before the bytes are taken."""
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert torch.equal(loads(dumps(tensor)), tensor.resolve_conj())
    assert torch.equal(loads(dumps(tensor.imag)), tensor.imag.resolve_neg())


def test_random_generators_continue_where_they_were() -> None:
    """Python, numpy (legacy and each bit generator) and torch produce the same next numbers from the decoded state."""
    python = random.Random(3)
    python.gauss(0, 1)
    restored = random.Random()
    restored.setstate(loads(dumps(python.getstate())))
    assert [restored.random() for _ in range(9)] == [python.random() for _ in range(9)]

    legacy = np.random.RandomState(5)
    legacy.standard_normal()
    for form in (legacy.get_state(), legacy.get_state(legacy=False)):
        other = np.random.RandomState()
        other.set_state(loads(dumps(form)))
        expected = np.random.RandomState()
        expected.set_state(form)
        assert other.standard_normal() == expected.standard_normal()

    for kind in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64):
        generator = np.random.Generator(kind(7))
        generator.integers(5, dtype=np.uint32)
        twin = np.random.Generator(kind(8))
        twin.bit_generator.state = loads(dumps(generator.bit_generator.state))
        assert generator.random() == twin.random()

    source = torch.Generator().manual_seed(11)
    torch.rand(3, generator=source)
    copy = torch.Generator()
    copy.set_state(loads(dumps({"torch": source.get_state()}))["torch"])
    assert torch.equal(torch.rand(9, generator=source), torch.rand(9, generator=copy))


def test_plain_values_are_plain_json() -> None:
    """Ordinary settings need no tags, and each top-level key has a line of its own."""
    value = {"step": 3, "lr": 0.1, "name": "ü", "list": [1, None, True], "nested": {"a": -0.0}}
    data = dumps(value)
    assert json.loads(data) == value
    assert data.decode().splitlines()[2] == '"lr": 0.1,'


def test_all_offenders_are_listed_with_their_paths() -> None:
    """One error names every lambda, module, enum, named tuple, subclass and foreign object, and where each is."""
    loop: list[Any] = []
    loop.append(loop)
    value = {
        "fn": lambda: 0,
        "ok": 1,
        "deep": [{"module": torch}, (Colour.RED,)],
        "named": Named(1, 2),
        "sub": Text("x"),
        "factory": defaultdict(lambda: 0),
        "loop": loop,
        "param": torch.nn.Parameter(torch.ones(1)),
        ("k", 1): object(),
        "sparse": torch.eye(2).to_sparse(),
        "objects": np.array([{}], dtype=object),
        "struct": np.zeros(1, "i4,f4"),
        "meta": torch.empty(2, device="meta"),
        "type": int,
        "grad": torch.ones(1, requires_grad=True),
        "long": np.longdouble(1),
        "path": pathlib.Path("not-utf8-\udcff"),
        "range": range(10**5000),
        "number": {10**5000: object()},
        "key": {"k" * 1000 + "\ud800": object()},
    }
    with pytest.raises(StateEncodingError) as caught:
        dumps(value, "trainer")
    message = str(caught.value)
    for path in (
        "trainer['fn']",
        "trainer['deep'][0].module",
        "trainer['deep'][1][0]",
        "trainer['named']",
        "trainer['sub']",
        "trainer['factory']",
        "trainer['loop'][0]",
        "trainer['param']",
        "trainer[('k', 1)]",
        "trainer['sparse']",
        "trainer['objects']",
        "trainer['struct']",
        "trainer['meta']",
        "trainer['type']",
        "trainer['grad']",
        "trainer['long']",
        "trainer['path']",
        "trainer['range']",
        "trainer['number'][a int]",
        f"trainer['key']['{'k' * 199}...]",
    ):
        assert path in message, path
    assert "20 value(s)" in message and "'ok'" not in message
    assert caught.value.path == "trainer['fn']"


def test_what_is_too_large_or_too_deep_is_refused() -> None:
    """Big tensors belong in rank files; nesting is capped on the way out and on the way in."""
    for big in (
        torch.zeros(MAX_INLINE_BYTES + 1, dtype=torch.uint8),
        np.zeros(MAX_INLINE_BYTES + 1, "u1"),
        bytes(MAX_INLINE_BYTES + 1),
    ):
        with pytest.raises(StateEncodingError, match="at most"):
            encode({"x": big})
    deep: Any = 0
    for _ in range(65):
        deep = [deep]
    with pytest.raises(StateEncodingError, match="nested deeper"):
        encode(deep)
    assert_round_trip(deep[0])
    text: Any = np.str_("x")
    for _ in range(64):
        text = [text]
    assert_round_trip(text)
    for levels in (200, 100_000):
        with pytest.raises(CorruptCheckpointError):
            loads(b"[" * levels + b"]" * levels)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "nul",
        "NaN",
        "[1e999]",
        '{"a":1,"a":2}',
        '{"$unknown": 1}',
        '{"$tuple": [], "b": 1}',
        '{"$int": "12"}',
        '{"$int": 5}',
        '{"$float": "1"}',
        '{"$numpy.scalar": ["<U1", "AAARAA=="]}',
        '{"$set": [1, 1]}',
        '{"$set": [[1]]}',
        '{"$dict": [[1, 2], [1, 3]]}',
        '{"$dict": [[[1], 2]]}',
        '{"$dict": [[1]]}',
        '{"$bytes": "!"}',
        '{"$defaultdict": ["eval", []]}',
        '{"$defaultdict": ["exec", []]}',
        '{"$tensor": ["float32", [2], "AAAA"]}',
        '{"$tensor": ["nn", [0], ""]}',
        '{"$tensor": ["float32", [-1], ""]}',
        '{"$tensor": ["qint8", [1], "AA=="]}',
        '{"$tensor": ["float32", [0, 4611686018427387904, 9], ""]}',
        '{"$numpy": ["|O", [1], "AAAAAAAAAAA="]}',
        '{"$numpy": ["<f4", [1, 1], "AAAAAA==", [0, 0]]}',
        '{"$tensor": ["float32", [1, 1], "AAAAAA==", [1]]}',
        '{"$tensor": ["float32", [1, 1], "AAAAAA==", [1, 0], 1]}',
        '{"$numpy": ["<f4", [true], "AAAAAA=="]}',
        '{"$numpy": ["<U1", [1], "/////w=="]}',
        '{"$numpy": ["i4,f4", [1], "AAAAAAAAAAA="]}',
        '{"$numpy.scalar": ["<f4", ""]}',
        '{"$numpy.scalar": ["<f4", "AAAAAAAAAAA="]}',
        '{"$torch.device": "cpu; import os"}',
        '{"$torch.device": "nonsense"}',
        '{"$torch.dtype": "save"}',
        '{"$torch.Size": ["a"]}',
        '{"$range": [0, 1, 0]}',
        '{"$deque": [1, [1, 2]]}',
        '{"$deque": [-1, []]}',
        '{"$datetime": ["2024-13-01", 0]}',
        '{"$datetime": ["2024-01-01", 7]}',
        '{"$time": ["25:00", 0]}',
        '{"$timedelta": [9999999999999, 0, 0]}',
        '{"$complex": ["1"]}',
        '{"$complex": ["x", "1"]}',
        '{"$path": 1}',
        '{"$str": "/w=="}',
        "1" * 5000,
        '"\\ud800',
        '{"$date": "yesterday"}',
        '{"$Counter": 1}',
    ],
)
def test_malformed_text_is_one_typed_error(text: str) -> None:
    """Each way of being wrong raises CorruptCheckpointError that names the file."""
    with pytest.raises(CorruptCheckpointError, match=r"state\.json"):
        loads(text.encode("utf-8", "surrogatepass"), "state.json")


def test_keys_of_one_hash_are_refused_when_they_are_stored() -> None:
    """What a load would refuse is not stored; as many as chance makes come back."""
    for few in ({k * (2**61 - 1) for k in range(100)}, {-1: 0, -2: 1}):
        assert loads(dumps(few)) == few
    with pytest.raises(StateEncodingError, match=r"state\.seen: 101 keys have the same hash, at most 100 are allowed"):
        dumps({"seen": {k * (2**61 - 1): 0 for k in range(101)}})


@pytest.mark.parametrize("large", [2**63, -(2**63), 2**80])
def test_a_list_of_integers_keeps_those_that_need_more_than_63_bits(large: int) -> None:
    """Others in it stay plain numbers."""
    assert encode([1, large, -3]) == [1, {"$int": hex(large)}, -3]
    assert encode((True, 1)) == {"$tuple": [True, 1]}
