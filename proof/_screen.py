"""What is seen while a run goes on: a live table in a terminal, else a line for every batch."""

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any, Protocol, TextIO

from _campaign import HOLDFAST
from _child import Child
from _found import MOST_TOLD
from _ledger import Batch
from _turns import Standing
from _wording import duration, first_line, number, percent


class Screen(Protocol):
    """``show`` is called often, ``ended`` once for each batch."""

    def ended(self, batch: Batch, again: str) -> None: ...
    def show(
        self, everybody: Sequence[Standing], running: Sequence[Child], left_s: float
    ) -> None: ...
    def close(self) -> None: ...


def screen(stream: TextIO = sys.stderr) -> Screen:
    """The best that ``stream`` can do."""
    if stream.isatty() and importlib.util.find_spec("rich") is not None:
        return Live(stream)
    return Plain(stream)


def told(batch: Batch, again: str) -> list[str]:
    """What there is to say of a batch: one line, and one for each violation or trouble."""
    found = f"{number(batch.cases)} cases, {number(batch.violated)} violations"
    lines = [f"{batch.campaign} {batch.subject} #{batch.number}: {found}, {batch.seconds:.1f} s"]
    most = MOST_TOLD if batch.subject == HOLDFAST else 1
    lines += [f"  violation: {first_line(words)}" for words in batch.violations[:most]]
    if batch.trouble:
        lines.append(f"  {'violation' if batch.is_subjects else 'broken'}: {batch.trouble}")
    return lines if len(lines) == 1 else [*lines, f"    {again}"]


class Plain:
    """Lines, for logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def ended(self, batch: Batch, again: str) -> None:
        print("\n".join(told(batch, again)), file=self._stream, flush=True)

    def show(
        self, everybody: Sequence[Standing], running: Sequence[Child], left_s: float
    ) -> None: ...

    def close(self) -> None: ...


class Live:
    """A table that is drawn again and again, a line for each campaign, below what went wrong."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self._console = Console(file=stream)
        self._live = RichLive(console=self._console, refresh_per_second=4, transient=True)
        self._live.start()

    def ended(self, batch: Batch, again: str) -> None:
        if (batch.subject == HOLDFAST and batch.violated) or batch.trouble:
            for line in told(batch, again):
                self._console.print(line, style="red", markup=False, highlight=False)

    def show(self, everybody: Sequence[Standing], running: Sequence[Child], left_s: float) -> None:
        self._live.update(_table(everybody, running, left_s))

    def close(self) -> None:
        self._live.stop()


def _table(everybody: Sequence[Standing], running: Sequence[Child], left_s: float) -> Any:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    now = {child.campaign.name: f"{child.subject} {child.elapsed_s:.0f} s" for child in running}
    table = Table(title=f"{duration(max(left_s, 0))} left", title_justify="left", box=None)
    table.add_column("campaign", no_wrap=True)
    table.add_column("tried", justify="right", no_wrap=True)
    table.add_column("", width=16)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("violations", justify="right", no_wrap=True)
    table.add_column("now", no_wrap=True)
    table.add_column("violations of peers")
    for ours in (each for each in everybody if each.subject == HOLDFAST):
        name = ours.campaign.name
        share = 1.0 if ours.has_ended else min(ours.cases / max(ours.wanted, 1), 1.0)
        bar = ProgressBar(
            total=1.0, completed=share, width=16, complete_style="cyan", finished_style="green"
        )
        table.add_row(
            Text(name, style="bold" if name in now else ""),
            number(ours.cases),
            bar,
            percent(share),
            Text(number(ours.violated), style="bold red" if ours.violated else "green"),
            now.get(name, ""),
            Text(_peers([each for each in everybody if each.campaign.name == name]), style="dim"),
        )
    return table


def _peers(rows: Sequence[Standing]) -> str:
    return ", ".join(
        f"{each.subject} {number(each.violated)} of {number(each.cases)}"
        for each in rows
        if each.subject != HOLDFAST and each.batches
    )
