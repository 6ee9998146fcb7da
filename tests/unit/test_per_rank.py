"""Values that differ from rank to rank, in one tree."""

import msgspec
import numpy as np
import pytest

from holdfast.catalog import Catalog
from holdfast.errors import CorruptedError, SaveError
from holdfast.format import LeafRef, PerRank, decode_value, encode_value, per_rank_node
from holdfast.storage import MemoryStorage


def stored(value, **options):
    return msgspec.json.decode(msgspec.json.encode(encode_value(value, **options)))


@pytest.mark.parametrize(
    "value",
    [
        PerRank((1,)),
        PerRank((None, {"a": (1, 2)}, [PerRank(("x", b"y"))])),
        {"rng": PerRank(({"seed": 1}, {"seed": 2})), "step": 3},
        [PerRank((LeafRef(kind="tensor", name="x"), 0.5))],
        {3: PerRank((1, 2))},
    ],
)
def test_it_comes_back_as_it_was(value):
    assert decode_value(stored(value)) == value


def test_it_is_stored_as_a_list_with_its_tag():
    assert encode_value(PerRank((1, "b"))) == {"$": ["per_rank", [1, "b"]]}


def test_a_node_is_made_of_values_that_are_encoded_already():
    values = (("a", 1), {"x": 2}, LeafRef(kind="array", name="n"))
    node = per_rank_node([encode_value(value) for value in values])
    assert node == encode_value(PerRank(values))
    assert decode_value(node) == PerRank(values)


def test_the_rank_is_a_step_of_the_path_of_a_leaf():
    asked = []

    def leaf(path, value):
        asked.append(path)
        return LeafRef(kind="tensor", name=str(len(asked)))

    class Tensor:
        pass

    encode_value({"rng": PerRank(({"cpu": Tensor()}, [Tensor()])), "w": Tensor()}, leaf=leaf)
    assert asked == [("rng", "@0", "cpu"), ("rng", "@1", 0), ("w",)]


def test_arrays_in_it_are_leaves_of_a_checkpoint_named_by_their_rank():
    catalog = Catalog(MemoryStorage())
    state = {"rng": PerRank(tuple({"state": np.arange(3) + rank} for rank in range(2)))}
    catalog.write("a", state)
    assert [*catalog.open("a").tensors] == ["rng.@0.state", "rng.@1.state"]
    found = catalog.read("a")["rng"]
    assert [own["state"].tolist() for own in found.values] == [[0, 1, 2], [1, 2, 3]]


def test_what_cannot_be_stored_is_named_with_its_rank():
    with pytest.raises(SaveError, match=r"state\['rng'\]\['@1'\] is a function"):
        encode_value({"rng": PerRank((1, lambda: None))})


@pytest.mark.parametrize("value", [{PerRank((1,)): 2}, {PerRank((1,))}, {(PerRank((1,)),): 0}])
def test_it_is_no_key_and_no_member(value):
    with pytest.raises(SaveError, match="the same on every rank"):
        encode_value(value)


@pytest.mark.parametrize(
    ("encoded", "words"),
    [
        ({"$": ["per_rank", []]}, "has none"),
        ({"$": ["per_rank", 3]}, "a list is missing"),
        ({"$": ["per_rank", [1, {"$": ["float", "x"]}]]}, r"state\['@1'\] is damaged"),
        ({"$": ["set", [{"$": ["per_rank", [1]]}]]}, "no value per rank can be there"),
    ],
)
def test_damage_is_told(encoded, words):
    with pytest.raises(CorruptedError, match=words):
        decode_value(encoded)


@pytest.mark.parametrize("values", [(), [1], None])
def test_it_has_a_value_for_every_rank_of_at_least_one(values):
    with pytest.raises(ValueError, match="a tuple with a value for every rank"):
        PerRank(values)
    if not values:
        with pytest.raises(ValueError, match="one for every rank"):
            per_rank_node(values or ())


def test_it_counts_as_one_container_for_the_depth():
    value: object = 1
    for _ in range(64):
        value = PerRank((value,))
    assert decode_value(stored(value)) == value
    with pytest.raises(SaveError, match="nested more than 64 deep"):
        encode_value(PerRank((value,)))
