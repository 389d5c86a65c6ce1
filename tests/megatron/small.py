"""A small GPT and its data under Megatron-LM's names, in float64 and without dropout, and a step function for it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pipeflow.engine.parallel.context import kept
from pipeflow.megatron import parallel_state
from pipeflow.megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from pipeflow.megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from pipeflow.megatron.core.models.gpt.gpt_model import GPTModel
from pipeflow.megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from pipeflow.megatron.core.transformer.transformer_config import TransformerConfig
from pipeflow.megatron.training.tokenizer.tokenizer import _NullTokenizer

SEQUENCE, WORDS = 16, 21
NAMES = ("tokens", "position_ids", "attention_mask")


def configuration(**options: Any) -> TransformerConfig:
    """Of four layers."""
    exact: dict[str, Any] = {"params_dtype": torch.float64, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    return TransformerConfig(num_layers=4, hidden_size=16, num_attention_heads=2, **{**exact, **options})


def models(chunks: int = 1, *, tied: bool = False, **options: Any) -> list[GPTModel]:
    """This rank's stages, in a world that was launched."""
    context, config = parallel_state.context_here(), configuration(**options)
    if kept(parallel_state._KEY) is None:
        virtual = chunks if chunks > 1 else None
        parallel_state.initialize_model_parallel(context.tensor_size, context.pipeline_size, virtual)
    made = []
    for chunk in range(chunks):
        parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        model = GPTModel(config, get_gpt_layer_local_spec(), WORDS, SEQUENCE, share_embeddings_and_output_weights=tied)
        made.append(model)
    return made


def loader(batch_size: int = 4, samples: int = 24) -> DataLoader[Any]:
    """Batches whose documents are kept apart."""
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=SEQUENCE,
        tokenizer=_NullTokenizer(vocab_size=WORDS - 1),
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
    )
    return DataLoader(MockGPTDataset(config, samples), batch_size=batch_size)


def masked_mean(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean of the losses that count."""
    loss = (losses * loss_mask).sum() / loss_mask.sum()
    return loss, {"lm loss": loss}


def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
    """A microbatch through a model."""
    data = next(data_iterator)
    return model(*(data[name] for name in NAMES), labels=data["labels"]), partial(masked_mean, data["loss_mask"])


def run_step(chunks: list[Any], data_iterator: Any, microbatches: int = 4, **options: Any) -> list[Any]:
    """What a step logs."""
    return get_forward_backward_func()(
        data_iterator=data_iterator,
        model=chunks[0] if len(chunks) == 1 else chunks,
        num_microbatches=microbatches,
        **{"forward_step_func": forward_step, **options},
    )


def logged_losses(logged: list[Any]) -> list[float]:
    """The numbers in what a step logs."""
    return [float(values["lm loss"]) for values in logged]
