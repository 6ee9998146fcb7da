"""The error tree: what users catch, and what survives the way to another rank."""

import copy
import pickle

import pytest

from holdfast import errors
from holdfast.errors import CheckpointError, ErrorKind, ErrorRecord, RankFailedError

CLASSES = [
    cls
    for cls in map(vars(errors).__getitem__, errors.__all__)
    if isinstance(cls, type) and issubclass(cls, CheckpointError)
]

FACTS = {
    "smallest_bytes": 1 << 30,
    "timeout_s": 2.5,
    "ranks": (1, 3),
    "retry_after_s": 4.0,
    "error_type": "ValueError",
    "layer_id": "block.3",
    "layers": ("a", "b", "a"),
}


def full(cls):
    return cls(
        "it broke",
        path="step_1/shard-0",
        rank=3,
        phase="write",
        **{name: FACTS[name] for name in cls.facts},
    )


def values(error):
    return (
        type(error),
        error.args,
        error.path,
        error.rank,
        error.phase,
        *(getattr(error, name) for name in error.facts),
    )


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    "travel", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
)
def test_an_error_survives_copy_and_pickle_with_all_its_facts(cls, travel):
    error = full(cls)
    assert values(travel(error)) == values(error)
    assert str(travel(error)) == str(error)


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_survives_its_record_with_all_its_facts(cls):
    error = full(cls)
    record = ErrorRecord.of(error, rank=9, phase="elsewhere")
    assert record.kind is cls.kind
    assert values(record.rebuild()) == values(error)


@pytest.mark.parametrize("cls", CLASSES)
def test_the_sentence_is_readable_also_where_a_keyerror_is_mixed_in(cls):
    assert str(cls("no such layer")) == "no such layer"
    assert str(full(cls)) == "it broke [rank 3, phase write, path step_1/shard-0]"
    assert full(cls).message == "it broke"


@pytest.mark.parametrize("cls", CLASSES)
def test_facts_not_given_are_none_and_unknown_ones_are_refused(cls):
    bare = cls("x")
    assert [bare.path, bare.rank, bare.phase] == [None, None, None]
    assert all(getattr(bare, name) is None for name in cls.facts)
    with pytest.raises(TypeError, match=f"{cls.__name__} has no fact named colour"):
        cls("x", colour="red")


def test_every_class_is_public_and_drawn_in_the_tree():
    for cls in CLASSES:
        assert cls.__name__ in errors.__doc__
    assert {cls.__name__ for cls in errors._CLASSES.values()} == {cls.__name__ for cls in CLASSES}


def test_every_kind_has_a_class_so_that_any_record_can_be_rebuilt():
    assert set(errors._PLAINEST) == set(ErrorKind)


@pytest.mark.parametrize(
    ("ours", "builtin"),
    [
        (errors.CheckpointNotFoundError, KeyError),
        (errors.TensorNotFoundError, KeyError),
        (errors.OperationTimeoutError, TimeoutError),
        (errors.ObjectExistsError, FileExistsError),
        (errors.ObjectNotFoundError, FileNotFoundError),
        (errors.DependencyCycleError, ValueError),
        (errors.PlanError, ValueError),
        (errors.UnknownLayerError, KeyError),
    ],
)
def test_the_builtin_of_the_same_meaning_catches_it(ours, builtin):
    with pytest.raises(builtin):
        raise ours("x")


def test_only_transient_storage_errors_are_transient():
    assert [cls for cls in CLASSES if cls.transient] == [errors.TransientStorageError]


def test_the_record_of_a_foreign_error_names_its_class_and_carries_its_traceback():
    try:
        {}["weight"]
    except KeyError as error:
        rebuilt = ErrorRecord.of(error, rank=2, phase="plan").rebuild()
    assert isinstance(rebuilt, RankFailedError)
    assert rebuilt.error_type == "KeyError"
    assert str(rebuilt) == "KeyError: 'weight' [rank 2, phase plan]"
    assert "On rank 2" in rebuilt.__notes__[0]
    assert '{}["weight"]' in rebuilt.__notes__[0]


def test_a_record_fills_in_rank_and_phase_only_where_the_error_has_none():
    record = ErrorRecord.of(errors.SaveError("x", phase="own"), rank=5, phase="other")
    assert (record.rank, record.phase) == (5, "own")


def test_a_record_never_builds_a_class_from_outside_the_tree():
    class Stranger(errors.CorruptedError):
        pass

    record = ErrorRecord.of(Stranger("bits"), rank=0)
    assert record.error == "Stranger"
    assert type(record.rebuild()) is errors.CorruptedError
