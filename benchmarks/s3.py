"""A state to an S3 server and back: holdfast beside what people write themselves, and DCP.

The server is moto, a process on loopback that keeps objects in memory; it shares the machine with
who is measured, so the bare server, one object of as many bytes put and got with nothing done to
them, is in the comparison. It is got in one request, and also in ranges, several at a time, as
holdfast and boto3 read: that is the fast way with Amazon's S3, and the slow one with moto, which
copies the whole object for every range of it. ``torch.save`` and safetensors make their bytes in
memory, which are put by obstore as one stream of parts, as holdfast's are, or by boto3's managed
transfer. DCP goes through fsspec, where s3fs is installed. All load into tensors that are there.
holdfast alone verifies what it reads.
"""

import contextlib
import importlib
import importlib.util
import io
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from obstore.store import S3Store

from _disk import in_folder
from _measure import FULL, MIB, Extent, Measurement, Place, at_least, interleaved, ratios, told
from _peers import HOLDFAST, SAFETENSORS, TORCH, Tensors, check, copy_over
from holdfast.catalog import Catalog
from holdfast.storage import StorageOptions
from holdfast.storage._object_reads import REQUEST_BYTES, THREADS
from storage import random_state

STATE_BYTES = 128 * MIB
LEAF_BYTES = 8 * MIB
REPEATS = 5
BUCKET = "bucket"
BARE, IN_RANGES = "bare server", "bare server, in ranges"
BOTO, DCP = f"{TORCH} and boto3", "DCP through fsspec"
SERVERS = Path(__file__).parents[1] / "tests" / "conformance"
KEYS = {"access_key_id": "key", "secret_access_key": "word", "region": "us-east-1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    save: Callable[[], object]
    load: Callable[[], object]


def measure(extent: Extent = FULL) -> list[Measurement]:
    return in_folder(partial(_measure, extent))


def _measure(extent: Extent, folder: Path) -> list[Measurement]:
    arrays = random_state(extent.of(STATE_BYTES), extent.of(LEAF_BYTES))
    state = {name: torch.from_numpy(array) for name, array in arrays.items()}
    size = sum(array.nbytes for array in arrays.values())
    repeats = extent.repeats(REPEATS)
    with server(folder / "log") as url:
        config: Any = {"endpoint": url, **KEYS}
        store = S3Store(BUCKET, config=config, client_options={"allow_http": True})
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        ways = ways_to(url, store, state, into)
        for each in ways.values():
            each.save()
        saved = interleaved(
            {name: each.save for name, each in ways.items()},
            repeats=repeats,
            prepare=lambda name: _empty(store, name),
        )
        for name, each in ways.items():
            if name not in {BARE, IN_RANGES}:
                check(name, each.load, state, into)
        loaded = interleaved({name: each.load for name, each in ways.items()}, repeats=repeats)
    found = []
    for verb, seconds in (("save to S3", saved), ("load from S3", loaded)):
        what = f"{verb}, {size / MIB:g} MiB"
        for name in ways:
            if name != HOLDFAST:
                pairs = ratios(seconds[name], seconds[HOLDFAST])
                found.append(_compared(what, name, pairs))
        found += [
            told(f"{what}, {name}", [size / taken / 1e6 for taken in seconds[name]], "MB/s")
            for name in ways
        ]
    return found


def _compared(what: str, name: str, pairs: list[float]) -> Measurement:
    if name in {BARE, IN_RANGES}:
        return told(f"{what}, of the speed of the {name}", pairs, "x")
    place = Place(chart=what, series=name)
    return at_least(f"{what}, times as fast as {name}", pairs, "x", 1, place=place)


@contextlib.contextmanager
def server(log: Path) -> Iterator[str]:
    """The server of the tests, with an empty bucket; yields its address."""
    sys.path.insert(0, str(SERVERS))
    try:
        servers = importlib.import_module("_servers")
    finally:
        sys.path.remove(str(SERVERS))
    with servers.moto_server(log) as url:
        request = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request).close()
        yield url


def ways_to(url: str, store: Any, state: Tensors, into: Tensors) -> dict[str, Way]:
    """Each has objects of its own, whose keys begin with its name."""
    options = StorageOptions(url=f"s3://{BUCKET}/{HOLDFAST}", config={"endpoint": url, **KEYS})
    catalog = Catalog(options)
    arrays = {name: tensor.numpy() for name, tensor in state.items()}
    into_arrays = {name: tensor.numpy() for name, tensor in into.items()}
    whole = np.concatenate([array.view(np.uint8) for array in arrays.values()]).tobytes()
    found = {
        BARE: Way(
            save=lambda: obstore.put(store, BARE, whole),
            load=lambda: obstore.get(store, BARE).bytes(),
        ),
        IN_RANGES: Way(
            save=lambda: obstore.put(store, IN_RANGES, whole),
            load=lambda: _get_in_ranges(store, IN_RANGES, len(whole)),
        ),
        HOLDFAST: Way(
            save=lambda: catalog.write("a", arrays),
            load=lambda: catalog.open("a").read_into(into_arrays),
        ),
        TORCH: Way(
            save=lambda: obstore.put(store, TORCH, _pickled(state)),
            load=lambda: _unpickle(io.BytesIO(obstore.get(store, TORCH).bytes()), into),
        ),
        SAFETENSORS: Way(
            save=lambda: obstore.put(store, SAFETENSORS, safetensors.torch.save(dict(state))),
            load=lambda: copy_over(
                safetensors.torch.load(bytes(obstore.get(store, SAFETENSORS).bytes())), into
            ),
        ),
        BOTO: _boto3(url, state, into),
    }
    if importlib.util.find_spec("s3fs") is not None:
        found[DCP] = _dcp(url, state, into)
    return found


def _get_in_ranges(store: Any, key: str, size: int) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        starts = range(0, size, REQUEST_BYTES)
        ends = (min(start + REQUEST_BYTES, size) for start in starts)
        for _ in pool.map(lambda a, b: obstore.get_range(store, key, start=a, end=b), starts, ends):
            pass


def _boto3(url: str, state: Tensors, into: Tensors) -> Way:
    client = importlib.import_module("boto3").client(  # comes with moto
        "s3",
        endpoint_url=url,
        aws_access_key_id=KEYS["access_key_id"],
        aws_secret_access_key=KEYS["secret_access_key"],
        region_name=KEYS["region"],
    )

    def load() -> None:
        got = io.BytesIO()
        client.download_fileobj(BUCKET, BOTO, got)
        got.seek(0)
        _unpickle(got, into)

    return Way(save=lambda: client.upload_fileobj(_pickled(state), BUCKET, BOTO), load=load)


def _dcp(url: str, state: Tensors, into: Tensors) -> Way:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter  # noqa: PLC0415 -- needs fsspec

    where = f"s3://{BUCKET}/{DCP}"
    how = {
        "key": KEYS["access_key_id"],
        "secret": KEYS["secret_access_key"],
        "client_kwargs": {"endpoint_url": url, "region_name": KEYS["region"]},
        "use_listings_cache": False,
    }
    return Way(
        save=lambda: dcp.save(dict(state), storage_writer=FsspecWriter(where, **how), no_dist=True),
        load=lambda: dcp.load(dict(into), storage_reader=FsspecReader(where, **how), no_dist=True),
    )


def _pickled(state: Tensors) -> io.BytesIO:
    made = io.BytesIO()
    torch.save(dict(state), made)
    made.seek(0)
    return made


def _unpickle(data: io.BytesIO, into: Tensors) -> None:
    copy_over(torch.load(data, weights_only=True), into)


def _empty(store: Any, name: str) -> None:
    """Remove what the candidate wrote."""
    paths = [each["path"] for chunk in obstore.list(store) for each in chunk]
    if mine := [path for path in paths if path.split("/")[0] == name]:
        obstore.delete(store, mine)
