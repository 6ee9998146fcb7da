"""What measures the bare disk does all of it, or says what went wrong."""

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import _disk

pytestmark = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="Linux only")


def test_what_a_thread_raises_is_raised():
    done = []

    def work(nth):
        done.append(nth)
        if nth == 1:
            raise OSError("short write")

    with pytest.raises(OSError, match="short write"):
        _disk.on_threads(3, work)
    assert sorted(done) == [0, 1, 2]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_it_moves_whole_pages_and_no_more(tmp_path, threads):
    _disk.raw_write(tmp_path / "file", 9 * 2**20 + 5, threads)
    assert (tmp_path / "file").stat().st_size == 9 * 2**20 + 4096
    _disk.raw_read(tmp_path / "file", threads)


def test_a_file_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(OSError, match="Is a directory"):
        _disk.raw_write(tmp_path, 4096, 1)
