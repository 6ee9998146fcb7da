"""The codes of element types against the libraries that have them."""

import json
import subprocess
import sys

import numpy as np
import pytest
import safetensors
import torch

from holdfast.format import dtype_of, dtype_of_numpy, numpy_dtype
from holdfast.format._dtypes import DTYPES


def opens_in_safetensors(code: str, itemsize: int) -> bool:
    header = json.dumps({"x": {"dtype": code, "shape": [], "data_offsets": [0, itemsize]}}).encode()
    try:
        safetensors.deserialize(len(header).to_bytes(8, "little") + header + bytes(itemsize))
    except safetensors.SafetensorError:
        return False
    return True


@pytest.mark.parametrize("code", DTYPES)
def test_a_code_is_safetensors_own_or_stored_as_bytes(code):
    dtype = dtype_of(code)
    assert dtype.code == code
    assert dtype.stored in {code, "U8"}
    assert opens_in_safetensors(dtype.stored, 1 if dtype.stored == "U8" else dtype.itemsize)
    assert (dtype.stored == code) is opens_in_safetensors(code, dtype.itemsize)


@pytest.mark.parametrize("code", DTYPES)
def test_sizes_agree_with_torch_and_numpy(code):
    dtype = dtype_of(code)
    assert dtype.torch_name is not None
    assert getattr(torch, dtype.torch_name).itemsize == dtype.itemsize
    tail = int(np.prod(dtype.numpy_tail))
    assert numpy_dtype(code).itemsize * tail == dtype.itemsize


def test_types_without_a_numpy_equivalent_are_read_as_bytes():
    assert {code for code, dtype in DTYPES.items() if dtype.numpy_name is None} == {
        "C32",
        "F4_E2M1_X2",
    }
    assert numpy_dtype("C32") == np.uint8
    assert dtype_of("C32").numpy_tail == (4,)
    assert dtype_of("F4_E2M1_X2").numpy_tail == ()


@pytest.mark.parametrize("code", [c for c, d in DTYPES.items() if d.numpy_name is not None])
def test_numpy_dtypes_find_their_code(code):
    assert dtype_of_numpy(numpy_dtype(code)).code == code


@pytest.mark.parametrize("name", ["longlong", "ulonglong", "<f4", "=i2", "|b1"])
def test_other_names_of_one_dtype_find_the_same_code(name):
    dtype = np.dtype(name)
    assert numpy_dtype(dtype_of_numpy(dtype).code) == dtype


@pytest.mark.parametrize(
    "dtype",
    ["O", "S3", "U2", "V3", "M8[s]", "m8[s]", [("a", "i4")], ("u1", (2,)), "longdouble"],
    ids=str,
)
def test_arrays_that_are_not_numbers_of_known_size_are_refused_by_name(dtype):
    wrong = np.dtype(dtype)
    with pytest.raises(ValueError, match="cannot be stored") as raised:
        dtype_of_numpy(wrong)
    assert str(wrong) in str(raised.value)


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">c16"])
def test_big_endian_arrays_are_refused_with_advice(dtype):
    with pytest.raises(ValueError, match="little-endian"):
        dtype_of_numpy(np.dtype(dtype))


def test_an_unknown_code_is_refused_by_name():
    with pytest.raises(ValueError, match="'F7'"):
        dtype_of("F7")
    with pytest.raises(ValueError, match="'F7'"):
        numpy_dtype("F7")


def test_alignment_is_that_of_the_stored_type():
    assert {code: dtype_of(code).alignment for code in ("F64", "C64", "BF16", "BOOL")} == {
        "F64": 8,
        "C64": 8,
        "BF16": 2,
        "BOOL": 1,
    }
    assert dtype_of("C128").alignment == 1


def test_a_big_endian_machine_is_told_that_it_cannot():
    code = (
        "import sys, numpy, ml_dtypes, msgspec, xxhash, zstandard; sys.byteorder = 'big'; "
        "import holdfast.format"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "this machine is big-endian, so holdfast cannot run on it" in done.stderr
