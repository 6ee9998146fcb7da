"""The course of live bytes over a call: marks cut it into stretches, each with its own peak."""

import pytest
import torch

from holdfast.activation import measure_peak
from holdfast.activation._measuring.stretches import END, Course, Stretch, record_course

CPU = torch.device("cpu")
KIB = 1024


def made(count):
    """So many KiB."""
    return torch.ones(count * KIB // 4)


def told(course):
    return [(each.ends_at, each.peak_bytes, each.level_bytes) for each in course.stretches]


def test_each_stretch_has_its_own_peak_and_the_level_at_its_end():
    def call(mark):
        a = made(8)
        mark("a")
        b = made(16)
        del b
        mark("b")
        c = made(2)
        mark("c")
        del a, c

    assert told(record_course(call, CPU)) == [
        ("a", 8 * KIB, 8 * KIB),
        ("b", 24 * KIB, 8 * KIB),
        ("c", 10 * KIB, 10 * KIB),
        (END, 0, 0),  # what lives at a mark belongs to the stretch before
    ]
    assert record_course(call, CPU).peak_bytes == 24 * KIB


def test_without_marks_there_is_one_stretch_and_it_has_the_peak_of_the_call():
    def call(mark):
        del mark
        return (made(4) + made(4)).sum()

    course = record_course(call, CPU)
    assert [each.ends_at for each in course.stretches] == [END]
    assert course.peak_bytes == measure_peak(lambda: call(None)).peak_bytes


def test_nothing_at_all():
    course = record_course(lambda _: None, CPU)
    assert told(course) == [(END, 0, 0)]
    assert course.levels == ()
    assert Course(stretches=(), levels=()).peak_bytes == 0


def test_what_was_there_before_counts_from_zero_and_below():
    held = [made(64)]

    def call(mark):
        held.clear()
        mark("freed")
        held.append(made(16))
        mark("smaller")

    assert told(record_course(call, CPU)) == [
        ("freed", -64 * KIB, -64 * KIB),
        ("smaller", -48 * KIB, -48 * KIB),
        (END, -48 * KIB, -48 * KIB),
    ]


def test_the_levels_are_noted_call_by_call_and_marks_point_into_them():
    def call(mark):
        a = made(1)
        b = made(1)
        mark("two")
        c = a + b
        mark("three")
        return c

    course = record_course(call, CPU)
    assert course.levels == (KIB, 2 * KIB, 3 * KIB)
    assert [each.noted for each in course.stretches] == [2, 3, 3]


def test_marks_from_a_backward_hook():
    x = made(32).requires_grad_()
    x.grad = torch.zeros_like(x)

    def call(mark):
        y = x * 2
        y.register_hook(lambda _: mark("backward"))
        mark("forward")
        y.sum().backward()

    course = record_course(call, CPU)
    assert [each.ends_at for each in course.stretches] == ["forward", "backward", END]
    by_name = {each.ends_at: each for each in course.stretches}
    assert by_name["forward"].level_bytes == 32 * KIB
    assert by_name[END].level_bytes == 0
    assert course.peak_bytes == max(course.levels)


def test_an_error_comes_through_and_the_next_course_is_right():
    def fails(mark):
        mark("once")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        record_course(fails, CPU)
    assert told(record_course(lambda mark: (made(1), mark("a"))[1], CPU))[0] == ("a", KIB, KIB)


def test_the_same_mark_may_come_again():
    def call(mark):
        for _ in range(3):
            made(2)
            mark("again")

    marks = [each.ends_at for each in record_course(call, CPU).stretches]
    assert marks == ["again", "again", "again", END]


def test_a_stretch_is_a_value():
    one = Stretch(ends_at="a", peak_bytes=2, level_bytes=1, noted=3)
    assert one == Stretch(ends_at="a", peak_bytes=2, level_bytes=1, noted=3)
    assert len({one, one}) == 1
