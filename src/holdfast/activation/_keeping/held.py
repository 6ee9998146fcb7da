"""What a tier gives for a tensor it keeps. Knows what its owner can ask, and how it is refused."""

from typing import Any, Protocol

from holdfast.errors import ClosedError, RecomputationError


class Part(Protocol):
    """Bytes that a tier keeps, for all tensors that lie in them."""

    @property
    def size_bytes(self) -> int: ...


class Held(Protocol):
    """A tensor that a tier keeps for as long as this is referred to. Thread-safe.

    Dropping it frees what the tensor took, in memory at once, in a file when the manager is used
    next; no garbage collector is needed.
    """

    @property
    def layer_id(self) -> str: ...

    @property
    def size_bytes(self) -> int:
        """What is kept for it. Several may share it, if they lie in one storage."""

    @property
    def parts(self) -> "tuple[Part, ...]":
        """What is kept for it, one for each storage."""

    def get(self) -> Any:
        """The tensor, detached: its values when it was held, with its dtype, shape and strides.

        ``RecomputationError`` if it was changed in place after it was held and before a copy of
        it was safe, or if its bytes are lost; then the error that lost them is the cause.
        ``ClosedError`` after the manager was closed.
        """


def changed(layer_id: str) -> RecomputationError:
    return RecomputationError(
        f"a tensor held for {_in_words(layer_id)} was modified in place after it was saved, so "
        "its saved value is gone and gradients computed from it would be wrong: use the "
        "operation's out-of-place form, or hold a clone",
        layer_id=layer_id,
    )


def lost(layer_id: str, cause: BaseException) -> RecomputationError:
    return RecomputationError(
        f"a tensor moved away for {_in_words(layer_id)} cannot be read back: {cause}; other "
        "tensors are not affected, and recomputing this one gives it back",
        layer_id=layer_id,
    )


def closed() -> ClosedError:
    return ClosedError("this CheckpointManager is closed; what it kept is gone")


def _in_words(layer_id: str) -> str:
    return f"layer {layer_id!r}" if layer_id else "a caller that gave no layer id"
