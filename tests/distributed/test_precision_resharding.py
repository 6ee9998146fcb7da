"""Mixed precision through `DistributedCheckpoint`: saved on any number of ranks, under DDP or
FSDP2, and gone on with on any other, masters and all state bit by bit the same."""

import precision_saving as jobs
import pytest

from holdfast.testing import RankGang


@pytest.fixture(scope="module")
def gangs():
    with RankGang(1) as one, RankGang(2) as two, RankGang(4) as four:
        yield {1: one, 2: two, 4: four}


def one_value(told):
    """What every rank says alike."""
    first = told[0]
    assert all(each == first for each in told)
    return first


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_on_any_number_of_ranks(gangs, tmp_path, way, precision):
    """Saved on 2 ranks, loaded on 1, 2 and 4: all that was saved is there. On the same number of
    ranks the next steps are the same, too; on another, sums over ranks are in another order."""
    before, after = one_value(gangs[2].run(jobs.saved, tmp_path, way, precision))
    for ranks, gang in gangs.items():
        found, further, _ = one_value(gang.run(jobs.resumed, tmp_path, way, precision))
        assert found == before
        if ranks == 2:
            assert further == after


@pytest.mark.parametrize("ranks", [1, 4])
def test_from_any_number_of_ranks(gangs, tmp_path, ranks):
    before, after = one_value(gangs[ranks].run(jobs.saved, tmp_path, "fsdp"))
    found, _, _ = one_value(gangs[2].run(jobs.resumed, tmp_path, "fsdp"))
    assert found == before
    found, further, _ = one_value(gangs[ranks].run(jobs.resumed, tmp_path, "fsdp"))
    assert found == before
    assert further == after


@pytest.mark.parametrize("warm", [0, 2], ids=["fresh", "trained before"])
def test_a_sharded_optimizer_loads_no_more_than_its_part(gangs, tmp_path, warm):
    """Its moments lie as its masters do, though a fresh one has none to show how."""
    gangs[2].run(jobs.saved, tmp_path, "fsdp")
    for _, _, kinds in gangs[2].run(jobs.resumed, tmp_path, "fsdp", warm=warm):
        assert kinds == {"DTensor"}


@pytest.mark.parametrize("kind", ["sgd", "adafactor"])
def test_with_other_optimizers(gangs, tmp_path, kind):
    before, after = one_value(gangs[2].run(jobs.saved, tmp_path, "ddp", kind=kind))
    found, further, _ = one_value(gangs[2].run(jobs.resumed, tmp_path, "ddp", kind=kind))
    assert (found, further) == (before, after)


def test_from_ddp_to_one_process_and_back(gangs, tmp_path):
    before, _ = one_value(gangs[2].run(jobs.saved, tmp_path / "a", "ddp", "fp16"))
    found, _, _ = one_value(gangs[1].run(jobs.resumed, tmp_path / "a", "one", "fp16"))
    assert found == before
    before, _ = one_value(gangs[1].run(jobs.saved, tmp_path / "b", "one", "fp16"))
    found, _, _ = one_value(gangs[4].run(jobs.resumed, tmp_path / "b", "ddp", "fp16"))
    assert found == before


def test_with_masters_that_are_remainders(gangs, tmp_path):
    before, after = one_value(gangs[2].run(jobs.saved, tmp_path, "ddp", "remainder"))
    found, further, _ = one_value(gangs[2].run(jobs.resumed, tmp_path, "ddp", "remainder"))
    assert (found, further) == (before, after)
    found, _, _ = one_value(gangs[1].run(jobs.resumed, tmp_path, "one", "bf16"))
    masters = [each for each in before if each[0][:2] == ("optimizer", "masters")]
    assert masters == [each for each in found if each[0][:2] == ("optimizer", "masters")]


def test_after_a_fallback(gangs, tmp_path):
    """The model that resumes is 16-bit until it has loaded."""
    before, after = one_value(gangs[1].run(jobs.saved, tmp_path, "one", "soon fp32"))
    assert (("optimizer", "has_fallback"), True) in before
    found, further, _ = one_value(gangs[1].run(jobs.resumed, tmp_path, "one", "soon fp32"))
    assert (found, further) == (before, after)


@pytest.mark.parametrize("format", ["SINGLE_FILE", "CONSOLIDATED"])
def test_in_every_format(gangs, tmp_path, format):  # noqa: A002 -- the option's own word
    from holdfast.distributed import CheckpointFormat

    how = {"format": CheckpointFormat[format]}
    before, _ = one_value(gangs[2].run(jobs.saved, tmp_path, "fsdp", **how))
    found, _, _ = one_value(gangs[1].run(jobs.resumed, tmp_path, "fsdp"))
    assert found == before


def test_after_a_fallback_that_ddp_does_not_allow(gangs, tmp_path):
    gangs[1].run(jobs.saved, tmp_path, "one", "soon fp32")
    for error, text, unchanged in gangs[2].run(jobs.refused, tmp_path, "ddp", "soon fp32", "adamw"):
        assert error == "ValidationError"
        assert "DistributedDataParallel" in text
        assert unchanged


def test_what_does_not_fit_changes_nothing_on_any_rank(gangs, tmp_path):
    gangs[2].run(jobs.saved, tmp_path, "ddp", "bf16", "adamw")
    for precision, kind, word in (("fp16", "adamw", "float16 is wanted"), ("bf16", "sgd", "SGD")):
        for error, text, unchanged in gangs[2].run(jobs.refused, tmp_path, "ddp", precision, kind):
            assert error == "ValidationError"
            assert word in text
            assert unchanged


@pytest.mark.parametrize("precision", ["soon fp32", "bf16"])
def test_if_one_rank_fails_all_are_as_they_were(gangs, tmp_path, precision):
    """Also if the model had to become FP32 for what was loaded."""
    gangs[2].run(jobs.saved_beside, tmp_path, "one", precision)
    for told, unchanged, goes_on in gangs[2].run(jobs.one_rank_fails, tmp_path, "one", precision):
        assert "not here" in told
        assert unchanged
        assert goes_on


def test_a_file_of_one_process_cannot_hold_a_sharded_one(gangs, tmp_path):
    for error, text in gangs[2].run(jobs.file_of_a_sharded_one, tmp_path / "mp.safetensors"):
        assert error == "SaveError"
        assert "DistributedCheckpoint.save" in text
    assert not (tmp_path / "mp.safetensors").exists()


def test_a_sharded_one_is_restored_from_memory(gangs):
    assert gangs[2].run(jobs.restored_from_memory) == [(True, True)] * 2
