"""Megatron-LM's `megatron.core.distributed.finalize_model_grads`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from pipeflow.core.errors import UsageError


def finalize_model_grads(model: Sequence[nn.Module], num_tokens: Tensor | None = None) -> None:
    """Does nothing: every step ends with these sums over replicas, tied weights and tensor ranks.

    Args:
        model: this rank's stages.
        num_tokens: must be None; to average over tokens, return their number from the loss function.

    Raises UsageError for `num_tokens`.
    """
    if num_tokens is not None:
        raise UsageError(
            "finalize_model_grads takes no num_tokens: let the loss function return (sum of losses, number of tokens, "
            "values to log)"
        )
