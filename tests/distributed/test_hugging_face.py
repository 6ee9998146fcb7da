"""Models of Hugging Face, made from a config: what is saved consolidated opens with their libraries
and with safetensors, and comes back to holdfast on any number of ranks.

Nothing is downloaded: the hub is switched off before transformers is imported.
"""

import json
import logging
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import torch.distributed as dist
from checkpoint_jobs import checkpointer, parallel, train, whole
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import holdfast
from holdfast.distributed import CheckpointFormat, LoadOptions, SaveOptions
from holdfast.testing import RankGang

CONFIGS = {
    "bert": BertConfig(
        vocab_size=61,
        hidden_size=18,
        intermediate_size=34,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=True,
    ),
    # Odd sizes where the architecture allows, so that ranks hold unequal parts.
    "gpt2": GPT2Config(
        vocab_size=61,
        n_positions=16,
        n_embd=18,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=True,
    ),
    "llama": LlamaConfig(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=34,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=True,
    ),
}
CLASSES = {"bert": BertForMaskedLM, "gpt2": GPT2LMHeadModel, "llama": LlamaForCausalLM}
WAYS = [("single", 1), ("ddp", 2), ("fsdp", 2)]


def new_model(family, seed, dtype=torch.float32):
    torch.manual_seed(seed)
    return CLASSES[family](CONFIGS[family]).to(dtype)


def new_training(family, kind, *, seed, steps, dtype=torch.float32):
    world = dist.get_world_size() if dist.is_initialized() else 1
    model = parallel(new_model(family, seed, dtype), kind, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    train(model, optimizer, steps)
    return model, optimizer


def save_job(rank, folder, family, kind, *, dtype=torch.float32, **options):
    model, optimizer = new_training(family, kind, seed=1, steps=2, dtype=dtype)
    with checkpointer(folder) as ckpt:
        options = SaveOptions(checkpoint_prefix="last", **options)
        return ckpt.save(model, optimizer, options, extra={"step": 2})


def load_job(rank, folder, family, kind, *, dtype=torch.float32):
    """Load into another training, and find all of it as it was saved; then train on."""
    model, optimizer = new_training(family, kind, seed=2, steps=0, dtype=dtype)
    with checkpointer(folder) as ckpt:
        result = ckpt.load(model, optimizer, LoadOptions(checkpoint_prefix="last"))
    assert result.extra == {"step": 2}
    assert result.report.is_clean
    assert_same_training(
        model, optimizer, *new_training(family, "single", seed=1, steps=2, dtype=dtype)
    )
    train(model, optimizer, 1)
    assert_same_training(
        model, optimizer, *new_training(family, "single", seed=1, steps=3, dtype=dtype)
    )


def assert_same_training(model, optimizer, wanted, wanted_optimizer):
    named = {name.removeprefix("module."): each for name, each in model.named_parameters()}
    expected = dict(wanted.named_parameters())
    assert named.keys() == expected.keys()
    for name, parameter in named.items():
        assert torch.equal(whole(parameter.detach()), expected[name]), name
        mine, its = optimizer.state[parameter], wanted_optimizer.state[expected[name]]
        assert mine.keys() == its.keys() != set()
        for key, value in its.items():
            assert torch.equal(whole(mine[key]), value), (name, key)


class Heard(logging.Handler):
    """What transformers says while it loads."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("transformers").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("transformers").removeHandler(self)


def assert_opens_with_hugging_face(folder, family, wanted):
    options = {"config": CONFIGS[family], "output_loading_info": True}
    if wanted.can_generate():
        # Not given one, transformers reads it from the folder, or from a config.json there, and
        # fails without either though it was given the config.
        options["generation_config"] = GenerationConfig()
    with Heard() as heard:
        model, told = CLASSES[family].from_pretrained(folder, **options)
    assert not any(told.values()), told
    assert heard.said == []
    assert model.dtype == wanted.dtype
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    found = model.state_dict()
    assert found.keys() == wanted.state_dict().keys()
    for name, value in wanted.state_dict().items():
        assert torch.equal(found[name], value), name


def assert_opens_with_safetensors(folder, wanted):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("model-*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == [file.name for file in files] != []
    found = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
        found |= load_file(file)
    assert found.keys() == index["weight_map"].keys() <= wanted.keys()
    for name, value in found.items():
        assert torch.equal(value, wanted[name]), name
    assert {value.data_ptr() for value in wanted.values()} == {
        wanted[name].data_ptr() for name in found
    }


@pytest.fixture(scope="module")
def gang():
    with RankGang(2) as started:
        yield started


def on_ranks(gang, ranks, job, *args, **options):
    if ranks == 1:
        return [job(0, *args, **options)]
    return gang.run(job, *args, **options)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(("kind", "ranks"), WAYS)
def test_saved_consolidated_a_model_opens_with_hugging_face(gang, tmp_path, family, kind, ranks):
    on_ranks(gang, ranks, save_job, tmp_path, family, kind, format="consolidated")
    wanted, _ = new_training(family, "single", seed=1, steps=2)
    assert_opens_with_safetensors(tmp_path / "last", wanted.state_dict())
    assert_opens_with_hugging_face(tmp_path / "last", family, wanted)


def test_a_model_in_bfloat16_stays_so(gang, tmp_path):
    options = {"format": CheckpointFormat.CONSOLIDATED, "dtype": torch.bfloat16}
    on_ranks(gang, 2, save_job, tmp_path, "llama", "fsdp", **options)
    wanted, _ = new_training("llama", "single", seed=1, steps=2, dtype=torch.bfloat16)
    assert_opens_with_hugging_face(tmp_path / "last", "llama", wanted)
    load_job(0, tmp_path, "llama", "single", dtype=torch.bfloat16)


@pytest.mark.parametrize("layout", ["consolidated", "multi_shard"])
@pytest.mark.parametrize("family", CONFIGS)
def test_model_and_optimizer_come_back_on_another_number_of_ranks(gang, tmp_path, family, layout):
    on_ranks(gang, 2, save_job, tmp_path / "2", family, "fsdp", format=layout)
    on_ranks(gang, 1, load_job, tmp_path / "2", family, "single")
    on_ranks(gang, 2, load_job, tmp_path / "2", family, "ddp")
    on_ranks(gang, 1, save_job, tmp_path / "1", family, "single", format=layout)
    on_ranks(gang, 2, load_job, tmp_path / "1", family, "fsdp")


def test_overwritten_the_folder_opens_as_the_new_model(gang, tmp_path):
    on_ranks(gang, 2, save_job, tmp_path, "gpt2", "fsdp", format="consolidated")
    model, optimizer = new_training("gpt2", "single", seed=3, steps=1)
    with checkpointer(tmp_path) as ckpt:
        options = SaveOptions(checkpoint_prefix="last", format="consolidated", overwrite=True)
        ckpt.save(model, optimizer, options)
    assert_opens_with_safetensors(tmp_path / "last", model.state_dict())
    assert_opens_with_hugging_face(tmp_path / "last", "gpt2", model)


def test_one_line_saves_a_model_for_hugging_face(tmp_path):
    model = new_model("gpt2", 5)
    holdfast.save(model, tmp_path / "alone", format="consolidated")
    assert_opens_with_hugging_face(tmp_path / "alone", "gpt2", model)
    holdfast.save({"model": model, "step": 3}, tmp_path / "beside", format="consolidated")
    assert_opens_with_hugging_face(tmp_path / "beside", "gpt2", model)
    other = {"model": new_model("gpt2", 6), "step": 0}
    holdfast.load(tmp_path / "beside", into=other)
    assert other["step"] == 3
    assert_opens_with_hugging_face(tmp_path / "beside", "gpt2", other["model"])


def test_what_hugging_face_saved_beside_it_is_left_alone(tmp_path):
    """A config in the folder makes it one that from_pretrained takes without being given any."""
    model = new_model("gpt2", 7)
    folder = Path(tmp_path, "last")
    holdfast.save(model, folder, format="consolidated")
    CONFIGS["gpt2"].save_pretrained(folder)
    holdfast.save(model, folder, format="consolidated", overwrite=True)
    found = GPT2LMHeadModel.from_pretrained(folder)
    assert torch.equal(found.lm_head.weight, model.lm_head.weight)
    assert (folder / "config.json").exists()


def test_files_for_hugging_face_are_not_compressed():
    with pytest.raises(ValueError, match="Hugging Face files cannot be compressed"):
        SaveOptions(format="consolidated", compression_level="fast")
