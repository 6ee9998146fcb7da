"""What is told to those who watch activations, and who they are. Knows nothing of what happens."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

_log = logging.getLogger("holdfast.activation")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationEvent:
    """Something that happened to the activation of a layer.

    An engine tells of ``recomputed`` and ``failed``; a manager of ``registered``, ``retrieved``,
    ``recomputed``, ``moved``, ``fell_back``, ``cleared`` and ``region``. ``size_bytes`` is that of
    the memory behind the tensors, as far as it is known: all of a storage also for a view of a
    part, and 0 where what was recomputed is not shown, as in the replay of a region.
    """

    kind: str
    layer_id: str
    size_bytes: int = 0
    elapsed_ms: float = 0.0


class Subscribers:
    """Who is told of events. False while there is nobody. Thread-safe.

    Callbacks are called in the thread in which the event happened and in the order in which they
    were added.

    There is no lock: adding, taking away and listing are single steps of the interpreter. What
    unsubscribes may be the end of an object, which comes in any thread at any point of its work,
    and must not wait for one.
    """

    __slots__ = ("_subscriptions",)

    def __init__(self) -> None:
        self._subscriptions: dict[_Subscription, None] = {}

    def __bool__(self) -> bool:
        return bool(self._subscriptions)

    def add(self, callback: Callable[[ActivationEvent], object]) -> Callable[[], None]:
        """Tell ``callback`` of every event from now on, until the function that is returned is
        called. Calling that again does nothing. A callback added twice is told twice."""
        if not callable(callback):
            raise ValueError(  # noqa: TRY004 -- as every refusal of an argument
                f"callback must be a function of an event, not {callback!r:.200}"
            )
        subscriptions, subscription = self._subscriptions, _Subscription(callback)
        subscriptions[subscription] = None

        def unsubscribe() -> None:
            subscriptions.pop(subscription, None)

        return unsubscribe

    def tell(self, event: ActivationEvent) -> None:
        """Call every callback. One that raises is logged and the others are still called: what
        watches a training must not end it."""
        # Not a tuple: making one may collect garbage half way, whose end may unsubscribe.
        for subscription in list(self._subscriptions):
            try:
                subscription.callback(event)
            except Exception:  # noqa: BLE001 -- logged; see above
                _log.exception("a subscriber failed at %s", event)


class _Subscription:
    """Known by its identity, so that one callback can be added twice and taken away once."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[ActivationEvent], object]) -> None:
        self.callback = callback
