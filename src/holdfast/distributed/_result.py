"""What a load brought, and what it did not. Knows names, shapes and words, no tensors' values."""

import datetime as dt
import difflib
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Self

import msgspec

from holdfast.catalog._info import info_of
from holdfast.catalog._names import record_key
from holdfast.distributed._options import CheckpointFormat
from holdfast.distributed._validation import ValidationResult, capped
from holdfast.errors import IncompatibleVersionError
from holdfast.format import CommitRecord

Shape = tuple[int, ...]

Families = dict[str, dict[tuple[tuple[str, ...], Shape | None], str]]

_MOST_RIVALS: Final = 8
_MOST_CUT: Final = 10
_MOST_COMPARISONS: Final = 2500
_MOST_CHARS: Final = 200
_ALIKE: Final = 0.6
_ALIKE_ALONE: Final = 0.4
_NUMBER: Final = re.compile(r"(?<![^.])[0-9]+(?![^.])")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMetadata:
    """What the record of a checkpoint says of it. ``ordinal`` tells newer from older; ``version``
    is that of the file format."""

    prefix: str
    ordinal: int
    step: int | None
    metrics: Mapping[str, float]
    custom_metadata: Mapping[str, object]
    created: dt.datetime
    world_size: int
    format: CheckpointFormat
    size_bytes: int
    version: str

    @classmethod
    def of(cls, prefix: str, record: CommitRecord, custom: object) -> Self:
        """From a record and its decoded custom metadata. If that is no dict, as ``Catalog.write``
        allows, it is under the key ``"custom"``. ``IncompatibleVersionError`` for a format that
        this version does not know."""
        info = info_of(prefix, record)
        try:
            layout = CheckpointFormat(info.format)
        except ValueError:
            raise IncompatibleVersionError(
                f"the checkpoint is of a format {info.format!r}, which this version of holdfast "
                "does not know; use a newer holdfast",
                path=record_key(prefix),
            ) from None
        if not isinstance(custom, Mapping):
            custom = {} if custom is None else {"custom": custom}
        return cls(
            prefix=prefix,
            ordinal=info.ordinal,
            step=info.step,
            metrics=info.metrics,
            custom_metadata=custom,
            created=info.timestamp,
            world_size=info.world_size,
            format=layout,
            size_bytes=info.size_bytes,
            version=info.version,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A place where something else is stored than is wanted."""

    place: str
    stored: str
    wanted: str

    def __str__(self) -> str:
        return f"{self.place}: {self.stored} is stored, {self.wanted} is wanted"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Where a checkpoint does not fit what it is loaded into, by place.

    ``missing`` is wanted and not stored, ``unexpected`` stored and not wanted. ``renames`` are
    pairs of one of each that are likely the same. ``other`` are sentences.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    shapes: tuple[Difference, ...] = ()
    dtypes: tuple[Difference, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    other: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        return self == type(self)()

    def text(self) -> str:
        """All of it for people, of each kind the first 20."""
        sections: dict[str, Sequence[object]] = {
            "not in the checkpoint": self.missing,
            "in the checkpoint, but not wanted": self.unexpected,
            "of another shape": self.shapes,
            "of another dtype": self.dtypes,
            "likely renamed": [f"{old} (stored) -> {new} (wanted)" for new, old in self.renames],
            "also": self.other,
        }
        lines: list[str] = []
        for title, entries in sections.items():
            if entries:
                lines += [f"{title} ({len(entries)}):", *capped([str(each) for each in entries])]
        return "\n".join(lines) or "everything fits"

    @classmethod
    def merge(cls, reports: Iterable[Self]) -> Self:
        """What the ranks found, each thing once, in the order of the ranks."""
        given = [*reports]
        return cls(
            **{
                each.name: tuple(
                    dict.fromkeys(one for report in given for one in getattr(report, each.name))
                )
                for each in fields(cls)
            }
        )

    def encode(self) -> bytes:
        """As bytes, for other ranks."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """What ``encode`` has made on a rank of this job."""
        return msgspec.json.decode(data, type=cls)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLoadResult:
    """What a load has done on this rank.

    ``model_state`` and ``optimizer_state`` are as loaded, ``None`` if they were not. ``report``
    says what a load that is not strict left as it was, on any rank. ``not_restored`` are the
    places of per-rank values that a job of this size has no use for without a ``remap``, ``"rng"``
    among them. ``validation`` is ``None`` if it was skipped.
    """

    metadata: CheckpointMetadata
    model_state: Mapping[str, Any] | None = field(default=None, repr=False)
    optimizer_state: Mapping[str, Any] | None = field(default=None, repr=False)
    extra: Mapping[str, object] = field(default_factory=dict, repr=False)
    source_world_size: int
    target_world_size: int
    was_resharded: bool
    report: LoadReport = field(default_factory=LoadReport)
    not_restored: tuple[str, ...] = ()
    validation: ValidationResult | None = None


def likely_renames(
    missing: Sequence[str],
    unexpected: Sequence[str],
    stored_shapes: Mapping[str, Shape],
    wanted_shapes: Mapping[str, Shape],
) -> tuple[tuple[str, str], ...]:
    """Pairs of a missing and an unexpected name that are likely the same tensor, in the order of
    ``missing``; each name once. Only names of the same shape are paired; those without one (a
    value that is no tensor) among themselves.

    Names that differ in their numbers only are taken together, as a family. First come changes
    that explain several families: one beginning for another (``encoder.`` for ``backbone.``), or
    one end. What is left is paired by likeness, families and then names, as far as a fixed number
    of comparisons goes. So time is about linear in the names.
    """
    wanted, stored = _families(missing, wanted_shapes), _families(unexpected, stored_shapes)
    pairs: dict[str, str] = {}

    def pair(new: str, old: str) -> None:
        for key in [key for key in wanted[new] if key in stored[old]]:
            pairs[wanted[new].pop(key)] = stored[old].pop(key)

    for new, old in _common_changes(wanted, stored):
        pair(new, old)
    for new, old in _alike(_first_members(wanted), _first_members(stored)):
        pair(new, old)
    pairs.update(_alike(_left(wanted), _left(stored)))
    return tuple((name, pairs[name]) for name in dict.fromkeys(missing) if name in pairs)


def _families(names: Iterable[str], shapes: Mapping[str, Shape]) -> Families:
    """Names by what they are without their numbers; in a family by those, and the shape."""
    families: Families = defaultdict(dict)
    for name in names:
        families[_NUMBER.sub("#", name)][tuple(_NUMBER.findall(name)), shapes.get(name)] = name
    return families


def _first_members(families: Families) -> dict[str, Hashable]:
    return {family: next(iter(members)) for family, members in families.items() if members}


def _left(families: Families) -> dict[str, Hashable]:
    """The names in them, with their shapes."""
    return {name: key[1] for members in families.values() for key, name in members.items()}


def _common_changes(wanted: Families, stored: Families) -> list[tuple[str, str]]:
    """Pairs of families that differ by a change that another pair shows, too: those of the change
    that explains most names first, and of several such the one that keeps most of its text."""
    shown: dict[tuple[str, str, bool], list[tuple[str, str]]] = defaultdict(list)
    weights: Counter[tuple[str, str, bool]] = Counter()
    for at_end in (False, True):
        keeping: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for old in stored:
            for cut, kept in _splits(old, at_end=at_end):
                keeping[kept].append((cut, old))
        for new in wanted:
            for cut, kept in _splits(new, at_end=at_end):
                found = False
                for old_cut, old in keeping.get(kept, [])[:_MOST_RIVALS]:
                    if common := len(wanted[new].keys() & stored[old].keys()):
                        found = True
                        shown[cut, old_cut, at_end].append((new, old))
                        weights[cut, old_cut, at_end] += common
                if found:  # a smaller change than any that follows
                    break
    several = [change for change, explained in shown.items() if len(explained) > 1]
    several.sort(key=lambda change: (-weights[change], -_kept_share(change[0], change[1])))
    return [pair for change in several for pair in shown[change]]


def _splits(family: str, *, at_end: bool) -> Iterator[tuple[str, str]]:
    """What may have changed of a name, and what is kept of it: least is cut first."""
    yield "", family
    at = len(family) if at_end else -1
    for _ in range(_MOST_CUT):
        at = family.rfind(".", 0, at) if at_end else family.find(".", at + 1)
        if at < 0:
            return
        before, after = family[:at], family[at + 1 :]
        yield (after, before) if at_end else (before, after)


def _kept_share(new: str, old: str) -> float:
    return (_common(new, old) + _common(new[::-1], old[::-1])) / max(len(new), len(old), 1)


def _common(one: str, other: str) -> int:
    """How many characters they have in common before they differ."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in same)


def _alike(wanted: Mapping[str, Hashable], stored: Mapping[str, Hashable]) -> list[tuple[str, str]]:
    """Pairs of texts of equal keys that resemble each other, each text once, the best first.
    Two that are alone with their key need less. Those with fewest rivals are compared first, and
    not all if there are many."""
    claims = Counter(wanted.values())
    rivals: dict[Hashable, list[str]] = defaultdict(list)
    for old, key in stored.items():
        if len(old) <= _MOST_CHARS:
            rivals[key].append(old)
    scored: list[tuple[float, str, str]] = []
    comparisons = 0
    for new, key in sorted(wanted.items(), key=lambda item: len(rivals.get(item[1], ()))):
        comparisons += len(rivals.get(key, ()))
        if comparisons > _MOST_COMPARISONS:
            break
        if len(new) <= _MOST_CHARS:
            matcher = difflib.SequenceMatcher(None, b=new, autojunk=False)
            least = _ALIKE_ALONE if claims[key] == len(rivals[key]) == 1 else _ALIKE
            for old in rivals[key]:
                matcher.set_seq1(old)
                if matcher.quick_ratio() >= least and (ratio := matcher.ratio()) >= least:
                    scored.append((ratio, new, old))
    scored.sort(key=lambda entry: -entry[0])
    pairs: dict[str, str] = {}
    taken: set[str] = set()
    for _, new, old in scored:
        if new not in pairs and old not in taken:
            pairs[new] = old
            taken.add(old)
    return [*pairs.items()]
