"""Real ranks save and load, and one of them comes to harm in every phase: the others name it and
do not hang, what was saved before is whole, and nobody's state is half loaded.

A choice of pairs runs in ``make test``, the whole product in ``make proof``.
"""

import errno
import itertools
import os
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from fault_jobs import (
    LIVENESS_S,
    TIMEOUT_S,
    Harm,
    load_alone,
    load_job,
    parts_of,
    save_job,
    send_job,
    state_of,
)

from holdfast.catalog import Catalog
from holdfast.errors import NoSpaceError, StorageError, TransientStorageError
from holdfast.testing import Fault, RankGang

RANKS = 3
# Promised is 1 s, and how many kept to it is counted. A machine under load proves here that nobody
# waited for a timeout.
PROMISED_S = 1.0
NOTICED_S = 20.0
SAVE_PHASES = ("capture", "agree", "begin", "write", "commit", "agree")
LOAD_PHASES = ("open", "validate", "match", "read", "vote", "apply", "settle", "agree")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """A moment in a save or load, by the event of rank 0 and that of any other rank there.
    ``told``: the committer may have every rank's word by then."""

    phase: str
    first: str
    others: str
    told: bool = False

    def event(self, victim):
        return self.others if victim else self.first


def alike(phase, event, *, told=False):
    return Spot(phase=phase, first=event, others=event, told=told)


SAVE = {
    "capture": alike("capture", "state_dict"),
    "agree": alike("agree", "progress agree"),
    "begin": Spot(phase="begin", first="create intent after", others="stat intent before"),
    "begun": alike("begin", "begin all_gather before"),
    "write": alike("write", "finish shard before"),
    "told": alike("commit", "commit gather after", told=True),
    "publish": Spot(
        phase="commit", first="create record before", others="commit broadcast before", told=True
    ),
    "published": Spot(
        phase="commit", first="create record after", others="commit broadcast before", told=True
    ),
    "word": alike("commit", "commit broadcast after", told=True),
}
LOAD = {
    "open": Spot(phase="open", first="read record before", others="stat record before"),
    "validate": Spot(phase="validate", first="checker", others="progress validate"),
    "match": alike("match", "progress match"),
    "read": alike("read", "read_into shard after"),
    "vote": alike("vote", "vote barrier before"),
    "apply": alike("apply", "load_state_dict"),
    "settle": alike("settle", "settle barrier before"),
    "settled": alike("settle", "settle barrier after"),
}
LOST = ("kill", "stop", "wake")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A storage with one checkpoint, to be copied."""
    folder = tmp_path_factory.mktemp("saved") / "store"
    with RankGang(RANKS) as gang:
        gang.run(save_job, folder, prefix="previous", seed=1)
    return folder


@pytest.fixture
def store(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "store"))


@pytest.fixture(scope="module")
def calm():
    """Ranks for cases that all of them survive."""
    with RankGang(RANKS) as gang:
        yield gang


def chosen(spots, kinds, cases):
    """Every spot, victim and kind; those that are not among ``cases`` only in ``make proof``."""
    return [
        pytest.param(
            case,
            id="{}-{}-{}".format(*case),
            marks=[] if cases is None or case in cases else [pytest.mark.proof],
        )
        for case in itertools.product(spots, (0, 1), kinds)
    ]


def harm_in(spots, name, victim, kind, tmp_path, **more):
    event = spots[name].event(victim)
    return Harm(kind=kind, event=event, rank=victim, log=tmp_path / "harmed", **more)


def require_unchanged(ends):
    """Or, if the loss was noticed when all had loaded, loaded whole, and the error says so."""
    for rank, end in ends.items():
        if "is loaded all the same" in end.text:
            assert end.phase in ("settle", "agree"), (rank, end.text)
            assert end.value == state_of(1).digest(), (rank, end.text)
        else:
            assert end.same, (rank, end.text)


def ends_of(gang, ranks):
    outcomes = gang.outcomes(TIMEOUT_S, ranks=ranks)
    for outcome in outcomes:
        assert outcome.value is not None, (outcome.rank, outcome.error, outcome.exit_code)
    return {outcome.rank: outcome.value for outcome in outcomes}


def require_named(ends, harm, phase, phases, record_property):
    """All raised, in time, and named the victim: where it was, if it said so, else where it was
    missed. Records how many knew as soon as is promised: of one that stopped, after the time in
    which it is taken for alive."""
    harmed_s = float(harm.log.read_text())
    patience_s = LIVENESS_S if harm.kind in ("stop", "wake") else 0.0
    victim = harm.rank if harm.target is None else harm.target
    soon = [end.at_s - harmed_s < patience_s + PROMISED_S for end in ends.values()]
    record_property("ranks that knew within 1 s", soon.count(True))
    record_property("ranks that knew later", soon.count(False))
    for rank, end in ends.items():
        assert end.error is not None, (rank, end.value)
        assert end.rank == victim, (rank, end.text)
        if harm.kind == "raise":
            assert end.phase == phase, (rank, end.text)
            assert "on purpose" in end.text
        else:
            assert end.error == "RankLostError", (rank, end.text)
            # Rank 0 is the first to get through a barrier, and takes the store with it. From
            # another the victim may be one collective ahead: who gives its part to a gathering
            # goes on.
            after = 0 if victim == 0 else max(0, phases.index(phase) - 1)
            assert end.phase in phases[after:], (rank, end.text)
        assert end.at_s - harmed_s < patience_s + NOTICED_S, (rank, end.text)
    if victim != 0 or harm.kind == "raise":
        assert len({(end.error, end.phase) for end in ends.values()}) == 1


def expire(folder):
    """As if everything that is under way had been silent for a day."""
    for path in folder.rglob("*"):
        if path.name.startswith(("intent-", ".")) and path.is_file():
            os.utime(path, (time.time() - 86400,) * 2)


def require_in_order(folder, *, seeds):
    """Only whole checkpoints, those of ``seeds`` by prefix, and no debris after gc. Returns which
    are there."""
    expire(folder)
    catalog = Catalog(folder)
    report = catalog.gc()
    assert not report.kept
    there = [info.prefix for info in catalog.list()]
    named = set()
    for prefix in there:
        assert catalog.verify(prefix).is_intact, prefix
        record = catalog.find(prefix).record
        named |= {f"{prefix}/{name}" for file in record.files for name in file.names}
        named.add(f"{prefix}/metadata.json")
        if any(name.endswith("part0") for name in record.tensors):
            require_parts(catalog, prefix, seeds[prefix])
            continue
        found, expected = load_alone(folder, prefix), state_of(seeds[prefix])
        assert found.digest() == expected.digest(), prefix
        assert found.own() == expected.own(), prefix
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    left = {name for name in left if not name.startswith((".holdfast", "clock-"))}
    tombstones = {f"{path.name}/metadata.json" for path in folder.iterdir() if path.is_dir()}
    indexes = {f"{prefix}/model.safetensors.index.json" for prefix in there}
    assert left - tombstones - indexes <= named, left - named
    return there


def require_parts(catalog, prefix, seed):
    found = catalog.read(prefix)["model"]
    for name, whole in parts_of(seed).items():
        assert np.array_equal(found[name], whole), name


def require_after_save(folder, name, victim, kind, *, knows=()):
    """The previous checkpoint is there; the new one is, only if it can be, and if it must be."""
    there = require_in_order(folder, seeds={"previous": 1, "next": 2})
    assert "previous" in there
    spot = SAVE[name]
    # A committer that wakes up with everybody's word in its hands may commit: that is whole.
    if not spot.told and (name, victim, kind) != ("write", 0, "wake"):
        assert there == ["previous"]
    if victim == 0 and name in ("told", "publish") and kind in ("kill", "stop", "raise"):
        assert there == ["previous"]
    if (victim == 0 and name == "published") or name == "word":
        assert there == ["next", "previous"]
    if any("is committed and whole" in end.text for end in knows):
        assert there == ["next", "previous"]


def require_said(ends, name, folder):
    """What the errors say of the outcome, where anything can be said."""
    for rank, end in ends.items():
        if not SAVE[name].told:
            assert "is committed and whole" not in end.text, (rank, end.text)
            # Of a rank that is lost, the others cannot know whether it had given its word.
            assert "unknown" not in end.text or end.phase == "commit", (rank, end.text)
            continue
        said = "is committed and whole" in end.text or "unknown" in end.text
        if rank and not said:  # it had not given its own word, so that nobody commits
            assert [info.prefix for info in Catalog(folder).list()] == ["previous"], (rank, end)


IN_EVERY_RUN = {
    ("capture", 1, "kill"),
    ("agree", 0, "kill"),
    ("begin", 0, "kill"),
    ("begun", 1, "kill"),
    ("write", 0, "kill"),
    ("write", 1, "stop"),
    ("told", 1, "kill"),
    ("publish", 0, "wake"),
    ("published", 0, "kill"),
    ("word", 1, "kill"),
}


@pytest.mark.parametrize("case", chosen(SAVE, LOST, IN_EVERY_RUN))
def test_a_save_that_loses_a_rank(case, store, tmp_path, record_property):
    name, victim, kind = case
    harm = harm_in(SAVE, name, victim, kind, tmp_path)
    with RankGang(RANKS) as gang:
        gang.start(save_job, store, harm)
        ends = ends_of(gang, [rank for rank in range(RANKS) if rank != victim])
        require_named(ends, harm, SAVE[name].phase, SAVE_PHASES, record_property)
        require_said(ends, name, store)
        if kind == "wake":
            gang.cont(victim)
            (woken,) = ends_of(gang, [victim]).values()
            assert woken.error is not None
            ends[victim] = woken
    require_after_save(store, name, victim, kind, knows=ends.values())


@pytest.mark.parametrize("case", chosen(SAVE, ["raise"], None))
def test_a_save_in_which_a_rank_raises(case, store, tmp_path, calm, record_property):
    name, victim, kind = case
    harm = harm_in(SAVE, name, victim, kind, tmp_path)
    calm.start(save_job, store, harm)
    ends = ends_of(calm, range(RANKS))
    require_named(ends, harm, SAVE[name].phase, SAVE_PHASES, record_property)
    require_said(ends, name, store)
    require_after_save(store, name, victim, kind, knows=ends.values())


PATIENCE = {("write", 1, "slow"), ("publish", 0, "nap")}


@pytest.mark.parametrize("case", chosen(SAVE, ["slow", "nap"], PATIENCE))
def test_a_save_waits_for_a_rank_that_is_slow_or_away_for_a_moment(case, store, tmp_path, calm):
    name, victim, kind = case
    harm = harm_in(SAVE, name, victim, kind, tmp_path)
    assert [end.value for end in calm.run(save_job, store, harm)] == ["next"] * RANKS
    assert harm.log.exists()
    assert require_in_order(store, seeds={"previous": 1, "next": 2}) == ["next", "previous"]


@pytest.mark.parametrize(
    "name",
    [
        "publish",
        *(
            pytest.param(name, marks=pytest.mark.proof)
            for name in ("begin", "begun", "write", "told")
        ),
    ],
)
def test_a_committer_that_sleeps_until_gc_has_fenced_it_publishes_nothing(name, store, tmp_path):
    harm = harm_in(SAVE, name, 0, "wake", tmp_path)
    with RankGang(RANKS) as gang:
        gang.start(save_job, store, harm)
        ends_of(gang, range(1, RANKS))
        expire(store)
        Catalog(store).gc()
        gang.cont(0)
        (woken,) = ends_of(gang, [0]).values()
    assert woken.error is not None
    assert "is committed and whole" not in woken.text
    assert require_in_order(store, seeds={"previous": 1}) == ["previous"]


LOADS_IN_EVERY_RUN = {
    ("open", 0, "kill"),
    ("read", 1, "kill"),
    ("vote", 1, "kill"),
    ("apply", 0, "kill"),
    ("apply", 1, "wake"),
    ("settled", 1, "kill"),
}


@pytest.mark.parametrize("case", chosen(LOAD, LOST, LOADS_IN_EVERY_RUN))
def test_a_load_that_loses_a_rank_changes_nothing(case, saved, tmp_path, record_property):
    name, victim, kind = case
    harm = harm_in(LOAD, name, victim, kind, tmp_path)
    with RankGang(RANKS) as gang:
        gang.start(load_job, saved, harm)
        ends = ends_of(gang, [rank for rank in range(RANKS) if rank != victim])
        require_named(ends, harm, LOAD[name].phase, LOAD_PHASES, record_property)
        if kind == "wake":
            gang.cont(victim)
            ends |= ends_of(gang, [victim])
            assert ends[victim].error is not None
        require_unchanged(ends)


@pytest.mark.parametrize("case", chosen(LOAD, ["raise"], None))
def test_a_load_in_which_a_rank_raises_changes_nothing(
    case, saved, tmp_path, calm, record_property
):
    name, victim, kind = case
    harm = harm_in(LOAD, name, victim, kind, tmp_path)
    calm.start(load_job, saved, harm)
    ends = ends_of(calm, range(RANKS))
    require_named(ends, harm, LOAD[name].phase, LOAD_PHASES, record_property)
    require_unchanged(ends)


@pytest.mark.parametrize("case", chosen(LOAD, ["slow", "nap"], {("read", 1, "nap")}))
def test_a_load_waits_for_a_rank_that_is_slow_or_away_for_a_moment(case, saved, tmp_path, calm):
    name, victim, kind = case
    harm = harm_in(LOAD, name, victim, kind, tmp_path)
    expected = state_of(1).digest()
    assert [end.value for end in calm.run(load_job, saved, harm)] == [expected] * RANKS
    assert harm.log.exists()


WIDE = 32 * 1024 * 1024


@pytest.mark.parametrize(
    ("victim", "kind", "form"),
    [
        (1, "kill", "single_file"),
        (0, "kill", "consolidated"),
        (2, "stop", "consolidated"),
        *(
            pytest.param(victim, kind, form, marks=pytest.mark.proof)
            for victim in range(RANKS)
            for kind in LOST
            for form in ("single_file", "consolidated")
        ),
    ],
)
def test_a_rank_lost_while_tensors_are_on_their_way(
    victim, kind, form, store, tmp_path, *, record_property
):
    """When rank 0 writes the second piece, the other ranks have more to send than it has taken."""
    harm = Harm(
        kind=kind,
        event="write_at shard before",
        nth=2,
        rank=0,
        target=victim,
        log=tmp_path / "harmed",
    )
    with RankGang(RANKS) as gang:
        gang.start(send_job, store, harm, format=form)
        ends = ends_of(gang, [rank for rank in range(RANKS) if rank != victim])
        require_named(ends, harm, "write", SAVE_PHASES, record_property)
        if kind == "wake":
            gang.cont(victim)
            (woken,) = ends_of(gang, [victim]).values()
            assert woken.error is not None
    there = require_in_order(store, seeds={"previous": 1, "next": 2})
    assert there == ["previous"] or (kind, victim) == ("wake", 0)


@pytest.mark.parametrize("form", ["single_file", "consolidated"])
def test_after_a_transfer_that_broke_the_same_ranks_save(
    form, store, tmp_path, calm, record_property
):
    harm = Harm(kind="raise", event="write_at shard before", nth=2, rank=0, log=tmp_path / "harmed")
    calm.start(send_job, store, harm, format=form)
    ends = ends_of(calm, range(RANKS))
    require_named(ends, harm, "write", SAVE_PHASES, record_property)
    assert not [*store.glob("next/*")]
    assert [end.value for end in calm.run(send_job, store, format=form)] == ["next"] * RANKS
    assert require_in_order(store, seeds={"previous": 1, "next": 2}) == ["next", "previous"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A checkpoint with a tensor that takes a while to send."""
    folder = tmp_path_factory.mktemp("wide") / "store"
    with RankGang(RANKS) as gang:
        gang.run(save_job, folder, prefix="previous", seed=1, noise_bytes=WIDE)
    return folder


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, id=f"seed-{seed}", marks=[pytest.mark.proof] if seed >= 2 else [])
        for seed in range(40)
    ],
)
def test_a_rank_lost_while_what_one_has_read_is_sent_to_all(seed, wide, tmp_path):
    """At a random moment after its last read: before, during or after what it sends."""
    rng = random.Random(seed)
    kind = rng.choice(["kill", "kill", "stop", "wake"])
    victim = rng.randrange(RANKS)
    harm = Harm(
        kind=kind,
        event="read_into shard after",
        rank=victim,
        after_s=rng.choice([0.0, rng.uniform(0.001, 0.1)]),
        log=tmp_path / "harmed",
    )
    with RankGang(RANKS) as gang:
        gang.start(load_job, wide, harm, noise_bytes=WIDE, resharding_strategy="broadcast")
        ends = ends_of(gang, [rank for rank in range(RANKS) if rank != victim])
        if kind == "wake":
            gang.cont(victim)
            ends |= ends_of(gang, [victim])
    expected = state_of(1, noise_bytes=WIDE).digest()
    for rank, end in ends.items():
        if end.error is None:  # the harm came when all was done
            assert end.value == expected
            continue
        # Who hosts the store and was stopped wakes up to find that the others have left.
        assert victim in {end.rank, rank}, (rank, end.text)
        assert end.same or ("is loaded all the same" in end.text and end.value == expected)


def test_what_may_pass_on_a_storage_passes_and_the_save_succeeds(store, calm):
    for method, victim in (("finish", 1), ("open_writer", 2), ("create", 0), ("stat", 1)):
        shutil.rmtree(store / "next", ignore_errors=True)
        faults = {victim: [Fault(method, 1, TransientStorageError("try again"), "after")]}
        assert [end.value for end in calm.run(save_job, store, faults=faults)] == ["next"] * RANKS
    assert require_in_order(store, seeds={"previous": 1, "next": 2}) == ["next", "previous"]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_storages_that_fail_one_call_in_ten_on_all_ranks(seed, store, calm):
    calm.start(save_job, store, faults=100 * seed)
    ends = ends_of(calm, range(RANKS))
    assert [end.value for end in ends.values()] == ["next"] * RANKS, ends
    assert require_in_order(store, seeds={"previous": 1, "next": 2}) == ["next", "previous"]
    calm.start(load_job, store, faults=100 * seed)
    ends = ends_of(calm, range(RANKS))
    assert [end.value for end in ends.values()] == [state_of(1).digest()] * RANKS, ends


@pytest.mark.parametrize(
    "call",
    [
        ("create", 1, 0, "begin"),
        ("stat", 1, 2, "begin"),
        ("open_writer", 1, 1, "write"),
        ("write_at", 1, 0, "write"),
        ("finish", 1, 2, "write"),
        ("create", 2, 0, "commit"),
    ],
)
@pytest.mark.parametrize("kind", [StorageError, NoSpaceError])
def test_a_storage_that_fails_for_good_on_one_rank(call, kind, store, calm):
    method, nth, victim, phase = call
    error = kind(os.strerror(errno.ENOSPC if kind is NoSpaceError else errno.EIO))
    calm.start(save_job, store, faults={victim: [Fault(method, nth, error)]})
    for rank, end in ends_of(calm, range(RANKS)).items():
        assert (end.error, end.rank, end.phase) == (kind.__name__, victim, phase), (rank, end.text)
        assert error.message in end.text
        assert "unknown" not in end.text or (phase == "commit" and rank)
    assert require_in_order(store, seeds={"previous": 1}) == ["previous"]


@pytest.mark.parametrize(("victim", "kind"), [(0, StorageError), (2, StorageError)])
def test_a_storage_that_fails_for_good_in_a_load(victim, kind, saved, calm):
    calm.start(load_job, saved, faults={victim: [Fault("read_into", 2, kind("I/O error"))]})
    for end in ends_of(calm, range(RANKS)).values():
        assert (end.error, end.rank, end.phase) == (kind.__name__, victim, "read"), end.text
        assert end.same


HANGS_FOR_S = 12.0  # all that comes before must have been done by then
# The time a rank gives its own work to end, and then the storage to be cleaned up.
WINDING_UP_S = 6.0


def require_timed_out(ends, harm, began_s):
    for rank, end in ends.items():
        assert end.error in ("OperationTimeoutError", "RankTimeoutError"), (rank, end.text)
        assert end.rank == harm.rank, (rank, end.text)
        assert end.at_s - began_s < HANGS_FOR_S + WINDING_UP_S + NOTICED_S, (rank, end.text)


@pytest.mark.parametrize(
    ("event", "victim"),
    [
        pytest.param("create intent before", 0, marks=pytest.mark.proof),
        pytest.param("stat intent before", 1, marks=pytest.mark.proof),
        ("open_writer shard before", 1),
        pytest.param("finish shard before", 0, marks=pytest.mark.proof),
        ("create record before", 0),
        pytest.param("create record after", 0, marks=pytest.mark.proof),
    ],
)
def test_a_storage_that_hangs_on_one_rank_ends_a_save_in_time(event, victim, store, tmp_path):
    harm = Harm(kind="hang", event=event, rank=victim, log=tmp_path / "harmed")
    with RankGang(RANKS) as gang:
        began_s = time.monotonic()
        gang.start(save_job, store, harm, timeout_s=HANGS_FOR_S)
        ends = ends_of(gang, range(RANKS))
        require_timed_out(ends, harm, began_s)
        if "record" in event:
            assert all("unknown" in end.text for end in ends.values()), ends
    there = require_in_order(store, seeds={"previous": 1, "next": 2})
    assert there == (["next", "previous"] if event == "create record after" else ["previous"])


@pytest.mark.parametrize(
    ("event", "victim"),
    [
        ("read record before", 0),
        pytest.param("stat record before", 1, marks=pytest.mark.proof),
        pytest.param("read_into shard before", 0, marks=pytest.mark.proof),
        ("read_into shard before", 1),
    ],
)
def test_a_storage_that_hangs_on_one_rank_ends_a_load_in_time(event, victim, saved, tmp_path):
    harm = Harm(kind="hang", event=event, rank=victim, log=tmp_path / "harmed")
    with RankGang(RANKS) as gang:
        began_s = time.monotonic()
        gang.start(load_job, saved, harm, timeout_s=HANGS_FOR_S)
        ends = ends_of(gang, range(RANKS))
        require_timed_out(ends, harm, began_s)
        assert all(end.same for end in ends.values())


def test_who_waits_for_one_that_waits_for_a_third_names_the_third(store, tmp_path):
    """The time of rank 2 is over first, while it waits for rank 0, which waits for rank 1."""
    harm = Harm(kind="hang", event="finish shard before", rank=1, log=tmp_path / "harmed")
    with RankGang(RANKS) as gang:
        gang.start(save_job, store, harm, timeout_s=HANGS_FOR_S, early=2)
        for rank, end in ends_of(gang, range(RANKS)).items():
            assert end.error == "RankTimeoutError", (rank, end.text)
            assert end.rank == 1, (rank, end.text)
