"""Every public name. A change here is a change users will notice: say so in CHANGELOG.md."""

import importlib

import pytest

import holdfast

SURFACE = {
    "contracts": """
        COMMIT_RECORD Clock Collectives Coordinator Data ObjectInfo ObjectWriter Operation
        ReadRange SMALL_OBJECT_BYTES Storage
    """,
    "coordination": "SoloCoordinator TimeoutHandler TorchCoordinator",
    "errors": """
        CheckpointError CheckpointExistsError CheckpointNotFoundError CircuitOpenError ClosedError
        CoordinationError CorruptedError DependencyCycleError ErrorKind ErrorRecord
        IncompatibleVersionError LoadError NoSpaceError ObjectChangedError ObjectExistsError
        ObjectNotFoundError OperationTimeoutError RankFailedError RankLostError RankTimeoutError
        RecomputationError ReplicaMismatchError SaveError StorageError TornSnapshotError
        TransientStorageError UnknownLayerError ValidationError
    """,
    "resilience": """
        CheckpointRollbackManager CircuitBreaker CircuitState FaultToleranceHandler RetryBudget
        RetryPolicy SystemClock
    """,
    "storage": "MemoryStorage",
    "testing": "FakeClock RankGang RankOutcome seeded_rng",
}


@pytest.mark.parametrize("room", SURFACE)
def test_a_room_offers_these_names_and_no_others(room):
    module = importlib.import_module(f"holdfast.{room}")
    assert sorted(module.__all__) == SURFACE[room].split()
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_the_top_offers_the_errors_and_the_rooms():
    expected = [*SURFACE["errors"].split(), *SURFACE, "__version__"]
    assert sorted(holdfast.__all__) == sorted(expected)
    assert [name for name in expected if not hasattr(holdfast, name)] == []
    assert dir(holdfast) == sorted(expected)
