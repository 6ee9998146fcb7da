"""The tables of ``make proof``: every number of the results is in them, and nothing in a campaign's
words is taken for markup."""

import html.parser
import io
from dataclasses import replace

import proof_tools  # noqa: F401 -- the harness is beside src, not in it
import pytest
import rich.console

from _campaign import Campaign, Outcome
from _found import Results, Row, Told, without_folders
from _found_page import page
from _ledger import Batch
from _markdown import markdown
from _screen import Plain, _table, screen
from _turns import Standing
from _wording import duration, percent, target, verdict, violated

ROW = Row(
    campaign="sums",
    subject="holdfast",
    promise="2 + 2 = 4 | always",
    counted="sums",
    tried=1200,
    violated=0,
    wanted=100_000,
    ends=False,
    is_all=False,
    facts={"odd": 1100, "even": 100},
    batches=3,
    broken=0,
    seconds=4000.0,
    verdict="so far",
    why="",
    told=(),
)
HOSTILE = "<script>alert(1)</script> | *a* `b` [c](d) \N{SNOWMAN}\nand a second line"
BROKEN = replace(
    ROW,
    subject="peer <b>",
    violated=1199,
    verdict="violated",
    told=(Told(words=HOSTILE, again="python proof/run.py --again sums peer 7"),),
)
RESULTS = Results(run={"cores": "2", "code": "abc <i>"}, rows=(ROW, BROKEN))


class Tags(html.parser.HTMLParser):
    """All tags of a page, which close in the order in which they were opened."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.words = [], set(), []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.seen.add(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_the_table_has_every_number():
    text = markdown(RESULTS)
    row = "| sums | holdfast | 1,200 | 0 | 100,000 | held so far, 1% of the target |"
    assert f"{row} 100 even, 1,100 odd |" in text
    assert "1,199 (> 99%)" in text
    assert "- cores: 2" in text
    assert "`python proof/run.py --again sums peer 7`" in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    cells = {line.replace("\\|", "").count("|") for line in table}
    assert cells == {8}
    assert "<script>" not in text.replace("\\<script>", "")


def test_the_page_is_whole_and_stands_alone():
    text = page(RESULTS)
    tags = Tags(text)
    assert tags.open == []
    assert not {"script", "link", "img", "i2", "b2"} & tags.seen
    assert "://" not in text
    words = "".join(tags.words)
    for shown in (
        "1,200",
        "100,000",
        "1,199 (> 99%)",
        "100 even",
        "1,100 odd",
        "abc <i>",
        "peer <b>",
    ):
        assert shown in words
    assert "<script>alert(1)</script>" in words


@pytest.mark.parametrize(
    ("share", "shown"), [(0, "0%"), (1e-9, "< 1%"), (0.5, "50%"), (1 - 1e-9, "> 99%"), (1, "100%")]
)
def test_a_share_is_never_rounded_to_nothing_or_all(share, shown):
    assert percent(share) == shown


def test_a_hang_without_cases_is_no_share_of_them():
    assert violated(replace(ROW, tried=0, violated=2)) == "2"


def test_targets_of_lists_that_end():
    assert target(replace(ROW, ends=True, wanted=90)) == "all, about 90"
    assert target(replace(ROW, ends=True, is_all=True, wanted=93)) == "all 93"


def test_why_a_row_is_not_there():
    skipped = replace(ROW, verdict="skipped", why="needs root\nmore")
    assert verdict(skipped) == "skipped: needs root"
    assert Results(run={}, rows=(skipped,)).exit_code == 0
    assert Results(run={}, rows=(replace(ROW, verdict="broken", broken=1),)).exit_code == 2
    besides = replace(BROKEN, broken=1)  # a peer's promise, and a batch that proves nothing
    assert Results(run={}, rows=(besides,)).exit_code == 2
    assert Results(run={}, rows=(BROKEN,)).exit_code == 0  # a peer's
    assert Results(run={}, rows=(replace(BROKEN, subject="holdfast"),)).exit_code == 1


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("[/a/b/c/buffer.cc:129] late", "[\N{HORIZONTAL ELLIPSIS}/buffer.cc:129] late"),
        ("in /tmp/x-1/latest, and/or 1 / 2", "in \N{HORIZONTAL ELLIPSIS}/latest, and/or 1 / 2"),
        ("latest/__0_0.distcp and s3://a/b/c", "latest/__0_0.distcp and s3://a/b/c"),
    ],
)
def test_results_tell_of_files_and_not_of_the_folders_of_a_machine(words, shown):
    assert without_folders(words) == shown


def test_durations():
    assert [duration(s) for s in (5, 65, 7260)] == ["5 s", "1 min 05 s", "2 h 01 min"]


def test_where_there_is_no_terminal_every_batch_is_a_line():
    stream = io.StringIO()
    shown = screen(stream)
    assert isinstance(shown, Plain)
    batch = Batch(campaign="sums", subject="peer", number=4, seed=7, seconds=1.25, cases=9)
    shown.ended(batch, "again")
    shown.ended(replace(batch, violated=1, violations=("case 3: 5",)), "run it again")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "sums peer #4: 9 cases, 0 violations, 1.2 s"
    assert lines[2:] == ["  violation: case 3: 5", "    run it again"]


def test_in_a_terminal_there_is_a_line_for_each_campaign():
    console = rich.console.Console(file=io.StringIO(), width=100)
    campaign = Campaign(
        name="sums", promise="", counted="", cases=80, run=lambda *_: Outcome(cases=0)
    )
    standing = Standing(campaign=campaign, subject="holdfast", cases=40, violated=2, batches=1)
    peer = Standing(campaign=campaign, subject="peer", cases=90, violated=7, batches=1)
    console.print(_table([standing, peer], [], left_s=61))
    (line,) = [line for line in console.file.getvalue().splitlines() if "sums" in line]
    assert line.split()[:2] == ["sums", "40"]
    assert line.split()[-6:] == ["50%", "2", "peer", "7", "of", "90"]
    assert "1 min 01 s left" in console.file.getvalue()
