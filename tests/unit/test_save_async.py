"""A save in the background is of the moment of its call, bit for bit, whatever the training does
next."""

import random
import threading
import time
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from async_tools import MIB, SOON_S, Training, adamw, differs, held, net, require_same
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import holdfast
from holdfast.distributed import DistributedCheckpoint, LoadOptions, SaveOptions
from holdfast.distributed._pool import LEAST_BYTES, SLOT_BYTES
from holdfast.errors import TransientStorageError
from holdfast.testing import Fault, FaultyStorage


def several(seed):
    torch.manual_seed(seed)
    model = nn.ModuleDict({"g": net(seed), "d": net(seed + 1)})
    optimizers = {
        "g": torch.optim.SGD(model["g"].parameters(), lr=0.1, momentum=0.9),
        "d": torch.optim.AdamW(model["d"].parameters(), fused=True),
    }
    return Training(model=model, optimizer=optimizers)


def groups(seed):
    model = net(seed)
    model.register_parameter("frozen", nn.Parameter(torch.rand(300, 300), requires_grad=False))
    first, second = [*model.parameters()][1:3], [*model.parameters()][3:]
    chosen = [{"params": first, "lr": 0.5, "betas": (0.5, 0.6)}, {"params": second, "lr": 0.25}]
    return Training(model=model, optimizer=torch.optim.AdamW(chosen, amsgrad=True))


def tied(seed):
    torch.manual_seed(seed)
    model = nn.ModuleDict({"embed": nn.Embedding(300, 200), "head": nn.Linear(200, 300)})
    model["head"].weight = model["embed"].weight
    return Training(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def buffers(seed):
    """Buffers that change in every forward pass, and are too large to count as small."""
    torch.manual_seed(seed)
    model = nn.BatchNorm1d(20_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    return Training(
        model=model, optimizer=optimizer, forward=lambda: model(torch.rand(4, 20_000) + seed)
    )


def strange_strides(seed):
    """Parameters that do not lie in the order in which they are stored, one of more than a unit."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"conv": nn.Conv2d(1024, 150, 3, bias=False)})
    model = model.to(memory_format=torch.channels_last)
    model["turned"] = nn.Module()
    model["turned"].weight = nn.Parameter(torch.rand(1000, SLOT_BYTES // 4000 + 7).t())
    model["turned"].narrow = nn.Parameter(torch.rand(400, 600)[:, 100:500])
    model["turned"].every_other = nn.Parameter(torch.rand(100_000)[::2])
    return Training(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))


def strange_types(seed):
    torch.manual_seed(seed)
    model = nn.Module()
    model.bf16 = nn.Parameter(torch.rand(300, 300, dtype=torch.bfloat16))
    model.f64 = nn.Parameter(torch.rand(120, 120, dtype=torch.float64))
    model.c64 = nn.Parameter(torch.rand(200, 150, dtype=torch.complex64))
    model.c128 = nn.Parameter(torch.rand(90, 150, dtype=torch.complex128).t())
    model.empty = nn.Parameter(torch.rand(0, 7))
    model.scalar = nn.Parameter(torch.rand(()))
    model.register_buffer("flags", torch.rand(300, 300) > 0.5)
    model.register_buffer("counts", torch.randint(0, 9, (300, 300)))
    return Training(model=model, optimizer=torch.optim.AdamW(model.parameters(), foreach=True))


def average(seed):
    model = net(seed)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    ema.update_parameters(model)
    return Training(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        extra={"ema": ema},
        also=lambda: ema.update_parameters(model),
    )


def schedule(seed):
    training = adamw(seed)
    lrs = torch.optim.lr_scheduler
    scheduler = lrs.SequentialLR(
        training.optimizer,
        [
            lrs.LinearLR(training.optimizer, total_iters=3),
            lrs.CosineAnnealingLR(training.optimizer, 50 + seed),
        ],
        [3],
    )
    training.extra["scheduler"], training.also = scheduler, scheduler.step
    return training


def values(seed):
    """Whatever a tree may hold, each changed in place after every step."""
    shared = torch.full((300, 300), float(seed))
    extra = {
        "list": [seed, [seed]],
        "set": {seed},
        "counter": Counter(a=seed),
        "deque": deque([seed], maxlen=5),
        "ordered": OrderedDict(b=seed, a=[seed]),
        "default": defaultdict(list, {"a": [seed]}),
        "nested": {"deep": {"deeper": [torch.tensor([seed])]}},
        "tensor": torch.full((300, 400), float(seed)),
        "view": shared[10:20],
        "shared": shared,
        "small": torch.tensor(seed),
    }

    def change():
        extra["list"].append(0)
        extra["list"][1][0] = -1
        extra["set"].add("more")
        extra["counter"]["a"] += 1
        extra["deque"].append(7)
        extra["ordered"]["a"].append(7)
        extra["default"]["b"].append(7)
        extra["nested"]["deep"]["deeper"].append(7)
        extra["nested"]["deep"]["deeper"][0] += 1
        for name in ("tensor", "shared", "small"):
            extra[name] += 1
        extra["tensor"].t_()
        extra["new"] = 1

    training = adamw(seed)
    training.extra, training.also, training.plain = extra, change, True
    return training


@pytest.fixture
def arrays(tmp_path):
    def make(seed):
        mapped = np.memmap(tmp_path / f"map-{seed}", np.float32, "w+", shape=(300, 100))
        mapped[:] = seed
        base = np.full((50, 60), seed, np.float64)
        readonly = base.view()
        readonly.flags.writeable = False
        extra = {
            "plain": np.arange(60_000, dtype=np.float32).reshape(300, 200) + seed,
            "columns": np.asfortranarray(np.arange(600.0).reshape(20, 30) + seed),
            "strided": np.arange(5000)[::3] + seed,
            "readonly": readonly,
            "mapped": mapped,
            "other_order": np.arange(20_000, dtype=">f8") + seed,
            "none": np.zeros((0, 3), np.int8),
            "scalar": np.array(seed),
            "texts": np.array([f"a{seed}", "b"]),
            "dates": np.array(["2020-01-01"], "datetime64[D]") + seed,
        }

        def change():
            base[:] += 1
            for name in ("plain", "columns", "mapped", "other_order", "scalar", "dates"):
                extra[name][...] += 1
            extra["texts"][0] = "z"
            extra["plain"].shape = (200, 300)
            extra["strided"].dtype = np.float64

        training = adamw(seed)
        training.extra, training.also, training.plain = extra, change, True
        return training

    return make


KINDS = {
    "adamw": adamw,
    "fused": lambda seed: adamw(seed, fused=True),
    "foreach": lambda seed: adamw(seed, foreach=True, amsgrad=True),
    "several": several,
    "groups": groups,
    "tied": tied,
    "buffers": buffers,
    "strange_strides": strange_strides,
    "strange_types": strange_types,
    "average": average,
    "schedule": schedule,
    "values": values,
    "arrays": None,
}


def check_kind(make, folder, *, hold, **options):
    """Save twice: what a checkpointer has seen once, it may treat otherwise."""
    training = make(1)
    training.step(2)
    with held(folder) as (ckpt, gates):
        for name in ("first", "second"):
            expected = training.content()
            with gates.at("save") as gate:
                handle = ckpt.save_async(
                    training.model,
                    training.optimizer,
                    SaveOptions(checkpoint_prefix=name, **options),
                    extra=training.extra,
                )
                if not hold:
                    gate.open()
                training.step(3)
            assert handle.result(SOON_S) == name
            assert differs(training.content(), expected)
            other = make(50)
            if other.plain:
                require_same(holdfast.load(folder / name)["extra"], expected[2])
                other.extra, expected[2] = {}, {}
            require_same(other.load(ckpt, name), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_of_the_moment_of_the_call(kind, tmp_path, request):
    """The training is three steps ahead before the save begins to look at anything."""
    make = KINDS[kind] or request.getfixturevalue("arrays")
    check_kind(make, tmp_path, hold=True)


@pytest.mark.parametrize("kind", ["adamw", "fused", "strange_strides", "average", "values"])
def test_so_it_is_if_training_and_save_run_beside_each_other(kind, tmp_path):
    check_kind(KINDS[kind], tmp_path, hold=False)


@pytest.mark.parametrize("kind", ["fused", "strange_strides", "strange_types", "values", "arrays"])
def test_so_it_is_with_a_copy_of_everything(kind, tmp_path, request):
    make = KINDS[kind] or request.getfixturevalue("arrays")
    check_kind(make, tmp_path, hold=True, snapshot="copy")


def test_it_is_what_a_save_that_is_waited_for_saves(tmp_path):
    """Of the whole tree: names, random number generators and all."""
    training = groups(1)
    training.step(2)
    with held(tmp_path) as (ckpt, gates):
        arguments = training.model, training.optimizer
        options = {"step": 7, "metrics": {"loss": 0.5}, "custom_metadata": {"a": [1]}}
        extra = {"noise": torch.rand(300, 300), "epoch": 3}
        ckpt.save(*arguments, SaveOptions(checkpoint_prefix="a", **options), extra=extra)
        with gates.at("save"):
            ckpt.save_async(*arguments, SaveOptions(checkpoint_prefix="b", **options), extra=extra)
            torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002
            training.step()
        ckpt.wait(SOON_S)
        a, b = (ckpt.catalog.open(name) for name in ("a", "b"))
        assert (b.info.step, b.info.metrics) == (7, {"loss": 0.5})
        assert b.custom == {"a": [1]}
        assert b.tensors == a.tensors
        require_same(holdfast.load(tmp_path / "b"), holdfast.load(tmp_path / "a"))
        assert ckpt.catalog.verify("b").is_intact


def test_random_numbers_go_on_from_the_call(tmp_path):
    def draws():
        return torch.rand(2).tolist(), random.random(), np.random.rand()  # noqa: NPY002

    training = adamw()
    with held(tmp_path) as (ckpt, gates):
        with gates.at("save"):
            handle = ckpt.save_async(training.model)
            expected = draws()
        draws()
        ckpt.load(training.model, None, LoadOptions(checkpoint_prefix=handle.result(SOON_S)))
        assert draws() == expected


def large(seed):
    """Several times the smallest pool, in tensors of more than one unit, and of less."""
    torch.manual_seed(seed)
    model = nn.ParameterList(torch.rand(n) for n in (SLOT_BYTES // 4 + 1025, 15_000, MIB))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return Training(model=model, optimizer=optimizer, extra={"noise": torch.rand(512, 1024)})


def half_frozen(seed):
    training = large(seed)
    training.model.append(nn.Parameter(torch.rand(MIB), requires_grad=False))
    return training


FORMATS = [
    {},
    {"format": "single_file"},
    {"format": "consolidated"},
    {"compression_level": "fast", "incremental": True},
    {"compression_level": "balanced", "format": "single_file"},
]


@pytest.mark.parametrize("options", FORMATS, ids=lambda options: "-".join(map(str, options)))
def test_through_a_pool_that_is_too_small(options, tmp_path):
    """A step waits until enough of the state is written, and then goes on."""
    training = half_frozen(1)
    training.step()
    with held(tmp_path, staging_bytes=LEAST_BYTES) as (ckpt, gates):
        for name in ("first", "second"):
            expected = training.content()
            stepping = threading.Thread(target=training.step)
            with gates.at("write_at shard") as gate:
                start(ckpt, training, name, options)
                gate.wait()
                stepping.start()
                stepping.join(0.05)
                # What is compressed was read already, and need not be kept any more.
                assert stepping.is_alive() or "compression_level" in options
            stepping.join(SOON_S)
            training.step()
            ckpt.wait(SOON_S)
            assert differs(training.content(), expected)
            require_same(half_frozen(50).load(ckpt, name), expected)
            assert ckpt.catalog.verify(name).is_intact
        assert ckpt._saves._snapshots.size_bytes <= LEAST_BYTES


def test_a_copy_of_everything_through_a_pool_that_is_too_small(tmp_path):
    """The call itself waits, until no more is to be written than the pool holds."""
    training = large(1)
    training.step()
    expected = training.content()
    with held(tmp_path, staging_bytes=LEAST_BYTES) as (ckpt, gates):
        arguments = (ckpt, training, "a", {"snapshot": "copy"})
        calling = threading.Thread(target=start, args=arguments)
        with gates.at("write_at shard") as gate:
            calling.start()
            gate.wait()
            calling.join(0.05)
            assert calling.is_alive()
        calling.join(SOON_S)
        for tensor in training.model.parameters():
            tensor.data.zero_()
        ckpt.wait(SOON_S)
        require_same(large(50).load(ckpt, "a"), expected)


def start(ckpt, training, name, options):
    ckpt.save_async(
        training.model,
        training.optimizer,
        SaveOptions(checkpoint_prefix=name, **options),
        extra=training.extra,
    )


def test_steps_that_overtake_a_slow_storage(tmp_path):
    slow = [Fault("write_at", nth, delay_s=0.002) for nth in range(1, 600)]
    records = []
    training = large(1)
    training.step()
    with held(
        tmp_path,
        around=lambda storage: FaultyStorage(storage, slow),
        staging_bytes=2 * LEAST_BYTES,
        on_save=records.append,
    ) as (ckpt, gates):
        for name in ("first", "second"):
            expected = training.content()
            stepping = threading.Thread(target=training.step)
            with gates.at("save"):
                start(ckpt, training, name, {})
                stepping.start()
                while ckpt._saves._snapshots._pool.room_bytes():
                    time.sleep(0.001)
            stepping.join(SOON_S)
            training.step(3)
            ckpt.wait(SOON_S)
            require_same(large(50).load(ckpt, name), expected)
    first, second = records
    assert 0 < first.stall_s <= first.total_s
    # By the second save it is known how fast the storage is, and memory: as the first found them.
    assert first.predicted_stall_s is None
    assert 0 < second.predicted_stall_s <= first.stall_s + first.total_s


def test_a_file_that_has_to_be_written_again(tmp_path):
    """What was written of it is still there, as long as the pool has room for all."""
    fault = Fault("finish", 1, TransientStorageError("on purpose"))
    training = large(1)
    training.step()
    with held(tmp_path, around=lambda storage: FaultyStorage(storage, [fault])) as (ckpt, gates):
        expected = training.content()
        with gates.at("save"):
            start(ckpt, training, "a", {})
            training.step()
        ckpt.wait(SOON_S)
        require_same(large(50).load(ckpt, "a"), expected)


def test_frozen_weights_are_not_copied_again(tmp_path):
    """They are larger than the pool, so a copy could not end before something was written."""
    model = net()
    model.register_parameter(
        "base", nn.Parameter(torch.rand(LEAST_BYTES // 4 + 5), requires_grad=False)
    )
    optimizer = torch.optim.SGD([*model.parameters()][1:], lr=0.1)
    training = Training(model=model, optimizer=optimizer)
    with held(tmp_path, staging_bytes=LEAST_BYTES) as (ckpt, gates):

        def save(name):
            return ckpt.save_async(model, optimizer, SaveOptions(checkpoint_prefix=name))

        caller = threading.Thread(target=save, args=("first",))
        with gates.at("write_at shard") as gate:
            caller.start()
            gate.wait()
            caller.join(0.05)
            assert caller.is_alive()  # it copies, and has to wait for room
        caller.join(SOON_S)
        ckpt.wait(SOON_S)
        training.step()
        expected = training.content()
        with gates.at("write_at shard") as gate:
            handle = save("second")
            gate.wait()
            training.step()
        handle.result(SOON_S)
        require_same(holdfast.load(tmp_path / "second")["model"], expected[0])

        with torch.no_grad():
            model.base[3] += 1
        expected = training.content()
        save("third").result(SOON_S)
        require_same(holdfast.load(tmp_path / "third")["model"], expected[0])


def test_what_was_frozen_is_saved_right_when_another_optimizer_takes_it_up(tmp_path):
    """One that the save was not given, while the save is under way."""
    model, thaw = net(), net(2).requires_grad_(False)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.AdamW(thaw.parameters(), fused=True)
    training = Training(model=model, optimizer=own)
    with held(tmp_path) as (ckpt, gates):
        for name in ("first", "second"):
            expected = thaw.state_dict()
            expected = {key: value.clone() for key, value in expected.items()}
            with gates.at("write_at shard") as gate:
                options = SaveOptions(checkpoint_prefix=name)
                handle = ckpt.save_async(model, own, options, extra={"thaw": thaw})
                gate.wait()
                training.step()
                if name == "second":
                    Training(model=thaw, optimizer=other).step()
            handle.result(SOON_S)
            require_same(holdfast.load(tmp_path / name)["extra"]["thaw"], expected)


@pytest.mark.parametrize("given", [True, False])
def test_two_saves_of_one_step(given, tmp_path):
    """As of the last and the best. That nothing changed since the first of them says nothing."""
    training = average(1)
    training.extra["ema"].requires_grad_(False)
    optimizer = training.optimizer if given else None
    with held(tmp_path) as (ckpt, gates):
        training.step()
        expected = training.content()
        for name in ("last", "best"):
            gate = gates.at("save")
            options = SaveOptions(checkpoint_prefix=name)
            handle = ckpt.save_async(training.model, optimizer, options, extra=training.extra)
            if name == "best":
                training.step()
            gate.open()
            handle.result(SOON_S)
            found = holdfast.load(tmp_path / name)
            require_same(found["model"], expected[0])
            require_same(found["extra"]["ema"], expected[2]["ema"])


def test_only_what_changed_is_written(tmp_path):
    records = []
    training = half_frozen(1)
    with held(tmp_path, on_save=records.append) as (ckpt, gates):
        options = {"incremental": True, "include_rng_state": False}
        for number in range(3):
            training.step()
            with gates.at("save"):
                start(ckpt, training, f"step_{number}", options)
                expected = training.content()
                training.step()
            ckpt.wait(SOON_S)
        require_same(half_frozen(50).load(ckpt, "step_2"), expected)
    frozen, noise = 4 * MIB, 2 * MIB
    assert [record.referred_bytes for record in records] == [0, frozen + noise, frozen + noise]


def test_without_an_optimizer_or_a_torch_at_all(tmp_path):
    tree = {"weight": np.arange(100_000.0), "name": ["a"]}
    with DistributedCheckpoint(storage=tmp_path) as ckpt:
        handle = ckpt.save_async(tree)
        tree["weight"] += 1
        tree["name"].append("b")
        found = holdfast.load(tmp_path / handle.result(SOON_S))["model"]
    require_same(found, {"weight": np.arange(100_000.0), "name": ["a"]})


def test_without_anything(tmp_path):
    with DistributedCheckpoint(storage=tmp_path) as ckpt:
        prefix = ckpt.save_async({}).result(SOON_S)
        assert holdfast.load(tmp_path / prefix)["model"] == {}
