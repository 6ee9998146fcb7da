"""``checkpoint()``: runs a function so that backward recomputes what autograd would have kept.
Knows torch's keywords and when to leave the work to torch; a ``Region`` does the rest."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from holdfast import _checks
from holdfast.activation._keeping.manager import CheckpointManager
from holdfast.activation._regions.debug import OperatorLog
from holdfast.activation._regions.default import default_manager
from holdfast.activation._regions.options import RegionOptions
from holdfast.activation._regions.region import Region, name_of
from holdfast.errors import ClosedError


def checkpoint(
    fn: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], tuple[Any, Any]] | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    modules: Any = (),
    generators: Any = (),
    check: str = "version",
    manager: CheckpointManager | None = None,
    keep: Callable[[Any], bool] | None = None,
    name: str | None = None,
    **kwargs: Any,
) -> Any:
    """``fn(*args, **kwargs)``, with the tensors autograd would save for backward dropped and
    recomputed when backward needs them. Gradients, buffers and random streams are bit for bit
    what they are without it.

    Takes the keywords of ``torch.utils.checkpoint.checkpoint(use_reentrant=False)`` and means
    the same by them, plus:

    - ``modules``: a module, or several, that ``fn`` uses and that cannot be found from it and
      its arguments.
    - ``generators``: a ``torch.Generator``, ``random.Random`` or NumPy generator, or several,
      that ``fn`` draws from. torch's, Python's and NumPy's global streams need no naming.
    - ``determinism_check="values"``: compare every recomputed tensor's values, and name module
      and line of the first that differs.
    - ``check="digest"``: notice every change of a parameter between forward and backward, also
      one through ``.data.add_``, at the price of reading them all twice.
    - ``manager``, ``keep``: tensors for which ``keep(tensor)`` is true are held by the manager,
      in its tier, instead of recomputed. What is recomputed is the region up to the last tensor
      that is not kept, so keep from some point on, or all. A manager that moves tensors also
      moves the arguments, but for leaves and small ones. Without a manager they stay in place.
    - ``name``: what statistics, events and errors call this region.

    A keyword of ``fn`` with one of these names is passed through ``functools.partial``.

    Without gradients it is a plain call. Under ``torch.compile``, inside transforms of
    ``torch.func`` and while tensors are fake or traced, it is torch's own checkpoint.
    Thread-safe. Raises ``RecomputationError`` in backward if the region cannot be replayed as
    its forward ran; an exception ``fn`` raises in the replay comes through as itself.
    """
    _refuse(fn, use_reentrant)
    if context_fn is noop_context_fn:
        context_fn = None
    if torch.compiler.is_compiling() or is_traced():
        # Only what is not torch's default: its tracing takes no context_fn that is none.
        if context_fn is not None:
            kwargs["context_fn"] = context_fn
        return torch_checkpoint.checkpoint(
            fn,
            *args,
            use_reentrant=False,
            preserve_rng_state=preserve_rng_state,
            determinism_check="none" if determinism_check == "none" else "default",
            early_stop=early_stop,
            **kwargs,
        )
    options = RegionOptions(
        preserve_rng_state=preserve_rng_state,
        determinism_check=determinism_check,
        early_stop=_unless_set(torch_checkpoint._enable_checkpoint_early_stop, early_stop),  # noqa: SLF001
        modules=_several(modules),
        generators=_several(generators),
        check=check,
        keep=keep,
        name=name,
    )
    debug = _unless_set(torch_checkpoint._checkpoint_debug_enabled, debug)  # noqa: SLF001
    if debug and context_fn is not None:
        raise ValueError("debug=True is incompatible with non-default context_fn")
    manager = default_manager() if manager is None else _usable(manager, name or name_of(fn))
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    region = Region(fn, args, kwargs, options, manager)
    forward: Any = nullcontext()
    if debug:
        region.log = OperatorLog()
        context_fn = region.log.contexts
    if context_fn is not None:
        forward, region.context = context_fn()
    return region.forward(forward, args, kwargs)


def _refuse(fn: object, use_reentrant: bool | None) -> None:
    if not callable(fn):
        raise TypeError(
            f"fn must be a function, not {type(fn).__name__}: checkpoint(block, x), not "
            "checkpoint(block(x))"
        )
    if use_reentrant:
        raise ValueError(
            "holdfast.checkpoint is never reentrant, and its keywords are only supported when "
            "use_reentrant=False: leave use_reentrant out"
        )


def _unless_set(by_torch: bool | None, given: bool) -> bool:
    """What torch's own context managers for checkpoints say goes before what was given."""
    return given if by_torch is None else by_torch


def _usable(manager: object, name: str) -> CheckpointManager:
    given = _checks.instance("manager", manager, CheckpointManager)
    if given.closed:
        raise ClosedError(
            f"region {name!r} was given a CheckpointManager that is closed; checkpointed layers "
            "run as they are after undo() of what checkpoint_layers returned"
        )
    return given


_MODES = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)  # noqa: SLF001


def is_traced() -> bool:
    """Whether tensors are stand-ins now, which have no state to be brought back."""
    return torch._C._are_functorch_transforms_active() or any(  # noqa: SLF001
        torch._C._get_dispatch_mode(mode) is not None  # noqa: SLF001
        for mode in _MODES
    )


def _several(value: Any) -> tuple[Any, ...]:
    one = isinstance(value, torch.nn.Module) or not isinstance(value, Iterable)
    return (value,) if one else tuple(value)
