"""A save in the background and the process that it is in: how that ends, what it holds on to, and
interrupts at any moment."""

import gc
import json
import random
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from async_tools import MIB, SOON_S, adamw, held, net, require_same
from torch.optim.optimizer import _global_optimizer_pre_hooks

import holdfast
from holdfast.catalog import Catalog
from holdfast.distributed import DistributedCheckpoint, SaveOptions, _step_hook
from holdfast.errors import NoSpaceError
from holdfast.testing import Fault, FaultyStorage

CASES = Path(__file__).with_name("exit_cases.py")

ending = pytest.mark.timeout(600)  # the first to use ``ended`` waits for all of it


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Processes that came to their end, by what each of them did last: folder, exit code, and what
    was printed."""
    root = tmp_path_factory.mktemp("ended")
    done = subprocess.run(
        [sys.executable, CASES, root], capture_output=True, text=True, timeout=500, check=True
    )
    assert done.stderr == ""
    return {
        name: (root / name, code, (root / f"{name}.err").read_text())
        for name, code in json.loads(done.stdout).items()
    }


@ending
@pytest.mark.parametrize(
    ("last", "code"),
    [("end", 0), ("leave", 3), ("step", 0), ("step_in_thread", 0), ("interrupt", 0), ("fail", 1)],
)
def test_a_process_does_not_end_before_its_save(last, code, ended):
    folder, found, printed = ended[last]
    assert found == code
    if last == "fail":
        assert printed.strip().endswith("ZeroDivisionError: of the training")
        assert printed.count("Traceback") == 1
    else:
        assert printed == ""
    with DistributedCheckpoint(storage=folder) as ckpt:
        assert ckpt.catalog.verify("a").is_intact
        require_same(adamw(50).load(ckpt, "a"), torch.load(f"{folder}.expected"))


@ending
def test_nor_before_another_that_waits_for_it(ended):
    folder, code, printed = ended["save_again"]
    assert (code, printed) == (0, "")
    catalog = Catalog(folder)
    assert [info.prefix for info in catalog.list()] == ["b", "a"]
    assert all(catalog.verify(name).is_intact for name in "ab")


@ending
def test_a_process_that_vanished_left_no_checkpoint_and_no_damage(ended):
    folder, code, _ = ended["vanish"]
    assert code == 5
    with DistributedCheckpoint(storage=folder) as ckpt:
        assert ckpt.list_checkpoints() == []
        assert any(Path(folder, "a").iterdir())  # it had begun
        ckpt.save_async(net(), None, SaveOptions(checkpoint_prefix="a")).result(SOON_S)
        assert ckpt.catalog.verify("a").is_intact


@ending
def test_a_fork_does_not_wait_for_a_save_of_which_it_has_no_thread(ended):
    folder, code, printed = ended["fork"]
    assert (code, printed) == (7, "")
    assert Catalog(folder).verify("a").is_intact


@ending
def test_an_error_that_nobody_asked_for_is_told_at_the_end(ended):
    """As Python tells of one that has ended a thread."""
    folder, code, printed = ended["never_ask"]
    assert code == 0
    assert printed.startswith("Exception in thread holdfast-save")
    assert "NoSpaceError: the disk is full" in printed
    assert Catalog(folder).list() == []


# What it holds on to.


def refs_of(training):
    parts = [training.model, training.optimizer, *training.model.parameters()]
    return [weakref.ref(part) for part in parts]


def gone(refs):
    for thread in threading.enumerate():
        if thread.name in ("holdfast-copy", "holdfast-work"):
            thread.join(SOON_S)  # it may be a moment behind, and still hold what it worked on
    gc.collect()
    return all(ref() is None for ref in refs)


def test_a_training_that_is_deleted_meanwhile_is_freed_with_the_save(tmp_path):
    training = adamw()
    training.step()
    expected = training.content()
    refs = refs_of(training)
    with held(tmp_path) as (ckpt, gates):
        with gates.at("save"):
            handle = ckpt.save_async(training.model, training.optimizer)
            del training
        prefix = handle.result(SOON_S)
        ckpt.wait(SOON_S)
        assert gone(refs)
        require_same(adamw(50).load(ckpt, prefix), expected)


@pytest.mark.parametrize("end", ["well", "failed", "cancelled", "torn", "refused"])
def test_nothing_of_a_training_is_kept_after_the_save(end, tmp_path):
    faults = [Fault("finish", 1, NoSpaceError("on purpose"))] if end == "failed" else []
    training = adamw()
    training.step()
    refs = refs_of(training)
    with held(tmp_path, around=lambda storage: FaultyStorage(storage, faults)) as (ckpt, gates):
        with gates.at("save"):
            extra = {"x": object()} if end == "refused" else None
            handle = ckpt.save_async(training.model, training.optimizer, extra=extra)
            if end == "cancelled":
                handle.cancel()
            if end == "torn":
                training.model[0].weight.data.zero_()
            training.step()
            handle.add_done_callback(lambda _: None)
        error = handle.exception(SOON_S)
        assert (error is None) is (end == "well")
        ckpt.wait(SOON_S)
        del training
        assert gone(refs)  # though the checkpointer, its handle and the error are there
        assert _step_hook._watched == ()  # nor does any optimizer look after it


def test_no_thread_stays_and_one_hook(tmp_path):
    before = {thread.ident for thread in threading.enumerate()}
    hooks = len(_global_optimizer_pre_hooks)
    training = adamw()
    for _ in range(3):
        with DistributedCheckpoint(storage=tmp_path) as ckpt:
            for _ in range(5):
                ckpt.save_async(training.model, training.optimizer)
                training.step()
        left = [each for each in threading.enumerate() if each.ident not in before]
        for each in left:
            each.join(SOON_S)  # one that copied may be a moment behind
        assert len(_global_optimizer_pre_hooks) - hooks <= 1
    assert len(_global_optimizer_pre_hooks) >= 1


@ending
def test_fifty_saves_take_no_more_memory_than_three(ended):
    """One copy of the state that stays behind would be 14 MiB each time."""
    folder, code, printed = ended["save_fifty_times"]
    assert code == 0
    assert int(printed) < 64 * MIB
    (info,) = Catalog(folder).list()
    assert info.step == 49


@ending
def test_where_no_memory_is_to_be_had_copies_go_through_what_there_is(ended):
    folder, code, printed = ended["have_no_memory"]
    assert code == 0, printed
    assert 0 < int(printed) < 160 * MIB  # which is what the state takes
    found = holdfast.load(folder / "a")["model"]
    require_same(found, dict(torch.load(f"{folder}.expected")))


# Interrupts.


NEVER = 10**9


class Interrupt:
    """Raises a KeyboardInterrupt at the nth call of a function of this package, as Ctrl-C may."""

    def __init__(self, nth):
        self.left = nth

    def __call__(self, frame, event, _):
        if event == "call" and "/holdfast/" in frame.f_code.co_filename:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)


def test_an_interrupt_at_any_moment_of_the_call_harms_nothing(tmp_path):
    """As in a notebook: the call is given up, the training and the next save go on."""
    training = adamw()
    training.step()
    extra = {"x": torch.rand(300, 300)}
    with held(tmp_path) as (ckpt, _):

        def save():
            return ckpt.save_async(training.model, training.optimizer, extra=extra)

        with Interrupt(NEVER) as interrupt:
            save()
        calls = NEVER - interrupt.left
        interrupted = 0
        for nth in random.Random(1).sample(range(1, calls), 40):
            ckpt.wait(SOON_S)
            try:
                with Interrupt(nth):
                    save()
            except KeyboardInterrupt:
                interrupted += 1
            training.step()
        ckpt.wait(SOON_S)
        expected = training.content()
        handle = save()
        training.step()
        require_same(adamw(50).load(ckpt, handle.result(SOON_S))[:2], expected[:2])
    assert interrupted > 20  # of the rest some came where nobody hears them


def test_ctrl_c_while_a_save_is_waited_for(tmp_path):
    training = adamw()
    main = threading.main_thread().ident
    with held(tmp_path) as (ckpt, gates):
        with gates.at("save") as gate:
            handle = ckpt.save_async(training.model, training.optimizer)

            def interrupt():
                gate.wait()
                signal.pthread_kill(main, signal.SIGINT)

            with pytest.raises(KeyboardInterrupt):
                threading.Thread(target=interrupt).start()
                handle.result(SOON_S)
        assert handle.result(SOON_S)
