"""The demo on a terminal: scenes, a bar while one goes on, and what it has shown. In a pipe it is
plain lines. Knows words and numbers, not what they are of."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.cli._text import clean, put, terminal

_INDENT: Final = "    "


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a scene that goes on can show."""

    say: Callable[[str], None]
    """A line that stays."""
    step: Callable[[int, float], None]
    """The step that the training has come to, and its loss."""
    wait: Callable[[str], None]
    """What is being waited for."""


@dataclass(slots=True, kw_only=True)
class Screen:
    """Where the demo is shown. ``every`` so many steps a pipe gets a line."""

    steps: int
    every: int
    _number: int = field(default=0, init=False)

    @contextlib.contextmanager
    def scene(self, title: str) -> Iterator[Scene]:
        """A scene, which has its title on the screen and what the block shows below that."""
        self._number += 1
        began = time.monotonic()
        showing = self._drawn if _can_draw() else self._written
        with showing(f"{self._number}. {title}") as scene:
            yield scene
            scene.say(f"({time.monotonic() - began:.0f} s)")

    @contextlib.contextmanager
    def _written(self, title: str) -> Iterator[Scene]:
        def step(number: int, loss: float) -> None:
            if number % self.every == 0:
                put(f"{_INDENT}step {number} of {self.steps}: loss {loss:.3f}")

        put(f"\n{title}")
        yield Scene(say=lambda text: put(f"{_INDENT}{clean(text)}"), step=step, wait=lambda _: None)

    @contextlib.contextmanager
    def _drawn(self, title: str) -> Iterator[Scene]:
        from rich.console import Console  # noqa: PLC0415 -- an optional dependency
        from rich.padding import Padding  # noqa: PLC0415
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        console = Console(highlight=False)
        console.print()
        console.print(Text(title, style="bold"))
        columns: Any = (
            TextColumn("   "),
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console, transient=True) as bars:
            task = bars.add_task("", total=self.steps)

            def step(number: int, loss: float) -> None:
                told = f"step {number:>3} of {self.steps}, loss {loss:.3f}"
                bars.update(task, completed=number, description=told)

            yield Scene(
                say=lambda text: bars.console.print(
                    Padding(Text(clean(text), style=_style(text)), (0, 0, 0, len(_INDENT)))
                ),
                step=step,
                wait=lambda what: bars.update(task, description=what),
            )


def _can_draw() -> bool:
    if not terminal():
        return False
    from rich.console import Console  # noqa: PLC0415 -- an optional dependency

    return not Console().is_dumb_terminal  # where every frame would be a line


def _style(text: str) -> str:
    return "dim" if text.startswith("(") else ""
