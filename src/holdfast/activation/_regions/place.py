"""Where in the user's code something happens: the module at work and the line. Read off the
stack, and only when somebody needs to be told."""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from holdfast.activation._regions.reach import Reach

_NOT_THE_USERS = tuple(
    f"{folder}/" for folder in (Path(torch.__file__).parent, Path(__file__).parent.parent)
)


class Place(NamedTuple):
    module: Any
    line: str

    def told(self, reached: Reach) -> str:
        module = "no module" if self.module is None else reached.name_of_module(self.module)
        return f"in {module}, {self.line or 'no line of Python'}"


def here() -> Place:
    """The innermost module on the stack, and the innermost line of neither torch nor us."""
    module = None
    line = ""
    frame: Any = sys._getframe(1)  # noqa: SLF001
    while frame is not None and (module is None or not line):
        owner = frame.f_locals.get("self")
        if module is None and isinstance(owner, torch.nn.Module):
            module = owner
        line = line or _line_of(frame)
        frame = frame.f_back
    return Place(module, line)


def line() -> str:
    """The innermost line of neither torch nor us."""
    frame: Any = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        found = _line_of(frame)
        if found:
            return found
        frame = frame.f_back
    return ""


def _line_of(frame: Any) -> str:
    file = frame.f_code.co_filename
    return "" if file.startswith(_NOT_THE_USERS) else f"{file}:{frame.f_lineno}"


def stack_level() -> int:
    """The ``stacklevel`` of a warning raised by the caller that points at the user's line."""
    level = 1
    frame: Any = sys._getframe(1)  # noqa: SLF001
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
        level += 1
    return level
