"""What others do to a model and its optimizer between steps: nothing of it is lost or undone
without a word, and what cannot be is refused."""

import logging

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.precision import (
    MixedPrecisionOptimizer,
    MixedPrecisionOptions,
    create_checkpoint,
    load_and_restore,
    restore_checkpoint,
    save_checkpoint,
)

BF16 = MixedPrecisionOptions.for_bf16()
FP16 = MixedPrecisionOptions.for_fp16(initial_scale=256.0)
REMAINDER = MixedPrecisionOptions.for_bf16(master_storage="remainder")


@pytest.fixture(autouse=True)
def _no_onednn():
    """Whose 16-bit kernels end the process on some machines."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(before)


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))


def made(options=BF16, seed=0, kind=AdamW, **words):
    model = net(seed)
    words = {"lr": 0.01, **words}
    return model, MixedPrecisionOptimizer(kind(model.parameters(), **words), options, model=model)


def fill(optimizer, step=0):
    """Gradients without a forward: 16-bit products are slow on a CPU."""
    drawn = torch.Generator().manual_seed(step)
    for weight in optimizer.training_weights.values():
        gradient = torch.randn(weight.shape, generator=drawn, dtype=torch.float32)
        gradient *= optimizer.scaler.scale
        weight.grad = gradient.to(weight.grad_dtype)


def stepped(optimizer, steps=1):
    for step in range(steps):
        fill(optimizer, step)
        assert optimizer.step()
        optimizer.zero_grad()


def masters(optimizer):
    return {name: each.detach().clone() for name, each in optimizer.master_weights.items()}


def moved(optimizer, before):
    return {
        name for name, each in masters(optimizer).items() if not torch.equal(each, before[name])
    }


class TestWeightsThatSomebodyWrites:
    @pytest.mark.parametrize("fused", [True, False])
    @pytest.mark.parametrize("options", [BF16, FP16])
    def test_weights_that_are_loaded_are_trained_on_from(self, options, fused):
        """Not undone by the next step, as masters that know nothing of it would."""
        model, optimizer = made(options, fused=fused)
        stepped(optimizer)
        loaded = net(seed=9).state_dict()
        model.load_state_dict(loaded)
        fresh, other = made(options, fused=fused)
        stepped(other)
        for name, weight in fresh.named_parameters():
            other.masters.pairs[[*other.training_weights].index(name)].fill(
                loaded[name].to(weight.dtype).float()
            )
        stepped(optimizer)
        stepped(other)
        for name, master in other.master_weights.items():
            assert torch.equal(optimizer.master_weights[name], master)

    def test_only_what_changed_is_taken(self):
        model, optimizer = made(BF16)
        stepped(optimizer, 2)
        before = masters(optimizer)["0.weight"]
        with torch.no_grad():
            model[0].weight[1, 2] = 3.0
        after = optimizer.master_weights["0.weight"].detach()
        assert after[1, 2] == 3.0
        changed = after != before
        assert changed.nonzero().tolist() == [[1, 2]]

    @pytest.mark.parametrize("options", [BF16, REMAINDER])
    def test_an_average_that_is_swapped_in_and_out_leaves_no_trace(self, options):
        """Not even if it is looked at, or saved, meanwhile."""
        model, optimizer = made(options, fused=True)
        stepped(optimizer, 2)
        before = masters(optimizer)
        kept = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        for value in (0.5, None):
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    weight.copy_(kept[name] if value is None else torch.full_like(weight, value))
            looked_at = optimizer.state_dict()["masters"]["0.weight"]
            saved = create_checkpoint(optimizer).master_weights["0.weight"]
            assert torch.equal(saved, looked_at)
            assert value is None or torch.equal(saved.bfloat16(), model[0].weight)
        assert moved(optimizer, before) == set()

    @pytest.mark.parametrize(
        "write",
        [
            lambda w: w.zero_(),
            lambda w: w.clamp_(min=0),
            lambda w: w.fill_(-0.0),
            lambda w: w.mul_(torch.arange(w.numel()).view_as(w) % 2),
        ],
        ids=["zero", "clamp", "negative zero", "mask"],
    )
    def test_remainders_of_weights_that_become_0(self, write):
        """With the bits of another number under it, a 0 would be no number."""
        model, optimizer = made(REMAINDER, kind=SGD, fused=True, lr=0.0)
        stepped(optimizer, 2)
        with torch.no_grad():
            write(model[0].weight)
        wanted = model[0].weight.detach().clone()
        for _ in range(2):
            master = optimizer.master_weights["0.weight"]
            assert torch.isfinite(master).all()
            assert not master[wanted == 0].any()
            assert torch.equal(model[0].weight, wanted)
            stepped(optimizer)

    def test_a_checkpoint_of_it_is_whole(self):
        model, optimizer = made(FP16)
        stepped(optimizer)
        model.load_state_dict(net(seed=4).state_dict())
        checkpoint = create_checkpoint(optimizer)
        weight = checkpoint.training_weights["0.weight"]
        assert torch.equal(checkpoint.master_weights["0.weight"], weight.float())


class TestMastersThatSomebodyWrites:
    @pytest.mark.parametrize("fused", [True, False])
    @pytest.mark.parametrize("options", [BF16, FP16])
    def test_they_are_trained_on_from_and_reach_the_weights(self, options, fused):
        """Also of a weight that gets no gradient."""
        model, optimizer = made(options, fused=fused)
        stepped(optimizer, 2)
        wanted = masters(optimizer)
        wanted["0.weight"] += 0.001  # of which 16 bits keep little
        wanted["2.bias"] += 0.001
        with torch.no_grad():
            for name in ("0.weight", "2.bias"):
                optimizer.master_weights[name].add_(0.001)
        assert moved(optimizer, wanted) == set()
        fill(optimizer)
        model[2].bias.grad = None
        assert optimizer.step()
        assert torch.equal(optimizer.master_weights["2.bias"], wanted["2.bias"])
        assert not torch.equal(optimizer.master_weights["0.weight"], wanted["0.weight"])
        for name, weight in optimizer.training_weights.items():
            assert torch.equal(weight, optimizer.master_weights[name].to(weight.dtype))

    def test_a_checkpoint_of_it_is_whole(self, tmp_path):
        _, optimizer = made(FP16)
        stepped(optimizer)
        with torch.no_grad():
            optimizer.master_weights["0.weight"].add_(0.5)
        save_checkpoint(create_checkpoint(optimizer), tmp_path / "a")
        _, other = made(FP16, seed=1)
        load_and_restore(other, tmp_path / "a")
        assert moved(other, masters(optimizer)) == set()

    def test_what_was_written_to_the_weight_too_is_the_weight(self):
        _, optimizer = made()
        stepped(optimizer)
        with torch.no_grad():
            optimizer.master_weights["0.weight"].fill_(1 + 2**-20)
            optimizer.training_weights["0.weight"].fill_(1.0).view(-1)[0] = 3.0
        found = optimizer.master_weights["0.weight"].view(-1)
        assert found[0] == 3.0
        assert (found[1:] == 1 + 2**-20).all()


class TestGradientsThatSomebodyLooksAt:
    @pytest.mark.parametrize("options", [FP16, REMAINDER])
    def test_one_may_be_replaced_or_dropped(self, options):
        model, optimizer = made(options, kind=SGD, fused=True)
        fill(optimizer)
        optimizer.unscale_()
        before = masters(optimizer)
        model[0].weight.grad = torch.ones(7, 5)
        model[2].weight.grad = None
        assert optimizer.step()
        step = before["0.weight"] - optimizer.master_weights["0.weight"].detach()
        torch.testing.assert_close(step, torch.full((7, 5), 0.01), rtol=1e-4, atol=0)
        assert "2.weight" not in moved(optimizer, before)
        assert model[0].weight.grad.dtype is model[0].weight.dtype

    def test_a_master_s_may_be_replaced(self):
        _, optimizer = made(FP16, kind=SGD)
        fill(optimizer)
        optimizer.unscale_()
        before = masters(optimizer)
        optimizer.master_weights["0.weight"].grad = torch.ones(7, 5)
        assert optimizer.step()
        step = before["0.weight"] - optimizer.master_weights["0.weight"].detach()
        torch.testing.assert_close(step, torch.full((7, 5), 0.01), rtol=1e-4, atol=0)

    def test_the_next_backward_is_as_ever(self):
        model, optimizer = made(FP16)
        for _ in range(2):
            optimizer.scale_loss(model[0].weight.float().square().sum()).backward()
            assert model[0].weight.grad.dtype is torch.float16
            optimizer.unscale_()
            assert model[0].weight.grad.dtype is torch.float32
            optimizer.zero_grad()

    def test_gradients_after_it_are_refused(self):
        _, optimizer = made(FP16)
        optimizer.unscale_()
        fill(optimizer)
        before = masters(optimizer)
        with pytest.raises(RuntimeError, match=r"'0\.weight' got its gradient after unscale_"):
            optimizer.step()
        assert moved(optimizer, before) == set()

    def test_gradients_of_masters_that_nobody_asked_for_are_refused(self):
        """As torch.distributed.checkpoint sets them, to make an optimizer begin its state."""
        _, optimizer = made(FP16)
        for master in optimizer.param_groups[0]["params"]:
            master.grad = torch.zeros_like(master)
        with pytest.raises(RuntimeError, match="DistributedCheckpoint"):
            optimizer.step()
        assert optimizer.step_count == 0
        optimizer.zero_grad()
        assert optimizer.step()

    def test_after_a_fallback_gradients_are_fp32(self):
        model, optimizer = made(FP16)
        fill(optimizer)
        optimizer.unscale_()
        assert optimizer.step()
        optimizer.set_fallback(fallback=True)
        optimizer.zero_grad()
        model[0].weight.square().sum().backward()
        assert model[0].weight.grad.dtype is torch.float32


class Broken(SGD):
    def step(self, closure=None):
        super().step(closure)
        raise RuntimeError("after the step")


class TestStepsThatFail:
    def test_weights_are_never_other_than_their_masters(self):
        _, optimizer = made(BF16, kind=Broken)
        fill(optimizer)
        before = masters(optimizer)
        with pytest.raises(RuntimeError, match="after the step"):
            optimizer.step()
        assert moved(optimizer, before)
        for name, master in masters(optimizer).items():
            weight = optimizer.training_weights[name]
            assert torch.equal(weight, master.to(weight.dtype))
        assert all(pair.master.grad is None for pair in optimizer.masters if pair.is_split)


class TestOptimizersThatChange:
    def test_hooks_of_the_inner_one_may_come_late(self):
        _, optimizer = made(BF16, fused=True)
        stepped(optimizer)
        seen = []
        optimizer.inner.register_step_pre_hook(lambda *_: seen.append(1))
        stepped(optimizer, 2)
        assert len(seen) == 2

    def test_but_not_with_remainders(self):
        _, optimizer = made(REMAINDER, fused=True)
        stepped(optimizer)
        optimizer.inner.register_step_pre_hook(lambda *_: None)
        fill(optimizer)
        before = masters(optimizer)
        with pytest.raises(ValueError, match="without step hooks"):
            optimizer.step()
        assert moved(optimizer, before) == set()

    def test_a_group_that_remainders_cannot_be_of_is_not_added(self):
        _, optimizer = made(REMAINDER, fused=True)
        wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
        with pytest.raises(ValueError, match="remainder"):
            optimizer.add_param_group({"params": [wide]})
        assert len(optimizer.param_groups) == 1
        stepped(optimizer)

    def test_a_count_that_is_set_back_is_the_one_that_counts(self):
        _, optimizer = made(BF16, fused=True)
        stepped(optimizer, 3)
        for held in optimizer.state.values():
            held["step"] = torch.tensor(0.0)
        stepped(optimizer)
        assert {float(held["step"]) for held in optimizer.state.values()} == {1.0}

    @pytest.mark.parametrize("storage", ["fp32", "remainder"])
    def test_memory_of_a_weight_in_another_order(self, storage):
        """As ``model.to(memory_format=torch.channels_last)`` does."""

        def masters_of(other_order):
            torch.manual_seed(0)
            model = nn.Conv2d(4, 6, 3)
            inner = AdamW(model.parameters(), lr=0.01, fused=True)
            options = MixedPrecisionOptions.for_bf16(master_storage=storage)
            optimizer = MixedPrecisionOptimizer(inner, options, model=model)
            stepped(optimizer, 2)
            if other_order:
                model.to(memory_format=torch.channels_last)
                assert not model.weight.is_contiguous()
            stepped(optimizer, 2)
            return masters(optimizer)

        plain, other = masters_of(other_order=False), masters_of(other_order=True)
        assert all(torch.equal(each, other[name]) for name, each in plain.items())

    @pytest.mark.parametrize("what", ["master", "weight", "state"])
    @pytest.mark.parametrize("fused", [True, False])
    def test_other_memory_of_the_same_values(self, fused, what):
        """What a step keeps of where things lie is not believed when they lie elsewhere."""
        (_, wanted), (_, optimizer) = made(fused=fused), made(fused=fused)
        for each in (wanted, optimizer):
            stepped(each, 2)
        pair = optimizer.masters.pairs[0]
        held = optimizer.state[pair.master]
        if what == "state":
            held["exp_avg"] = held["exp_avg"].clone()
        else:
            tensor = pair.master if what == "master" else pair.weight
            tensor.data = tensor.data.clone()
        for each in (wanted, optimizer):
            stepped(each, 2)
        assert moved(optimizer, masters(wanted)) == set()
        assert torch.equal(held["exp_avg"], wanted.state[wanted.masters.pairs[0].master]["exp_avg"])
        assert torch.equal(pair.weight, wanted.masters.pairs[0].weight)

    @pytest.mark.parametrize("fused", [True, False])
    def test_a_step_without_a_gradient_is_one(self, fused):
        _, optimizer = made(FP16, fused=fused)
        assert optimizer.step().applied

    @pytest.mark.parametrize("options", [BF16, REMAINDER, FP16])
    def test_whatever_torch_s_default_dtype_is(self, options):
        _, wanted = made(options, fused=True)
        stepped(wanted, 2)
        _, optimizer = made(options, fused=True)
        torch.set_default_dtype(torch.float64)
        try:
            stepped(optimizer, 2)
        finally:
            torch.set_default_dtype(torch.float32)
        for name, master in wanted.master_weights.items():
            assert torch.equal(optimizer.master_weights[name], master)

    def test_weights_that_are_added_after_a_fallback_are_fp32(self):
        _, optimizer = made(FP16)
        optimizer.set_fallback(fallback=True)
        extra = nn.Parameter(torch.ones(3, dtype=torch.float16))
        optimizer.add_param_group({"params": [extra]})
        assert extra.dtype is torch.float32
        assert optimizer.master_weights["group1.0"] is extra


class TestRefused:
    def test_an_optimizer_that_was_taken_over(self):
        inner = SGD([nn.Parameter(torch.ones(3))], lr=0.1)
        MixedPrecisionOptimizer(inner, BF16)
        with pytest.raises(ValueError, match="taken over already"):
            MixedPrecisionOptimizer(inner, BF16)

    def test_a_model_of_which_the_optimizer_has_nothing(self):
        model = net()
        with pytest.raises(ValueError, match="no parameter of the model"):
            MixedPrecisionOptimizer(SGD(net().parameters(), lr=0.1), BF16, model=model)
        assert model[0].weight.dtype is torch.float32

    def test_what_is_no_model(self):
        with pytest.raises(ValueError, match="model must be"):
            MixedPrecisionOptimizer(SGD(net().parameters(), lr=0.1), BF16, model="net")

    def test_a_weight_that_is_there_already(self):
        weight = nn.Parameter(torch.ones(3))
        optimizer = MixedPrecisionOptimizer(SGD([weight], lr=0.1), BF16)
        with pytest.raises(ValueError, match="in the optimizer already"):
            optimizer.add_param_group({"params": [weight]})
        assert len(optimizer.param_groups) == 1

    def test_an_optimizer_that_steps_by_another(self):
        """As ZeroRedundancyOptimizer: its own would go on with the weights."""
        inner = SGD([nn.Parameter(torch.ones(3))], lr=0.1)
        outer = SGD([nn.Parameter(torch.ones(3))], lr=0.1)
        outer.optim = inner
        with pytest.raises(ValueError, match="inside of it"):
            MixedPrecisionOptimizer(outer, BF16)


class TestModels:
    def test_a_layer_that_shares_a_weight_with_one_that_stays_fp32(self):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(6, 4)
                self.middle = nn.Linear(4, 4)
                self.head = nn.Linear(4, 6, bias=False)
                self.head.weight = self.table.weight

            def forward(self, x):
                return self.head(self.middle(self.table(x)))

        model = Tied()
        options = MixedPrecisionOptions(fp32_layer_patterns=("head",))
        MixedPrecisionOptimizer(SGD(model.parameters(), lr=0.1), options, model=model)
        assert model.table.weight.dtype is torch.float32
        assert model.middle.weight.dtype is torch.bfloat16
        assert model(torch.tensor([1, 2])).dtype is torch.bfloat16

    def test_a_second_optimizer_takes_the_place_of_the_first(self, caplog):
        """Its hooks too: with those of both, inputs would be cast to the dtype of the first."""
        model, first = made(BF16)
        stepped(first)
        with caplog.at_level(logging.WARNING, "holdfast.precision"):
            second = MixedPrecisionOptimizer(
                AdamW(model.parameters()), MixedPrecisionOptions(precision="fp32"), model=model
            )
        assert [record.message for record in caplog.records] == [
            "4 weights are 16-bit already: their masters have no more bits"
        ]
        assert model[0].weight.dtype is torch.float32
        assert model(torch.ones(2, 5)).dtype is torch.float32
        stepped(second)

    @pytest.mark.parametrize("fused", [True, False])
    def test_a_norm_with_gaps_in_memory(self, fused):
        """torch's fused kernels step the gaps."""
        model = net()
        model[1].weight = nn.Parameter(torch.arange(14.0)[::2])
        inner = SGD(model.parameters(), lr=0.5, fused=fused)
        optimizer = MixedPrecisionOptimizer(inner, BF16, model=model)
        model[1].weight.grad = torch.ones(7)
        assert optimizer.step()
        assert torch.equal(model[1].weight, torch.arange(14.0)[::2] - 0.5)


class TestWhatIsHardlyMeant:
    def test_a_pattern_that_is_no_layer_s(self):
        model = net()
        options = MixedPrecisionOptions(fp32_layer_patterns=("*Norm", "haed"))
        with pytest.raises(ValueError, match="'haed', and the model has no layer"):
            MixedPrecisionOptimizer(SGD(model.parameters(), lr=0.1), options, model=model)
        assert model[0].weight.dtype is torch.float32

    def test_a_loss_scale_that_is_forgotten_is_logged_once(self, caplog):
        _, optimizer = made(FP16)
        stepped(optimizer, 2)
        (told,) = [record.message for record in caplog.records]
        assert "scale_loss() was never called" in told
        caplog.clear()
        _, optimizer = made(FP16)
        optimizer.scale_loss(torch.ones(()))
        stepped(optimizer)
        _, optimizer = made(BF16)
        stepped(optimizer)
        assert not caplog.records

    def test_fp16_without_a_loss_scale_is_logged(self, caplog):
        made(MixedPrecisionOptions(precision="fp16"))
        assert "for_fp16" in caplog.text


class TestModes:
    def test_restored_under_inference_mode_it_can_be_stepped(self):
        _, optimizer = made(BF16)
        stepped(optimizer)
        checkpoint = create_checkpoint(optimizer)
        with torch.inference_mode():
            restore_checkpoint(optimizer, checkpoint)
        stepped(optimizer)

    def test_a_step_under_another_default_device(self):
        _, optimizer = made(BF16, fused=True)
        stepped(optimizer)
        fill(optimizer)
        with torch.device("meta"):
            assert optimizer.step()

    def test_gradients_that_were_shown_are_forgotten_with_what_they_were_of(self):
        """As in a loop that loads its last checkpoint after an error."""
        results = []
        for shown in (False, True):
            _, optimizer = made(FP16)
            stepped(optimizer)
            checkpoint = create_checkpoint(optimizer, snapshot="copy")
            fill(optimizer, 5)
            if shown:
                optimizer.unscale_()
            restore_checkpoint(optimizer, checkpoint)
            optimizer.zero_grad()
            fill(optimizer, 6)
            results.append((optimizer.step().grad_norm, masters(optimizer)))
        assert results[0][0] == results[1][0]
        assert all(torch.equal(each, results[1][1][name]) for name, each in results[0][1].items())


class Reads(TorchDispatchMode):
    """Counts numbers that are read of tensors, for each of which a GPU would be waited for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        self.count += call is torch.ops.aten._local_scalar_dense.default
        return call(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [BF16, FP16])
def test_a_step_reads_one_number(options):
    """The norm, which says whether there is a step at all."""
    _, optimizer = made(options, fused=True)
    stepped(optimizer)
    fill(optimizer)
    with Reads() as reads:
        assert optimizer.step()
    assert reads.count == 1
