"""Checkpoints in the Hugging Face layout, made by hand for the tests of the catalog."""

import contextlib
import json

import numpy as np

from holdfast.catalog import Attempt
from holdfast.catalog._model_index import check_index, settle_index, write_index
from holdfast.catalog._names import model_name, table_name
from holdfast.catalog._placing import placement_of_grid
from holdfast.catalog._shard_write import ArraySource, write_shard
from holdfast.catalog._writing import Facts, record_of
from holdfast.errors import ObjectNotFoundError
from holdfast.format import (
    CompressionLevel,
    LeafRef,
    ShardEntry,
    StoredTensor,
    dtype_of_numpy,
    encode_value,
)
from holdfast.reshard import Grid, IndexRuns

ARRAYS = {
    "embed.weight": np.arange(200_000, dtype=np.float32).reshape(1000, 200),
    "head.weight": np.arange(60, dtype=np.float64),
}
"""What ``begin`` writes if it is not told otherwise, each in a file of its own."""


def begin(storage, prefix="a", arrays=None, *, level=CompressionLevel.NONE, **options):
    """An attempt that wrote one model file for each array, its table beside it, and one ordinary
    shard, and the record it has to commit."""
    arrays = ARRAYS if arrays is None else arrays
    attempt = Attempt.begin(storage, prefix, **options)
    files = []
    tensors = {}
    entries = {name: _entry(name, array) for name, array in arrays.items()}
    for number, (name, array) in enumerate(arrays.items()):
        key = f"{prefix}/{model_name(number + 1, len(arrays), attempt.intent.attempt)}"
        written = write_shard(
            storage,
            key,
            [ArraySource(entry=entries[name], array=array)],
            level=level,
            metadata={"format": "pt"},
            table_key=table_name(key),
        )
        files.append(written.file)
        tensors[name] = _stored(array, number)
    moment = np.ones(5, np.float32)
    source = ArraySource(entry=_entry("optimizer.x", moment), array=moment)
    files.append(write_shard(storage, attempt.shard_key(0), [source]).file)
    tensors["optimizer.x"] = _stored(moment, len(arrays))
    tree = {name: LeafRef(kind="array", name=name) for name in tensors}
    record = record_of(
        attempt,
        Facts(),
        tree=encode_value(tree),
        files=files,
        tensors=tensors,
        world_size=2,
        shard_format="consolidated",
    )
    return attempt, record


def save(storage, prefix="a", arrays=None, **options):
    """Save such a checkpoint as ranks do."""
    check_index(storage, prefix)
    attempt, record = begin(storage, prefix, arrays, **options)
    with attempt:
        if attempt.replaces is None:
            write_index(storage, prefix, record)
        record = attempt.commit(record)
    settle_index(storage, prefix)
    return attempt, record


def index_of(storage, prefix="a"):
    """The index that is there, or ``None``."""
    with contextlib.suppress(ObjectNotFoundError):
        return json.loads(storage.read(f"{prefix}/model.safetensors.index.json"))
    return None


def _entry(name, array):
    return ShardEntry(name=name, dtype=dtype_of_numpy(array.dtype).code, shape=array.shape)


def _stored(array, file):
    placement = placement_of_grid(Grid.whole(array.shape), IndexRuns.of([file]))
    code = dtype_of_numpy(array.dtype).code
    return StoredTensor(dtype=code, shape=array.shape, placement=placement)
