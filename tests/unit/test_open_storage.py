"""What URLs, paths and settings open, and what they are told when they open nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import storage as room
from holdfast.storage import MemoryStorage, ObjectStorage, StorageOptions, open_storage
from holdfast.storage._local import LocalStorage


@pytest.mark.parametrize("kind", [str, Path, Path.as_uri])
def test_a_folder_opens_a_local_storage_and_is_not_made_yet(tmp_path, kind):
    folder = tmp_path / "a b" / "100%"
    storage = open_storage(kind(folder))
    assert isinstance(storage, LocalStorage)
    assert not folder.exists()
    storage.create("x", b"1")
    assert (folder / "x").read_bytes() == b"1"


def test_a_relative_path_is_a_folder_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    open_storage("runs/a").create("x", b"1")
    assert (tmp_path / "runs" / "a" / "x").exists()


def test_a_path_object_is_never_taken_for_a_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert isinstance(open_storage(Path("s3:/bucket")), LocalStorage)


def test_every_memory_url_is_a_storage_of_its_own():
    first, second = open_storage("memory://"), open_storage("memory://")
    assert isinstance(first, MemoryStorage)
    first.create("a", b"1")
    assert list(second.list()) == []


@pytest.mark.parametrize(
    ("url", "settings"),
    [
        ("s3://bucket/run/a", {"region": "us-east-1"}),
        ("gs://bucket/run/a", {"skip_signature": True}),
        ("az://container/run/a", {"account_name": "someone"}),
    ],
)
def test_object_urls_open_object_storages_without_a_request(url, settings):
    for given in (url, f"{url}/", StorageOptions(url=url, config=settings)):
        storage = open_storage(given, **settings)
        assert isinstance(storage, ObjectStorage)
        assert storage.url == url


def test_a_bucket_alone_is_a_storage():
    assert open_storage("s3://bucket").url == open_storage("s3://bucket/").url == "s3://bucket"


def test_settings_given_in_the_call_win_over_those_of_the_options(tmp_path):
    options = StorageOptions(url="s3://bucket", config={"region": "a", "endpont": "x"})
    with pytest.raises(ValueError, match="endpont"):
        open_storage(options, region="b")


def test_options_do_not_print_secrets():
    options = StorageOptions(
        url="s3://bucket", config={"access_key_id": "a", "secret_access_key": "hunter2"}
    )
    assert "hunter2" not in repr(options)
    assert "hunter2" not in repr(open_storage(options))
    assert "hunter2" not in open_storage(options).url


@pytest.mark.parametrize(
    ("where", "settings", "told"),
    [
        ("ftp://host/run", {}, "known are s3, gs, az, file, memory"),
        ("https://host/run", {}, "no storage is known for https://"),
        ("s3:///run", {}, "names no bucket; write s3://bucket/run"),
        ("gs://", {}, "names no bucket"),
        ("az://", {"account_name": "a"}, "names no container"),
        ("s3:/bucket/run", {}, "lacks the slashes of a URL; write s3://"),
        ("s3:bucket", {}, "lacks the slashes"),
        ("s3://key:word@bucket/run", {}, "pass credentials and endpoint as settings"),
        ("s3://host:9000/bucket", {}, "pass credentials and endpoint as settings"),
        ("s3://bucket/a/../b", {}, "the path of a s3:// URL must be a relative name"),
        ("s3://bucket//b", {}, "the path of a s3:// URL must be a relative name"),
        ("s3://bucket", {"endpont": "http://x"}, "there is no setting named 'endpont'"),
        ("s3://bucket", {"retry_config": {}}, "there is no setting named 'retry_config'"),
        ("s3://bucket", {"client_options": {"timout": "3s"}}, "no setting named 'timout'"),
        ("az://container/run", {}, "the storage account is missing; pass account_name="),
        ("file://host/run", {}, "absolute path of a folder on this machine"),
        ("file://", {}, "absolute path of a folder on this machine"),
        ("memory://name", {}, "memory storages have no names"),
        ("memory://", {"region": "x"}, "takes no settings, not region"),
        ("runs/a", {"region": "x"}, "a storage in a folder takes no settings, not region"),
        ("", {}, "path or a URL"),
    ],
)
def test_what_opens_nothing_says_why(where, settings, told, monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ValueError) as caught:
        open_storage(where, **settings)
    assert told in str(caught.value)
    assert "word" not in str(caught.value)


@pytest.mark.parametrize("where", [None, 5, ["s3://bucket"]])
def test_what_is_neither_path_nor_url_is_a_type_error(where):
    with pytest.raises(TypeError, match="where must be"):
        open_storage(where)


def test_importing_the_room_loads_no_obstore():
    code = "import sys, holdfast.storage as s; s.open_storage('memory://'); print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    )
    assert "obstore" not in run.stdout.split()


def test_the_room_has_no_other_late_names():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = room.Nothing


def test_credentials_of_the_environment_are_found_by_obstore():
    code = """
from holdfast.storage import open_storage
from holdfast.errors import TransientStorageError
try:
    open_storage("s3://bucket/run").stat("a")
except TransientStorageError as error:
    print(error.message)
"""
    env = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "word",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ALLOW_HTTP": "true",
    }
    run = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, env=env
    )
    assert "http://127.0.0.1:9/bucket/run/a" in run.stdout


def test_a_home_folder_is_meant_as_a_shell_means_it(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    storage = open_storage("~/runs")
    assert storage.url == (tmp_path / "runs").as_uri()
    assert repr(storage) == f"LocalStorage({storage.url!r})"
