"""What is told to those who watch activations, and who they are. Knows nothing of what happens."""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

_log = logging.getLogger("holdfast.activation")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationEvent:
    """Something that happened to the activation of a layer.

    An engine tells of ``recomputed`` and ``failed``; a manager of ``registered``, ``retrieved``,
    ``recomputed``, ``moved``, ``fell_back``, ``cleared`` and ``region``.
    """

    kind: str
    layer_id: str
    size_bytes: int = 0
    elapsed_ms: float = 0.0


class Subscribers:
    """Who is told of events. False while there is nobody. Thread-safe: telling takes no lock.

    Callbacks are called in the thread in which the event happened and in the order in which they
    were added.
    """

    __slots__ = ("_lock", "_subscriptions")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._subscriptions: tuple[_Subscription, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._subscriptions)

    def add(self, callback: Callable[[ActivationEvent], object]) -> Callable[[], None]:
        """Tell ``callback`` of every event from now on, until the function that is returned is
        called. Calling that again does nothing. A callback added twice is told twice."""
        if not callable(callback):
            raise ValueError(  # noqa: TRY004 -- as every refusal of an argument
                f"callback must be a function of an event, not {callback!r:.200}"
            )
        subscription = _Subscription(callback)
        with self._lock:
            self._subscriptions = (*self._subscriptions, subscription)

        def unsubscribe() -> None:
            with self._lock:
                self._subscriptions = tuple(
                    each for each in self._subscriptions if each is not subscription
                )

        return unsubscribe

    def tell(self, event: ActivationEvent) -> None:
        """Call every callback. One that raises is logged and the others are still called: what
        watches a training must not end it."""
        for subscription in self._subscriptions:
            try:
                subscription.callback(event)
            except Exception:  # noqa: BLE001 -- logged; see above
                _log.exception("a subscriber failed at %s", event)


class _Subscription:
    """Known by its identity, so that one callback can be added twice and taken away once."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[ActivationEvent], object]) -> None:
        self.callback = callback


def size_of(value: object) -> int:
    """The bytes of the elements of all tensors in ``value``: a tensor, or lists, tuples and dicts
    of them. Views are counted as if they were alone, sparse tensors as if they were dense."""
    if isinstance(value, torch.Tensor):
        return int(value.numel() * value.element_size())
    if isinstance(value, list | tuple):
        return sum(map(size_of, value))
    if isinstance(value, Mapping):
        return sum(map(size_of, value.values()))
    return 0
