"""The values of a commit record: which fields, of which types. Knows no bytes.

What the fields must be to each other (files that exist, cuts inside the shape) is in
``_record_check``.
"""

from typing import Annotated, Any, Final, Literal

import msgspec

MAX_COUNT: Final = 2**63 - 1

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Index = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Step = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
ShortText = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class _Stored(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False
):
    """A value of the record, strictly read. Nothing in it can be part of a cycle."""


class StoredFile(_Stored, frozen=True, kw_only=True):
    """A shard: ``digest`` (32 hex digits) is over its header and table; ``prefix`` names the
    checkpoint whose folder it is in, ``None`` being the record's own. ``table`` names the object
    in the same folder that holds its chunk table, if the file itself does not."""

    name: str
    size_bytes: Count = msgspec.field(name="size")
    digest: str
    prefix: str | None = None
    table: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every object that the shard is made of."""
        return (self.name,) if self.table is None else (self.name, self.table)


class StoredCut(_Stored, frozen=True, kw_only=True):
    """How one dimension is cut: every ``step`` elements, or ``at`` the inner positions, which are
    runs ``(first, step, count)`` as those of ``StoredPlacement.files``, and rise."""

    step: Count | None = None
    at: tuple[tuple[Count, Count, Count], ...] | None = None


class StoredPlacement(_Stored, frozen=True, kw_only=True):
    """Which file holds which part of a tensor.

    Parts are the cells of a grid in row-major order (``cuts``, one per dimension), or else
    ``boxes`` (start and stop per dimension). ``files`` gives their file indexes as runs
    ``(first, step, count)``: ``first``, ``first + step``, and so on, ``count`` of them.
    """

    cuts: tuple[StoredCut, ...] | None = None
    boxes: tuple[tuple[tuple[Count, Count], ...], ...] | None = None
    files: tuple[tuple[Index, Step, Count], ...]


class StoredTensor(_Stored, frozen=True, kw_only=True):
    """A tensor: dtype code, whole shape, and where its parts are."""

    dtype: str
    shape: tuple[Count, ...]
    placement: StoredPlacement


class CommitRecord(_Stored, frozen=True, kw_only=True, gc=True):
    """All that a checkpoint says of itself.

    ``state`` is ``"committed"``, or ``"tombstone"`` for a checkpoint being deleted, which has no
    files and no tensors. ``metrics`` are ints of 64 bits and floats. ``custom`` and ``tree`` are
    encoded typed values (``encode_value``), left as they are. ``created`` is RFC 3339, in UTC,
    ending in ``Z``.
    """

    state: Literal["committed", "tombstone"]
    ordinal: Count
    attempt: str
    created: str
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
    writer: ShortText
    fence: Count = 0
    step: Count | None = None
    metrics: dict[str, Any] = {}
    custom: Any = None
    tree: Any = None
    shard_format: ShortText = "multi_shard"
    files: tuple[StoredFile, ...] = ()
    tensors: dict[str, StoredTensor] = {}
