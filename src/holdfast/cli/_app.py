"""The verbs by name, and what becomes of their errors. Loads a verb's module when it runs.

``holdfast --help`` has to answer at once, so nothing here imports NumPy or a storage.
"""

import contextlib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

import holdfast
from holdfast.cli._exits import Exit, exit_of
from holdfast.cli._text import flush, say
from holdfast.errors import CheckpointError

VERBS: Final = {
    "ls": "List the checkpoints of a store, the newest first.",
    "show": "Show what is in a checkpoint: tensors, metadata, files.",
    "verify": "Read a checkpoint and compare every byte with its digest.",
    "diff": "Compare two checkpoints, tensor by tensor.",
    "cat": "Show the values of a tensor, or of a slice of one.",
    "convert": "Convert from and to torch.save, DCP, safetensors, Hugging Face.",
    "reshard": "Rewrite a checkpoint as the files of another number of ranks.",
    "rm": "Delete checkpoints.",
    "prune": "Delete checkpoints that no rule keeps; a dry run without --yes.",
    "gc": "Remove leftovers of saves; a dry run without --yes.",
    "doctor": "Find out what this machine and a storage can do.",
    "bench": "Measure what checkpoints cost on a storage.",
    "plan": "Find out how a training step fits a byte budget; runs your code.",
    "demo": "Train, kill, damage and resume a small model; nothing is lost.",
}
"""Every verb and its one line of help. The module of each is ``_<verb>.py``, with ``run``."""


class Verbs(TyperGroup):
    """All verbs as their one line; the one that is called as itself."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name, help=line) for name, line in VERBS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else _loaded(name), rest

    def make_context(self, *args: Any, **extra: Any) -> Any:
        with _ending_quietly():  # here it prints --help and --version
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        with _ending_quietly():
            code = super().invoke(ctx)
            flush()
        return code


@contextlib.contextmanager
def _ending_quietly() -> Iterator[None]:
    """A reader that is gone and Ctrl-C end it with their own exit codes."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(Exit.CLOSED_PIPE) from None
    except KeyboardInterrupt as error:
        say(str(error) or "interrupted")
        raise typer.Exit(Exit.INTERRUPTED) from None


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code. Whatever goes wrong is one line on stderr, and
    with ``--debug``, anywhere among the arguments, a traceback as well."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    given, debug = _without_debug(arguments)
    try:
        code = _command().main(given or ["--help"], prog_name="holdfast", standalone_mode=False)
    except typer.TyperException as error:
        say(f"{error.format_message()} (holdfast {_verb(given)}--help says more)")
        code = error.exit_code
    except typer.Abort:
        say("nothing was done")
        code = Exit.FOUND
    except CheckpointError as error:
        code = _told(error, str(error), exit_of(error), debug=debug)
    except OSError as error:
        code = _told(error, _os_words(error), Exit.STORAGE, debug=debug)
    except Exception as error:  # noqa: BLE001 -- a traceback is for those who ask for one
        what = f"an error in holdfast itself: {type(error).__name__}: {error}"
        code = _told(error, f"{what} (--debug says where)", Exit.INTERNAL, debug=debug)
    return int(code or 0)


def _os_words(error: OSError) -> str:
    """What the system says, as our own errors say it: without its number."""
    what = (error.strerror or str(error)).lower()
    name = error.filename
    if name is None:
        return what
    # A file that was already open is named by its number.
    return f"{what} [path {name if isinstance(name, int) else os.fsdecode(name)}]"


def _told(error: Exception, line: str, code: Exit, *, debug: bool) -> Exit:
    if debug:
        traceback.print_exception(error)
    say(line)
    return code


def _without_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = [word for word in arguments[:end] if word != "--debug"]
    return [*options, *arguments[end:]], len(options) < end


def _verb(arguments: Sequence[str]) -> str:
    return next((f"{word} " for word in arguments if word in VERBS), "")


def _command() -> Any:
    # Panels and colour are for people; what is piped on is plain.
    style: Any = {"rich_markup_mode": "rich" if sys.stdout.isatty() else None}
    app = typer.Typer(cls=Verbs, pretty_exceptions_enable=False, **style)
    app.callback(help=_paragraphs(_root))(_root)
    return typer.main.get_command(app)


def _loaded(name: str) -> Any:
    function = importlib.import_module(f"holdfast.cli._{name}").run
    style: Any = {"rich_markup_mode": "rich" if sys.stdout.isatty() else None}
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, **style)
    app.command(name, help=f"{VERBS[name]}\n\n{_paragraphs(function)}")(function)
    return typer.main.get_command(app)


def _paragraphs(function: Any) -> str:
    """A docstring without the ends of its lines, which a terminal has elsewhere."""
    text = inspect.cleandoc(function.__doc__ or "")
    return "\n\n".join(" ".join(each.split()) for each in text.split("\n\n"))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"holdfast {holdfast.__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Say which version this is.", callback=_version, is_eager=True
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Look after checkpoints: list, show, verify, compare, delete.

    A checkpoint is named by its path, as runs/a/step_100 or s3://bucket/run/step_100. Where one is
    wanted, a store such as runs/a stands for its newest.
    """
