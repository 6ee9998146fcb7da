"""Tags of torch's small values: dtype, device and Size, and what stands for them without torch.

Knows their names. Imports torch only to rebuild a value, and only where it is installed; to
write one it asks whether torch is loaded already, since otherwise the value cannot be torch's.
Tensors are not values: they are leaves.
"""

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from holdfast.format._value_tags import (
    Malformed,
    Unstorable,
    Unsupported,
    items_of,
    kind_of,
    tagged,
    text_of,
    whole,
)

_WRITTEN = {
    "dtype": re.compile(r"[a-z][a-z0-9_]{0,63}"),
    "device": re.compile(r"[a-z][a-z0-9_]{0,63}(?::(?:0|[1-9][0-9]{0,2}))?"),
    "Size": re.compile(r"(?:-?[0-9]{1,19}(?:,-?[0-9]{1,19}){0,63})?"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchValue:
    """A torch dtype, device or Size on a machine without torch: ``kind`` and how it is written.

    ``TorchValue(kind="dtype", text="float32")``, ``kind="device", text="cuda:0"``,
    ``kind="Size", text="2,3"``. It is stored as the value it stands for.
    """

    kind: Literal["dtype", "device", "Size"]
    text: str

    def __post_init__(self) -> None:
        if self.kind not in _WRITTEN:
            raise ValueError(f"kind must be 'dtype', 'device' or 'Size', not {self.kind!r}")
        if not _WRITTEN[self.kind].fullmatch(self.text):
            raise ValueError(f"text must be a torch {self.kind}, not {self.text!r}")


def encode_torch(value: object) -> object | None:
    """The tagged value, or ``None`` if ``value`` is not one of torch's small values."""
    written = value if type(value) is TorchValue else _written(value)
    if written is None:
        return None
    if written.kind == "Size":
        sizes = [int(size) for size in written.text.split(",")] if written.text else []
        return tagged("torch.Size", sizes)
    return tagged(f"torch.{written.kind}", written.text)


def _written(value: Any) -> TorchValue | None:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    try:
        if type(value) is torch.dtype:
            return TorchValue(kind="dtype", text=str(value).removeprefix("torch."))
        if type(value) is torch.device:
            return TorchValue(kind="device", text=str(value))
        if type(value) is torch.Size:
            return TorchValue(kind="Size", text=",".join(map(str, value)))
    except ValueError:
        raise Unstorable(
            f"{kind_of(value)} written {str(value)!r}",
            "store it as text",
        ) from None
    return None


def _decode_dtype(payload: object) -> object:
    text = _checked("dtype", text_of(payload))
    torch = _torch()
    if torch is None:
        return TorchValue(kind="dtype", text=text)
    dtype = getattr(torch, text, None)
    if type(dtype) is not torch.dtype:
        raise Unsupported(f"torch.{text}, which the installed torch {torch.__version__} lacks")
    return dtype


def _decode_device(payload: object) -> object:
    text = _checked("device", text_of(payload))
    torch = _torch()
    if torch is None:
        return TorchValue(kind="device", text=text)
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if str(device) != text:
        raise Unsupported(
            f"the device {text!r}, which the installed torch {torch.__version__} does not know"
        )
    return device


def _decode_size(payload: object) -> object:
    sizes = [whole(size) for size in items_of(payload)]
    text = _checked("Size", ",".join(map(str, sizes)))
    torch = _torch()
    return TorchValue(kind="Size", text=text) if torch is None else torch.Size(sizes)


def _checked(kind: str, text: str) -> str:
    if not _WRITTEN[kind].fullmatch(text):
        raise Malformed(f"a torch {kind} is not written as one")
    return text


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None


DECODE: Final[Mapping[str, Callable[[object], object]]] = {
    "torch.dtype": _decode_dtype,
    "torch.device": _decode_device,
    "torch.Size": _decode_size,
}
