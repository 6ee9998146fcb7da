"""What is seen while a run goes on: a live table in a terminal, else a line for every batch."""

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any, Protocol, TextIO

from _campaign import HOLDFAST
from _child import Child
from _ledger import Batch
from _results import MOST_TOLD
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
    """A table that is drawn again and again, below the lines of what was violated."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self._console = Console(file=stream)
        self._live = RichLive(console=self._console, refresh_per_second=4, transient=True)
        self._live.start()
        self._violated: dict[tuple[str, str], int] = {}

    def ended(self, batch: Batch, again: str) -> None:
        row = batch.campaign, batch.subject
        self._violated[row] = self._violated.get(row, 0) + batch.violated
        if (batch.subject == HOLDFAST and batch.violated) or batch.trouble:
            for line in told(batch, again):
                self._console.print(line, style="red", markup=False, highlight=False)

    def show(self, everybody: Sequence[Standing], running: Sequence[Child], left_s: float) -> None:
        self._live.update(self._table(everybody, running, left_s))

    def close(self) -> None:
        self._live.stop()

    def _table(self, everybody: Sequence[Standing], running: Sequence[Child], left_s: float) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        now = {(child.campaign.name, child.subject): child.elapsed_s for child in running}
        table = Table(title=f"{duration(max(left_s, 0))} left", title_justify="left", box=None)
        for head, side in (("campaign", "left"), ("subject", "left"), ("tried", "right")):
            table.add_column(head, justify=side)  # type: ignore[arg-type]
        table.add_column("of target", width=24)
        table.add_column("", justify="right")
        table.add_column("violations", justify="right")
        table.add_column("now")
        for each in everybody:
            row = each.campaign.name, each.subject
            share = 1.0 if each.has_ended else min(each.cases / max(each.wanted, 1), 1.0)
            broken = self._violated.get(row, 0)
            table.add_row(
                each.campaign.name if each.subject == HOLDFAST else "",
                each.subject,
                number(each.cases),
                ProgressBar(total=1.0, completed=share, width=24),
                percent(share),
                number(broken) if each.batches else "",
                f"{now[row]:.0f} s" if row in now else "",
                style="bold"
                if row in now
                else "red"
                if broken and each.subject == HOLDFAST
                else "",
            )
        return table
