"""Any tree of the values the format stores, and equality that looks at types, NaN and order."""

import datetime as dt
import pathlib
import struct
from collections import Counter, OrderedDict, defaultdict, deque

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

DTYPES = [
    np.dtype(name)
    for name in [
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        "datetime64[ns]",
        "datetime64[D]",
        "datetime64[25s]",
        "timedelta64",
        "timedelta64[us]",
        "timedelta64[7M]",
    ]
] + [
    np.dtype(kind)
    for kind in vars(ml_dtypes).values()
    if isinstance(kind, type) and issubclass(kind, np.generic)
]
FACTORIES = [None, int, float, list, dict, set, str, bool, tuple]


def values(more=None, *, max_leaves=25):
    """Trees of everything that is stored without leaves; ``more`` are further hashable scalars."""
    hashable = keys(more)
    return st.recursive(
        hashable | arrays(), lambda inner: _containers(hashable, inner), max_leaves=max_leaves
    )


def keys(more=None):
    """What can be a key or a member of a set, down to tuples and frozensets in each other."""
    plain = scalars() if more is None else scalars() | more
    return st.recursive(
        plain,
        lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
        max_leaves=4,
    )


def is_comparable(number):
    """Scalars of NumPy and ml_dtypes raise where they meet a large integer of their hash, as in a
    set, and that of 2**64, say, is 8."""
    return abs(number) < 2**63 or abs(hash(number)) > 2**16


def scalars():
    texts = st.text(max_size=8) | st.text(st.characters(exclude_categories=()), max_size=4)
    file_names = texts.map(lambda text: text.replace("\0", ""))
    zones = st.none() | st.timedeltas(
        min_value=dt.timedelta(hours=-23), max_value=dt.timedelta(hours=23)
    ).map(dt.timezone)
    return st.one_of(
        st.none(),
        st.booleans(),
        st.integers().filter(is_comparable),
        st.integers(-(2**66), 2**66).filter(is_comparable),
        st.integers(2, 20_000).map(lambda bits: -(1 << bits) - 0x123456789ABCDEF),
        st.floats(),
        st.sampled_from([0.0, -0.0, 1.0, 0, 1, "$", ""]),
        st.complex_numbers(),
        texts,
        st.binary(max_size=8),
        file_names.map(pathlib.Path),
        file_names.map(pathlib.PurePosixPath),
        file_names.map(pathlib.PureWindowsPath),
        st.datetimes(timezones=zones, allow_imaginary=True),
        st.dates(),
        st.builds(lambda time, fold: time.replace(fold=fold), st.times(timezones=zones), _FOLDS),
        st.timedeltas(),
        texts.map(np.str_),
        st.binary(max_size=4).map(np.bytes_),
        numpy_scalars(),
    )


_FOLDS = st.integers(0, 1)


@st.composite
def numpy_scalars(draw):
    """Of every dtype that NumPy can hash."""
    dtype = draw(st.sampled_from(DTYPES).filter(lambda dtype: dtype != np.dtype("timedelta64")))
    return _from_bytes(draw, dtype, 1)[0]


@st.composite
def arrays(draw):
    dtype = draw(st.sampled_from([*DTYPES, np.dtype("U3"), np.dtype("S2")]))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = int(np.prod(shape, dtype=int))
    if dtype.kind == "U":
        texts = draw(st.lists(st.text(max_size=3), min_size=count, max_size=count))
        return np.array(texts, dtype).reshape(shape)
    return _from_bytes(draw, dtype, count).reshape(shape)


def _from_bytes(draw, dtype, count):
    size = dtype.itemsize * count
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype.kind == "b":
        data = bytes(byte & 1 for byte in data)
    return np.frombuffer(data, dtype).copy()


def _containers(hashable, inner):
    dicts = st.dictionaries(hashable, inner, max_size=3)
    items = st.lists(inner, max_size=3)
    return st.one_of(
        items,
        items.map(tuple),
        dicts,
        st.dictionaries(st.text(max_size=4), inner, max_size=3),
        dicts.map(OrderedDict),
        dicts.map(Counter),
        st.builds(defaultdict, _FACTORIES, dicts),
        st.builds(lambda items, room: deque(items, len(items) + room), items, st.integers(0, 2)),
        items.map(deque),
        st.sets(hashable, max_size=4),
        st.frozensets(hashable, max_size=4),
    )


_FACTORIES = st.sampled_from(FACTORIES)


def same(one, other):  # noqa: PLR0911 -- one line for each kind of value
    """Whether both are the same value of the same type, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | np.generic):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
            and (not isinstance(one, np.str_ | np.bytes_) or one == other)
        )
    if isinstance(one, float):
        return one != one and other != other or struct.pack("d", one) == struct.pack("d", other)  # noqa: PLR0124, RUF021 -- NaN
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, dt.datetime | dt.time):
        return one.isoformat() == other.isoformat() and one.fold == other.fold
    if isinstance(one, set | frozenset):
        return len(one) == len(other) and _matched(list(one), list(other))
    if isinstance(one, dict):
        return (
            getattr(one, "default_factory", None) is getattr(other, "default_factory", None)
            and same(list(one), list(other))
            and same(list(one.values()), list(other.values()))
        )
    if isinstance(one, list | tuple | deque):
        return (
            getattr(one, "maxlen", None) == getattr(other, "maxlen", None)
            and len(one) == len(other)
            and all(map(same, one, other))
        )
    return one == other


def _matched(ones, others):
    for one in ones:
        found = next((i for i, other in enumerate(others) if same(one, other)), None)
        if found is None:
            return False
        del others[found]
    return True
