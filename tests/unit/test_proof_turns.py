"""Whose turn it is in ``make proof``: decided from what was done, without a process."""

from collections import Counter

import proof_tools  # noqa: F401 -- the harness is beside src, not in it
import pytest

from _campaign import BATCHES, Campaign, Outcome, batch_of
from _ledger import Batch, Ledger, RunKey, seed_of
from _turns import MOST_TROUBLES, PEERS_SHARE, Standing, next_turn, standings


def campaign(name, cases=100, **more):
    options = {"subjects": ("holdfast", "peer"), "peer_cases": 50, **more}
    return Campaign(
        name=name,
        promise="",
        counted="",
        cases=cases,
        run=lambda subject, seed: Outcome(cases=0),
        **options,
    )


def batch(row, number=0, **more):
    campaign, subject = row
    options = {"seconds": 1.0, "cases": 10, **more}
    return Batch(campaign=campaign.name, subject=subject, number=number, seed=number, **options)


def played(rows, minutes, seconds_of=lambda row: 1.0, cases_of=lambda row: 1):
    """Who got a turn, when batches run one after the other on a clock of their own."""
    left_s, batches, turns = minutes * 60.0, [], []
    while (turn := next_turn(standings(rows, batches), left_s=left_s)) is not None:
        row = turn.campaign, turn.subject
        turns.append((turn.campaign.name, turn.subject))
        seconds = seconds_of(row)
        batches.append(batch(row, turn.batches, seconds=seconds, cases=cases_of(row)))
        left_s -= seconds
    return turns


def rows_of(*campaigns):
    return [(each, subject) for each in campaigns for subject in each.subjects]


def test_everybody_gets_a_batch_before_anybody_gets_a_second():
    rows = rows_of(campaign("a", 10**6), campaign("b", 100), campaign("c", 5))
    turns = played(rows, minutes=1, seconds_of=lambda row: {"a": 0.1, "b": 9, "c": 1}[row[0].name])
    assert turns[:6] == [(name, who) for who in ("holdfast", "peer") for name in ("a", "b", "c")]


def test_all_is_done_if_there_is_time():
    rows = rows_of(campaign("a", 30), campaign("b", 70))
    assert Counter(played(rows, minutes=60)) == {
        ("a", "holdfast"): 30,
        ("b", "holdfast"): 70,
        ("a", "peer"): 50,
        ("b", "peer"): 50,
    }


def test_time_is_shared_until_a_target_is_reached_and_peers_get_less_of_it():
    rows = rows_of(campaign("far", 10_000), campaign("near", 200))
    turns = Counter(played(rows, minutes=4))
    assert sum(turns.values()) == 240
    assert turns["far", "holdfast"] == turns["near", "holdfast"]  # neither has reached it yet
    assert turns["far", "holdfast"] > 3 * turns["far", "peer"] > 3
    later = Counter(played(rows, minutes=20))
    assert later["near", "holdfast"] == 200
    assert later["far", "holdfast"] > 3 * 200


def test_a_campaign_with_long_batches_gets_no_more_time_for_it():
    rows = [(campaign("long", 10**6), "holdfast"), (campaign("short", 10**6), "holdfast")]
    turns = Counter(
        played(rows, minutes=10, seconds_of=lambda row: 20 if row[0].name == "long" else 1)
    )
    assert abs(20 * turns["long", "holdfast"] - turns["short", "holdfast"]) <= 40


def test_what_would_not_end_in_time_is_not_begun():
    long, short = (campaign(name, 10**6, subjects=("holdfast",)) for name in ("long", "short"))
    done = [batch((long, "holdfast"), seconds=50.0), batch((short, "holdfast"), seconds=60.0)]
    everybody = standings(rows_of(long, short), done)
    assert next_turn(everybody, left_s=55).campaign is long
    assert next_turn(everybody, left_s=40) is None
    assert next_turn(everybody, left_s=0) is None


def test_one_campaign_runs_one_batch_at_a_time():
    everybody = standings(rows_of(campaign("a"), campaign("b")), [])
    assert next_turn(everybody, left_s=9, busy={"a"}).campaign.name == "b"
    assert next_turn(everybody, left_s=9, busy={"a", "b"}) is None


def test_a_list_of_cases_is_run_to_its_end_and_not_beyond():
    row = campaign("list", 10, ends=True), "holdfast"
    more_than_told = [batch(row, n, cases=10) for n in range(3)]
    assert next_turn(standings([row], more_than_told), left_s=9) is not None
    ended = [*more_than_told, batch(row, 3, cases=1, is_last=True)]
    assert next_turn(standings([row], ended), left_s=9) is None


def test_what_fails_again_and_again_is_left_alone():
    row = campaign("sick"), "holdfast"
    failed = [batch(row, n, cases=0, trouble="hung") for n in range(MOST_TROUBLES)]
    assert next_turn(standings([row], failed[:-1]), left_s=9) is not None
    assert next_turn(standings([row], failed), left_s=9) is None


def test_the_share_of_peers_is_that():
    row = {"campaign": campaign("a", 10**9, peer_cases=10**9), "batches": 1, "seconds": 4.0}
    ours, peers = Standing(subject="holdfast", **row), Standing(subject="peer", **row)
    assert peers.turn[1] == pytest.approx(ours.turn[1] / PEERS_SHARE)


# --- seeds and the ledger


def test_every_batch_has_its_own_seed_and_always_the_same():
    rows = [("a", "holdfast"), ("a", "peer"), ("b", "holdfast")]
    seeds = {seed_of(s, *row, n) for s in (1, 2) for row in rows for n in range(5)}
    assert len(seeds) == 30
    assert max(seeds) < 2**63
    assert seed_of(1, "a", "holdfast", 3) == 253050098318049283
    assert [batch_of(seed_of(7, "a", "peer", n)) for n in (0, 1, 99)] == [0, 1, 99]
    with pytest.raises(ValueError, match="is not one of"):
        seed_of(1, "a", "peer", BATCHES)


def ledger_of(path, seed=1, code="abc"):
    return Ledger(path, RunKey(seed=seed, code=code))


def test_a_ledger_gives_back_what_was_written(tmp_path):
    row = campaign("a"), "holdfast"
    ledger = ledger_of(tmp_path / "of" / "batches.jsonl")
    assert ledger.batches() == []
    written = [
        batch(row, 0, violated=1, violations=("case 3: \N{SNOWMAN} broke",), facts={"even": 3}),
        batch(row, 1, trouble="hung\nhere", is_subjects=True),
    ]
    for each in written:
        ledger.append(each)
    assert ledger.batches() == written


def test_a_line_that_was_broken_off_is_no_batch_and_harms_no_other(tmp_path):
    path = tmp_path / "batches.jsonl"
    row = campaign("a"), "holdfast"
    ledger_of(path).append(batch(row, 0))
    whole = path.read_bytes()
    for size in (*range(0, len(whole), 17), len(whole) - 1, len(whole)):
        path.write_bytes(whole + whole[:size])
        ledger = ledger_of(path)
        is_whole = size == len(whole)
        assert len(ledger.batches()) == 1 + is_whole
        ledger.append(batch(row, 1))
        numbers = [each.number for each in ledger.batches()]
        # One that lacks but its newline was whole all the same.
        assert numbers == ([0, 0, 1] if size >= len(whole) - 1 else [0, 1])


def test_batches_of_another_seed_or_other_code_are_kept_and_not_counted(tmp_path):
    path = tmp_path / "batches.jsonl"
    row = campaign("a"), "holdfast"
    runs = [ledger_of(path), ledger_of(path, seed=2), ledger_of(path, code="abc+changed")]
    for number, ledger in enumerate(runs):
        ledger.append(batch(row, number))
    assert [[each.number for each in ledger.batches()] for ledger in runs] == [[0], [1], [2]]
    assert [ledger.others() for ledger in runs] == [2, 2, 2]
    runs[1].forget()
    assert [len(ledger.batches()) for ledger in runs] == [1, 0, 1]
