"""convert from and to torch's own formats: torch.save files and DCP folders, whoever wrote them."""

import collections
import io
import json
import os
import pathlib
import pickle
import struct
import warnings
import zipfile
import zlib

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from convert_tools import MIB, done, refused
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict

import holdfast
from holdfast.catalog import Catalog
from holdfast.distributed import CheckpointOptions, DistributedCheckpoint, LoadOptions, SaveOptions

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EIGHTS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz)
OTHERS = (torch.bool, torch.uint8, torch.int64, torch.uint16, torch.uint64, torch.complex64)


def everything():
    """A state of all kinds of tensors and of values that torch.load takes."""
    torch.manual_seed(0)
    base = torch.randn(64, 48)
    tied = torch.randn(5, 3)
    model = {str(kind).split(".")[1]: torch.randn(9).to(kind) for kind in (*FLOATS, *EIGHTS)}
    model |= {str(kind).split(".")[1]: torch.arange(6).to(kind) for kind in OTHERS}
    model |= {
        "wide": torch.randn(4, dtype=torch.complex128),
        "single": torch.tensor(3.5),
        "none": torch.empty(0, 3),
        "turned": base.t(),
        "rows": base[10:20, ::2],
        "spread": torch.ones(1).expand(4, 5),
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "tied": tied,
        "head": tied,
        "parameter": nn.Parameter(torch.randn(3)),
        "large": torch.randn(300, 1000),
    }
    return {
        "model": collections.OrderedDict(model),
        "optimizer": {"state": {0: {"step": torch.tensor(7.0)}}, "betas": (0.9, 0.999)},
        "epoch": 3,
        "big": 2**80,
        "text": "ä",
        "raw": b"\0\xff",
        "z": 1 + 2j,
        "nothing": None,
        "shape": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "names": {"a", "b"},
        "list": [1, [torch.arange(3)], True, float("inf")],
        "counts": collections.Counter(a=2),
    }


def same(found, expected, place="state"):
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), place
        assert bits(found) == bits(expected), place
        return
    assert type(found) is type(expected), place
    if isinstance(expected, dict):
        assert [*found] == [*expected], place
        for key, each in expected.items():
            same(found[key], each, f"{place}[{key!r}]")
    elif type(expected) in (list, tuple):
        assert len(found) == len(expected)
        for nth, each in enumerate(expected):
            same(found[nth], each, f"{place}[{nth}]")
    else:
        assert found == expected, place


def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_torch_save_to_holdfast_and_back_is_the_same_state(tmp_path):
    state = everything()
    torch.save(state, tmp_path / "a.pt")
    told = done("convert", tmp_path / "a.pt", tmp_path / "store" / "x")
    assert "a holdfast checkpoint, " in told.out
    assert Catalog(tmp_path / "store").verify("x").is_intact
    done("convert", tmp_path / "store" / "x", tmp_path / "b.pth")
    for mapped in (False, True):
        found = torch.load(tmp_path / "b.pth", weights_only=True, mmap=mapped)
        same(found, state)
        model = found["model"]
        assert model["tied"].data_ptr() == model["head"].data_ptr() != model["single"].data_ptr()
    with zipfile.ZipFile(tmp_path / "b.pth") as archive:
        assert archive.testzip() is None
    stored = holdfast.load(tmp_path / "store" / "x")
    same(stored["model"]["turned"], state["model"]["turned"])
    opened = Catalog(tmp_path / "store").open("x")
    assert "model.tied" in opened.tensors
    assert "model.head" not in opened.tensors


def test_a_file_of_before_the_archives(tmp_path):
    state = {"w": torch.arange(6.0).view(2, 3).t(), "epoch": 2}
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    done("convert", tmp_path / "old.pt", tmp_path / "new.bin")
    same(torch.load(tmp_path / "new.bin"), state)
    assert zipfile.is_zipfile(tmp_path / "new.bin")


@pytest.fixture
def no_checksums():
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(True)


@pytest.mark.usefixtures("no_checksums")
def test_archives_without_checksums(tmp_path):
    state = everything()
    torch.save(state, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert {each.CRC for each in archive.infolist()} == {0}
    done("convert", tmp_path / "a.pt", tmp_path / "b.pt")
    same(torch.load(tmp_path / "b.pt", weights_only=True), state)
    state = {"w": torch.randn(30, 20), "epoch": 5, "pair": (torch.arange(3), "x")}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    done("convert", tmp_path / "dcp", tmp_path / "c.pt")
    same(torch.load(tmp_path / "c.pt", weights_only=True), state)
    whole = (tmp_path / "a.pt").read_bytes()
    for size in (100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "a.pt").write_bytes(whole[:size])
        refused("convert", tmp_path / "a.pt", tmp_path / "d.pt", code=4, saying="cut short")


def test_a_checksum_that_is_there_is_still_compared(tmp_path):
    torch.save({"w": torch.ones(3), "text": "before"}, tmp_path / "a.pt")
    changed = (tmp_path / "a.pt").read_bytes().replace(b"before", b"behind")
    (tmp_path / "a.pt").write_bytes(changed)
    assert torch.load(tmp_path / "a.pt", weights_only=True)["text"] == "behind"
    refused("convert", tmp_path / "a.pt", tmp_path / "b.pt", code=4, saying="Bad CRC-32")


def test_tied_tensors_inside_of_a_value_of_dcp_stay_tied(tmp_path):
    tied = torch.randn(5)
    dcp.save({"pair": (tied, tied, tied[1:])}, checkpoint_id=tmp_path / "a", no_dist=True)
    done("convert", tmp_path / "a", tmp_path / "b.pt")
    first, second, part = torch.load(tmp_path / "b.pt", weights_only=True)["pair"]
    same((first, second, part), (tied, tied, tied[1:]))
    assert first.data_ptr() == second.data_ptr()
    assert part.data_ptr() != first.data_ptr() + 4


def test_a_training_comes_out_as_torch_users_know_it(tmp_path):
    model, _ = trained()
    optimizer = torch.optim.AdamW(
        [{"params": model[2].parameters(), "lr": 0.1}, {"params": model[0].parameters()}]
    )
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    with DistributedCheckpoint.create(options=CheckpointOptions(storage=tmp_path)) as checkpoint:
        options = SaveOptions(checkpoint_prefix="step_1", step=1)
        checkpoint.save(model, optimizer, options, extra={"epoch": 4})
    done("convert", tmp_path / "step_1", tmp_path / "a.pt")
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert {*found} == {"model", "optimizer", "extra", "rng"}
    assert found["extra"] == {"epoch": 4}
    same(dict(found["model"]), dict(model.state_dict()))
    expected = optimizer.state_dict()
    assert {*found["optimizer"]} == {*expected, "optimizer_class"}
    same(found["optimizer"]["state"], expected["state"])
    assert found["optimizer"]["param_groups"] == expected["param_groups"]
    again = torch.optim.AdamW(
        [{"params": model[2].parameters()}, {"params": model[0].parameters()}], lr=1.0
    )
    again.load_state_dict(found["optimizer"])
    same(again.state_dict()["state"], expected["state"])
    done(
        *("convert", tmp_path, tmp_path / "m.safetensors"),
        *("--select", "model.*", "--strip-prefix", "model."),
    )
    from safetensors.torch import load_file

    model.load_state_dict(load_file(tmp_path / "m.safetensors"))
    done("convert", tmp_path, tmp_path / "dcp", "--to", "dcp")
    blank = {"model": {name: torch.zeros_like(t) for name, t in model.state_dict().items()}}
    dcp.load(blank, checkpoint_id=tmp_path / "dcp", no_dist=True)
    same(blank["model"], dict(model.state_dict()))


def test_dcp_folders_that_torch_wrote_and_that_torch_reads(tmp_path):
    torch.manual_seed(2)
    state = {
        "model": {"w": torch.randn(30, 20), "t": torch.randn(8, 5).t(), "one": torch.tensor(2)},
        "optimizer": {"0": {"exp": torch.randn(4, dtype=torch.bfloat16)}},
        "epoch": 5,
        "betas": (0.9, 0.95),
        "list": [torch.arange(3), {"x": 1.5}],
    }
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    done("convert", tmp_path / "a", tmp_path / "a.pt")
    same(torch.load(tmp_path / "a.pt", weights_only=True), state)
    done("convert", tmp_path / "a", tmp_path / "store" / "x")
    done("convert", tmp_path / "store" / "x", tmp_path / "b", "--to", "dcp")
    dcp_to_torch_save(tmp_path / "b", tmp_path / "b.pt")
    same(torch.load(tmp_path / "b.pt", weights_only=True), state)
    blank = {"model": {"w": torch.zeros(30, 20)}, "epoch": 0}
    dcp.load(blank, checkpoint_id=tmp_path / "b", no_dist=True)
    assert blank["epoch"] == 5
    same(blank["model"]["w"], state["model"]["w"])
    done("convert", tmp_path / "a", tmp_path / "c.safetensors", "--tensors-only")
    refused(
        *("convert", tmp_path / "a", tmp_path / "d.safetensors"),
        code=2,
        saying=["epoch (int)", "betas.0 (float)", "list.1.x (float)"],
    )


def trained():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_trainings_of_torchs_formats_go_on_with_holdfast(tmp_path):
    model, optimizer = trained()
    of_dcp, of_dcps_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_dcp, "optimizer": of_dcps_optimizer}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    done("convert", tmp_path / "dcp", tmp_path / "store" / "dcp")
    other = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    others = torch.optim.AdamW(other.parameters())
    with DistributedCheckpoint.create(
        options=CheckpointOptions(storage=tmp_path / "store")
    ) as checkpoint:
        checkpoint.load(other, others, LoadOptions(checkpoint_prefix="dcp"))
    same(other.state_dict(), model.state_dict())
    same(others.state_dict()["state"], optimizer.state_dict()["state"])
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "a.pt")
    done("convert", tmp_path / "a.pt", tmp_path / "store" / "torch")
    found = holdfast.load(tmp_path / "store" / "torch")
    again = torch.optim.AdamW(other.parameters())
    again.load_state_dict(found["optimizer"])
    same(again.state_dict(), optimizer.state_dict())
    other.load_state_dict(found["model"])


def test_a_tensor_that_ranks_have_shares_of_is_put_together(tmp_path):
    """What four ranks of a two-dimensional mesh write, in two files, by DCP's own classes."""
    whole = torch.randn(7, 9)
    boxes = [(0, 0, 4, 5), (0, 5, 4, 9), (4, 0, 7, 5), (4, 5, 7, 9)]
    chunks, places = [], {}
    (tmp_path / "a").mkdir()
    for nth, (top, left, bottom, right) in enumerate(boxes):
        name = f"__{nth % 2}_0.distcp"
        with (tmp_path / "a" / name).open("ab") as file:
            data = io.BytesIO()
            part = whole[top:bottom, left:right]
            torch.save(part.t().contiguous().t() if nth == 2 else part.clone(), data)
            start = file.tell()
            file.write(data.getbuffer())
        at, sizes = torch.Size([top, left]), torch.Size(part.shape)
        chunks.append(metadata.ChunkStorageMetadata(at, sizes))
        info = filesystem._StorageInfo(name, start, len(data.getbuffer()))
        places[metadata.MetadataIndex("w", at, nth)] = info
    kind = metadata.TensorStorageMetadata(metadata.TensorProperties(), whole.shape, chunks)
    (tmp_path / "a" / ".metadata").write_bytes(
        pickle.dumps(metadata.Metadata({"w": kind}, storage_data=places))
    )
    done("convert", tmp_path / "a", tmp_path / "a.pt")
    same(torch.load(tmp_path / "a.pt"), {"w": whole})
    os.truncate(tmp_path / "a" / "__1_0.distcp", 500)
    refused("convert", tmp_path / "a", tmp_path / "b.pt", code=4, saying=["'w'", "cut short"])
    (tmp_path / "a" / "__1_0.distcp").unlink()
    refused("convert", tmp_path / "a", tmp_path / "b.pt", code=4, saying="'w' is not there")
    kind.chunks.pop()
    found = metadata.Metadata({"w": kind}, storage_data=places)
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(found))
    assert not (tmp_path / "b.pt").exists()


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["archive", "old", "metadata", "value"])
def test_what_would_run_code_is_refused_and_not_run(tmp_path, kind):
    made = tmp_path / "made"
    evil = Evil(made)
    source = tmp_path / ("a.pt" if kind in {"archive", "old"} else "a")
    if kind in {"archive", "old"}:
        state = {"w": torch.ones(2), "x": evil}
        torch.save(state, source, _use_new_zipfile_serialization=kind == "archive")
        torch.load(source, weights_only=False)
    elif kind == "metadata":
        source.mkdir()
        (source / ".metadata").write_bytes(pickle.dumps({"x": evil}))
        with pytest.raises(AttributeError):
            dcp.FileSystemReader(source).read_metadata()
    else:
        dcp.save({"w": torch.ones(2), "x": 1, "y": evil}, checkpoint_id=source, no_dist=True)
        dcp_to_torch_save(source, tmp_path / "ran.pt")
    made.rmdir()  # so it would do its harm
    for target in ("b.safetensors", "b.pt", "store/b"):
        ran = refused(
            *("convert", source, tmp_path / target),
            code=4,
            saying=["posix.mkdir", "may run code", "nothing of it was run"],
        )
        assert ".;" not in ran.err
        assert not made.exists()
        assert not (tmp_path / target).exists()
    if kind == "value":
        done("convert", source, tmp_path / "b.pt", "--tensors-only")
        same(torch.load(tmp_path / "b.pt"), {"w": torch.ones(2)})
        assert not made.exists()


def test_files_of_torch_that_are_damaged_or_of_another_kind(tmp_path):
    source, target = tmp_path / "a.pt", tmp_path / "b.safetensors"
    torch.save({"w": torch.randn(1000)}, source)
    whole = source.read_bytes()
    for size in (100, len(whole) // 2, len(whole) - 1):
        source.write_bytes(whole[:size])
        refused("convert", source, target, code=4, saying="cut short")
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(source, "w") as new:
        for each in old.infolist():
            new.writestr(each.filename, old.read(each), zipfile.ZIP_DEFLATED)
    refused("convert", source, target, code=4, saying="compressed in this archive")
    with zipfile.ZipFile(source, "w") as new:
        new.writestr("readme.txt", "words")
    refused("convert", source, target, code=4, saying="of another kind")
    torch.save({"w": torch.eye(3).to_sparse()}, source)
    refused("convert", source, target, code=4, saying="sparse")
    folder = tmp_path / "dcp"
    dcp.save({"w": torch.ones(5), "n": 1}, checkpoint_id=folder, no_dist=True)
    refused("convert", folder / ".metadata", target, code=2, saying="give the folder")
    record = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(record[:-20])
    refused("convert", folder, target, code=4, saying="cut short")
    (folder / ".metadata").write_bytes(record.replace(b"__0_0.distcp", b"../0.distcp "))
    refused("convert", folder, target, code=4, saying="is not there")
    (folder / ".metadata").write_bytes(b"\x80\x04Nr\xff\xff\xff\x7f0N.")  # a place of 2^31
    ran = refused("convert", folder, target, code=4, saying="a NoneType, no metadata")
    assert ran.memory < 128 * MIB
    assert not target.exists()


def test_what_is_not_dense_is_refused_and_what_stands_twice_is_kept_twice(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    torch.save({"w": quantized}, tmp_path / "a.pt")
    refused("convert", tmp_path / "a.pt", tmp_path / "s/b", code=4, saying="only dense ones")
    assert not (tmp_path / "s").exists()
    shared = [torch.ones(1), 2]
    torch.save({"x": shared, "y": shared}, tmp_path / "a.pt")
    done("convert", tmp_path / "a.pt", tmp_path / "b.pt")
    same(torch.load(tmp_path / "b.pt"), {"x": shared, "y": shared})


def test_what_torch_cannot_hold_is_listed(tmp_path):
    state = {
        "w": np.arange(3),
        "where": pathlib.PurePosixPath("a"),
        "last": collections.deque([1]),
        "many": frozenset([1]),
    }
    Catalog(tmp_path / "a").write("x", state)
    for kind, target in (("torch", "x.pt"), ("dcp", "folder")):
        line = ("convert", tmp_path / "a", tmp_path / target, "--to", kind)
        refused(*line, code=2, saying=["where (PurePosixPath)", "many (frozenset)", "nothing was"])
        done(*line, "--tensors-only")
    same(torch.load(tmp_path / "x.pt"), {"w": torch.arange(3)})
    Catalog(tmp_path / "b").write("x", {"w": np.arange(3), "last": collections.deque([1])})
    for kind, target in (("torch", "y.pt"), ("dcp", "other")):
        line = ("convert", tmp_path / "b", tmp_path / target, "--to", kind)
        refused(*line, code=2, saying="deque")
        assert not (tmp_path / target).exists()


def test_a_tensor_larger_than_a_piece_is_several_chunks_of_dcp(tmp_path):
    large = torch.arange(12 * MIB, dtype=torch.float32).view(3, -1)
    torch.save({"large": large}, tmp_path / "a.pt")
    done("convert", tmp_path / "a.pt", tmp_path / "a", "--to", "dcp")
    blank = {"large": torch.zeros_like(large)}
    dcp.load(blank, checkpoint_id=tmp_path / "a", no_dist=True)
    assert torch.equal(blank["large"], large)
    (kind,) = dcp.FileSystemReader(tmp_path / "a").read_metadata().state_dict_metadata.values()
    assert len(kind.chunks) > 1
    done("convert", tmp_path / "a", tmp_path / "b.pt")
    assert torch.equal(torch.load(tmp_path / "b.pt")["large"], large)


def doubled(depth):
    """A list of the one before twice, so many times: few bytes in a pickle."""
    value = []
    for _ in range(depth):
        value = [value, value]
    return value


def in_itself():
    value = []
    value.append(value)
    return {"a": value}


def of_itself(depth):
    value = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("kind", ["archive", "old", "value"])
@pytest.mark.parametrize(
    ("state", "saying"),
    [
        (doubled(60), "in each other so often"),
        (in_itself(), "more than 64 deep"),
        (of_itself(300), "more than 64 deep"),
        ({"w": torch.ones(1).expand(2**30, 2**30)}, "over and over"),
    ],
    ids=["doubled", "in itself", "deep", "expanded"],
)
def test_what_would_never_end_is_refused_at_once(tmp_path, kind, state, saying):
    source, target = tmp_path / "a", tmp_path / "b.pt"
    if kind == "value":
        dcp.save({"w": torch.ones(2), "x": 1}, checkpoint_id=source, no_dist=True)
        found = pickle.loads((source / ".metadata").read_bytes())
        data = io.BytesIO()
        torch.save(state, data)
        (source / "__0_1.distcp").write_bytes(data.getbuffer())
        info = filesystem._StorageInfo("__0_1.distcp", 0, len(data.getbuffer()))
        found.storage_data[metadata.MetadataIndex("x")] = info
        (source / ".metadata").write_bytes(pickle.dumps(found))
    else:
        torch.save(state, source, _use_new_zipfile_serialization=kind == "archive")
    ran = refused("convert", source, target, code=4, saying=saying)
    assert ran.memory < 256 * MIB
    assert not target.exists()


def test_an_expanded_tensor_is_converted_with_all_its_elements(tmp_path):
    state = {"w": torch.arange(3.0)[:, None].expand(3, 70), "t": torch.randn(30, 50).t()}
    for old in (False, True):
        torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=not old)
        done("convert", tmp_path / "a.pt", tmp_path / f"{old}.safetensors")
        same(load_file(tmp_path / f"{old}.safetensors"), state)


@pytest.mark.parametrize("kind", ["archive", "old", "value"])
def test_few_bytes_may_be_many_elements_up_to_a_gibibyte(tmp_path, kind):
    target = tmp_path / "b.safetensors"
    for nth, shape in enumerate([(200, 200), (3000, 3000), (2**14, 2**14 + 1)]):
        source = tmp_path / f"a{nth}"
        tensor = torch.full((1,), 7.0).expand(shape)
        if kind == "value":
            dcp.save({"x": (tensor,)}, checkpoint_id=source, no_dist=True)
        else:
            torch.save({"x": tensor}, source, _use_new_zipfile_serialization=kind == "archive")
        if tensor.numel() * 4 > 2**30:
            refused("convert", source, target, "--overwrite", code=4, saying="over and over")
        else:
            done("convert", source, target, "--overwrite")
        (found,) = load_file(target).values()
        assert torch.equal(found, tensor) == (tensor.numel() * 4 <= 2**30)


def test_tuples_too_deep_to_be_keys_are_refused_and_end_no_process(tmp_path):
    deep = b"\x80\x02})" + b"\x85" * 1_000_000 + b"K\1s."
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", deep)
        archive.writestr("a/version", b"3\n")
    magic = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."
    (tmp_path / "old.pt").write_bytes(magic + pickle.dumps({}, 2) + deep)
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(deep)
    checksum = zlib.crc32(deep).to_bytes(4, "little")
    data = (tmp_path / "a.pt").read_bytes()
    assert data.count(checksum) == 2
    (tmp_path / "unchecked.pt").write_bytes(data.replace(checksum, bytes(4)))
    for source in ("a.pt", "unchecked.pt", "old.pt", "dcp"):
        refused("convert", tmp_path / source, tmp_path / "b", code=4, saying="tuples are more than")
    many = {("a", ("b", i)): i for i in range(20_000)}
    torch.save({"w": torch.ones(2), "many": many}, tmp_path / "good.pt")
    done("convert", tmp_path / "good.pt", tmp_path / "good", "--to", "torch")
    assert torch.load(tmp_path / "good", weights_only=True)["many"] == many


LISTS = b"]q\0" + b"".join(bytes(b"](h%ch%ceq%c" % (n, n, n + 1)) for n in range(60))
LATE = b"".join(b"]q%c" % n for n in range(61)) + b"".join(
    bytes(b"h%c(h%ch%ce" % (n + 1, n, n)) for n in reversed(range(60))
)
PAIRS = b")" + b"q\0h\0\x86" * 60


SOME_PAIRS = b")" + b"q\0h\0\x86" * 16 + b"q\1"
BYTES = b"cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R"
OFTEN, NO_FUNCTION = "in each other so often", "it calls what is no function"


@pytest.mark.parametrize(
    ("body", "saying"),
    [
        (LISTS + b")R", NO_FUNCTION),
        (LISTS + b")\x81", NO_FUNCTION),
        (LISTS + b")R0Nr\x3c\0\0\0", NO_FUNCTION),
        (LATE, OFTEN),
        (LISTS + b"ctorch._utils\n_rebuild_sparse_tensor\n(h\x3cNtR", OFTEN),
        (b"}" + PAIRS + b"K\1s", OFTEN),
        (b"(0}" + PAIRS + b"K\1s", OFTEN),
        (b"}(" + SOME_PAIRS + b"K\1" + b"h\1K\1" * 100_000 + b"u", OFTEN),
        (SOME_PAIRS + b"]h\1aq\2" + b"cbuiltins\nset\nh\2\x85R" * 100_000, OFTEN),
        (BYTES, "it makes bytes of a number"),
        (b"c_codecs\nencode\nq\0h\0X\2\0\0\0abX\3\0\0\0hex\x86RX\3\0\0\0hex\x86R", "encodes what"),
        (b"](h\0", "cut short or damaged"),
    ],
    ids=(
        "called", "made", "forgotten", "late", "layout", "key", "marked", "keys", "sets", "bytes",
        "hex", "cut",
    ),
)  # fmt: skip
def test_what_would_take_for_ever_is_refused_before_torch_sees_it(tmp_path, body, saying):
    """Few bytes that make sixty lists or tuples, each twice in the next, and the like."""
    data = b"\x80\x02" + body + b"."
    (tmp_path / "a.pt").write_bytes(archive_of({"a/data.pkl": data}))
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(data)
    for source in ("a.pt", "dcp"):
        ran = refused("convert", tmp_path / source, tmp_path / "b", code=4, saying=saying)
        assert ran.memory < 256 * MIB


def archive_of(members):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.writestr("a/version", b"3\n")
    return data.getvalue()


def two_lists():
    """An archive with a bad pickle, whose end says where its list is, and before that end another
    list, of a good one. zipfile reads the last, torch the one that it is told of."""
    bad = archive_of({"a/data.pkl": b"\x80\x02}" + PAIRS + b"K\1s."})
    good = archive_of({"a/data.pkl": b"\x80\x02}."})
    (start,) = struct.unpack("<I", bad[-6:-2])
    good_start = struct.unpack("<I", good[-6:-2])[0]
    listed = bytearray(good[good_start:-22])
    at = 0
    while at < len(listed):
        sizes = struct.unpack("<HHH", listed[at + 28 : at + 34])
        (old,) = struct.unpack("<I", listed[at + 42 : at + 46])
        struct.pack_into("<I", listed, at + 42, old + start - good_start)
        at += 46 + sum(sizes)
    return bad[:-22] + good[:good_start] + bytes(listed) + bad[-22:]


@pytest.mark.parametrize(
    ("data", "saying"),
    [
        (archive_of({"a/DATA.PKL": b"\x80\x02}" + PAIRS + b"K\1s."}), OFTEN),
        (archive_of({"a/data.pkl": b"N.", "b/data.pkl": b"N."}), "more than one data.pkl"),
        (two_lists(), "does not end as torch.save ends one"),
        (archive_of({"a/data.pkl": b"N."}) + b"\0", "does not end as torch.save ends one"),
    ],
    ids=["case", "two", "two lists", "more"],
)
def test_no_pickle_is_loaded_that_was_not_looked_at(tmp_path, data, saying):
    (tmp_path / "a.pt").write_bytes(data)
    refused("convert", tmp_path / "a.pt", tmp_path / "b", code=4, saying=saying)


def test_what_ordinary_states_share_and_call_is_converted(tmp_path):
    config = {"vocab": "x" * 1_000_000, "n": 1}
    state = {f"layer{n}": {"config": config, "w": torch.ones(2)} for n in range(48)}
    state["bytes"] = b"some \xff bytes"
    for old in (False, True):
        path = tmp_path / f"{old}.pt"
        torch.save(state, path, _use_new_zipfile_serialization=not old)
        done("convert", path, tmp_path / f"{old}", "--to", "torch")
        found = torch.load(tmp_path / f"{old}", weights_only=True)
        assert found["layer47"]["config"] == config
        assert found["bytes"] == state["bytes"]


def test_a_tensor_that_is_there_very_often_is_converted(tmp_path):
    tensor = torch.arange(3.0)
    torch.save({"w": tensor, "often": [tensor] * 3000, "all": [[tensor] * 30] * 30}, tmp_path / "a")
    done("convert", tmp_path / "a", tmp_path / "b", "--to", "torch")
    found = torch.load(tmp_path / "b", weights_only=True)
    assert len(found["often"]) == 3000
    assert torch.equal(found["all"][29][29], tensor)


def test_an_archive_inside_of_dcp_may_not_be_compressed_either(tmp_path):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a", no_dist=True)
    found = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
    (index,) = found.storage_data
    old = found.storage_data[index]
    path = tmp_path / "a" / old.relative_path
    data = io.BytesIO(path.read_bytes()[old.offset : old.offset + old.length])
    made = io.BytesIO()
    with zipfile.ZipFile(data) as whole, zipfile.ZipFile(made, "w") as packed:
        for each in whole.infolist():
            packed.writestr(each.filename, whole.read(each), zipfile.ZIP_DEFLATED)
    path.write_bytes(made.getbuffer())
    info = filesystem._StorageInfo(old.relative_path, 0, len(made.getbuffer()))
    found.storage_data[index] = info
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(found))
    refused("convert", tmp_path / "a", tmp_path / "b.pt", code=4, saying="compressed in this")


def test_a_name_that_no_file_can_have_is_refused_with_words(tmp_path):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a", no_dist=True)
    found = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
    (index,) = found.storage_data
    found.storage_data[index] = filesystem._StorageInfo("a" * 5000, 0, 1)
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(found))
    refused("convert", tmp_path / "a", tmp_path / "b.pt", code=4, saying="is not there")
    (tmp_path / "h").mkdir()
    index = {"weight_map": {"w": "a" * 5000}}
    (tmp_path / "h" / "model.safetensors.index.json").write_text(json.dumps(index))
    refused("convert", tmp_path / "h", tmp_path / "b.pt", code=4, saying="which is not there")
