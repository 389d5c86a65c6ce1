"""Megatron-LM's `megatron.core.tensor_parallel.cross_entropy`."""

from __future__ import annotations

from torch import Tensor

from pipeflow.tensor import cross_entropy


def vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Returns the loss of each token, (...), from this rank's part of the logits (..., words / T) and labels (...)."""
    return cross_entropy.vocab_parallel_cross_entropy(
        vocab_parallel_logits, target, label_smoothing=label_smoothing, reduction="none"
    )
