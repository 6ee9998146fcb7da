"""Options that both verbs which write a checkpoint have."""

from typing import Annotated

import typer

from holdfast.format import CompressionLevel

Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace the target if it is there, once the new one is."),
]

Compression = Annotated[
    CompressionLevel,
    typer.Option("--compression", help="How a holdfast checkpoint is compressed, without loss."),
]
