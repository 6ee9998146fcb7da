"""``proof/run.py`` as a command, on campaigns that hold, break, hang, die and are broken."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from proof_tools import Harness

from _ledger import Ledger, RunKey

GOOD = """
def run(subject, seed):
    with (HERE / "ran").open("a") as ran:
        ran.write(f"{subject} {seed}\\n")
    assert threading.active_count() == 1  # campaigns fork
    with contextlib.suppress(ChildProcessError):
        raise AssertionError(f"a child that nobody has started: {os.wait()}")
    return Outcome(cases=10, facts={"even": 5})
"""
BAD = """
def run(subject, seed):
    return Outcome(cases=10, violated=2, violations=(f"case 4 of {seed}: 2 + 2 = 5",))
"""
HANGS = """
def run(subject, seed):
    # One that has left the process group, as those that torchrun starts have.
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (HERE / "pids").write_text(f"{os.getpid()} {left.pid}")
    time.sleep(600)
"""


@pytest.fixture
def harness(tmp_path):
    return Harness(tmp_path)


def rows_of(said):
    return {(row["campaign"], row["subject"]): row for row in json.loads(said)["rows"]}


def ran(harness):
    return [line.split()[0] for line in (harness.campaigns / "ran").read_text().splitlines()]


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_gone(pids):
    """What was killed still runs for a moment, and longer on a busy machine."""
    until = time.monotonic() + 60
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_campaigns_run_to_their_targets_and_the_results_are_written(harness):
    harness.add("sums", GOOD, "cases=30, subjects=('holdfast', 'peer'), peer_cases=20")
    harness.add("roots", GOOD, "cases=10, unavailable=lambda subject: 'needs a garden'")
    code, said, progress = harness.run("--json", "--minutes", 5)
    assert code == 0, progress
    assert (
        ran(harness) == ["holdfast", "peer", "holdfast", "holdfast", "peer"]
        or sorted(ran(harness)) == ["holdfast"] * 3 + ["peer"] * 2
    )
    rows = rows_of(said)
    ours = rows["sums", "holdfast"]
    assert (ours["tried"], ours["violated"], ours["verdict"]) == (30, 0, "held")
    assert ours["facts"] == {"even": 15}
    assert rows["sums", "peer"]["tried"] == 20
    skipped = rows["roots", "holdfast"]
    assert (skipped["verdict"], skipped["why"]) == ("skipped", "needs a garden")
    assert json.loads(harness.read("latest.json")) == json.loads(said)
    table = harness.read("latest.md")
    assert "| sums | holdfast | 30 | 0 | 30 | held | 15 even |" in table
    assert "skipped: needs a garden" in table
    assert "needs a garden" in harness.read("latest.html")


def test_a_run_goes_on_where_it_was_broken_off(harness):
    harness.add("sums", GOOD, "cases=30")
    assert harness.run("--minutes", 5)[0] == 0
    lines = harness.ledger.read_text().splitlines()
    assert len(lines) == 3
    harness.ledger.write_text(lines[0] + "\n" + lines[1][:40])  # as a kill would leave it
    _, said, progress = harness.run("--minutes", 5, "--json")
    assert "goes on after 1 batches" in progress
    assert rows_of(said)["sums", "holdfast"]["tried"] == 30
    seeds = (harness.campaigns / "ran").read_text().split()[1::2]
    assert seeds[3:] == seeds[1:3]  # the two that were lost, and no others
    _, said, progress = harness.run("--minutes", 5, "--seed", 2)
    assert "batches of other code or seeds are not counted" in progress
    assert len(set((harness.campaigns / "ran").read_text().split()[1::2])) == 6
    assert "goes on" not in harness.run("--minutes", 0, "--fresh")[2]


def test_a_violation_of_ours_is_exit_code_1_and_is_run_again_by_its_command(harness):
    harness.add("sums", BAD, "cases=10, subjects=('holdfast', 'peer'), peer_cases=10")
    code, said, _ = harness.run("--json", "--minutes", 5)
    assert code == 1
    row = rows_of(said)["sums", "holdfast"]
    assert (row["tried"], row["violated"], row["verdict"]) == (10, 2, "violated")
    told = row["told"][0]
    assert "2 + 2 = 5" in told["words"]
    assert told["again"].startswith("python proof/run.py --again sums holdfast ")
    code, said, _ = harness.run(*told["again"].split()[2:])
    assert code == 1
    assert told["words"] in said
    assert "VIOLATED" in harness.read("latest.md")


def test_violations_of_peers_are_news_and_no_failure(harness):
    code = 'run = lambda subject, seed: Outcome(cases=10, violated=3 * (subject == "peer"))'
    harness.add("sums", code, "cases=10, subjects=('holdfast', 'peer'), peer_cases=10")
    code, said, _ = harness.run("--minutes", 5)
    assert code == 0
    assert "| sums | peer | 10 | 3 (30%) | 10 | violated |" in said


def test_a_batch_that_hangs_is_killed_whole_and_counts(harness):
    harness.add("stuck", HANGS, "cases=10, batch_timeout_s=1.5")
    harness.add("sums", GOOD, "cases=10")
    code, said, _ = harness.run("--json", "--minutes", 5)
    assert code == 1
    rows = rows_of(said)
    assert rows["sums", "holdfast"]["verdict"] == "held"
    stuck = rows["stuck", "holdfast"]
    assert (stuck["verdict"], stuck["violated"], stuck["tried"]) == ("violated", 3, 0)
    assert stuck["why"] == "3 batches hung or died"
    assert "took longer than 1.5 s and was killed" in stuck["told"][0]["words"]
    wait_until_gone((harness.campaigns / "pids").read_text().split())


def test_a_batch_that_dies_of_a_signal_counts(harness):
    harness.add("sums", "run = lambda subject, seed: os.abort()", "cases=10")
    code, said, _ = harness.run("--json", "--minutes", 5)
    assert code == 1
    assert "died of SIGABRT" in rows_of(said)["sums", "holdfast"]["told"][0]["words"]


def test_a_campaign_that_is_broken_is_no_violation_and_no_success(harness):
    harness.add("raises", "def run(subject, seed):\n    raise KeyError('sum')", "cases=10")
    harness.add("unimportable", "import no_such_module", "cases=10")
    harness.add("sums", GOOD, "cases=10")
    code, said, progress = harness.run("--json", "--minutes", 5)
    assert code == 2
    assert "in 2 campaigns" in progress
    assert "of which a batch ended early: 1; not tried, for the reasons given: 1." in progress
    rows = rows_of(said)
    assert rows["sums", "holdfast"]["verdict"] == "held"
    assert rows["raises", "holdfast"]["violated"] == 0
    assert "KeyError: 'sum'" in rows["raises", "holdfast"]["why"].splitlines()[0]
    assert "No module named 'no_such_module'" in rows["unimportable", "holdfast"]["why"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_its_batches_and_writes_what_it_has(harness, number):
    harness.add("sums", GOOD, "cases=10")
    harness.add("stuck", HANGS, "cases=10")
    process = harness.start("--minutes", "5", "--jobs", "2")
    try:
        pids = harness.campaigns / "pids"
        until = time.monotonic() + 60
        while not (
            harness.ledger.exists() and pids.exists() and len(pids.read_text().split()) == 2
        ):
            assert time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(number)
        _, progress = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, progress
    wait_until_gone(pids.read_text().split())
    assert "| sums | holdfast | 10 | 0 | 10 | held |" in harness.read("latest.md")
    assert "| stuck | holdfast | \N{EN DASH} | \N{EN DASH} | 10 | not run" in harness.read(
        "latest.md"
    )
    assert "- ended early: interrupted" in harness.read("latest.md")


def test_batches_end_when_the_run_is_killed(harness):
    harness.add("stuck", HANGS, "cases=10")
    process = harness.start("--minutes", "5")
    pids = harness.campaigns / "pids"
    until = time.monotonic() + 60
    while not (pids.exists() and len(pids.read_text().split()) == 2):
        assert time.monotonic() < until
        time.sleep(0.05)
    process.kill()
    process.communicate()
    batch, left = pids.read_text().split()
    os.kill(int(left), signal.SIGKILL)  # it has left the batch's group: nobody else can
    wait_until_gone([batch])


def test_what_makes_no_sense_is_refused(harness):
    harness.add("sums", GOOD, "cases=10")
    code, _, progress = harness.run("products")
    assert code == 2
    assert "no campaign products; there are sums" in progress
    assert harness.run("--jobs", 0)[0] == 2
    assert not harness.ledger.exists()


def test_some_campaigns_alone_do_not_replace_the_results_of_all(harness):
    harness.add("sums", GOOD, "cases=10")
    harness.add("products", GOOD, "cases=10")
    assert harness.run("sums", "--minutes", 5)[0] == 0
    assert not (harness.place / "results").exists()


def test_two_runs_do_not_share_a_ledger(harness):
    """Their batches would be counted as those of one."""
    harness.add("sums", GOOD, "cases=30")
    with Ledger(harness.ledger, RunKey(seed=0, code="any")).held():
        code, said, progress = harness.run("--json", "--minutes", 5)
        assert (code, said) == (2, "")
        assert "another run is at work on" in progress
        assert "wait for it, or work in another clone" in progress
    code, _, progress = harness.run("--json", "--minutes", 5)
    assert code == 0, progress
