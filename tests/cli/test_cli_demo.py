"""``holdfast demo``: shortened, as a real process; and that each of its proofs can fail."""

import dataclasses
import os
import re
import resource
import subprocess
import sys
from html.parser import HTMLParser

import msgspec
import pytest
from cli_tools import refused

from holdfast.catalog import Catalog, Damage, VerifyReport
from holdfast.cli._demonstration.acts import Run
from holdfast.cli._demonstration.jobs import (
    PARTS,
    QUICK,
    Began,
    Ended,
    Killed,
    Lost,
    Planned,
    Resumed,
    Saved,
    Stepped,
)
from holdfast.cli._demonstration.launching import Exited
from holdfast.cli._demonstration.model import sonnets
from holdfast.cli._demonstration.proofs import Flip, Story, proofs_of
from holdfast.cli._demonstration.screen import Scene
from holdfast.cli._demonstration.story import show

pytestmark = pytest.mark.timeout(900)  # three runs by torchrun, on whatever else the machine does

COMMAND = [sys.executable, "-W", "error", "-m", "holdfast.cli", "demo", "--quick"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The folder it leaves, and what it said."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    ran = subprocess.run(
        [*COMMAND, "--out", folder], capture_output=True, text=True, timeout=800, check=False
    )
    assert ran.returncode == 0, (ran.stdout, ran.stderr)
    assert ran.stderr == ""
    return folder, ran.stdout


def test_every_proof_holds_and_is_shown(demo):
    _, told = demo
    verdicts = re.findall(r"(?m)^(ok|bad) ", told)
    assert verdicts == ["ok"] * 9
    assert "all 9 hold" in told
    steps = QUICK.steps - QUICK.resumed
    assert f"the same bits in {steps} of {steps} steps after" in told
    assert f"passed over step_{QUICK.flipped}: tensor " in told


def test_what_is_printed_of_the_undisturbed_run_is_printed_of_the_resumed_one(demo):
    _, told = demo
    last = re.findall(rf"step {QUICK.steps} of {QUICK.steps}: loss ([\d.]+)", told)
    first = re.findall(rf"step {QUICK.every} of {QUICK.steps}: loss ([\d.]+)", told)
    assert len(last) >= 2  # the killed one may come so far, too
    assert len(set(last)) == len(set(first)) == 1
    assert float(last[0]) < float(first[0])  # it learns


def test_table_and_page_sum_up_what_was_told_of_each_save(demo):
    folder, told = demo
    time = r"([\d.]+ m?s)"
    lines = re.findall(rf"step_\d+ is saved: {time}, of which the training waited {time}", told)
    (table,) = re.findall(rf"each in at most {time}, training waited at most {time}", told)
    page = Elements()
    page.feed((folder / "report.html").read_text("utf-8"))
    words = " ".join(page.text)
    assert len(lines) == 5

    def longest(times):
        return max(times, key=lambda each: float(each.split()[0]) / (1000 if "m" in each else 1))

    assert table == tuple(map(longest, zip(*lines, strict=True)))
    took, waited = table
    assert f"Training waited {waited} at most, for a save; the longest took {took}" in words


def test_the_store_is_what_it_says(demo):
    folder, told = demo
    catalog = Catalog(folder / "run")
    found = {info.step: info for info in catalog.list()}
    assert sorted(found) == [*range(QUICK.every, QUICK.steps + 1, QUICK.every)]
    assert {step: info.world_size for step, info in found.items()} == {3: 2, 6: 3, 9: 3, 12: 3}
    assert all(catalog.verify(info.prefix).is_intact for info in found.values())
    last = re.findall(rf"step {QUICK.steps} of {QUICK.steps}: loss ([\d.]+)", told)[0]
    assert f"{found[QUICK.steps].metrics['loss']:.3f}" == last
    tensors = catalog.open("step_12").tensors
    dtypes = {name: info.dtype for name, info in tensors.items()}
    assert dtypes["model.blocks.0.up.weight"] == "BF16"
    assert "F32" in {dtypes[name] for name in dtypes if name.startswith("optimizer.")}


class Elements(HTMLParser):
    """Refuses a page whose elements are not closed in order, and keeps all of them."""

    def __init__(self):
        super().__init__()
        self.open, self.found, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def with_class(self, name):
        return [attrs for _, attrs in self.found if name in (attrs.get("class") or "").split()]


def test_the_page_is_well_formed_needs_nothing_and_has_the_marks(demo):
    folder, _ = demo
    text = (folder / "report.html").read_text("utf-8")
    page = Elements()
    page.feed(text)
    page.close()
    assert page.open == []
    assert not {"script", "link", "img"} & {tag for tag, _ in page.found}
    assert not re.findall(r"https?:", text)
    words = " ".join(page.text)
    assert f"SIGKILL, amid the save of step {QUICK.killed_in}" in words
    assert "resumed from here, 2 ranks to 3" in words
    steps = QUICK.steps - QUICK.resumed
    assert len(page.with_class("spot-resumed")) == 2 * steps  # wide and narrow
    assert len(page.with_class("flipped")) == 2 + 1  # in either picture, and in the key
    assert len(page.with_class("torn")) == 2 + 1
    assert len(page.with_class("picture")) == 3 * 2
    assert page.with_class("bad") == []
    assert words.count("holds") == 9
    assert "prefers-color-scheme:dark" in text


def test_what_is_there_already_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("a file of the user's")
    ran = subprocess.run(
        [*COMMAND, "--out", tmp_path], capture_output=True, text=True, timeout=100, check=False
    )
    assert ran.returncode == 2
    assert "--out must be a new or an empty folder" in ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_without_torch_it_says_what_to_install(tmp_path):
    refused("demo", "--out", tmp_path / "out", code=2, saying="holdfast[torch]")
    assert not (tmp_path / "out").exists()


def test_a_run_that_fails_is_told_in_one_line(tmp_path):
    def no_room_for_torch():
        resource.setrlimit(resource.RLIMIT_AS, (400 * 2**20, 400 * 2**20))

    ran = subprocess.run(
        [*COMMAND, "--out", tmp_path / "out"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # each reserves room for itself
        preexec_fn=no_room_for_torch,
    )
    assert ran.returncode == 1
    (line,) = ran.stderr.splitlines()
    assert re.match(r"holdfast: a run ended with exit code -?\d+; .*undisturbed.log says: ", line)


def intact(*names):
    return tuple(
        VerifyReport(prefix=name, files=2, checked_bytes=1000, damage=()) for name in names
    )


def run(*events, losses=(), code=0):
    made = Run()
    for event in (*events, *(Stepped(step=step, loss=1 / step) for step in losses)):
        made.hear(event)
    made.hear(Exited(code=code))
    return made


def saved(step, ranks):
    return [
        Saved(step=step, rank=rank, ranks=ranks, stall_s=0.001, total_s=1, written_bytes=1000)
        for rank in range(ranks)
    ]


def story():
    """What a demo is like in which all goes well."""
    began = Began(ranks=2, parameters=1000, characters=1000)
    planned = Planned(before_bytes=100, after_bytes=40, budget_bytes=50, planning_s=1)
    killed = Killed(rank=1, step=9, done_bytes=10, total_bytes=20, at_s=5)
    lost = Lost(rank=0, step=9, story="RankLostError: rank 1 died", at_s=5.02)
    resumed = Resumed(
        prefix="step_3", step=3, saved_by=2, ranks=3, passed_over=(("step_6", "is damaged"),)
    )
    damage = Damage(file="step_6/shard-0-a.safetensors", tensor="model.a", problem="is not")
    return Story(
        course=QUICK,
        undisturbed=run(began, Ended(digest="d"), losses=range(1, 13)),
        killed=run(
            began,
            planned,
            *saved(3, 2),
            *saved(6, 2),
            killed,
            lost,
            losses=range(1, 11),
            code=1,
        ),
        left=intact("step_6", "step_3"),
        flip=Flip(file="shard-0-a.safetensors", tensor="model.a", place=100),
        flipped=dataclasses.replace(intact("step_6")[0], damage=(damage,)),
        resumed=run(
            resumed,
            *saved(6, 3),
            *saved(9, 3),
            *saved(12, 3),
            Ended(digest="d"),
            losses=range(4, 13),
        ),
        held=intact("step_3", "step_6", "step_9", "step_12"),
        seconds=1.0,
    )


def test_a_save_is_told_once_all_ranks_have_told_with_the_longest_waits():
    lines, heard = [], Run()
    scene = Scene(say=lines.append, step=lambda *_: None, wait=lambda _: None)
    quick, slow = saved(3, 2)
    slow = msgspec.structs.replace(slow, stall_s=0.018, total_s=2)
    for event, told in ((quick, 0), (slow, 1)):
        heard.hear(event)
        show(event, heard, scene)
        assert len(lines) == told
    assert lines == ["step_3 is saved: 2.0 s, of which the training waited 18 ms"]


def test_all_proofs_hold_when_all_goes_well():
    assert [proof.claim for proof in proofs_of(story()) if not proof.holds] == []


def over_the_budget(told):
    told.killed.planned = msgspec.structs.replace(told.killed.planned, after_bytes=51)


def no_plan(told):
    told.killed.planned = None


def a_save_is_missing(told):
    told.resumed.saved.pop()


def killed_when_all_was_written(told):
    told.killed.killed = msgspec.structs.replace(told.killed.killed, done_bytes=20)


def nobody_was_killed(told):
    told.killed.killed, told.killed.code = None, 0


def the_torn_one_is_listed(told):
    return dataclasses.replace(told, left=intact("step_9", "step_6", "step_3"))


def one_before_it_is_gone(told):
    return dataclasses.replace(told, left=intact("step_3"))


def one_before_it_is_damaged(told):
    return dataclasses.replace(told, left=(told.flipped, *intact("step_3")))


def another_rank_is_named(told):
    told.killed.lost[0] = msgspec.structs.replace(told.killed.lost[0], story="rank 0 died")


def nobody_was_told(told):
    told.killed.lost.clear()


def the_bit_is_not_found(told):
    return dataclasses.replace(told, flipped=intact("step_6")[0])


def it_is_found_in_another_file(told):
    flip = dataclasses.replace(told.flip, file="shard-1-b.safetensors")
    return dataclasses.replace(told, flip=flip)


def it_is_found_in_another_tensor(told):
    return dataclasses.replace(told, flip=dataclasses.replace(told.flip, tensor="model.b"))


def resumed_from_the_damaged_one(told):
    told.resumed.resumed = msgspec.structs.replace(
        told.resumed.resumed, prefix="step_6", step=6, passed_over=()
    )


def resumed_by_as_many_ranks(told):
    told.resumed.resumed = msgspec.structs.replace(told.resumed.resumed, ranks=2)


def a_loss_is_off_by_a_bit(told):
    told.resumed.losses[7] = told.undisturbed.losses[7] * (1 + 2**-52)


def a_loss_before_the_kill_is_off(told):
    told.killed.losses[2] += 1e-7


def a_step_is_missing(told):
    del told.resumed.losses[12]


def other_weights(told):
    told.resumed.digest = "e"


def no_digest(told):
    told.resumed.digest = told.undisturbed.digest = None


def damaged_in_the_end(told):
    return dataclasses.replace(told, held=(told.flipped, *intact("step_3", "step_9", "step_12")))


def one_is_missing_in_the_end(told):
    return dataclasses.replace(told, held=told.held[1:])


@pytest.mark.parametrize(
    ("harm", "claims"),
    [
        (over_the_budget, {"activations fit a budget"}),
        (no_plan, {"activations fit a budget"}),
        (a_save_is_missing, {"saves while the training goes on"}),
        (killed_when_all_was_written, {"SIGKILL amid a save harms nothing"}),
        (nobody_was_killed, {"SIGKILL amid a save harms nothing", "other ranks know of it"}),
        (the_torn_one_is_listed, {"SIGKILL amid a save harms nothing"}),
        (one_before_it_is_gone, {"SIGKILL amid a save harms nothing"}),
        (one_before_it_is_damaged, {"SIGKILL amid a save harms nothing"}),
        (another_rank_is_named, {"other ranks know of it"}),
        (nobody_was_told, {"other ranks know of it"}),
        (the_bit_is_not_found, {"a flipped bit is found"}),
        (it_is_found_in_another_file, {"a flipped bit is found"}),
        (it_is_found_in_another_tensor, {"a flipped bit is found"}),
        (resumed_from_the_damaged_one, {"resumed from the newest whole one"}),
        (resumed_by_as_many_ranks, {"resumed from the newest whole one"}),
        (a_loss_is_off_by_a_bit, {"losses are those of no disturbance"}),
        (a_loss_before_the_kill_is_off, {"losses are those of no disturbance"}),
        (a_step_is_missing, {"losses are those of no disturbance"}),
        (other_weights, {"so are weights, masters, moments"}),
        (no_digest, {"so are weights, masters, moments"}),
        (damaged_in_the_end, {"the store is whole in the end"}),
        (one_is_missing_in_the_end, {"the store is whole in the end"}),
    ],
)
def test_every_proof_can_fail(harm, claims):
    told = story()
    harmed = harm(told) or told
    assert {proof.claim for proof in proofs_of(harmed) if not proof.holds} == claims


def test_the_text_is_whole_sonnets():
    found = sonnets().strip().split("\n\n")
    assert len(found) == 49
    assert {len(each.splitlines()) for each in found} == {14}
    assert sonnets().isascii()


def test_parts_are_for_all_the_ranks_it_runs_on():
    assert all(PARTS % ranks == 0 for ranks in (1, 2, 3))
