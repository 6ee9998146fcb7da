"""A bar for work that is counted in bytes, and a line for work that is not. Shown on a terminal
only."""

import contextlib
import sys
from collections.abc import Callable, Iterator

Tick = Callable[[int], None]


@contextlib.contextmanager
def bar(title: str, total_bytes: int, done_bytes: int = 0) -> Iterator[Tick]:
    """What the block calls with each number of bytes, from any thread. The bar is on stderr and
    gone when the block ends."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console  # noqa: PLC0415 -- an optional dependency, and not for pipes
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total_bytes, completed=done_bytes)
        yield lambda nbytes: progress.advance(task, nbytes)


@contextlib.contextmanager
def status(title: str) -> Iterator[Callable[[str], None]]:
    """What the block calls to say what it is at. The line is on stderr and gone at the end."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console  # noqa: PLC0415 -- as above
    from rich.text import Text  # noqa: PLC0415

    with Console(stderr=True).status(Text(title)) as shown:
        yield lambda what: shown.update(Text(what))
