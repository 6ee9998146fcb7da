"""Recomputed activations within a limit of bytes. Knows sizes and ids, not how to recompute, and
leaves to a policy what goes first."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from holdfast import _checks
from holdfast.activation._keeping.cache_policies import CachePolicy, policy_of
from holdfast.activation._keeping.geometry import version_of
from holdfast.activation._layer_ids import layer_id as checked_id
from holdfast.activation._storages import storages
from holdfast.errors import ClosedError, RecomputationError


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """What a cache held and had done at one moment."""

    cached_items_count: int
    current_size_bytes: int
    max_size_bytes: int
    cache_hits: int
    cache_misses: int
    evictions: int
    """How many activations were dropped to make room. Not those replaced or cleared."""
    refused: int
    """How many activations were larger than the limit."""

    @property
    def hit_rate(self) -> float:
        """The share of ``get`` that found something; 0 before the first."""
        asked = self.cache_hits + self.cache_misses
        return self.cache_hits / asked if asked else 0.0


class RecomputationCache:
    """Keeps recomputed activations up to ``max_size_bytes``. Thread-safe.

    Counted is the memory an activation keeps alive: all of its storage, even if it is a view of a
    part, and a storage that several share once. So a small view of a large tensor is large: add
    ``view.clone()`` to keep just that. Storages are measured as they are added, so do not resize
    what is cached. Tensors are kept and given back as they are, not copied and not detached: one
    with a ``grad_fn`` keeps its graph alive, which is not counted. One that is changed in place
    after it was added, also by who got it from here, is no longer the layer's activation and
    counts as not cached; as in autograd, changes through ``.data`` are not seen.

    ``policy`` says what goes when room is needed: ``"lru"``, ``"lfu"`` or a ``CachePolicy``. If
    that fails or names what is not cached, the call raises ``RecomputationError``; what is cached
    is still there and still counted, except for what was evicted before the failure.

    Impossible arguments raise ``ValueError``; every call after ``close()`` raises ``ClosedError``.
    """

    __slots__ = (
        "_accounts",
        "_asking",
        "_closed",
        "_evictions",
        "_hits",
        "_items",
        "_lock",
        "_max_size_bytes",
        "_misses",
        "_policy",
        "_refused",
        "_size_bytes",
    )

    def __init__(self, max_size_bytes: int, policy: str | CachePolicy = "lru") -> None:
        self._max_size_bytes = _checks.count("max_size_bytes", max_size_bytes, least=1)
        self._policy = policy_of("policy", policy)
        # Reentrant, so that a policy that calls its cache is told so instead of waiting for itself.
        self._lock = threading.RLock()
        self._asking = False
        self._closed = False
        self._items: dict[str, _Item] = {}
        self._accounts: dict[int, _Account] = {}
        self._size_bytes = 0
        self._hits = self._misses = self._evictions = self._refused = 0

    def get(self, layer_id: str) -> torch.Tensor | None:
        """The activation, or ``None`` if it is not cached. Counts as a hit or a miss, and as a
        use. One that was changed is dropped."""
        checked_id("layer_id", layer_id)
        gone: list[_Item] = []  # freed after the lock: that may run callbacks that use the cache
        with self._lock:
            self._require_usable()
            item = self._items.get(layer_id)
            if item is None or item.is_changed():
                self._misses += 1
                if item is not None:
                    self._take(layer_id, gone)
                return None
            self._ask(layer_id, self._policy.used, layer_id)
            self._hits += 1
            return item.tensor

    def add(self, layer_id: str, activation: torch.Tensor) -> bool:
        """Keep ``activation``, evicting others as needed; whether it was kept.

        It replaces what was cached under that id. ``False`` if it alone is larger than the limit:
        then nothing else is evicted, but what was cached under that id is gone too, since it would
        answer with a past value.
        """
        checked_id("layer_id", layer_id)
        item = _Item(_checks.instance("activation", activation, torch.Tensor))
        gone: list[_Item] = []  # as above
        with self._lock:
            self._require_usable()
            if layer_id in self._items:
                self._take(layer_id, gone)
            size_bytes = sum(item.sizes.values())
            if size_bytes > self._max_size_bytes:
                self._refused += 1
                return False
            while self._size_bytes + self._growth(item) > self._max_size_bytes:
                victim = self._victim(layer_id)
                self._evictions += 1
                self._take(victim, gone)
            self._put(layer_id, item)
            try:
                self._ask(layer_id, self._policy.added, layer_id, size_bytes)
            except BaseException:
                self._drop(layer_id)
                raise
            return True

    def contains(self, layer_id: str) -> bool:
        """Whether it is cached. Counts neither as a hit or miss nor as a use."""
        checked_id("layer_id", layer_id)
        with self._lock:
            self._require_usable()
            item = self._items.get(layer_id)
            return item is not None and not item.is_changed()

    __contains__ = contains

    def clear(self) -> None:
        """Drop every activation. The counts of hits, misses, evictions and refusals stay."""
        gone: list[_Item] = []
        with self._lock:
            self._require_usable()
            keys = list(self._items)
            gone.extend(map(self._drop, keys))
            for key in keys:
                self._ask(key, self._policy.removed, key)

    def get_stats(self) -> CacheStats:
        """All counts as they were at one moment."""
        with self._lock:
            self._require_usable()
            return CacheStats(
                cached_items_count=len(self._items),
                current_size_bytes=self._size_bytes,
                max_size_bytes=self._max_size_bytes,
                cache_hits=self._hits,
                cache_misses=self._misses,
                evictions=self._evictions,
                refused=self._refused,
            )

    def close(self) -> None:
        """Drop every activation and refuse every further call but this one."""
        gone: list[_Item] = []
        with self._lock:
            self._refuse_the_policy()
            self._closed = True
            gone.extend(map(self._drop, list(self._items)))

    def __enter__(self) -> Self:
        with self._lock:
            self._require_usable()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _require_usable(self) -> None:
        if self._closed:
            raise ClosedError("this RecomputationCache is closed")
        self._refuse_the_policy()

    def _refuse_the_policy(self) -> None:
        if self._asking:
            raise RuntimeError("a cache policy must not call the cache that is asking it")

    def _growth(self, item: "_Item") -> int:
        """How much more would be held with ``item``: nothing for a storage that already is."""
        return sum(
            size_bytes - self._accounts[key].size_bytes if key in self._accounts else size_bytes
            for key, size_bytes in item.sizes.items()
        )

    def _put(self, layer_id: str, item: "_Item") -> None:
        self._size_bytes += self._growth(item)
        self._items[layer_id] = item
        for key, size_bytes in item.sizes.items():
            account = self._accounts.setdefault(key, _Account())
            account.size_bytes = size_bytes
            account.items += 1

    def _drop(self, layer_id: str) -> "_Item":
        item = self._items.pop(layer_id)
        for key in item.sizes:
            account = self._accounts[key]
            account.items -= 1
            if not account.items:
                self._size_bytes -= account.size_bytes
                del self._accounts[key]
        return item

    def _take(self, layer_id: str, gone: "list[_Item]") -> None:
        gone.append(self._drop(layer_id))
        self._ask(layer_id, self._policy.removed, layer_id)

    def _victim(self, layer_id: str) -> str:
        victim = self._ask(layer_id, self._policy.victim)
        if not isinstance(victim, str) or victim not in self._items:
            raise RecomputationError(
                f"to make room for layer {layer_id!r} the cache policy "
                f"{type(self._policy).__name__} would evict {victim!r:.200}, which is not cached; "
                f"the {len(self._items)} activations that are cached are intact, {layer_id!r} is "
                "not cached: mend victim() of the policy",
                layer_id=layer_id,
            )
        return victim

    def _ask(self, layer_id: str, question: Callable[..., Any], *facts: object) -> Any:
        self._asking = True
        try:
            return question(*facts)
        except Exception as problem:
            raise RecomputationError(
                f"the cache policy {type(self._policy).__name__} failed in "
                f"{getattr(question, '__name__', question)!s:.200}() while layer {layer_id!r} was "
                f"looked up, added or removed ({type(problem).__name__}: {problem!s:.200}); the "
                f"{len(self._items)} activations that are cached are intact: mend the policy",
                layer_id=layer_id,
            ) from problem
        finally:
            self._asking = False


class _Item:
    """An activation, its version, the storages it was added with, and their sizes then by
    identity.

    The storages are held: what the tensor is made to point to later must not get their identities.
    """

    __slots__ = ("sizes", "storages", "tensor", "version")

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.version = version_of(tensor)
        self.storages = storages(tensor)
        self.sizes = {each._cdata: int(each.nbytes()) for each in self.storages}  # noqa: SLF001
        if tensor.numel() and not self.storages:
            raise ValueError(
                "activation must be a tensor whose memory can be counted, not one of layout "
                f"{tensor.layout} on {tensor.device}, class {type(tensor).__name__}"
            )

    def is_changed(self) -> bool:
        return version_of(self.tensor) != self.version


class _Account:
    """What one storage takes, and how many items are in it."""

    __slots__ = ("items", "size_bytes")

    def __init__(self) -> None:
        self.size_bytes = 0
        self.items = 0
