"""Who is alive: the table of states, and real helper processes that are killed and stopped."""

import contextlib
import gc
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.coordination import _liveness
from holdfast.coordination._beacon import (
    BEAT,
    BYE,
    DEAD,
    GONE,
    HANDSHAKE_S,
    LEFT,
    RUNNING,
    SILENT,
    Table,
)
from holdfast.coordination._liveness import UNWATCHED, Liveness
from holdfast.errors import CoordinationError

TOKEN = "a shared secret"
WORLD_SIZE = 4
# Long enough that nobody falls silent in a test that is not about silence: what is noticed
# there was noticed by a connection that closed.
LONG_S = 60.0
# A helper that gets no processor for three quarters of it is silent, though nobody stopped it.
SHORT_S = 3.0
SOON_S = 30.0
# Whoever a hub has not dealt with by HANDSHAKE_S it lets go in any case.
AT_ONCE_S = 0.9 * HANDSHAKE_S


# The table


def test_a_rank_is_reported_once_per_change():
    table = Table(timeout_s=2)
    assert table.lines() == []
    assert table.saw(1, 0) == ["running 1"]
    assert table.saw(1, 1) == []
    assert table.saw(3, 1) == ["running 3"]
    assert table.set(1, SILENT) == ["silent 1"]
    assert table.set(1, SILENT) == []
    assert table.set(2, DEAD) == ["dead 2"]  # one that was never seen alive
    assert table.lines() == ["silent 1", "running 3", "dead 2"]


def test_silence_is_judged_by_age_and_a_sign_of_life_ends_it():
    table = Table(timeout_s=2)
    table.saw(1, 10)
    table.saw(2, 11)
    assert table.age(12) == []  # at the limit is not beyond it
    assert table.age(12.5) == ["silent 1"]
    assert table.age(12.6) == []
    assert table.age(13.5) == ["silent 2"]
    assert table.saw(1, 14) == ["running 1"]
    assert table.age(15) == []
    assert table.age(16.5) == ["silent 1"]
    assert table.lines() == ["silent 1", "silent 2"]


@pytest.mark.parametrize("end", [DEAD, LEFT])
@pytest.mark.parametrize("before", [[], [RUNNING], [RUNNING, SILENT]])
def test_dead_and_left_are_final(before, end):
    table = Table(timeout_s=2)
    for state in before:
        table.set(1, state)
    assert table.set(1, end) == [f"{end} 1"]
    assert [table.set(1, state) for state in (RUNNING, SILENT, DEAD, LEFT)] == [[]] * 4
    assert table.saw(1, 5) == []
    assert table.age(100) == []
    assert table.lines() == [f"{end} 1"]


events = st.one_of(
    st.tuples(st.just("saw"), st.integers(0, 3)),
    st.tuples(st.sampled_from([SILENT, DEAD, LEFT]), st.integers(0, 3)),
    st.tuples(st.just("age"), st.just(0)),
)


@given(story=st.lists(st.tuples(events, st.floats(0, 3))))
def test_whoever_follows_the_lines_knows_what_the_table_knows(story):
    table, follower, now = Table(timeout_s=2), {}, 0.0
    for (what, rank), seconds in story:
        now += seconds
        if what == "saw":
            lines = table.saw(rank, now)
        elif what == "age":
            lines = table.age(now)
        else:
            lines = table.set(rank, what)
        for line in lines:
            state, number = line.split()
            assert follower.get(int(number)) not in (state, DEAD, LEFT)  # a change, and allowed
            follower[int(number)] = state
        assert table.lines() == [f"{state} {rank}" for rank, state in follower.items()]


# Real helper processes


def children():
    """Processes whose parent is this one, as the system knows them."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(after_name[1]) == os.getpid():
                found.add(int(folder.name))
    return found


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def wait_for_listeners():
    """A thread of an earlier test may be about to close its pipe, and would be counted."""
    for thread in threading.enumerate():
        if thread.name == "holdfast-liveness":
            thread.join(SOON_S)


def soon(condition, within_s=SOON_S):
    until = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def stays(condition, for_s=0.5):
    until = time.monotonic() + for_s
    while time.monotonic() < until:
        if not condition():
            return False
        time.sleep(0.01)
    return True


class Ranks:
    """Several ranks' ``Liveness`` in this one process, and the pids of their helpers."""

    def __init__(self):
        self.helpers = {}
        self.opened = []

    def join(self, rank, *, hub=None, timeout_s=LONG_S, token=TOKEN):
        before = children()
        liveness = Liveness(
            rank=rank,
            world_size=WORLD_SIZE,
            token=token,
            bind="127.0.0.1",
            hub=None if hub is None else hub.address,
            timeout_s=timeout_s,
        )
        (self.helpers[rank],) = children() - before
        self.opened.append(liveness)
        return liveness

    def all(self, timeout_s=LONG_S):
        hub = self.join(0, timeout_s=timeout_s)
        everyone = [hub, *(self.join(rank, hub=hub, timeout_s=timeout_s) for rank in (1, 2, 3))]
        assert soon(lambda: all(one.joined() == {0, 1, 2, 3} for one in everyone))
        return everyone

    def signal(self, rank, number):
        os.kill(self.helpers[rank], number)

    def close(self):
        for pid in children() & set(self.helpers.values()):
            os.kill(pid, signal.SIGKILL)  # or a hub would wait for ranks that never joined
        for liveness in self.opened:
            liveness.close()
        assert not children() & set(self.helpers.values())


@pytest.fixture
def ranks():
    made = Ranks()
    yield made
    made.close()


def test_every_rank_learns_who_has_joined_also_those_who_came_before(ranks):
    hub = ranks.join(0)
    assert hub.joined() == {0}
    one = ranks.join(1, hub=hub)
    assert soon(lambda: hub.joined() == one.joined() == {0, 1})
    three = ranks.join(3, hub=hub)
    assert soon(lambda: hub.joined() == one.joined() == three.joined() == {0, 1, 3})
    assert [one.lost() for one in (hub, one, three)] == [{}, {}, {}]


def test_a_rank_that_closes_has_left(ranks, monkeypatch):
    # A helper that has not said its goodbye by then is killed, and its rank dead.
    monkeypatch.setattr(_liveness, "GOODBYE_S", SOON_S)
    everyone = ranks.all()
    everyone[2].close()
    assert soon(lambda: all(everyone[rank].lost() == {2: LEFT} for rank in (0, 1, 3)))
    assert everyone[0].joined() == {0, 1, 2, 3}  # it did join


def test_a_hub_that_closes_has_left_at_once_and_serves_until_the_others_have_gone(
    ranks, monkeypatch
):
    monkeypatch.setattr(_liveness, "GOODBYE_S", SOON_S)
    monkeypatch.setattr(_liveness, "LINGER_S", LONG_S)  # so that it was not killed when it ends
    everyone = ranks.all()
    closing = threading.Thread(target=everyone[0].close)
    closing.start()
    assert soon(lambda: all(everyone[rank].lost() == {0: LEFT} for rank in (1, 2, 3)))
    everyone[1].close()
    assert soon(lambda: everyone[3].lost() == {0: LEFT, 1: LEFT})
    ranks.signal(2, signal.SIGKILL)
    assert soon(lambda: everyone[3].lost() == {0: LEFT, 1: LEFT, 2: DEAD})
    everyone[3].close()
    closing.join(SOON_S)
    assert not closing.is_alive()


def test_a_killed_helper_leaves_its_own_rank_unwatched_and_dead_for_the_others(ranks):
    everyone = ranks.all()
    ranks.signal(2, signal.SIGKILL)
    assert soon(lambda: everyone[2].lost() == {2: UNWATCHED})
    assert soon(lambda: all(everyone[rank].lost() == {2: DEAD} for rank in (0, 1, 3)))


def test_a_killed_hub_is_rank_0_dead_for_the_others(ranks):
    everyone = ranks.all()
    ranks.signal(0, signal.SIGKILL)
    assert soon(lambda: everyone[0].lost() == {0: UNWATCHED})
    assert soon(lambda: all(everyone[rank].lost() == {0: DEAD} for rank in (1, 2, 3)))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_what_asks_a_job_to_end_does_not_end_the_helpers_of_its_ranks(ranks, name):
    everyone = ranks.all()
    for rank in range(WORLD_SIZE):
        ranks.signal(rank, getattr(signal, name))
    ranks.signal(3, signal.SIGKILL)  # so that there is something to hear of
    assert soon(lambda: all(everyone[rank].lost() == {3: DEAD} for rank in (0, 1, 2)))


def test_a_stopped_helper_is_silent_until_it_goes_on(ranks):
    everyone = ranks.all(timeout_s=SHORT_S)
    ranks.signal(2, signal.SIGSTOP)
    assert soon(lambda: all(everyone[rank].lost() == {2: SILENT} for rank in (0, 1, 3)))
    ranks.signal(2, signal.SIGCONT)
    assert soon(lambda: all(one.lost() == {} for one in everyone))


def test_a_stopped_hub_is_silent_until_it_goes_on(ranks):
    everyone = ranks.all(timeout_s=SHORT_S)
    ranks.signal(0, signal.SIGSTOP)
    assert soon(lambda: all(everyone[rank].lost() == {0: SILENT} for rank in (1, 2, 3)))
    ranks.signal(0, signal.SIGCONT)
    assert soon(lambda: all(one.lost() == {} for one in everyone))


def test_a_hub_that_was_stopped_itself_accuses_nobody_of_silence(ranks):
    hub = ranks.join(0, timeout_s=SHORT_S)
    one = ranks.join(1, hub=hub, timeout_s=SHORT_S)
    assert soon(lambda: 1 in hub.joined())
    with connected(hub, rank=2) as two:  # beats by hand, and reads every word of the hub
        assert soon(lambda: 2 in one.joined())
        ranks.signal(0, signal.SIGSTOP)
        assert soon(lambda: (two.send(BEAT), one.lost() == {0: SILENT})[1])
        ranks.signal(0, signal.SIGCONT)
        assert soon(lambda: (two.send(BEAT), one.lost() == {})[1])
        stays(lambda: two.send(BEAT))
        assert b"silent" not in two.recv(65536)


# Whoever else can reach the hub's port


@contextlib.contextmanager
def connected(hub, *, rank=None, hello=None, token=TOKEN):
    if rank is not None:
        hello = json.dumps({"token": token, "rank": rank}).encode() + b"\n"
    with socket.create_connection(hub.address, timeout=AT_ONCE_S) as sock:
        if hello:
            sock.sendall(hello)
        yield sock


def test_a_peer_is_greeted_with_what_is_known(ranks):
    """The tests of strangers would pass against a hub that greets nobody."""
    hub = ranks.join(0)
    with connected(hub, rank=2) as two:
        assert soon(lambda: hub.joined() == {0, 2})
        heard = b""
        while b"\n\n" not in heard:  # the next beat, an empty line: by then all was said
            heard += two.recv(65536)
        assert set(heard.split(b"\n")) == {b"running 0", b"running 2", b""}
    assert soon(lambda: hub.lost() == {2: DEAD})


STRANGERS = {
    "a wrong token": json.dumps({"token": "guessed", "rank": 1}).encode() + b"\n",
    "no token": b'{"rank": 1}\n',
    "a token of another type": b'{"token": ["a shared secret"], "rank": 1}\n',
    "a token that is not ASCII": b'{"token": "\\u00e9", "rank": 1}\n',
    "no rank": json.dumps({"token": TOKEN}).encode() + b"\n",
    "the hub's rank": json.dumps({"token": TOKEN, "rank": 0}).encode() + b"\n",
    "a rank below 0": json.dumps({"token": TOKEN, "rank": -1}).encode() + b"\n",
    "a rank beyond the last": json.dumps({"token": TOKEN, "rank": WORLD_SIZE}).encode() + b"\n",
    "a rank beyond all numbers": b'{"token": "guessed", "rank": 1e999}\n',
    "a rank that is no number": json.dumps({"token": TOKEN, "rank": "one"}).encode() + b"\n",
    "garbage": bytes(range(256)) + b"\n",
    "a list": b"[1, 2, 3]\n",
    "lists within lists": b"[" * 4000 + b"\n",
    "an HTTP request": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "beats without a hello": BEAT * 5000,
    "goodbyes without a hello": (BYE + GONE) * 2500,
    "a hello that never ends": b"a" * 5000,
    "a hello that ends too late": b'{"token": "' + b"a" * 50_000 + b'", "rank": 1}\n',
}


@pytest.mark.parametrize("hello", STRANGERS.values(), ids=STRANGERS.keys())
def test_a_stranger_is_turned_away_and_changes_nothing(ranks, hello):
    hub = ranks.join(0)
    one = ranks.join(1, hub=hub)
    assert soon(lambda: hub.joined() == {0, 1})
    with connected(hub, hello=hello) as stranger:
        heard = b""
        with contextlib.suppress(ConnectionResetError):  # closed before all was read
            while data := stranger.recv(65536):
                heard += data
        assert heard == b""
    assert stays(lambda: hub.lost() == one.lost() == {}, for_s=0.2)
    assert hub.joined() == one.joined() == {0, 1}
    two = ranks.join(2, hub=hub)  # and the hub still serves
    assert soon(lambda: hub.joined() == one.joined() == two.joined() == {0, 1, 2})


def test_a_stranger_that_says_nothing_hears_nothing(ranks):
    hub = ranks.join(0, timeout_s=SHORT_S)
    one = ranks.join(1, hub=hub, timeout_s=SHORT_S)
    with connected(hub) as stranger:
        assert stays(lambda: hub.lost() == one.lost() == {}, for_s=1.5 * SHORT_S)
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.recv(65536)
        assert hub.joined() == one.joined() == {0, 1}


def test_many_strangers_at_once_do_not_keep_a_rank_out(ranks):
    hub = ranks.join(0)
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(connected(hub))
        one = ranks.join(1, hub=hub)
        assert soon(lambda: hub.joined() == one.joined() == {0, 1}, AT_ONCE_S)
        began = time.monotonic()
        one.close()
        hub.close()
        assert time.monotonic() - began < SOON_S


def test_a_rank_with_another_token_is_not_let_in(ranks):
    hub = ranks.join(0)
    other = ranks.join(1, hub=hub, token="of another job")
    assert soon(lambda: other.lost() == {0: DEAD})
    assert hub.joined() == {0}
    assert hub.lost() == {}


@pytest.mark.parametrize(("word", "state"), [(BYE, LEFT), (GONE, DEAD)])
def test_a_rank_that_joins_and_leaves_in_one_breath_is_understood(ranks, word, state):
    hub = ranks.join(0)
    hello = json.dumps({"token": TOKEN, "rank": 1}).encode() + b"\n"
    with connected(hub, hello=hello + BEAT + word):
        pass
    assert soon(lambda: hub.lost() != {})
    assert hub.lost() == {1: state}


def test_a_hello_may_come_in_pieces(ranks):
    hub = ranks.join(0)
    hello = json.dumps({"token": TOKEN, "rank": 1}).encode() + b"\n"
    with connected(hub) as one:
        for at in range(0, len(hello), 7):
            one.sendall(hello[at : at + 7])
            time.sleep(0.01)
        assert soon(lambda: hub.joined() == {0, 1})


# Starting and ending


def test_a_hub_listens_on_ipv6_too():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    options = {"world_size": 2, "token": TOKEN, "bind": "::1", "timeout_s": LONG_S}
    hub = Liveness(rank=0, hub=None, **options)
    one = Liveness(rank=1, hub=hub.address, **options)
    try:
        assert soon(lambda: hub.joined() == one.joined() == {0, 1})
    finally:
        one.close()
        hub.close()


def test_a_hub_that_cannot_be_reached_is_an_error_and_leaves_nothing_behind():
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = server.getsockname()
    wait_for_listeners()
    before, files = children(), open_files()
    with pytest.raises(CoordinationError, match="helper of rank 1 could not start") as caught:
        Liveness(rank=1, world_size=2, token=TOKEN, bind="", hub=nobody, timeout_s=LONG_S)
    assert caught.value.rank == 1
    assert children() == before
    assert open_files() == files  # not only once the error is forgotten


def test_opening_and_closing_leaves_no_process_and_no_file(ranks):
    wait_for_listeners()
    hub = ranks.join(0)
    processes, files = children(), open_files()
    for _ in range(20):
        one = ranks.join(1, hub=hub)
        assert children() - processes == {ranks.helpers[1]}
        one.close()
        assert children() == processes
        # A thread of ours closes the pipe when it has read it to the end.
        assert soon(lambda: open_files() == files)
    one.close()  # once more does nothing


def test_closing_ends_a_helper_that_was_stopped_or_killed(ranks):
    hub = ranks.join(0)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        one = ranks.join(1, hub=hub)
        ranks.signal(1, number)
        began = time.monotonic()
        one.close()
        assert time.monotonic() - began < SOON_S
        assert ranks.helpers[1] not in children()


def test_a_forgotten_liveness_ends_its_helper():
    wait_for_listeners()
    before, files = children(), open_files()
    liveness = Liveness(
        rank=0, world_size=2, token=TOKEN, bind="127.0.0.1", hub=None, timeout_s=LONG_S
    )
    assert len(children() - before) == 1
    del liveness
    gc.collect()
    assert soon(lambda: children() == before)
    assert soon(lambda: open_files() == files)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_speak_for_its_parent(ranks):
    hub = ranks.join(0)
    one = ranks.join(1, hub=hub)
    assert soon(lambda: hub.joined() == {0, 1})
    child = os.fork()
    if child == 0:  # such as a data loader's worker that lets go of what it inherited
        one.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert stays(lambda: hub.lost() == one.lost() == {})
