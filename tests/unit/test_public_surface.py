"""Every public name. A change here is a change users will notice: say so in CHANGELOG.md."""

import importlib

import pytest

import holdfast

SURFACE = {
    "activation": """
        ActivationEvent ActivationPlan AppliedPlan AsyncRecomputationEngine CachePolicy
        CacheStats CheckpointConfig CheckpointManager CheckpointStrategy CheckpointedLayers
        DependencyGraph Fallback Held
        LayerRecomputationStats MemoryStats PeakReport PlanReport RecomputationCache
        RecomputationEngine RecomputationProfile RecomputationStats checkpoint checkpoint_layers
        default_manager measure_peak plan
    """,
    "catalog": """
        Attempt Catalog CheckpointInfo Damage GcReport OpenCheckpoint PruneReport
        Retention Scan TensorInfo Unreadable VerifyReport keep_best keep_every keep_last keep_within
    """,
    "cli": "main",
    "contracts": """
        COMMIT_RECORD CheckpointStore Clock Collectives Coordinator Data EARLY_BYTES
        ObjectInfo ObjectWriter Operation ReadRange SMALL_OBJECT_BYTES Storage
    """,
    "coordination": "SoloCoordinator TimeoutHandler TorchCoordinator",
    "distributed": """
        CheckpointFormat CheckpointInfo CheckpointLoadResult CheckpointMetadata
        CheckpointOptions CheckpointValidator CompatibilityChecker CompressionLevel Difference
        DistributedCheckpoint Finding FullReadChecker IntegrityChecker LoadOptions LoadReport
        PassedOver Preemption Progress PruneReport RequiredMetadata ReshardingStrategy ResumeResult
        Retention RichProgress SameWorldSize SaveHandle SaveOptions SaveRecord ValidationResult
        keep_best keep_every keep_last keep_within per_rank
    """,
    "errors": """
        BudgetError CheckpointError CheckpointExistsError CheckpointNotFoundError CircuitOpenError
        ClosedError CoordinationError CorruptedError DependencyCycleError ErrorKind
        ErrorRecord FallbackRequiresRewrapError
        IncompatibleVersionError LoadError NoSpaceError ObjectChangedError
        ObjectExistsError ObjectNotFoundError OperationTimeoutError PlanError RankFailedError
        RankLostError RankTimeoutError RecomputationError ReplicaMismatchError SaveError
        SaveInProgressError
        StorageError TensorNotFoundError TornSnapshotError TransientStorageError UnknownLayerError
        ValidationError
    """,
    "format": """
        CHUNK_BYTES ChunkTable CommitRecord CompressionLevel DIGEST_BYTES DType LeafRef
        PerRank PlacedEntry ShardEntry ShardLayout StoredCut StoredFile StoredPlacement StoredTensor
        TorchValue ValuePath chunk_digests codec_for compressed decode_record decode_value
        decompress_chunk digest digest_of dtype_of dtype_of_numpy encode_record encode_table
        encode_value entry_of_box file_digest header_bytes_needed leaf_digest numpy_dtype
        parse_shard_header parse_table per_rank_node plan_shard
    """,
    "integrations": "dcp huggingface lightning",
    "precision": """
        DynamicLossScaler FallbackRequiresRewrapError LossScalerStats MixedPrecisionCheckpoint
        MixedPrecisionOptimizer MixedPrecisionOptions MixedPrecisionStats Precision StepResult
        create_checkpoint load_and_restore load_checkpoint restore_checkpoint save_checkpoint
        take_over validate_checkpoint
    """,
    "reshard": """
        Box CopyRuns Grid Hole IndexRuns Layout Leaf LeafList Load Outside Overlap Part
        Placement RankGroup Replicate SavePlan Shard StridedShard Write boxes_met
        check_coverage chunk_spans coalesce copy_to_part group_ranks mesh_grid plan_load
        plan_save row_runs split_box
    """,
    "resilience": """
        CheckpointRollbackManager CircuitBreaker CircuitState FaultToleranceHandler
        RetryBudget RetryPolicy SystemClock
    """,
    "storage": """
        LocalStorage MemoryStorage ObjectStorage StorageOptions breaking deadlined limited
        open_storage retrying
    """,
    "testing": """
        FakeClock Fault FaultyStorage RankGang RankOutcome StorageCall StorageConformance
        seeded_rng
    """,
}

TOP = """
    ActivationPlan CheckpointFormat CheckpointInfo CheckpointLoadResult CheckpointOptions
    CompressionLevel DistributedCheckpoint LoadOptions MixedPrecisionOptimizer Preemption
    ResumeResult SaveHandle
    SaveOptions SaveRecord
    checkpoint checkpoint_layers keep_best keep_every keep_last keep_within load per_rank
    plan save
"""


@pytest.mark.parametrize("room", SURFACE)
def test_a_room_offers_these_names_and_no_others(room):
    module = importlib.import_module(f"holdfast.{room}")
    assert sorted(module.__all__) == SURFACE[room].split()
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_the_top_offers_the_errors_the_rooms_and_what_most_people_need():
    expected = [*SURFACE["errors"].split(), *TOP.split(), *SURFACE, "__version__"]
    assert sorted(holdfast.__all__) == sorted(expected)
    assert [name for name in expected if not hasattr(holdfast, name)] == []
    assert dir(holdfast) == sorted(expected)


def test_a_name_of_the_top_is_the_one_of_its_room():
    for name in set(TOP.split()) - {"load", "save"}:
        rooms = [room for room in ("activation", "precision") if name in SURFACE[room].split()]
        room = rooms[0] if rooms else "distributed"
        module = importlib.import_module(f"holdfast.{room}")
        assert getattr(holdfast, name) is getattr(module, name)
