"""Models saved by ``save_pretrained``: what ``from_pretrained`` opens, and holdfast as well."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_training import new_model, new_trainer
from torch import nn
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

import holdfast
from holdfast.catalog import Catalog
from holdfast.integrations.huggingface import save_pretrained


def assert_same(found, wanted):
    assert type(found) is type(wanted)
    assert found.dtype == wanted.dtype
    assert found.lm_head.weight is found.transformer.wte.weight  # tied, as it was
    assert found.state_dict().keys() == wanted.state_dict().keys()
    for name, value in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_pretrained_opens_it_without_being_told_anything(tmp_path, dtype):
    model = new_model(resid_pdrop=0.25).to(dtype)
    model.generation_config.max_new_tokens = 7
    assert save_pretrained(model, tmp_path / "out") == "out"
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same(found, model)
    assert found.config.resid_pdrop == 0.25
    assert found.generation_config.max_new_tokens == 7
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [
        "GPT2LMHeadModel"
    ]


def test_it_is_a_checkpoint_as_any_other(tmp_path):
    model = new_model()
    save_pretrained(model, tmp_path / "out")
    assert Catalog(tmp_path).verify("out").is_intact
    other = new_model(seed=2)
    holdfast.load(tmp_path / "out", into={"model": other})
    assert_same(other, model)


def test_the_model_of_a_trainer_is_saved_with_its_tokenizer(tmp_path):
    class Tokenizer:
        def save_pretrained(self, folder):
            (Path(folder) / "templates").mkdir()
            (Path(folder) / "templates" / "chat.txt").write_text("{x}")

    trainer = new_trainer(tmp_path, save_strategy="no", max_steps=2)
    trainer.train()
    trainer.processing_class = Tokenizer()
    save_pretrained(trainer, tmp_path / "out")
    assert_same(GPT2LMHeadModel.from_pretrained(tmp_path / "out"), trainer.model)
    assert (tmp_path / "out" / "templates" / "chat.txt").read_text() == "{x}"


def test_a_name_that_is_taken_stays_as_it_is_unless_told(tmp_path):
    first, second = new_model(), new_model(seed=2, n_layer=2)
    save_pretrained(first, tmp_path / "out")
    with pytest.raises(holdfast.CheckpointExistsError):
        save_pretrained(second, tmp_path / "out")
    assert_same(GPT2LMHeadModel.from_pretrained(tmp_path / "out"), first)
    save_pretrained(second, tmp_path / "out", overwrite=True)
    assert_same(GPT2LMHeadModel.from_pretrained(tmp_path / "out"), second)


def test_a_model_without_a_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a Linear has no config"):
        save_pretrained(nn.Linear(2, 2), tmp_path / "out")
    with pytest.raises(ValueError, match="path must be <root>/<prefix>"):
        save_pretrained(new_model(), "/")
    assert [*tmp_path.iterdir()] == []
