"""What ranks tell each other before a save, so that all know the same: leaves, replicas, trees.

Every function here is called by all ranks of an operation, in the same order. What agrees costs
one small message for each rank, whatever the size of the state; only differences travel.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from holdfast.contracts import Operation
from holdfast.distributed._capture import Place
from holdfast.distributed._flat import Flat, Held
from holdfast.errors import ReplicaMismatchError, SaveError
from holdfast.format import digest
from holdfast.format._value_encode import per_rank_node
from holdfast.format._value_tags import TAG_KEY
from holdfast.reshard import LeafList, RankGroup, group_ranks

_NAMED: Final = 5
_PAIRS: Final = frozenset({"dict", "ordereddict"})


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


def find_differing(
    operation: Operation, held: Iterable[Held], *, everything: bool, place_of: Callable[[Held], str]
) -> dict[str, list[tuple[int, ...]]]:
    """Leaves that should be the same on several ranks and are not: for each, the ranks that hold
    the same. ``everything`` compares all replicated leaves, not only those to be checked."""
    checked = [one for one in held if one.is_checked or everything]
    own = {one.name: (place_of(one), one.digest().hex()) for one in checked}
    data = msgspec.json.encode(own)
    digests = operation.all_gather(digest(data))
    if len(set(digests)) == 1:
        return {}
    told = [
        msgspec.json.decode(each, type=dict[str, tuple[str, str]])
        for each in operation.all_gather(data)
    ]
    by_place: dict[tuple[str, str], dict[str, list[int]]] = {}
    for rank, leaves in enumerate(told):
        for name, (place, found) in leaves.items():
            by_place.setdefault((name, place), {}).setdefault(found, []).append(rank)
    return {
        name: sorted(tuple(ranks) for ranks in found.values())
        for (name, _), found in by_place.items()
        if len(found) > 1
    }


def mismatch(differing: Mapping[str, list[tuple[int, ...]]], buffers: bool) -> ReplicaMismatchError:
    """The error for leaves that differ though all ranks should hold the same."""
    named = [
        f"{name} (the same on rank{'s' if len(groups[0]) > 1 else ''} "
        f"{' and on '.join(', '.join(map(str, ranks)) for ranks in groups)})"
        for name, groups in list(differing.items())[:_NAMED]
    ]
    more = f" and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
    hint = (
        " Buffers differ after a forward pass under DistributedDataParallel, which takes rank 0's "
        "before the next: use SyncBatchNorm, or SaveOptions(replicas_from=0)."
        if buffers
        else " SaveOptions(replicas_from=RANK) takes those of one rank."
    )
    return ReplicaMismatchError(
        f"ranks hold different values of what is replicated: {'; '.join(named)}{more}. Nothing "
        f"was saved.{hint}"
    )


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
    if [[*place] for place in places] != wanted_places:
        raise SaveError(
            f"rank {operation.rank} saves {_names(places)}, and rank 0 {_names(wanted_places)}; "
            "every rank must save a state of the same form. Nothing was saved"
        )
    differing = {
        str(index): msgspec.Raw(piece)
        for index, piece in enumerate(own)
        if digest(piece).hex() != digests[index] or _has_own(flat.pieces[places[index]])
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
    return per_rank_node(values)


def _merge_tagged(
    values: Sequence[Any], tag: str, place: Place, agreed: frozenset[Place]
) -> object | None:
    """Tuples and dicts that JSON has not; ``None`` if they have to be taken as they are."""
    payloads = [value[TAG_KEY][1] for value in values]
    if {_tag(value) for value in values} != {tag} or len({len(p) for p in payloads}) != 1:
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


def _key_step(key: object) -> object:
    return key if isinstance(key, str | int) else str(key)


def _refuse_agreed(values: Sequence[Any], place: Place, agreed: frozenset[Place]) -> None:
    """Values of modules and optimizers, or of what holds them, must be the same on all ranks."""
    within = any(place[:n] in agreed for n in range(len(place) + 1))
    around = any(other[: len(place)] == place for other in agreed)
    if not within and not around:
        return
    by_value: dict[bytes, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        by_value[msgspec.json.encode(value)].append(rank)
    told = "; ".join(
        f"rank {', '.join(map(str, ranks))}: {value[:100].decode('utf-8', 'replace')}"
        for value, ranks in list(by_value.items())[:_NAMED]
    )
    raise ReplicaMismatchError(
        f"{'.'.join(map(str, place)) or 'the state'} differs between ranks ({told}), and modules "
        "and optimizers must be of the same form and values on all; nothing was saved"
    )


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
