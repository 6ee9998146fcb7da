"""Typed values: what goes in comes out, with its type; what cannot is refused with its place."""

import collections
import datetime as dt
import enum
import math
import pathlib
import random
import re
import threading
import weakref
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque

import msgspec
import numpy as np
import pytest
from hostile_values import HOSTILE, nested, tag
from hypothesis import given, settings
from hypothesis import strategies as st
from value_strategies import DTYPES, FACTORIES, same, values

from holdfast.errors import CheckpointError, CorruptedError, IncompatibleVersionError, SaveError
from holdfast.format import LeafRef, TorchValue, decode_value, encode_value
from holdfast.format._strict_json import scan_json
from holdfast.format._value_model import MAX_VALUE_DEPTH, MAX_VALUE_JSON_DEPTH


def stored(value, leaf=None):
    return msgspec.json.encode(encode_value(value, leaf=leaf))


def loaded(text, leaf=None):
    scan_json(text, max_depth=MAX_VALUE_JSON_DEPTH)
    return decode_value(msgspec.json.decode(text), leaf=leaf)


def assert_returns(value):
    text = stored(value)
    back = loaded(text)
    assert same(value, back), (value, back)
    assert stored(back) == text


class Color(enum.Enum):
    RED = 1
    NAME = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Sized(int):
    pass


class Titled(str):
    __slots__ = ()


class Bag(dict):
    pass


Point = collections.namedtuple("Point", "x y")  # noqa: PYI024 -- the untyped kind must be refused


@given(values())
@settings(max_examples=400, deadline=None)
def test_any_tree_of_values_comes_back_with_every_type(value):
    assert_returns(value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(2**63),
        2**63 - 1,
        2**63,
        -(2**63) - 1,
        10**6000,
        -(10**6000),
        0.0,
        -0.0,
        5e-324,
        1e22,
        math.nan,
        math.inf,
        -math.inf,
        complex(math.nan, -0.0),
        complex(-math.inf, 1e300),
        "",
        "\x00\x1f\u2028\U0001f600",
        "broken \udc80 name",
        b"",
        b"\x00\xff",
        [],
        (),
        {},
        [[], [()], ({},)],
        {"$": 1},
        {"$": ["int", "ff"]},
        {1: "int", "1": "str"},
        {True: "bool", 2: "int"},
        {(1, ("a", None)): [1]},
        {frozenset({1, 2}): {3}},
        {"\ud800": 1},
        {None: 0, 1.5: 1, b"b": 2},
        {math.nan: 1, float("nan"): 2},
        {math.nan, float("nan"), math.inf},
        OrderedDict([("b", 1), ("a", 2)]),
        Counter({"a": 2, "zero": 0, "less": -1}),
        deque([1, 2], maxlen=5),
        deque(maxlen=0),
        deque([deque()]),
        {1, "1", b"1", (1,), frozenset()},
        frozenset({frozenset({frozenset()})}),
        pathlib.Path("/a/b"),
        pathlib.PurePosixPath("a/../b"),
        pathlib.PureWindowsPath("c:\\x"),
        pathlib.Path("bad\udc80name"),
        dt.datetime(2024, 2, 29, 12, 0, 0, 1),  # noqa: DTZ001 -- naive ones are values too
        dt.datetime(2024, 2, 29, fold=1),  # noqa: DTZ001
        dt.datetime(2024, 2, 29, tzinfo=dt.UTC),
        dt.datetime(1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=5, minutes=30, seconds=7))),
        dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(microseconds=-1))),
        dt.date(9999, 12, 31),
        dt.time(23, 59, 59, 999_999, fold=1),
        dt.time(1, 2, tzinfo=dt.timezone(-dt.timedelta(hours=3))),
        dt.timedelta(days=-1, microseconds=1),
        dt.timedelta.max,
        dt.timedelta.min,
        dt.timedelta(seconds=86_399, microseconds=999_999),
        np.str_("text\0"),
        np.bytes_(b"bytes\0"),
        np.float64(-0.0),
        np.datetime64("NaT"),
        np.array(3),
        np.zeros((0, 3), np.int8),
        np.array([["ab", "c"], ["", "d"]]),
        LeafRef(kind="tensor", name="model.weight"),
        [LeafRef(kind="array", name="\u00e9")],
        TorchValue(kind="Size", text=""),
    ],
    ids=lambda value: repr(value)[:40] if not isinstance(value, int) else f"int{value % 997}",
)
def test_each_of_these_comes_back_as_it_was(value):
    if isinstance(value, TorchValue):
        assert encode_value(value) == {"$": ["torch.Size", []]}
    else:
        assert_returns(value)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_numpy_scalars_and_arrays_of_every_dtype_keep_every_bit(dtype):
    size = dtype.itemsize
    data = bytes(range(1, 1 + 6 * size)) if dtype.kind != "b" else b"\0\1\1\0\1\0"
    array = np.frombuffer(data, dtype).reshape(2, 3)
    assert_returns(array)
    assert_returns(array[0, 1])
    assert_returns({"k": [array[1, 2]]})
    if dtype != np.dtype("timedelta64"):  # NumPy has no hash for it
        assert_returns({array[0, 0]: 1})
    assert same(loaded(stored(array.T)), np.ascontiguousarray(array.T))


def test_arrays_come_back_writable_and_in_native_byte_order():
    array = np.arange(4, dtype=">i4")
    back = loaded(stored(array))
    assert back.dtype == np.dtype("i4")
    assert back.tolist() == [0, 1, 2, 3]
    back[0] = 7


@pytest.mark.parametrize("factory", FACTORIES)
def test_defaultdicts_keep_the_factories_of_the_table(factory):
    back = loaded(stored(defaultdict(factory, {1: 2})))
    assert same(back, defaultdict(factory, {1: 2}))


def test_random_generators_continue_from_their_stored_states():
    rng = random.Random(7)
    rng.gauss(0, 1)
    again = random.Random()
    again.setstate(loaded(stored(rng.getstate())))
    assert [again.random(), again.gauss(0, 1)] == [rng.random(), rng.gauss(0, 1)]

    legacy, legacy_again = np.random.RandomState(7), np.random.RandomState(8)
    legacy_again.set_state(loaded(stored(legacy.get_state())))
    assert legacy_again.rand() == legacy.rand()

    for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64):
        one, other = kind(7), kind(8)
        other.state = loaded(stored(one.state))
        assert np.random.Generator(other).random() == np.random.Generator(one).random()


@pytest.mark.parametrize("value", [(1, 2), b"x", {1}, math.nan, 2**63, -(2**63) - 1])
def test_what_json_does_not_hold_is_no_encoded_value(value):
    with pytest.raises(CorruptedError, match="must not stand there"):
        decode_value([value])


def test_an_int_of_two_million_bits_comes_back():
    assert loaded(stored({"n": 1 << 2_000_000})) == {"n": 1 << 2_000_000}


def test_an_array_of_texts_may_have_the_first_and_the_last_character_of_all():
    value = np.array(["\0a", chr(0x10FFFF)])
    assert same(loaded(stored(value)), value)


def test_enums_and_ints_of_other_classes_are_stored_by_value():
    value = {"a": Color.RED, "b": Level.HIGH, Color.NAME: Sized(5), "big": Sized(2**70)}
    assert same(loaded(stored(value)), {"a": 1, "b": 3, "red": 5, "big": 2**70})


@pytest.mark.parametrize(
    "value",
    [
        {Color.RED: 0, True: 1},
        {Color.NAME: 0, "red": 1},
        {Color.RED, 1},
        {(Color.RED,), (1,)},
        {Color.RED, Sized(1)},
    ],
)
def test_keys_that_would_be_stored_alike_are_refused(value):
    with pytest.raises(SaveError, match=r"state has two (keys|members) that would be stored alike"):
        encode_value(value)


def test_sets_are_stored_in_one_order_whatever_order_they_have():
    names = [f"name-{i}" for i in range(50)]
    texts = {stored(set(random.Random(seed).sample(names, 50))) for seed in range(5)}
    assert len(texts) == 1


def test_the_same_list_twice_comes_back_as_two_lists():
    shared = [1]
    one, other = loaded(stored([shared, shared]))
    assert one == other == [1]
    assert one is not other


def test_leaves_are_stored_by_the_name_the_caller_gives():
    asked = []
    big = np.zeros(2_000_000)
    thing = object()

    def leaf(path, value):
        asked.append((path, value))
        return LeafRef(kind="array", name=".".join(map(str, path)))

    text = stored({"a": [1, big], 2: {"x": (thing,)}}, leaf)
    assert [path for path, _ in asked] == [("a", 1), (2, "x", 0)]
    assert asked[0][1] is big
    assert asked[1][1] is thing
    back = loaded(text, lambda reference: reference.name.upper())
    assert same(back, {"a": [1, "A.1"], 2: {"x": ("2.X.0",)}})
    assert loaded(text)["a"][1] == LeafRef(kind="array", name="a.1")


def test_a_leaf_that_answers_with_something_else_is_a_programming_error():
    with pytest.raises(TypeError, match="leaf must return a LeafRef or None, not 'name'"):
        encode_value(object(), leaf=lambda path, value: "name")
    with pytest.raises(ValueError, match="kind must be 'tensor' or 'array', not 'file'"):
        LeafRef(kind="file", name="x")
    with pytest.raises(ValueError, match="name must be a text of 1 to 65536 characters"):
        LeafRef(kind="tensor", name="")
    with pytest.raises(ValueError, match="text must be a torch dtype, not 'FLOAT 32'"):
        TorchValue(kind="dtype", text="FLOAT 32")
    with pytest.raises(ValueError, match="kind must be 'dtype', 'device' or 'Size'"):
        TorchValue(kind="layout", text="strided")


def a_function():
    pass


PLAIN = "which cannot be stored; store its state_dict or plain values instead"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"optimizer": {"x": object()}}, f"state['optimizer']['x'] is an object, {PLAIN}"),
        ({"a": [0, (threading.Lock(),)]}, f"state['a'][1][0] is a _thread.lock, {PLAIN}"),
        ([a_function], f"state[0] is a function, {PLAIN}"),
        ({1: lambda: 0}, f"state[1] is a function, {PLAIN}"),
        (Bag, f"state is a type, {PLAIN}"),
        (math, f"state is a module, {PLAIN}"),
        (weakref.ref(Bag), f"state is a weakref.ReferenceType, {PLAIN}"),
        (Titled("x"), f"state is a test_values.Titled, {PLAIN}"),
        ({(1, "k"): Bag()}, f"state[(1, 'k')] is a test_values.Bag, {PLAIN}"),
        ({Color.RED: Bag()}, f"state[Color.RED] is a test_values.Bag, {PLAIN}"),
        (bytearray(b"x"), f"state is a bytearray, {PLAIN}"),
        (range(3), f"state is a range, {PLAIN}"),
        ({"k": {(1, a_function): 0}}, f"a key of state['k'] is a function, {PLAIN}"),
        ({"k": {a_function}}, f"a member of state['k'] is a function, {PLAIN}"),
        (
            {"p": Point(1, 2)},
            "state['p'] is a test_values.Point, which cannot be stored; store it as a tuple or",
        ),
        (
            defaultdict(lambda: 0),
            "its factory must be None or one of bool, dict, float, int, list, set, str, tuple",
        ),
        (defaultdict(Counter), "is a defaultdict whose factory is <class 'collections.Counter'>"),
        (np.array([object()]), "state is a NumPy array of dtype object, which cannot be stored"),
        (np.zeros(2, "i4,f4"), "state is a NumPy array of dtype [('f0', '<i4'), ('f1', '<f4')]"),
        (np.zeros(2, "i4,f4")[0], "state is a NumPy scalar of dtype [("),
        (np.longdouble(1), "state is a NumPy scalar of dtype float128"),
        (np.void(b"abc"), "state is a NumPy scalar of dtype |V3"),
        (
            {"a": np.zeros(131_073, "datetime64[s]")},
            "datetime64[s] and 1,048,584 bytes, which cannot be stored; the most outside of shards",
        ),
        (
            np.zeros(131_073, "datetime64[s]"),
            "convert it to numbers (dates by value.view('int64')), or store it as a list or in",
        ),
        (np.ma.masked_array([1], [True]), "state is a numpy.ma.MaskedArray"),
        ({LeafRef(kind="tensor", name="x")}, "a member of state is a holdfast.format."),
        (
            dt.datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")),
            "state is a datetime in a zoneinfo.ZoneInfo, which cannot be stored; a zone's rules",
        ),
        ([1 << (4 * 1024 * 1024)], "state[0] is an int of 4,194,305 bits, which cannot be stored"),
    ],
    ids=lambda part: part[:60] if isinstance(part, str) else "",
)
def test_what_cannot_be_stored_is_refused_with_its_place(value, message):
    with pytest.raises(SaveError) as caught:
        encode_value(value, leaf=lambda path, value: None)
    assert message in caught.value.message


def test_the_place_starts_with_the_name_the_caller_gives_and_is_kept_short():
    with pytest.raises(SaveError, match=r"^custom\['a{27}\.\.\.a{28}'\]\[<int>\] is an object"):
        encode_value({"a" * 500: {10**5000: object()}}, root="custom")


WRAPS = [
    lambda value: [value],
    lambda value: (value,),
    lambda value: {"k": value},
    lambda value: {1: value},
    lambda value: defaultdict(None, {1: value}),
    lambda value: deque([value], 3),
    lambda value: frozenset([value]),
]


@pytest.mark.parametrize("wrap", WRAPS)
def test_64_containers_in_each_other_are_stored_and_65_are_not(wrap):
    array = np.zeros(1) if wrap is not WRAPS[-1] else 0
    assert_returns(nested(MAX_VALUE_DEPTH, wrap, array))
    with pytest.raises(SaveError, match=r"is nested more than 64 deep.*it may contain itself"):
        encode_value(nested(MAX_VALUE_DEPTH + 1, wrap))


def test_a_list_that_contains_itself_is_refused_by_the_start_of_its_path():
    loop = {"me": []}
    loop["me"].append(loop)
    with pytest.raises(SaveError) as caught:
        encode_value(loop)
    assert caught.value.message.startswith("state['me'][0]['me'][0] is nested more than 64 deep")


@pytest.mark.parametrize(("encoded", "message"), HOSTILE, ids=[why for _, why in HOSTILE])
def test_a_damaged_value_is_refused_and_told_what_is_wrong(encoded, message):
    with pytest.raises(CorruptedError) as caught:
        decode_value({"a": [encoded]})
    assert message in caught.value.message
    if "nested" not in message:
        assert "state['a'][0]" in caught.value.message
    assert "is damaged or was not written by holdfast: " in caught.value.message


def test_a_tag_of_a_newer_version_is_told_from_damage():
    with pytest.raises(IncompatibleVersionError) as caught:
        decode_value({"a": tag("quaternion", [1, 2, 3, 4])})
    assert caught.value.message == (
        "state['a'] has the type tag 'quaternion', which this version does not know; it was "
        "probably written by a newer holdfast: upgrade to load this checkpoint"
    )


def test_damage_in_keys_and_members_is_placed_at_their_dict_or_set():
    with pytest.raises(CorruptedError, match=r"^a key of state\['a'\] is damaged"):
        decode_value({"a": tag("dict", [[tag("tuple", [tag("int", "x")]), 1]])})
    with pytest.raises(CorruptedError, match=r"^a member of state is damaged"):
        decode_value(tag("set", [tag("int", "x")]))
    with pytest.raises(CorruptedError, match=r"^state\[\(1, 2\)\]\['b'\] is damaged"):
        decode_value(tag("dict", [[tag("tuple", [1, 2]), {"b": tag("int", "x")}]]))


TAGS = [
    "int",
    "float",
    "str",
    "bytes",
    "tuple",
    "dict",
    "ordereddict",
    "counter",
    "defaultdict",
    "deque",
    "set",
    "frozenset",
    "per_rank",
    "complex",
    "path",
    "datetime",
    "date",
    "time",
    "timedelta",
    "torch.dtype",
    "torch.device",
    "torch.Size",
    "numpy.scalar",
    "numpy.array",
    "tensor",
    "array",
    "unheard",
]
SMALL_JSON = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(
        [
            "AAAA",
            "AAAAAAAAAAA=",
            "int8",
            "int64",
            "datetime64[s]",
            "float8_e5m2",
            "U1",
            "S2",
            "str",
            "bytes",
            "nan",
            "inf",
            "ff",
            "int",
            "path",
            "cuda:0",
            "float32",
            "2024-01-01",
            "2024-01-01T00:00:00",
        ]
    ),
)
ANY_JSON = st.recursive(
    SMALL_JSON,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=2) | st.just("$"), inner, max_size=2),
        st.builds(tag, st.sampled_from(TAGS), inner | st.lists(inner, max_size=3)),
        st.builds(tag, st.sampled_from(TAGS), st.lists(st.lists(inner, max_size=2), max_size=2)),
    ),
    max_leaves=15,
)


@given(ANY_JSON)
@settings(max_examples=1500, deadline=None)
def test_any_json_is_a_value_or_a_checkpoint_error(encoded):
    try:
        value = decode_value(encoded)
    except CheckpointError:
        return
    assert same(loaded(stored(value)), value)


@given(values(max_leaves=10), st.data())
@settings(max_examples=300, deadline=None)
def test_a_stored_value_with_one_changed_byte_is_a_value_or_a_checkpoint_error(value, data):
    text = bytearray(stored(value))
    position = data.draw(st.integers(0, len(text) - 1))
    text[position] = data.draw(st.integers(0, 255))
    try:
        scan_json(bytes(text), max_depth=MAX_VALUE_JSON_DEPTH)
        encoded = msgspec.json.decode(bytes(text))
    except (CheckpointError, msgspec.DecodeError):
        return
    try:
        decode_value(encoded)
    except CheckpointError:
        return


def test_every_example_of_the_document_is_what_is_written():
    document = pathlib.Path(__file__).parents[2] / "docs" / "format.md"
    examples = re.findall(r"`(\{\"\$\":\[.*\]\})` \|$", document.read_text(), re.MULTILINE)
    tags = {msgspec.json.decode(text)["$"][0] for text in examples}
    assert tags == set(TAGS) - {"unheard"}
    for text in examples:
        assert stored(loaded(text.encode())) == text.encode()


PRIME = 2**61 - 1  # Python's hash of an int is its rest modulo this
ALIKE = {
    "ints": [PRIME * index for index in range(8, 8 + 100_000)],
    "complex": [complex(1_000_003 * index, -index) for index in range(2, 100_002)],
}


@pytest.mark.parametrize("members", ALIKE.values(), ids=ALIKE)
def test_keys_that_all_have_one_hash_are_refused_at_once(members):
    encoded = [encode_value(member) for member in members]
    pairs = [[key, None] for key in encoded]
    for name, payload in (("set", encoded), ("frozenset", encoded), ("dict", pairs)):
        with pytest.raises(CorruptedError, match="more than 64 keys or members have the same hash"):
            decode_value(tag(name, payload))


@pytest.mark.parametrize("members", ALIKE.values(), ids=ALIKE)
def test_keys_that_could_not_be_read_are_not_written(members):
    few, many = members[:64], members[:65]
    assert decode_value(encode_value(set(few))) == set(few)
    assert decode_value(encode_value(dict.fromkeys(few))) == dict.fromkeys(few)
    with pytest.raises(
        SaveError, match=r"state\['a'\] has more than 64 members with the same hash"
    ):
        encode_value({"a": set(many)})
    with pytest.raises(SaveError, match="state has more than 64 keys with the same hash"):
        encode_value(dict.fromkeys(many))


def test_many_keys_of_every_kind_come_back():
    keys = [*range(-500, 500), *map(str, range(500)), *(n / 7 for n in range(1, 500))]
    keys += [(n, str(n)) for n in range(500)] + [2**70 + n for n in range(500)]
    assert decode_value(encode_value(dict.fromkeys(keys))) == dict.fromkeys(keys)


def test_what_is_beside_each_other_is_not_nested():
    beside = [[[1]] for _ in range(3 * MAX_VALUE_DEPTH)]
    assert_returns(beside)
    with pytest.raises(SaveError, match="is nested more than 64 deep"):
        encode_value([beside, nested(MAX_VALUE_DEPTH, lambda value: [value])])


def test_what_is_stored_too_deep_is_refused():
    encoded = encode_value(nested(MAX_VALUE_DEPTH, lambda value: [value]))
    with pytest.raises(CorruptedError, match="it is nested more than 64 deep"):
        decode_value([encoded])
    with pytest.raises(CorruptedError, match="it is nested more than 64 deep"):
        decode_value([[[1]] * 100, encoded])


def test_what_to_do_instead_fits_what_cannot_be_stored():
    class Pair(tuple):
        __slots__ = ()

    class OnlyDtype:
        dtype = "float32"

    for value in (Pair((1, 2)), OnlyDtype()):
        with pytest.raises(SaveError, match="store its state_dict or plain values instead"):
            encode_value(value)
