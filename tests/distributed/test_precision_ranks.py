"""Mixed precision of models that ranks train together: under DDP, which must average gradients as
before, and under FSDP2, whose parameters are the masters."""

import precision_jobs as jobs
import pytest

from holdfast.testing import RankGang

BOTH = {"torch.bfloat16", "torch.float32"}


@pytest.fixture(scope="module")
def gang():
    with RankGang(2) as ranks:
        yield ranks


@pytest.mark.parametrize(
    "words", [{}, {"max_grad_norm": 0.1}, {"master_storage": "remainder"}], ids=str
)
def test_a_model_that_is_wrapped_after_is_averaged(gang, words):
    first, second = gang.run(jobs.wrapped_after, words)
    for told in (first, second):
        assert told["gradients"] == [True] * 4
        assert told["weights"]
        assert told["masters"]
        assert told["dtypes"] == BOTH
        assert told["gradient dtypes"] == BOTH
    assert first["moved"] < 0.05 < second["moved"]  # of AdamW, 4 steps of 0.01 at most


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_may_be_clipped_under_ddp(gang, fused):
    """Those that unscale_ shows are FP32 for a while, which DDP must not mind."""
    for told in gang.run(jobs.wrapped_after, {}, fused=fused, unscale=True):
        assert told["gradients"] == [True] * 4
        assert told["masters"]
        assert told["gradient dtypes"] == BOTH


def test_other_optimizers_under_ddp(gang):
    for told in gang.run(jobs.wrapped_after, {}, fused=False):
        assert told["gradients"] == [True] * 4
        assert told["masters"]


def test_gradients_in_fp32_are_refused_under_ddp(gang):
    for problem in gang.run(jobs.added_up_under_ddp):
        assert "reduce_dtype=torch.float32" in problem


@pytest.mark.parametrize("given", ["ddp", "inside", "none"])
def test_a_model_that_is_wrapped_before_is_refused_unchanged(gang, given):
    """Its gradients would no longer be averaged, and nothing would say so."""
    for problem, same in gang.run(jobs.wrapped_before, given):
        assert "Wrap it after" in problem
        assert same


def test_a_model_that_was_bf16_when_it_was_wrapped(gang):
    for equal, names, same in gang.run(jobs.wrapped_as_bf16):
        assert equal == [True] * 3
        assert names[0] == "start.weight"
        assert same


def test_fallback_under_ddp_without_rewrap_is_an_error_on_all_ranks(gang):
    for told in gang.run(jobs.falls_back, False):
        assert "DistributedDataParallel" in told["problem"]
        assert "masters are intact" in told["problem"]
        assert told["kept"]
        assert not told["has_fallback"]
        assert told["gradients"] == [True, True]
        assert told["dtypes"] == {"torch.float16", "torch.float32"}


def test_fallback_under_ddp_with_rewrap(gang):
    for told in gang.run(jobs.falls_back, True):
        assert told["problem"] is None
        assert told["fell back"]
        assert told["kept"]
        assert told["calls"] == [True]
        assert told["gradients"] == [True, True]
        assert told["weights"]
        assert told["dtypes"] == {"torch.float32"}


def test_a_rewrap_that_fails_is_no_half_of_a_fallback(gang):
    for told in gang.run(jobs.rewrap_fails):
        assert told == ("not today", True, 1.0, {"torch.float32"})


@pytest.mark.parametrize("most", [None, 0.05])
@pytest.mark.parametrize("fused", [True, False])
def test_fsdp2_parameters_are_the_masters(gang, fused, most):
    first, second = gang.run(jobs.adopted, fused, most)
    assert [norm for norm, _ in first["norms"]] == [norm for norm, _ in second["norms"]]
    for told in (first, second):
        assert told["same memory"]
        assert told["same"]
        for mine, torchs in told["norms"]:
            assert mine == pytest.approx(torchs, rel=1e-5)
        if most is None:
            assert told["spans"] == [0, 0, 0]
        assert max(told["spans"]) < 1e-5


@pytest.mark.parametrize("rank", [0, 1])
def test_an_overflow_of_one_shard_is_one_of_all(gang, rank):
    told = gang.run(jobs.overflows_on_one, {rank})
    assert told == [(False, ("start.weight",), True)] * 2


def test_large_gradients_of_shards_are_applied(gang):
    for applied, ratio in gang.run(jobs.large_gradients):
        assert applied
        assert ratio == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("with_rewrap", [True, False])
def test_fallback_under_fsdp2_is_an_error_on_all_ranks(gang, tmp_path, with_rewrap):
    """A module cannot be sharded twice, so that no rewrap helps."""
    told = gang.run(jobs.sharded_falls_back, tmp_path, with_rewrap=with_rewrap)
    for problem, has_fallback, skipped, calls, _ in told:
        assert "FSDP2" in problem
        assert "Precision.FP32" in problem
        assert not has_fallback
        assert skipped == 2
        assert calls == 0


def test_what_the_error_says_of_fsdp2_works(gang, tmp_path):
    """Saved, and loaded where the model computes in FP32: from the same masters and state."""
    saved = [told[-1] for told in gang.run(jobs.sharded_falls_back, tmp_path)]
    for before, (after, scale, losses, same) in zip(
        saved, gang.run(jobs.goes_on_in_fp32, tmp_path), strict=True
    ):
        assert after == before
        assert scale == 1.0
        assert losses[-1] < losses[0]
        assert same


def test_what_the_error_says_of_ddp_works(gang, tmp_path):
    told = gang.run(jobs.goes_on_in_fp32_under_ddp, tmp_path / "mp.safetensors")
    for problem, same, equal in told:
        assert "load_and_restore" in problem
        assert same
        assert equal == [True, True]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("16-bit", "no FP32 master can be made"),
        ("precision", "but FSDP2 computes in torch.float16"),
        ("patterns", "a fully_shard of their own"),
        ("remainder", "not for FSDP2"),
        ("no model", "model=model"),
    ],
)
def test_sharded_otherwise_is_refused(gang, case, words):
    for problem in gang.run(jobs.refused, case):
        assert words in problem
