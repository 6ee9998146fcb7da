"""What ranks do in the one order in which it matters: who is blamed, and who takes what back. Ranks
of one process, each with a channel of its own to one store."""

import concurrent.futures
import datetime as dt
import threading
import time

import pytest
from torch.distributed import HashStore

from holdfast.coordination._channel import Channel
from holdfast.coordination._exchange import StoreExchange
from holdfast.coordination._meeting import Ranks
from holdfast.errors import ErrorRecord, RankTimeoutError, StorageError

PATIENCE_S = 60.0


class Ordered:
    """A client of the store that calls ``before(name, keys)`` ahead of every call, and
    ``after(name, keys, result)`` when it has an answer."""

    def __init__(self, store, before, after):
        self._store, self._before, self._after = store, before, after

    def __getattr__(self, name):
        call = getattr(self._store, name)

        def ordered(keys, *rest):
            named = [keys] if isinstance(keys, str) else keys
            self._before(name, named)
            result = call(keys, *rest)
            self._after(name, named, result)
            return result

        return ordered


def nothing(*_):
    pass


def exchange(store, rank, before=nothing, *, after=nothing, of="a save", world_size=3):
    def connect():
        return Ordered(store, before, after)

    channel = Channel(connect)
    ranks = Ranks(
        home="home",
        rank=rank,
        world_size=world_size,
        liveness=None,
        silence_s=PATIENCE_S,
        is_closed=lambda: False,
    )
    made = StoreExchange(
        channel,
        ranks,
        reconnect=lambda: Channel(connect),
        base=f"home/{of}/0",
        name=of,
        timeout_s=PATIENCE_S,
        deadline=time.monotonic() + PATIENCE_S,
    )
    return made, channel


def test_what_a_rank_has_given_stays_until_the_target_has_read_it():
    """Rank 0 has seen that all parts are there and is about to read them; rank 2 fails; rank 1
    learns of it. Had it taken its part back then, rank 0 would wait for ever."""
    store = HashStore()
    store.set_timeout(dt.timedelta(seconds=2))  # for a read of what is not there
    reading, failed, left = threading.Event(), threading.Event(), threading.Event()

    def target(name, keys):
        if name == "multi_get" and "-gather-" in keys[0]:
            reading.set()
            assert left.wait(PATIENCE_S)

    def giver(name, keys):
        if name == "check" and keys == ["home/a save/0/failed"]:
            assert failed.wait(PATIENCE_S)

    first, *channels = exchange(store, 0, target)
    second, channel = exchange(store, 1, giver)
    third, last = exchange(store, 2)
    channels += [channel, last]

    def give():
        try:
            return second.gather(b"of 1", 0, None)
        finally:
            left.set()

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        gathered = threads.submit(first.gather, b"of 0", 0, None)
        given = threads.submit(give)
        assert third.gather(b"of 2", 0, None) is None
        assert reading.wait(PATIENCE_S)
        third.fail(ErrorRecord.of(StorageError("the disk of rank 2"), rank=2))
        failed.set()
        with pytest.raises(StorageError, match="the disk of rank 2"):
            given.result(PATIENCE_S)
        assert gathered.result(PATIENCE_S) == [b"of 0", b"of 1", b"of 2"]
    for channel in channels:
        channel.close()


@pytest.fixture
def made():
    """Makes exchanges of one store, and closes their channels."""
    store, channels = HashStore(), []

    def make(rank, **options):
        one, channel = exchange(store, rank, **options)
        channels.append(channel)
        return one

    yield make
    for channel in channels:
        channel.close()


def blamed(call):
    with pytest.raises(RankTimeoutError) as caught:
        call()
    return caught.value.ranks


@pytest.fixture
def threads():
    with concurrent.futures.ThreadPoolExecutor(4) as some:
        yield some


def test_who_comes_late_to_a_gathering_does_not_blame_who_gathered(made):
    """Rank 0 has given rank 1 up, and has not told anybody yet."""
    first, second = made(0, world_size=2), made(1, world_size=2)
    assert blamed(lambda: first.gather(b"", 0, 0.2)) == (1,)
    second.gather(b"", 0, None)
    assert blamed(lambda: second.broadcast(None, 0, 0.2)) == (1,)


def test_who_tidies_up_after_a_gathering_is_waited_for_and_not_those_who_came(made):
    """Rank 0 has deleted what rank 1 gave, and not yet rank 2's, when the time of rank 2 ends."""
    half, go_on = threading.Event(), threading.Event()

    def before(name, keys):
        if name == "delete_key" and keys[0].endswith("-gather-0/2"):
            half.set()
            go_on.wait(PATIENCE_S)

    first, third = made(0, before=before), made(2)
    made(1).gather(b"1", 0, None)
    third.gather(b"2", 0, None)
    try:
        assert first.gather(b"0", 0, None) == [b"0", b"1", b"2"]
        assert half.wait(PATIENCE_S)
        assert blamed(lambda: third.broadcast(None, 0, 0.2)) == (0,)
    finally:
        go_on.set()


def test_who_has_given_its_part_to_another_waits_for_nobody(made):
    """Rank 0 gave its part to rank 1, which has not come for it, and then works for long."""
    first, third = made(0), made(2)
    first.gather(b"", 1, None)
    third.gather(b"", 1, None)
    assert blamed(lambda: third.broadcast(None, 0, 0.2)) == (0,)


@pytest.mark.parametrize("collective", ["gather", "barrier"])
def test_another_operation_of_a_rank_does_not_hide_for_whom_it_waits(collective, made, threads):
    """Rank 0 waits for rank 1, and then in another thread for the same rank elsewhere."""
    entered = threading.Event()

    def after(name, keys, _):
        if name == "check" and f"/1-{collective}-" in keys[0]:
            entered.set()

    first, other, third = made(0, after=after), made(0, after=after, of="another"), made(2)
    waits = []
    for one in (first, other):
        entered.clear()
        arguments = (b"", 0, 8) if collective == "gather" else (8,)
        waits.append(threads.submit(getattr(one, collective), *arguments))
        assert entered.wait(PATIENCE_S)
    if collective == "gather":
        third.gather(b"", 0, None)
        assert blamed(lambda: third.broadcast(None, 0, 0.2)) == (1,)
    else:
        assert blamed(lambda: third.barrier(0.2)) == (1,)
    for wait in waits:
        assert wait.exception(PATIENCE_S) is not None


def test_who_has_come_between_a_look_and_the_end_is_not_blamed(made, threads):
    """Rank 0 is not scheduled from when it missed rank 2 until its time is over."""
    looked, came = threading.Event(), threading.Event()

    def after(name, keys, result):
        if name == "check" and not result and "-gather-" in keys[0] and not looked.is_set():
            looked.set()
            assert came.wait(PATIENCE_S)
            time.sleep(0.3)

    first = made(0, after=after)
    gathered = threads.submit(first.gather, b"0", 0, 0.2)
    assert looked.wait(PATIENCE_S)
    for rank in (1, 2):
        made(rank).gather(b"%d" % rank, 0, None)
    came.set()
    assert gathered.result(PATIENCE_S) == [b"0", b"1", b"2"]


def test_what_comes_after_the_target_has_given_up_is_taken_back_by_who_gave_it_alone(threads):
    """Rank 1 gives its part, and learns that rank 2 has failed, before the target tidies up. Had
    the target seen that part and gone to read it, it would wait for ever for what has just gone."""
    store = HashStore()
    store.set_timeout(dt.timedelta(seconds=2))  # for a read of what is not there
    read, given, reading = [], threading.Event(), threading.Event()

    def target(name, keys):
        if name in ("get", "multi_get"):
            read.extend(key for key in keys if "-gather-" in key)
            reading.set()
            time.sleep(0.1)

    def told(name, keys, _):
        if name == "set" and keys[0].endswith("/given-up"):
            third.fail(ErrorRecord.of(StorageError("the disk of rank 2"), rank=2))
            gives.append(threads.submit(second.gather, b"of 1", 0, None))
            assert given.wait(PATIENCE_S)

    def giver(name, keys):
        if name == "delete_key" and keys == ["home/a save/0/1-gather-0/1"]:
            reading.wait(1)

    def gave(name, keys, _):
        if name == "check" and keys[0].endswith("/given-up"):
            given.set()

    gives = []
    first, one = exchange(store, 0, target, after=told)
    second, two = exchange(store, 1, giver, after=gave)
    third, three = exchange(store, 2)
    third.gather(b"of 2", 0, None)
    assert blamed(lambda: first.gather(b"", 0, 0.2)) == (1,)
    with pytest.raises(StorageError, match="the disk of rank 2"):
        gives[0].result(PATIENCE_S)
    assert first.count("behind what it took") == 1
    for channel in (one, two, three):
        channel.close()
    assert read == ["home/a save/0/1-gather-0/2"]
    assert not [key for key in store.list_keys() if key[-2:] in ("/1", "/2") and "-gather" in key]
