"""The operators a region ran, in its forward and in its replay, side by side. Knows their names,
shapes and lines; costs as much as it knows, so it is asked for by ``debug=True``."""

import itertools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.activation._regions.place import line

_AROUND = 3  # operators told before the first that differs


class OperatorLog:
    """What ran in the forward, and in the newest replay."""

    def __init__(self) -> None:
        self._forward: list[tuple[str, str]] = []
        self._replay: list[tuple[str, str]] = []

    def contexts(self) -> tuple[Any, Any]:
        """To run the forward in, and the replay."""
        return _Recorder(self._forward), _Recorder(self._replay)

    def told(self) -> str:
        """The two logs from a little before their first difference."""
        nothing = ("(nothing)", "")
        pairs = list(itertools.zip_longest(self._forward, self._replay, fillvalue=nothing))
        first = next((i for i, (was, now) in enumerate(pairs) if was[0] != now[0]), len(pairs))
        shown = [
            f"  {'  ' if was[0] == now[0] else '->'} {i + 1}: forward {was[0]} {was[1]} | "
            f"replay {now[0]} {now[1]}"
            for i, (was, now) in enumerate(pairs)
            if first - _AROUND <= i <= first + _AROUND
        ]
        return (
            f"\nYou are seeing this error because you passed `debug=True` to checkpoint: "
            f"{len(self._forward)} operators ran in the forward, {len(self._replay)} in the replay"
            + (" until it stopped" if len(self._replay) < len(self._forward) else "")
            + ".\n"
            + "\n".join(shown)
        )


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, log: list[tuple[str, str]]) -> None:
        super().__init__()
        self._log = log

    def __enter__(self) -> Any:
        self._log.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is not torch.ops.aten.detach.default:  # our own doing, and different each time
            shapes = [
                str(tuple(item.shape))
                for item in torch.utils._pytree.tree_leaves((args, kwargs))  # noqa: SLF001
                if isinstance(item, torch.Tensor)
            ]
            self._log.append((f"{func}({', '.join(shapes)})", f"[{line()}]"))
        return func(*args, **(kwargs or {}))
