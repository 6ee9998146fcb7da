"""Which cached activation goes first when room is needed. Decides; knows ids, sizes and uses, never
a tensor.

Not cachetools: its caches decide and store in one class, and count what two views share twice.
"""

from collections.abc import Callable
from typing import Final, Protocol

from holdfast import _checks


class CachePolicy(Protocol):
    """What a cache asks before it drops an activation. Anyone may write one.

    One policy serves one cache, which calls it from many threads but never from two at a time. A
    key is told as ``added`` once, then as ``removed`` once: an activation that is replaced is
    removed and added again. A policy must not call the cache, and should not raise: the call of
    the cache during which it does fails with ``RecomputationError``.
    """

    def added(self, key: str, size_bytes: int) -> None:
        """``key`` is in the cache now, and alone would take ``size_bytes`` of it."""

    def used(self, key: str) -> None:
        """``key`` was asked for and found."""

    def removed(self, key: str) -> None:
        """``key`` is no longer in the cache: evicted, replaced or cleared."""

    def victim(self) -> str:
        """The key to evict next. Asked only while there is one; ``removed`` follows."""


class LeastRecentlyUsed:
    """Evicts what was not used for longest."""

    __slots__ = ("_order",)

    def __init__(self) -> None:
        self._order: dict[str, None] = {}

    def added(self, key: str, size_bytes: int) -> None:  # noqa: ARG002 -- the order is by use alone
        self._order[key] = None

    def used(self, key: str) -> None:
        del self._order[key]
        self._order[key] = None

    def removed(self, key: str) -> None:
        del self._order[key]

    def victim(self) -> str:
        return next(iter(self._order))


class LeastFrequentlyUsed:
    """Evicts what was used least often since it was added; of those, what was not used for longest.

    Uses are forgotten with the key: what comes back starts at none.
    """

    __slots__ = ("_by_uses", "_uses")

    def __init__(self) -> None:
        self._uses: dict[str, int] = {}
        self._by_uses: dict[int, dict[str, None]] = {}

    def added(self, key: str, size_bytes: int) -> None:  # noqa: ARG002 -- the order is by use alone
        self._place(key, 0)

    def used(self, key: str) -> None:
        self._place(key, self._take(key) + 1)

    def removed(self, key: str) -> None:
        self._take(key)

    def victim(self) -> str:
        return next(iter(self._by_uses[min(self._by_uses)]))

    def _place(self, key: str, uses: int) -> None:
        self._uses[key] = uses
        self._by_uses.setdefault(uses, {})[key] = None

    def _take(self, key: str) -> int:
        uses = self._uses.pop(key)
        peers = self._by_uses[uses]
        del peers[key]
        if not peers:
            del self._by_uses[uses]
        return uses


_BY_NAME: Final[dict[str, Callable[[], CachePolicy]]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
}


def policy_of(name: str, value: str | CachePolicy) -> CachePolicy:
    """``value``, or a new policy of that name; ``ValueError`` if it is neither."""
    if isinstance(value, str):
        if value not in _BY_NAME:
            known = ", ".join(map(repr, _BY_NAME))
            raise ValueError(f"{name} must be {known} or a CachePolicy, not {value!r:.200}")
        return _BY_NAME[value]()
    if isinstance(value, type):
        raise ValueError(  # noqa: TRY004 -- as every refusal here
            f"{name} must be a CachePolicy that was made, not the class {value.__name__}"
        )
    return _checks.having(name, value, "CachePolicy", "added", "used", "removed", "victim")
