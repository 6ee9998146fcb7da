"""Options of mixed precision: presets, what is refused, copies."""

import dataclasses

import msgspec
import pytest
import torch

from holdfast.precision import MixedPrecisionOptions, Precision


def test_precisions_have_dtypes():
    assert [each.dtype for each in Precision] == [torch.float16, torch.bfloat16, torch.float32]


def test_a_precision_may_be_given_by_its_name():
    assert MixedPrecisionOptions(precision="fp16").precision is Precision.FP16


def test_presets():
    fp16, bf16 = MixedPrecisionOptions.for_fp16(), MixedPrecisionOptions.for_bf16()
    careful = MixedPrecisionOptions.conservative()
    assert (fp16.precision, fp16.dynamic_scaling) == (Precision.FP16, True)
    assert (bf16.precision, bf16.dynamic_scaling, bf16.initial_scale) == (Precision.BF16, False, 1)
    assert MixedPrecisionOptions() == bf16
    assert careful.precision is Precision.FP16
    assert careful.initial_scale < fp16.initial_scale
    assert careful.growth_interval > fp16.growth_interval
    assert careful.max_grad_norm == 1


def test_the_search_for_a_scale_reaches_the_smallest_before_a_preset_gives_up():
    for options in (MixedPrecisionOptions.for_fp16(), MixedPrecisionOptions.conservative()):
        scale, overflows = options.initial_scale, options.hysteresis - 1
        while scale > options.min_scale:
            scale *= options.backoff_factor
            overflows += 1
        assert overflows < options.max_consecutive_overflows


def test_presets_take_changes():
    options = MixedPrecisionOptions.for_fp16(max_grad_norm=2, precision="bf16")
    assert options.max_grad_norm == 2.0
    assert options.precision is Precision.BF16


def test_copies_are_equal_and_apart():
    options = MixedPrecisionOptions.conservative(fp32_layer_patterns=["head", "*.norm"])
    assert dataclasses.replace(options) == options
    changed = dataclasses.replace(options, growth_interval=7)
    assert (changed.growth_interval, options.growth_interval) == (7, 5000)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.growth_interval = 3


@pytest.mark.parametrize(
    "options",
    [
        MixedPrecisionOptions(),
        MixedPrecisionOptions.for_fp16(fp32_layer_patterns=()),
        MixedPrecisionOptions.conservative(fp32_layer_patterns=("a.*", "b")),
        MixedPrecisionOptions.for_bf16(master_storage="remainder", max_grad_norm=0.1),
    ],
)
def test_json_and_back(options):
    data = msgspec.json.encode(options)
    assert msgspec.json.decode(data, type=MixedPrecisionOptions) == options
    assert MixedPrecisionOptions.from_plain(msgspec.json.decode(data)) == options
    assert MixedPrecisionOptions.from_plain(options.plain()) == options


@pytest.mark.parametrize("plain", [3, {"precision": "fp8"}, {"growth_interval": "often"}])
def test_what_is_no_options(plain):
    with pytest.raises(ValueError, match=r"MixedPrecisionOptions|precision"):
        MixedPrecisionOptions.from_plain(plain)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"precision": "fp8"}, "precision must be one of 'fp16', 'bf16', 'fp32', not 'fp8'"),
        ({"dynamic_scaling": 1}, "dynamic_scaling"),
        ({"initial_scale": 0}, "initial_scale"),
        ({"initial_scale": float("nan")}, "initial_scale"),
        ({"initial_scale": 2.0**30}, "initial_scale"),
        ({"min_scale": 0}, "min_scale must be more than 0"),
        ({"min_scale": 8.0, "max_scale": 4.0}, "max_scale"),
        ({"max_scale": float("inf")}, "max_scale"),
        ({"growth_factor": 0.5}, "growth_factor"),
        ({"backoff_factor": 1.5}, "backoff_factor"),
        ({"backoff_factor": 0}, "backoff_factor must be more than 0"),
        ({"growth_interval": 0}, "growth_interval"),
        ({"hysteresis": 0}, "hysteresis"),
        ({"max_consecutive_overflows": 0}, "max_consecutive_overflows"),
        ({"max_grad_norm": 0}, "max_grad_norm must be more than 0"),
        ({"max_grad_norm": -1}, "max_grad_norm"),
        ({"fp32_layer_patterns": "norm"}, "fp32_layer_patterns must be several"),
        ({"fp32_layer_patterns": [3]}, "each of fp32_layer_patterns"),
        ({"grad_accumulation": "fp64"}, "grad_accumulation"),
        ({"master_storage": "none"}, "master_storage"),
        ({"master_storage": "remainder", "precision": "fp16"}, "is for BF16"),
        ({"cast_inputs": None}, "cast_inputs"),
    ],
)
def test_refused(changes, named):
    with pytest.raises(ValueError, match=named):
        MixedPrecisionOptions(**changes)


@pytest.mark.parametrize(
    ("patterns", "name", "kind", "stays"),
    [
        (None, "x", "LayerNorm", True),
        (None, "x", "LlamaRMSNorm", True),
        (None, "x", "BatchNorm2d", True),
        (None, "x", "SyncBatchNorm", True),
        (None, "x", "GroupNorm", True),
        (None, "x", "Linear", False),
        (None, "x", "PreNorm", False),  # a block with a norm in it, by custom
        (None, "LayerNorm", "Linear", False),  # by default only classes are looked at
        ((), "x", "LayerNorm", False),
        (("head",), "head", "Linear", True),
        (("blocks.*.norm?",), "blocks.3.norm1", "Linear", True),
        (("blocks.*.norm?",), "blocks.3.up", "Linear", False),
        (("Embedding",), "x", "Embedding", True),
    ],
)
def test_which_layers_stay_fp32(patterns, name, kind, stays):
    options = MixedPrecisionOptions(fp32_layer_patterns=patterns)
    assert options.keeps_fp32(name, kind) is stays
