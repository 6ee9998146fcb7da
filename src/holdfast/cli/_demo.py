"""``holdfast demo``: the whole of holdfast on a small training, in a minute or two."""

import importlib.metadata
import importlib.util
import os
import platform
import tempfile
from pathlib import Path
from typing import Annotated

import typer

import holdfast
from holdfast.cli._demonstration.jobs import FULL, QUICK
from holdfast.cli._demonstration.launching import RunError
from holdfast.cli._demonstration.proofs import Proof, Story, failed, proofs_of
from holdfast.cli._demonstration.screen import Screen
from holdfast.cli._demonstration.story import PLAN, STORE, play
from holdfast.cli._exits import Exit, MisuseError
from holdfast.cli._text import put, put_table, say

REPORT = "report.html"


def run(
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FOLDER",
            help="Where to leave the report and the checkpoints. It must be new or empty; without "
            "it a temporary folder is made, and named at the end.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A smaller model and fewer steps.")
    ] = False,
) -> int:
    """Trains a character GPT on two ranks; once undisturbed, and once within a memory budget while
    it saves, until a rank is killed in the middle of a save. Then a bit is flipped on the disk, and
    three ranks go on from the newest checkpoint that is whole.

    At the end it says what was proved, and writes a page with the losses, the memory and what saves
    took. The exit code is 1 if anything shown does not hold. Needs torch, and no GPU.
    """
    if importlib.util.find_spec("torch") is None:
        raise MisuseError('the demo trains a model, with torch: pip install "holdfast[torch]"')
    folder = _folder(out)
    course = QUICK if quick else FULL
    put(
        "holdfast demo: a character GPT in BF16 is trained, killed, damaged and resumed\n"
        f"(on {_machine()}; everything is in {folder})"
    )
    try:
        story = play(course, folder, Screen(steps=course.steps, every=course.every))
    except RunError as error:
        say(str(error))
        return Exit.FOUND
    proofs = proofs_of(story)
    report = _report(story, proofs, folder)
    put()
    put_table(
        ("", "claim", "what was seen"),
        [("ok" if proof.holds else "bad", proof.claim, proof.seen) for proof in proofs],
    )
    broken = len([*failed(proofs)])
    put()
    held = f"{broken} of {len(proofs)} do NOT hold" if broken else f"all {len(proofs)} hold"
    put(f"{held}; {story.seconds:.0f} s in all")
    put(f"report       {report}")
    put(f"checkpoints  holdfast ls {folder / STORE}")
    return Exit.FOUND if broken else Exit.OK


def _folder(out: Path | None) -> Path:
    if out is None:
        return Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise MisuseError(f"{out} is there already: --out must be a new or an empty folder")
    out.mkdir(parents=True, exist_ok=True)
    return out.resolve()


def _report(story: Story, proofs: tuple[Proof, ...], folder: Path) -> Path:
    from holdfast.cli._demonstration.page import page  # noqa: PLC0415 -- by way of a room with torch

    plan = holdfast.ActivationPlan.from_json((folder / PLAN).read_bytes())
    path = folder / REPORT
    path.write_text(page(story, proofs, plan.summary, _machine()), "utf-8")
    return path


def _machine() -> str:
    cores = len(os.sched_getaffinity(0))
    return (
        f"{cores} core{'' if cores == 1 else 's'}, Python {platform.python_version()}, "
        f"torch {importlib.metadata.version('torch')}"
    )
