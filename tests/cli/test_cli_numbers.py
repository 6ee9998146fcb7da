"""What verbs reckon with, apart from any checkpoint: differences, statistics, slices, parts."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from holdfast.catalog._read_plan import BATCH_BYTES
from holdfast.cli._compare import Apart, apart
from holdfast.cli._exits import MisuseError
from holdfast.cli._parts import Extent, choose_parts
from holdfast.cli._prune import _hours, _metric
from holdfast.cli._slices import parse_slice
from holdfast.cli._stats import Stats, counted, stats_of
from holdfast.cli._text import age, clean, size
from holdfast.format import dtype_of_numpy


def code_of(array):
    found = dtype_of_numpy(array.dtype)
    return found if isinstance(found, str) else found.code


@pytest.mark.parametrize(
    ("dtype", "a", "b", "most"),
    [
        (np.int64, [-(2**63)], [2**63 - 1], 2**64 - 1),
        (np.uint64, [2**64 - 1], [0], 2**64 - 1),
        (np.int8, [-128], [127], 255),
        (np.uint8, [3], [250], 247),
        (np.bool_, [True], [False], 1),
        (np.float32, [np.inf], [1.0], np.inf),
        (np.float64, [1e308], [-1e308], np.inf),
        (np.float16, [0.5], [0.25], 0.25),
        (ml_dtypes.bfloat16, [1.0], [1.5], 0.5),
        (ml_dtypes.float8_e4m3fn, [1.0], [-2.0], 3.0),
        (np.complex64, [3 + 4j], [0], 5.0),
    ],
)
def test_the_largest_difference_never_overflows(dtype, a, b, most):
    a, b = np.array(a, dtype), np.array(b, dtype)
    for first, second in ((a, b), (b, a)):
        assert apart(first, second, code_of(a)) == Apart(elements=1, max_abs=most)


def test_equal_infinities_and_nans_are_no_difference():
    a = np.array([np.inf, -np.inf, np.nan, 0.0])
    b = np.array([np.inf, -np.inf, -np.nan, -0.0])
    assert a.tobytes() != b.tobytes()
    assert apart(a, b, "F64") == Apart()
    assert apart(a, np.array([np.nan, 0.0, 1.0, 0.0]), "F64") == Apart(
        elements=3, max_abs=np.inf, nan_changed=2
    )


@pytest.mark.parametrize("cuts", [[], [1], [500], [3, 4, 999]])
def test_statistics_of_pieces_are_those_of_the_whole(cuts):
    values = np.random.default_rng(1).normal(1e8, 1e-2, size=1000)
    values[[5, 50]] = np.nan
    values[7] = np.inf
    values[9] = 0
    total = Stats()
    for piece in np.split(values, cuts):
        total |= stats_of(piece, "F64")
    kept = values[np.isfinite(values)]
    assert (total.elements, total.nan, total.infinite, total.zeros) == (1000, 2, 1, 1)
    assert (total.min, total.max) == (0.0, kept.max())
    assert total.mean == pytest.approx(kept.mean(), rel=1e-14)
    assert total.std == pytest.approx(kept.std(), rel=1e-9)


def test_far_from_zero_the_deviation_keeps_its_digits():
    values = 1e8 + np.random.default_rng(2).normal(0, 1e-2, 10_000)
    total = Stats()
    for piece in np.split(values, 10):
        total |= stats_of(piece, "F64")
    assert total.std == pytest.approx(np.std(values), rel=1e-6)


def test_statistics_of_nothing_and_of_what_is_not_finite():
    assert stats_of(np.zeros(0), "F32") == Stats()
    all_nan = stats_of(np.full(3, np.nan), "F32") | Stats()
    assert (all_nan.nan, all_nan.min, all_nan.mean, all_nan.std) == (3, None, None, None)
    assert stats_of(np.array([True, False]), "BOOL").mean == 0.5
    big = stats_of(np.array([2**63, 1], np.uint64), "U64")
    assert (big.min, big.max) == (1, 2**63)


def test_every_finite_value_is_in_the_histogram():
    values = np.array([-1.0, 0.0, 1.0, np.nan, np.inf])
    assert counted(values, "F64", np.linspace(-1, 1, 17)).sum() == 3


@pytest.mark.parametrize(
    "text", ["0:10,3", "-2:", ":5,1:3", "3", "-1,-1", ":", "5:2", "100:200", "0:3,:,1", "[1:2]"]
)
def test_slices_are_those_of_python(text):
    array = np.arange(24 * 7 * 2).reshape(24, 7, 2)
    index = eval(f"np.s_[{text.strip('[]')}]")
    found = parse_slice(text, array.shape)
    box = tuple(slice(*each) for each in zip(found.box.start, found.box.stop, strict=True))
    np.testing.assert_array_equal(array[box].reshape(found.shape), array[index])


@pytest.mark.parametrize("text", ["a", "1:2:3", "...", "24", "-25", "0,0,0,0", "", "1;2", "1:b"])
def test_other_slices_are_refused(text):
    with pytest.raises(MisuseError, match="--slice"):
        parse_slice(text, (24, 7, 2))


@pytest.mark.parametrize("nbytes", [0, 1, 10**6, 10**8, 10**9, 10**13])
@pytest.mark.parametrize("share", ["1", "1/10", "33/100", "999/1000", "1/100000"])
@pytest.mark.parametrize("resumable", [True, False])
def test_a_sample_is_never_empty_nor_less_than_was_asked_for(nbytes, share, resumable):
    extent = Extent(nbytes=nbytes, tensors=10, files=3)
    found = choose_parts(extent, share=Fraction(share), seed="a", resumable=resumable)
    assert found.share >= Fraction(share) or found.of == 1
    assert len({*found.chosen}) == len(found.chosen) > 0
    assert all(1 <= each <= found.of for each in found.chosen)
    assert found.of <= max(1, -(-nbytes // BATCH_BYTES))  # or some parts had nothing to read
    again = choose_parts(extent, share=Fraction(share), seed="a", resumable=resumable)
    assert found == again
    if share == "1":
        assert found.chosen == tuple(range(1, found.of + 1))


def test_another_seed_is_another_sample():
    extent = Extent(nbytes=10**11, tensors=10, files=3)
    chosen = {choose_parts(extent, share=Fraction(1, 10), seed=str(n)).chosen for n in range(10)}
    assert len(chosen) > 5


def test_words_for_people():
    assert [size(n) for n in (0, 1023, 1024, 10**9, 2**80)] == [
        *("0 B", "1023 B", "1.0 KiB", "953.7 MiB", "1073741824.0 PiB")
    ]
    assert [age(s) for s in (-5, 59, 60, 7200, 864000)] == ["0 s", "59 s", "1 min", "2 h", "10 d"]
    assert clean("a\x1b[1m\ud800\u202eb é") == r"a\x1b[1m\ud800\u202eb é"


def test_metrics_and_times_of_rules():
    assert _metric("loss") == ("loss", "min")
    assert _metric("eval:acc:max") == ("eval:acc", "max")
    assert _metric("eval:acc") == ("eval:acc", "min")
    assert [_hours(t) for t in ("30m", "12h", "7d", "2w", "1.5h")] == [0.5, 12, 168, 336, 1.5]
    with pytest.raises(ValueError, match="7d"):
        _hours("7")
