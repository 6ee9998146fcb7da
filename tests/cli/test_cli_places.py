"""What a path on the command line means, and what a terminal shows that a pipe does not."""

import os
import pty
import re
import shlex
import shutil
import subprocess

import numpy as np
import pytest
from cli_tools import COMMAND, holdfast, refused

from holdfast.catalog import Catalog
from holdfast.cli._app import VERBS
from holdfast.cli._place import find_place
from holdfast.storage._roots import ROOT_MARK


def test_the_lock_file_tells_where_a_store_begins(tmp_path):
    Catalog(tmp_path / "s").write("exp/a", {"w": np.zeros(3)})
    assert (tmp_path / "s" / ROOT_MARK).exists()
    place = find_place(str(tmp_path / "s/exp/a"))
    assert (place.catalog.storage.url, place.name) == ((tmp_path / "s").as_uri(), "exp/a")
    assert place.sure
    assert find_place(str(tmp_path / "s/exp")).inside == str(tmp_path / "s")
    assert find_place((tmp_path / "s").as_uri()).name is None
    (tmp_path / "link").symlink_to(tmp_path / "s/exp/a")
    assert find_place(str(tmp_path / "link")).name == "exp/a"


def test_without_one_or_with_two_it_has_to_be_said_before_anything_is_deleted(tmp_path):
    Catalog(tmp_path / "s").write("exp/a", {"w": np.zeros(3)})
    mark = tmp_path / "s" / ROOT_MARK
    (tmp_path / "s/exp" / ROOT_MARK).touch()
    refused("rm", "--yes", tmp_path / "s/exp/a", code=2, saying="where does the store end?")
    (tmp_path / "s/exp" / ROOT_MARK).unlink()
    mark.unlink()
    assert holdfast("show", tmp_path / "s/exp/a").code == 0
    refused("rm", "--yes", tmp_path / "s/exp/a", code=2, saying=f"{tmp_path}/s/exp//a")
    assert holdfast("rm", "--yes", f"{tmp_path}/s//exp/a").code == 0
    assert Catalog(tmp_path / "s").list() == []


@pytest.mark.parametrize("scheme", ["", "file://", "file://localhost"])
def test_it_is_said_in_a_url_as_in_a_path(tmp_path, scheme):
    root = tmp_path / "a b"
    Catalog(root).write("x/step_1", {"w": np.zeros(3)})
    Catalog(root / "x").write("step_2", {"w": np.zeros(3)})
    text = root.as_uri().removeprefix("file://") if scheme else str(root)
    refused("rm", "--yes", f"{scheme}{text}/x/step_1", code=2, saying="where does the store end?")
    assert find_place(f"{scheme}{text}//x/step_1").name == "x/step_1"
    assert find_place(f"{scheme}{text}/x//step_1").name == "step_1"
    assert holdfast("rm", "--yes", f"{scheme}{text}//x/step_1").code == 0
    assert [each.prefix for each in Catalog(root).list()] == ["x/step_2"]


def test_what_the_refusal_of_a_url_advises_works(tmp_path):
    Catalog(tmp_path / "a").write("x/step_1", {"w": np.zeros(3)})
    Catalog(tmp_path / "a/x").write("step_2", {"w": np.zeros(3)})
    url = (tmp_path / "a/x/step_1").as_uri()
    said = refused("rm", "--yes", url, code=2, saying="where does the store end?").err
    advised = re.search(r"write (\S+);", said)[1]
    assert advised.startswith("file://")
    assert holdfast("rm", "--yes", advised).code == 0
    assert not (tmp_path / "a/x/step_1").exists()


def test_a_new_checkpoint_gets_the_store_that_the_library_gives_it(store, tmp_path):
    Catalog(tmp_path).write("by_accident", {"w": np.zeros(3)})  # makes all of it a store
    for target in ("runs/x/one", "runs/x/two"):
        assert holdfast("convert", store / "step_100", tmp_path / target).code == 0
    holdfast("reshard", store / "step_100", tmp_path / "runs/y/one", "--ranks", 2)
    marked = {mark.parent for mark in tmp_path.rglob(ROOT_MARK)}
    assert marked == {tmp_path, tmp_path / "runs/x", tmp_path / "runs/y"}
    assert holdfast("gc", tmp_path / "runs/x").code == 0


def test_where_names_have_slashes_a_new_one_is_of_the_same_store(store, tmp_path):
    Catalog(tmp_path / "s").write("exp/a", {"w": np.zeros(3)})
    for target in ("s/exp/b", "s//new/c", "t//new/c"):
        assert holdfast("convert", store / "step_100", f"{tmp_path}/{target}").code == 0
    url = f"{(tmp_path / 'u').as_uri()}//other/d"
    assert holdfast("convert", store / "step_100", url).code == 0
    marked = {mark.parent.name for mark in tmp_path.rglob(ROOT_MARK)}
    assert marked == {"s", "t", "u"}
    assert {each.prefix for each in Catalog(tmp_path / "s").list()} == {"exp/a", "exp/b", "new/c"}


def test_somebody_elses_metadata_makes_no_checkpoint_of_a_store(own_store):
    (own_store / "metadata.json").write_text('{"mine": 1}')
    (own_store / ROOT_MARK).unlink()
    assert len(holdfast("ls", own_store, "--json").json["checkpoints"]) == 3


def test_a_checkpoint_alone_in_a_folder_is_read(store, tmp_path):
    shutil.copytree(store / "step_100", tmp_path / "moved")
    assert holdfast("verify", cwd=tmp_path / "moved").code == 0
    assert holdfast("ls", tmp_path / "moved").out.splitlines()[1].split()[0] == "moved"


def test_on_a_terminal_it_draws_and_asks(own_store):
    drawn = on_terminal("ls", own_store)
    assert drawn[0] == 0
    assert "\x1b[1m" in drawn[1]
    assert "─" in drawn[1]
    bar = on_terminal("verify", own_store)
    assert "━" in bar[1]
    asked = on_terminal("rm", own_store / "step_100", answer="n\n")
    assert asked[0] == 1
    assert "Delete step_100" in asked[1]
    assert "[y/N]" in asked[1]
    assert len(Catalog(own_store).list()) == 3
    assert on_terminal("rm", own_store / "step_100", answer="y\n")[0] == 0
    assert len(Catalog(own_store).list()) == 2


def test_a_terminal_without_room_or_colour(own_store):
    """A table is never folded to nothing: where it has no room it is the text of a pipe."""
    plain = holdfast("ls", own_store).out.splitlines()[0].split()
    for columns in ("90", "40", "10", "1"):
        code, shown = on_terminal("ls", own_store, columns=columns)
        assert code == 0
        assert [word for word in without_escapes(shown).split() if word in plain][:8] == plain
        for name in ("step_100", "step_200", "step_300", "multi_shard"):
            assert name in shown
    _, shown = on_terminal("doctor", "/proc/x", NO_COLOR="1")
    assert "bad" in shown
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", shown)


def without_escapes(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["holdfast", ""], [*VERBS]),
        (["holdfast", "ver"], ["verify"]),
        (["holdfast", "verify", "--s"], ["--sample", "--seed", "--state"]),
        (["holdfast", "convert", "--to", "h"], ["huggingface", "holdfast"]),
        (["holdfast", "ls", "ru"], []),  # paths are the shell's own
    ],
)
def test_what_a_shell_completes(typed, offered):
    ran = holdfast(
        env={
            "_HOLDFAST_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(typed),
            "COMP_CWORD": str(len(typed) - 1),
        }
    )
    assert (ran.code, ran.out.split()) == (0, offered)


def test_the_completion_of_a_shell_is_shown():
    """Of the shell that it is typed in, which must be one that does not become the command."""
    line = f"{shlex.join(map(str, COMMAND))} --show-completion; exit $?"
    shown = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert "_HOLDFAST_COMPLETE=complete_bash" in shown.stdout


def on_terminal(*arguments, answer="", columns="200", **env):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": columns, **env},
    )
    os.close(theirs)
    os.write(ours, answer.encode())
    shown = b""
    try:
        while more := os.read(ours, 4096):
            shown += more
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(ours)
    return process.wait(timeout=60), shown.decode()
