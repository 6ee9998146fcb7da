"""The tiers: what is held comes back bit for bit, memory is really free, and nothing is lost."""

import contextlib
import gc
import itertools
import logging
import warnings
from pathlib import Path

import pytest
import torch
from activation_tier_tools import SIZE, WAIT_S, Bench, Disk, bits, some
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.activation._keeping.extents import Extents
from holdfast.activation._keeping.geometry import stretch
from holdfast.activation._keeping.manager import CheckpointManager
from holdfast.activation._keeping.moving_tier import LEAST_BYTES
from holdfast.activation._keeping.scratch import filesystem_of, scratch_folder
from holdfast.errors import RecomputationError


@pytest.fixture
def benches(tmp_path):
    """Makes tiers, and closes them in the end."""
    with contextlib.ExitStack() as stack:

        def make(disk=None, **limits):
            bench = Bench(tmp_path, disk, **limits)
            stack.callback(bench.close)
            return bench

        yield make


@pytest.fixture
def bench(benches):
    return benches()


@pytest.fixture
def no_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# The room in a file


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_stretches_in_use_never_overlap_and_are_used_again(steps):
    extents, used = Extents(), {}
    for take, number in steps:
        if take or not used:
            start = extents.take(number)
            assert all(
                start + number <= other or other + size <= start for other, size in used.items()
            )
            used[start] = number
        else:
            start = sorted(used)[number % len(used)]
            extents.give(start, used.pop(start))
        assert extents.end == max((start + size for start, size in used.items()), default=0)
    for start, size in used.items():
        extents.give(start, size)
    assert extents.end == 0
    assert extents.take(100) == 0


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.randoms())
def test_the_same_sizes_again_need_no_more_room(sizes, random):
    extents = Extents()
    extents.take(1)  # something that stays, behind which all is freed
    ends = []
    for _ in range(3):
        used = [(extents.take(size), size) for size in sizes]
        ends.append(extents.end)
        random.shuffle(used)
        for start, size in used:
            extents.give(start, size)
    assert ends == [1 + sum(sizes)] * 3


# Where the file lies

MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
tmpfs /tmp tmpfs rw 0 0
/dev/sdb1 /tmp/disk xfs rw 0 0
tmpfs /with\\040space tmpfs rw 0 0
/dev/sdc1 /twice ext4 rw 0 0
ramfs /twice ramfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/home/me", "ext4"),
        ("/tmp", "tmpfs"),
        ("/tmp/x/y", "tmpfs"),
        ("/tmpfolder", "ext4"),
        ("/tmp/disk/x", "xfs"),
        ("/with space/x", "tmpfs"),
        ("/twice/x", "ramfs"),
    ],
)
def test_the_filesystem_of_a_path_is_that_of_the_innermost_mount(path, kind):
    assert filesystem_of(path, MOUNTS) == kind


def test_a_folder_in_memory_is_refused():
    with pytest.raises(ValueError, match=r"folder must be .*'/dev/shm'.*tmpfs is memory"):
        CheckpointManager("disk", folder="/dev/shm")


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no such folder"):
        CheckpointManager("disk", folder=tmp_path / "none")


def test_the_default_folder_is_not_in_memory(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/dev/shm")
    assert scratch_folder(None) in {"/var/tmp", str(Path.cwd())}


def test_only_the_disk_tier_takes_a_folder(tmp_path):
    with pytest.raises(ValueError, match="folder is for the disk tier"):
        CheckpointManager("inplace", folder=tmp_path)


@pytest.mark.parametrize("tier", ["ram", None, 3, ["disk"]])
def test_unknown_tiers_are_refused(tier):
    with pytest.raises(ValueError, match="tier must be one of 'inplace', 'host', 'disk'"):
        CheckpointManager(tier)


# Past the page cache


@pytest.mark.parametrize("direct", [True, False])
def test_neither_writing_nor_reading_leaves_anything_in_the_page_cache(benches, direct):
    bench = benches(Disk(direct=direct))
    assert bench.file._direct == direct
    tensor = some(3 * SIZE)
    (held,) = bench.hold_moved(tensor)
    assert bench.cached_pages() == 0
    assert torch.equal(held.get(), tensor)
    assert bench.cached_pages() == 0


def test_the_system_does_not_read_on_into_what_nobody_asked_for(benches):
    bench = benches(Disk(direct=False))
    held = bench.hold_moved(*(some(SIZE // 4, seed=i) for i in range(8)))
    assert torch.equal(held[0].get(), some(SIZE // 4))  # none was held before, so none is wanted
    assert bench.cached_pages() == 0


def test_where_direct_io_is_refused_it_is_buffered_and_said_once(benches, caplog):
    caplog.set_level(logging.INFO, "holdfast.activation")
    bench = benches()
    bench.disk.refuse_direct_writes = True
    tensors = [some(seed=i) for i in range(3)]
    for held, tensor in zip(bench.hold_moved(*tensors), tensors, strict=True):
        assert torch.equal(held.get(), tensor)
    assert not bench.file._direct
    assert bench.is_uncached()
    assert [record.message for record in caplog.records if "direct I/O" in record.message] == [
        caplog.records[0].message
    ]


def test_the_file_has_no_name(bench, tmp_path):
    bench.hold_moved(some())
    assert list(tmp_path.iterdir()) == []


# What comes back

N = 1 << 16
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(bench, dtype):
    raw = some(N * dtype.itemsize)
    tensor = (raw % 2 if dtype == torch.bool else raw).view(dtype)
    (held,) = bench.hold_moved(tensor)
    found = held.get()
    assert found.dtype == dtype
    assert bits(found) == bits(tensor)


def numbers(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


LAYOUTS = {
    "matrix": lambda: numbers(256, 256),
    "transposed": lambda: numbers(256, 300).t(),
    "every other": lambda: numbers(256, 512)[:, ::2],
    "a slice": lambda: numbers(512, 256)[100:400, 3:200],
    "the middle of a large one": lambda: numbers(4096, 256)[1000:1100],
    "channels last": lambda: numbers(2, 16, 64, 64).to(memory_format=torch.channels_last),
    "expanded": lambda: numbers(1, N).expand(7, N),
    "diagonal": lambda: numbers(2048, 2048).diagonal(),
    "overlapping": lambda: numbers(2 * N).as_strided((N, 16), (1, 1)),
    "conjugated": lambda: torch.complex(numbers(N), -numbers(N)).conj(),
    "negated": lambda: torch.complex(numbers(N), numbers(N)).conj().imag,
    "with a gradient": lambda: numbers(N).requires_grad_() * 2,
    "a parameter": lambda: torch.nn.Parameter(numbers(N)),
    "as other bytes": lambda: numbers(N)[2:].view(torch.uint8)[3:-3],
    "not whole blocks": lambda: numbers(N + 13),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_comes_back_as_it_was(bench, layout):
    tensor = LAYOUTS[layout]()
    (held,) = bench.hold_moved(tensor)
    found = held.get()
    assert type(found) is torch.Tensor
    assert not found.requires_grad
    assert found.shape == tensor.shape
    assert found.stride() == tensor.stride()
    assert (found.is_conj(), found.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    assert bits(found) == bits(tensor.detach())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_tensor_lies_in_its_stretch(data):
    shape = data.draw(st.lists(st.integers(1, 5), max_size=3))
    strides = data.draw(st.lists(st.integers(0, 7), min_size=len(shape), max_size=len(shape)))
    tensor = torch.arange(200, dtype=torch.int16).as_strided(shape, strides, 60)
    start, stop = stretch(tensor, 400)
    first = [int(tensor.as_strided((), (), 60))]
    touched = {
        60 + sum(i * stride for i, stride in zip(where, strides, strict=True))
        for where in itertools.product(*(range(length) for length in shape))
    }
    assert first == [60]
    assert start <= min(touched) * 2
    assert (max(touched) + 1) * 2 <= stop <= 400
    assert start % 64 == 0


def test_inference_tensors_come_back_in_and_out_of_inference_mode(bench):
    with torch.inference_mode():
        tensor = numbers(N) + 1
    (held,) = bench.hold_moved(tensor)
    with torch.inference_mode():
        inside = held.get()
    found = held.get()
    assert torch.equal(inside, tensor)
    assert torch.equal(found, tensor)
    weight = torch.ones(N, requires_grad=True)
    (weight * found).sum().backward()  # an inference tensor could not be saved for this
    assert torch.equal(weight.grad, numbers(N) + 1)


# What is kept in place


@contextlib.contextmanager
def one_rank():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def dtensor():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(numbers(256, 256), init_device_mesh("cpu", (1,)), [Shard(0)])


KEPT = {
    "empty": lambda: torch.empty(0, 3),
    "a number": lambda: torch.tensor(3.0),
    "small": lambda: numbers(LEAST_BYTES // 4 - 1),
    "small, expanded": lambda: torch.ones(1).expand(N, 4),
    "a small part of a large one": lambda: numbers(1024, 1024)[7],
    "sparse": lambda: torch.eye(300).to_sparse(),
    "compressed": lambda: torch.eye(300).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(numbers(N), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([numbers(N), numbers(3)], layout=torch.jagged),
    "strided nested": lambda: torch.nested.nested_tensor([numbers(N), numbers(3)]),
    "meta": lambda: torch.empty(N, device="meta"),
    "mkldnn": lambda: numbers(256, 256).to_mkldnn(),
    "DTensor": dtensor,
    "a subclass": lambda: numbers(256, 256).as_subclass(Marked),
}


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize("kind", KEPT)
def test_what_is_small_or_has_no_plain_storage_is_kept_in_place(bench, kind):
    with contextlib.ExitStack() as stack:
        if kind == "DTensor":
            stack.enter_context(one_rank())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # torch calls some of these kinds beta or deprecated
        tensor = KEPT[kind]()
        held = bench.hold(tensor)
        found = held.get()
        assert type(found) is type(tensor)
        assert found.layout == tensor.layout
        assert found.dim() == tensor.dim()
        if kind in {"empty", "a number", "small", "small, expanded", "a small part of a large one"}:
            assert found.data_ptr() == tensor.data_ptr()
        elif kind != "meta":
            assert str(found) == str(tensor)
        assert found is held.get()
        del held, found
        bench.tidy()
    assert bench.account.current == 0
    assert bench.account.moved == 0


def test_what_torch_func_wraps_is_kept_in_place(bench):
    found = []

    def loss(x):
        y = x * 2
        found.append(bench.hold(y).get())
        return (found[-1] * y).sum()

    x = numbers(N)
    assert torch.equal(torch.func.grad(loss)(x), 4 * x)  # the held one is detached
    assert bench.account.moved == 0


# Views of one storage


def test_views_of_one_storage_are_moved_once_and_come_back_as_views_of_one(bench):
    whole = numbers(512, 512)
    views = [whole, whole.t(), whole[:400], whole.view(torch.int32), whole[3:, 5:]]
    expected = [view.clone() for view in views]
    held = bench.hold_moved(views[0]) + [bench.hold(view) for view in views[1:]]
    bench.tidy()
    assert bench.account.moved == whole.nbytes
    assert bench.account.current == 0
    found = [each.get() for each in held]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert {each.untyped_storage().data_ptr() for each in found} == {
        found[0].untyped_storage().data_ptr()
    }
    assert len(bench.disk.reads) == 1


def test_views_that_overlap_are_moved_once_and_small_ones_alone(bench):
    parts = numbers(512, 3 * 512).chunk(3, dim=1)
    bench.disk.may_write.clear()
    held = [bench.hold(part) for part in parts]
    assert bench.account.current == parts[0].untyped_storage().nbytes()
    rows = numbers(4096, 512)[128:256]
    held.append(bench.hold(rows))
    assert bench.account.current == parts[0].untyped_storage().nbytes() + rows.nbytes
    bench.disk.may_write.set()
    bench.wait_for("moved", 2)
    for each, part in zip(held, [*parts, rows], strict=True):
        assert torch.equal(each.get(), part)


def test_what_was_changed_in_between_is_moved_again(bench):
    tensor = some()
    (first,) = bench.hold_moved(tensor)
    before = tensor.clone()
    tensor.add_(1)
    (second,) = bench.hold_moved(tensor)
    assert torch.equal(first.get(), before)
    assert torch.equal(second.get(), before + 1)


def test_a_change_that_no_version_tells_of_is_noticed_when_it_is_held_again(bench):
    tensor = some()
    (first,) = bench.hold_moved(tensor)
    before = tensor.clone()
    tensor.data.add_(1)
    assert tensor._version == 0
    second = bench.hold(tensor)
    bench.wait_for("moved", 2)
    assert torch.equal(first.get(), before)
    assert torch.equal(second.get(), before + 1)


def test_a_new_storage_at_an_old_address_is_not_taken_for_the_old(bench, no_gc):
    for i in range(50):
        tensor = some(LEAST_BYTES, seed=i)
        held = bench.hold(tensor)
        expected = tensor.clone()
        bench.wait_for("moved", i + 1)
        del tensor
        assert torch.equal(held.get(), expected)


# Changed in place


@pytest.mark.parametrize("change", ["itself", "a view", "what it is a view of"])
def test_a_change_in_place_before_it_is_copied_is_an_error_that_names_the_layer(benches, change):
    bench = benches()
    bench.disk.may_write.clear()
    first = bench.hold(some())  # the writer is busy with this
    assert bench.disk.writing.wait(WAIT_S)
    whole = numbers(N)
    tensor = whole[:-5]
    held = bench.hold(tensor, "encoder.3")
    {"itself": tensor, "a view": tensor[3:9], "what it is a view of": whole}[change].mul_(2)
    with pytest.raises(RecomputationError, match=r"'encoder.3' was modified in place") as caught:
        held.get()
    assert caught.value.layer_id == "encoder.3"
    bench.disk.may_write.set()
    assert torch.equal(first.get(), some())
    bench.hold_moved(some(seed=1))
    with pytest.raises(RecomputationError, match="modified in place"):
        held.get()


def test_in_place_any_change_is_an_error(tmp_path):
    with CheckpointManager() as manager:
        tensor = numbers(10)
        held = manager.hold(tensor, "encoder.3")
        assert held.get().data_ptr() == tensor.data_ptr()
        tensor.add_(1)
        with pytest.raises(RecomputationError, match=r"'encoder.3' was modified in place"):
            held.get()


def test_a_change_after_the_copy_gives_the_old_value(bench):
    tensor = some()
    before = tensor.clone()
    (held,) = bench.hold_moved(tensor)  # which uses the tier once more from this thread
    tensor.zero_()
    assert torch.equal(held.get(), before)


def test_a_change_that_may_have_met_the_copy_is_an_error(bench):
    """Operations change memory first and the version after: this one may have begun before the
    copy ended, for all the tier can know."""
    tensor = some()
    held = bench.hold(tensor, "encoder.3")
    bench.wait_for("moved", 1)
    tensor.zero_()
    with pytest.raises(RecomputationError, match=r"'encoder.3' was modified in place"):
        held.get()
    bench.tidy()
    assert bench.account.moved == 0
    with pytest.raises(RecomputationError, match=r"'encoder.3' was modified in place"):
        held.get()


def test_a_change_while_it_is_copied_is_an_error(benches):
    bench = benches()
    tensor = some(20 * 1024 * 1024)  # written in several requests
    bench.disk.may_write.clear()
    held = bench.hold(tensor, "encoder.3", lasting=True)
    assert bench.disk.writing.wait(WAIT_S)
    tensor[-1] += 1
    bench.disk.may_write.set()
    bench.hold_moved(some())
    bench.tidy()
    assert bench.layers("moved") == ["layer 0"]
    with pytest.raises(RecomputationError, match=r"'encoder.3' was modified in place"):
        held.get()
    assert bench.account.current == 0


def test_who_changes_what_came_back_changes_nothing_for_others(bench):
    tensor = some()
    bench.disk.may_write.clear()
    first, second = bench.hold(tensor), bench.hold(tensor[1:])
    bench.disk.may_write.set()
    bench.wait_for("moved", 1)
    first.get().zero_()
    assert torch.equal(second.get(), tensor[1:])
    assert torch.equal(first.get(), tensor)


def test_the_host_tier_refuses_cpu_tensors():
    with CheckpointManager("host") as manager:
        with pytest.raises(ValueError, match=r"host tier cannot keep .* would save nothing"):
            manager.register_checkpoint("layer", torch.ones(3))
        with pytest.raises(ValueError, match="would save nothing"):
            manager.hold(torch.ones(3))
        assert manager.checkpoint_count == 0
