"""The stages that the benchmarks train: one that sleeps, one that computes, one that does nearly nothing."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow.engine.deferral.past import tokens_before


class Sleep(torch.autograd.Function):
    """The identity, taking a given time forward and backward."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        context.seconds = backward_seconds
        time.sleep(forward_seconds)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(context.seconds)
        return gradients[0], None, None


class SleepStage(nn.Module):
    """A stage that computes nothing but takes its time. Set the times on the class."""

    forward_seconds = 0.0
    backward_seconds = 0.0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        seconds = self.forward_seconds, self.backward_seconds
        output: Tensor = Sleep.apply(hidden * self.scale, *seconds)  # type: ignore[no-untyped-call]  # as torch has it
        return output


class TokenStage(nn.Module):
    """A stage that takes its time for each token; the first entry of a sample is the number of its tokens. Set the
    times on the class.
    """

    forward_seconds = 0.0
    backward_seconds = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, samples: Tensor) -> Tensor:
        tokens = float(samples[:, 0].sum())
        scaled = torch.cat([samples[:, :1], samples[:, 1:] * self.scale], dim=1)
        seconds = tokens * self.forward_seconds, tokens * self.backward_seconds
        output: Tensor = Sleep.apply(scaled, *seconds)  # type: ignore[no-untyped-call]  # as torch has it
        return output


class SlicedTokens(nn.Module):
    """A stage that takes its time for each token and its attention, in (samples, tokens, 1) that may be sliced. Set
    the times of a token on the class; `quadratic` is what attention adds per square of a length.
    """

    shares_tokens = True
    forward_seconds = 0.0
    backward_seconds = 0.0

    def __init__(self, quadratic: float) -> None:
        super().__init__()
        self.quadratic = quadratic
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, samples: Tensor) -> Tensor:
        many, length = samples.shape[:2]
        start = tokens_before(self)
        tokens = many * (length + self.quadratic * ((start + length) ** 2 - start**2))
        seconds = tokens * self.forward_seconds, tokens * self.backward_seconds
        output: Tensor = Sleep.apply(samples * self.scale, *seconds)  # type: ignore[no-untyped-call]  # as torch has it
        return output


class TokenMean(nn.Module):
    """The mean of an output per token, as a loss whose labels belong to their own tokens."""

    weigh = staticmethod(Tensor.numel)

    def forward(self, output: Tensor, labels: Tensor) -> Tensor:
        return output.sum() / labels.numel()

    def shifted(self, labels: Tensor) -> Tensor:
        """The labels themselves."""
        return labels

    @property
    def of_shifted(self) -> TokenMean:
        """The loss of some tokens."""
        return self


class TrivialStage(nn.Module):
    """A stage of one multiplication, so that what a step costs is what runs it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.scale


class LinearStage(nn.Module):
    """A stage of one small linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.layer(hidden)
        return output


class Block(nn.Module):
    """A pre-norm transformer block over (batch, length, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.perceptron_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        joint = self.query_key_value(self.attention_norm(hidden))
        query, key, value = joint.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        widened: Tensor = self.down(functional.gelu(self.up(self.perceptron_norm(hidden))))
        return hidden + widened
