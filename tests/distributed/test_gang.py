"""What a gang of ranks refuses, and what it says of calls that go wrong."""

import pytest

from holdfast.errors import ClosedError, RankFailedError
from holdfast.testing import RankGang


def nothing(rank):
    return rank


def unpicklable(rank):
    return lambda: rank


def fails_like_pytest(rank):
    pytest.fail("not as expected")


def test_misuse_is_refused_in_words():
    with RankGang(2) as gang:
        for rank in (2, -1):
            with pytest.raises(ValueError, match="rank must be one of the ranks 0 to 1"):
                gang.kill(rank)
        with pytest.raises(ValueError, match="nothing was started"):
            gang.outcomes()
        with pytest.raises(ValueError, match="top of a module"):
            gang.run(lambda rank: rank)
        with pytest.raises(RankFailedError, match="pickle"):
            gang.run(unpicklable)
        with pytest.raises(RankFailedError, match="not as expected"):
            gang.run(fails_like_pytest)
        assert gang.run(nothing) == [0, 1]  # and all of that has harmed nothing
    for call in (lambda: gang.run(nothing), gang.outcomes, lambda: gang.kill(0)):
        with pytest.raises(ClosedError):
            call()
