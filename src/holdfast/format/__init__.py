"""Bytes on disk, pure: shard files, commit record, digests, codecs, typed values. Does no I/O."""

from holdfast.format._chunk_table import ChunkTable, encode_table, file_digest, parse_table
from holdfast.format._codecs import CompressionLevel, codec_for, decompress_chunk
from holdfast.format._compressing import compressed
from holdfast.format._digest import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    chunk_digests,
    digest,
    digest_of,
    leaf_digest,
)
from holdfast.format._dtypes import DType, dtype_of, dtype_of_numpy, numpy_dtype
from holdfast.format._entry_names import entry_of_box
from holdfast.format._record import decode_record, encode_record
from holdfast.format._record_schema import (
    CommitRecord,
    StoredCut,
    StoredFile,
    StoredPlacement,
    StoredTensor,
)
from holdfast.format._shard import plan_shard
from holdfast.format._shard_layout import PlacedEntry, ShardEntry, ShardLayout
from holdfast.format._shard_parse import header_bytes_needed, parse_shard_header
from holdfast.format._value_decode import decode_value
from holdfast.format._value_encode import encode_value, per_rank_node
from holdfast.format._value_model import LeafRef, PerRank
from holdfast.format._value_path import ValuePath
from holdfast.format._value_torch import TorchValue

__all__ = [
    "CHUNK_BYTES",
    "DIGEST_BYTES",
    "ChunkTable",
    "CommitRecord",
    "CompressionLevel",
    "DType",
    "LeafRef",
    "PerRank",
    "PlacedEntry",
    "ShardEntry",
    "ShardLayout",
    "StoredCut",
    "StoredFile",
    "StoredPlacement",
    "StoredTensor",
    "TorchValue",
    "ValuePath",
    "chunk_digests",
    "codec_for",
    "compressed",
    "decode_record",
    "decode_value",
    "decompress_chunk",
    "digest",
    "digest_of",
    "dtype_of",
    "dtype_of_numpy",
    "encode_record",
    "encode_table",
    "encode_value",
    "entry_of_box",
    "file_digest",
    "header_bytes_needed",
    "leaf_digest",
    "numpy_dtype",
    "parse_shard_header",
    "parse_table",
    "per_rank_node",
    "plan_shard",
]
