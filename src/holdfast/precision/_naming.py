"""What the parameters of an optimizer are called. Knows modules and groups, and no dtype."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of DDP and ``torch.compile``, which put their own word before names."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # noqa: SLF001 -- torch has no other word for it
        else:
            return model


def names_of(
    groups: Sequence[dict[str, Any]],
    model: nn.Module | None,
    *,
    taken: Sequence[str] = (),
    first: int = 0,
) -> list[list[str]]:
    """The name of each parameter of each group: that of the group's ``param_names``, else the
    model's, else ``group<i>.<j>``, counting from ``first``. A tied parameter has the first of its
    names. Raises ``ValueError`` if two have the same, or one that is ``taken``."""
    called = (
        {} if model is None else {id(p): name for name, p in unwrapped(model).named_parameters()}
    )
    found: list[list[str]] = []
    seen = set(taken)
    for index, group in enumerate(groups, start=first):
        own = group.get("param_names")
        found.append([])
        for position, parameter in enumerate(group["params"]):
            name = own[position] if own else called.get(id(parameter), f"group{index}.{position}")
            if name in seen:
                raise ValueError(
                    f"two parameters of the optimizer are called {name!r}; give each a name of its "
                    "own, or give none (parameters() instead of named_parameters())"
                )
            seen.add(name)
            found[-1].append(name)
    return found
