"""The two linear products of tensor parallelism, and the order of their backwards. A backward starts the collective for
the input's gradient. Then it runs the weight's product or hands it to a Deferral. Then it waits for the collective.
Must not contain: parameters and their owners.

Source: Shoeybi et al., arXiv 1909.08053, section 3; with a split sequence, Korthikanti et al., arXiv 2205.05198,
section 4.2.2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from pipeflow.core.errors import UsageError
from pipeflow.deferral.layers import DeferredWeights, hand_over, lowered
from pipeflow.deferral.products import Copies, LinearProduct
from pipeflow.parallel.transport.group import Group
from pipeflow.tensor.exchange import Finish, gathered, start_sum, start_sum_scatter, sum_scattered
from pipeflow.tensor.regions import SEQUENCE


class Mode(NamedTuple):
    """The mode of a product: its group, whether the sequence is split outside the layer, the deferred weights, and the
    layer's copies in autocast's dtype. Without deferred weights, autograd computes the weight's gradient.
    """

    group: Group
    sequence: bool
    deferred: DeferredWeights | None
    copies: Copies | None = None


def column_linear(input: Tensor, weight: Tensor, bias: Tensor | None, mode: Mode) -> Tensor:
    """The columns of `input @ weight.T + bias` for this rank's rows of the weight.

    `input` is (..., in) and the same on every rank. If the sequence is split, it is this rank's piece (batch, sequence
    / T, in); it is gathered before the product and kept whole for the backward.
    """
    return _product(_Column, input, weight, bias, mode)


def row_linear(input: Tensor, weight: Tensor, bias: Tensor | None, mode: Mode) -> Tensor:
    """`input @ weight.T` summed over the ranks, each with its columns of input and weight, plus the whole bias.

    `input` is (..., in / T). The result is the same on every rank; if the sequence is split, it is this rank's piece.
    """
    return _product(_Row, input, weight, bias, mode)


def _product(function: type[Function], input: Tensor, weight: Tensor, bias: Tensor | None, mode: Mode) -> Tensor:
    if mode.deferred is None and mode.group.size == 1:
        return functional.linear(input, weight, bias)
    if mode.sequence and input.dim() < 3:
        raise UsageError(f"sequence parallelism needs (batch, sequence, hidden), got a shape of {tuple(input.shape)}")
    weights = (None, weight, bias) if mode.deferred is None else mode.deferred.inputs
    output: Tensor = function.apply(*weights, input, mode)
    return output


class _Column(Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor | None, weight: Tensor, bias: Tensor | None, input: Tensor, mode: Mode
    ) -> Tensor:
        input, weight, bias = _operands(ctx, input, weight, bias, mode)
        if mode.sequence and mode.group.size > 1:
            input = gathered(mode.group, input, SEQUENCE)
        ctx.save_for_backward(input, weight)
        made = functional.linear(input, weight, bias)
        # Views returned by a Function must not be modified in place, but models do that to queries.
        return torch.ops.aten._unsafe_view(made, made.shape) if made._is_view() else made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, weight.shape[0])
        finish: Finish | None = None
        if ctx.needs_input_grad[3]:
            finish = _start(ctx.mode, rows.mm(weight.conj()).view(input.shape))
        of_weights = _weight_gradients(ctx, input, rows)
        return None, *of_weights, None if finish is None else finish(), None


def _start(mode: Mode, gradient: Tensor) -> Finish:
    """Starts the sum of the input's gradient over the ranks."""
    if mode.group.size == 1:
        return lambda: gradient
    return start_sum_scatter(mode.group, gradient, SEQUENCE) if mode.sequence else start_sum(mode.group, gradient)


class _Row(Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor | None, weight: Tensor, bias: Tensor | None, input: Tensor, mode: Mode
    ) -> Tensor:
        input, weight, bias = _operands(ctx, input, weight, bias, mode)
        ctx.save_for_backward(input, weight)
        if mode.group.size == 1:
            return functional.linear(input, weight, bias)
        part = functional.linear(input, weight)
        whole = sum_scattered(mode.group, part, SEQUENCE) if mode.sequence else start_sum(mode.group, part)()
        return whole if bias is None else whole.add_(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        if ctx.mode.sequence and ctx.mode.group.size > 1:
            gradient = gathered(ctx.mode.group, gradient, SEQUENCE)
        rows = gradient.reshape(-1, weight.shape[0])
        of_weights = _weight_gradients(ctx, input, rows)
        of_input = rows.mm(weight.conj()).view(input.shape) if ctx.needs_input_grad[3] else None
        return None, *of_weights, of_input, None


def _operands(
    ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, mode: Mode
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands of a forward, in autocast's dtype if that is on."""
    ctx.mode, ctx.deferred = mode, mode.deferred
    return lowered(input, weight, bias, mode.copies)


def _weight_gradients(ctx: Any, input: Tensor, rows: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight and bias for autograd; None for those that are deferred or not wanted.

    Raises UsageError if the backward itself must be differentiated.
    """
    if ctx.deferred is not None:
        return hand_over(ctx, LinearProduct(ctx.deferred.weight, ctx.deferred.trained_bias, input, rows))
    if torch.is_grad_enabled():
        raise UsageError("a backward with create_graph=True cannot run through a tensor-parallel linear layer")
    _, wants_weight, wants_bias, _, _ = ctx.needs_input_grad
    of_weight = rows.t().mm(input.reshape(rows.shape[0], input.shape[-1]).conj()) if wants_weight else None
    return of_weight, rows.sum(0) if wants_bias else None
