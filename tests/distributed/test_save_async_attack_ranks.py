"""What attacks on saves of several ranks have found: nothing is committed that is of two moments,
and nothing that is committed is harmed."""

import pytest
from save_async_attack_jobs import late_cancel_job, misusing_job, skip_job

from holdfast.catalog import Catalog
from holdfast.testing import RankGang


@pytest.fixture(scope="module")
def two():
    with RankGang(2) as gang:
        yield gang


def test_a_rank_leaves_a_save_out(tmp_path, two):
    """The others would save what is of one step with what is of another."""
    ends = two.run(skip_job, tmp_path)
    catalog = Catalog(tmp_path)
    for info in catalog.list():
        weight = catalog.read(info.prefix)["model"]["weight"]
        assert len(set(weight.ravel().tolist())) == 1, f"{info.prefix} is of two steps"
    for end in ends:
        assert end.error == "SaveError", end.text
        assert "step is 1 on rank 1 and 0 on rank 0" in end.text


@pytest.mark.parametrize("method", ["save", "save_async"])
def test_a_rank_gives_up_when_all_is_committed(method, tmp_path, two):
    assert all("CancelledError" in each for each in two.run(late_cancel_job, tmp_path, method))
    catalog = Catalog(tmp_path)
    assert [info.prefix for info in catalog.list()] == ["a"]
    assert catalog.verify("a").is_intact


def test_a_callback_of_one_rank_is_refused(tmp_path, two):
    """The ranks agree all the same on how many saves there were."""
    told = two.run(misusing_job, tmp_path)
    (refusal,) = told[1][0]
    assert "Leave it to the thread that trains" in refusal
    for _, end in told:
        assert end.error is None, end.text
    assert len(Catalog(tmp_path).list()) == 2
