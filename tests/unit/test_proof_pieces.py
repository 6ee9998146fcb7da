"""Tests of pytest's as batches of ``make proof``: each is run, and none is left out."""

import re

import proof_tools
import pytest

import exact_resume
import long_tests
import rank_faults
from _campaign import Outcome
from _command import Places, _names
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
