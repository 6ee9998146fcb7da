"""rm, prune, gc and doctor: what they change, and that nothing changes without a word."""

import functools
import importlib.metadata
import shutil

import numpy as np
import torch
from cli_tools import holdfast, refused

import holdfast as library
from holdfast.catalog import Catalog
from holdfast.cli._doctor_disk import filesystem
from holdfast.cli._doctor_machine import ranks


def names(store):
    return [info.prefix for info in Catalog(store).list()]


def test_rm_wants_a_yes_and_deletes_what_is_named(own_store):
    refused("rm", own_store / "step_100", code=2, saying=["--yes", "Delete step_100"])
    assert "step_100" in names(own_store)
    ran = holdfast("rm", "--yes", own_store / "step_100", own_store / "step_300")
    assert (ran.code, ran.out) == (0, "deleted step_100\ndeleted step_300\n")
    assert names(own_store) == ["step_200"]
    refused("rm", "--yes", own_store, code=3, saying="no checkpoint")


def test_rm_refuses_what_others_refer_to(tmp_path):
    """Also where the names have slashes, and the folder above is not the store."""
    model = torch.nn.Linear(300, 300)
    options = library.CheckpointOptions(storage=tmp_path / "s")
    with library.DistributedCheckpoint.create(options=options) as checkpoint:
        for name in ("exp/a", "other/b"):
            how = library.SaveOptions(checkpoint_prefix=name, incremental=True)
            checkpoint.save(model, options=how)
    shutil.copytree(tmp_path / "s", tmp_path / "copy", ignore=lambda *_: [".holdfast.lock"])
    shown = holdfast("show", tmp_path / "copy/other/b")  # no lock file: its files tell the store
    assert shown.out.splitlines()[1].split() == ["store", (tmp_path / "copy").as_uri()]
    assert "refers to exp/a" in shown.out
    assert holdfast("verify", tmp_path / "copy/other/b").code == 0
    path = tmp_path / "s/exp/a"
    refused("rm", "--yes", path, code=5, saying=["other/b needs files of it", "nothing was del"])
    assert holdfast("rm", "--yes", "--force", path).code == 0
    assert names(tmp_path / "s") == ["other/b"]
    assert Catalog(tmp_path / "s").verify("other/b").is_intact
    refused("gc", tmp_path / "s/other", "--yes", code=2, saying="inside of the store")
    refused("prune", tmp_path / "s/other", "--keep-last", 1, code=2, saying="inside of the store")


def test_rm_knows_what_is_needed_in_a_folder_that_is_a_store_of_its_own(tmp_path):
    """And takes nothing else of that name for it."""
    state = {"w": torch.ones(100_000)}
    for store, name in (("runs/a", "base"), ("runs/a", "ref"), ("runs", "base")):
        options = library.CheckpointOptions(storage=tmp_path / store)
        with library.DistributedCheckpoint.create(options=options) as checkpoint:
            how = library.SaveOptions(checkpoint_prefix=name, incremental=name == "ref")
            checkpoint.save(state, options=how)
    runs = tmp_path / "runs"
    refused("rm", "--yes", f"{runs}//a/base", code=5, saying="a/ref needs files of it")
    assert holdfast("rm", "--yes", f"{runs}//base").code == 0
    assert names(runs) == ["a/ref", "a/base"]


def test_rm_removes_a_broken_record_only_by_force(own_store):
    record = own_store / "step_200" / "metadata.json"
    record.write_bytes(record.read_bytes()[:-30])
    refused("rm", "--yes", own_store / "step_200", code=4, saying="--force")
    assert holdfast("rm", "--yes", "--force", own_store / "step_200").code == 0
    assert names(own_store) == ["step_300", "step_100"]
    assert holdfast("ls", own_store).code == 0


def test_advice_to_remove_a_broken_one_names_a_command_that_does_it(own_store):
    record = own_store / "step_200" / "metadata.json"
    record.write_bytes(record.read_bytes()[:-30])
    pruned = holdfast("prune", own_store, "--keep-last", 1)
    assert "(holdfast rm --force)" in pruned.out
    refused("rm", "--yes", own_store / "step_100", code=5, saying="(holdfast rm --force)")
    assert holdfast("rm", "--yes", "--force", own_store / "step_200").code == 0
    assert holdfast("prune", own_store, "--keep-last", 1).code == 0


def test_prune_is_a_dry_run_until_it_is_told(own_store):
    rules = ["--keep-last", 1, "--keep-best", "loss", "--keep-best", "accuracy:min"]
    dry = holdfast("prune", own_store, *rules)
    assert dry.code == 0
    assert "1 would be deleted; nothing was changed" in dry.out
    assert len(names(own_store)) == 3
    told = holdfast("prune", own_store, *rules, "--json").json
    assert (told["deleted"], told["done"]) == (["step_200"], False)
    assert told["rules"] == "keep_last(1) | keep_best('loss') | keep_best('accuracy')"
    assert holdfast("prune", own_store, *rules, "--yes").code == 0
    assert names(own_store) == ["step_300", "step_100"]
    refused("prune", own_store, code=2, saying="say what to keep")
    refused("prune", own_store, "--keep-within", "7", code=2, saying="7d")


def test_prune_keeps_what_has_no_step_if_steps_decide(tmp_path):
    for name in ("step_1000", "step_1500", "last"):
        library.save({"w": torch.zeros(2)}, tmp_path / "s" / name)
    ran = holdfast("prune", tmp_path / "s", "--keep-every", 1000, "--yes")
    assert ran.out.splitlines()[2].split(maxsplit=2) == ["step_1500", "stays", "it has no step"]
    assert names(tmp_path / "s") == ["last", "step_1500", "step_1000"]


def test_gc_says_what_is_loose_and_removes_it_when_told(own_store):
    loose = own_store / "dead" / "shard-0-0123456789abcdef.safetensors"
    loose.parent.mkdir()
    loose.write_bytes(b"left")
    dry = holdfast("gc", own_store)
    assert dry.out.startswith(f"no checkpoint names dead/{loose.name} (4 B)\n")
    assert loose.exists()
    done = holdfast("gc", own_store, "--yes", "--json").json
    assert done["deleted"] == [f"dead/{loose.name}"]
    assert not loose.exists()
    assert len(names(own_store)) == 3


def test_doctor_tries_out_a_folder_and_leaves_nothing(tmp_path):
    ran = holdfast("doctor", tmp_path / "not" / "yet", "--size", 4, "--json")
    found = {each["what"]: each for each in ran.json["findings"]}
    assert ran.code == (1 if any(each["verdict"] == "bad" for each in found.values()) else 0)
    assert {*found} >= {
        *("machine", "torch", "gloo", "ranks", "filesystem", "free space", "direct I/O", "fsync"),
        *("create only if absent", "replace only what was seen", "write, durable", "read"),
    }
    assert found["create only if absent"]["found"] == "kept"
    assert found["torch"]["found"] == importlib.metadata.version("torch")
    assert [*tmp_path.iterdir()] == []


def test_doctor_looks_at_memory_as_at_any_storage():
    for typed in ("memory://", "MEMORY://"):
        ran = holdfast("doctor", typed, "--size", 1, "--json")
        assert (ran.code, ran.err) == (0, "")
        assert ran.json["store"].startswith("memory://")
        found = {each["what"]: each["found"] for each in ran.json["findings"]}
        assert found["create only if absent"] == found["replace only what was seen"] == "kept"
        assert {"small object", "write, durable", "read"} <= found.keys()
    refused("doctor", "memory://a", code=2, saying=["have no names", "'memory://a'"])


def test_doctor_says_what_is_wrong_with_ranks_and_disks(tmp_path):
    job = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert ranks({}).verdict == "ok"
    assert ranks(job).verdict == "ok"
    assert ranks(job | {"RANK": "2"}).verdict == "bad"
    assert "MASTER_ADDR" in ranks({"RANK": "0", "WORLD_SIZE": "1"}).advice
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/a rw\n"
        "2 1 0:5 / /data\\040a rw shared:1 - nfs4 host:/ rw\n"
        "3 1 0:6 / /data rw - overlay none rw\n"
    )
    assert [filesystem(mounts.__class__(p), mounts) for p in ("/x", "/data a/b", "/data/x")] == [
        *("ext4", "nfs4", "overlay")
    ]
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    ran = holdfast("doctor", blocked, "--json")
    assert ran.code == 1
    assert ran.json["findings"][-1]["verdict"] == "bad"


def test_verbs_work_on_an_object_store(bucket, monkeypatch):
    run = functools.partial(holdfast, env=bucket)
    for name, value in bucket.items():
        monkeypatch.setenv(name, value)
    catalog = Catalog("s3://bucket/run")
    for step in (1, 2):
        catalog.write(f"exp/step_{step}", {"w": np.arange(1000.0) * step}, step=step)
    assert run("ls", "s3://bucket/run").out.split()[8] == "exp/step_2"
    assert "refers" not in run("show", "s3://bucket/run/exp/step_1").out
    assert run("verify", "s3://bucket/run", "--all").code == 0
    assert run("diff", "s3://bucket/run/exp/step_1", "s3://bucket/run").code == 1
    where = "s3://bucket/run/exp//step_1"
    refused(
        *("rm", "--yes", "s3://bucket/run/exp/step_1"),
        code=2,
        saying=["store end?", where],
        env=bucket,
    )
    assert run("rm", "--yes", "s3://bucket/run//exp/step_1").code == 0
    assert [info.prefix for info in catalog.list()] == ["exp/step_2"]
    doctor = run("doctor", "s3://bucket/run", "--size", 1, "--json").json["findings"]
    verdicts = {each["what"]: each["found"] for each in doctor}
    assert verdicts["create only if absent"] == "kept"
    assert not [each for each in catalog.storage.list() if "doctor" in each.key]
    refused("ls", "s3://bucket/nothing", code=3, saying="no checkpoints", env=bucket)
    away = bucket | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    refused("ls", "s3://bucket/run", code=5, saying="holdfast: ", env=away)
