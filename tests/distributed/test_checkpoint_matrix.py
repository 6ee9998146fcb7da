"""Saved in any parallelism, loaded in any other, bit for bit.

A normal run saves every kind in every format, and loads every kind as every kind and on every
number of ranks as saved by every number of ranks, with the other choices dealt out in turn. In the
test marked ``proof``, everything that can be saved is loaded everywhere by every strategy.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from checkpoint_jobs import KINDS, Net, checkpointer, load_job, new_net, parallel, save_job, whole
from torch import nn

from holdfast.distributed import LoadOptions, SaveOptions
from holdfast.testing import RankGang

PLACES = [(kind, world) for kind, worlds in KINDS.items() for world in worlds]
WRITTEN = [
    *itertools.product(["single_file", "multi_shard"], ["none", "fast", "balanced", "maximum"]),
    ("consolidated", "none"),
]
READ = [
    {"resharding_strategy": strategy, "stepped": stepped, "in_place": in_place}
    for strategy in ("parallel", "broadcast", "simple")
    for stepped in (False, True)
    for in_place in (False, True)
]


class Ranks:
    """A gang of every size that is asked for, and what they have saved so far."""

    def __init__(self, folder):
        self.folder = folder
        self.gangs = {}
        self.saved = {}

    def gang(self, world):
        if world not in self.gangs:
            self.gangs[world] = RankGang(world)
        return self.gangs[world]

    def save(self, kind, world, written):
        """The prefix of such a checkpoint, which is saved once."""
        key = (kind, world, *written)
        if key not in self.saved:
            prefix = "-".join(map(str, key))
            form, level = written
            options = {"format": form, "compression_level": level}
            told = self.gang(world).run(save_job, self.folder, kind, prefix, **options)
            assert told == [prefix] * world
            self.saved[key] = prefix
        return self.saved[key]

    def load(self, kind, world, prefix, options):
        return self.gang(world).run(load_job, self.folder, kind, prefix, **options)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    made = Ranks(str(tmp_path_factory.mktemp("checkpoints")))
    yield made
    for gang in made.gangs.values():
        gang.close()


def _world(kind, turn):
    worlds = KINDS[kind]
    return worlds[turn % len(worlds)]


def _saves():
    """Every kind in every format, each with the next level of compression."""
    for row, kind in enumerate(KINDS):
        for column, form in enumerate(("single_file", "multi_shard", "consolidated")):
            levels = [level for each, level in WRITTEN if each == form]
            yield kind, _world(kind, row + column), (form, levels[(row + column) % len(levels)])


def _directions():
    """Every kind to every kind, then every number of ranks to every number."""
    saves = [*_saves()]
    turn = itertools.count()
    for kind, other in itertools.product(KINDS, KINDS):
        n = next(turn)
        mine = [each for each in saves if each[0] == kind]
        yield mine[n % len(mine)], (other, _world(other, n // 2)), READ[n % len(READ)]
    for world, other in itertools.product(range(1, 5), range(1, 5)):
        n = next(turn)
        kinds = ("fsdp", "ddp") if (world + other) % 2 else ("fsdp", "fsdp")
        saved = (kinds[0], world, ("multi_shard", "none"))
        yield saved, (kinds[1], other), READ[n * 5 % len(READ)]


def _shown(value):
    if isinstance(value, tuple):
        return "-".join(map(_shown, value))
    if not isinstance(value, dict):
        return str(value)
    flags = [name for name in ("stepped", "in_place") if value[name]]
    return "-".join([value["resharding_strategy"], *flags])


@pytest.mark.parametrize(("kind", "world", "written"), [*_saves()], ids=_shown)
def test_every_kind_is_saved_in_every_format(ranks, kind, world, written):
    prefix = ranks.save(kind, world, written)
    assert ranks.load(kind, world, prefix, {}) == [False] * world


@pytest.mark.parametrize(("saved", "loaded", "read"), [*_directions()], ids=_shown)
def test_every_kind_is_loaded_as_every_kind(ranks, saved, loaded, read):
    prefix = ranks.save(*saved)
    resharded = ranks.load(*loaded, prefix, read)
    assert resharded == [saved[1] != loaded[1]] * loaded[1]


@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize("written", WRITTEN, ids=_shown)
@pytest.mark.parametrize(("kind", "world"), PLACES)
def test_everything_is_loaded_everywhere(ranks, kind, world, written):
    prefix = ranks.save(kind, world, written)
    first = PLACES.index((kind, world)) + WRITTEN.index(written)
    for turn, (other, other_world) in enumerate(PLACES):
        # Every strategy, each stepped or not and in place or not; over all tests, all of these.
        for read in READ[(first + turn) % 4 :: 4]:
            try:
                ranks.load(other, other_world, prefix, read)
            except BaseException as error:
                error.add_note(f"loaded as {other} on {other_world} ranks, {_shown(read)}")
                raise


# ------------------------------------------------------------ states over several ranks


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(5, 5)
        self.down = nn.Linear(5, 5, bias=False)
        self.down.weight = self.up.weight
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x):
        return self.down(self.up(x)) * self.scale[0]


def load_meta(rank, folder, kind):
    """Into a model that has no memory yet; then it must work as one made with values."""
    world = dist.get_world_size()
    torch.manual_seed(3)
    expected = Tied()
    saved = Tied()
    saved.load_state_dict(expected.state_dict())
    with checkpointer(folder) as ckpt:
        ckpt.save(parallel(saved, kind, world), None, SaveOptions(checkpoint_prefix=kind))
        with torch.device("meta"):
            net = Tied()
        net = parallel(net, kind, world) if kind != "ddp" else net
        ckpt.load(net, None, LoadOptions(checkpoint_prefix=kind))
    out = net(torch.ones(1, 5))
    out.sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    return (
        torch.equal(out, expected(torch.ones(1, 5))),
        net.up.weight is net.down.weight,
        len([*net.parameters()]),
    )


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_sharded_model_on_the_meta_device(ranks, kind):
    assert ranks.gang(2).run(load_meta, ranks.folder, kind) == [(True, True, 2)] * 2


def names_of(rank, folder, kind):
    with checkpointer(folder) as ckpt:
        net = parallel(new_net(1), kind, dist.get_world_size())
        ckpt.save(net, None, SaveOptions(checkpoint_prefix=f"names-{kind}"))
        return sorted(ckpt.catalog.open(f"names-{kind}").tensors)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp"])
def test_names_are_the_same_in_every_kind(ranks, kind):
    tied = {"head.weight"}
    expected = [f"model.{name}" for name in Net().state_dict() if name not in tied]
    expected += [f"rng.@{rank}.{part}" for rank in (0, 1) for part in ("python.state", "torch")]
    for names in ranks.gang(2).run(names_of, ranks.folder, kind):
        assert {*expected} <= {*names}
        assert {name for name in names if name.startswith("model")} == {
            name for name in expected if name.startswith("model")
        }


def few_rows(rank, folder, kind, load):
    """A model of which most ranks have nothing."""
    world = dist.get_world_size()
    torch.manual_seed(1)
    few = nn.ParameterDict({"one": nn.Parameter(torch.rand(1, 3)), "none": torch.rand(0, 3)})
    expected = {name: value.detach().clone() for name, value in few.items()}
    net = parallel(few, kind, world)
    with checkpointer(folder) as ckpt:
        if not load:
            ckpt.save(net, None, SaveOptions(checkpoint_prefix="few"))
        else:
            with torch.no_grad():
                few["one"].zero_()
            ckpt.load(net, None, LoadOptions(checkpoint_prefix="few", load_rng_state=False))
    return all(torch.equal(whole(few[name]), value) for name, value in expected.items())


def test_ranks_that_have_nothing(ranks):
    assert all(ranks.gang(4).run(few_rows, ranks.folder, "fsdp", load=False))
    for world, kind in ((4, "fsdp"), (1, "single"), (3, "fsdp"), (2, "ddp")):
        assert all(ranks.gang(world).run(few_rows, ranks.folder, kind, load=True))
