"""Plans under autocast: the casts are part of what is kept, dropped and replayed."""

import contextlib

import pytest
import torch
from activation_models import GptBlock, seed_all
from torch import nn
from torch.nn import functional

import holdfast
from holdfast.activation import measure_peak

WIDTH, TOKENS = 32, 61


@pytest.fixture(autouse=True)
def plain_kernels():
    """oneDNN's kernels for bfloat16 die of SIGILL on some machines."""
    threads = torch.get_num_threads()
    torch._C._set_mkldnn_enabled(False)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._C._set_mkldnn_enabled(True)


class Decoder(nn.Module):
    """``inside``: the dtype of its own autocast, entered for the blocks, left for the head."""

    def __init__(self, inside=None):
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(GptBlock(WIDTH, 4, 0.1) for _ in range(4))
        self.head = nn.Linear(WIDTH, TOKENS)
        self.inside = inside

    def forward(self, tokens):
        x = self.tokens(tokens)
        with under(self.inside):
            for block in self.blocks:
                x = block(x)
        return functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


def under(dtype, **words):
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype, **words)


def new(inside=None):
    seed_all(3)
    return Decoder(inside), torch.randint(0, TOKENS, (6, 24))


def step(model, tokens, around=contextlib.nullcontext, scale=1.0):
    """As loops are written: autocast is left before backward."""
    with around():
        loss = model(tokens)
    (loss * scale).backward()
    return loss.detach()


def told(model, tokens, around=contextlib.nullcontext, scale=1.0):
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    seed_all(8)
    loss = step(model, tokens, around, scale)
    gradients = {name: each.grad.clone() for name, each in model.named_parameters()}
    return {"loss": loss, "stream": torch.get_rng_state(), **gradients}


def differing(one, other):
    return [name for name in one if not torch.equal(one[name], other[name])]


def kinds_of(plan):
    return {each.kind for each in plan.decision.actions().stages.values()}


@pytest.mark.parametrize(
    ("dtype", "budget", "scale"),
    [
        (torch.bfloat16, "75%", 1.0),
        (torch.bfloat16, "60%", 65536.0),
        (torch.bfloat16, "45%", 1.0),
        (torch.float16, "60%", 1024.0),
    ],
)
def test_autocast_around_the_model(dtype, budget, scale):
    model, tokens = new()

    def around():
        return under(dtype)

    expected = told(model, tokens, around, scale)
    with around():
        plan = holdfast.plan(model, tokens, budget)
    with plan.applied(model) as applied:
        assert differing(expected, told(model, tokens, around, scale)) == []
        taken = measure_peak(step, model, tokens, around).peak_bytes
    assert differing(expected, told(model, tokens, around, scale)) == []
    assert applied.fallbacks == ()
    assert taken <= plan.budget_bytes * 1.05
    assert kinds_of(plan) - {"keep"}


@pytest.mark.parametrize("budget", ["75%", "60%", "45%"])
def test_autocast_inside_of_the_model(budget):
    model, tokens = new(torch.bfloat16)
    expected = told(model, tokens)
    plan = holdfast.plan(model, tokens, budget)
    with plan.applied(model) as applied:
        assert differing(expected, told(model, tokens)) == []
        assert measure_peak(step, model, tokens).peak_bytes <= plan.budget_bytes * 1.05
    assert applied.fallbacks == ()
    assert min(len(stage.recipes.made) for stage in plan.decision.stages) >= 5


@pytest.mark.parametrize("budget", ["60%", "45%"])
def test_without_the_cache_of_casts(budget):
    model, tokens = new()

    def around():
        return under(torch.bfloat16, cache_enabled=False)

    expected = told(model, tokens, around)
    with around():
        plan = holdfast.plan(model, tokens, budget)
    with plan.applied(model) as applied:
        assert differing(expected, told(model, tokens, around)) == []
        assert measure_peak(step, model, tokens, around).peak_bytes <= plan.budget_bytes * 1.05
    assert applied.fallbacks == ()


@pytest.mark.parametrize("budget", ["60%", "45%"])
@pytest.mark.parametrize("planned_under", [None, torch.bfloat16])
def test_planned_for_another_precision_the_gradients_are_right(planned_under, budget):
    """The graph is another, with casts or without: stages keep everything or only their inputs."""
    model, tokens = new()
    trained_under = torch.bfloat16 if planned_under is None else None

    def around():
        return under(trained_under)

    expected = told(model, tokens, around)
    with under(planned_under):
        plan = holdfast.plan(model, tokens, budget)
    with plan.applied(model) as applied:
        assert differing(expected, told(model, tokens, around)) == []
    if "recipes" in kinds_of(plan):
        assert any("not the one that was planned" in each.reason for each in applied.fallbacks)


def test_training_with_scaled_losses():
    def trained(budget):
        model, tokens = new()
        seed_all(8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**20
        )  # overflows: some steps are skipped
        applied = contextlib.nullcontext()
        if budget:
            with under(torch.float16):
                plan = holdfast.plan(model, tokens, budget)
            applied = plan.applied(model)
        with applied:
            for _ in range(12):
                optimizer.zero_grad()
                with under(torch.float16):
                    loss = model(tokens)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        assert scaler.get_scale() < 2.0**20
        assert optimizer.state
        return {"scale": torch.tensor(scaler.get_scale()), **model.state_dict()}

    expected = trained(None)
    assert differing(expected, trained("60%")) == []
    assert differing(expected, trained("45%")) == []
