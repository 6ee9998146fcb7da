"""What was found by attacking saves in the background: states and moments at which a save was once
wrong, or never ended, or failed unheard."""

import contextlib
import logging
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from async_tools import SOON_S, adamw, differs, held, net, require_same
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import holdfast
from holdfast.distributed import LoadOptions, SaveOptions, _step_hook
from holdfast.distributed._pool import LEAST_BYTES
from holdfast.errors import SaveError, TransientStorageError
from holdfast.testing import Fault, FaultyStorage

WIDTH = 300
HALF = 200_000


def check(folder, state, change, *, event, before=None):
    """Change a state while its save is held at an event, and compare with a save that was waited
    for. ``before`` is done before each of two saves that come first, if it is given."""
    model, optimizer, extra = state

    def read(name):
        return holdfast.load(folder / name)

    with held(folder) as (ckpt, gates):
        for _ in range(2 if before else 0):
            before()
            ckpt.save_async(model, optimizer, extra=extra).result(SOON_S)
            before()
        ckpt.save(model, optimizer, SaveOptions(checkpoint_prefix="waited"), extra=extra)
        with gates.at(event) as gate:
            options = SaveOptions(checkpoint_prefix="held")
            handle = ckpt.save_async(model, optimizer, options, extra=extra)
            gate.wait()
            change()
        handle.result(SOON_S)
        ckpt.save(model, optimizer, SaveOptions(checkpoint_prefix="after"), extra=extra)
    require_same(read("held"), read("waited"))
    return read("waited"), read("after")


def give_gradients(optimizer, *at):
    """To a few elements only, if they are named."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter) if at else torch.ones_like(parameter)
            for index in at:
                parameter.grad[index] = 1


# Values that an optimizer changes in place.


class Remembering(torch.optim.Optimizer):
    """Has lists and dicts in its state and in its groups."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "history": [0], "plan": {"at": [1]}})

    def step(self, closure=None):
        for group in self.param_groups:
            group["history"].append(len(group["history"]))
            group["plan"]["at"].append(2)
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("past", []).append(parameter.detach().clone())
                state.setdefault("counts", {"steps": 0})["steps"] += 1
                with torch.no_grad():
                    parameter.sub_(parameter.grad, alpha=0.1)


class OwnState(torch.optim.SGD):
    """Shows more than torch knows of, as it is."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.slow = {"steps": 0, "weights": [torch.zeros(WIDTH, WIDTH)]}

    def state_dict(self):
        return {**super().state_dict(), "slow": self.slow}

    def step(self, closure=None):
        super().step()
        self.slow["steps"] += 1
        self.slow["weights"][0] = self.slow["weights"][0] + 1
        self.slow["weights"].append(torch.ones(3))


def with_hook(parameters):
    """Its state has what a hook adds to it, and a tensor for a learning rate."""
    optimizer = torch.optim.AdamW(parameters, lr=torch.tensor(0.01))
    shown = {"steps": [1]}
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "shown": shown})

    def count(*_):
        shown["steps"].append(2)
        optimizer.param_groups[0]["lr"].mul_(0.5)

    optimizer.register_step_post_hook(count)
    return optimizer


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, max_iter=3, history_size=2)


@pytest.mark.parametrize("make", [Remembering, OwnState, with_hook, lbfgs])
def test_what_an_optimizer_changes_besides_tensors(make, tmp_path):
    torch.manual_seed(1)
    model, inputs = nn.Linear(WIDTH, WIDTH), torch.rand(4, WIDTH)
    optimizer = make(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    def step():
        give_gradients(optimizer)
        optimizer.step(closure if make is lbfgs else None)

    step()
    step()
    waited, after = check(tmp_path, (model, optimizer, None), step, event="save")
    assert differs(after["optimizer"], waited["optimizer"])


# Tensors that share memory, or do not lie in it one element after the other.


def strided():
    return torch.randint(0, 255, (HALF, 2), dtype=torch.uint8)[:, 0]


def expanded():
    return torch.full((1,), 3, dtype=torch.uint8).expand(HALF)


@pytest.mark.parametrize("make", [strided, expanded])
def test_bytes_that_do_not_lie_one_after_the_other(make, tmp_path):
    """They are all copied in the background before anything is written."""
    torch.manual_seed(1)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = optimizer.state[model.weight]["codes"] = make()

    def until_copied():
        deadline_s = time.monotonic() + SOON_S
        while _step_hook._watched:
            assert time.monotonic() < deadline_s, "it is not copied"
            time.sleep(0.001)

    check(tmp_path, (model, optimizer, None), until_copied, event="create intent")
    found = holdfast.load(tmp_path / "held")["optimizer"]["state"]["weight"]["codes"]
    assert found.tolist() == expected.tolist()


class Views(nn.Module):
    """Parameters that are views of one flat tensor, which is what the optimizer has."""

    def __init__(self):
        super().__init__()
        flat = torch.rand(2 * HALF)
        self.first = nn.Parameter(flat[:HALF].view(-1, 8))
        self.second = nn.Parameter(flat[HALF:].view(-1, 8))
        self.trained = [nn.Parameter(flat)]


class Flat(nn.Module):
    """One flat tensor, of which the optimizer has views: two, or the second."""

    def __init__(self, *, both):
        super().__init__()
        self.register_buffer("flat", torch.rand(2 * HALF))
        parts = [self.flat[:HALF], self.flat[HALF:]]
        self.trained = [nn.Parameter(part) for part in parts[0 if both else 1 :]]


SHARING = {
    "views": Views,
    "flat": lambda: Flat(both=True),
    "half": lambda: Flat(both=False),
}


@pytest.mark.parametrize("event", ["save", "write_at shard"])
@pytest.mark.parametrize("kind", SHARING)
def test_an_optimizer_has_the_memory_by_another_tensor(kind, event, tmp_path):
    """A fused step counts as no change of the others, and may be where nobody takes samples."""
    torch.manual_seed(1)
    model = SHARING[kind]()
    optimizer = torch.optim.SGD(model.trained, lr=0.1, fused=True)

    def step():
        give_gradients(optimizer, 57, -57)
        optimizer.step()

    state = model, None, {"optimizer": optimizer}
    waited, after = check(tmp_path, state, step, event=event, before=step)
    assert differs(after["model"], waited["model"])


@pytest.mark.parametrize("event", ["save", "write_at shard"])
def test_an_average_that_was_not_updated_for_some_saves(event, tmp_path):
    """It looked as if nothing ever changed it."""
    training = adamw()
    average = AveragedModel(training.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(training.model)

    def step_and_update():
        training.step()
        average.update_parameters(training.model)

    state = training.model, training.optimizer, {"average": average}
    waited, after = check(tmp_path, state, step_and_update, event=event, before=training.step)
    assert differs(after["extra"]["average"], waited["extra"]["average"])


# Interrupts and forks.


class Interrupted(BaseException):
    pass


class Storm:
    """Interrupts the main thread once, after a time, by a signal whose handler raises. Not by an
    alarm: the time limit of a test is one."""

    def __init__(self, after_s):
        self._timer = threading.Timer(
            after_s, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1)
        )

    def __enter__(self):
        self._timer.start()

    def __exit__(self, *_):
        self._timer.cancel()
        self._timer.join()


@pytest.fixture
def raising_signal():
    def interrupt(*_):
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield
    signal.signal(signal.SIGUSR1, before)


# An interrupt that comes in a callback of the garbage collector (hypothesis has one) or of a weak
# reference is reported there, and goes no further.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("raising_signal")
@pytest.mark.parametrize("where", ["save_async", "step"])
def test_a_storm_of_interrupts(where, tmp_path):
    """What is interrupted ends, and what is committed is right."""
    rng, hits = random.Random(1), 0
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    give_gradients(optimizer)
    with held(tmp_path) as (ckpt, gates):
        for number in range(400):
            if number >= 30 and hits:
                break  # on a fast machine many come too late
            expected = {name: value.clone() for name, value in model.state_dict().items()}
            options = SaveOptions(checkpoint_prefix=f"{number}", include_rng_state=False)
            storm = Storm(rng.uniform(0, 0.006 / (1 + number // 30)))
            handle = None
            gate = gates.at("save")
            try:
                with storm if where == "save_async" else contextlib.nullcontext():
                    handle = ckpt.save_async(model, optimizer, options)
                with storm if where == "step" else contextlib.nullcontext():
                    optimizer.step()
            except Interrupted:
                hits += 1
            gate.open()
            ckpt.wait(SOON_S)
            assert _step_hook._watched == ()
            if where == "step":
                assert handle.result(SOON_S) == f"{number}"
            for info in ckpt.list_checkpoints():
                assert info.prefix == f"{number}"
                require_same(holdfast.load(tmp_path / info.prefix)["model"], expected)
                ckpt.catalog.delete(info.prefix)
    assert hits > 0


def run_script(script, folder):
    """In an interpreter of its own."""
    return subprocess.run(
        [sys.executable, "-c", script, folder],
        capture_output=True,
        text=True,
        timeout=SOON_S,
        check=False,
        cwd=Path(__file__).parent,
    )


FORKING = """
import copy, os, signal, sys
import torch
from async_tools import SOON_S, held, require_same
from torch import nn
import holdfast
from holdfast.distributed._pool import LEAST_BYTES

torch.set_num_threads(1)  # torch's own threads do not outlive a fork
model = nn.Linear(LEAST_BYTES // 2000, 1000)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
expected = copy.deepcopy(model.state_dict())
with held(sys.argv[1], staging_bytes=LEAST_BYTES) as (ckpt, gates):
    with gates.at("save"):
        handle = ckpt.save_async(model, optimizer)
        child = os.fork()
        if not child:
            signal.alarm(10)
            optimizer.step()
            os._exit(7)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    optimizer.step()
    prefix = handle.result(SOON_S)
require_same(holdfast.load(f"{sys.argv[1]}/{prefix}")["model"], expected)
print(code)
"""


def test_a_forked_process_steps(tmp_path):
    """There is no room for a copy, and in that process nobody who would make some."""
    done = run_script(FORKING, tmp_path)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "7", "")


# Errors that somebody has to hear of.


def test_a_log_that_fails(tmp_path, monkeypatch):
    """Whoever waits for the save is told, and the log's own error is not lost."""

    class Failing(logging.Handler):
        def emit(self, record):
            raise ZeroDivisionError("the log is down")

    unheard = []
    monkeypatch.setattr(threading, "excepthook", unheard.append)
    log = logging.getLogger("holdfast.distributed")
    handler = Failing()
    training = adamw()
    with held(tmp_path) as (ckpt, gates):
        with gates.at("save"):
            handle = ckpt.save_async(training.model, None, SaveOptions(checkpoint_prefix="a"))
            level = log.level
            log.setLevel(logging.INFO)
            log.addHandler(handler)
        try:
            assert handle.result(SOON_S) == "a"
            ckpt.wait(SOON_S)
        finally:
            log.removeHandler(handler)
            log.setLevel(level)
        assert ckpt.catalog.verify("a").is_intact
        assert ckpt.save_async(training.model).result(SOON_S)
    assert [each.exc_type for each in unheard] == [ZeroDivisionError]


FORGETTING = """
import sys
import torch
from holdfast.distributed import DistributedCheckpoint, SaveOptions

def progress(now):
    if now.phase == "write":
        raise OSError("the disk is on fire")

ckpt = DistributedCheckpoint(storage=sys.argv[1])
ckpt.save_async(torch.nn.Linear(300, 300), None, SaveOptions(progress=progress))
print("training is over")
"""


def test_a_failed_save_that_nobody_asks_for_is_printed_at_the_end(tmp_path):
    """Without a log, and without a close()."""
    done = run_script("import logging; logging.disable()" + FORGETTING, tmp_path)
    assert done.stdout == "training is over\n"
    assert "Exception in thread holdfast-save" in done.stderr
    assert "the disk is on fire" in done.stderr


def small():
    return nn.ModuleList(nn.Linear(50, 50) for _ in range(8))


def transient(storage):
    return FaultyStorage(storage, [Fault("finish", 1, TransientStorageError("on purpose"))])


@pytest.mark.parametrize("make", [small, net])
def test_a_file_is_written_again_as_by_save(make, tmp_path):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    give_gradients(optimizer)
    optimizer.step()
    trees = []
    for name in ("save", "save_async"):
        options = SaveOptions(checkpoint_prefix=name)
        with held(tmp_path, around=transient) as (ckpt, gates):
            if name == "save":
                ckpt.save(model, optimizer, options)
            else:
                with gates.at("save"):
                    ckpt.save_async(model, optimizer, options)
                    optimizer.step()
                ckpt.wait(SOON_S)
            assert ckpt.catalog.verify(name).is_intact
        trees.append(holdfast.load(tmp_path / name))
    require_same(trees[1], trees[0])


def test_a_file_cannot_be_written_again_from_a_pool_that_is_too_small(tmp_path):
    """Its memory has been used again, and the error says what to do."""
    model = nn.Linear(LEAST_BYTES // 2000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    give_gradients(optimizer)
    with held(tmp_path, around=transient, staging_bytes=LEAST_BYTES) as (ckpt, _):
        handle = ckpt.save_async(model, optimizer)
        optimizer.step()
        with pytest.raises(SaveError, match="with a larger staging_bytes it can"):
            handle.result(SOON_S)
        assert ckpt.list_checkpoints() == []
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        prefix = ckpt.save_async(model, optimizer).result(SOON_S)
        require_same(holdfast.load(tmp_path / prefix)["model"], expected)


@pytest.mark.parametrize("where", ["on_save", "callback"])
def test_a_callback_cannot_save(where, tmp_path):
    training, refused = adamw(), []

    def load(model):
        ckpt.load(model, None, LoadOptions(checkpoint_prefix="a"))

    def call_back(_):
        for call in (ckpt.save, ckpt.save_async, load):
            with pytest.raises(RuntimeError, match="cannot save, load or wait") as caught:
                call(training.model)
            refused.append(str(caught.value))

    on_save = call_back if where == "on_save" else None
    with held(tmp_path, on_save=on_save) as (ckpt, gates):
        with gates.at("save"):
            handle = ckpt.save_async(training.model, None, SaveOptions(checkpoint_prefix="a"))
            if where == "callback":
                handle.add_done_callback(call_back)
        handle.result(SOON_S)
        ckpt.wait(SOON_S)
        assert [info.prefix for info in ckpt.list_checkpoints()] == ["a"]
    assert len(refused) == 3
    assert all("Leave it to the thread that trains" in each for each in refused)
