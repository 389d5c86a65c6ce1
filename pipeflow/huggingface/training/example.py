"""An example batch for planning, made from a model, for scripts that load their data later than their model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeflow.core.errors import UsageError

_LENGTH = 8
_PER_TOKEN = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForTokenClassification")
_PER_SAMPLE = ("ForSequenceClassification",)
_ONE_CLASS = "single_label_classification"


def example_for(model: Any, samples: int) -> dict[str, Tensor]:
    """A batch of `samples` sequences of 8 tokens with labels, as the model's loss takes them.

    Raises UsageError for a model that does not take `input_ids` and `labels` of a known shape.
    """
    name, config = type(model).__name__, model.config
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


def _per_sample(config: Any, samples: int) -> Tensor:
    """Labels of a classifier: a class per sample; else, as in regressions, a number for each."""
    if config.problem_type == _ONE_CLASS or (config.problem_type is None and config.num_labels > 1):
        return torch.zeros(samples, dtype=torch.long)
    return torch.zeros(samples, config.num_labels)
