"""``holdfast.save`` and ``holdfast.load``: the common case in one line.

The same engine as ``DistributedCheckpoint``, made for one call. torch is imported when it is
needed: not for reading as NumPy.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.catalog import Catalog
from holdfast.catalog._stores import store_of
from holdfast.storage import open_storage
from holdfast.storage._roots import folder_of

if TYPE_CHECKING:
    import torch

    from holdfast.distributed import DistributedCheckpoint


def save(state: object, path: str | os.PathLike[str], **options: Any) -> str:
    """Save any state as the checkpoint ``path``, that is ``<root>/<prefix>``; returns the prefix.

    ``state`` is a tensor, a module, an optimizer, anything with ``state_dict``, or dicts and lists
    of such things and plain values. ``options`` are those of ``SaveOptions``; random number
    generators are saved only with ``include_rng_state=True``. In a torch.distributed job all ranks
    call this. Durable on return; raises as ``DistributedCheckpoint.save`` does.
    """
    from holdfast.distributed import SaveOptions  # noqa: PLC0415 -- torch is an optional dependency
    from holdfast.distributed._shortcuts import save_tree  # noqa: PLC0415

    root, prefix = split_path(path)
    options.setdefault("include_rng_state", False)
    chosen = SaveOptions(checkpoint_prefix=prefix, **_options("save", options))
    with _checkpointer(root) as checkpointer:
        return save_tree(checkpointer, state, chosen)


def load(
    path: str | os.PathLike[str],
    into: Any = None,
    map_location: "torch.device | str | None" = None,
    *,
    as_numpy: bool = False,
    **options: Any,
) -> Any:
    """The state that was saved as ``path``.

    With ``into``, that state is filled and returned: tensors in place, statefuls through
    ``load_state_dict``, plain values of dicts replaced. All of it, or after an error none. Without,
    new tensors are made, on the device ``map_location``; modules come as dicts of tensors. With
    ``as_numpy`` tensors come as NumPy arrays, and no torch is needed. ``options`` are those of
    ``LoadOptions``. In a torch.distributed job all ranks call this, unless ``as_numpy``.
    """
    root, prefix = _place(path)
    if as_numpy:
        if into is not None or map_location is not None or options.keys() - {"include"}:
            raise ValueError("as_numpy goes with no other option than include")
        return Catalog(root).read(prefix, options.get("include"))
    from holdfast.distributed import LoadOptions  # noqa: PLC0415 -- as above
    from holdfast.distributed._shortcuts import load_tree  # noqa: PLC0415

    chosen = LoadOptions(checkpoint_prefix=prefix, **_options("load", options))
    with _checkpointer(root) as checkpointer:
        return load_tree(checkpointer, into, map_location, chosen)


def _place(path: str | os.PathLike[str]) -> tuple[str, str]:
    """The root and the prefix of a checkpoint that is there. On a disk its folder may be a part of
    a store further up."""
    root, prefix = split_path(path)
    scheme, is_url, _ = root.partition("://")
    if (is_url and scheme.lower() != "file") or prefix in {".", ".."}:
        return root, prefix
    folder = folder_of(open_storage(root))
    if folder is None:
        return root, prefix
    store = store_of(folder / prefix)
    name = (folder / prefix).relative_to(store)
    return (root, prefix) if store == folder else (str(store), name.as_posix())


def split_path(path: str | os.PathLike[str]) -> tuple[str, str]:
    """The root and the prefix of ``<root>/<prefix>``, a path or a URL."""
    text = os.fspath(path)
    if not isinstance(text, str):
        raise ValueError(f"path must be a text or a path, not {path!r}")  # noqa: TRY004 -- as others
    root, slash, prefix = text.rstrip("/").rpartition("/")
    is_scheme = prefix.endswith(":") and "://" in text
    if not prefix or is_scheme or root.endswith(":/") or (slash and not root):
        raise ValueError(
            "path must be <root>/<prefix>, as 'runs/a/step_100' or 's3://bucket/run/step_100', not "
            f"{path!r}"
        )
    return root or ".", prefix


def _options(verb: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    if "checkpoint_prefix" in options:
        raise TypeError(f"holdfast.{verb} takes the prefix from path, not as checkpoint_prefix")
    return options


@contextlib.contextmanager
def _checkpointer(root: str) -> "Iterator[DistributedCheckpoint]":
    from holdfast.distributed import CheckpointOptions, DistributedCheckpoint  # noqa: PLC0415

    with DistributedCheckpoint.create(options=CheckpointOptions(storage=root)) as checkpointer:
        yield checkpointer
