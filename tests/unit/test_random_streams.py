"""Random streams are read cheaply and put back exactly, whatever they are drawn from."""

# ruff: noqa: NPY002 -- the legacy streams are the subject

import random

import numpy as np
import pytest
import torch

from holdfast.activation._regions import streams as _streams
from holdfast.activation._regions.streams import (
    advanced,
    default_streams,
    marks,
    rewound,
    stream_of,
)


def draws():
    return (
        torch.rand(3).tolist(),
        random.random(),
        random.gauss(0, 1),
        np.random.standard_normal(),
        np.random.rand(),
    )


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.mark.parametrize("odd", [False, True], ids=["", "half a pair drawn"])
def test_what_was_drawn_is_drawn_again_and_the_streams_stand_where_they_did(odd):
    if odd:  # the second number of a pair waits outside the twister
        random.gauss(0, 1)
        np.random.standard_normal()
    streams = default_streams(())
    before = marks(streams)
    drawn = draws()
    assert [mark.stream for mark in advanced(before)] == streams
    after = marks(streams)
    with rewound(streams, before):
        assert draws() == drawn
        draws()
    assert advanced(after) == []


def test_the_second_number_of_a_pair_counts_as_drawn():
    np.random.standard_normal()
    streams = default_streams(())
    before = marks(streams)
    waiting = np.random.standard_normal()  # moves no word of the twister
    moved = advanced(before)
    assert len(moved) == 1
    with rewound(streams, moved):
        assert np.random.standard_normal() == waiting


def test_a_stream_nobody_drew_from_has_not_advanced():
    before = marks(default_streams(()))
    torch.rand(1)
    assert [mark.stream for mark in advanced(before)] == [before[0].stream]


def generators():
    yield torch.Generator().manual_seed(3), lambda g: torch.rand(2, generator=g).tolist()
    yield random.Random(3), lambda g: (g.random(), g.gauss(0, 1))
    yield np.random.RandomState(3), lambda g: (g.standard_normal(), g.rand())
    for bits in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64):
        yield np.random.Generator(bits(3)), lambda g: (g.standard_normal(), g.random(dtype="f4"))


@pytest.mark.parametrize(("generator", "draw"), list(generators()))
def test_a_named_generator_is_rewound(generator, draw):
    draw(generator)
    stream = stream_of(generator)
    before = marks([stream])
    assert advanced(before) == []
    drawn = draw(generator)
    assert len(advanced(before)) == 1
    with rewound([stream], before):
        assert draw(generator) == drawn
    assert draw(generator) != drawn


@pytest.mark.parametrize("wrong", [7, "seed", random.SystemRandom(), torch.zeros(1), None])
def test_what_cannot_be_rewound_is_refused(wrong):
    with pytest.raises(ValueError, match="generators must be"):
        stream_of(wrong)


def test_the_streams_come_back_when_the_block_raises():
    streams = default_streams(())
    before = marks(streams)
    with pytest.raises(KeyError), rewound(streams, before):
        draws()
        raise KeyError
    assert advanced(before) == []


def test_where_memory_cannot_be_read_the_slow_way_gives_the_same():
    slow = _streams.PythonStream()
    slow._address = 0
    state = slow.read()
    drawn = (random.random(), random.gauss(0, 1))
    assert slow.read() != state
    slow.write(state)
    assert (random.random(), random.gauss(0, 1)) == drawn


def test_numpy_under_another_bit_generator_is_rewound_too():
    before_all = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        streams = default_streams(())
        assert isinstance(streams[2], _streams.SlowStream)
        before = marks(streams)
        drawn = (np.random.standard_normal(), np.random.rand())
        assert len(advanced(before)) == 1
        with rewound(streams, before):
            assert (np.random.standard_normal(), np.random.rand()) == drawn
    finally:
        np.random.set_bit_generator(before_all)
    assert isinstance(default_streams(())[2], _streams.NumpyStream)


def test_a_default_device_does_not_move_the_state():
    streams = default_streams(())
    before = marks(streams)
    drawn = torch.rand(3).tolist()
    with torch.device("meta"), rewound(streams, before):
        pass
    with rewound(streams, before), torch.device("meta"):
        torch.rand(3)
    with rewound(streams, before):
        assert torch.rand(3).tolist() == drawn
