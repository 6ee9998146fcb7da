"""``holdfast diff``: how two checkpoints differ. Reads only what digests do not prove equal."""

import fnmatch
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import typer

from holdfast.catalog import OpenCheckpoint
from holdfast.catalog._opened import decoded
from holdfast.cli._arguments import AsJson
from holdfast.cli._compare import Apart, apart
from holdfast.cli._exits import Exit
from holdfast.cli._place import open_checkpoint
from holdfast.cli._progress import Tick, bar
from holdfast.cli._stored import StoredTensors, proven_same
from holdfast.cli._text import clean, number, put, put_json, put_table, shape
from holdfast.cli._values import flat_values, plain, shown
from holdfast.errors import TensorNotFoundError
from holdfast.format import StoredTensor, encode_value

First = Annotated[str, typer.Argument(metavar="A", help="A checkpoint, or a store: its newest.")]
Second = Annotated[str, typer.Argument(metavar="B", help="The one to compare it with.")]


@dataclass(slots=True, kw_only=True)
class _Difference:
    """How B differs from A. ``other`` are tensors of another dtype or shape."""

    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    changed: dict[str, Apart] = field(default_factory=dict)
    unchanged: int = 0
    values: dict[str, tuple[object, object]] = field(default_factory=dict)

    @property
    def any(self) -> bool:
        return bool(self.added or self.removed or self.other or self.changed or self.values)


class _NotThere:
    """Stands for a value that one of the two does not have."""

    def __repr__(self) -> str:
        return "(not there)"


_NOT_THERE: Final = _NotThere()


def run(
    first: First,
    second: Second,
    *,
    tensors: Annotated[
        str | None, typer.Option("--tensors", metavar="PATTERN", help="Only tensors that fit.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """The exit code is 1 if they differ. A tensor whose digests are the same in both is not read.
    NaN in the same place is no difference. Besides tensors, plain values such as an epoch are
    compared, unless --tensors is given."""
    a, b = StoredTensors(open_checkpoint(first)), StoredTensors(open_checkpoint(second))
    found = _compared(a, b, tensors)
    if tensors is None:
        found.values = _values_apart(a.opened, b.opened)
    if as_json:
        put_json(_document(a, b, found))
    else:
        _put(a, b, found)
    return Exit.FOUND if found.any else Exit.OK


def _compared(a: StoredTensors, b: StoredTensors, pattern: str | None) -> _Difference:
    found = _Difference()
    names = [*a.tensors, *(name for name in b.tensors if name not in a.tensors)]
    if pattern is not None:
        names = [name for name in names if name == pattern or fnmatch.fnmatchcase(name, pattern)]
        if not names:
            raise TensorNotFoundError(f"no tensor of either fits {pattern!r}")
    to_read = []
    for name in names:
        if name not in a.tensors:
            found.added.append(name)
        elif name not in b.tensors:
            found.removed.append(name)
        elif _kind(a.tensors[name]) != _kind(b.tensors[name]):
            found.other.append(name)
        elif proven_same(a, b, name):
            found.unchanged += 1
        else:
            to_read.append(name)
    with bar("reading", 2 * sum(a.nbytes(name) for name in to_read)) as tick:
        for name in to_read:
            difference, same = _apart(a, b, name, tick)
            if same:
                found.unchanged += 1
            else:
                found.changed[name] = difference
    return found


def _apart(a: StoredTensors, b: StoredTensors, name: str, tick: Tick) -> tuple[Apart, bool]:
    """How far a tensor is apart, and whether all of its bytes are the same after all."""
    total, same = Apart(), True
    for box in a.pieces(name):
        mine, others = a.read(name, box), b.read(name, box)
        same = same and mine.tobytes() == others.tobytes()
        total |= apart(mine, others, a.tensors[name].dtype)
        tick(2 * mine.nbytes)
    return total, same


def _kind(tensor: StoredTensor) -> tuple[str, tuple[int, ...]]:
    return tensor.dtype, tensor.shape


def _values_apart(a: OpenCheckpoint, b: OpenCheckpoint) -> dict[str, tuple[object, object]]:
    mine, others = _values(a), _values(b)
    return {
        name: (mine.get(name, _NOT_THERE), others.get(name, _NOT_THERE))
        for name in (*mine, *(name for name in others if name not in mine))
        # As they are stored: NaN is NaN there, and 1 is not 1.0.
        if name not in mine
        or name not in others
        or encode_value(mine[name]) != encode_value(others[name])
    }


def _values(opened: OpenCheckpoint) -> dict[str, object]:
    return flat_values(decoded(opened.found, opened.found.record.tree))


def _put(a: StoredTensors, b: StoredTensors, found: _Difference) -> None:
    rows = [("removed", name, _told(a.tensors[name]), "", "", "") for name in found.removed]
    rows += [("added", name, _told(b.tensors[name]), "", "", "") for name in found.added]
    rows += [
        ("other", name, f"{_told(a.tensors[name])} -> {_told(b.tensors[name])}", "", "", "")
        for name in found.other
    ]
    for name, each in found.changed.items():
        most = "-" if each.max_abs is None else number(each.max_abs)
        nan = str(each.nan_changed) if each.nan_changed else ""
        kind = "changed" if each.elements else "bits"
        rows.append((kind, name, _told(a.tensors[name]), str(each.elements), most, nan))
    if rows:
        header = ("what", "tensor", "dtype and shape", "elements", "max abs", "NaN")
        put_table(header, rows, right=header[3:])
    for name, (mine, others) in found.values.items():
        put(f"value {clean(name) or '(all)'}: {clean(shown(mine))} -> {clean(shown(others))}")
    put(
        f"tensors: {len(found.changed)} changed, {len(found.other)} of another dtype or shape, "
        f"{len(found.added)} added, {len(found.removed)} removed, {found.unchanged} unchanged"
    )


def _told(tensor: StoredTensor) -> str:
    return f"{tensor.dtype} {shape(tensor.shape)}"


def _document(a: StoredTensors, b: StoredTensors, found: _Difference) -> dict[str, Any]:
    def entry(name: str, of: StoredTensors) -> dict[str, Any]:
        return {"name": name, "dtype": of.tensors[name].dtype, "shape": of.tensors[name].shape}

    return {
        "a": f"{a.opened.storage.url}/{a.opened.found.prefix}",
        "b": f"{b.opened.storage.url}/{b.opened.found.prefix}",
        "equal": not found.any,
        "added": [entry(name, b) for name in found.added],
        "removed": [entry(name, a) for name in found.removed],
        "other": [{"name": n, "a": entry(n, a), "b": entry(n, b)} for n in found.other],
        "changed": [
            {
                **entry(name, a),
                "elements": each.elements,
                "max_abs": each.max_abs,
                "nan_changed": each.nan_changed,
            }
            for name, each in found.changed.items()
        ],
        "unchanged": found.unchanged,
        "values": [
            {"name": name}
            | {key: plain(v) for key, v in zip("ab", pair, strict=True) if v is not _NOT_THERE}
            for name, pair in found.values.items()
        ],
    }
