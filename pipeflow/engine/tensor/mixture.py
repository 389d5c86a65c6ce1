"""A mixture of experts in place of an MLP: a router, and experts that `divide_experts` can divide over expert ranks.
Must not contain: how tokens reach the experts of other ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.tensor.layer import grid_here


class Experts(nn.Module):
    """MLPs without biases, of the form that transformers gives layers of experts.

    Args:
        num_experts: number of MLPs.
        hidden_size: width of tokens.
        inner_size: width of the inner layer of each MLP.
        activation: activation function of the inner layer.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        inner_size: int,
        activation: Callable[[Tensor], Tensor],
        dtype: torch.dtype = torch.float,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.has_gate = self.has_bias = self.is_transposed = False
        self.activation = activation
        self.wide = nn.Parameter(torch.empty(num_experts, inner_size, hidden_size, dtype=dtype))
        self.output = nn.Parameter(torch.empty(num_experts, hidden_size, inner_size, dtype=dtype))

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """The outputs for `tokens` (tokens, hidden): the sum over the experts of each token, whose `indices` and
        `weights` are (tokens, k).
        """
        total = torch.zeros_like(tokens)
        for expert, (wide, output) in enumerate(zip(self.wide.unbind(), self.output.unbind(), strict=True)):
            rows, places = torch.where(indices == expert)
            if len(rows):
                outputs = self.activation(tokens[rows] @ wide.t()) @ output.t()
                total = total.index_add(0, rows, outputs * weights[rows, places, None])
        return total


class MixtureOfExperts(nn.Module):
    """Sends each token to the `top_k` experts that the router rates highest, and adds up their outputs. The weights are
    the softmax of their ratings, as in Mixtral (2401.04088). No token is dropped, and no loss balances the experts.

    Tensor ranks hold it whole and compute the same; expert ranks divide the experts.

    Args:
        hidden_size, inner_size, activation, dtype: as in Experts.
        experts: number of experts.
        top_k: number of experts of each token.
        sequence_parallel: must be False, since tensor ranks would have different tokens.

    Raises UsageError for numbers that do not fit, and where tensor ranks have different tokens or features.
    """

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        experts: int,
        top_k: int,
        activation: Callable[[Tensor], Tensor],
        dtype: torch.dtype = torch.float,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise UsageError(f"top_k must be from 1 to the number of experts, {experts}, got {top_k}")
        if sequence_parallel or grid_here() is not None:
            raise UsageError(
                "a GPT with experts needs all tokens and features on each tensor rank: leave sequence_parallel out, "
                "and launch with tensor_mode='1d'"
            )
        self.top_k = top_k
        self.router = nn.Linear(hidden_size, experts, bias=False, dtype=dtype)
        self.experts = Experts(experts, hidden_size, inner_size, activation, dtype)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Takes and returns hidden states (batch, length, hidden)."""
        tokens = hidden_states.flatten(0, -2)
        rated, indices = self.router(tokens).topk(self.top_k)
        output: Tensor = self.experts(tokens, indices, rated.softmax(-1))
        return output.view(hidden_states.shape)
