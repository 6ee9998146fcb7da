"""Turns an object store's failures into ours. Knows what stores answer, not what was asked.

obstore tells a status and the server's words only as text, so text is what is read here. Where
its exception class and the status disagree, the status wins: it calls every 409 "already exists".
"""

import contextlib
import re
from collections.abc import Iterator
from http import HTTPStatus

from holdfast.errors import (
    CheckpointError,
    NoSpaceError,
    ObjectNotFoundError,
    StorageError,
    TransientStorageError,
)

_STATUS = re.compile(r"status code: (\d{3})([^:\n]*)")
_CODE = re.compile(r"<Code>(\w+)</Code>|(?<!status )\bcode: \"?([A-Z]\w+)")
_MESSAGE = re.compile(r"<Message>([^<\n]+)")
_CAUSE = re.compile(r'message: "([^"]+)"')
_DEBUG = "\n\nDebug source:"

_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_TAKEN = {"BlobAlreadyExists"}
_FULL = {"XMinioStorageFull", "QuotaExceeded"}
_PASSING = {
    "ConditionalRequestConflict",
    "InternalError",
    "OperationAborted",
    "OperationTimedOut",
    "RequestTimeout",
    "ServerBusy",
    "ServiceUnavailable",
    "SlowDown",
}
_PASSING_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}
_REFUSED_STATUS = {401, 403}
_METADATA_HOSTS = ("169.254.169.254", "metadata.google.internal")


def status(error: BaseException) -> int | None:
    """The HTTP status the server answered with, if it answered."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def says_taken(error: BaseException) -> bool:
    """Whether a refused create found the key taken, rather than a moment of conflict."""
    return status(error) != HTTPStatus.CONFLICT or _code(error) in _TAKEN


def says_past_the_end(error: BaseException | None) -> bool:
    """Whether a refused read asked for bytes that the object does not have."""
    return error is not None and status(error) == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE


@contextlib.contextmanager
def translated(doing: str, key: str) -> Iterator[None]:
    """Raise what obstore raises as a ``StorageError`` about ``key``."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise translate(error, doing, key) from error


@contextlib.contextmanager
def end_unknown(key: str) -> Iterator[None]:
    """An upload whose last answer was lost: obstore then tries to remove it, finds nothing, and
    raises that instead."""
    try:
        yield
    except FileNotFoundError as error:
        if "performing DELETE" not in str(error):
            raise
        raise TransientStorageError(
            "the upload's last answer was lost; the object is whole or as it was before", path=key
        ) from error


def translate(error: Exception, doing: str, key: str) -> Exception:
    """What ``error`` says, as a ``StorageError``; a key no store takes is a ``ValueError``."""
    text = str(error)
    if isinstance(error, ValueError) and "parse path" in text:
        return ValueError(f"key cannot be stored in an object store: {key!r}")
    kind, advice = _judged(error, text)
    if kind is ObjectNotFoundError:
        return kind("there is no such object", path=key)
    return kind(f"could not {doing}: {_words(text)}{advice}", path=key)


def _judged(error: Exception, text: str) -> tuple[type[StorageError], str]:
    number, code = status(error), _code(error)
    if number is None and "HTTP error" in text:
        return _unanswered(text)
    kind, advice = StorageError, ""
    if code in _NO_BUCKET:
        advice = ". Create the bucket, or check its name"
    elif number == HTTPStatus.INSUFFICIENT_STORAGE or code in _FULL:
        kind = NoSpaceError
    elif number in _PASSING_STATUS or code in _PASSING:
        kind = TransientStorageError
    elif number in _REFUSED_STATUS:
        advice = ". Check the credentials and what they allow"
    elif isinstance(error, FileNotFoundError):
        kind = ObjectNotFoundError
    return kind, advice


def _unanswered(text: str) -> tuple[type[StorageError], str]:
    if any(host in text for host in _METADATA_HOSTS):
        return StorageError, (
            ". No credentials were given, none are in the environment, and this machine has no "
            "metadata service to ask for them"
        )
    if "builder error" in text:
        return StorageError, (
            ". Check the endpoint; one without TLS needs client_options={'allow_http': True}"
        )
    return TransientStorageError, ""


def _code(error: BaseException) -> str | None:
    found = _CODE.search(str(error))
    return found[1] or found[2] if found else None


def _words(text: str) -> str:
    """What a person needs of the pages obstore prints."""
    head, _, debug = text.partition(_DEBUG)
    if answered := _STATUS.search(head):
        said = _CODE.search(head), _MESSAGE.search(head)
        more = ": ".join(found[1] for found in said if found and found[1])
        number = f"the server answered {answered[1]}{answered[2]}".rstrip()
        return f"{number} ({more.strip()})" if more else number
    first = head.splitlines()[0] if head else "no reason given"
    first = re.sub(r" in [\d.]+[nµm]?s\b", "", first).removeprefix("Generic ")
    causes = _CAUSE.findall(debug) or (["timed out"] if "TimedOut" in debug else [])
    return f"{first} ({causes[-1]})" if causes else first
