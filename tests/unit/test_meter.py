"""The memory meter: exact where it can be done by hand, and against the kernel on real steps."""

import contextlib
import copy
import gc
import json
import os
import pathlib
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peak_process import by_profiler
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from holdfast.activation._measuring.meter import measure_peak

N = 4000  # bytes of a tensor of 1000 floats


def floats(count=1000):
    return torch.empty(count)


def both(report):
    return report.peak_bytes, report.after_bytes


def test_by_hand():
    def call():
        a = floats(1000)
        b = floats(2000)
        del a
        c = floats(500)
        return b, c

    report = measure_peak(call)
    assert report.peak_bytes == 3 * N
    assert report.after_bytes == 2 * N + N // 2
    assert report.device == "cpu"
    assert [tensor.numel() for tensor in report.value] == [2000, 500]
    assert [(each.device, each.peak_bytes) for each in report.devices if each.device == "cpu"] == [
        ("cpu", 3 * N)
    ]
    assert "value" not in repr(report)


def test_arguments_reach_the_function():
    def call(*args, **kwargs):
        return args, kwargs

    report = measure_peak(call, 1, 2, fn=3, other=4)
    assert report.value == ((1, 2), {"fn": 3, "other": 4})
    assert both(report) == (0, 0)


def test_a_new_tensor_where_an_old_one_died_is_a_new_one():
    def call():
        x = floats()
        for _ in range(500):
            x = x + 1
        return x.sum()

    assert both(measure_peak(call)) == (2 * N, 4)


def test_a_large_one_where_a_small_one_died():
    def call():
        for count in (10, 1000, 10, 2000, 10):
            floats(count)

    assert both(measure_peak(call)) == (2 * N, 0)


def test_one_that_dies_inside_the_call_that_makes_the_next_at_its_address():
    box = []
    again = []

    @torch.library.custom_op("holdfast_tests::replaced", mutates_args=())
    def replaced(count: int) -> torch.Tensor:
        was = [tensor.untyped_storage()._cdata for tensor in box]
        box.clear()
        others = []
        for _ in range(5000):
            others.append(torch.empty(count))
            if others[-1].untyped_storage()._cdata in was:
                again.append(1)
                break
        return others[-1]

    def call():
        for _ in range(20):
            new = replaced(1000)
            box.append(new)
            del new
        return floats(500)

    report = measure_peak(call)
    if not again:
        pytest.skip("no storage was made where one had died")
    assert report.after_bytes == N + N // 2, "never taken for the one that lay at its address"
    assert report.peak_bytes == 2 * N, "told only after the call that the other died in it"


def test_views_are_counted_once_and_keep_all_of_it():
    def call():
        base = floats()
        views = [base[3:], base.view(10, 100).t(), base.expand(50, 1000), base.detach()]
        del base
        return views[0][:1]

    assert both(measure_peak(call)) == (N, N)


def test_writing_in_place_costs_nothing():
    x = torch.zeros(1000)

    def call():
        x.add_(1).mul_(2)
        x[:10].fill_(5)
        torch.relu_(x)

    assert both(measure_peak(call)) == (0, 0)


def test_results_written_into_tensors_that_grow():
    def call():
        out = torch.empty(0)
        torch.add(torch.ones(1000), 1, out=out)
        out.resize_(3000)
        return out

    report = measure_peak(call)
    assert both(report) == (3 * N, 3 * N)


def test_a_call_that_returns_nothing_but_resizes_what_it_was_given():
    x = torch.ones(2000)

    def call():
        outs = [torch.empty(0), torch.empty(0)]
        torch.split_with_sizes_copy(x, [1500, 500], out=outs)

    assert both(measure_peak(call)) == (2 * N, 0)


def test_what_was_there_and_grows():
    x = floats(10)
    assert both(measure_peak(lambda: x.resize_(1010))) == (N, N)


@pytest.mark.parametrize("swap", ["data", "set_"])
def test_a_tensor_made_to_point_elsewhere_frees_what_it_had(swap):
    def call():
        x = floats(1000)
        if swap == "data":
            x.data = floats(2000)
        else:
            x.set_(floats(2000))
        assert x.numel() == 2000
        return floats(500), x

    assert both(measure_peak(call)) == (3 * N, 2 * N + N // 2)


def test_storages_resized_by_hand():
    x = floats(3000)
    y = floats(10)

    def call():
        x.add_(1)
        x.untyped_storage().resize_(0)
        a = floats(1000)
        y.untyped_storage().resize_(40 + 3 * N)
        y.add_(1)
        y.untyped_storage().resize_(40)
        b = floats(1000)
        return a, b

    assert both(measure_peak(call)) == (N, -N)


def test_what_is_resized_by_hand_among_very_many_storages():
    crowd = [floats(1) for _ in range(5000)]

    def call():
        x = floats(3000)
        x.untyped_storage().resize_(0)
        a = floats(1000)
        return x, a

    report = measure_peak(call)
    assert crowd
    assert report.after_bytes == N
    assert report.peak_bytes == 3 * N  # not 4: what was given back is not counted on


def test_what_was_there_is_not_counted_and_lowers_the_level_when_it_dies():
    box = [floats(2000)]

    def call():
        box.clear()
        a = floats(1000)
        b = floats(1500)
        del a
        return b

    assert both(measure_peak(call)) == (N // 2, -N // 2)


def test_a_gradient_dropped_by_the_step_is_not_paid_for_twice():
    layer = nn.Linear(100, 100, bias=False)
    x = torch.randn(5, 100)

    def step():
        layer.zero_grad(set_to_none=True)
        layer(x).sum().backward()

    step()
    again = measure_peak(step)
    layer.zero_grad(set_to_none=True)
    first = measure_peak(step)
    grad = 100 * 100 * 4
    assert first.after_bytes == grad
    assert again.after_bytes == 0
    assert again.peak_bytes == first.peak_bytes - grad


def test_backward_of_a_graph_built_before_frees_what_it_saved():
    w = torch.randn(1000, requires_grad=True)
    loss = w.sin().exp().sum()  # the graph keeps what exp gave, 1000 floats, and w
    report = measure_peak(loss.backward)
    assert report.after_bytes == 0, "a gradient came, the result of exp went"
    assert 0 < report.peak_bytes <= 2 * N + 64


def test_garbage_of_before_does_not_hide_a_peak():
    gc.disable()
    try:
        cycle = [floats(5000)]
        cycle.append(cycle)
        del cycle

        def call():
            x = floats(1000)
            gc.collect()
            return floats(1000), x

        assert both(measure_peak(call)) == (2 * N, 2 * N)
    finally:
        gc.enable()


def test_garbage_made_before_a_call_in_a_call_is_left_alone():
    def outer():
        cycle = [floats(1000)]
        cycle.append(cycle)
        del cycle
        return measure_peak(floats).value

    gc.disable()
    try:
        assert both(measure_peak(outer)) == (2 * N, 2 * N)
    finally:
        gc.enable()
        gc.collect()


def test_a_graph_whose_saved_tensors_python_never_saw():
    layer = nn.Linear(10, 10)
    x = torch.randn(1000, 10)
    loss = nn.functional.layer_norm(layer(x), (10,)).sum()
    grads = (100 + 10) * 4
    given, means_and_deviations = 1000 * 10 * 4, 2 * 1000 * 4
    report = measure_peak(loss.backward)
    assert report.after_bytes == grads - given - means_and_deviations


@pytest.mark.parametrize("inside", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_what_autograd_keeps_is_counted(inside):
    w = torch.randn(1000, requires_grad=True)

    def call():
        with inside():
            return w.exp().exp().exp()

    kept = 3 if inside is torch.enable_grad else 1
    assert measure_peak(call).after_bytes == kept * N


def test_calls_in_calls():
    seen = []

    def inner():
        a = floats(2000)
        del a
        return floats(500)

    def outer():
        x = floats(1000)
        seen.append(measure_peak(inner))
        y = floats(1000)
        return x, y, seen[0].value

    report = measure_peak(outer)
    assert both(seen[0]) == (2 * N, N // 2)
    assert both(report) == (3 * N, 2 * N + N // 2)


def test_an_error_is_raised_as_it_is_and_nothing_stays_behind():
    problem = ZeroDivisionError("mine")

    def call():
        floats()
        raise problem

    with pytest.raises(ZeroDivisionError) as caught:
        measure_peak(call)
    assert caught.value is problem
    assert _get_current_dispatch_mode() is None
    with pytest.raises(RuntimeError, match="must match"):
        measure_peak(lambda: floats(2) + floats(3))
    assert both(measure_peak(floats)) == (N, N)


def test_an_error_inside_that_the_function_handles():
    def call():
        with contextlib.suppress(RuntimeError):
            floats(1000) + floats(3)
        return floats(2000)

    assert measure_peak(call).after_bytes == 2 * N


def test_nothing_the_meter_looked_at_is_kept_alive():
    gc.disable()
    try:
        x = floats()
        seen = weakref.ref(x.untyped_storage())
        measure_peak(x.add, 1)
        del x
        assert seen() is None
    finally:
        gc.enable()


def test_the_step_is_the_same_bit_for_bit():
    def gradients(run):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.5))
        x = torch.randn(4, 8)
        run(lambda: sum(checkpoint(net, x, use_reentrant=False) for _ in range(3)).sum().backward())
        return [*(parameter.grad for parameter in net.parameters()), torch.get_rng_state()]

    for mine, plain in zip(gradients(measure_peak), gradients(lambda f: f()), strict=True):
        assert torch.equal(mine, plain)


def test_other_threads_are_not_counted_but_may_free():
    box = []

    def elsewhere(work):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)

    def call():
        elsewhere(lambda: box.append(floats(5000)))
        box.append(floats(1000))
        elsewhere(box.clear)
        return floats(500)

    assert both(measure_peak(call)) == (N, N // 2)


def test_many_threads_that_free_while_the_call_allocates():
    threads, rounds = 8, 100
    boxes = [[] for _ in range(threads)]
    done = threading.Event()

    def free(box):
        while not done.is_set() or box:
            if box:
                box.pop()

    def call():
        workers = [threading.Thread(target=free, args=(box,)) for box in boxes]
        for worker in workers:
            worker.start()
        for _ in range(rounds):
            for box in boxes:
                box.append(floats(100))
        done.set()
        for worker in workers:
            worker.join(60)
        return floats(500)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        report = measure_peak(call)
    finally:
        sys.setswitchinterval(interval)
    assert report.after_bytes == N // 2
    assert N // 2 <= report.peak_bytes <= threads * rounds * 400 + N // 2


def test_what_is_made_past_the_dispatcher():
    layer = nn.Linear(10, 100, bias=False)
    values = [1.0] * 1000
    assert both(measure_peak(lambda: torch.tensor(values))) == (N, N)
    assert both(measure_peak(lambda: copy.deepcopy(layer))) == (N, N)
    made = measure_peak(lambda: torch.empty(0).set_(torch.UntypedStorage(N)))
    assert both(made) == (N, N)


def test_memory_that_is_not_torchs_counts_neither_when_it_comes_nor_when_it_goes():
    array = np.ones(1000, dtype=np.float32)

    def call():
        for _ in range(5):
            x = torch.from_numpy(array)
            y = torch.frombuffer(bytearray(N), dtype=torch.float32)
            total = (x[:10] + y[:10]).sum()
            del x, y
        return total

    assert both(measure_peak(call)) == (48, 4), "two sums, and what was added"


def test_tensors_without_memory():
    def call():
        nothing = torch.empty(10**9, device="meta") + 1
        with FakeTensorMode():
            fake = torch.empty(10**9).exp()
        return nothing, fake

    assert both(measure_peak(call)) == (0, 0)


class Pair(torch.Tensor):
    """A wrapper of two tensors, with memory only inside."""

    @staticmethod
    def __new__(cls, left, right):
        return torch.Tensor._make_wrapper_subclass(cls, left.shape, dtype=left.dtype)

    def __init__(self, left, right):
        self.left, self.right = left, right

    def __tensor_flatten__(self):
        return ["left", "right"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, outer_size, outer_stride):
        return Pair(inner["left"], inner["right"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def half(side):
            return [getattr(a, side) if isinstance(a, Pair) else a for a in args]

        scratch = torch.empty(5000)
        results = func(*half("left")), func(*half("right"))
        del scratch
        return cls(*results)


def test_wrappers_count_what_is_inside_and_what_they_use_meanwhile():
    pair = Pair(floats(), floats())
    assert both(measure_peak(lambda: pair + 1)) == (5 * N + 2 * N, 2 * N)
    box = [pair + 1]
    assert both(measure_peak(box.clear)) == (0, -2 * N)


def test_sparse_gradients():
    table = nn.Embedding(1000, 10, sparse=True)
    indices = torch.arange(50)

    def step():
        table(indices).sum().backward()

    report = measure_peak(step)
    assert table.weight.grad.is_sparse
    assert report.after_bytes >= 50 * 10 * 4
    assert report.peak_bytes < 1000 * 10 * 4, "no dense gradient was made"


def test_parts_of_sparse_tensors_made_inside_a_call():
    x = torch.eye(100)
    sparse = measure_peak(x.to_sparse)
    assert sparse.after_bytes == 100 * 2 * 8 + 100 * 4


class Refusing(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"asked for {func}")


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_strange_tensors_that_are_alive_do_no_harm():
    w = torch.randn(3, requires_grad=True)
    with FakeTensorMode():
        fake = torch.empty(3)
    alive = [
        torch.randn(3).as_subclass(Refusing),
        w * 2,
        torch.eye(3).to_sparse(),
        torch.randn(3, 3).to_mkldnn(),
        torch.empty(3, device="meta"),
        fake,
        nn.LazyLinear(3).weight,
        Pair(floats(), floats()),
    ]
    assert both(measure_peak(floats)) == (N, N)
    assert len(alive) == 8


def test_gradients_that_meet_read_high_by_no_more_than_one_of_them():
    net = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
    x = torch.randn(256, 64)

    def step():
        h = x
        for layer in net:
            h = h + torch.tanh(layer(h)) * torch.sigmoid(layer(h))
        h.square().sum().backward()

    def fresh():
        for parameter in net.parameters():
            parameter.grad = None

    step()
    fresh()
    real = by_profiler(step)
    fresh()
    read = measure_peak(step).peak_bytes
    assert real <= read * 1.01
    assert read <= real + 256 * 64 * 4


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_dtensors_count_as_the_tensors_inside(mesh):
    w = torch.randn(100, 100)
    x = torch.randn(20, 100)

    def call(w, x):
        return torch.relu(x @ w)

    plain = measure_peak(call, w, x)
    spread = measure_peak(
        call, distribute_tensor(w, mesh, [Shard(1)]), distribute_tensor(x, mesh, [Replicate()])
    )
    assert both(spread) == both(plain) == (2 * 20 * 100 * 4, 20 * 100 * 4)


def test_fsdp_has_one_gathered_block_at_a_time(mesh):
    def peak_of(blocks):
        net = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(blocks)))
        for block in net:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        x = torch.randn(1, 256)

        def forward():
            with torch.no_grad():
                return net(x)

        forward()
        return measure_peak(forward).peak_bytes

    gathered = 256 * 256 * 4
    assert gathered <= peak_of(2)
    assert peak_of(8) < 2 * gathered


def test_a_function_that_is_none():
    with pytest.raises(ValueError, match="fn must be a function"):
        measure_peak(floats())


@pytest.mark.parametrize("device", ["meta", "nonsense", "", object()])
def test_impossible_devices_are_refused(device):
    with pytest.raises(ValueError, match="device must be 'cpu' or a CUDA device"):
        measure_peak(floats, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_where_there_is_none():
    with pytest.raises(ValueError, match="CUDA is not available"):
        measure_peak(floats, device="cuda:0")


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_the_cpu_alone(device):
    report = measure_peak(floats, device=device)
    assert [each.device for each in report.devices] == ["cpu"]
    assert both(report) == (N, N)


class Allocator:
    """Stands for CUDA's caching allocator, as torch documents its statistics."""

    def __init__(self, devices):
        self.now = [0] * devices
        self.peak = [0] * devices

    def take(self, index, size_bytes):
        self.now[index] += size_bytes
        self.peak[index] = max(self.peak[index], self.now[index])

    def install(self, monkeypatch):
        for name, value in {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: len(self.now),
            "current_device": lambda: 0,
            "memory_allocated": lambda index: self.now[index],
            "max_memory_allocated": lambda index: self.peak[index],
            "reset_peak_memory_stats": lambda i: self.peak.__setitem__(i, self.now[i]),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


@pytest.fixture
def cuda(monkeypatch):
    allocator = Allocator(2)
    allocator.install(monkeypatch)
    allocator.take(0, 1000)
    allocator.take(0, -400)
    return allocator


def test_the_device_on_which_most_was_taken(cuda):
    def call():
        cuda.take(0, 50)
        cuda.take(1, 300)
        cuda.take(1, -200)
        return floats()

    report = measure_peak(call)
    assert (report.device, *both(report)) == ("cuda:1", 300, 100)
    assert [(each.device, each.peak_bytes) for each in report.devices] == [
        ("cuda:1", 300),
        ("cuda:0", 50),
        ("cpu", N),
    ]


def test_the_device_that_was_asked_for(cuda):
    def call():
        cuda.take(0, 50)
        cuda.take(0, -80)
        cuda.take(1, 300)

    report = measure_peak(call, device="cuda")
    assert (report.device, *both(report)) == ("cuda:0", 50, -30)
    assert len(report.devices) == 1


def test_a_call_on_the_cpu_where_there_is_cuda(cuda):
    report = measure_peak(floats)
    assert (report.device, *both(report)) == ("cpu", N, N)
    assert cuda.peak == [600, 0]
    cuda.peak = [999, 999]
    measure_peak(floats, device="cpu")
    assert cuda.peak == [999, 999], "asked for the CPU, it leaves CUDA's statistics alone"


def test_calls_in_calls_on_cuda(cuda):
    seen = []

    def inner():
        cuda.take(0, 200)
        cuda.take(0, -200)

    def outer():
        cuda.take(0, 500)
        cuda.take(0, -450)
        seen.append(measure_peak(inner, device="cuda:0"))
        cuda.take(0, 10)

    report = measure_peak(outer, device="cuda:0")
    assert both(seen[0]) == (200, 0)
    assert both(report) == (500, 60)
    with pytest.raises(ZeroDivisionError):
        measure_peak(lambda: 1 // 0, device="cuda:0")
    assert measure_peak(inner, device="cuda:0").peak_bytes == 200


def test_the_meter_agrees_with_the_kernel_and_the_profiler():
    script = pathlib.Path(__file__).parent / "peak_process.py"
    returns_memory = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    found = {}
    for case in ("plain", "checkpointed"):
        run = subprocess.run(
            [sys.executable, script, case],
            env={**os.environ, **returns_memory},
            capture_output=True,
            timeout=100,
            check=True,
        )
        found[case] = json.loads(run.stdout.splitlines()[-1])
        assert found[case]["meter"] == pytest.approx(found[case]["profiler"], rel=0.01)
    assert found["checkpointed"]["meter"] < 0.5 * found["plain"]["meter"]
    if None in (found[case]["kernel"] for case in found):
        pytest.skip("/proc/self/clear_refs cannot reset the high-water mark here")
    for case in found:
        assert found[case]["meter"] == pytest.approx(found[case]["kernel"], rel=0.1), case
