"""What fits holdfast into other libraries, one module for each, imported only when it is used."""

import importlib
from typing import Any

__all__ = ["dcp", "huggingface", "lightning"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
