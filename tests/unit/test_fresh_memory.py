"""Memory for large tensors is asked for in large pages."""

import mmap
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.distributed._fresh import in_large_pages
from holdfast.distributed._pool import Pool
from holdfast.storage._pages import Buffers, address_of, aligned_memory

SMAPS = Path("/proc/self/smaps")
MIB = 1024 * 1024

pytestmark = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="no large pages here"
)


def is_large(tensor):
    """Whether large pages were asked for in the middle of a tensor."""
    middle, inside = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in SMAPS.read_text("ascii").splitlines():
        head, _, rest = line.partition(" ")
        if "-" in head and ":" not in head:
            start, _, stop = head.partition("-")
            inside = int(start, 16) <= middle < int(stop, 16)
        elif inside and head == "VmFlags:":
            return "hg" in rest.split()
    raise LookupError("no mapping has this tensor")


def test_what_is_large_is_in_large_pages_and_what_is_small_is_not():
    large = torch.empty(64 * MIB, dtype=torch.uint8)
    small = torch.frombuffer(mmap.mmap(-1, MIB), dtype=torch.uint8)  # in no page that others had
    assert in_large_pages(large) is large
    assert is_large(large)
    assert in_large_pages(small) is small
    assert not is_large(small)


@pytest.mark.parametrize("offset", [0, 1, 4095])
def test_memory_that_begins_anywhere_is_asked_for_and_stays_as_it_is(offset):
    memory = torch.frombuffer(mmap.mmap(-1, 96 * MIB), dtype=torch.uint8)
    part = memory[offset : 64 * MIB + offset]
    part[::MIB] = 7
    in_large_pages(part)
    assert is_large(part)
    assert not is_large(memory[80 * MIB :])
    assert part.sum() == 7 * 64


def test_tensors_that_are_loaded_and_copies_of_a_save_are_in_large_pages(tmp_path):
    holdfast.save({"x": torch.zeros(64 * MIB, dtype=torch.uint8)}, tmp_path / "a")
    assert is_large(holdfast.load(tmp_path / "a")["x"])
    slot = Pool(64 * MIB).take()
    assert is_large(slot)


@pytest.mark.parametrize("nbytes", [1, MIB, 4 * MIB + 4096, 64 * MIB])
def test_memory_for_direct_io_begins_with_a_large_page_and_is_in_those_it_fills(nbytes):
    memory = aligned_memory(nbytes)
    assert len(memory) == nbytes
    assert address_of(memory) % (2 * MIB) == 0
    assert not any(memory[:4096])
    memory[-1] = 7
    as_tensor = torch.frombuffer(memory, dtype=torch.uint8)
    assert nbytes < 2 * MIB or is_large(as_tensor)


def test_buffers_are_used_again_and_no_two_at_once():
    buffers = Buffers(MIB)
    one, other = buffers.take(), buffers.take()
    assert address_of(one) != address_of(other)
    buffers.give(one)
    assert buffers.take() is one


@pytest.mark.parametrize("nbytes", [1, 4096, 3 * 1024 * 1024 + 1])
def test_memory_for_direct_requests_begins_with_a_large_page(nbytes):
    kept = [aligned_memory(nbytes) for _ in range(5)]
    assert {address_of(memory) % (2 * 1024 * 1024) for memory in kept} == {0}
    assert {len(memory) for memory in kept} == {nbytes}
