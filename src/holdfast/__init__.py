"""Keeps PyTorch training runs safe and small.

``import holdfast`` loads the errors and nothing else: torch and everything that needs it are
imported when first used.
"""

import importlib
import logging
from types import ModuleType

from holdfast.errors import *  # noqa: F403 -- the errors are public here, all of them
from holdfast.errors import __all__ as _errors

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless asked to speak

_rooms = (
    *("catalog", "contracts", "coordination", "errors", "format", "reshard", "resilience"),
    *("storage", "testing"),
)

__all__ = [*_errors, *_rooms, "__version__"]  # noqa: PLE0604 -- strings, though ruff cannot see it


def __getattr__(name: str) -> ModuleType:
    if name in _rooms:
        return importlib.import_module(f"holdfast.{name}")
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
