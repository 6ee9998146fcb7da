"""ObjectStorage on Azurite, Azure's own emulator, where it is installed (``make emulators``)."""

import base64
import contextlib
import email.utils
import hashlib
import hmac
import os
import shutil
import sys
import urllib.request
import uuid
from pathlib import Path

import pytest
from _servers import Fault, azurite_server, proxy_to

from holdfast.errors import (
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    TransientStorageError,
)
from holdfast.storage import open_storage
from holdfast.testing import StorageConformance
from holdfast.testing._conformance._keys import ODD_KEYS

MIB = 1024 * 1024
# Azurite's only account, and the key it has everywhere.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
CONTAINER = "container"
BESIDE_PYTHON = os.pathsep.join(
    [str(Path(sys.prefix, "azurite", "node_modules", ".bin")), os.environ.get("PATH", "")]
)
PROGRAM = shutil.which("azurite-blob", path=BESIDE_PYTHON)

if PROGRAM is None:
    pytest.skip(
        "azurite-blob is not installed; make emulators installs it", allow_module_level=True
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with azurite_server(PROGRAM, tmp_path_factory.mktemp("azurite")) as url:
        make_container(url)
        yield url


@pytest.fixture
def azure(server):
    return at(server)


def at(url, container=CONTAINER):
    return open_storage(
        f"az://{container}/{uuid.uuid4().hex}",
        account_name=ACCOUNT,
        account_key=KEY,
        endpoint=f"{url}/{ACCOUNT}",
        client_options={"timeout": "20s", "connect_timeout": "2s"},
    )


def make_container(url):
    headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    signed = "PUT" + 12 * "\n" + f"{lines}/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
    digest = hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    request = urllib.request.Request(
        f"{url}/{ACCOUNT}/{CONTAINER}?restype=container", method="PUT", headers=headers
    )
    with urllib.request.urlopen(request):
        pass


class TestAzure(StorageConformance):
    many_objects = 300
    many_ranges = 500
    random_examples = 5

    @pytest.fixture
    def storage(self, azure):
        return azure

    @pytest.mark.parametrize("key", [key for key in ODD_KEYS if "\\" not in key])
    def test_a_key_is_any_relative_name(self, storage, key):
        super().test_a_key_is_any_relative_name(storage, key)

    test_keys_that_look_alike_are_different = None  # one of them has a backslash


def test_a_key_with_a_backslash_is_refused_because_azure_would_change_it(azure):
    with pytest.raises(ValueError, match="cannot be stored in Azure"):
        azure.create("a\\b", b"1")


def test_listed_and_asked_for_versions_are_the_same_and_can_be_replaced(azure):
    created = azure.create("a", b"1")
    [listed] = azure.list()
    assert listed.version == created.version == azure.stat("a").version
    azure.replace("a", b"2", listed.version)
    with pytest.raises(ObjectChangedError):
        azure.replace("a", b"3", listed.version)
    with pytest.raises(ObjectExistsError):
        azure.create("a", b"4")
    azure.delete("a")
    with pytest.raises(ObjectNotFoundError):
        azure.replace("a", b"5", listed.version)


def test_an_aborted_writer_leaves_nothing(azure):
    with contextlib.suppress(LookupError), azure.open_writer("a") as writer:
        writer.write_at(0, bytes(40 * MIB))
        raise LookupError
    assert list(azure.list()) == []


def test_a_failed_block_is_transient(server):
    with proxy_to(server) as proxy:
        storage = at(proxy.url)
        proxy.rule = lambda request: (
            Fault(action="answer") if "comp=block&" in request.target else None
        )
        with pytest.raises(TransientStorageError), storage.open_writer("a") as writer:
            writer.write_at(0, bytes(40 * MIB))
            writer.finish()
        assert list(storage.list()) == []


def test_a_missing_container_says_so(server):
    with pytest.raises(StorageError, match=r"ContainerNotFound.*Create the bucket"):
        at(server, container="no-container").create("a", b"1")
