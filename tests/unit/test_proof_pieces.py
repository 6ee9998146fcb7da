"""Tests of pytest's as batches of ``make proof``: each is run, and none is left out."""

import errno
import re
import signal
from collections import Counter
from itertools import product

import proof_tools
import pytest
from campaign import ENDLESS, FINITE, WORKLOADS
from injections import ACTS

import crash_states
import exact_resume
import failing_calls
import kills
import long_tests
import rank_faults
from _campaign import HOLDFAST, Outcome
from _command import Places, _names
from _forked import Found
from _subjects import TORCH
from _tests import Piece, batches_of, read_report, run_batch, run_tests

REPORT = """<testsuites><testsuite>
<testcase classname="t.a" name="good"><properties><property name="cases" value="40"/>
<property name="kills" value="7"/></properties></testcase>
<testcase classname="t.a" name="plain"/>
<testcase classname="t.a" name="bad[1]"><failure message="assert 1 == 2&#10;more">...</failure>
</testcase>
<testcase classname="t.a" name="left out"><skipped message="needs root"/></testcase>
<testcase classname="t.a" name="late"><error message="fixture"/></testcase>
</testsuite></testsuites>"""


def test_a_report_of_pytest_is_an_outcome():
    found = read_report(REPORT, is_last=True)
    assert found == Outcome(
        cases=43,
        violated=2,
        violations=("t.a::bad[1]: assert 1 == 2 more", "t.a::late: fixture"),
        facts={"kills": 7, "skipped: needs root": 1},
        is_last=True,
    )


def test_tests_are_run_in_parts_and_every_one_once(tmp_path):
    path = tmp_path / "test_parts.py"
    path.write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', range(5))\n"
        "def test_it(n, record_property):\n"
        "    record_property(f'number {n}', 1)\n"
        "    assert n != 3\n"
        "@pytest.mark.proof\n"
        "def test_long(): ...\n"
    )
    pieces = [Piece(tests=str(path), batches=1, only="proof"), Piece(tests=str(path), batches=2)]
    assert batches_of(pieces) == 3
    found = [run_batch(pieces, number) for number in (1, 2)]
    assert [each.cases for each in found] == [3, 3]
    assert [each.is_last for each in found] == [False, True]
    assert {**found[0].facts, **found[1].facts} == {f"number {n}": 1 for n in range(5)}
    assert [each.violated for each in found] == [0, 1]
    assert "test_it[3]: assert 3 != 3" in found[1].violations[0]
    with pytest.raises(IndexError):
        run_batch(pieces, 3)
    with pytest.raises(RuntimeError, match="exit code 5"):  # no test is no success
        run_tests(Piece(tests=str(path), batches=1, only="proof and not proof"), 0)


def test_every_long_test_is_run_by_some_campaign():
    marked = {
        str(path.relative_to(proof_tools.REPO))
        for path in (proof_tools.REPO / "tests").rglob("test_*.py")
        if re.search(r"pytest\.mark\.proof\b", path.read_text("utf-8"))
    } - {"tests/unit/test_proof_pieces.py"}
    run_here = {piece.tests for piece in long_tests.PIECES}
    assert marked == run_here | long_tests.COVERED.keys()
    assert not run_here & long_tests.COVERED.keys()
    assert set(long_tests.COVERED.values()) <= {*_names(Places())}


@pytest.mark.parametrize("campaign", [long_tests, exact_resume, rank_faults])
def test_the_tests_of_a_campaign_are_there(campaign):
    for piece in campaign.PIECES:
        path, _, name = piece.tests.partition("::")
        assert f"def {name}" in (proof_tools.REPO / path).read_text("utf-8")


def test_workloads_that_run_out_are_crashed_in_one_batch_each_and_the_others_evenly():
    per = crash_states.FROM_OUTSIDE
    inside = [batch for batch in range(20 * per) if batch % per]
    done = Counter(crash_states.workload_of(batch).name for batch in inside)
    assert done.keys() == {workload.name for workload in WORKLOADS}
    assert {done[workload.name] for workload in FINITE} == {1}
    often = [done[workload.name] for workload in ENDLESS]
    assert max(often) - min(often) <= 1


def test_every_act_meets_with_every_error_the_likely_ones_first():
    per = failing_calls.FROM_OUTSIDE
    inside = [batch for batch in range(per * 100) if batch % per]
    met = [
        (act, code)
        for act, codes in map(failing_calls.turn_of, inside[: 7 * len(ACTS)])
        for code in codes
    ]
    assert {*met} == {*product(ACTS, failing_calls.INSIDE_CODES)}
    likely = {errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINTR}
    assert {*met[: len(ACTS) * len(likely)]} == {*product(ACTS, likely)}


@pytest.mark.parametrize(("name", "violated"), [(HOLDFAST, 1), (TORCH, 0)])
def test_a_saver_that_dies_of_a_failing_call_has_told_nobody(name, violated):
    tally = failing_calls.Tally(name)
    tally.judge(failing_calls.REFUSED, Found(failing_calls.OLD), "one")
    tally.judge(-signal.SIGABRT, Found(failing_calls.OLD), "another")
    assert tally.facts == {"told of the failure": 1, "died of a signal": 1}
    assert tally.violated == violated
    assert tally.told == ["another: the save died of SIGABRT"] * violated


def test_an_attempt_that_breaks_a_promise_is_a_case_and_breaks_it_once():
    tally = kills.Tally()
    for problems, during in ([], False), ([], True), (["stuck", "lost"], True), (["lost"], False):
        tally.add(problems, during=during)
    assert (tally.cases, tally.violated, tally.told) == (3, 2, ["stuck", "lost", "lost"])
