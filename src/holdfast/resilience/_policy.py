"""Which errors are worth another attempt, and how long to wait before it. Decides, never acts.

The waiting is Brooker's "full jitter" (AWS Architecture Blog, 2015): uniform between nothing and
an exponentially growing bound, so that ranks that failed together do not come back together.
"""

import errno
import io
import random
import socket
import ssl
from dataclasses import dataclass

from holdfast import _checks
from holdfast.errors import CheckpointError
from holdfast.resilience._operation import is_cancellation


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When and how often to try again. Immutable; impossible values raise ``ValueError``.

    ``max_retries`` counts what comes after the first attempt: 3 means at most 4 calls.
    Before the n-th retry there is a delay of at most ``initial_delay_s * backoff_factor**(n-1)``,
    never above ``max_delay_s``. ``jitter`` is the share of it that is random: with 1 it is
    anything from nothing to the bound, with 0 always the bound.
    ``deadline_s`` counts from the start of the first attempt: no attempt starts after it and no
    delay crosses it. An attempt already running is not interrupted.
    ``retryable`` are the classes worth retrying; ``is_retryable`` says what is excepted.
    """

    max_retries: int = 3
    initial_delay_s: float = 1.0
    max_delay_s: float = 30.0
    backoff_factor: float = 2.0
    retryable: tuple[type[Exception], ...] = (OSError, TimeoutError)
    jitter: float = 1.0
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        jitter = float(self.jitter) if isinstance(self.jitter, bool) else self.jitter
        checked = {
            "max_retries": _checks.count("max_retries", self.max_retries, least=0),
            "initial_delay_s": _checks.seconds("initial_delay_s", self.initial_delay_s, zero=True),
            "max_delay_s": _checks.seconds("max_delay_s", self.max_delay_s, zero=True),
            "backoff_factor": _checks.between("backoff_factor", self.backoff_factor, 1),
            "retryable": _checks.exception_classes("retryable", self.retryable),
            "jitter": _checks.between("jitter", jitter, 0, 1),
        }
        if self.deadline_s is not None:
            checked["deadline_s"] = _checks.seconds("deadline_s", self.deadline_s)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.initial_delay_s > self.max_delay_s:
            raise ValueError(
                f"initial_delay_s must not exceed max_delay_s, but is {self.initial_delay_s!r} "
                f"with max_delay_s {self.max_delay_s!r}"
            )

    def backoff_s(self, retry: int) -> float:
        """The longest delay before the ``retry``-th retry, the first being 1."""
        _checks.count("retry", retry, least=1)
        try:
            bound = self.initial_delay_s * self.backoff_factor ** (retry - 1)
        except OverflowError:
            bound = self.max_delay_s if self.initial_delay_s else 0.0
        return min(bound, self.max_delay_s)

    def delay_s(self, retry: int, rng: random.Random) -> float:
        """The delay before the ``retry``-th retry, its random share drawn from ``rng``."""
        bound = self.backoff_s(retry)
        return bound - bound * self.jitter * rng.random()

    def is_retryable(self, error: BaseException) -> bool:
        """Whether ``error`` may be gone at the next attempt.

        Never a cancellation. An error of holdfast exactly if its class is ``transient``,
        whatever ``retryable`` lists. Never an ``OSError`` that will still be there (disk full,
        no permission, no such file), unless its class is listed by name: ``FileNotFoundError``
        in ``retryable`` retries missing files, ``OSError`` does not.
        """
        if is_cancellation(error):
            return False
        if isinstance(error, CheckpointError):
            return error.transient
        if isinstance(error, OSError) and _is_permanent(error):
            named = tuple(cls for cls in self.retryable if issubclass(cls, _PERMANENT_CLASSES))
            return isinstance(error, named)
        return isinstance(error, self.retryable)


# EMFILE, ENFILE, EBUSY, ESTALE and EIO are not here: each may pass as other work ends.
_PERMANENT_ERRNOS = frozenset(
    {
        errno.EACCES,
        errno.EBADF,
        errno.EDQUOT,
        errno.EEXIST,
        errno.EFBIG,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENODEV,
        errno.ENOENT,
        errno.ENOSPC,
        errno.ENOSYS,
        errno.ENOTDIR,
        errno.ENOTEMPTY,
        errno.ENOTSUP,
        errno.ENXIO,
        errno.EOPNOTSUPP,
        errno.EPERM,
        errno.EROFS,
        errno.ESPIPE,
        errno.EXDEV,
    }
)

# By class too: FileNotFoundError("no such shard") has no errno.
_PERMANENT_CLASSES = (
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    io.UnsupportedOperation,
    ssl.SSLCertVerificationError,
)

# Their errno counts something else: a broken TLS stream has 1, which would read as EPERM.
_FOREIGN_ERRNO = (socket.gaierror, socket.herror, ssl.SSLError)


def _is_permanent(error: OSError) -> bool:
    if isinstance(error, _PERMANENT_CLASSES):
        return True
    return error.errno in _PERMANENT_ERRNOS and not isinstance(error, _FOREIGN_ERRNO)
