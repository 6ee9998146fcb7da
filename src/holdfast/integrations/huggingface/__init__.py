"""Runs of Hugging Face's ``Trainer``, and of loops with an ``Accelerator``, saved and resumed
exactly; and models for ``from_pretrained``."""

from holdfast.integrations._packages import require

require("transformers", "huggingface")
require("accelerate", "huggingface")

from holdfast.integrations.huggingface._accelerate import AcceleratorCheckpoint  # noqa: E402
from holdfast.integrations.huggingface._callback import HoldfastCallback  # noqa: E402
from holdfast.integrations.huggingface._exporting import save_pretrained  # noqa: E402

__all__ = ["AcceleratorCheckpoint", "HoldfastCallback", "save_pretrained"]
