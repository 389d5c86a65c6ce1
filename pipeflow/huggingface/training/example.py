"""An example batch for planning, made from a model, for scripts that load their data later than their model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeflow.core.errors import UsageError

_LENGTH = 8
_PER_TOKEN = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForTokenClassification")
_PER_SAMPLE = ("ForSequenceClassification",)
_IMAGES, _MASKED_IMAGES = "ForImageClassification", "ForMaskedImageModeling"
_ONE_CLASS = "single_label_classification"


def example_for(model: Any, samples: int) -> dict[str, Tensor]:
    """A batch of `samples` sequences of 8 tokens, or of images, with labels, as the model's loss takes them.

    Raises UsageError for a model that does not take `input_ids` or `pixel_values`, and labels of a known shape.
    """
    name, config = type(model).__name__, model.config
    if model.main_input_name == "pixel_values" and name.endswith((_IMAGES, _MASKED_IMAGES)):
        return _of_images(config, samples, is_masked=name.endswith(_MASKED_IMAGES))
    is_per_token = name.endswith(_PER_TOKEN)
    is_per_sample = name.endswith(_PER_SAMPLE) and not config.is_encoder_decoder  # these need a configuration's tokens
    if model.main_input_name != "input_ids" or not (is_per_token or is_per_sample):
        raise UsageError(f"no example batch is known for {name}: pass one, as in from_pretrained(..., example=batch)")
    tokens = torch.ones(samples, _LENGTH, dtype=torch.long)
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": torch.ones_like(tokens) if is_per_token else _per_sample(config, samples),
    }


def _of_images(config: Any, samples: int, *, is_masked: bool) -> dict[str, Tensor]:
    """Images of the configuration's size, with labels, or with masks of their patches."""
    height, width = _pair(config.image_size)
    images = torch.zeros(samples, config.num_channels, height, width)
    if not is_masked:
        return {"pixel_values": images, "labels": _per_sample(config, samples)}
    high, wide = _pair(config.patch_size)
    masks = torch.ones(samples, (height // high) * (width // wide), dtype=torch.long)
    return {"pixel_values": images, "bool_masked_pos": masks}


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _per_sample(config: Any, samples: int) -> Tensor:
    """Labels of a classifier: a class per sample; else, as in regressions, a number for each."""
    if config.problem_type == _ONE_CLASS or (config.problem_type is None and config.num_labels > 1):
        return torch.zeros(samples, dtype=torch.long)
    return torch.zeros(samples, config.num_labels)
