"""A plan's report: what the page and the text say, that they hold together, and that nothing gets
in or out of them."""

import base64
import dataclasses
import hashlib
import itertools
import re
import subprocess
import sys
from html.parser import HTMLParser

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from holdfast.activation._reporting.chart import ROWS, chart
from holdfast.activation._reporting.folding import folded
from holdfast.activation._reporting.lines import highest, places, thinned
from holdfast.activation._reporting.page import page
from holdfast.activation._reporting.report import CurvePoint, Mark, PlanReport, StageRow, Timeline
from holdfast.activation._reporting.text import text
from holdfast.activation._reporting.words import in_bytes, in_seconds, wrapped

MIB = 2**20
KINDS = {"keep", "recipes", "input", "segment", "moved"}
HOSTILE = '<script>alert("1")</script>&amp;\'x\x1b[31m\x00\ud800\u202eend'
SHOWN = '<script>alert("1")</script>&amp;\'x\ufffd[31m\ufffd\ufffd\ufffdend'


def step(kept, all_, *, calls=6):
    """A made step: each stage's forward goes up to all it saves, then down to what it keeps."""
    levels, marks, alive = [0], [], 0
    for stage, each in enumerate(kept):
        start = len(levels)
        levels += [alive + all_ * call // calls for call in range(1, calls + 1)]
        alive += each
        levels.append(alive)
        marks.append(Mark(kind="forward", stage=stage, start=start, end=len(levels)))
    levels.append(alive + 2 * MIB)
    for stage, each in reversed(list(enumerate(kept))):
        start = len(levels)
        alive -= each
        more_calls = calls if each == all_ else 2 * calls
        levels += [alive + all_ * call // more_calls for call in range(more_calls, -1, -1)]
        marks.append(Mark(kind="backward", stage=stage, start=start, end=len(levels)))
    levels.append(0)
    return Timeline(bytes_=tuple(levels), marks=tuple(marks), peak_bytes=max(levels))


def rows_of(choices, all_=10 * MIB):
    kept = {"keep": all_, "recipes": all_ * 2 // 5, "input": MIB, "moved": 0}
    details = {"recipes": "remakes gelu, layer_norm x2", "input": "replays the block"}
    return tuple(
        StageRow(
            name=f"blocks.{stage}",
            choice=choice,
            kept_bytes=kept.get(choice, MIB if choice.startswith(f"segment {stage}-") else 0),
            kept_all_bytes=all_,
            extra_s=0.0 if choice == "keep" else 0.002 + stage * 1e-5,
            forward_s=0.01,
            detail=details.get(choice, ""),
        )
        for stage, choice in enumerate(choices)
    )


def report_of(choices=("recipes", "recipes", "keep"), **changes):
    rows = rows_of(choices)
    all_ = rows[0].kept_all_bytes
    before = step([all_] * len(rows), all_)
    after = step([row.kept_bytes for row in rows], all_)
    extra = sum(row.extra_s for row in rows)
    made = PlanReport(
        model="GPT",
        device="cpu",
        budget_bytes=after.peak_bytes + MIB,
        save_all_peak_bytes=before.peak_bytes,
        predicted_peak_bytes=after.peak_bytes - 4096,
        measured_peak_bytes=after.peak_bytes,
        step_s=0.1,
        predicted_step_s=0.1 + extra,
        measured_step_s=0.1 + extra * 0.9,
        before=before,
        after=after,
        curve=tuple(
            CurvePoint(
                budget_bytes=12 * MIB + (before.peak_bytes - 12 * MIB) * at // 9,
                extra_s=0.03 * (9 - at) / 9,
            )
            for at in range(10)
        ),
        smallest_bytes=12 * MIB,
        what_sets_it="the backward of blocks.0",
        rows=rows,
        notes=(),
        rounding_bytes=12288,
        planning_s=1.5,
    )
    return dataclasses.replace(made, **changes)


def hostile():
    made = report_of(("recipes", "keep", f"segment {HOSTILE}"))
    rows = tuple(
        dataclasses.replace(row, name=f"{HOSTILE}.{at}", detail=HOSTILE)
        for at, row in enumerate(made.rows)
    )
    return dataclasses.replace(
        made, model=HOSTILE, device=HOSTILE, what_sets_it=HOSTILE, notes=(HOSTILE,), rows=rows
    )


REPORTS = {
    "three blocks": report_of(),
    "one stage": report_of(("keep",)),
    "no extra time": report_of(("keep",) * 5),
    "every choice": report_of(("keep", "recipes", "input", "segment 3-4", "segment 3-4", "moved")),
    "many": report_of(("input",) * 60 + ("recipes",) * 50 + ("keep",) * 10),
    "no curve": report_of(curve=()),
    "no marks": report_of(
        before=Timeline(bytes_=(0, 5, 0), marks=(), peak_bytes=5),
        after=Timeline(bytes_=(0, 3, 1, 0), marks=(), peak_bytes=3),
    ),
    "nothing at all": report_of(
        before=Timeline(bytes_=(), marks=(), peak_bytes=0),
        after=Timeline(bytes_=(), marks=(), peak_bytes=0),
        curve=(),
        rows=(),
        save_all_peak_bytes=0,
        predicted_peak_bytes=0,
        measured_peak_bytes=0,
        step_s=0.0,
    ),
    "roomy": report_of(budget_bytes=64 * 2**30),
    "faster": report_of(measured_step_s=0.09),
    "timed on a busy machine": report_of(measured_step_s=0.04),
    "hostile": hostile(),
}
each_report = pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS.keys())


class Page(HTMLParser):
    """The elements of a page, which must be closed as they were opened."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.elements = []  # (tag, attributes, path of tags above it)
        self.open = []
        self.texts = []  # (path of tags, text)
        self.source = source
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), f"{tag} has an attribute twice"
        self.elements.append((tag, dict(attrs), tuple(self.open)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((tuple(self.open), data))

    def all(self, tag, class_=None):
        return [
            attributes
            for found, attributes, _ in self.elements
            if found == tag and (class_ is None or class_ in attributes.get("class", "").split())
        ]

    def lines(self, name):
        return [path for path in self.all("path", name) if "line" in path["class"].split()]

    def said(self):
        return "".join(data for path, data in self.texts if "style" not in path)

    def hints(self):
        return [data for path, data in self.texts if path[-1:] == ("title",) and "svg" in path]

    def cells(self, part):
        """The rows of the table's head, body or foot, each a list of its cells' words."""
        inside = re.search(rf"<{part}.*?</{part}>", self.source, re.DOTALL).group()
        return [
            [Page(cell).said() for cell in re.findall(r"<t[hd] .*?</t[hd]>", row, re.DOTALL)]
            for row in re.findall(r"<tr.*?</tr>", inside, re.DOTALL)
        ]

    @classmethod
    def of(cls, report):
        return cls(page(report))


def corners(path):
    return [tuple(map(float, pair.split(","))) for pair in re.split("[ML]", path["d"]) if pair]


@each_report
def test_the_page_is_whole_and_needs_nothing_else(report):
    made = Page.of(report)
    source = made.source
    assert source.startswith("<!doctype html>")
    assert source.encode("utf-8")
    tags = {tag for tag, _, _ in made.elements}
    assert not tags & {"script", "link", "img", "image", "iframe", "object", "embed", "use", "base"}
    names = {name for _, attributes, _ in made.elements for name in attributes}
    assert not names & {"src", "href", "xlink:href", "srcset", "action", "data", "style"}
    assert not [name for name in names if name.startswith("on")]
    (style,) = (data for path, data in made.texts if path[-1:] == ("style",))
    assert "url(" not in style
    assert "@import" not in style
    assert "://" not in source


def test_the_policy_forbids_all_but_the_style_of_the_page():
    made = Page.of(report_of())
    (policy,) = (
        meta["content"]
        for meta in made.all("meta")
        if meta.get("http-equiv") == "Content-Security-Policy"
    )
    (style,) = (data for path, data in made.texts if path[-1:] == ("style",))
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.split("; ")[:2] == ["default-src 'none'", f"style-src 'sha256-{digest}'"]


def test_pictures_say_in_words_what_they_show():
    report = report_of()
    wide, narrow, curve, _ = (
        picture["aria-label"] for picture in Page.of(report).all("svg", "picture")
    )
    before, after, budget = map(
        in_bytes, (report.before.peak_bytes, report.after.peak_bytes, report.budget_bytes)
    )
    assert wide == narrow
    assert wide == (
        f"Live memory over one step. Saving everything it peaks at {before}; with the plan at "
        f"{after}. The budget is {budget}."
    )
    assert curve.startswith("Extra time of a step against its budget: smallest 12.0 MiB, +30.0 %;")


@each_report
def test_pictures_and_table_can_be_read_without_seeing_them(report):
    made = Page.of(report)
    assert made.all("html")[0]["lang"] == "en"
    pictures = made.all("svg", "picture")
    assert len(pictures) == 4  # two, each for a wide and a narrow screen
    assert all(picture["role"] == "img" and picture["aria-label"] for picture in pictures)
    assert all(bar["aria-hidden"] == "true" for bar in made.all("svg", "bar"))
    headers = made.all("th")
    assert all(header["scope"] in {"col", "row"} for header in headers)
    (names,) = made.cells("thead")
    assert all(len(row) == len(names) for row in made.cells("tbody") + made.cells("tfoot"))


def test_hostile_names_are_shown_and_not_obeyed():
    made = Page.of(hostile())
    said = made.said()
    # heading and title, device, verdict or figure, note
    assert said.count(SHOWN) > 6
    assert "\x1b" not in said
    assert "\x00" not in said
    (first, *_) = made.cells("tbody")
    assert first[0] == f"{SHOWN}.0"
    assert any(SHOWN in hint for hint in made.hints())
    assert all(
        set(attributes["class"].split()) <= {"mark", "choice", "point", *KINDS}
        for tag in ("span", "rect")
        for attributes in made.all(tag, "choice") + made.all(tag, "mark")
    )
    shown = text(hostile(), 100)
    assert "\x1b" not in shown
    assert "\x00" not in shown
    assert shown.encode("utf-8")


def test_the_figures_are_the_report_own():
    report = report_of()
    made = Page.of(report)
    exact = [strong["title"] for strong in made.all("strong")]
    assert exact == [
        f"{report.save_all_peak_bytes:,} bytes → {report.measured_peak_bytes:,} bytes",
        f"{report.budget_bytes:,} bytes",
        f"{report.measured_step_s - report.step_s:+.6f} s a step",
        f"{report.smallest_bytes:,} bytes",
    ]
    peaks = f"{in_bytes(report.save_all_peak_bytes)} → {in_bytes(report.measured_peak_bytes)}"
    for shown in (peaks, "+3.6 %", "1.00 MiB to spare", "100 ms → 104 ms a step, measured"):
        assert shown in made.said()
        assert shown in text(report, 100)
    assert "set by the backward of blocks.0" in made.said()
    assert "It fits: a measured step peaks at" in made.said()


def test_the_table_has_every_row_and_adds_up():
    report = REPORTS["every choice"]
    made = Page.of(report)
    body = made.cells("tbody")
    assert [row[1] for row in body] == ["keep", "recipes", "input", "segment 3-4", "moved"]
    assert [row[0] for row in body] == [
        "blocks.0", "blocks.1", "blocks.2", "blocks.3\N{NO-BREAK SPACE}… blocks.42 together",
        "blocks.5",
    ]  # fmt: skip
    assert body[1][2:] == [
        "4.00 MiB of 10.0 MiB", "+2.01 ms", "10.0 ms", "remakes gelu, layer_norm x2",
    ]  # fmt: skip
    assert body[3][2] == "1.00 MiB of 20.0 MiB"
    (foot,) = made.cells("tfoot")
    assert foot == ["All", "", "16.0 MiB of 60.0 MiB", "+10.2 ms", "60.0 ms", ""]
    titles = [span["title"] for span in made.all("span") if "title" in span]
    assert f"{4 * MIB:,} bytes of {10 * MIB:,} bytes" in titles
    assert titles[-1] == f"{16 * MIB:,} bytes of {60 * MIB:,} bytes"


def test_bars_are_as_long_as_a_stage_is_large():
    report = report_of(("keep", "recipes"))
    large = dataclasses.replace(report.rows[0], kept_bytes=40 * MIB, kept_all_bytes=40 * MIB)
    made = Page.of(dataclasses.replace(report, rows=(large, report.rows[1])))
    widths = [
        [float(rect["width"]) for rect in made.all("rect", class_)] for class_ in ("all", "some")
    ]
    assert widths == [[100, 25], [100, 10]]


@pytest.mark.parametrize("size", [0, 1], ids=["wide", "narrow"])
def test_the_timeline_shows_which_step_is_within_the_budget(size):
    report = report_of()
    made = Page.of(report)
    before, after, budget = (
        corners(made.lines(name)[size]) for name in ("before", "after", "budget")
    )
    highest_before, highest_after = (min(y for _, y in line) for line in (before, after))
    ((left, level), (right, _)) = budget
    assert highest_before < level < highest_after  # y goes down
    floor = max(y for _, y in before)
    height = floor - highest_before
    assert (floor - level) / height == pytest.approx(
        report.budget_bytes / report.before.peak_bytes, abs=0.005
    )
    assert left <= min(x for x, _ in after)
    assert max(x for x, _ in after) <= right


def test_a_budget_far_above_does_not_press_the_pictures_flat():
    made = Page.of(REPORTS["roomy"])
    assert "The budget of 64.0 GiB is far above the picture." in made.said()
    assert not made.lines("budget")
    for drawn in made.lines("before"):
        assert max(y for _, y in corners(drawn)) - min(y for _, y in corners(drawn)) > 200
    assert len(Page.of(report_of()).lines("budget")) == 4  # both pictures, wide and narrow
    assert "far above" not in Page.of(report_of()).said()


def test_each_stage_says_its_peak_before_and_after():
    report = report_of()
    hints = Page.of(report).hints()
    for before, after in zip(report.before.marks, report.after.marks, strict=True):
        row = report.rows[before.stage]
        peaks = f"{in_bytes(highest(report.before, before))} → "
        peaks += in_bytes(highest(report.after, after))
        hint = f"{before.kind} of {row.name} ({row.choice}): {peaks}"
        assert hints.count(hint) == 2  # once wide, once narrow


def test_the_curve_marks_what_was_chosen_and_what_bounds_it():
    report = report_of()
    made = Page.of(report)
    key = [data for path, data in made.texts if path[-1:] == ("li",)]
    assert key[-4:] == [
        "smallest 12.0 MiB, +30.0 %",
        f"chosen {in_bytes(report.predicted_peak_bytes)}, +4.0 %",
        f"measured {in_bytes(report.measured_peak_bytes)}, +3.6 %",
        f"save everything {in_bytes(report.save_all_peak_bytes)}",
    ]
    across = [float(dot["cx"]) for dot in made.all("circle")[:4]]
    assert across == sorted(across)
    shaded = made.all("rect", "unreachable")[0]
    assert float(shaded["x"]) + float(shaded["width"]) == pytest.approx(across[0], abs=0.2)
    stairs = corners(made.lines("after")[2])  # after those of the two timelines
    assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in itertools.pairwise(stairs))
    assert all(a[0] == b[0] or a[1] == b[1] for a, b in itertools.pairwise(stairs))
    for point in report.curve:
        shown = f"from {in_bytes(point.budget_bytes)}: "
        assert any(hint.startswith(shown) for hint in made.hints())


def test_what_slots_hid_is_said_only_where_they_hid_something():
    assert "no plan for 12.0 KiB less is foreseen to be faster" in Page.of(report_of()).said()
    exact = report_of(rounding_bytes=0)
    for shown in (Page.of(exact).said(), text(exact, 100)):
        assert "Planned in 1.50 s, 15.0 times a step." in shown
        assert "counted in steps" not in shown


def test_a_choice_nobody_makes_is_refused():
    """It would become a class of the page's elements."""
    with pytest.raises(ValueError, match="no stage is run by the choice"):
        page(report_of(("keep", 'x" onload="')))


def test_no_extra_time_and_less_time_are_said_as_such():
    assert "and takes no longer" in text(REPORTS["no extra time"], 120).replace("\n", " ")
    faster = text(REPORTS["faster"], 120).replace("\n", " ")
    assert "and takes no longer" in faster
    assert "\N{MINUS SIGN}10.0 %" in faster


def test_a_time_that_no_plan_can_have_is_not_told_as_measured():
    """A plan adds work: a step 60 % shorter was compared with one that had to wait for others."""
    report = REPORTS["timed on a busy machine"]
    lines = text(report, 120).replace("\n", " ")
    assert "the machine was too busy to tell how much longer it takes." in lines
    for shown in (" ".join(lines.split()), Page.of(report).said()):
        assert "\N{MINUS SIGN}60.0 %" not in shown
        assert "takes no longer" not in shown
        told = r"Extra time ?not known ?100 ms → 40.0 ms a step: .* \(foreseen \+4\.0\s%\)"
        assert re.search(told, shown)
    assert "measured 2" not in Page.of(report).said()
    assert "measured 2" in Page.of(REPORTS["faster"]).said()


def test_notes_are_shown_only_where_there_are_any():
    assert "Notes" not in Page.of(report_of()).said()
    assert "Notes" not in text(report_of(), 100)
    noted = report_of(notes=("The plan was corrected once.",))
    assert "NotesThe plan was corrected once." in Page.of(noted).said()
    assert "Notes\n- The plan was corrected once." in text(noted, 100)


def test_alike_stages_are_told_in_one_row():
    report = REPORTS["many"]
    body = Page.of(report).cells("tbody")
    assert [row[0] for row in body] == [
        "blocks.0\N{NO-BREAK SPACE}… blocks.5960 alike",
        "blocks.60\N{NO-BREAK SPACE}… blocks.10950 alike",
        "blocks.110\N{NO-BREAK SPACE}… blocks.11910 alike",
    ]
    assert body[0][2] == "60.0 MiB of 600 MiB1.00 MiB of 10.0 MiB each"
    shown = text(report, 100)
    assert "blocks.0 … blocks.59, 60 alike" in shown
    assert len(shown.splitlines()) < 50
    assert len(page(report)) < 400_000


@given(st.lists(st.sampled_from(["keep", "recipes", "input", "segment 3-5"]), max_size=30))
def test_folding_loses_nothing(choices):
    rows = rows_of(choices)
    folds = folded(rows)
    assert sum(fold.count for fold in folds) == len(rows)
    assert sum(fold.kept_bytes for fold in folds) == sum(row.kept_bytes for row in rows)
    assert sum(fold.forward_s for fold in folds) == pytest.approx(0.01 * len(rows))
    at = 0
    for fold in folds:
        run = rows[at : at + fold.count]
        assert (fold.first, fold.last) == (run[0].name, run[-1].name)
        assert {row.choice for row in run} == {fold.choice}
        at += fold.count
    assert all(a.choice != b.choice for a, b in itertools.pairwise(folds))


def test_stages_that_keep_other_bytes_are_not_alike():
    first, second, third = rows_of(("keep", "keep", "keep"))
    other = dataclasses.replace(second, kept_all_bytes=11 * MIB)
    told = dataclasses.replace(second, detail="its input is shared")
    assert [fold.count for fold in folded((first, second, third))] == [3]
    assert [fold.count for fold in folded((first, other, third))] == [1, 1, 1]
    assert [fold.count for fold in folded((first, told, third))] == [1, 1, 1]


@each_report
@pytest.mark.parametrize("width", [60, 73, 100, 120])
def test_text_fits_its_width(report, width):
    lines = text(report, width).splitlines()
    assert max(map(cell_len, lines)) <= width
    assert all(line == line.rstrip() for line in lines)


def test_wide_letters_are_given_their_columns():
    report = report_of(model="模型" * 40, notes=("説明" * 50,))
    rows = tuple(dataclasses.replace(row, name=f"層.{row.name}") for row in report.rows)
    lines = text(dataclasses.replace(report, rows=rows), 60).splitlines()
    assert max(map(cell_len, lines)) <= 60


def test_a_width_out_of_reach_is_taken_for_the_nearest():
    assert text(report_of(), 10) == text(report_of(), 60)
    assert text(report_of(), 500) == text(report_of(), 120)


def test_without_a_width_the_terminal_is_asked(monkeypatch):
    monkeypatch.setenv("COLUMNS", "71")
    assert text(report_of()) == text(report_of(), 71)


def test_names_too_long_for_a_column_stand_above_their_numbers():
    report = report_of()
    rows = tuple(dataclasses.replace(row, name="a.long.name." * 5) for row in report.rows)
    lines = text(dataclasses.replace(report, rows=rows), 60).splitlines()
    at = lines.index("stage")
    assert lines[at + 1].split() == ["choice", "kept", "of", "extra"]
    assert "".join(lines[at + 2 :]).startswith("a.long.name." * 5)


@each_report
def test_colour_changes_no_letter(report):
    plain = text(report, 100)
    coloured = text(report, 100, colour=True)
    assert "\x1b[" in coloured
    assert Text.from_ansi(coloured).plain == plain


def test_without_rich_the_text_is_the_same(tmp_path):
    stored = tmp_path / "report.json"
    stored.write_bytes(msgspec.json.encode(report_of()))
    code = """
import sys
sys.modules["rich"] = None  # what import does where it is not installed
import msgspec
from holdfast.activation._reporting.report import PlanReport
from holdfast.activation._reporting.text import text
report = msgspec.json.decode(open(sys.argv[1], "rb").read(), type=PlanReport)
sys.stdout.buffer.write(text(report, 90, colour=True).encode())
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(stored)], check=True, capture_output=True, timeout=100
    )
    assert done.stdout.decode() == text(report_of(), 90)


@pytest.mark.parametrize("name", sorted(set(REPORTS) - {"hostile"}))
def test_a_report_comes_back_from_json_as_it_was(name):
    report = REPORTS[name]
    assert msgspec.json.decode(msgspec.json.encode(report), type=PlanReport) == report


def test_the_chart_is_as_high_as_what_is_alive():
    flat = Timeline(bytes_=(90,) * 50, marks=(), peak_bytes=90)
    half = Timeline(bytes_=(45,) * 80, marks=(), peak_bytes=45)
    lines = chart(report_of(before=flat, after=half, budget_bytes=60), 60)
    bodies = [line.split("┤")[1] for line in lines[:ROWS]]
    assert [body[0] for body in bodies] == [*"░░░░▄████"]
    assert all(set(body) == {body[0]} for body in bodies)
    assert lines[ROWS - 1 - 60 * ROWS // 90].startswith("budget 60 B ┤")


def test_the_chart_draws_the_budget_where_nothing_is():
    rising = Timeline(bytes_=tuple(range(100)), marks=(), peak_bytes=99)
    low = Timeline(bytes_=(0,), marks=(), peak_bytes=0)
    lines = chart(report_of(before=rising, after=low, budget_bytes=50), 80)
    (limit,) = (line for line in lines if "┄" in line)
    assert re.fullmatch(r"budget 50 B ┤┄+░+", limit)
    assert not [line for line in chart(report_of(before=rising, after=low), 80) if "┄" in line]


timelines = st.lists(st.integers(0, 10**12), min_size=1, max_size=400).flatmap(
    lambda levels: st.lists(
        st.tuples(
            st.sampled_from(["forward", "backward"]),
            st.integers(0, 5),
            st.integers(0, len(levels) - 1),
            st.integers(1, 60),
        ),
        max_size=6,
    ).map(
        lambda marks: Timeline(
            bytes_=tuple(levels),
            marks=tuple(
                Mark(kind=kind, stage=stage, start=start, end=min(start + long, len(levels)))
                for kind, stage, start, long in marks
            ),
            peak_bytes=max(levels),
        )
    )
)


@given(timelines, st.integers(8, 200))
def test_thinning_keeps_every_peak(timeline, points):
    few = thinned(timeline, points)
    assert len(few.bytes_) <= max(points, 3 * len(timeline.marks) + points // 4 + 2)
    assert max(few.bytes_) == timeline.peak_bytes == few.peak_bytes
    assert min(few.bytes_) == min(timeline.bytes_)
    for mark, same in zip(timeline.marks, few.marks, strict=True):
        assert (mark.kind, mark.stage) == (same.kind, same.stage)
        assert highest(few, same) == highest(timeline, mark)
        assert few.bytes_[same.start] == timeline.bytes_[mark.start]
    left = iter(timeline.bytes_)
    assert all(level in left for level in few.bytes_)  # in their order
    if len(timeline.bytes_) <= points:
        assert few == timeline


def test_a_stage_too_short_for_the_points_has_the_one_it_is_in():
    mark = Mark(kind="forward", stage=0, start=1, end=1)
    timeline = Timeline(bytes_=(1, 7, 3), marks=(mark,), peak_bytes=7)
    assert highest(timeline, mark) == 7
    shown = Page.of(report_of(before=timeline, after=timeline)).hints()
    assert "forward of blocks.0 (recipes): 7 B → 7 B" in shown


@given(timelines, timelines)
def test_two_steps_stand_on_one_axis(timeline, beside):
    at = places(timeline, beside)
    assert len(at) == len(timeline.bytes_)
    assert all(0 <= place <= 1 for place in at)
    assert at == sorted(at)
    assert at[0] == 0
    assert len(at) == 1 or at[-1] == pytest.approx(1)


def test_stages_stand_where_they_stand_in_the_other_step():
    report = report_of()
    there, here = places(report.before), places(report.after, report.before)
    assert len(there) != len(here)
    for mark, same in zip(report.before.marks, report.after.marks, strict=True):
        assert here[same.start] == pytest.approx(there[mark.start])


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (MIB - 1, "1.00 MiB"),
        (1023 * MIB, "1,023 MiB"), (int(1.414 * 2**30), "1.41 GiB"),
        (99 * MIB + 996_148, "100 MiB"), (3 * 2**60, "3,072 PiB"),
    ],
)  # fmt: skip
def test_bytes_in_words(count, shown):
    assert in_bytes(count) == shown


@pytest.mark.parametrize(
    ("duration", "shown"),
    [
        (0.0, "0 s"), (0.9999, "1.00 s"), (0.412, "412 ms"), (8.5e-5, "85.0 µs"),
        (1.2e-8, "12.0 ns"), (75.04, "75.0 s"), (4100.0, "4,100 s"),
    ],
)  # fmt: skip
def test_seconds_in_words(duration, shown):
    assert in_seconds(duration) == shown


@given(st.text(max_size=80), st.integers(2, 30))
def test_wrapping_loses_no_word(words, width):
    printable = "".join(letter for letter in words if letter.isprintable())
    lines = wrapped(printable, width)
    assert "".join(lines).replace(" ", "") == printable.replace(" ", "")
    assert all(map(str.strip, lines))


@given(st.text("ab \u6a21\u578b", max_size=80), st.integers(2, 30))
def test_wrapped_lines_fit(words, width):
    assert all(cell_len(line) <= width for line in wrapped(words, width))
