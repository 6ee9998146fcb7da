"""The order in which a save reaches the disk: nothing is named before it is durable, and nothing
is promised before its name is."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from campaign import ROOT, Run
from recorder import RecordingSystem


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path, RecordingSystem(tmp_path))


def _of(recorder: RecordingSystem, node: int) -> list[str]:
    """What happened to a file, and to the folder that it was given its name in."""
    (made,) = (op for op in recorder.log if op.kind == "create" and op.node == node)
    story: list[str] = []
    for op in recorder.log:
        to_file = op.node == node or (op.kind in {"write", "size", "sync file"} and op.at == node)
        to_folder = op.kind == "sync folder" and op.at == made.at and story
        if to_file or to_folder or op.kind == "promised":
            story.append(op.kind)
    return story


def _named(recorder: RecordingSystem, pattern: str) -> int:
    (node,) = {op.node for op in recorder.log if re.fullmatch(pattern, op.new)}
    return node


def test_a_shard_is_written_synced_named_and_its_name_synced(run):
    run.save("step_1", 1)
    story = _of(run.recorder, _named(run.recorder, r"shard-.*"))
    assert story[:6] == ["create", "size", "write", "sync file", "rename", "sync folder"]


def test_the_record_is_written_synced_linked_and_its_name_synced_before_the_return(run):
    run.save("step_1", 1)
    story = _of(run.recorder, _named(run.recorder, r"metadata\.json"))
    assert story[:5] == ["create", "write", "sync file", "link", "sync folder"]
    assert story[-1] == "promised"


def test_the_record_is_begun_when_the_shards_names_are_durable(run):
    run.save("step_1", 1)
    log = run.recorder.log
    shard, record = (_named(run.recorder, name) for name in (r"shard-.*", r"metadata\.json"))
    kinds = [(op.kind, op.node) for op in log]
    renamed = kinds.index(("rename", shard))
    synced = next(n for n, op in enumerate(log) if op.kind == "sync folder" and n > renamed)
    assert log[synced].at == log[renamed].at
    assert synced < kinds.index(("create", record))


def test_an_overwrite_renames_over_the_record_and_deletes_only_then(run):
    run.save("step_1", 1)
    run.recorder.log.clear()
    run.save("step_1", 2, overwrite=True)
    story = [(op.kind, op.new or op.name) for op in run.recorder.log]
    replaced = next(n for n, s in enumerate(story) if s == ("rename", "metadata.json"))
    gone = [n for n, s in enumerate(story) if s[0] == "unlink" and s[1].startswith("shard-")]
    assert gone
    assert story[replaced + 1][0] == "sync folder"
    assert min(gone) > replaced + 1


def test_a_delete_unmakes_the_checkpoint_durably_before_a_shard_goes(run):
    run.save("step_1", 1)
    run.recorder.log.clear()
    run.delete("step_1")
    story = [(op.kind, op.new or op.name) for op in run.recorder.log]
    unmade = next(n for n, s in enumerate(story) if s[1] == "metadata.json")
    shard = next(n for n, s in enumerate(story) if s[0] == "unlink" and s[1].startswith("shard-"))
    assert story[unmade][0] in {"rename", "unlink"}
    assert story[unmade + 1][0] == "sync folder"
    assert unmade + 1 < shard


def test_a_new_folder_is_durable_before_anything_is_in_it(run):
    run.write("plain/a/b/c", b"bytes")
    made = {op.node: op for op in run.recorder.log if op.kind == "mkdir"}
    assert [op.name for op in made.values()] == [ROOT, "plain", "a", "b"]
    synced: set[int] = set()
    for n, op in enumerate(run.recorder.log):
        if op.kind == "sync folder":
            synced |= {m.node for m in made.values() if m.at == op.at and m in run.recorder.log[:n]}
        elif op.kind in {"create", "mkdir", "rename", "link"}:
            assert op.at in synced or op.at == run.recorder.base


def test_a_folder_that_another_made_is_synced_before_it_is_used(run, tmp_path):
    (tmp_path / ROOT / "plain").mkdir(parents=True)
    other = Run(tmp_path, RecordingSystem(tmp_path))
    other.write("plain/a", b"bytes")
    kinds = [op.kind for op in other.recorder.log]
    assert kinds[:4] == ["begin", "sync folder", "sync folder", "create"]
    other.write("plain/b", b"bytes")
    again = [op.kind for op in other.recorder.log[len(kinds) :]]
    assert again.index("create") < again.index("sync folder")


_PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from campaign import Run
from recorder import RecordingSystem

base = Path(sys.argv[1])
recorder = RecordingSystem(base)
Run(base, recorder).save("step_1", 1)
names = {"sync file": "fsync", "sync folder": "fsync", "create": "create", "write": "pwrite64",
    "mkdir": "mkdir", "rename": "rename", "link": "link", "unlink": "unlink"}
log = [op for op in recorder.log if op.kind in names and op.name != ".holdfast.lock"]
print("\\n".join(names[op.kind] for op in log))
"""

_CALLS = {
    "openat": "create", "pwrite64": "pwrite64", "fsync": "fsync", "mkdirat": "mkdir",
    "mkdir": "mkdir", "renameat": "rename", "rename": "rename", "renameat2": "rename",
    "linkat": "link", "link": "link", "unlinkat": "unlink", "unlink": "unlink",
    "write": "write", "fdatasync": "fsync", "pwritev": "write", "pwritev2": "write",
}  # fmt: skip


def test_the_recorded_order_is_what_the_kernel_saw(tmp_path):
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("looks at system calls by strace, which is not installed: install strace")
    trace = tmp_path / "trace"
    base = tmp_path / "base"
    base.mkdir()
    watched = ",".join(_CALLS)
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [strace, "-f", "-y", "-o", str(trace), "-e", f"trace={watched}", sys.executable, "-c",
         _PROGRAM, str(base), here],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    if "ptrace" in done.stderr:
        pytest.skip("looks at system calls by strace, which may not trace here (no ptrace allowed)")
    assert done.returncode == 0, done.stderr
    seen = []
    for line in trace.read_text().splitlines():
        found = re.match(r"\d+ +(\w+)\((.*)\) += (-?\d+)", line)
        if found is None or int(found[3]) < 0 or str(base) not in found[2]:
            continue
        if found[1] == "openat" and "O_EXCL" not in found[2]:
            continue
        seen.append(_CALLS[found[1]])
    assert seen == done.stdout.split()
    assert seen.count("fsync") >= 8
