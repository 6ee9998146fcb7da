"""The mutation tester of ``make mutants``: what it changes, what it leaves alone, and that a change
is told from none."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "proof"))

import mutants as campaign
from _covering import LIBRARY, Covering, TimedTest
from _mutating import mutants
from _trying import lane


def changes(source):
    return [(change.was, change.becomes) for change in mutants(source.encode())]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return a < b", ["return None", "(a <= b)", "(a >= b)"]),
        ("return a == b", ["return None", "(a != b)"]),
        ("return a is not b", ["return None", "(a is b)"]),
        ("return a and b", ["return None", "(a or b)", "(b)", "(a)"]),
        ("return not a", ["return None", "(a)"]),
        ("return a + 7", ["return None", "(a - 7)", "8", "(6)"]),
        ("return True", ["return None", "False"]),
        ("return False", ["True"]),
        ("return zip(a, strict=True)", ["return None"]),
        ("return a[1:b]", ["return None", "", "", "2", "(0)"]),
        ("return f(a, b)", ["return None", "(f(b, a))"]),
        ("return min(a)", ["return None", "max"]),
        ("a += b", ["pass", "a -= b"]),
        ("a[b] = f()", ["pass"]),
        ("f()", ["pass"]),
        ("raise ValueError(1)", ["pass"]),
        ("if a: return", ["(not a)", "pass"]),
        ("for a in b: break", ["continue"]),
        ("return [a for a in b if c(a)]", ["return None", "True"]),
    ],
)
def test_a_statement_is_changed_in_these_ways(body, expected):
    source = f"def g(a, b):\n    {body}\n"
    found = mutants(source.encode())
    assert [change.becomes for change in found] == expected
    for change in found:
        compile(change.applied(source.encode()), "changed", "exec")
        assert (change.where, change.line, change.at_import) == ("g", 2, False)


def test_what_no_behaviour_hangs_on_is_left_alone():
    assert (
        changes(
            '''
"""Words: 1 < 2."""
import a
from b import c as d

__all__ = ["x"]
Kind = int | str

@dataclass(frozen=True)
class A:
    x: "int | None"
    def __repr__(self) -> str:
        return f"{self.x + 1}"

def f(a: int | str) -> int | None:
    """More than 1."""
    _log.info("%d", 1 + 2)
    assert a is not None
'''
        )
        == []
    )


def test_a_change_is_found_again_by_its_function_and_its_words():
    source = "x = 3\nclass A:\n    def f(self):\n        é = 'é'; return 3 + 3\n".encode()
    found = [change for change in mutants(source) if change.becomes == "4"]
    assert [(change.where, change.nth) for change in found] == [("", 0), ("A.f", 0), ("A.f", 1)]
    assert found[0].at_import
    assert found[2].applied(source).decode().endswith("é = 'é'; return 3 + 4\n")


def test_a_draw_hangs_on_the_seed_and_not_on_what_else_there_is():
    everything = [
        campaign.Placed(path=LIBRARY / "reshard" / "_box.py", mutant=change, key=str(change.start))
        for change in mutants((LIBRARY / "reshard" / "_box.py").read_bytes())
    ]
    drawn = campaign.draw(everything, 0, 20)
    assert campaign.draw(everything[::-1], 0, 20) == drawn
    assert campaign.draw(everything, 1, 20) != drawn
    fewer = [placed for placed in everything if placed is not drawn[3]]
    assert campaign.draw(fewer, 0, 19) == [*drawn[:3], *drawn[4:]]


def test_the_closest_tests_come_first_and_those_with_torch_last():
    path = LIBRARY / "reshard" / "_box.py"
    source = path.read_bytes()
    change = next(each for each in mutants(source) if not each.at_import)
    placed = campaign.Placed(path=path, mutant=change, key="")

    def test(nodeid, seconds=0.1, with_torch=False):
        return TimedTest(nodeid=nodeid, seconds=seconds, with_torch=with_torch)

    about = [test("a.py::t[1]"), test("a.py::t[2]", 0.2), test("a.py::u", 0.3)]
    wide = [test("b.py::t"), test("c.py::t")]
    others = [test(f"{file}.py::other{n}") for n in range(9) for file in "bc"]
    torch = [test("d.py::t", with_torch=True)]
    running = [*about, *wide, *torch]
    covering = Covering(
        tests={each.nodeid: each for each in [*running, *others]},
        lines={path: {change.line: running}},
        rooms={},
        unused={},
    )
    first, then, last = campaign.choose(covering, placed)
    assert [each.nodeid for each in first] == ["a.py::t[1]", "b.py::t", "a.py::u", "a.py::t[2]"]
    assert [each.nodeid for each in then] == ["c.py::t"]
    assert [each.nodeid for each in last] == ["d.py::t"]


def test_an_equivalent_mutant_is_one_that_is_there():
    """An entry that names nothing any more would excuse nothing, and looks as if it did."""
    named = {campaign._name(placed) for placed in campaign.population()}
    assert campaign.equivalents().keys() <= named


def test_a_change_that_a_test_notices_is_told_from_none():
    path = LIBRARY / "reshard" / "_box.py"
    source = path.read_bytes()
    (change,) = [
        each
        for each in mutants(source)
        if (each.where, each.was) == ("Box.size", "return math.prod(self.shape)")
    ]
    tests = ["tests/unit/test_boxes.py::test_a_box_of_no_dimensions_is_one_element"]
    with lane() as mine:
        assert not mine.try_tests(path, source, tests, 10).failed
        tried = mine.try_tests(path, change.applied(source), tests, 10)
        assert (tried.failed, tried.by) == (True, tests[0])
        assert not mine.try_tests(path, source, tests, 10).failed
    assert path.read_bytes() == source
