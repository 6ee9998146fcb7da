"""A plan meets batches that are not like its sample: other sizes, other graphs. The gradients stay
right to the bit, the budget is met as far as it can be, and what was not followed is told."""

import copy
import gc
import logging
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from activation_models import differing, seed_all
from plan_models import KINDS, Gpt, calm, loss_of, peak_of, step_left
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import holdfast
from holdfast.activation import measure_peak

calm = pytest.fixture(scope="module", autouse=True)(calm)


def made():
    seed_all(3)
    return Gpt(depth=6)


def tokens(count, length=64):
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return torch.randint(0, 97, (count, length))


@pytest.fixture(scope="module")
def plan():
    return holdfast.plan(made(), tokens(8), "50%")


@pytest.fixture(scope="module")
def generous():
    """For a sample that fits as it is."""
    return holdfast.plan(made(), tokens(4), round(peak_of(made(), tokens(4)) * 1.05))


def choices(following):
    """What was decided for the forward that came last."""
    return [each.action.kind for each in following._now.decided.stages]


@pytest.mark.parametrize(
    "shape", [(8, 64), (1, 64), (3, 64), (7, 64), (9, 64), (12, 64), (8, 17), (8, 80), (2, 200)]
)
def test_batches_of_any_size_are_bit_equal(plan, shape):
    batch = tokens(*shape)
    expected = step_left(made(), batch)
    model = made()
    with plan.applied(model):
        assert differing(expected, step_left(model, batch)) == []


@pytest.mark.parametrize("count", [2, 6, 8, 10, 12])
def test_other_sizes_stay_within_the_budget_while_one_plan_can(plan, count):
    model = made()
    with plan.applied(model) as following:
        peak = peak_of(model, tokens(count))
    assert following.fallbacks == ()
    assert peak <= plan.budget_bytes * 1.05


def test_smaller_batches_recompute_less_and_larger_ones_more(plan):
    model = made()
    with plan.applied(model) as following:
        seen = []
        for count in (2, 8, 14):
            for _ in range(2):
                loss_of(model, tokens(count)).backward()
            seen.append(choices(following))
    assert seen[0] == ["keep"] * 6
    assert seen[1] != seen[0]
    replayed = [sum(each in {"input", "segment"} for each in kinds) for kinds in seen]
    assert replayed[0] <= replayed[1] < replayed[2]


def test_sequences_that_grow_are_bit_equal_step_by_step(plan):
    def told(following):
        model = made()
        seed_all(11)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        with following(model):
            for length in range(16, 97, 16):
                optimizer.zero_grad()
                loss = loss_of(model, tokens(8, length))
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return {"losses": losses, **dict(model.named_parameters())}

    class Nothing:
        def __init__(self, model):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    assert differing(told(Nothing), told(plan.applied)) == []


def test_a_batch_too_large_is_kept_as_small_as_can_be_and_told_once(plan, caplog):
    model = made()
    with plan.applied(model) as following:
        peaks = [peak_of(model, tokens(32)) for _ in range(2)]
        first, later = following.fallbacks
    assert first.stage == later.stage == "blocks.0"
    assert "this step may exceed the budget" in first.reason
    assert "times the sample's size" in later.reason
    assert "the budget may be short by" in later.reason
    assert [each.levelno for each in caplog.records] == [logging.WARNING] * 2
    assert first.reason in caplog.text
    assert later.reason in caplog.text
    smallest = plan.summary.smallest_bytes * 4
    assert max(peaks) <= smallest * 1.05
    expected = step_left(made(), tokens(32))
    other = made()
    with plan.applied(other):
        assert differing(expected, step_left(other, tokens(32))) == []


def test_a_plan_that_keeps_everything_is_there_for_larger_batches(generous):
    model = made()
    assert {row.choice for row in generous.summary.rows} == {"keep"}
    plain = peak_of(made(), tokens(8))
    with generous.applied(model) as following:
        assert peak_of(model, tokens(4)) <= generous.budget_bytes
        assert choices(following) == ["keep"] * 6
        assert peak_of(model, tokens(8)) <= generous.budget_bytes * 1.05 < plain
    assert following.fallbacks == ()


def test_images_go_into_the_first_stage_and_need_no_gradients():
    kind = KINDS["unet"]
    seed_all(3)
    model = kind.make()
    made = kind.plan(model, "85%")
    with made.applied(model) as following:
        assert peak_of(model, kind.batch(2)) <= made.budget_bytes
        peak_of(model, kind.batch(9))
    assert any("times the sample's size" in each.reason for each in following.fallbacks)


class Branching(nn.Module):
    """Goes another way when its input is large."""

    def __init__(self, width=64):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        y = self.up(self.norm(x))
        y = functional.gelu(y) if x.abs().max() < 100 else torch.tanh(functional.silu(y)) * y
        return x + self.down(y)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(Branching() for _ in range(6))

    def forward(self, x):
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.fixture(scope="module")
def branching():
    seed_all(3)
    model = Branches()
    return model, holdfast.plan(model, torch.randn(16, 64, 64), "65%")


def test_a_graph_that_is_not_the_one_planned_falls_back(branching, caplog):
    model, made = branching
    assert "recipes" in {row.choice for row in made.summary.rows}
    seed_all(5)
    batch = torch.randn(16, 64, 64) * 1000
    expected = step_left(copy.deepcopy(model), batch)
    other = copy.deepcopy(model)
    with made.applied(other) as following:
        assert differing(expected, step_left(other, batch)) == []
        first = following.fallbacks
        assert any("its graph is not the one that was planned" in each.reason for each in first)
        told = len(caplog.records)
        assert told == len(first)
        other.zero_grad()
        step_left(other, batch)
        assert following.fallbacks == first
        assert len(caplog.records) == told


def test_what_a_stage_kept_too_much_the_stages_after_it_make_up_for(branching):
    model, made = branching
    seed_all(5)
    batch = torch.randn(16, 64, 64) * 1000
    plain = peak_of(copy.deepcopy(model), batch)
    other = copy.deepcopy(model)
    with made.applied(other) as following:
        peak = peak_of(other, batch)
    assert any("to make up for" in each.reason for each in following.fallbacks)
    assert peak < plain


def test_after_an_odd_batch_the_plan_is_followed_as_before(branching):
    model, made = branching
    seed_all(5)
    usual = torch.randn(16, 64, 64)
    expected = step_left(copy.deepcopy(model), usual)
    other = copy.deepcopy(model)
    with made.applied(other):
        step_left(other, usual * 1000)
        other.zero_grad()
        assert differing(expected, step_left(other, usual)) == []
        assert peak_of(other, usual) <= made.budget_bytes * 1.05


def test_other_hooks_on_saved_tensors_keep_recipes_away(plan):
    batch = tokens(8)
    expected = step_left(made(), batch)
    model = made()
    seed_all(11)
    with plan.applied(model) as following, torch.autograd.graph.save_on_cpu():
        loss = model(batch)
    loss.backward()
    assert all(
        torch.equal(expected[f"gradient of {name}"], each.grad)
        for name, each in model.named_parameters()
    )
    assert following.fallbacks != ()


def test_autocast_around_a_model_that_was_planned_without(plan):
    """Other operations, other sizes: whatever of the plan does not fit, the gradients do."""
    torch._C._set_mkldnn_enabled(False)  # its bfloat16 kernels kill the process on some machines
    try:
        batch = tokens(4)

        def told(model):
            seed_all(11)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(batch)
            loss.backward()
            return {name: each.grad for name, each in model.named_parameters()} | {"loss": loss}

        expected = told(made())
        model = made()
        with plan.applied(model):
            assert differing(expected, told(model)) == []
    finally:
        torch._C._set_mkldnn_enabled(True)


def test_a_model_planned_under_autocast():
    torch._C._set_mkldnn_enabled(False)
    try:

        class Cast(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = Gpt(depth=4)

            def forward(self, batch):
                with torch.autocast("cpu", torch.bfloat16):
                    return self.inner(batch)

        seed_all(3)
        model, batch = Cast(), tokens(8)
        expected = step_left(copy.deepcopy(model), batch)
        made = holdfast.plan(model, batch, "50%")
        with made.applied(model) as following:
            assert differing(expected, step_left(model, batch)) == []
            assert peak_of(model, batch) <= made.budget_bytes * 1.05
        assert following.fallbacks == ()
    finally:
        torch._C._set_mkldnn_enabled(True)


def test_the_smallest_batches_are_bit_equal(plan):
    for shape in ((1, 2), (8, 2)):
        batch = tokens(*shape)
        expected = step_left(made(), batch)
        model = made()
        with plan.applied(model):
            assert differing(expected, step_left(model, batch)) == []


# ---- shapes that are not multiples of the sample's ---------------------------------------------


class Eager(nn.Module):
    """Attention without a fused kernel: its bytes grow with the square of the length."""

    def __init__(self, width, heads=4, dropout=0.1):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        count, length, width = x.shape
        mixed = self.qkv(self.before(x)).view(count, length, 3, self.heads, -1)
        q, k, v = mixed.permute(2, 0, 3, 1, 4)
        scores = torch.softmax(q @ k.transpose(-1, -2) / 4, -1)
        seen = functional.dropout(scores, self.dropout, self.training) @ v
        x = x + self.out(seen.transpose(1, 2).reshape(count, length, width))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class Decoder(nn.Module):
    """Leaves out the blocks that ``skipped`` names, as LayerDrop does, and fails before the one
    that ``failing`` does."""

    def __init__(self, depth=6, width=64, dropout=0.1):
        super().__init__()
        self.tokens = nn.Embedding(97, width)
        self.blocks = nn.ModuleList(Eager(width, dropout=dropout) for _ in range(depth))
        self.head = nn.Linear(width, 97)
        self.skipped, self.failing = (), None

    def forward(self, tokens):
        x = self.tokens(tokens)
        for number, block in enumerate(self.blocks):
            if number == self.failing:
                raise RuntimeError("on purpose")
            x = x if number in self.skipped else block(x)
        scores = self.head(x)
        return functional.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def eager(**words):
    seed_all(3)
    return Decoder(**words)


@pytest.fixture(scope="module")
def attending():
    return holdfast.plan(eager(), tokens(8, 32), "75%")


@pytest.fixture(scope="module")
def tight():
    """So little that stages are run again in segments."""
    smallest = None
    try:
        holdfast.plan(eager(), tokens(8, 32), "5%")
    except holdfast.BudgetError as error:
        smallest = error.smallest_bytes
    return holdfast.plan(eager(), tokens(8, 32), round(smallest * 1.05))


def peaks_of(model, batch, steps=3):
    """Of each step, the first with a new shape among them; gradients are allocated already."""
    found = []
    for _ in range(steps):
        model.zero_grad(set_to_none=False)
        found.append(measure_peak(lambda: loss_of(model, batch).backward()).peak_bytes)
    return found


def allocated(model):
    """The model with its gradients there."""
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    return model


@pytest.mark.parametrize("shape", [(4, 64), (2, 128), (8, 48), (16, 16), (3, 80)])
def test_longer_sequences_of_as_many_numbers_stay_within_the_budget(attending, shape):
    """What their attention saves is seen before anything is decided: even the first step fits."""
    batch = tokens(*shape)
    assert peak_of(eager(), batch) > attending.budget_bytes * 1.1
    expected = step_left(eager(), batch)
    model = allocated(eager())
    with attending.applied(model) as following:
        assert max(peaks_of(model, batch)) <= attending.budget_bytes * 1.05
        model.zero_grad(set_to_none=False)
        assert differing(expected, step_left(model, batch)) == []
    assert following.fallbacks == ()
    assert "keep" in choices(following)


def test_every_step_with_new_shapes_is_bit_equal(attending):
    model, other = eager(), eager()
    with attending.applied(model):
        for shape in [(4, 64), (4, 64), (8, 32), (2, 128), (4, 64), (2, 128), (4, 62), (4, 66)]:
            batch = tokens(*shape)
            expected = step_left(other, batch)
            assert differing(expected, step_left(model, batch)) == []


def test_shapes_that_take_turns_are_decided_for_once(attending):
    model = allocated(eager())
    shapes = [(8, 32), (4, 64), (2, 128), (4, 32)]
    with attending.applied(model) as following:
        for shape in shapes:
            peaks_of(model, tokens(*shape), steps=2)
        decided = []
        for _ in range(2):
            for shape in shapes:
                (peak,) = peaks_of(model, tokens(*shape), steps=1)
                assert peak <= attending.budget_bytes * 1.05
                decided.append(following._now.decided)
        assert all(one is other for one, other in zip(decided[:4], decided[4:], strict=True))
        assert decided[0] is following._forwards.planned
    assert following.fallbacks == ()


def test_a_sequence_a_little_longer_than_one_that_is_known_is_seen_first(attending):
    model = allocated(eager())
    with attending.applied(model) as following:
        for length, known in [(66, False), (71, False), (68, True), (66, True), (72, False)]:
            first, second = peaks_of(model, tokens(4, length), 2)
            assert max(first, second) <= attending.budget_bytes * 1.05
            assert (first > second * 0.8) is known
    assert following.fallbacks == ()


TWO = KINDS["towers"]


def towers(left, right):
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return [torch.randn(5, left, 64), torch.randn(5, right, 64)]


def two_towers():
    seed_all(3)
    return TWO.make()


@pytest.fixture(scope="module")
def in_towers():
    return holdfast.plan(two_towers(), towers(40, 24), "60%")


def test_a_second_tower_that_grows_alone_exceeds_once_and_is_told(in_towers):
    """When it is met, the first tower has kept what the sample's leaves it room for."""
    batch = towers(40, 48)
    model = allocated(two_towers())
    with in_towers.applied(model) as following:
        first, *later = peaks_of(model, batch)
        assert max(later) <= in_towers.budget_bytes * 1.05
        told = following.fallbacks
        assert told or first <= in_towers.budget_bytes
        assert {each.stage for each in told} <= {"right.0"}
        assert all("may exceed the budget" in each.reason for each in told)
        # From now on a forward that begins like this one may go on with the larger tower.
        for shapes in [(40, 24), (40, 48), (40, 30), (40, 48)]:
            assert max(peaks_of(model, towers(*shapes), 1)) <= in_towers.budget_bytes * 1.05
        expected = step_left(two_towers(), batch)
        model.zero_grad(set_to_none=False)
        assert differing(expected, step_left(model, batch)) == []
        assert following.fallbacks == told


def test_a_second_tower_that_shrinks_is_no_fallback(in_towers):
    model = allocated(two_towers())
    with in_towers.applied(model) as following:
        assert max(peaks_of(model, towers(40, 12))) <= in_towers.budget_bytes * 1.05
    assert following.fallbacks == ()


@pytest.mark.parametrize("skipped", [(0,), (0, 1), (2,), (5,), (0, 3, 5)])
def test_layers_that_are_left_out_do_not_matter(attending, skipped):
    model = allocated(eager())
    small, usual = tokens(2, 32), tokens(8, 32)
    with attending.applied(model) as following:
        # What was decided for a small batch must not be done for the next.
        peaks_of(model, small, 2)
        assert choices(following) == ["keep"] * 6
        model.skipped = skipped
        assert max(peaks_of(model, usual, 2)) <= attending.budget_bytes * 1.05
        assert max(peaks_of(model, tokens(4, 64))) <= attending.budget_bytes * 1.05
        peaks_of(model, small, 1)
        model.skipped = ()
        peaks_of(model, small, 1)
        assert choices(following) == ["keep"] * 6
        assert max(peaks_of(model, tokens(4, 64))) <= attending.budget_bytes * 1.05
    # The graph of a stage that is given the embedding's result is another.
    assert not any("the budget" in each.reason for each in following.fallbacks)


def test_layers_left_out_at_random_are_bit_equal(tight):
    model, other = eager(), eager()
    with torch.random.fork_rng():
        torch.manual_seed(6)
        dropped = (torch.rand(12, 6) < 0.3).tolist()
    with tight.applied(model):
        for step, each in enumerate(dropped):
            model.skipped = other.skipped = tuple(n for n, skip in enumerate(each) if skip)
            batch = tokens(*[(8, 32), (4, 64), (3, 20)][step % 3])
            assert differing(step_left(other, batch), step_left(model, batch)) == []


def test_an_evaluation_between_has_no_part_in_it(attending):
    model = allocated(eager())
    with attending.applied(model) as following:
        peaks_of(model, tokens(8, 32), 1)
        decided = following._now.decided
        model.eval()
        model(tokens(8, 100))
        model.train()
        with torch.no_grad():
            model(tokens(8, 100))
        (peak,) = peaks_of(model, tokens(8, 32), 1)
        assert peak <= attending.budget_bytes * 1.05
        assert following._now.decided is decided
    assert following.fallbacks == ()


def test_gradients_accumulate_over_batches_of_many_shapes(attending):
    def accumulated(model):
        seed_all(11)
        for shape in [(8, 32), (4, 64), (2, 40), (4, 64), (2, 128), (8, 32), (2, 40)]:
            (loss_of(model, tokens(*shape)) / 7).backward()
        return {name: each.grad for name, each in model.named_parameters()}

    model = eager()
    with attending.applied(model):
        assert differing(accumulated(eager()), accumulated(model)) == []


@pytest.mark.parametrize("shape", [(8, 32), (4, 64)])
def test_a_forward_that_fails_halfway_leaves_nothing_behind(tight, shape):
    model = allocated(eager())
    batch, seen = tokens(*shape), []

    def note(module, args, output):
        del module, args
        seen.append(weakref.ref(output))

    with tight.applied(model) as following:
        peaks_of(model, batch, 2)
        assert "keep" not in choices(following)[2:4]
        hook = model.tokens.register_forward_hook(note)
        expected = peaks_of(model, batch, 1)
        gc.disable()
        try:
            model.failing = 3
            with pytest.raises(RuntimeError, match="on purpose"):
                model(batch)
            assert seen[-1]() is None
            model.failing = None
        finally:
            gc.enable()
        hook.remove()
        assert peaks_of(model, batch, 1) == expected
        model.zero_grad(set_to_none=False)
        assert differing(step_left(eager(), batch), step_left(model, batch)) == []


def test_threads_each_with_another_shape(tight):
    model = eager(dropout=0.0)
    batches = [tokens(8, 32), tokens(4, 64), tokens(2, 40), tokens(3, 20)]

    def gradients(batch):
        return torch.autograd.grad(model(batch), list(model.parameters()))

    expected = [gradients(batch) for batch in batches]
    together = threading.Barrier(len(batches))

    def steps(batch):
        found = []
        for _ in range(4):
            together.wait()
            found.append(gradients(batch))
        return found

    with tight.applied(model), ThreadPoolExecutor(len(batches)) as pool:
        for plain, found in zip(expected, pool.map(steps, batches), strict=True):
            for each in found:
                assert all(map(torch.equal, plain, each))


def test_lengths_without_end_are_few_sizes(attending):
    with torch.random.fork_rng():
        torch.manual_seed(6)
        lengths = torch.randint(48, 97, (500,)).tolist()
    seed_all(3)
    model = Decoder(depth=3, width=16)
    made = holdfast.plan(model, tokens(1, 96), "70%")
    decided = set()
    with made.applied(model) as following:
        for length in lengths:
            model(tokens(1, length))
            decided.add(id(following._now.decided))
        assert len(following._forwards._known) <= 6
        late = decided.copy()
        for length in lengths[:100]:
            model(tokens(1, length))
            late.add(id(following._now.decided))
    assert late == decided
    assert len(decided) < 30
    assert following.fallbacks == ()


def test_only_so_many_sizes_are_known():
    seed_all(3)
    model = Decoder(depth=2, width=16)
    made = holdfast.plan(model, tokens(4, 16), "80%")
    with made.applied(model) as following:
        for count in range(1, 13):
            for length in range(4, 44, 3):
                model(tokens(count, length))
        forwards = following._forwards
        assert len(forwards._known) == 64
        assert all(len(each) <= 64 for each in forwards._learned)


class Drawing(nn.Module):
    """Draws from a stream of its own, which nobody rewinds: it cannot be run again."""

    def __init__(self, width=64):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.stream = torch.Generator().manual_seed(1)

    def forward(self, x):
        noise = torch.rand(x.shape, generator=self.stream)
        return x + self.down(functional.gelu(self.up(x * noise)))


class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Drawing() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_stages_that_cannot_be_run_again_are_kept_and_told_of():
    seed_all(3)
    model = Draws()
    made = holdfast.plan(model, torch.randn(16, 64), "80%")
    for block in model.blocks:
        block.stream.manual_seed(1)
    batches = [torch.randn(count, 64) for count in (16, 8, 40, 40)]

    def told(net):
        return [torch.autograd.grad(net(batch), list(net.parameters())) for batch in batches]

    expected = told(like(model))
    with made.applied(model) as following:
        for plain, found in zip(expected, told(model), strict=True):
            assert all(map(torch.equal, plain, found))
    assert {each.stage for each in following.fallbacks} == {f"blocks.{n}" for n in range(4)}
    assert any("cannot be run again" in each.reason for each in following.fallbacks)


def like(model):
    other = Draws()
    other.load_state_dict(model.state_dict())
    return other


def test_under_another_checkpoint_shapes_that_are_new_do_the_same_twice(attending):
    """The other runs the stages again in backward, and compares what they save."""

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = eager(dropout=0.0)

        def forward(self, batch):
            return checkpoint(self.inner, batch, use_reentrant=False)

    for shape in [(8, 32), (4, 64), (16, 32)]:
        batch = tokens(*shape)
        plain, model = Around(), Around()
        expected = step_left(plain, batch)
        with attending.applied(model.inner) as following:
            for _ in range(2):
                model.zero_grad()
                assert differing(expected, step_left(model, batch)) == []
        assert any("other hooks" in each.reason for each in following.fallbacks)


class Padded(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x)))


class Rows(nn.Module):
    """Takes rows of one length, or each of its own."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Padded() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return (x.values() if x.is_nested else x).square().mean()


def test_rows_of_their_own_lengths_are_bit_equal():
    seed_all(3)
    model = Rows()
    made = holdfast.plan(model, torch.randn(2, 40, 16), "60%")
    for lengths in [(30, 40), (30, 40), (3, 90), (3, 90), (300, 2)]:
        rows = [torch.randn(length, 16) for length in lengths]
        batch = torch.nested.nested_tensor(rows, layout=torch.jagged)
        model.zero_grad()
        expected = step_left(model, batch)
        model.zero_grad()
        with made.applied(model):
            assert differing(expected, step_left(model, batch)) == []
