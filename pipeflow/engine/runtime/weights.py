"""Weights: what the losses of microbatches are multiplied by. Must not contain: where that is read from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.transport.agreement import all_gather, told_alike
from pipeflow.engine.runtime.microbatch import Batch
from pipeflow.engine.stages.scaling import Scaling

UNKNOWN = (
    "it is not known what {loss} is divided by, so the losses of microbatches cannot be added up to that of the batch: "
    "{why}. Pass weigh=, a function of the labels that returns what the loss of a microbatch is divided by, such as "
    "weigh=lambda labels: (labels != -100).sum() for a mean over the labels that count, or weigh=len for a mean over "
    'samples; or pass a criterion and loss_over="batch", which computes the loss of the whole batch at once'
)


class Weights(NamedTuple):
    """The weights of a batch's microbatches.

    Attributes:
        parts: what the loss of each microbatch is multiplied by.
        whole: the weight of the batch among those of other replicas and in a mean over batches.
        scaling: multiplies the terms of a loss whose terms are divided by different numbers; None for another loss.
        counted: a digest of what `whole` counts, such as samples or labels; 0 if that needs no comparison.
    """

    parts: list[float]
    whole: float
    scaling: Scaling | None = None
    counted: float = 0.0


def weights_of_replicas(context: Context, counted: float, weight: float = 0.0, following: int = 0) -> list[float]:
    """The weights of the batches of all replicas.

    Args:
        context: the context of this rank.
        counted: a digest of what the weight counts, or the numbers that follow.
        weight: of this replica's batch.
        following: how many numbers the replicas exchange next.

    Raises UsageError on all replicas if they count different things: their weights could not be compared, and they
    would exchange rows of different lengths.
    """
    rows = all_gather(context.replicas, [counted, float(following), weight])
    with told_alike(context.replicas):
        if any(row[:2] != rows[0][:2] for row in rows):
            raise UsageError(UNKNOWN.format(loss="the loss", why="it is computed in other ways on other replicas"))
    return [each for *_, each in rows]


def weights_by(batch: Batch, labels: Sequence[object], weigh: Callable[..., float]) -> Weights:
    """The weights of microbatches by `weigh(labels)`. If the total is zero, they are all zero.

    Raises UsageError for a weight that is negative or not finite.
    """
    if all(each is None for each in labels):
        labels = batch.split(batch.inputs)
    return fractions_of([_weight(weigh, part) for part in labels])


def _weight(weigh: Callable[..., float], labels: object) -> float:
    try:
        return float(weigh(labels))
    except Exception as error:
        given = f"the entries {list(labels)}, since none is called labels" if isinstance(labels, dict) else "the labels"
        raise UsageError(f"weigh gets {given}, of a microbatch, and raised {type(error).__name__}: {error}") from error


def fractions_of(weights: list[float]) -> Weights:
    """These weights as fractions of their total. Raises UsageError for one that is negative or not finite."""
    for microbatch, weight in enumerate(weights):
        if not 0 <= weight < float("inf"):
            raise UsageError(f"weigh(labels) returned {weight} for microbatch {microbatch}: a weight must be 0 or more")
    total = sum(weights)
    return Weights([weight / total if total else 0.0 for weight in weights], total)
