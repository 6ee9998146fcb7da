"""Arguments and options that several verbs have, and what a shell completes them with."""

from typing import Annotated

import typer

StoreArgument = Annotated[
    str,
    typer.Argument(metavar="STORE", help="A folder or URL, as runs/a or s3://bucket/run."),
]

CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="Its path, as runs/a/step_100, or a store, which stands for its newest.",
    ),
]

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document instead of text.")]

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it, and do not ask.")]
