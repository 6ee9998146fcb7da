"""What ranks tell each other before a save, so that all know the same: leaves, replicas, trees.

Every function here is called by all ranks of an operation, in the same order. What agrees costs
one small message for each rank, whatever the size of the state; only differences travel.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from holdfast.contracts import Operation
from holdfast.distributed._capture import Place
from holdfast.distributed._flat import Flat, Held
from holdfast.errors import LoadError, ReplicaMismatchError, SaveError
from holdfast.format import digest
from holdfast.format._value_encode import per_rank_node
from holdfast.format._value_tags import TAG_KEY
from holdfast.reshard import LeafList, RankGroup, group_ranks

Failed = SaveError | LoadError

_NAMED: Final = 5
_SHOWN: Final = 100
_PAIRS: Final = frozenset({"dict", "ordereddict"})


def check_same(operation: Operation, own: Mapping[str, object], failed: type[Failed]) -> None:
    """Refuse options that differ between ranks, which go through the same steps."""
    first = msgspec.json.decode(operation.broadcast(msgspec.json.encode(own)))
    mine = msgspec.json.decode(msgspec.json.encode(own))
    for name, value in mine.items():
        if first[name] != value:
            raise failed(
                f"{name} is {value!r} on rank {operation.rank} and {first[name]!r} on rank 0; all "
                "ranks must make the same calls with the same options. Nothing was changed"
            )


def share_lists(operation: Operation, own: LeafList) -> tuple[RankGroup, ...]:
    """The leaves of all ranks, grouped by what they list."""
    data = own.encode()
    digests = operation.all_gather(digest(data))
    groups = group_ranks(digests)
    if len(groups) == 1:
        return (RankGroup(ranks=groups[0], leaves=own),)
    first = any(ranks[0] == operation.rank for ranks in groups)
    lists = operation.all_gather(data if first else b"")
    return tuple(
        RankGroup(ranks=ranks, leaves=LeafList.decode(lists[ranks[0]])) for ranks in groups
    )


class Differing(msgspec.Struct, frozen=True, kw_only=True):
    """A leaf that ranks hold different values of: ``groups`` are ranks that hold the same.
    ``is_agreed`` if it is of a module or an optimizer, ``is_buffer`` if it is a module's buffer,
    ``is_cut`` if ranks hold parts of it."""

    name: str
    groups: tuple[tuple[int, ...], ...]
    is_agreed: bool
    is_buffer: bool
    is_cut: bool


class _Copy(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's copy of a part of a leaf. Those that are otherwise equal should have one digest."""

    part: str
    is_agreed: bool
    is_buffer: bool
    is_cut: bool
    digest: str


def find_differing(
    operation: Operation, held: Iterable[Held], *, everything: bool
) -> tuple[Differing, ...]:
    """Leaves that should be the same on several ranks and are not. ``everything`` compares all of
    all replicated leaves; without it, of those that need not be checked, a few bytes. Leaves of
    modules and optimizers are compared only with ones of their dtype and shape: those that differ
    even there are refused when leaves are listed, in better words."""
    given = [*held]
    # Beside tensors that are cut, a plain one of several elements may be a piece, too.
    is_cut = any(not one.is_plain for one in given)
    own = {
        one.name: _Copy(
            part=f"{one.shard_coordinate()}{_form(one) if one.is_agreed else ''}",
            is_agreed=one.is_agreed,
            is_buffer=one.is_agreed and one.is_checked,
            is_cut=not one.is_plain,
            digest=f"{_digest(one, fully=everything or _is_checked(one, is_cut))}{_form(one)}",
        )
        for one in given
        if everything or one.is_plain
    }
    data = msgspec.json.encode(own)
    digests = operation.all_gather(digest(data))
    if len(set(digests)) == 1:
        return ()
    by_part: dict[tuple[str, str], dict[str, list[int]]] = {}
    copies: dict[str, _Copy] = {}
    for rank, each in enumerate(operation.all_gather(data)):
        for name, copy in msgspec.json.decode(each, type=dict[str, _Copy]).items():
            by_part.setdefault((name, copy.part), {}).setdefault(copy.digest, []).append(rank)
            copies[name] = copy
    groups: dict[str, list[tuple[int, ...]]] = {}
    for (name, _), found in by_part.items():
        if len(found) > 1:
            groups.setdefault(name, []).extend(sorted(tuple(ranks) for ranks in found.values()))
    return tuple(
        Differing(
            name=name,
            groups=tuple(ranks),
            is_agreed=copies[name].is_agreed,
            is_buffer=copies[name].is_buffer,
            is_cut=copies[name].is_cut,
        )
        for name, ranks in groups.items()
    )


def _digest(one: Held, *, fully: bool) -> str:
    return (one.digest() if fully else one.sample()).hex()


def _is_checked(one: Held, is_cut: bool) -> bool:
    return one.is_checked or (is_cut and one.is_plain and bool(one.shape))


def mismatch(differing: Sequence[Differing]) -> ReplicaMismatchError:
    """The error for leaves that differ though all ranks should hold the same."""
    named = [f"{each.name} ({_told(each.groups)})" for each in differing[:_NAMED]]
    more = f" and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
    if any(each.is_cut for each in differing):
        hint = "Parts cannot be chosen between: load a checkpoint, or broadcast one replica."
    elif all(each.is_buffer for each in differing):
        hint = (
            "Buffers differ after a forward pass under DistributedDataParallel, which takes rank "
            "0's before the next: use SyncBatchNorm, or SaveOptions(replicas_from=0)."
        )
    else:
        hint = "SaveOptions(replicas_from=RANK) takes those of one rank."
    return ReplicaMismatchError(
        f"ranks hold different values of what should be the same: {'; '.join(named)}{more}. "
        f"Nothing was saved. {hint}"
    )


def _form(held: Held) -> str:
    """The same bytes in another form are another value."""
    return f" {held.dtype.code} {held.shape}"


def _told(groups: Sequence[tuple[int, ...]]) -> str:
    """Which ranks hold the same: "one value on ranks 0, 2, another on rank 1"."""
    sides = [
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_NAMED]))}"
        f"{f' and {len(ranks) - _NAMED} more' if len(ranks) > _NAMED else ''}"
        for ranks in groups
    ]
    told = ", another on ".join(sides[:_NAMED])
    return f"one value on {told}{' and so on' if len(sides) > _NAMED else ''}"


def merge_trees(operation: Operation, flat: Flat) -> object | None:
    """The encoded tree of all ranks, on rank 0; ``None`` elsewhere.

    What differs is kept for each rank, but for values of modules and optimizers, which must not:
    ``ReplicaMismatchError`` then.
    """
    places = [*flat.pieces]
    own = [msgspec.json.encode(piece) for piece in flat.pieces.values()]
    first = operation.broadcast(
        msgspec.json.encode([places, [digest(piece).hex() for piece in own]])
    )
    wanted_places, digests = msgspec.json.decode(first, type=tuple[list[Any], list[str]])
    order = {tuple(place): index for index, place in enumerate(wanted_places)}
    if order.keys() != set(places):
        raise SaveError(
            f"rank {operation.rank} saves {_names(places)}, and rank 0 {_names(wanted_places)}; "
            "every rank must save a state of the same form. Nothing was saved"
        )
    differing = {
        str(order[places[index]]): msgspec.Raw(piece)
        for index, piece in enumerate(own)
        if digest(piece).hex() != digests[order[places[index]]]
        or _has_own(flat.pieces[places[index]])
    }
    gathered = operation.gather(msgspec.json.encode(differing))
    if gathered is None:
        return None
    told = [msgspec.json.decode(each, type=dict[str, Any]) for each in gathered]
    merged: dict[Place, object] = {}
    for index, place in enumerate(places):
        piece = flat.pieces[place]
        ranks = [ranks_own.get(str(index), piece) for ranks_own in told]
        merged[place] = _merge(ranks, place, flat.agreed)
    return _assemble(merged)


def _has_own(piece: object) -> bool:
    """Whether a piece has a value of each rank's own, which may be the same by chance."""
    return b'"$":["per_rank",' in msgspec.json.encode(piece)


def _merge(values: Sequence[Any], place: Place, agreed: frozenset[Place]) -> object:
    """One value of the same place on every rank, which differ or not."""
    first = values[0]
    if all(_tag(value) == "per_rank" for value in values):
        return per_rank_node([value[TAG_KEY][1][0] for value in values])
    if not _has_own(first) and len({msgspec.json.encode(value) for value in values}) == 1:
        return first
    kind = type(first)
    if all(type(value) is kind for value in values):
        if kind is dict and all(value.keys() == first.keys() for value in values):
            tag = _tag(first)
            if tag is None:
                return {
                    key: _merge([value[key] for value in values], (*place, key), agreed)
                    for key in first
                }
            inner = _merge_tagged(values, tag, place, agreed)
            if inner is not None:
                return inner
        if kind is list and all(len(value) == len(first) for value in values):
            return [
                _merge([value[n] for value in values], (*place, n), agreed)
                for n in range(len(first))
            ]
    _refuse_agreed(values, place, agreed)
    return per_rank_node([_stripped(value) for value in values])


def _stripped(value: Any) -> Any:
    """A value of one rank, in which nothing needs to be said to be of this rank alone."""
    if _tag(value) == "per_rank":
        return _stripped(value[TAG_KEY][1][0])
    if isinstance(value, dict):
        return {key: _stripped(each) for key, each in value.items()}
    return [_stripped(each) for each in value] if isinstance(value, list) else value


def _merge_tagged(
    values: Sequence[Any], tag: str, place: Place, agreed: frozenset[Place]
) -> object | None:
    """Tuples and dicts that JSON has not; ``None`` if they have to be taken as they are."""
    payloads = [value[TAG_KEY][1] for value in values]
    if {_tag(value) for value in values} != {tag}:
        return None
    if tag == "defaultdict":
        return _merge_defaultdicts(payloads, place, agreed)
    if len({len(payload) for payload in payloads}) != 1:
        return None
    first = payloads[0]
    if tag == "tuple":
        items = [_merge([p[n] for p in payloads], (*place, n), agreed) for n in range(len(first))]
        return {TAG_KEY: [tag, items]}
    if tag in _PAIRS and all([k for k, _ in p] == [k for k, _ in first] for p in payloads):
        pairs = [
            [key, _merge([p[n][1] for p in payloads], (*place, _key_step(key)), agreed)]
            for n, (key, _) in enumerate(first)
        ]
        return {TAG_KEY: [tag, pairs]}
    return None


def _merge_defaultdicts(
    payloads: Sequence[Any], place: Place, agreed: frozenset[Place]
) -> object | None:
    """Each is the name of its factory, and pairs."""
    if len({factory for factory, _ in payloads}) != 1:
        return None
    as_dicts = [{TAG_KEY: ["dict", pairs]} for _, pairs in payloads]
    merged: Any = _merge_tagged(as_dicts, "dict", place, agreed)
    if merged is None:
        return None
    return {TAG_KEY: ["defaultdict", [payloads[0][0], merged[TAG_KEY][1]]]}


def _key_step(key: object) -> object:
    return key if isinstance(key, str | int) else str(key)


def _refuse_agreed(values: Sequence[Any], place: Place, agreed: frozenset[Place]) -> None:
    """Values of modules and optimizers, or of what holds them, must be the same on all ranks."""
    within = any(place[:n] in agreed for n in range(len(place) + 1))
    around = any(other[: len(place)] == place for other in agreed)
    if not within and not around:
        return
    where = ".".join(map(str, place)) or "the state"
    if all(isinstance(value, dict) and _tag(value) is None for value in values):
        told = _partial_keys(values)
    else:
        by_value: dict[bytes, list[int]] = defaultdict(list)
        for rank, value in enumerate(values):
            by_value[msgspec.json.encode(value)].append(rank)
        told = "; ".join(
            f"rank {', '.join(map(str, ranks))}: {value[:_SHOWN].decode('utf-8', 'replace')}"
            for value, ranks in list(by_value.items())[:_NAMED]
        )
    raise ReplicaMismatchError(
        f"{where} differs between ranks ({told}), and modules and optimizers must be of the same "
        "form and values on all. Nothing was saved"
    )


def _partial_keys(values: Sequence[Mapping[str, object]]) -> str:
    """Which keys only some ranks have."""
    every = dict.fromkeys(key for value in values for key in value)
    partial = [key for key in every if not all(key in value for value in values)]
    told = [
        f"only rank {', '.join(str(r) for r, value in enumerate(values) if key in value)} has {key}"
        for key in partial[:_NAMED]
    ]
    more = [f"{len(partial) - _NAMED} more"] if len(partial) > _NAMED else []
    return "; ".join([*told, *more])


def _tag(value: object) -> str | None:
    if isinstance(value, dict) and TAG_KEY in value:
        return str(value[TAG_KEY][0])
    return None


def _assemble(pieces: Mapping[Place, object]) -> object:
    if () in pieces:
        return pieces[()]
    tree: dict[str, Any] = {}
    for place, value in pieces.items():
        inside = tree
        for step in place[:-1]:
            inside = inside.setdefault(step, {})
        inside[place[-1]] = value
    return tree


def _names(places: Iterable[Sequence[Any]]) -> str:
    return ", ".join(".".join(map(str, place)) or "one value" for place in places)
