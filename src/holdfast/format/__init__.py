"""Bytes on disk, pure: shard files, commit record, digests, codecs, typed values. Does no I/O."""

from holdfast.format._chunk_table import ChunkTable, encode_table, file_digest, parse_table
from holdfast.format._codecs import (
    CompressionLevel,
    check_codec,
    codec_for,
    compress_chunk,
    decompress_chunk,
)
from holdfast.format._compressing import compressed
from holdfast.format._digest import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    chunk_count,
    chunk_digests,
    digest,
    leaf_digest,
)
from holdfast.format._dtypes import DTYPES, DType, dtype_of, dtype_of_numpy, numpy_dtype
from holdfast.format._entry_names import Box, entry_name, entry_of_box, parse_entry_name
from holdfast.format._record import decode_record, encode_record
from holdfast.format._record_schema import CommitRecord, Cut, Placement, StoredFile, StoredTensor
from holdfast.format._shard import PlacedEntry, ShardEntry, ShardLayout, plan_shard
from holdfast.format._shard_parse import header_bytes_needed, parse_shard_header
from holdfast.format._strict_json import scan_json
from holdfast.format._value_decode import decode_value
from holdfast.format._value_encode import encode_value
from holdfast.format._value_model import MAX_VALUE_DEPTH, MAX_VALUE_JSON_DEPTH, LeafRef
from holdfast.format._value_path import ValuePath
from holdfast.format._value_torch import TorchValue

__all__ = [
    "CHUNK_BYTES",
    "DIGEST_BYTES",
    "DTYPES",
    "MAX_VALUE_DEPTH",
    "MAX_VALUE_JSON_DEPTH",
    "Box",
    "ChunkTable",
    "CommitRecord",
    "CompressionLevel",
    "Cut",
    "DType",
    "LeafRef",
    "PlacedEntry",
    "Placement",
    "ShardEntry",
    "ShardLayout",
    "StoredFile",
    "StoredTensor",
    "TorchValue",
    "ValuePath",
    "check_codec",
    "chunk_count",
    "chunk_digests",
    "codec_for",
    "compress_chunk",
    "compressed",
    "decode_record",
    "decode_value",
    "decompress_chunk",
    "digest",
    "dtype_of",
    "dtype_of_numpy",
    "encode_record",
    "encode_table",
    "encode_value",
    "entry_name",
    "entry_of_box",
    "file_digest",
    "header_bytes_needed",
    "leaf_digest",
    "numpy_dtype",
    "parse_entry_name",
    "parse_shard_header",
    "parse_table",
    "plan_shard",
    "scan_json",
]
