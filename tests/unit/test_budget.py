"""A budget as people write it: what is understood, and how the rest is refused."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.activation._planning.budget import LEAST_BYTES, share_or_bytes

MIB = 2**20


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (MIB, MIB),
        (3 * 10**9, 3 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("800 MB", 800 * 10**6),
        ("800mb", 800 * 10**6),
        ("  2 TiB\n", 2 * 2**40),
        ("4096KiB", 4 * MIB),
        ("9000 kB", 9 * 10**6),
        ("0.5 TB", 5 * 10**11),
        ("2gb", 2 * 10**9),
        ("1048576B", MIB),
        ("1048577.9 B", MIB + 1),
        (np.int64(3 * 10**9), 3 * 10**9),
        (np.uint32(MIB), MIB),
    ],
)
def test_bytes_are_an_int(written, meant):
    found = share_or_bytes(written)
    assert found == meant
    assert type(found) is int


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("40%", 0.4),
        ("12.5 %", 0.125),
        (0.4, 0.4),
        (1.0, 1.0),
        ("100%", 1.0),
        (np.float64(0.4), 0.4),
        (np.float32(0.25), 0.25),
    ],
)
def test_a_share_is_a_float(written, meant):
    found = share_or_bytes(written)
    assert found == pytest.approx(meant, rel=1e-12)
    assert type(found) is float


@pytest.mark.parametrize(
    ("nonsense", "told"),
    [
        (True, "must not be True"),
        (False, "must not be False"),
        (np.True_, "must be an int"),
        (np.int64(5), "less than 16 KiB"),
        (np.float64(2), "more than 0 and at most all"),
        (None, "not None"),
        ([MIB], "must be an int, a float or a text"),
        (0, "less than 16 KiB"),
        (-5, "less than 16 KiB"),
        ((1 << 14) - 1, "less than 16 KiB"),
        ("0.1KiB", "less than 16 KiB"),
        (2**50 + 1, "more than 1024 TiB"),
        (10**400, "more than 1024 TiB"),
        ("9" * 5000 + "GiB", "more than 1024 TiB"),
        (math.nan, "more than 0 and at most all"),
        (math.inf, "more than 0 and at most all"),
        (-0.1, "more than 0 and at most all"),
        (0.0, "more than 0 and at most all"),
        (2.0, "more than 0 and at most all"),
        ("150%", "more than 0 and at most all"),
        ("0%", "more than 0 and at most all"),
        ("5 parsecs", "unknown unit 'parsecs'"),
        ("5 GiBs", "unknown unit 'GiBs'"),
        ("", "no number with a unit"),
        ("GiB", "no number with a unit"),
        ("10", "no number with a unit"),
        ("1e9", "no number with a unit"),
        ("-3GiB", "no number with a unit"),
        ("1.5.2GiB", "no number with a unit"),
        ("٣GiB", "no number with a unit"),
        ("1,5GiB", "no number with a unit"),
        ("5 GiB or so", "no number with a unit"),
    ],
)
def test_nonsense_is_refused_with_what_could_have_been_meant(nonsense, told):
    with pytest.raises(ValueError, match=told) as refused:
        share_or_bytes(nonsense)
    assert "'1.5GiB'" in str(refused.value)
    assert "'40%'" in str(refused.value)
    assert len(str(refused.value)) < 600


@given(st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none()))
def test_whatever_is_written_is_a_budget_or_refused(written):
    try:
        found = share_or_bytes(written)
    except ValueError:
        return
    if isinstance(found, float):
        assert 0 < found <= 1
    else:
        assert LEAST_BYTES <= found <= 2**50


@given(st.integers(1, 2**20 - 1), st.sampled_from(["MiB", "mib", " MiB", "MIB "]))
def test_a_whole_number_of_mebibytes_is_exact(count, unit):
    assert share_or_bytes(f"{count}{unit}") == count * MIB
