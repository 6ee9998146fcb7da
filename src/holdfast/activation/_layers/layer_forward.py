"""The forward that a checkpointed layer has in place of its own. Knows one module, not why it was
chosen.

It stands in the module's ``__dict__``, so parameters, buffers and names of modules stay as they
are, and hooks run around it, once. It refers to its module weakly: the two die together, without a
garbage collection.
"""

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch

from holdfast.activation._keeping.manager import CheckpointManager
from holdfast.activation._regions.checkpoint import checkpoint

Forward = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Owner(Protocol):
    """Whoever decides what layers do: ``checkpoint_layers``' handle, or a plan at work."""

    def _call(self, name: str, module: Any, forward: Forward, call: Arguments) -> Any:
        """What a layer's call in training does."""

    def _recomputes(self, name: str) -> bool:
        """Whether the layer of a copy of the model, which has no owner, is to be checkpointed."""


class LayerForward:
    """Stands in for the ``forward`` of ``module``; ``owner`` says what a call in training does.

    In eval mode or without gradients the layer runs as it is. A copy of the model, by
    ``copy.deepcopy`` or by pickling, has copies of these without an owner, which go on as the
    layer did when it was copied.
    """

    __slots__ = ("__weakref__", "_module", "_prior", "_recomputes", "name", "owner")

    def __init__(
        self,
        module: Any,
        name: str,
        prior: Forward | None,
        owner: Owner | None,
        recomputes: bool,
    ) -> None:
        self.name = name
        self.owner = owner
        self._module = weakref.ref(module)
        self._prior = prior
        self._recomputes = recomputes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._alive()
        forward = self._forward(module)
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        if self.owner is not None:
            return self.owner._call(self.name, module, forward, (args, kwargs))  # noqa: SLF001 -- its other half
        if self._recomputes:
            return checkpointed(self.name, module, forward, (args, kwargs))
        return forward(*args, **kwargs)

    @property
    def __wrapped__(self) -> Forward:
        """The layer's own, for those who ask for its signature."""
        return self._forward(self._alive())

    def __reduce__(self) -> tuple[Any, ...]:
        owner = self.owner
        recomputes = self._recomputes if owner is None else owner._recomputes(self.name)  # noqa: SLF001 -- as above
        return LayerForward, (self._alive(), self.name, self._prior, None, recomputes)

    def __repr__(self) -> str:
        return f"<checkpointed forward of {self.name!r}>"

    def _alive(self) -> Any:
        module = self._module()
        if module is None:
            raise ReferenceError(
                f"layer {self.name!r} is gone: its checkpointed forward does not keep it alive"
            )
        return module

    def _forward(self, module: Any) -> Forward:
        if self._prior is not None:
            return self._prior
        # Looked up at every call: fully_shard and parametrizations change a module's class.
        return type(module).forward.__get__(module)  # type: ignore[no-any-return]


def install(module: Any, name: str, owner: Owner) -> None:
    """Give ``module`` such a forward, in place of whichever it has."""
    remove(module, None)
    prior = module.__dict__.get("forward")
    module.__dict__["forward"] = LayerForward(module, name, prior, owner, recomputes=True)


def remove(module: Any, owner: Owner | None) -> None:
    """Give ``module`` back the forward it had, if it now has one of ``owner``'s."""
    found = installed(module)
    if found is None or found.owner is not owner:
        return
    if found._prior is None:  # noqa: SLF001 -- its own
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = found._prior  # noqa: SLF001 -- as above


def installed(module: Any) -> LayerForward | None:
    """The forward of this kind that ``module`` has."""
    found = module.__dict__.get("forward")
    return found if isinstance(found, LayerForward) else None


def checkpointed(
    name: str,
    module: Any,
    forward: Forward,
    call: Arguments,
    manager: CheckpointManager | None = None,
    *,
    keep: Callable[[Any], bool] | None = None,
) -> Any:
    """The result of the call, of which only the arguments are kept, and what ``keep`` says."""
    args, kwargs = call
    run = functools.partial(checkpoint, name=name, modules=(module,), manager=manager, keep=keep)
    if _TAKEN.isdisjoint(kwargs):
        return run(forward, *args, **kwargs)
    return run(_with_keywords, forward, args, kwargs)


def _with_keywords(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return forward(*args, **kwargs)


_TAKEN: Final = frozenset(
    parameter.name
    for parameter in inspect.signature(checkpoint).parameters.values()
    if parameter.kind in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}
)
"""Keywords that ``checkpoint`` would take for its own though the layer means them."""
