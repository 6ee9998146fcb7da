"""Processes that end while a save is under way in the background, and some that look at themselves.

Run as a script: ``exit_cases.py FOLDER``. Each case is a fork of it, works in FOLDER/<case>, and
comes to the end of the script, and so of its interpreter, by itself. What it printed is in
FOLDER/<case>.err. The exit codes are printed as JSON.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path

import torch
from async_tools import MIB, Gates, HeldStorage, adamw, held, net
from torch import nn

from holdfast.distributed import DistributedCheckpoint, SaveOptions, keep_last
from holdfast.distributed._pool import _SLAB_BYTES as SLAB_BYTES
from holdfast.errors import NoSpaceError
from holdfast.storage import LocalStorage
from holdfast.testing import Fault, FaultyStorage


def begun(folder, gates=None):
    """A training whose save cannot be done before the process comes to its end."""
    slow = [Fault("finish", nth, delay_s=0.3) for nth in (1, 2)] + [Fault("create", 2, delay_s=0.2)]
    storage = FaultyStorage(LocalStorage(folder), slow)
    ckpt = DistributedCheckpoint(storage=HeldStorage(storage, gates or Gates()))
    training = adamw()
    training.step()
    torch.save(training.content(), f"{folder}.expected")
    options = SaveOptions(checkpoint_prefix="a")
    ckpt.save_async(training.model, training.optimizer, options, extra={"x": 1})
    return ckpt, training


def end(folder):
    begun(folder)


def leave(folder):
    begun(folder)
    sys.exit(3)


def interrupt(folder):
    """Ctrl-C while the save is waited for. It goes on, and the process with it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.get_ident()
    gates = Gates()
    with contextlib.suppress(KeyboardInterrupt), gates.at("finish shard"):
        ckpt, _ = begun(folder, gates)
        threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT)).start()
        ckpt.wait()
        raise AssertionError("the save was over before the interrupt")


def fail(folder):
    begun(folder)
    raise ZeroDivisionError("of the training")


def step(folder):
    begun(folder)[1].step(2)


def step_in_thread(folder):
    threading.Thread(target=begun(folder)[1].step).start()


def save_again(folder):
    ckpt, training = begun(folder)
    training.step()
    ckpt.save_async(training.model, None, SaveOptions(checkpoint_prefix="b"))


def vanish(folder):
    """When all is written, and nothing is durable."""
    with held(folder) as (ckpt, gates), gates.at("finish shard") as gate:
        ckpt.save_async(net(), None, SaveOptions(checkpoint_prefix="a"))
        gate.wait()
        os._exit(5)


def fork(folder):
    """While a save is under way; the child, in which nobody saves, closes what it has of it."""
    gates = Gates()
    ckpt = DistributedCheckpoint(storage=HeldStorage(LocalStorage(folder), gates))
    with gates.at("finish shard"):
        handle = ckpt.save_async(net(), None, SaveOptions(checkpoint_prefix="a"))
        child = os.fork()
        if not child:
            signal.alarm(20)
            ckpt.close()
            os._exit(7)
        assert not handle.done()
        _, status = os.waitpid(child, 0)
    handle.result()
    sys.exit(os.waitstatus_to_exitcode(status))


def never_ask(folder):
    """The save fails, and nobody is there to hear of it."""
    full = [Fault("finish", 1, NoSpaceError("the disk is full"))]
    ckpt = DistributedCheckpoint(storage=FaultyStorage(LocalStorage(folder), full))
    ckpt.save_async(net())


def save_fifty_times(folder):
    """Prints by how much memory grew after the third save."""
    model = nn.ParameterList(torch.rand(MIB // 2) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ema = torch.rand(MIB // 2)
    ckpt = DistributedCheckpoint(storage=folder, retention=keep_last(1))
    for number in range(50):
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        ema += 1
        ckpt.save_async(model, optimizer, SaveOptions(step=number), extra={"ema": ema})
        if number == 2:
            ckpt.wait()
            after_three = _bytes(1)
    ckpt.close()
    sys.stderr.write(f"{_bytes(1) - after_three}")


def have_no_memory(folder):
    """There is memory for all else that a save needs, and not for a copy of the state. Prints the
    pool's size."""
    torch.set_num_threads(1)
    threading.stack_size(MIB)
    model = nn.ParameterList(torch.rand(20 * MIB) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = DistributedCheckpoint(storage=folder, staging_bytes=1 << 40)
    ckpt.save(model, optimizer)  # so that the storage has its buffers
    ckpt.save_async({"small": torch.rand(MIB)}).result()
    torch.save(model.state_dict(), f"{folder}.expected")
    limit = _bytes(0) + SLAB_BYTES - MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for parameter in model:
        parameter.grad = parameter.detach()[:1].expand_as(parameter)
    handle = ckpt.save_async(model, optimizer, SaveOptions(checkpoint_prefix="a"))
    optimizer.step()
    handle.result()
    sys.stderr.write(f"{ckpt._saves._snapshots.size_bytes}")


def _bytes(which):
    """What this process has mapped (0), and what of that is in memory (1)."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[which]
    return int(pages) * resource.getpagesize()


CASES = [
    end,
    leave,
    interrupt,
    fail,
    step,
    step_in_thread,
    save_again,
    vanish,
    fork,
    never_ask,
    save_fifty_times,
    have_no_memory,
]

if __name__ == "__main__":
    root = Path(sys.argv[1])
    children = {}
    for case in CASES:
        pid = os.fork()
        if not pid:
            break
        children[case.__name__] = pid
    else:
        codes = {
            name: os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) for name, p in children.items()
        }
        sys.stdout.write(json.dumps(codes))
        sys.stdout.flush()
        os._exit(0)
    os.dup2(os.open(root / f"{case.__name__}.err", os.O_CREAT | os.O_WRONLY), 2)
    case(str(root / case.__name__))
