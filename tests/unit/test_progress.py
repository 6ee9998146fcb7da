"""Progress of saves and loads: what a callback hears, and the ready-made bar."""

import io
import itertools
import subprocess
import sys
import threading

import pytest
from rich.console import Console

from holdfast.distributed._progress import Progress, ProgressMeter, RichProgress, bytes_in_words
from holdfast.testing import FakeClock


class Heard(list):
    """A callback that remembers; ``numbers`` are the done bytes."""

    __call__ = list.append

    @property
    def numbers(self):
        return [progress.done_bytes for progress in self]


def test_a_callback_hears_what_is_done_by_whom():
    heard = Heard()
    meter = ProgressMeter(heard, operation="load", rank=3, clock=FakeClock())
    with meter.phase("read", 100):
        pass
    assert heard == [
        Progress(operation="load", phase="read", done_bytes=done, total_bytes=100, rank=3)
        for done in (0, 100)
    ]


def test_between_the_ends_of_a_phase_it_hears_at_most_every_tenth_of_a_second():
    heard, clock = Heard(), FakeClock()
    meter = ProgressMeter(heard, operation="save", clock=clock)
    with meter.phase("write", 1000):
        for _ in range(99):
            clock.advance(1 / 64)
            meter.tick(10)
    # 0.1 s are 7 of these steps; the sums are exact.
    assert heard.numbers == [0, *range(70, 990, 70), 1000]


def test_the_next_phase_counts_anew():
    heard = Heard()
    meter = ProgressMeter(heard, operation="save", clock=FakeClock())
    with meter.phase("plan"):
        pass
    with meter.phase("write", 10):
        meter.tick(10)
    assert [(each.phase, each.done_bytes, each.total_bytes) for each in heard] == [
        ("plan", 0, 0),
        ("plan", 0, 0),
        ("write", 0, 10),
        ("write", 10, 10),
    ]


@pytest.mark.parametrize("callback", [None, Heard()])
def test_whoever_asks_is_told_how_far_it_is(callback):
    meter = ProgressMeter(callback, operation="save", rank=2, clock=FakeClock())
    assert meter.now() is None
    with meter.phase("write", 10):
        for done in (4, 7):
            meter.tick(done - meter.now().done_bytes)
            assert meter.now() == Progress(
                operation="save", phase="write", done_bytes=done, total_bytes=10, rank=2
            )
    assert meter.now().done_bytes == 10


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (2**20 - 1, "1 MiB"),
        (512 * 2**20, "512 MiB"),
        (1000 * 2**20, "1000 MiB"),
        (int(2.345 * 2**30), "2.34 GiB"),
        (2**60, "1024 PiB"),
    ],
)
def test_bytes_in_words(count, words):
    assert bytes_in_words(count) == words


@pytest.mark.parametrize("counted", [0, 30, 100, 170])
def test_a_phase_that_is_complete_is_at_its_total_whatever_was_counted(counted):
    """Compressed bytes are fewer than announced, and those of a file written again are more."""
    heard, clock = Heard(), FakeClock()
    meter = ProgressMeter(heard, operation="save", clock=clock)
    with meter.phase("write", 100):
        for _ in range(counted):
            clock.advance(1)
            meter.tick(1)
    assert heard.numbers == [*range(min(counted + 1, 100)), 100]


def test_a_phase_that_fails_is_not_complete():
    heard = Heard()
    meter = ProgressMeter(heard, operation="save", clock=FakeClock())
    with pytest.raises(OSError, match="disk"), meter.phase("write", 100):
        raise OSError("disk")
    assert heard.numbers == [0]


def test_without_a_callback_nothing_happens():
    meter = ProgressMeter(None, operation="save")
    with meter.phase("write", 10):
        meter.tick(5)


def test_what_a_callback_raises_ends_the_operation_and_every_further_try():
    clock = FakeClock()
    calls = itertools.count()

    def stop(progress):
        if progress.done_bytes:
            next(calls)
            raise BrokenPipeError("nobody listens")

    meter = ProgressMeter(stop, operation="save", clock=clock)
    with pytest.raises(BrokenPipeError, match="nobody listens"), meter.phase("write", 100):
        clock.advance(1)
        for _ in range(3):  # as a retry would, for this is an OSError
            with pytest.raises(BrokenPipeError):
                meter.tick(10)
    with pytest.raises(BrokenPipeError), meter.phase("commit"):
        pytest.fail("the next phase began")
    assert next(calls) == 1


def test_a_callback_that_fails_as_a_phase_ends_fails_the_phase():
    def stop(progress):
        if progress.done_bytes == progress.total_bytes:
            raise RuntimeError("no")

    meter = ProgressMeter(stop, operation="save", clock=FakeClock())
    with pytest.raises(RuntimeError, match="no"), meter.phase("write", 1):
        pass


def test_no_byte_of_many_threads_is_lost_and_numbers_never_fall():
    heard, clock = Heard(), FakeClock()
    inside = threading.Semaphore(1)

    def callback(progress):
        assert inside.acquire(blocking=False), "called twice at the same time"
        heard.append(progress)
        inside.release()

    meter = ProgressMeter(callback, operation="save", clock=clock)
    ready = threading.Barrier(8, timeout=30)
    errors = []

    def work():
        try:
            ready.wait()
            for _ in range(2000):
                clock.advance(1)
                meter.tick(1)
        except BaseException as error:
            errors.append(error)

    total = 8 * 2000 + 1
    with meter.phase("write", total):
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        clock.advance(1)
        meter.tick(0)
    assert errors == []
    assert heard.numbers == sorted(heard.numbers)
    assert heard.numbers[-2:] == [total - 1, total]


def test_while_a_callback_runs_other_threads_go_on():
    clock = FakeClock()
    called, others_done = threading.Event(), threading.Event()

    def slow(progress):
        if progress.done_bytes == 1:
            called.set()
            assert others_done.wait(30)

    meter = ProgressMeter(slow, operation="save", clock=clock)
    with meter.phase("write", 100):
        clock.advance(1)
        first = threading.Thread(target=meter.tick, args=(1,))
        first.start()
        assert called.wait(30)
        clock.advance(1)
        meter.tick(1)  # would wait for ever if it waited for the callback
        others_done.set()
        first.join()


# ---- the bar


def told(done, total=2_000_000_000, phase="write", operation="save", rank=0):
    return Progress(operation=operation, phase=phase, done_bytes=done, total_bytes=total, rank=rank)


def shown(*messages):
    """The lines that stay on the screen."""
    console = Console(file=io.StringIO(), record=True, width=100)
    with RichProgress(console) as bar:
        for message in messages:
            bar(message)
    return [line.rstrip() for line in console.export_text().splitlines() if line.strip()]


def test_the_bar_says_phase_and_bytes():
    lines = shown(told(0), told(500_000_000))
    assert len(lines) == 1
    assert lines[0].startswith("save: write ━━━")
    assert "0.5/2.0 GB" in lines[0]


def test_each_phase_has_a_line():
    lines = shown(
        told(0), told(2_000_000_000), told(0, 10, "commit"), told(7, 10, "commit"), told(0, 0, "x")
    )
    assert [line.split("━")[0].strip() for line in lines] == ["save: write", "save: commit"]
    assert "2.0/2.0 GB" in lines[0]
    assert "7/10 bytes" in lines[1]


def test_the_next_save_takes_the_lines_of_the_last():
    lines = shown(
        told(0, 10), told(10, 10), told(0, 5, "commit"), told(5, 5, "commit"),
        told(3, 30, "read", "load"), told(0, 20), told(20, 20),
    )  # fmt: skip
    assert [line.split("━")[0].strip() for line in lines] == ["load: read", "save: write"]
    assert "20/20 bytes" in lines[1]


def test_a_phase_with_nothing_to_count_has_a_line_while_it_lasts():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with RichProgress(console) as bar:
        bar(told(0, 0, "plan"))
        assert "save: plan" in screen.getvalue()
    assert shown(told(0, 0, "plan")) == []


@pytest.mark.parametrize("terminal", [True, False])
def test_ranks_other_than_0_show_nothing(terminal):
    screen = io.StringIO()
    with RichProgress(Console(file=screen, force_terminal=terminal)) as bar:
        bar(told(0, rank=1))
        bar(told(2_000_000_000, rank=1))
    assert screen.getvalue() == ""


def test_a_bar_may_be_used_again():
    console = Console(file=io.StringIO(), record=True, width=100)
    bar = RichProgress(console)
    for phase in ("first", "second"):
        with bar:
            bar(told(5, 10, phase))
    text = console.export_text()
    assert (text.count("save: first"), text.count("save: second")) == (1, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bar_outside_of_its_block_is_refused_on_every_rank(rank):
    bar = RichProgress(Console(file=io.StringIO()))
    with pytest.raises(RuntimeError, match="with RichProgress"):
        bar(told(0, rank=rank))
    with bar:
        bar(told(0, rank=rank))
    with pytest.raises(RuntimeError, match="with RichProgress"):
        bar(told(0, rank=rank))


def test_without_rich_the_error_says_what_to_install():
    code = """
import sys
sys.modules["rich"] = None
from holdfast.distributed._progress import RichProgress
try:
    RichProgress()
except ImportError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install rich" in run.stdout


def test_rich_is_imported_only_for_a_bar():
    code = """
import sys
from holdfast.distributed._progress import RichProgress
assert "rich" not in sys.modules
RichProgress()
assert "rich" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
