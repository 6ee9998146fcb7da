"""The campaigns of ``make proof`` themselves: what they catch, and that nothing is left out."""

import random
import re

import proof_tools
import pytest
from rotting import Rotten

import bit_rot
import exact_resume
import long_tests
import rank_faults
from _campaign import Outcome
from _command import Places, _names
from _subjects import HOLDFAST, Holdfast, TorchSave, state_of, value_of
from _tests import Piece, batches_of, read_report, run_batch, run_tests


def tally_of(harm, *arguments, cases=60, **more):
    tally = bit_rot.Tally()
    harm(tally, *arguments, random.Random(5), cases, **more)
    return tally


# --- bit rot


def test_holdfast_notices_every_wound():
    tally = tally_of(bit_rot.harm_in_memory)
    assert (tally.cases, tally.violated, tally.told) == (60, 0, [])
    assert tally.facts["noticed and located"] == 60
    disk = tally_of(bit_rot.harm_on_disk, Holdfast(500))
    assert (disk.cases, disk.violated, disk.told) == (60, 0, [])
    kinds = ("flipped bits", "zeroed blocks", "exchanged blocks", "wrong lengths")
    assert all(disk.facts[kind] for kind in kinds)


class Trusting(Holdfast):
    """Reads holdfast's files, and believes them."""

    def load(self, folder):
        from safetensors.torch import load_file

        (path,) = folder.glob("latest/*.safetensors")
        found = load_file(path)
        return value_of({name: found[name] for name in state_of(0)})


class Mute(Holdfast):
    """Notices, and says nothing of where."""

    def load(self, folder):
        try:
            return super().load(folder)
        except Exception as error:
            raise ValueError("something is wrong") from error


class Forgiving(Holdfast):
    """Loads what it knew before, whatever is there now."""

    def load(self, folder):
        return bit_rot.NEW


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (Trusting, "loaded without an error, and it claims to be value 2"),
        (Mute, "names no file"),
        (Forgiving, "loaded without an error, though no value was wrong"),
    ],
)
def test_a_saver_that_were_broken_would_be_caught(broken, words):
    assert broken.name == HOLDFAST
    tally = tally_of(bit_rot.harm_on_disk, broken(500), cases=40)
    assert tally.violated > 10
    assert any(words in told for told in tally.told)
    assert tally.outcome().violated == tally.violated


class Mistaken(Rotten):
    """Takes the tensors of a file for others."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._places = {
            key: [(start, stop, name[::-1]) for start, stop, name in places]
            for key, places in self._places.items()
        }


class Blind(Rotten):
    """Its catalog never sees the harm."""

    def _said(self, wound):
        for key in wound.files:
            self._storage.delete(key)
            self._storage.create(key, self.files[key])
        return super()._said(wound)


def test_a_catalog_that_names_another_tensor_or_nothing_would_be_caught():
    mistaken = tally_of(bit_rot.harm_in_memory, make=Mistaken)
    assert 0 < mistaken.violated < 60  # those in headers, tables and records are named rightly
    assert "verify named" in mistaken.told[0]
    blind = tally_of(bit_rot.harm_in_memory, make=lambda seed, level, scale: Blind(seed))
    assert blind.violated == 60
    assert "verify found nothing" in blind.told[0]


def test_a_peer_that_verifies_nothing_loads_wrong_values():
    tally = tally_of(bit_rot.harm_on_disk, TorchSave(500), cases=40)
    assert tally.violated == tally.facts["silently wrong"] > 0
    assert tally.facts["refused"] > 0


# --- tests as batches


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
    } - {"tests/unit/test_proof_campaigns.py"}
    run_here = {piece.tests for piece in long_tests.PIECES}
    assert marked == run_here | long_tests.COVERED.keys()
    assert not run_here & long_tests.COVERED.keys()
    assert set(long_tests.COVERED.values()) <= {*_names(Places())}


@pytest.mark.parametrize("campaign", [long_tests, exact_resume, rank_faults])
def test_the_tests_of_a_campaign_are_there(campaign):
    for piece in campaign.PIECES:
        path, _, name = piece.tests.partition("::")
        assert f"def {name}" in (proof_tools.REPO / path).read_text("utf-8")
