"""``holdfast cat``: the values of a tensor, or of a slice of one. Reads just that, verified."""

import functools
import math
import os
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt
import typer

from holdfast.cli._arguments import AsJson, CheckpointArgument
from holdfast.cli._compare import is_number, wide
from holdfast.cli._place import check_folder, open_checkpoint
from holdfast.cli._progress import bar
from holdfast.cli._slices import Slice, parse_slice
from holdfast.cli._stats import Stats, counted, stats_of
from holdfast.cli._stored import StoredTensors
from holdfast.cli._text import clean, number, put, put_json, shape, size
from holdfast.format import dtype_of

Array = npt.NDArray[Any]

_BINS: Final = 16
_BAR_CHARS: Final = 40
_SHOWN_ELEMENTS: Final = 1000


def run(
    checkpoint: CheckpointArgument,
    tensor: Annotated[str, typer.Argument(metavar="TENSOR", help="Its name, as model.weight.")],
    *,
    part: Annotated[
        str | None,
        typer.Option("--slice", metavar="SLICE", help='As in Python, without steps: "0:10,3".'),
    ] = None,
    npy: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", dir_okay=False, help="Write the values to a .npy file as well."
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Of up to 1000 elements all are shown, of more the first few; of all of them the least and
    greatest, mean, deviation, and a histogram. A .npy file has no bfloat16 and no 8-bit floats:
    these are written as float32, which holds them exactly."""
    stored = StoredTensors(open_checkpoint(checkpoint))
    dtype = stored.tensor(tensor).dtype
    wanted = parse_slice(part, stored.tensor(tensor).shape)
    if npy is not None:
        check_folder(npy)
        _write(stored, tensor, wanted, npy)
    # One that is a single piece is read once, though it is looked at three times.
    read = functools.lru_cache(maxsize=1)(functools.partial(stored.read, tensor))
    stats, counts = Stats(), np.zeros(_BINS, np.int64)
    pieces = [*stored.pieces(tensor, wanted.box)]
    with bar(clean(tensor), 2 * wanted.box.size * dtype_of(dtype).itemsize) as tick:
        for box in pieces:
            stats |= stats_of(read(box), dtype)
            tick(read(box).nbytes)
        edges = _edges(stats)
        for box in pieces if len(edges) else ():
            counts += counted(read(box), dtype, edges)
            tick(read(box).nbytes)
    values = _first(read(pieces[0]), dtype, wanted)
    if as_json:
        told = _document(tensor, dtype, stats, values, histogram=(edges, counts[: len(edges)]))
        put_json(told | {"shape": wanted.shape, "complete": _few(wanted)})
        return 0
    put(
        f"{clean(tensor)}  {dtype} {shape(wanted.shape)}  "
        f"{size(wanted.box.size * dtype_of(dtype).itemsize)}"
    )
    _put_values(values, wanted)
    _put_stats(stats)
    _put_histogram(edges, counts)
    return 0


def _few(wanted: Slice) -> bool:
    return wanted.box.size <= _SHOWN_ELEMENTS


def _first(piece: Array, dtype: str, wanted: Slice) -> Array:
    """All values if they are few, else those at the beginning, in one row."""
    if _few(wanted):
        return piece.reshape((*wanted.shape, *dtype_of(dtype).numpy_tail))
    return piece.reshape(-1)[:10]


def _edges(stats: Stats) -> Array:
    """Of the histogram's bins; none if there is nothing to count."""
    if stats.min is None or stats.max is None or stats.min == stats.max:
        return np.zeros(0)
    with np.errstate(over="ignore", invalid="ignore"):
        edges = np.linspace(float(stats.min), float(stats.max), _BINS + 1)
    # Between the least and the greatest float64 there is more than a float64 can hold.
    return edges if np.isfinite(edges).all() and (np.diff(edges) > 0).all() else np.zeros(0)


def _put_values(values: Array, wanted: Slice) -> None:
    if not values.size:
        return
    text = np.array2string(values, threshold=_SHOWN_ELEMENTS, max_line_width=100)
    put(text if _few(wanted) else f"{text[:-1]} ...]")


def _put_stats(stats: Stats) -> None:
    told = [f"{name} {number(value)}" for name, value in stats.told.items() if value is not None]
    put("  ".join(told))


def _put_histogram(edges: Array, counts: Array) -> None:
    most = int(counts.max(initial=0))
    for low, high, count in zip(edges[:-1], edges[1:], counts.tolist(), strict=False):
        drawn = "#" * math.ceil(count / most * _BAR_CHARS)
        put(f"{low:>12.5g} to {high:>12.5g}  {drawn:<{_BAR_CHARS}} {count}".rstrip())


def _write(stored: StoredTensors, name: str, wanted: Slice, path: Path) -> None:
    """Write a .npy file, piece by piece, under its name only when it is whole."""
    dtype = stored.tensors[name].dtype
    tail = dtype_of(dtype).numpy_tail
    target = np.dtype(np.float32) if dtype.startswith(("BF16", "F8")) else None
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            for nth, box in enumerate(stored.pieces(name, wanted.box)):
                array = stored.read(name, box)
                array = array if target is None else array.astype(target)
                if nth == 0:
                    described = np.lib.format.dtype_to_descr(array.dtype)
                    header = {
                        "descr": described,
                        "fortran_order": False,
                        "shape": (*wanted.shape, *tail),
                    }
                    np.lib.format.write_array_header_2_0(file, header)
                file.write(array.tobytes())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _document(
    name: str, dtype: str, stats: Stats, values: Array, *, histogram: tuple[Array, Array]
) -> dict[str, Any]:
    plain = wide(values, dtype) if is_number(dtype) else values
    if plain.dtype.kind == "c":
        plain = np.stack([plain.real, plain.imag], -1)
    edges, counts = histogram
    return {
        "tensor": name,
        "dtype": dtype,
        "stats": stats.told,
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
        "values": plain.tolist(),
    }
