"""What autograd holds in the place of a saved tensor. Owns the value while there is one."""

from typing import TYPE_CHECKING, Any

from holdfast.errors import RecomputationError

if TYPE_CHECKING:
    from holdfast.activation._regions.region import Region


class Saved:
    """One saved tensor of a region: dropped, replayed and waiting to be used, or held.

    Autograd is its only owner. When the graph lets go of it, its value is gone too, without
    the garbage collector.
    """

    __slots__ = ("__weakref__", "held", "region", "value", "version")

    def __init__(self, region: "Region") -> None:
        self.region = region
        self.value: Any = None
        self.version = 0
        self.held: Any = None

    def put(self, value: Any) -> None:
        self.version = value._version  # noqa: SLF001
        self.value = value

    def take(self) -> Any:
        """The value, which is then no longer here; ``None`` if it was not."""
        value = self.value
        self.value = None
        if value is not None and value._version != self.version:  # noqa: SLF001
            raise RecomputationError(
                f"a tensor of shape {tuple(value.shape)} that region {self.region.name!r} saved "
                "for backward was modified by an inplace operation later in the region, so its "
                "gradients would be wrong. Without checkpointing autograd refuses this too: use "
                "the operation's out-of-place form.",
                layer_id=self.region.name,
            )
        return value


class Alias:
    """A saved tensor that lies in a parameter: it lives anyway, so it is neither moved nor
    recomputed."""

    __slots__ = ("_region", "_tensor", "_version")

    def __init__(self, tensor: Any, region: str) -> None:
        self._tensor = tensor.detach()
        self._version = tensor._version  # noqa: SLF001
        self._region = region

    def get(self) -> Any:
        if self._tensor._version != self._version:  # noqa: SLF001
            raise RecomputationError(
                f"a parameter of shape {tuple(self._tensor.shape)} that region {self._region!r} "
                "uses was changed in place between forward and backward. The gradients would be "
                "wrong. Call backward() first.",
                layer_id=self._region,
            )
        return self._tensor


def unpack(saved: Saved) -> Any:
    """Autograd's question in backward."""
    value = saved.take()
    return saved.region.retrieve(saved) if value is None else value
