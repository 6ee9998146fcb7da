"""verify: faults with their tensor and file, samples, and going on after an interrupt."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from cli_tools import COMMAND, holdfast, refused

from holdfast.catalog import Catalog

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """256 MiB, which a verification with a state reads in four parts."""
    root = tmp_path_factory.mktemp("large")
    state = {f"t{nth}": np.full(32 * MIB, nth, np.uint8) for nth in range(8)}
    Catalog(root).write("big", state)
    return root


def test_an_intact_store_is_verified_whole(store):
    ran = holdfast("verify", store, "--all")
    assert ran.code == 0
    assert [line.split(",")[0] for line in ran.out.splitlines()] == [
        *("step_300: intact", "step_200: intact", "step_100: intact")
    ]


def test_every_kind_of_damage_is_named_with_its_file(own_store):
    (flipped,) = (own_store / "step_100").glob("*.safetensors")
    data = bytearray(flipped.read_bytes())
    data[data.index(Catalog(own_store).open("step_100").read("model.weight").tobytes()) + 9] ^= 1
    flipped.write_bytes(data)
    (cut,) = (own_store / "step_200").glob("*.safetensors")
    os.truncate(cut, cut.stat().st_size - 1)
    record = own_store / "step_300" / "metadata.json"
    record.write_bytes(record.read_bytes().replace(b'"step":300', b'"step":301'))
    ran = holdfast("verify", own_store, "--all", "--json")
    assert ran.code == 1
    found = {each["name"]: each["damage"] for each in ran.json["checkpoints"]}
    (bit,) = found["step_100"]
    assert bit["file"] == f"step_100/{flipped.name}"
    assert bit["tensor"] == "model.weight"
    assert "are not what was written" in bit["problem"]
    assert [each["file"] for each in found["step_200"]] == [f"step_200/{cut.name}"]
    assert [each["file"] for each in found["step_300"]] == ["step_300/metadata.json"]
    text = holdfast("verify", own_store / "step_100")
    assert text.code == 1
    assert text.out.startswith(f"DAMAGED step_100/{flipped.name}: tensor 'model.weight': bytes")
    listed = holdfast("ls", own_store)
    assert listed.code == 1
    assert "step_300" in listed.out
    assert "DAMAGED" in listed.out
    assert "cannot be read" in listed.err


def test_what_a_newer_holdfast_wrote_is_not_called_damaged(own_store):
    record = own_store / "step_200" / "metadata.json"
    record.write_bytes(record.read_bytes().replace(b'"version":1', b'"version":9', 1))
    listed = holdfast("ls", own_store)
    assert (listed.code, "NEWER" in listed.out, "DAMAGED" in listed.out) == (1, True, False)
    (told,) = holdfast("ls", own_store, "--json").json["unreadable"]
    assert (told["name"], told["newer"]) == ("step_200", True)
    alone = refused("verify", own_store / "step_200", code=4, saying="use a newer holdfast")
    assert alone.out == ""
    ran = holdfast("verify", own_store, "--all")
    assert (ran.code, ran.out.count("intact"), "DAMAGED" in ran.out) == (4, 2, False)
    assert "use a newer holdfast" in ran.err
    document = holdfast("verify", own_store, "--all", "--json").json
    assert [each["name"] for each in document["checkpoints"]] == ["step_300", "step_100"]
    assert [each["name"] for each in document["newer"]] == ["step_200"]
    (cut,) = (own_store / "step_100").glob("*.safetensors")
    os.truncate(cut, cut.stat().st_size - 1)
    assert holdfast("verify", own_store, "--all").code == 1


SPARING = """
import errno, mmap, os, sys
mapped = mmap.mmap
def sparing(fd, nbytes, **how):
    if nbytes > 8 << 20:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    return mapped(fd, nbytes, **how)
mmap.mmap = sparing
from holdfast.cli import main
main()
"""


def test_what_there_is_no_memory_for_is_not_passed_over(large):
    command = [sys.executable, "-c", SPARING, "verify", str(large), "--all"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode not in {0, 1, 70}
    assert "there is too little memory to read the checkpoint" in ran.stderr
    assert "passed over" not in ran.stderr


def test_a_sample_reads_its_share_the_same_for_the_same_seed(large):
    reads = [
        holdfast("verify", large, "--sample", "25%", "--seed", seed, "--json").json
        for seed in (1, 1)
    ]
    first, second = (each["checkpoints"][0] for each in reads)
    assert first["checked_bytes"] == second["checked_bytes"] == 64 * MIB
    assert first["share"] == 0.25
    assert first["intact"]


def test_an_interrupted_verification_goes_on_where_it_was(large, tmp_path):
    state = tmp_path / "state.json"
    for _ in range(20):  # until one is interrupted before it is through
        code, line = interrupted(large, state)
        if code == 130:
            break
    assert (code, line) == (
        130,
        f"holdfast: interrupted; the same command goes on from {state}\n",
    )
    seen = json.loads(state.read_text())["checkpoints"]["big"]
    assert 0 < len(seen["done"]) < seen["of"] == 4
    before = seen["checked_bytes"]
    refused("verify", large, "--state", state, "--sample", "10%", code=2, saying="of another")
    refused("verify", tmp_path.parent, "--state", state, "--all", code=2, saying="of another")
    ran = holdfast("verify", large, "--state", state, "--json").json["checkpoints"][0]
    assert ran["checked_bytes"] == 256 * MIB
    assert ran["read_bytes"] == 256 * MIB - before
    assert not state.exists()


def interrupted(store, state):
    """Verify until the first part is in the state, and interrupt it there."""
    state.unlink(missing_ok=True)
    process = subprocess.Popen(
        ["nice", "-n", "19", *COMMAND, "verify", store, "--state", state],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not state.exists():
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def test_what_was_seen_of_another_save_counts_for_nothing(store, tmp_path):
    state = tmp_path / "state.json"
    found = Catalog(store).find("step_100").record
    seen = {"attempt": "0" * 16, "of": 1, "done": [1], "checked_bytes": 7, "damage": []}
    document = {
        "format": "holdfast-verify-1",
        "store": Catalog(store).storage.url,
        "sample": "100%",
        "seed": 0,
        "checkpoints": {"step_100": seen},
    }
    state.write_text(json.dumps(document))
    ran = holdfast("verify", store / "step_100", "--state", state, "--json").json["checkpoints"][0]
    assert ran["read_bytes"] == ran["checked_bytes"] > 7
    seen["attempt"] = found.attempt  # of this save: nothing is left to be read
    seen["damage"] = [["step_100/x", "w", "was bad"]]
    state.write_text(json.dumps(document))
    again = holdfast("verify", store / "step_100", "--state", state, "--json")
    assert again.code == 1
    assert again.json["checkpoints"][0]["read_bytes"] == 0
    assert again.json["checkpoints"][0]["damage"][0]["problem"] == "was bad"
    state.write_text("{}")
    refused("verify", store / "step_100", "--state", state, code=2, saying="no state of holdfast")
