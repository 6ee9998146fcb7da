"""What autograd holds in the place of a saved tensor. Owns the value while there is one."""

from typing import TYPE_CHECKING, Any

from holdfast.activation._regions.changes import changes
from holdfast.errors import RecomputationError

if TYPE_CHECKING:
    from holdfast.activation._regions.found import Parameter
    from holdfast.activation._regions.region import Region


class Saved:
    """One saved tensor of a region: dropped, replayed and waiting to be used, or held.

    Autograd is its only owner. When the graph lets go of it, its value is gone too, without
    the garbage collector.
    """

    __slots__ = ("__weakref__", "changed", "held", "region", "value", "version")

    def __init__(self, region: "Region") -> None:
        self.region = region
        self.value: Any = None
        self.version = 0
        self.held: Any = None
        self.changed = False  # before it was held

    def put(self, value: Any) -> None:
        self.version = value._version  # noqa: SLF001
        self.value = value

    def take(self) -> Any:
        """The value, which is then no longer here; ``None`` if it was not."""
        value = self.value
        self.value = None
        if value is not None and value._version != self.version:  # noqa: SLF001
            self.changed = True
            self.require_unchanged()
        return value

    def require_unchanged(self) -> None:
        if self.changed:
            raise RecomputationError(
                f"a tensor that region {self.region.name!r} saved for backward was modified by an "
                "inplace operation later in the region, so its gradients would be wrong. Without "
                "checkpointing autograd refuses this too: use the operation's out-of-place form.",
                layer_id=self.region.name,
            )


class Alias:
    """A saved tensor that lies in a parameter: it lives anyway, so it is neither moved nor
    recomputed."""

    __slots__ = ("_parameter", "_region", "_tensor")

    def __init__(self, tensor: Any, parameter: "Parameter", region: "Region") -> None:
        self._tensor = tensor.detach()
        self._parameter = parameter
        self._region = region

    def get(self) -> Any:
        region = self._region
        for change in changes((self._parameter,), region.epoch):
            name = region.reached.name_of(change.tensor) or "a parameter"
            raise RecomputationError(
                f"{name}, which region {region.name!r} uses, {change.what} between forward and "
                "backward. The gradients would be wrong. Call backward() first.",
                layer_id=region.name,
            )
        return self._tensor


def unpack(saved: Saved) -> Any:
    """Autograd's question in backward."""
    value = saved.take()
    return saved.region.retrieve(saved) if value is None else value
