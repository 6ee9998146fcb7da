"""Plans by the other solver and with another tier, from the budget to the gradients."""

import copy
import sys

import pytest
import torch
from activation_models import differing, seed_all
from plan_models import KINDS, Gpt, calm, peak_of, step_left
from torch import nn

import holdfast
from holdfast.errors import BudgetError

calm = pytest.fixture(scope="module", autouse=True)(calm)


def assert_exact(made, model, batch):
    expected = step_left(copy.deepcopy(model), batch)
    with made.applied(model) as following:
        assert differing(expected, step_left(model, batch)) == []
    assert following.fallbacks == ()


# ---- HiGHS -------------------------------------------------------------------------------------


def unet():
    """Its batch with it; larger than elsewhere, for the least budget is a mebibyte."""
    seed_all(3)
    return KINDS["unet"].make(), KINDS["unet"].batch(4)


@pytest.mark.parametrize("budget", ["85%", "70%"])
def test_a_net_with_skips_fits_by_highs(budget):
    model, batch = unet()
    made = holdfast.plan(model, batch, budget, stages=["down*", "up*"], solver="highs")
    assert {row.choice for row in made.summary.rows} - {"keep"}
    assert made.peak_bytes <= made.budget_bytes
    assert_exact(made, model, batch)
    with made.applied(model):
        assert peak_of(model, batch) <= 1.05 * made.budget_bytes
    assert "no other budget was looked at" in made.report()


def test_the_smallest_budget_is_the_one_that_highs_can_meet():
    """It makes no segments: what the chain's solver reaches with them is beyond it."""
    seed_all(3)
    model, batch = Gpt(depth=10), KINDS["gpt"].batch(4)
    smallest = {}
    for solver in ("chain", "highs"):
        with pytest.raises(BudgetError) as refused:
            holdfast.plan(model, batch, 2**20, solver=solver)
        smallest[solver] = refused.value.smallest_bytes
    assert smallest["highs"] > 1.1 * smallest["chain"]
    made = holdfast.plan(model, batch, smallest["highs"], solver="highs")
    assert made.peak_bytes <= smallest["highs"]
    assert not any(row.choice.startswith("segment") for row in made.summary.rows)
    assert made.summary.smallest_bytes <= smallest["highs"]
    assert_exact(made, model, batch)


def test_without_scipy_no_step_is_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)  # as where it is not installed
    ran = []
    model, batch = unet()
    model.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(ImportError, match=r'pip install "holdfast\[solver\]"'):
        holdfast.plan(model, batch, "70%", stages=["down*", "up*"], solver="highs")
    assert ran == []


# ---- a tier ------------------------------------------------------------------------------------


class Dear(nn.Module):
    """Saves little and then works for nothing, for so long that anything is faster than that."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        x = x + self.down(torch.tanh(self.up(x)))
        with torch.no_grad():
            mixed = torch.eye(256)
            for _ in range(80):
                mixed = torch.tanh(mixed @ mixed)
        return x * mixed[0, 0].clamp(0.5, 1.0)


class DearNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(Dear(64) for _ in range(4))

    def forward(self, x):
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_stages_that_are_dear_to_run_again_are_moved_to_the_disk(tmp_path):
    seed_all(3)
    model, batch = DearNet(), torch.randn(1500, 64)
    folder = tmp_path / "scratch"
    folder.mkdir()
    for _ in range(3):  # a pause in the one step that moves, or of the disk, makes moving dear, too
        made = holdfast.plan(model, batch, "55%", tier="disk", folder=folder)
        choices = {row.choice for row in made.summary.rows}
        if "moved" in choices:
            break
    assert "moved" in choices
    assert made.peak_bytes <= made.budget_bytes
    assert made.decision.tier.folder == str(folder)
    again = holdfast.ActivationPlan.from_json(made.to_json())
    for each in (made, again):
        assert_exact(each, model, batch)
        model.zero_grad()
    assert list(folder.iterdir()) == []  # a scratch file has no name
