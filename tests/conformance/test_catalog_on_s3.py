"""Checkpoints on a real S3 server, straight and through a proxy that loses answers."""

import pathlib
import threading
import urllib.request
import uuid

import numpy as np
import pytest
from _servers import Fault, moto_server, proxy_to

from holdfast.catalog import Catalog, keep_best, keep_last
from holdfast.errors import CheckpointError, CheckpointExistsError, CorruptedError, SaveError
from holdfast.resilience import RetryPolicy
from holdfast.storage import open_storage, retrying

QUICK = RetryPolicy(max_retries=4, initial_delay_s=0.01, max_delay_s=0.05)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with moto_server(tmp_path_factory.mktemp("moto") / "log") as url:
        urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
        yield url


@pytest.fixture
def storage(server):
    return at(server, uuid.uuid4().hex)


def at(url, folder):
    return open_storage(
        f"s3://bucket/{folder}",
        endpoint=url,
        access_key_id="key",
        secret_access_key="word",
        region="us-east-1",
        client_options={"timeout": "60s", "connect_timeout": "20s"},
    )


def state(seed=0, rows=3000):
    random = np.random.default_rng(seed)
    return {"w": random.normal(size=(rows, 500)), "b": random.normal(size=7), "step": seed}


def assert_same(read, wanted):
    assert read["step"] == wanted["step"]
    assert np.array_equal(read["w"], wanted["w"])
    assert np.array_equal(read["b"], wanted["b"])


def test_checkpoints_on_s3_are_pruned_and_their_names_can_be_saved_again(storage):
    catalog = Catalog(storage)
    for step in range(6):
        catalog.write(f"s{step}", state(step, rows=5), metrics={"loss": (step - 1) ** 2})
        catalog.prune(keep_last(2) | keep_best("loss"))
    assert [info.prefix for info in catalog.list()] == ["s5", "s4", "s1"]
    assert {info.key.split("/")[0] for info in storage.list() if "shard" in info.key} == {
        "s5",
        "s4",
        "s1",
    }
    assert_same(catalog.read("s1"), state(1, rows=5))
    catalog.write("s0", state(9, rows=5))
    assert Catalog(storage).prune(keep_last(1)).deleted == ("s1", "s4", "s5")
    assert_same(catalog.read("s0"), state(9, rows=5))


@pytest.mark.parametrize("compression", ["none", "balanced"])
def test_a_checkpoint_goes_to_s3_and_comes_back(storage, compression):
    catalog = Catalog(storage)
    info = catalog.write("step_1", state(), step=1, compression=compression)
    assert catalog.list() == [info]
    assert_same(catalog.read("step_1"), state())
    part = catalog.open("step_1").read("w", (100, 10), (2000, 20))
    assert np.array_equal(part, state()["w"][100:2000, 10:20])
    assert catalog.verify("step_1").is_intact


def test_names_are_taken_once_overwritten_on_request_and_deleted(storage):
    catalog = Catalog(storage)
    catalog.write("step_1", state())
    with pytest.raises(CheckpointExistsError):
        catalog.write("step_1", state(1))
    catalog.write("step_1", state(1), overwrite=True)
    assert_same(catalog.read("step_1"), state(1))
    assert len([*storage.list("step_1/shard-")]) == 1
    catalog.delete("step_1")
    assert catalog.list() == []
    # The tombstone stays: an object store cannot delete one version of it.
    assert [info.key for info in storage.list()] == ["step_1/metadata.json"]
    catalog.write("step_1", state(2))
    assert_same(catalog.read("step_1"), state(2))


def test_of_writers_at_the_same_time_one_commits(storage):
    ends = []

    def write(seed):
        try:
            Catalog(storage).write("step_1", state(seed, rows=10))
        except (CheckpointExistsError, SaveError) as error:
            ends.append(type(error))
        else:
            ends.append(seed)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [end for end in ends if isinstance(end, int)]
    assert_same(Catalog(storage).read("step_1"), state(winner, rows=10))
    assert len([*storage.list("step_1/shard-")]) == 1


def test_a_flipped_bit_in_a_bucket_is_found(storage):
    catalog = Catalog(storage)
    catalog.write("step_1", state())
    (shard,) = storage.list("step_1/shard-")
    data = bytearray(storage.read(shard.key))
    data[5_000_000] ^= 1
    with storage.open_writer(shard.key) as writer:
        writer.write_at(0, bytes(data))
        writer.finish()
    with pytest.raises(CorruptedError, match="'w' is damaged"):
        catalog.read("step_1")
    (damage,) = catalog.verify("step_1").damage
    assert (damage.file, damage.tensor) == (shard.key, "w")


@pytest.mark.parametrize("action", ["lose", "reset", "answer", "truncate"])
def test_whichever_answer_is_lost_a_save_succeeds_or_fails_and_says_so(server, action):
    folder = uuid.uuid4().hex
    true = Catalog(at(server, folder))
    true.write("old", state(9, rows=10))
    failed = fired = 0
    for nth in range(1, 100):
        with proxy_to(server) as proxy:
            proxy.rule = lambda request, nth=nth: (
                Fault(action=action) if request.number == nth else None
            )
            catalog = Catalog(retrying(at(proxy.url, folder), QUICK))
            try:
                catalog.write(f"step_{nth}", state(nth, rows=10))
            except CheckpointError:
                failed += 1
                acknowledged = False
            else:
                acknowledged = True
            if len(proxy.requests) < nth:
                break
            fired += 1
        listed = {info.prefix for info in true.list()}
        if acknowledged:
            assert f"step_{nth}" in listed
        for prefix in listed:
            assert true.verify(prefix).is_intact
        assert "old" in listed
        for info in at(server, folder).list(f"step_{nth}/"):  # or every later save reads it too
            true.storage.delete(info.key)
    assert fired > 8, "the save was cut off at each of its requests"
    assert failed <= 2, "only what a writer cannot repeat may fail"


def test_model_files_their_tables_and_their_index_live_and_go_together(storage):
    golden = pathlib.Path(__file__).parents[1] / "golden" / "v1" / "consolidated"
    for path in golden.iterdir():
        storage.create(f"step_1/{path.name}", path.read_bytes())
    catalog = Catalog(storage)
    assert catalog.verify("step_1").is_intact
    assert catalog.read("step_1")["embed.weight"].shape == (4, 3)
    storage.delete("step_1/model.safetensors.index.json")
    catalog.gc()
    index = golden / "model.safetensors.index.json"
    assert storage.read("step_1/model.safetensors.index.json") == index.read_bytes()
    catalog.delete("step_1")
    assert [info.key for info in storage.list()] == ["step_1/metadata.json"]  # a tombstone
