"""Plans for models of Hugging Face, made from a config: no stage is named, no gradient differs.

Nothing is downloaded: the hub is switched off before transformers is imported.
"""

import gc
import os
from dataclasses import dataclass
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers
from torch import nn

import holdfast
from holdfast.activation import measure_peak
from holdfast.errors import PlanError

WORDS, LENGTH = 97, 32
SIZES = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA_LIKE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "use_cache": False,
}
WITHOUT_GROUPS = {name: each for name, each in LLAMA_LIKE.items() if "key_value" not in name}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The classes of a model by their common name, its config, and where its stages are."""

    config: str
    model: str
    words: dict[str, Any]
    stages: tuple[str, ...]
    attention: tuple[str, ...] = ("sdpa", "eager")


def _decoder(name: str, stages: str = "model.layers", **words: Any) -> Family:
    return Family(
        config=f"{name}Config",
        model=f"{name}ForCausalLM",
        words={**LLAMA_LIKE, **words},
        stages=(stages,),
    )


GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": LENGTH, "use_cache": False}
OPT = {"hidden_size": 32, "ffn_dim": 64, "word_embed_proj_dim": 32, "num_hidden_layers": 4}
OPT |= {"num_attention_heads": 4, "max_position_embeddings": LENGTH, "use_cache": False}
T5 = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 3, "num_heads": 4, "use_cache": False}

FAMILIES = {
    "llama": _decoder("Llama"),
    "mistral": _decoder("Mistral", sliding_window=8),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3", head_dim=8),
    "gemma2": Family(
        config="Gemma2Config",
        model="Gemma2ForCausalLM",
        words={**LLAMA_LIKE, "head_dim": 8, "sliding_window": 8},
        stages=("model.layers",),
        attention=("eager",),
    ),
    "gemma3": Family(
        config="Gemma3TextConfig",
        model="Gemma3ForCausalLM",
        words={**LLAMA_LIKE, "head_dim": 8, "sliding_window": 8},
        stages=("model.layers",),
    ),
    "phi": Family(
        config="PhiConfig",
        model="PhiForCausalLM",
        words={**WITHOUT_GROUPS, "resid_pdrop": 0.1},
        stages=("model.layers",),
    ),
    "mixtral": _decoder("Mixtral", num_local_experts=4),
    "gpt2": Family(
        config="GPT2Config", model="GPT2LMHeadModel", words=GPT2, stages=("transformer.h",)
    ),
    "gpt-neox": Family(
        config="GPTNeoXConfig",
        model="GPTNeoXForCausalLM",
        words={**WITHOUT_GROUPS, "hidden_dropout": 0.1},
        stages=("gpt_neox.layers",),
    ),
    "opt": Family(
        config="OPTConfig", model="OPTForCausalLM", words=OPT, stages=("model.decoder.layers",)
    ),
    "falcon": Family(
        config="FalconConfig",
        model="FalconForCausalLM",
        words=WITHOUT_GROUPS,
        stages=("transformer.h",),
    ),
    "bert": Family(
        config="BertConfig",
        model="BertForMaskedLM",
        words={name: each for name, each in WITHOUT_GROUPS.items() if name != "use_cache"},
        stages=("bert.encoder.layer",),
    ),
    "t5": Family(
        config="T5Config",
        model="T5ForConditionalGeneration",
        words={**T5, "decoder_start_token_id": 0},
        stages=("encoder.block", "decoder.block"),
    ),
}
CASES = [(name, attention) for name, each in FAMILIES.items() for attention in each.attention]


@pytest.fixture(scope="module", autouse=True)
def settled():
    """Have the meter look at what the tests make, not at all that transformers has imported."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


def new_model(name, attention="sdpa", **words):
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**{**SIZES, **family.words, **words})
    config._attn_implementation = attention
    torch.manual_seed(0)
    return getattr(transformers, family.model)(config).train()


def new_batch(seed=1, samples=8, length=LENGTH):
    drawn = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, WORDS, (samples, length), generator=drawn)
    return {"input_ids": tokens, "labels": tokens.clone()}


def step(model, batch):
    loss = model(**batch).loss
    loss.backward()
    return loss.detach()


def told(model, batch):
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    torch.manual_seed(3)
    found = {"loss": step(model, batch), "stream": torch.get_rng_state()}
    found |= {name: each.clone() for name, each in model.named_buffers()}
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    return found | {name: each.grad.clone() for name, each in trained.items()}


def differing(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def kinds_of(plan):
    return {each.kind for each in plan.decision.actions().stages.values()}


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_half_the_memory_and_the_same_gradients(name, attention):
    model = new_model(name, attention)
    batch, another = new_batch(), new_batch(seed=2)
    expected, expected_too = told(model, batch), told(model, another)
    plan = holdfast.plan(model, batch, budget="50%")
    named = list(model.state_dict())
    with plan.applied(model) as applied:
        assert differing(expected, told(model, batch)) == []
        assert differing(expected_too, told(model, another)) == []
        taken = measure_peak(step, model, batch).peak_bytes
        assert list(model.state_dict()) == named
    assert differing(expected, told(model, batch)) == []
    assert taken <= plan.budget_bytes * 1.05
    assert taken < measure_peak(step, model, batch).peak_bytes * 0.53
    assert applied.fallbacks == ()
    found = [stage.name.rpartition(".") for stage in plan.decision.stages]
    assert tuple(dict.fromkeys(folder for folder, _, _ in found)) == FAMILIES[name].stages
    assert len(found) == 6 if name == "t5" else 4
    assert all(stage.recipes.made for stage in plan.decision.stages)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_smaller_and_smaller(name):
    model, batch = new_model(name), new_batch()
    expected = told(model, batch)
    met = set()
    for budget in ("85%", "65%", "35%"):
        plan = holdfast.plan(model, batch, budget)
        met |= kinds_of(plan)
        with plan.applied(model) as applied:
            assert differing(expected, told(model, batch)) == []
            assert measure_peak(step, model, batch).peak_bytes <= plan.budget_bytes * 1.05
        assert applied.fallbacks == ()
    assert "recipes" in met


def test_other_lengths_and_padding():
    model = new_model("llama")
    plan = holdfast.plan(model, new_batch(), budget="60%")
    padded = new_batch(seed=5)
    padded["attention_mask"] = torch.ones_like(padded["input_ids"])
    padded["attention_mask"][:3, 20:] = 0
    batches = [new_batch(4, samples=3, length=9), new_batch(5, samples=20), padded]
    expected = [told(model, batch) for batch in batches]
    with plan.applied(model):
        for batch, wanted in zip(batches, expected, strict=True):
            assert differing(wanted, told(model, batch)) == []


@pytest.mark.parametrize("budget", ["80%", "55%"])
def test_experts_that_are_chosen_anew_in_every_step(budget):
    """Which experts run depends on the batch, and with it the graph: a stage whose graph is not the
    planned one keeps everything."""
    model = new_model("mixtral", num_local_experts=8, num_experts_per_tok=1)
    model.set_experts_implementation("eager")
    few = dict.fromkeys(["input_ids", "labels"], torch.full((8, LENGTH), 7))
    batches = [new_batch(seed=seed) for seed in range(3)] + [few]
    expected = [told(model, batch) for batch in batches]
    plan = holdfast.plan(model, batches[0], budget)
    assert "recipes" in kinds_of(plan)
    with plan.applied(model) as applied:
        for batch, wanted in zip(batches, expected, strict=True):
            assert differing(wanted, told(model, batch)) == []
    assert any("not the one that was planned" in each.reason for each in applied.fallbacks)


class Adapted(nn.Module):
    """A frozen projection with a small trained one beside it, as in LoRA."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.base(x) + self.up(self.down(self.drop(x)))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("budget", ["75%", "50%"])
def test_small_adapters_of_a_frozen_model(budget, attention):
    """The first stage's input needs no gradient."""
    model = new_model("llama", attention).requires_grad_(requires_grad=False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        layer.mlp.down_proj = Adapted(layer.mlp.down_proj)
    batch = new_batch()
    expected = told(model, batch)
    assert len(expected) < 30
    plan = holdfast.plan(model, batch, budget)
    with plan.applied(model) as applied:
        assert differing(expected, told(model, batch)) == []
        assert measure_peak(step, model, batch).peak_bytes <= plan.budget_bytes * 1.05
    assert applied.fallbacks == ()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_checkpoints_itself_is_refused(reentrant):
    model, batch = new_model("llama"), new_batch()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    expected = told(model, batch)
    with pytest.raises(PlanError, match=r"checkpointed already.*gradient_checkpointing_disable"):
        holdfast.plan(model, batch, "50%")
    assert differing(expected, told(model, batch)) == []


@pytest.mark.parametrize("budget", ["60%", "36%"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_begins_to_checkpoint_itself_under_a_plan(reentrant, budget):
    model, batch = new_model("llama"), new_batch()
    expected = told(model, batch)
    plan = holdfast.plan(model, batch, budget)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    with plan.applied(model):
        assert differing(expected, told(model, batch)) == []


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = new_batch(seed=9, samples=24)["input_ids"]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return {"input_ids": self.rows[number], "labels": self.rows[number].clone()}


@pytest.mark.parametrize("budget", ["60%", "35%"])
def test_the_trainer_of_transformers(tmp_path, budget):
    pytest.importorskip("accelerate")

    def trained(planned):
        model = new_model("gpt2")
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            seed=1,
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Rows())
        if not planned:
            trainer.train()
            return model.state_dict()
        plan = holdfast.plan(model, new_batch(samples=4), budget)
        with plan.applied(model) as applied:
            trainer.train()
        assert applied.fallbacks == ()
        return model.state_dict()

    assert differing(trained(planned=False), trained(planned=True)) == []
