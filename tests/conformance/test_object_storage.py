"""ObjectStorage on a real S3 server process, straight and through a proxy that breaks things."""

import contextlib
import gc
import itertools
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
import uuid

import pytest
from _servers import Fault, moto_server, proxy_to

from holdfast.contracts import ReadRange
from holdfast.errors import (
    ClosedError,
    NoSpaceError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    TransientStorageError,
)
from holdfast.storage import ObjectStorage, open_storage
from holdfast.storage._multipart import MOST_PARTS, part_bytes
from holdfast.testing import StorageConformance

MIB = 1024 * 1024
BUCKET = "bucket"
CREDENTIALS = {"access_key_id": "key", "secret_access_key": "word", "region": "us-east-1"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with moto_server(tmp_path_factory.mktemp("moto") / "log") as url:
        ask(url, "PUT", f"/{BUCKET}")
        yield url


@pytest.fixture
def proxy(server):
    with proxy_to(server) as running:
        yield running


@pytest.fixture
def s3(server):
    return at(server)


@pytest.fixture
def broken(proxy):
    """A storage behind the proxy."""
    return at(proxy.url)


def at(url, folder=None, **settings):
    folder = uuid.uuid4().hex if folder is None else folder
    # Nothing is retried: what is late because the machine stood still would be an error.
    client = {"timeout": "60s", "connect_timeout": "20s"}
    return open_storage(
        f"s3://{BUCKET}/{folder}", endpoint=url, client_options=client, **CREDENTIALS, **settings
    )


def ask(url, method, target):
    with urllib.request.urlopen(urllib.request.Request(url + target, method=method)) as answer:
        return answer.read().decode()


def unfinished_uploads(server, storage):
    folder = storage.url.rpartition("/")[2]
    keys = re.findall("<Key>([^<]*)</Key>", ask(server, "GET", f"/{BUCKET}?uploads"))
    return [key for key in keys if key.startswith(folder)]


def write(storage, key, size, piece=MIB, **announced):
    with storage.open_writer(key, **announced) as writer:
        for start in range(0, size, piece):
            writer.write_at(start, block(start, min(piece, size - start)))
        return writer.finish()


def block(start, size):
    return (start // MIB).to_bytes(8, "little") * (size // 8) + b"x" * (size % 8)


class TestS3(StorageConformance):
    many_objects = 1100
    random_examples = 10

    @pytest.fixture
    def storage(self, s3):
        return s3


class TestUploads:
    def test_a_large_object_comes_back_and_leaves_no_upload(self, server, s3):
        size = 21 * MIB + 5
        info = write(s3, "a", size, size_bytes=size)
        assert (info.key, info.size_bytes) == ("a", size)
        assert info == s3.stat("a")
        assert s3.read("a") == b"".join(
            block(start, min(MIB, size - start)) for start in range(0, size, MIB)
        )
        assert unfinished_uploads(server, s3) == []

    @pytest.mark.parametrize("size", [8 * MIB - 1, 8 * MIB, 8 * MIB + 1, 16 * MIB, 17 * MIB])
    def test_sizes_around_a_part_come_back(self, s3, size):
        assert write(s3, "a", size, size_bytes=size).size_bytes == size
        assert s3.stat("a").size_bytes == size

    def test_nothing_is_sent_before_a_part_is_full(self, proxy, broken):
        with broken.open_writer("a", size_bytes=5 * MIB) as writer:
            writer.write_at(0, bytes(5 * MIB))
            assert proxy.requests == []
            writer.finish()
        assert [request.method for request in proxy.requests] == ["PUT", "HEAD"]

    @pytest.mark.parametrize("leave", ["abort", "block", "error"])
    def test_an_aborted_writer_leaves_no_upload(self, server, broken, leave):
        with contextlib.suppress(LookupError), broken.open_writer("a") as writer:
            writer.write_at(0, bytes(40 * MIB))
            assert unfinished_uploads(server, broken) != []
            if leave == "abort":
                writer.abort()
                assert unfinished_uploads(server, broken) == []
            if leave == "error":
                raise LookupError
        assert unfinished_uploads(server, broken) == []
        assert list(broken.list()) == []

    def test_a_forgotten_writer_leaves_no_upload(self, server, broken):
        writer = broken.open_writer("a")
        writer.write_at(0, bytes(40 * MIB))
        del writer
        gc.collect()
        assert unfinished_uploads(server, broken) == []

    def test_a_writer_that_is_open_when_the_interpreter_ends_leaves_no_upload(
        self, server, proxy, broken
    ):
        script = f"""
            from holdfast.storage import open_storage
            storage = open_storage({broken.url!r}, endpoint={proxy.url!r}, **{CREDENTIALS!r})
            writer = storage.open_writer("a")
            writer.write_at(0, bytes({40 * MIB}))
            print("written")
        """
        run = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (run.returncode, run.stdout, run.stderr) == (0, "written\n", "")
        assert unfinished_uploads(server, broken) == []

    @pytest.mark.parametrize("action", ["answer", "reset", "lose"])
    @pytest.mark.parametrize(
        "where", ["partNumber=1&", "partNumber=2&", "partNumber=3&", "POST /bucket/.*uploadId="]
    )
    def test_a_failed_upload_is_transient_and_removed(self, server, proxy, broken, action, where):
        proxy.rule = lambda request: (
            Fault(action=action) if re.search(where, f"{request.method} {request.target}") else None
        )
        with pytest.raises(TransientStorageError), broken.open_writer("a") as writer:
            writer.write_at(0, bytes(40 * MIB))
            writer.finish()
        with pytest.raises(ClosedError):
            writer.finish()
        # The server may still be at a part whose answer nobody waits for.
        until = time.monotonic() + 10
        while unfinished_uploads(server, broken) and time.monotonic() < until:
            time.sleep(0.05)
        assert unfinished_uploads(server, broken) == []
        whole = action == "lose" and "POST" in where
        assert [info.size_bytes for info in broken.list()] == ([40 * MIB] if whole else [])

    def test_a_failed_upload_leaves_the_object_that_was_there(self, proxy, broken):
        broken.create("a", b"before")
        proxy.rule = lambda request: (
            Fault(action="answer", status=500) if "partNumber=2&" in request.target else None
        )
        with pytest.raises(TransientStorageError), broken.open_writer("a") as writer:
            writer.write_at(0, bytes(40 * MIB))
            writer.finish()
        assert broken.read("a") == b"before"

    def test_memory_is_bounded_for_any_size(self, server, s3):
        script = f"""
            import resource
            from holdfast.storage import open_storage
            storage = open_storage({s3.url!r}, endpoint={server!r}, **{CREDENTIALS!r})
            with storage.open_writer("warm", size_bytes={9 * MIB}) as writer:
                writer.write_at(0, bytes({9 * MIB}))
                writer.finish()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            piece = bytes({MIB})
            with storage.open_writer("a", size_bytes={200 * MIB}) as writer:
                for start in range(0, {200 * MIB}, {MIB}):
                    writer.write_at(start, piece)
                writer.finish()
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        """
        command = [sys.executable, "-c", textwrap.dedent(script)]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=100, check=True)
        s3.delete("a")
        assert int(run.stdout) * 1024 <= 96 * MIB

    @pytest.mark.parametrize("size", [0, 1, 80_000 * MIB, 80_001 * MIB, 5 * 1024 * 1024 * MIB])
    def test_parts_grow_so_that_there_are_never_too_many(self, size):
        part = part_bytes(size)
        assert part % MIB == 0
        assert part >= 8 * MIB
        assert -(-size // part) <= MOST_PARTS


class TestConditions:
    def test_of_many_creators_one_wins(self, s3):
        outcomes = []
        start = threading.Barrier(8)

        def create(n):
            start.wait()
            try:
                s3.create("a", bytes([n]))
                outcomes.append(n)
            except ObjectExistsError:
                outcomes.append(None)

        threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        [winner] = [n for n in outcomes if n is not None]
        assert len(outcomes) == 8
        assert s3.read("a") == bytes([winner])

    def test_a_create_whose_answer_was_lost_is_transient_and_the_next_finds_the_key_taken(
        self, proxy, broken
    ):
        proxy.rule = lambda request: Fault(action="lose") if request.number == 1 else None
        with pytest.raises(TransientStorageError):
            broken.create("a", b"mine")
        with pytest.raises(ObjectExistsError):
            broken.create("a", b"mine")
        assert broken.read("a") == b"mine"

    def test_replace_tells_changed_from_gone(self, s3):
        first = s3.create("a", b"1")
        second = s3.replace("a", b"2", first.version)
        with pytest.raises(ObjectChangedError, match=f"found {second.version}"):
            s3.replace("a", b"3", first.version)
        s3.delete("a")
        with pytest.raises(ObjectNotFoundError):
            s3.replace("a", b"3", second.version)

    def test_a_writers_version_is_its_own_although_another_follows(self, proxy, broken, s3):
        other = at(proxy.url, broken.url.rpartition("/")[2])

        def overtake(request):
            if request.method == "HEAD" and not overtaken:
                overtaken.append(request)
                other.replace("a", b"other", other.stat("a").version)

        overtaken = []
        proxy.rule = overtake
        info = broken.create("a", b"mine")
        assert broken.read("a") == b"other"
        with pytest.raises(ObjectChangedError):
            broken.replace("a", b"mine again", info.version)

    @pytest.mark.parametrize("how", ["create", "replace", "write", "write parts"])
    def test_what_is_deleted_before_its_time_is_known_was_written_all_the_same(
        self, proxy, broken, how
    ):
        other = at(proxy.url, broken.url.rpartition("/")[2])
        version = broken.create("b", b"old").version

        def overtake(request):
            if request.method == "HEAD" and not overtaken:
                overtaken.append(request)
                other.delete("b")

        overtaken = []
        if how == "create":
            broken.delete("b")
        proxy.rule = overtake
        info = {
            "create": lambda: broken.create("b", b"new"),
            "replace": lambda: broken.replace("b", b"new", version),
            "write": lambda: write(broken, "b", 3),
            "write parts": lambda: write(broken, "b", 20 * MIB, size_bytes=20 * MIB),
        }[how]()
        assert (info.key, info.size_bytes) == ("b", 20 * MIB if how == "write parts" else 3)
        assert info.version
        assert info.version != version
        assert info.modified_s == 0.0
        assert list(broken.list()) == []

    @pytest.mark.parametrize("action", ["answer", "reset"])
    def test_a_write_whose_time_cannot_be_asked_is_transient_and_there(self, proxy, broken, action):
        proxy.rule = lambda request: Fault(action=action) if request.method == "HEAD" else None
        with pytest.raises(TransientStorageError):
            broken.create("a", b"mine")
        assert broken.read("a") == b"mine"

    def test_one_version_cannot_be_deleted_and_nothing_is_asked(self, proxy, broken):
        info = broken.create("a", b"kept")
        proxy.requests.clear()
        with pytest.raises(StorageError, match="nothing was removed") as caught:
            broken.delete("a", expected=info.version)
        assert (type(caught.value), caught.value.path) == (StorageError, "a")
        assert proxy.requests == []
        assert broken.stat("a") == info

    @pytest.mark.parametrize("method", ["create", "replace"])
    def test_a_moment_of_conflict_is_transient(self, proxy, broken, method):
        body = b"<Error><Code>ConditionalRequestConflict</Code><Message>again</Message></Error>"
        proxy.rule = lambda _: Fault(action="answer", status=409, body=body)
        with pytest.raises(TransientStorageError, match="ConditionalRequestConflict: again"):
            broken.create("a", b"1") if method == "create" else broken.replace("a", b"1", "x")


CALLS = {
    "create": lambda storage: storage.create("a", b"1"),
    "replace": lambda storage: storage.replace("a", b"1", "version"),
    "write": lambda storage: write(storage, "a", 10),
    "read": lambda storage: storage.read("a"),
    "read_into": lambda storage: storage.read_into(
        "a", [ReadRange(start=0, into=memoryview(bytearray(5)))]
    ),
    "list": lambda storage: list(storage.list()),
    "stat": lambda storage: storage.stat("a"),
    "delete": lambda storage: storage.delete("a"),
}


class TestFailures:
    @pytest.mark.parametrize("call", CALLS)
    @pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
    def test_a_busy_server_is_transient_and_asked_once(self, proxy, broken, call, status):
        proxy.rule = lambda _: Fault(action="answer", status=status)
        with pytest.raises(TransientStorageError, match=str(status)):
            CALLS[call](broken)
        assert len(proxy.requests) == 1

    @pytest.mark.parametrize("call", CALLS)
    def test_a_broken_connection_is_transient_and_made_once(self, proxy, broken, call):
        proxy.rule = lambda _: Fault(action="reset")
        with pytest.raises(TransientStorageError, match="could not"):
            CALLS[call](broken)
        assert len(proxy.requests) == 1

    @pytest.mark.parametrize("call", CALLS)
    def test_a_server_that_is_down_is_transient(self, call):
        with pytest.raises(TransientStorageError, match="Connection refused"):
            CALLS[call](at("http://127.0.0.1:9"))

    def test_a_server_that_never_answers_is_transient_within_the_clients_timeout(self, proxy):
        storage = open_storage(
            f"s3://{BUCKET}", endpoint=proxy.url, client_options={"timeout": "200ms"}, **CREDENTIALS
        )
        proxy.rule = lambda _: Fault(action="stall")
        with pytest.raises(TransientStorageError, match="timed out"):
            storage.stat("a")

    @pytest.mark.parametrize("call", ["read", "read_into", "list"])
    def test_a_body_that_ends_early_is_transient_never_short(self, proxy, broken, call):
        broken.create("a", bytes(100))
        proxy.rule = lambda _: Fault(action="truncate")
        with pytest.raises(TransientStorageError):
            CALLS[call](broken)

    @pytest.mark.parametrize("call", CALLS)
    @pytest.mark.parametrize("status", [401, 403])
    def test_refused_credentials_say_so(self, proxy, broken, call, status):
        proxy.rule = lambda _: Fault(action="answer", status=status)
        with pytest.raises(StorageError, match="Check the credentials") as caught:
            CALLS[call](broken)
        assert not caught.value.transient

    @pytest.mark.parametrize("call", ["create", "write", "read", "list", "delete"])
    def test_a_missing_bucket_says_so(self, server, call):
        storage = open_storage("s3://no-bucket/run", endpoint=server, **CREDENTIALS)
        with pytest.raises(StorageError, match=r"NoSuchBucket.*Create the bucket") as caught:
            CALLS[call](storage)
        assert not isinstance(caught.value, ObjectNotFoundError)

    def test_a_full_store_says_so(self, proxy, broken):
        proxy.rule = lambda _: Fault(action="answer", status=507)
        with pytest.raises(NoSpaceError):
            broken.create("a", b"1")

    def test_what_nobody_foresaw_is_a_storage_error_with_its_cause(self, proxy, broken):
        proxy.rule = lambda _: Fault(action="answer", status=418)
        with pytest.raises(StorageError, match="418") as caught:
            broken.read("a")
        assert not caught.value.transient
        assert "418" in str(caught.value.__cause__)

    def test_a_failing_provider_of_credentials_is_a_storage_error_with_its_cause(self, server):
        def provide():
            raise LookupError("the vault is closed")

        storage = open_storage(
            f"s3://{BUCKET}", endpoint=server, credential_provider=provide, region="us-east-1"
        )
        with pytest.raises(StorageError, match="the vault is closed"):
            storage.stat("a")

    def test_an_error_names_the_object_and_no_secret(self, proxy, broken):
        proxy.rule = lambda _: Fault(action="answer", status=503)
        with pytest.raises(StorageError) as caught:
            broken.read("step_1/a")
        assert caught.value.path == "step_1/a"
        assert CREDENTIALS["secret_access_key"] not in str(caught.value)


class TestReads:
    def test_near_ranges_are_one_request_and_far_ones_several(self, proxy, broken):
        write(broken, "a", 6 * MIB)
        whole = broken.read("a")
        proxy.requests.clear()
        starts = [0, 10, 5, 1000, 4 * MIB, 4 * MIB + 20]
        wanted = [ReadRange(start=at, into=memoryview(bytearray(10))) for at in starts]
        broken.read_into("a", wanted)
        assert [bytes(r.into) for r in wanted] == [whole[at : at + 10] for at in starts]
        assert len(proxy.requests) == 2

    def test_a_large_range_is_cut_into_requests(self, proxy, broken):
        size = 40 * MIB
        write(broken, "a", size, size_bytes=size)
        proxy.requests.clear()
        into = bytearray(size - 2)
        broken.read_into("a", [ReadRange(start=1, into=memoryview(into))])
        assert into == b"".join(block(at, MIB) for at in range(0, size, MIB))[1:-1]
        assert len(proxy.requests) == 5

    @pytest.mark.parametrize("ranges", [[(0, 24 * MIB)], [(0, 10), (4 * MIB, 10), (9 * MIB, 10)]])
    @pytest.mark.parametrize("nth", [1, 2, 3])
    def test_a_read_is_of_one_version_or_transient(self, proxy, broken, ranges, nth):
        other = at(proxy.url, broken.url.rpartition("/")[2])

        def put(byte):
            with other.open_writer("a", size_bytes=24 * MIB) as writer:
                writer.write_at(0, byte * (24 * MIB))
                writer.finish()

        put(b"a")
        gets = itertools.count(1)

        def overtake(request):
            if request.method == "GET" and next(gets) == nth:
                put(b"b")

        proxy.rule = overtake
        buffers = [bytearray(size) for _, size in ranges]
        wanted = [
            ReadRange(start=start, into=memoryview(buffer))
            for (start, _), buffer in zip(ranges, buffers, strict=True)
        ]
        with contextlib.suppress(TransientStorageError):
            broken.read_into("a", wanted)
            assert len(set(b"".join(buffers))) == 1
        broken.read_into("a", wanted)
        assert set(b"".join(buffers)) == {ord("b")}

    @pytest.mark.parametrize("left", [1, 5 * MIB])
    @pytest.mark.parametrize("longer_again", [False, True])
    def test_past_the_end_is_said_of_one_version_only(
        self, server, proxy, broken, left, longer_again
    ):
        other = at(server, broken.url.rpartition("/")[2])
        write(other, "a", 10 * MIB)
        turn, seen = threading.Lock(), set()

        def overtake(request):
            with turn:
                first = request.method not in seen
                seen.add(request.method)
                if first and request.method == "GET":
                    write(other, "a", left)
                if first and request.method == "HEAD" and longer_again:
                    write(other, "a", 11 * MIB)

        wanted = [ReadRange(start=n * 4 * MIB, into=memoryview(bytearray(10))) for n in range(3)]
        proxy.rule = overtake
        with pytest.raises(StorageError) as caught:
            broken.read_into("a", wanted)
        assert caught.value.transient is longer_again
        expected = "was replaced" if longer_again else f"not inside the object of {left}"
        assert expected in str(caught.value)

    @pytest.mark.parametrize(("start", "size"), [(0, 101), (99, 2), (100, 1), (500, 5), (101, 0)])
    def test_a_range_past_the_end_is_refused(self, s3, start, size):
        s3.create("a", bytes(100))
        with pytest.raises(StorageError, match="not inside the object") as caught:
            s3.read_into("a", [ReadRange(start=start, into=memoryview(bytearray(size)))])
        assert not caught.value.transient

    def test_one_failed_request_of_many_is_raised(self, proxy, broken):
        write(broken, "a", 10 * MIB, size_bytes=10 * MIB)
        counter = itertools.count()
        proxy.rule = lambda _: Fault(action="answer") if next(counter) == 2 else None
        wanted = [ReadRange(start=n * 2 * MIB, into=memoryview(bytearray(10))) for n in range(5)]
        with pytest.raises(TransientStorageError, match="503"):
            broken.read_into("a", wanted)


class TestKeys:
    @pytest.mark.parametrize(
        "key",
        [
            "a b",
            "a%20b",
            "100%",
            "x#y?z",
            "q+r&s=t",
            "ü/é",
            "日本/語",
            "😀",
            "a*b|c<d>",
            "b\\s",
            "~",
        ],
    )
    def test_keys_come_back_as_they_were(self, s3, key):
        s3.create(key, b"1")
        assert [info.key for info in s3.list()] == [key]
        assert [info.key for info in s3.list(key[:1])] == [key]
        assert s3.stat(key).key == key
        s3.delete(key)
        assert list(s3.list()) == []

    def test_a_key_no_store_takes_is_a_value_error(self, s3):
        with pytest.raises(ValueError, match="key"):
            s3.create("a\nb", b"1")

    def test_a_prefix_is_characters_not_folders(self, s3):
        keys = ["a", "a-b/x", "a/b", "a/bc/d", "ab", "b/a", "é", "😀"]
        for key in keys:
            s3.create(key, b"1")
        for prefix in ["", "a", "a/", "a/b", "a/bc", "a-", "b", "c", "a//", "/", "é"]:
            expected = [key for key in keys if key.startswith(prefix)]
            assert [info.key for info in s3.list(prefix)] == expected

    def test_storages_of_one_bucket_see_only_their_own(self, server):
        folder = uuid.uuid4().hex
        inner, near = at(server, f"{folder}/run"), at(server, f"{folder}/run-2")
        inner.create("a", b"1")
        near.create("b", b"2")
        assert [info.key for info in inner.list()] == ["a"]
        assert [info.key for info in at(server, folder).list()] == ["run-2/b", "run/a"]


def test_a_forked_process_is_refused_where_it_would_hang(s3):
    s3.create("a", bytes(100))
    child = os.fork()
    if not child:
        status = 1
        try:
            s3.read("a")
        except StorageError as error:
            status = 0 if "forked" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_killed_processes_leave_is_not_swept_here(s3):
    assert isinstance(s3, ObjectStorage)
    assert s3.sweep(0) == 0
    assert s3.free_bytes() is None
