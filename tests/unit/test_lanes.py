"""Work side by side: all of it, on no more threads than there is work for, and no more after an
error."""

import threading

import pytest

from holdfast._lanes import run_all


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 50])
def test_every_item_is_run_once(count):
    done = []
    run_all(iter(range(count)), done.append, lanes=4)
    assert sorted(done) == [*range(count)]


@pytest.mark.parametrize(("count", "threads"), [(1, 0), (2, 1), (4, 3), (9, 3)])
def test_no_thread_is_started_that_has_nothing_to_do(count, threads):
    before = threading.active_count()
    together = threading.Barrier(threads + 1)
    seen = []

    def run(item):
        if item <= threads:  # the first of every lane
            together.wait(30)
            seen.append(threading.active_count() - before)

    run_all(range(count), run, lanes=4)
    assert max(seen) == threads
    assert threading.active_count() == before


def test_after_an_error_nothing_is_begun_and_the_first_is_raised():
    begun = []

    def run(item):
        begun.append(item)
        raise ZeroDivisionError(item)

    with pytest.raises(ZeroDivisionError, match="0"):
        run_all(range(100), run, lanes=1)
    assert begun == [0]
