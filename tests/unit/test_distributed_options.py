"""Options of saves and loads, and what a load reports."""

import copy
import dataclasses
import datetime as dt
import pickle
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from holdfast.catalog import Catalog
from holdfast.distributed._options import (
    CheckpointFormat,
    CheckpointOptions,
    LoadOptions,
    SaveOptions,
)
from holdfast.distributed._result import (
    CheckpointLoadResult,
    CheckpointMetadata,
    Difference,
    LoadReport,
    likely_renames,
)
from holdfast.distributed._validation import FullReadChecker, SameWorldSize
from holdfast.errors import IncompatibleVersionError
from holdfast.format import CommitRecord, CompressionLevel
from holdfast.resilience import RetryPolicy
from holdfast.storage import MemoryStorage, StorageOptions


def test_nothing_need_be_given():
    save, load, options = SaveOptions(), LoadOptions(), CheckpointOptions()
    assert save.format is CheckpointFormat.MULTI_SHARD
    assert save.compression_level is CompressionLevel.NONE
    assert (save.custom_metadata, save.metrics, save.step) == ({}, {}, None)
    assert load.strict
    assert load.resharding_strategy == "parallel"
    assert (options.storage, options.retry_policy) == ("./checkpoints", RetryPolicy())
    assert options.default_timeout_s == 600


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("checkpoint_prefix", ""),
        ("checkpoint_prefix", "../a"),
        ("checkpoint_prefix", "a/metadata.json"),
        ("checkpoint_prefix", 7),
        ("format", "tar"),
        ("format", ["multi_shard"]),
        ("compression_level", "very"),
        ("compression_level", 1),
        ("include_optimizer", 1),
        ("include_rng_state", None),
        ("timeout_s", 0),
        ("timeout_s", float("nan")),
        ("timeout_s", "10"),
        ("custom_metadata", [("a", 1)]),
        ("custom_metadata", {1: "a"}),
        ("step", -1),
        ("step", 2**63),
        ("step", 1.0),
        ("step", True),
        ("metrics", 0.5),
        ("metrics", {"loss": "low"}),
        ("overwrite", "yes"),
        ("check_replicas", 0),
        ("replicas_from", -1),
        ("replicas_from", 0.0),
        ("progress", "bar"),
    ],
)
def test_a_save_option_that_cannot_be_meant_is_refused_by_its_name(field, value):
    with pytest.raises(ValueError, match=field) as caught:
        SaveOptions(**{field: value})
    shown = next(iter(value.items())) if isinstance(value, dict) else (value,)
    assert any(repr(part) in str(caught.value) for part in shown)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("checkpoint_prefix", "/a"),
        ("load_optimizer", 1),
        ("load_rng_state", "no"),
        ("resharding_strategy", "clever"),
        ("resharding_strategy", ["parallel"]),
        ("timeout_s", -1),
        ("skip_validation", 0),
        ("strict", None),
        ("include", "model.*"),
        ("include", 5),
        ("include", ["model.*", 5]),
        ("in_place", "yes"),
        ("remap", 0),
        ("progress", True),
    ],
)
def test_a_load_option_that_cannot_be_meant_is_refused_by_its_name(field, value):
    with pytest.raises(ValueError, match=field) as caught:
        LoadOptions(**{field: value})
    assert repr(value if not isinstance(value, list) else value[-1]) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("storage", None),
        ("storage", ""),
        ("storage", 5),
        ("retry_policy", 3),
        ("retry_policy", None),
        ("integrity_checkers", FullReadChecker()),
        ("integrity_checkers", [lambda checkpoint: []]),
        ("compatibility_checkers", [None]),
        ("default_timeout_s", 0),
        ("default_timeout_s", None),
    ],
)
def test_an_option_of_a_checkpointer_that_cannot_be_meant_is_refused_by_its_name(field, value):
    with pytest.raises(ValueError, match=field):
        CheckpointOptions(**{field: value})


def test_a_checker_needs_a_name():
    class Nameless:
        def check(self, checkpoint):
            return []

    with pytest.raises(ValueError, match="integrity_checkers must have a name"):
        CheckpointOptions(integrity_checkers=[Nameless()])


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="'parallel', 'broadcast', 'simple'"):
        LoadOptions(resharding_strategy="clever")
    with pytest.raises(ValueError, match="'single_file', 'multi_shard', 'consolidated'"):
        SaveOptions(format="tar")
    with pytest.raises(ValueError, match="'none', 'fast', 'balanced', 'maximum'"):
        SaveOptions(compression_level="very")


def test_texts_of_a_configuration_file_become_what_they_mean():
    options = SaveOptions(format="single_file", compression_level="fast", timeout_s=5)
    assert options.format is CheckpointFormat.SINGLE_FILE
    assert options.compression_level is CompressionLevel.FAST
    assert isinstance(options.timeout_s, float)


def test_numpy_numbers_are_numbers():
    options = SaveOptions(step=np.int64(7), metrics={"loss": np.float32(0.5)})
    assert (options.step, type(options.step)) == (7, int)
    assert options.metrics == {"loss": 0.5}
    assert type(options.metrics["loss"]) is float


@pytest.mark.parametrize("level", ["fast", CompressionLevel.BALANCED, "maximum"])
def test_files_for_hugging_face_are_not_compressed(level):
    with pytest.raises(ValueError, match=r"compression_level .* is refused: Hugging Face files"):
        SaveOptions(format="consolidated", compression_level=level)
    assert SaveOptions(format="consolidated", compression_level="none")


def test_options_do_not_change_with_what_they_were_made_from():
    custom, metrics, include, checkers = {"git": "abc"}, {"loss": 0.5}, ["model.*"], []
    save = SaveOptions(custom_metadata=custom, metrics=metrics)
    load = LoadOptions(include=include)
    options = CheckpointOptions(integrity_checkers=checkers)
    custom["git"], metrics["loss"] = "changed", 9.0
    include.append("*")
    checkers.append(FullReadChecker())
    assert save.custom_metadata == {"git": "abc"}
    assert save.metrics == {"loss": 0.5}
    assert load.include == ("model.*",)
    assert options.integrity_checkers == ()


def test_options_cannot_be_changed():
    options = SaveOptions(metrics={"loss": 0.5})
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.overwrite = True
    with pytest.raises(TypeError):
        options.metrics["loss"] = 0.25


@pytest.mark.parametrize(
    "options",
    [
        SaveOptions(step=5, metrics={"loss": 0.5}, custom_metadata={"git": ["abc"]}),
        LoadOptions(include=["model.*"], strict=False),
    ],
)
def test_options_can_be_sent_copied_and_varied(options):
    assert pickle.loads(pickle.dumps(options)) == options
    assert copy.deepcopy(options) == options
    assert dataclasses.replace(options, timeout_s=5.0) != options
    assert type(options)(**dataclasses.asdict(options)) == options
    assert "Frozen" not in repr(options)


def test_which_patterns_fit_a_place():
    options = LoadOptions(include=["model.*", "model.layers.*", "extra.step", "odd[1]"])
    assert options.fitting("model.layers.0.weight") == ("model.*", "model.layers.*")
    assert options.fitting("extra.step") == ("extra.step",)
    assert options.fitting("odd[1]") == ("odd[1]",)
    for other in ("optimizer.model.x", "extra.steps", "Model.x", "model"):
        assert options.fitting(other) == ()
    assert LoadOptions().fitting("model.x") == LoadOptions(include=[]).fitting("model.x") == ()


@pytest.mark.parametrize(
    "storage", ["s3://bucket/run", Path("runs"), MemoryStorage(), StorageOptions(url="memory://")]
)
def test_a_storage_may_be_given_in_several_ways(storage):
    options = CheckpointOptions(
        storage=storage, integrity_checkers=[FullReadChecker()], compatibility_checkers=()
    )
    assert options.storage is storage
    assert CheckpointOptions(compatibility_checkers=[SameWorldSize()]).compatibility_checkers


# ---- what a load reports


RECORD = CommitRecord(
    state="committed",
    ordinal=4,
    attempt="00000000000000aa",
    created="2026-01-31T12:00:00Z",
    world_size=8,
    writer="holdfast test",
    step=100,
    metrics={"loss": 0.5},
)


def test_the_metadata_of_a_checkpoint_is_what_its_record_says():
    catalog = Catalog("memory://")
    catalog.write("a", {"x": np.zeros(3)}, step=7, metrics={"loss": 0.5}, custom={"git": "abc"})
    opened = catalog.open("a")
    metadata = CheckpointMetadata.of("a", opened._found.record, opened.custom)
    info = catalog.info("a")
    assert (metadata.prefix, metadata.step, metadata.world_size) == ("a", 7, 1)
    assert (metadata.metrics, metadata.custom_metadata) == ({"loss": 0.5}, {"git": "abc"})
    assert metadata.format is CheckpointFormat.MULTI_SHARD
    assert metadata.created == info.timestamp
    assert metadata.created.tzinfo is dt.UTC
    assert (metadata.ordinal, metadata.size_bytes) == (info.ordinal, info.size_bytes)
    assert metadata.version == "1"


@pytest.mark.parametrize(
    ("custom", "seen"), [(None, {}), ({"a": 1}, {"a": 1}), ("text", {"custom": "text"})]
)
def test_custom_metadata_is_always_a_dict(custom, seen):
    assert CheckpointMetadata.of("a", RECORD, custom).custom_metadata == seen


def test_a_format_of_a_newer_version_is_told_as_such():
    record = msgspec.structs.replace(RECORD, shard_format="holographic")
    with pytest.raises(IncompatibleVersionError, match="'holographic'") as caught:
        CheckpointMetadata.of("a", record, None)
    assert caught.value.path == "a/metadata.json"


REPORT = LoadReport(
    missing=("model.new",),
    unexpected=("model.old", "model.ünder"),
    shapes=(Difference(place="model.w", stored="(3, 4)", wanted="(3, 5)"),),
    dtypes=(Difference(place="model.b", stored="F32", wanted="torch.bfloat16"),),
    renames=(("model.new", "model.old"),),
    other=("The optimizer's groups cannot be matched.",),
)


def test_a_report_for_people():
    assert REPORT.text().splitlines() == [
        "not in the checkpoint (1):",
        "  model.new",
        "in the checkpoint, but not wanted (2):",
        "  model.old",
        "  model.ünder",
        "of another shape (1):",
        "  model.w: (3, 4) is stored, (3, 5) is wanted",
        "of another dtype (1):",
        "  model.b: F32 is stored, torch.bfloat16 is wanted",
        "likely renamed (1):",
        "  model.old (stored) -> model.new (wanted)",
        "also (1):",
        "  The optimizer's groups cannot be matched.",
    ]
    assert LoadReport().text() == "everything fits"


def test_a_long_report_is_cut():
    names = tuple(f"model.{index}" for index in range(500))
    lines = LoadReport(missing=names, unexpected=names[:20]).text().splitlines()
    assert lines[:2] == ["not in the checkpoint (500):", "  model.0"]
    assert lines[20:22] == ["  model.19", "  ... and 480 more"]
    assert lines[22] == "in the checkpoint, but not wanted (20):"
    assert lines[-1] == "  model.19"


def test_a_report_is_clean_only_if_nothing_is_in_it():
    assert LoadReport().is_clean
    for field in dataclasses.fields(LoadReport):
        only = LoadReport(**{field.name: getattr(REPORT, field.name)})
        assert not only.is_clean


def test_the_reports_of_ranks_become_one():
    other = LoadReport(
        missing=("model.new", "model.x"),
        shapes=(
            *REPORT.shapes,
            Difference(place="model.w", stored="(3, 4)", wanted="(3, 6)"),
        ),
    )
    merged = LoadReport.merge([LoadReport(), REPORT, other])
    assert merged.missing == ("model.new", "model.x")
    assert merged.unexpected == REPORT.unexpected
    assert [each.wanted for each in merged.shapes] == ["(3, 5)", "(3, 6)"]
    assert LoadReport.merge([]) == LoadReport()
    assert LoadReport.merge([REPORT]) == REPORT


def test_a_report_travels_between_ranks():
    assert LoadReport.decode(REPORT.encode()) == REPORT
    assert LoadReport.decode(LoadReport().encode()) == LoadReport()


def test_a_result_can_be_sent():
    result = CheckpointLoadResult(
        metadata=CheckpointMetadata.of("a", RECORD, {"git": "abc"}),
        source_world_size=8,
        target_world_size=2,
        was_resharded=True,
        report=REPORT,
        not_restored=("rng",),
    )
    assert pickle.loads(pickle.dumps(result)) == result


# ---- likely renames


def renamed(changes, names, shape=lambda name: (4,)):
    """What is told of names of which some are wanted otherwise, as ``changes`` makes them, and
    what is true."""
    pairs = {changes(name): name for name in names if changes(name) != name}
    missing, stored = [*pairs], [*pairs.values()]
    random.Random(3).shuffle(stored)
    stored_shapes = {name: shape(name) for name in stored}
    wanted_shapes = {new: shape(old) for new, old in pairs.items()}
    told = likely_renames(missing, stored, stored_shapes, wanted_shapes)
    return told, tuple(pairs.items())


PARTS = ["attn.q.weight", "attn.k.weight", "attn.q.bias", "mlp.fc1.weight", "mlp.fc2.weight", "n.w"]


def layers(count, *stems):
    return [f"{stem}.{index}.{part}" for stem in stems for index in range(count) for part in PARTS]


def two_shapes(name):
    return (4,) if "bias" in name else (4, 4)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("encoder", "backbone"),
        ("model.encoder", "model.backbone"),
        ("model.encoder", "encoder"),
        ("encoder", "module.encoder"),
        ("h", "model.layers"),
        ("attn", "self_attention"),
        ("mlp.fc", "ffn.linear_"),
    ],
)
def test_a_part_of_many_names_was_changed(old, new):
    stem = old if old not in {"attn", "mlp.fc"} else "layers"
    names = layers(12, stem)
    told, true = renamed(lambda name: name.replace(old, new, 1), names, two_shapes)
    assert len(told) >= 24
    assert told == true


def test_two_stems_that_were_both_renamed_are_not_confused():
    def change(name):
        return name.replace("enc.", "encoder.").replace("dec.", "decoder.")

    told, true = renamed(change, layers(6, "model.enc", "model.dec"))
    assert told == true


def test_ends_that_were_renamed():
    names = [f"h.{i}.norm{n}.{end}" for i in range(9) for n in "12" for end in ("gamma", "beta")]
    told, true = renamed(lambda n: n.replace("gamma", "weight").replace("beta", "bias"), names)
    assert told == true
    # Too short to be alike: only that all of them changed in the same way tells.
    told, true = renamed(lambda n: n.replace("gamma", "weight"), ["a.gamma", "b.gamma", "c.gamma"])
    assert told == true


def test_ten_thousand_names_of_ten_thousand():
    names = layers(1700, "model.encoder")
    told, true = renamed(lambda name: name.replace("encoder", "backbone"), names, two_shapes)
    assert len(told) == 10_200
    assert told == true


def test_ten_thousand_names_that_have_nothing_in_common():
    rng = random.Random(7)

    def name():
        return ".".join("".join(rng.choices("abcdefgh", k=6)) for _ in range(6))

    missing, unexpected = ([f"model.{name()}.weight" for _ in range(10_000)] for _ in range(2))
    told = likely_renames(missing, unexpected, {}, {})
    assert len(told) < 100


def test_names_of_another_shape_are_not_the_same():
    told, true = renamed(lambda name: f"backbone.{name}", ["a", "b", "c"])
    assert told == true
    missing, unexpected = zip(*true, strict=True)
    stored, wanted = dict.fromkeys(unexpected, (4,)), dict.fromkeys(missing, (4,))
    told = likely_renames(missing, unexpected, stored, {**wanted, "backbone.b": (5,)})
    assert told == (("backbone.a", "a"), ("backbone.c", "c"))


def test_a_few_names_that_are_alike():
    missing, unexpected = ["net.1.w", "net.3.w"], ["net.2.w", "net.0.w"]
    stored, wanted = {"net.0.w": (8,), "net.2.w": (9,)}, {"net.1.w": (8,), "net.3.w": (9,)}
    told = likely_renames(missing, unexpected, stored, wanted)
    assert told == (("net.1.w", "net.0.w"), ("net.3.w", "net.2.w"))
    stored, wanted = {"classifier.weight": (10, 4), "old": (3,)}, {"head.weight": (10, 4)}
    told = likely_renames(["head.weight"], ["classifier.weight", "old"], stored, wanted)
    assert told == (("head.weight", "classifier.weight"),)


def test_names_that_are_not_alike_are_not_paired():
    missing, unexpected = ["decoder.position", "zzz"], ["scale", "tokens", "quux"]
    assert likely_renames(missing, unexpected, {}, {}) == ()
    assert likely_renames([], ["a"], {}, {}) == ()
    assert likely_renames(["a"], [], {}, {}) == ()


def test_no_name_is_used_twice():
    rng = random.Random(11)
    words = ["a", "b", "enc", "dec", "0", "1", "2", "weight", "bias"]

    def names():
        return [*{".".join(rng.choices(words, k=rng.randint(1, 4))) for _ in range(60)}]

    for _ in range(50):
        missing, unexpected = names(), names()
        shapes = {name: (len(name) % 2,) for name in missing + unexpected}
        told = likely_renames(missing, unexpected, shapes, shapes)
        assert told
        news, olds = [new for new, _ in told], [old for _, old in told]
        assert len(set(news)) == len(news)
        assert len(set(olds)) == len(olds)
        assert set(news) <= set(missing)
        assert set(olds) <= set(unexpected)
        assert all(shapes[new] == shapes[old] for new, old in told)


def test_very_long_names_take_no_time():
    missing = ["x" * 60_000 + str(index) for index in range(20)]
    unexpected = ["y" * 60_000 + str(index) for index in range(20)]
    assert likely_renames(missing, unexpected, {}, {}) == ()
