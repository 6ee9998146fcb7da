"""A rank fails while another reads what a third has given: three ranks of one process, each with a
channel of its own to one store, whose calls come in the one order in which it matters."""

import concurrent.futures
import datetime as dt
import threading
import time

import pytest
from torch.distributed import HashStore

from holdfast.coordination._channel import Channel
from holdfast.coordination._exchange import StoreExchange
from holdfast.coordination._meeting import Ranks
from holdfast.errors import ErrorRecord, StorageError

PATIENCE_S = 60.0


class Ordered:
    """A client of the store that calls ``before(name, keys)`` ahead of every call."""

    def __init__(self, store, before):
        self._store, self._before = store, before

    def __getattr__(self, name):
        call = getattr(self._store, name)

        def ordered(keys, *rest):
            self._before(name, [keys] if isinstance(keys, str) else keys)
            return call(keys, *rest)

        return ordered


def exchange(store, rank, before):
    def connect():
        return Ordered(store, before)

    channel = Channel(connect)
    ranks = Ranks(
        home="home",
        rank=rank,
        world_size=3,
        liveness=None,
        silence_s=PATIENCE_S,
        is_closed=lambda: False,
    )
    made = StoreExchange(
        channel,
        ranks,
        reconnect=lambda: Channel(connect),
        base="operation",
        name="a save",
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
        if name == "check" and keys == ["operation/failed"]:
            assert failed.wait(PATIENCE_S)

    first, *channels = exchange(store, 0, target)
    second, channel = exchange(store, 1, giver)
    third, last = exchange(store, 2, lambda *_: None)
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
