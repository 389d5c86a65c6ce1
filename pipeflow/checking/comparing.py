"""Comparing two runs: the differences of the first step that has any, in the order in which a step comes to them. Must
not contain: why they differ.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeflow.checking.findings import Difference
from pipeflow.checking.gradient_differences import drift, gradients, updates
from pipeflow.checking.output_differences import batches, losses, outputs, weights
from pipeflow.checking.two_runs import TwoRuns


def differences(both: TwoRuns) -> list[Difference]:
    """All differences of the first step that has any."""
    for step in range(both.reference.num_steps):
        found = [*_of_step(both, step)]
        if found:
            return found
        both.rounding.drift += drift(both, step)
    return []


def _of_step(both: TwoRuns, step: int) -> Iterator[Difference]:
    yield from batches(both, step)
    if step == 0:
        yield from weights(both)
    yield from outputs(both, step)
    of_losses, of_gradients = [*losses(both, step)], [*gradients(both, step)]
    if of_losses and not of_gradients:
        both.notes.append("the losses differ, the gradients do not: the loops report the loss in two ways")
    yield from of_losses if of_gradients else ()
    yield from of_gradients
    yield from updates(both, step)
