"""The benchmarks run, by the command people use, on states too small for numbers to mean anything.

Asserted is that everybody takes part, that everybody loads what they saved (a benchmark ends with
an error if not), and that results are kept as they come.
"""

import html.parser
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "benchmarks" / "run.py"
# Every run is a process that imports torch, which takes long beside other programs.
pytestmark = pytest.mark.timeout(600)

PEERS = {"torch.save", "safetensors", "DCP", "DCP at its best"}


def run(folder, *arguments, cwd=None):
    command = [
        sys.executable,
        "-W",
        "ignore",
        RUN,
        "--extent",
        "tiny",
        "--into",
        folder,
        *arguments,
    ]
    return subprocess.run(command, cwd=cwd or folder, capture_output=True, text=True, check=False)


def results(folder):
    return json.loads((folder / "tiny.json").read_text())


def measured(folder, benchmark):
    """Measurements, by the place they have in charts: chart, whose, and at what."""
    outcome = results(folder)["outcomes"][benchmark]
    assert outcome["error"] is None
    places = {
        (each["place"]["chart"], each["place"]["series"], each["place"]["at"]): each
        for each in outcome["measurements"]
        if each["place"]
    }
    assert all(each["values"] for each in places.values())
    return places


@pytest.fixture(scope="module")
def full_house(tmp_path_factory):
    """A run of the benchmarks that need neither ranks nor a bare disk, in one folder."""
    folder = tmp_path_factory.mktemp("results")
    ended = run(folder, "import_time", "scaling", "s3", "incremental")
    assert ended.returncode == 0, ended.stderr
    return folder, ended


def test_cost_by_bytes_and_tensors_is_told_of_every_peer(full_house):
    folder, _ = full_house
    found = measured(folder, "scaling")
    for chart in (
        "save, by bytes",
        "cold load, by bytes",
        "warm load, by bytes",
        "save, by tensors of 1 KiB",
        "cold load, by tensors of 1 KiB",
    ):
        series = {whose for of, whose, _ in found if of == chart}
        assert series >= PEERS | {"holdfast"}, chart
        assert all(each["value"] > 0 for (of, _, _), each in found.items() if of == chart)


def test_cost_by_ranks_is_told_of_both_planners(full_house):
    folder, _ = full_house
    found = measured(folder, "scaling")
    for whose in ("holdfast", "DCP"):
        ranks = [at for of, name, at in found if of == "time of rank 0, by ranks" and name == whose]
        assert ranks == [1, 8]


def test_an_s3_server_is_saved_to_and_loaded_from_by_everybody(full_house):
    folder, _ = full_house
    found = measured(folder, "s3")
    for chart in ("save to S3, 0.5 MiB", "load from S3, 0.5 MiB"):
        series = {whose for of, whose, _ in found if of == chart}
        assert series >= {"torch.save", "safetensors", "torch.save and boto3"}


def test_an_incremental_save_stores_what_changed(full_house):
    folder, _ = full_house
    stored = {
        each["name"]: each["value"]
        for each in results(folder)["outcomes"]["incremental"]["measurements"]
    }
    few, all_ = (stored[f"{n} % changed, incremental: stored"] for n in (1, 100))
    assert few < all_ / 10


def test_what_was_measured_on_is_kept_and_who_is_not_installed(full_house):
    folder, _ = full_house
    kept = results(folder)
    assert kept["extent"] == "tiny"
    assert kept["facts"]["torch"].startswith("2.")
    assert kept["facts"].keys() >= {"cores", "memory", "python", "orbax-checkpoint", "commit"}
    assert all(each["seconds"] > 0 for each in kept["outcomes"].values())


class Tags(html.parser.HTMLParser):
    """The tags of a page, and whether each was closed in order."""

    void = frozenset({"meta", "br"})

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.fetched = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.fetched += [value for key, value in attrs if key in {"src", "href"}]
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else_and_shows_every_chart(full_house):
    folder, _ = full_house
    text = (folder / "tiny.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.fetched == []
    charts = sorted((folder / "tiny-charts").glob("*.svg"))
    assert {path.stem.rpartition("-")[0] for path in charts} == {"scaling", "s3", "incremental"}
    models = json.loads((RUN.parent / "results" / "fitting.json").read_text())["results"]
    assert tags.seen.count("svg") == len(charts) + len(models)
    assert "Its numbers mean nothing." in text


def test_charts_are_svg_with_every_mark_inside(full_house):
    folder, _ = full_house
    for path in (folder / "tiny-charts").glob("*.svg"):
        root = ET.parse(path).getroot()
        width, height = float(root.get("width")), float(root.get("height"))
        marks = [mark for mark in root.iter() if mark.get("cx") or mark.get("x")]
        assert marks
        for mark in marks:
            x, y = (float(mark.get("c" + axis) or mark.get(axis)) for axis in "xy")
            assert 0 <= x <= width, path
            assert 0 <= y <= height, path


def test_markdown_shows_tables_and_charts(full_house):
    folder, _ = full_house
    text = (folder / "tiny.md").read_text()
    for path in (folder / "tiny-charts").glob("*.svg"):
        assert f"(tiny-charts/{path.name})" in text
    rows = [line.count("|") for line in text.splitlines() if line.startswith("| 256 KiB |")]
    assert rows
    assert len(set(rows)) <= 2  # times and ratios, which leave holdfast out
    assert "not judged" in text
    assert "MISSED" not in text


def test_a_run_of_something_else_is_not_gone_on_with(full_house, tmp_path):
    folder, _ = full_house
    kept = results(folder)
    kept["facts"]["torch"] = "1.0"
    (tmp_path / "tiny.json").write_text(json.dumps(kept))
    refused = run(tmp_path, "import_time", "--resume")
    assert refused.returncode == 1
    assert "torch is 2." in refused.stderr
    assert "and was 1.0" in refused.stderr
    assert results(tmp_path) == kept


def test_a_file_of_another_form_is_not_gone_on_with(tmp_path):
    (tmp_path / "tiny.json").write_text('{"machine": {}, "results": {}}')
    refused = run(tmp_path, "import_time", "--resume")
    assert refused.returncode == 1
    assert "is no run that can be gone on with (KeyError('extent'))" in refused.stderr
    assert (tmp_path / "tiny.json").read_text() == '{"machine": {}, "results": {}}'


def test_one_that_fails_is_told_and_a_run_goes_on_with_what_is_left(tmp_path):
    """No folder can be made where the run begins, as incremental needs one."""
    ended = run(tmp_path, "incremental", "import_time", cwd="/proc")
    assert ended.returncode == 1
    before = results(tmp_path)["outcomes"]
    assert "FileNotFoundError" in before["incremental"]["error"]
    assert before["import_time"]["measurements"]
    assert "It failed" in (tmp_path / "tiny.md").read_text()

    resumed = run(tmp_path, "incremental", "import_time", "resilience", "--resume", cwd="/proc")
    assert "incremental (1 of 2)" in resumed.stderr
    after = results(tmp_path)["outcomes"]
    assert after["import_time"] == before["import_time"]
    assert after["resilience"]["measurements"]


def test_an_unknown_name_is_refused(tmp_path):
    refused = run(tmp_path, "no-such-thing")
    assert refused.returncode == 2
    assert "there are activation," in refused.stderr
    assert not (tmp_path / "tiny.json").exists()
