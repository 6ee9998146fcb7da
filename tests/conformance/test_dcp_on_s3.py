"""torch.distributed.checkpoint saves to a real S3 server through holdfast's storage."""

import urllib.request
import uuid

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _servers import moto_server
from torch.distributed.checkpoint.api import CheckpointException

from holdfast.catalog import Catalog
from holdfast.integrations.dcp import HoldfastReader, HoldfastWriter
from holdfast.storage import StorageOptions
from holdfast.testing import RankGang

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with moto_server(tmp_path_factory.mktemp("moto") / "log") as url:
        urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
        yield url


@pytest.fixture
def where(server):
    return StorageOptions(
        url=f"s3://bucket/{uuid.uuid4().hex}",
        config={
            "endpoint": server,
            "access_key_id": "key",
            "secret_access_key": "word",
            "region": "us-east-1",
            "client_options": {"timeout": "60s", "connect_timeout": "20s"},
        },
    )


def state(seed):
    return {"w": torch.arange(100_000.0) + seed, "step": seed}


def save_and_load(rank, where):
    for seed in (1, 2):
        dcp.save(state(seed), storage_writer=HoldfastWriter("step_5", storage=where))
        into = state(0)
        dcp.load(into, storage_reader=HoldfastReader("step_5", storage=where))
        assert torch.equal(into["w"], state(seed)["w"])
        assert into["step"] == seed


def test_two_ranks_save_to_a_bucket_and_load_from_it(where):
    with RankGang(2) as gang:
        gang.run(save_and_load, where)
    (info,) = Catalog(where).list()
    assert (info.prefix, info.step, info.world_size) == ("step_5", 5, 2)
    assert Catalog(where).verify("step_5").is_intact


def test_a_url_with_its_settings_in_the_environment(server, monkeypatch):
    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "word",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    url = f"s3://bucket/{uuid.uuid4().hex}/step-3"
    dcp.save(state(3), checkpoint_id=url, storage_writer=HoldfastWriter(url))
    into = state(0)
    dcp.load(into, storage_reader=HoldfastReader(url))
    assert torch.equal(into["w"], state(3)["w"])
    with pytest.raises(CheckpointException, match="already"):
        dcp.save(state(4), storage_writer=HoldfastWriter(url, overwrite=False))
