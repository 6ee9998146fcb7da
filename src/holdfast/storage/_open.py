"""Finds the storage a URL means. Knows schemes and settings; reads no environment of its own."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from holdfast import _checks
from holdfast.contracts import Storage

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_KNOWN = "s3, gs, az, file, memory"
_OBJECT_SCHEMES = {"s3", "gs", "az"}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SLASH_MISSING = re.compile(r"(s3|gs|az|file|memory):(?!//)")
_WAITS = {"connect_timeout": "10s", "timeout": "120s"}
_NOT_SETTINGS = ("client_options", "credential_provider")
_ONCE = {"max_retries": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """Where a storage is and how to reach it, as one value: what ``open_storage`` takes.

    ``config`` is not printed: it may hold secrets.
    """

    url: str
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)


def open_storage(where: str | os.PathLike[str] | StorageOptions, **config: Any) -> Storage:
    """The storage at ``where``: a folder, or a URL. Nothing is contacted or made yet.

    | ``where`` | storage |
    | --- | --- |
    | ``"runs/a"``, a ``Path``, ``"file:///runs/a"`` | ``LocalStorage`` in that folder |
    | ``"s3://bucket/run"`` | ``ObjectStorage`` on S3, or what speaks it |
    | ``"gs://bucket/run"`` | ``ObjectStorage`` on Google Cloud Storage |
    | ``"az://container/run"`` | ``ObjectStorage`` on Azure Blob Storage |
    | ``"memory://"`` | a new ``MemoryStorage``, each time |

    ``config`` goes to obstore's store (``endpoint=``, ``region=``, ``access_key_id=``,
    ``credential_provider=``, ``client_options=``); it wins over that of ``StorageOptions``.
    obstore also reads the usual variables of the environment (``AWS_*``, ``GOOGLE_*``,
    ``AZURE_*``). What cannot be a storage is a ``ValueError``.

    >>> open_storage("memory://").create("a", b"b").size_bytes
    1
    """
    if isinstance(where, StorageOptions):
        return open_storage(where.url, **{**where.config, **config})
    given: object = where
    if not isinstance(given, str | os.PathLike):
        raise TypeError(f"where must be a path, a URL or StorageOptions, not {given!r}")
    text = os.fsdecode(given)
    scheme = _SCHEME.match(text) if isinstance(where, str) else None
    if scheme is None:
        return _local(text, config, typed=isinstance(where, str))
    name, rest = scheme[1].lower(), text[scheme.end() :]
    if name in _OBJECT_SCHEMES:
        return _object(name, rest, config)
    if name == "file":
        return _local(_file_path(text), config)
    if name == "memory":
        return _memory(rest, config)
    raise ValueError(f"no storage is known for {name}:// (in {text!r}); known are {_KNOWN}")


def _local(path: str, config: Mapping[str, Any], *, typed: bool = False) -> Storage:
    from holdfast.storage._local import LocalStorage  # noqa: PLC0415

    if not path:
        raise ValueError("where must be a path or a URL, not ''")
    if typed and (slip := _SLASH_MISSING.match(path)):
        raise ValueError(
            f"{path!r} lacks the slashes of a URL; write {slip[1]}://, or ./{path} for a folder "
            "of that name"
        )
    _refuse_settings("a folder", config)
    return LocalStorage(Path(path).expanduser() if typed else path)


def _file_path(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in {"", "localhost"} or not parts.path or parts.query or parts.fragment:
        raise ValueError(
            f"{url!r} must have the absolute path of a folder on this machine, "
            "as file:///runs/a has"
        )
    return str(Path(unquote(parts.path)))


def _memory(rest: str, config: Mapping[str, Any]) -> Storage:
    from holdfast.storage._memory import MemoryStorage  # noqa: PLC0415

    if rest:
        raise ValueError(
            f"memory storages have no names, so 'memory://{rest}' cannot be found again; open "
            "'memory://' once and pass the storage on"
        )
    _refuse_settings("memory", config)
    return MemoryStorage()


def _refuse_settings(what: str, config: Mapping[str, Any]) -> None:
    if config:
        raise ValueError(f"a storage in {what} takes no settings, not {', '.join(config)}")


def _object(scheme: str, rest: str, config: Mapping[str, Any]) -> Storage:
    from holdfast.storage._object import ObjectStorage  # noqa: PLC0415

    bucket, _, prefix = rest.partition("/")
    kind = "container" if scheme == "az" else "bucket"
    if not bucket:
        raise ValueError(f"'{scheme}://{rest}' names no {kind}; write {scheme}://{kind}/run")
    if "@" in bucket or ":" in bucket:
        raise ValueError(
            f"a {scheme}:// URL names a {kind} and nothing before it; pass credentials and "
            "endpoint as settings"
        )
    prefix = prefix.rstrip("/")
    if prefix:
        _checks.key(f"the path of a {scheme}:// URL", prefix)
    url = f"{scheme}://{bucket}/{prefix}".rstrip("/")
    return ObjectStorage(_store(scheme, bucket, config), prefix=prefix, url=url)


def _store(scheme: str, bucket: str, config: Mapping[str, Any]) -> "ObjectStore":
    """An obstore store that tries once, with bounded waits."""
    from obstore.exceptions import BaseError  # noqa: PLC0415
    from obstore.store import AzureStore, GCSStore, S3Store  # noqa: PLC0415

    options: dict[str, Any] = {"retry_config": _ONCE}
    options |= {name: config[name] for name in _NOT_SETTINGS if name in config}
    # As settings, not as client_options: those would hide what the environment says.
    defaults: dict[str, Any] = dict(_WAITS)
    if any(str(config.get(name, "")).startswith("http://") for name in ("endpoint", "base_url")):
        defaults["allow_http"] = True
    chosen = _checks.instance("client_options", options.get("client_options", {}), dict)
    settings = {name: value for name, value in defaults.items() if name not in chosen}
    settings |= {name: value for name, value in config.items() if name not in _NOT_SETTINGS}
    make: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[scheme]
    try:
        return make(bucket, config=settings, **options)  # type: ignore[no-any-return]
    except (BaseError, ValueError, TypeError) as error:
        raise ValueError(f"{scheme}://{bucket} cannot be opened: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    words = str(error).partition("\n\nDebug source:")[0].strip()
    if found := re.search(r"key: '(\w+)' is not valid|Invalid key: (\w+)", words):
        return f"there is no setting named {found[1] or found[2]!r}; see docs/storage.md"
    if "Account must be specified" in words:
        return "the storage account is missing; pass account_name="
    return words
