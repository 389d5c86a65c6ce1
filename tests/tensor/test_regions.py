"""Each mapping between whole and split gives what it says, and its gradient is that of the ranks' losses together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pipeflow.core.errors import Failure, UsageError
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.transport.protocol import Alone, Group, LinkError
from pipeflow.tensor import (
    all_to_all,
    copy_to_tensor_region,
    gather_from_sequence_region,
    gather_from_tensor_region,
    gather_to_tensor_region,
    reduce_from_tensor_region,
    reduce_scatter_to_sequence_region,
    scatter_to_sequence_region,
    scatter_to_tensor_region,
)
from pipeflow.testing import run_processes, run_threads
from tests.tensor.ranks import normal, on_ranks, require_near

SIZE, SHAPE = 3, (2, 6, 3)
Region = Callable[[Tensor, Group], Tensor]


def along(dim: int) -> Callable[[list[Tensor]], list[Tensor]]:
    """What every rank's tensors are gathered to, on each."""
    return lambda parts: [torch.cat(parts, dim)] * SIZE


def pieces(dim: int) -> Callable[[list[Tensor]], list[Tensor]]:
    """Of what is the same on every rank."""
    return lambda wholes: list(wholes[0].chunk(SIZE, dim))


def summed(parts: list[Tensor]) -> list[Tensor]:
    return [torch.stack(parts).sum(0)] * SIZE


def sum_pieces(parts: list[Tensor]) -> list[Tensor]:
    return pieces(1)(summed(parts))


def alike(tensors: list[Tensor]) -> list[Tensor]:
    return tensors


Formula = Callable[[list[Tensor]], list[Tensor]]
REGIONS: list[tuple[Region, Formula, Formula, bool, bool]] = [  # forward, backward; is the input, the gradient whole?
    (copy_to_tensor_region, alike, summed, True, False),
    (reduce_from_tensor_region, summed, alike, False, True),
    (scatter_to_tensor_region, pieces(-1), along(-1), True, False),
    (gather_from_tensor_region, along(-1), pieces(-1), False, True),
    (scatter_to_sequence_region, pieces(1), along(1), True, False),
    (gather_from_sequence_region, along(1), pieces(1), False, True),
    (gather_to_tensor_region, along(1), sum_pieces, False, False),
    (reduce_scatter_to_sequence_region, sum_pieces, along(1), False, False),
]


@pytest.mark.parametrize(
    ("region", "forward", "backward", "alike_in", "alike_out"), REGIONS, ids=lambda each: getattr(each, "__name__", "")
)
def test_regions(region: Region, forward: Formula, backward: Formula, alike_in: bool, alike_out: bool) -> None:
    inputs = [normal(*SHAPE, seed=0 if alike_in else rank) for rank in range(SIZE)]
    outputs = forward(inputs)
    gradients = [normal(*output.shape, seed=9 if alike_out else 9 + rank) for rank, output in enumerate(outputs)]
    expected = backward(gradients)

    def rank() -> None:
        group = current_context().tensor
        input = inputs[group.rank].clone().requires_grad_()
        output = region(input, group)
        output.backward(gradients[group.rank])
        require_near(output.detach(), outputs[group.rank])
        require_near(input.grad, expected[group.rank])

    on_ranks(SIZE, rank)


COUNTS = [[2, 0, 1], [3, 1, 0], [0, 0, 0]]  # the rows that each rank sends to each


def rows_go_there_and_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The output has the rows for this rank, the first rank's first; gradients go back to where rows came from."""
    group = current_context().tensor
    inputs = [normal(sum(counts), *shape, seed=rank).to(dtype) for rank, counts in enumerate(COUNTS)]
    received = [counts[group.rank] for counts in COUNTS]
    input = inputs[group.rank].requires_grad_()
    output = all_to_all(input, group, COUNTS[group.rank], received)
    parts = [each.split(counts)[group.rank] for each, counts in zip(inputs, COUNTS, strict=True)]
    assert output.equal(torch.cat(parts))
    weights = torch.arange(1, SIZE + 1).to(dtype)
    output.backward(weights[group.rank].expand_as(output))
    expected = torch.cat([weights[to].expand(count, *shape) for to, count in enumerate(COUNTS[group.rank])])
    assert input.grad is not None
    assert input.grad.equal(expected)


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_rows_of_unequal_numbers_are_exchanged(shape: tuple[int, ...]) -> None:
    run_threads(rows_go_there_and_back, SIZE, shape, torch.complex64, tensor=SIZE)


@pytest.mark.slow
def test_rows_are_exchanged_over_gloo() -> None:
    run_processes(rows_go_there_and_back, SIZE, (2, 3), torch.bfloat16, tensor=SIZE)


def test_counts_that_do_not_fit_are_refused() -> None:
    def rank() -> None:
        group = current_context().tensor
        for send, receive in (([1, 2], [1, 2]), ([1, 3], [1]), ([4], [4])):
            with pytest.raises(UsageError, match="need a number for each of 2 ranks, and those of send_counts add up"):
                all_to_all(normal(4, 3), group, send, receive)

    on_ranks(2, rank)


def test_threads_find_counts_that_contradict_each_other() -> None:
    def rank() -> str:
        context = current_context()
        first = context.rank == 0
        try:
            all_to_all(normal(4, 3), context.tensor, [2, 2], [2, 1 if first else 2])
        except ValueError as error:  # of the rank that comes last
            return context.world.report(Failure(context.rank, str(error))).reason
        except LinkError:
            return ""
        raise AssertionError("all rows arrived")

    found = "rank 0 of the group expects (1, 3) from rank 1, which sends (2, 3)"
    assert found in "".join(on_ranks(2, rank))


def conjugates_are_sent_as_numbers() -> None:
    inputs = [torch.complex(normal(*SHAPE, seed=rank), normal(*SHAPE, seed=rank + 2)) for rank in range(2)]
    group = current_context().tensor
    for region, whole in ((reduce_from_tensor_region, inputs[0] + inputs[1]), (gather_from_tensor_region, None)):
        output = region(inputs[group.rank].conj(), group)
        require_near(output, (torch.cat(inputs, -1) if whole is None else whole).conj())
    piece = reduce_scatter_to_sequence_region(inputs[group.rank].conj(), group)
    require_near(piece, (inputs[0] + inputs[1]).chunk(2, 1)[group.rank].conj())


@pytest.mark.exhaustive
def test_conjugates_are_sent_as_numbers_over_gloo() -> None:
    run_processes(conjugates_are_sent_as_numbers, 2, tensor=2)


@pytest.mark.parametrize("region", [region for region, *_ in REGIONS])
def test_a_group_of_one_has_nothing_to_map(region: Region) -> None:
    input = normal(*SHAPE)
    assert region(input, Alone()) is input


def test_what_has_no_equal_pieces_is_refused() -> None:
    def rank() -> None:
        group = current_context().tensor
        for region in (scatter_to_sequence_region, reduce_scatter_to_sequence_region):
            with pytest.raises(UsageError, match="pad its 5 entries to a multiple of 3"):
                region(normal(2, 5, 3), group)
            with pytest.raises(UsageError, match="needs \\(batch, sequence, hidden\\)"):
                region(normal(6, 3), group)

    on_ranks(3, rank)
