"""``holdfast plan``: a plan from a byte budget, for a model that a function of the user's makes."""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Final

import typer

import holdfast
from holdfast.cli._arguments import AsJson
from holdfast.cli._exits import Exit, MisuseError, NothingThereError
from holdfast.cli._place import check_folder
from holdfast.cli._progress import status
from holdfast.cli._text import put, say, terminal
from holdfast.errors import BudgetError, PlanError

_RETURNS: Final = "(model, sample) or (model, sample, loss)"
_SIZES: Final = (2, 3)


def run(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="A function of an importable module or of a file, as train.py:model.",
        ),
    ],
    *,
    budget: Annotated[
        str,
        typer.Option(
            "--budget",
            help="What forward and backward may take beside parameters, gradients and optimizer: "
            "1.5GiB, 800MB, or 40% of what a step takes when it keeps everything.",
        ),
    ],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write the plan as a page.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """FUNCTION is called without arguments and returns (model, sample) or (model, sample, loss), as
    holdfast.plan takes them: one batch, and what makes a loss of the model's output.

    Your code is run to find out: the module is imported, the function called, and some twenty steps
    are tried. Name nothing that you would not run.

    With --json it prints the plan for ActivationPlan.from_json. The exit code is 1 if no plan fits;
    the smallest budget that one fits is told then.
    """
    if importlib.util.find_spec("torch") is None:
        raise MisuseError('a plan is made with torch: pip install "holdfast[torch]"')
    if html is not None:
        check_folder(html)
    with contextlib.redirect_stdout(sys.stderr):  # stdout is the plan's
        function = _function(target)
        model, sample, loss = _made(target, function)
        try:
            plan = _planned(target, model, sample, budget, loss)
        except BudgetError as error:
            say(f"{error} (--budget {error.smallest_bytes}B)")
            return Exit.FOUND
    if html is not None:
        plan.save_html(html)
    put(plan.to_json() if as_json else plan.report(colour=terminal()))
    return Exit.OK


def _function(target: str) -> Callable[[], Any]:
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name.isidentifier():
        raise MisuseError(
            f"{target!r} is not MODULE:FUNCTION, as train.py:model or package.module:model"
        )
    module = _from_file(Path(where)) if _is_file(where) else _imported(where)
    function = getattr(module, name, None)
    if function is None:
        raise NothingThereError(f"{where} has no function {name!r}")
    if not callable(function):
        raise MisuseError(f"{name!r} of {where} is a {type(function).__name__} and no function")
    return function  # type: ignore[no-any-return]


def _is_file(where: str) -> bool:
    return where.endswith(".py") or "/" in where


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise NothingThereError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise MisuseError(f"{path} is no Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # as dataclasses and pickle expect it
    sys.path.insert(0, str(path.resolve().parent))  # as if the file were run
    with _theirs(f"{path} cannot be run"):
        spec.loader.exec_module(module)
    return module


def _imported(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        with _theirs(f"{name} cannot be imported"):
            return importlib.import_module(name)
    except MisuseError as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and missing.name in _parents(name):
            raise NothingThereError(
                f"there is no module {missing.name!r} in {Path.cwd()} or among what is installed"
            ) from missing
        raise


def _parents(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[: count + 1]) for count in range(len(parts))}


def _made(target: str, function: Callable[[], Any]) -> tuple[Any, Any, Any]:
    with _theirs(f"{target} failed"):
        made = function()
    if not isinstance(made, tuple | list) or len(made) not in _SIZES:
        told = type(made).__name__
        if isinstance(made, tuple | list):
            told = f"{told} of {len(made)}"
        raise MisuseError(f"{target} returned a {told}, and not {_RETURNS}")
    model, sample, *loss = made
    return model, sample, loss[0] if loss else None


def _planned(target: str, model: Any, sample: Any, budget: str, loss: Any) -> Any:
    with status("planning") as progress:
        try:
            return holdfast.plan(model, sample, budget, loss=loss, progress=progress)
        except BudgetError:
            raise
        except (PlanError, ValueError) as error:
            raise MisuseError(f"there is no plan for {target}: {error}") from error
        except Exception as error:
            raise _refusal(f"the model of {target} failed on its sample", error) from error


@contextlib.contextmanager
def _theirs(what: str) -> Iterator[None]:
    """What the user's own code raises is no error of holdfast's; ``--debug`` shows where it was."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise _refusal(what, error) from error


def _refusal(what: str, error: BaseException) -> MisuseError:
    return MisuseError(f"{what}: {type(error).__name__}: {error}")
