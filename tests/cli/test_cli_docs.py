"""Every command line of docs/cli.md runs, and every field of its JSON is documented there."""

import re
import shlex
from pathlib import Path

import pytest
from cli_tools import holdfast

from holdfast.cli._app import VERBS
from holdfast.cli._exits import Exit

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
LINES = [
    line
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("holdfast ") and "completion" not in line
]
NEED_TORCH = {"plan", "demo"}  # test_cli_plan.py and test_cli_demo.py run theirs


def test_every_line_runs(own_store, tmp_path):
    (tmp_path / "runs").mkdir()
    own_store.rename(tmp_path / "runs" / "a")
    assert {shlex.split(line)[1] for line in LINES} == {*VERBS}
    # Those that delete come last.
    for line in sorted(LINES, key=lambda line: "--yes" in line):
        if shlex.split(line)[1] in NEED_TORCH:
            continue
        ran = holdfast(*shlex.split(line)[1:], cwd=tmp_path)
        assert ran.code in {Exit.OK, Exit.FOUND}, (line, ran.err)


def test_every_exit_code_is_in_the_table():
    assert re.findall(r"(?m)^\| (\d+) \|", PAGE) == [str(int(code)) for code in Exit]


@pytest.mark.parametrize(
    "line",
    [
        "ls {0}",
        "show {0}",
        "verify {0}",
        "diff {0}/step_100 {0}/step_200",
        "cat {0} model.frozen",
        "prune {0} --keep-last 1",
        "gc {0}",
        "doctor {0} --size 1",
        "bench {0} --size 1 --seconds 1",
    ],
)
def test_every_field_is_documented(store, line):
    verb = line.split()[0]
    (told,) = re.findall(rf"(?m)^\| `{verb}` \| (`.*) \|$", PAGE.partition("## JSON")[2])
    named = set(re.findall(r"`(\w+)`", told))
    if verb == "show":  # says that it has what ls has
        named |= {"step", "created", "ordinal", "world_size", "format", "format_version", "metrics"}
    document = holdfast(*line.format(store).split(), "--json").json
    assert fields(document) - {"loss", "accuracy", "git", "odd", "epoch"} <= named


def fields(value):
    """The keys of a document and of what is in it, but for names of checkpoints."""
    if isinstance(value, list):
        return set().union(*map(fields, value[:1]))
    if not isinstance(value, dict):
        return set()
    inner = set().union(*(fields(each) for each in value.values()))
    return {key for key in value if not key.startswith("step_")} | inner
