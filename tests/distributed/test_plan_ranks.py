"""Plans for models that are replicated, sharded or split over ranks: one plan for all of them, the
same gradients, no step without the others."""

import plan_jobs as jobs
import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from holdfast.testing import RankGang

KEPT = {"reshard_after_forward": False}
# Of a step of so small a model collectives may hold this much, in one step longer than in another.
BUFFERS = 0.15
HALF = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}


@pytest.fixture(scope="module")
def gang():
    with RankGang(2) as ranks:
        yield ranks


def assert_one_plan(told, prefix=""):
    first, second = told
    assert first["plan"] == second["plan"]
    assert first["budget"] == second["budget"]
    assert first["stages"] == [f"{prefix}blocks.{number}" for number in range(jobs.DEPTH)]
    assert first["kinds"] - {"keep"}
    for each in told:
        assert each["differing"] == []
        assert min(each["recipes"]) > 0


def assert_within(told):
    for each in told:
        assert each["peak"] <= 1.05
        assert each["share"] < 0.8
        assert each["thought"] == pytest.approx(1, abs=BUFFERS)
        assert each["fallbacks"] == []


@pytest.mark.parametrize(
    ("budget", "words", "net_words"),
    [
        ("70%", {}, {}),
        ("40%", {}, {}),
        ("55%", {"gradient_as_bucket_view": True}, {}),
        ("55%", {"static_graph": True}, {}),
        ("55%", {"find_unused_parameters": True}, {"spare": True}),
    ],
    ids=str,
)
def test_replicated(gang, budget, words, net_words):
    told = gang.run(jobs.planned, "ddp", words, budget, **net_words)
    assert_one_plan(told, "module.")
    assert_within(told)


@pytest.mark.parametrize(
    ("budget", "words"), [("75%", {}), ("50%", {}), ("60%", KEPT), ("60%", HALF)], ids=str
)
def test_sharded(gang, budget, words):
    """The weights are freed after a stage's forward and gathered again before its backward, in
    which recipes and replays read them: after three steps of training they are the same."""
    told = gang.run(jobs.planned, "fsdp", words, budget)
    assert_one_plan(told)
    assert_within(told)


@pytest.mark.parametrize("words", [{}, KEPT], ids=["again", "kept"])
def test_sharded_inside_of_the_stages_too(gang, words):
    """Weights that are away when the stage has ended cannot be read by recipes."""
    told = gang.run(jobs.planned, "fsdp inside", words, "60%")
    assert_one_plan(told)
    assert_within(told)


@pytest.mark.parametrize("budget", ["70%", "45%"])
def test_split_into_tensors_of_all_ranks(gang, budget):
    told = gang.run(jobs.planned, "tp", {}, budget)
    assert_one_plan(told)
    assert_within(told)


@pytest.mark.parametrize(
    ("kind", "samples"),
    [
        ("alone", (3, 8)),
        ("ddp", (8, 3)),
        ("ddp", (3, 8)),
        ("fsdp", (3, 8)),
        ("fsdp inside", (8, 3)),
    ],
)
def test_ranks_with_batches_of_other_sizes_plan_for_the_largest(gang, kind, samples):
    told = gang.run(jobs.planned, kind, {}, "60%", samples=samples)
    assert_one_plan(told, "module." if kind == "ddp" else "")
    assert all(each["peak"] <= 1.05 for each in told)
    smaller, larger = sorted(told, key=lambda each: each["peak"] / each["share"])
    assert larger["share"] < 0.75
    if kind != "fsdp inside":  # the smaller one need not save as much
        assert smaller["share"] > larger["share"]


def test_a_slower_rank_gets_the_same_plan(gang):
    assert_one_plan(gang.run(jobs.planned, "alone", {}, "50%", slow=(0, 300)))


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp inside"])
def test_batches_that_differ_from_rank_to_rank_and_step_to_step(gang, kind):
    told = gang.run(jobs.unlike, kind, "60%", [(6, 3), (2, 6), (6, 24)])
    assert_one_plan(told, "module." if kind == "ddp" else "")


def test_stages_that_talk_are_run_again_on_all_ranks_or_on_none(gang):
    """Replayed for the larger batch alone, they would wait for ever for the other rank."""
    told = gang.run(jobs.unlike, "ddp", "60%", [(6, 3), (2, 6), (6, 24)], talks=True)
    assert_one_plan(told, "module.")
    assert told[0]["fallbacks"] == []
    assert told[1]["fallbacks"] == ["meets larger batches than the sample, and does as for that"]


def test_stages_that_talk_and_are_replayed(gang):
    told = gang.run(jobs.planned, "ddp", {}, "36%", talks=True)
    assert_one_plan(told, "module.")
    assert_within(told)
    assert told[0]["kinds"] & {"input", "segment"}


@pytest.mark.parametrize("way", ["apart", "both"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_gradients_that_are_added_up(gang, kind, way):
    told = gang.run(jobs.accumulated, kind, {}, way)
    assert_one_plan(told, "module." if kind == "ddp" else "")


def test_a_plan_for_the_model_inside_of_its_wrapper(gang):
    told = gang.run(jobs.inner)
    assert_one_plan(told)
    for each in told:
        assert each["peak"] <= 1.05
        assert "no module 'blocks.0'" in each["refused"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_budget_too_small_for_one_rank_is_refused_on_all(gang, kind):
    told = gang.run(jobs.refused, kind, ("1MiB", "1MiB"), samples=(2, 40))
    (first, left), (second, left_too) = told
    assert first == second
    assert first[0] == "BudgetError"
    assert "no plan fits 1.00 MiB: the smallest step" in first[1]
    assert left == left_too == []


def test_of_two_budgets_the_smaller_counts(gang):
    told = gang.run(jobs.refused, "ddp", ("90%", "5%"))
    assert told[0] == told[1]
    assert told[0][0][0] == "BudgetError"


def test_ranks_that_name_other_stages_are_refused(gang):
    all_, two = ["module.blocks.*"], ["module.blocks.0", "module.blocks.1"]
    asked = ({"stages": all_}, {"stages": two})
    (problem, left), other = gang.run(jobs.refused, "ddp", ("50%", "50%"), asked=asked)
    assert (problem, left) == other
    assert problem[0] == "PlanError"
    assert f"rank 1 calls holdfast.plan with stages {two}, and rank 0 with" in problem[1]
    assert left == []


@pytest.mark.parametrize(
    ("budgets", "asked", "said"),
    [
        (("50%", 2**21), ({}, {}), "with a budget given as 'bytes', and rank 0 with 'a share'"),
        (
            ("50%", "50%"),
            ({}, {"tier": "disk"}),
            "rank 1 calls holdfast.plan with tier 'disk', and",
        ),
        (("50%", "50%"), ({"solver": "highs"}, {}), "with solver 'chain', and rank 0 with 'highs'"),
    ],
    ids=["budget", "tier", "solver"],
)
def test_ranks_that_ask_for_other_plans_are_refused(gang, budgets, asked, said):
    one, other = gang.run(jobs.refused, "ddp", budgets, asked=asked)
    assert one == other
    assert one[0][0] == "PlanError"
    assert said in one[0][1]
    assert one[1] == []


def test_an_argument_that_one_rank_gets_wrong_is_told_to_the_other(gang):
    (first, left), (second, left_too) = gang.run(jobs.refused, "ddp", ("50%", "5 parsecs"))
    assert second[0] == "ValueError"
    assert "unknown unit 'parsecs'" in second[1]
    assert first[0] == "PlanError"
    assert "rank 1 failed in holdfast.plan: ValueError: budget '5 parsecs'" in first[1]
    assert left == left_too == []


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize(("kind", "call"), [("ddp", 1), ("alone", 1), ("alone", 7)])
def test_a_rank_that_fails_alone_is_told_of_and_nobody_waits(gang, kind, where, call):
    """In the first forward also where backward would wait for it, as DDP's; later where the model
    does not talk."""
    told = gang.run(jobs.broken, kind, where, call)
    for rank, (problem, calls, left) in enumerate(told):
        if rank == where:
            assert problem == ("ZeroDivisionError", "the batch of this rank is empty")
        else:
            assert problem[0] == "PlanError"
            assert (
                f"rank {where} failed in holdfast.plan: ZeroDivisionError: the batch" in problem[1]
            )
        assert left == []
        if call == 1:
            assert calls == 1


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_an_optimizer_that_steps_in_backward_is_refused_on_all(gang, kind):
    for problem, left in gang.run(jobs.hooked, kind):
        assert "start.weight' has a hook that is called in backward" in problem
        assert left == []


def test_gradients_that_fsdp_keeps_to_itself_are_not_added_to(gang):
    for problem, left in gang.run(jobs.unsynced):
        assert "FSDP does not exchange the gradients of 'the model' now" in problem
        assert left == []


def test_one_rank_decides_for_all(gang):
    """Ranks that solve for themselves, with other versions of a library, might find other plans."""
    heaviest = (1, "heaviest")
    first, then = "as rank 0 would have it", "as rank 1 would have it"
    assert gang.run(jobs.decided) == [(first, heaviest, then, [0]), (first, heaviest, then, [1])]


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever(gang):
    told, fine = gang.run(jobs.late)
    assert "1 ranks did not come to where the others wait for them in holdfast.plan" in told
    assert fine == ""
