"""Causes of a wrong loss, of outputs that are right."""

from __future__ import annotations

from math import log

from pipeflow.checking.factors import counts
from pipeflow.checking.findings import Cause, Difference
from pipeflow.checking.output_differences import disagreeing, values_of, ways
from pipeflow.checking.runs import Run
from pipeflow.checking.two_runs import TwoRuns

NEAR = 1e-3  # relative: what a difference may be off a logarithm


def _labels(run: Run, step: int) -> list[tuple[float, float]]:
    """How many labels each cross entropy of a step counted, and their sum."""
    return [(float(event["valid"].reshape(-1)[0]), float(event["rows"][0])) for _, event in run.events(step, "labels")]


def _other_labels(both: TwoRuns, step: int) -> Cause | None:
    """Labels that do not add up to the reference's, or to a multiple, as those of ranks that read the same do."""
    mine, theirs = (_labels(run, step) for run in (both.reference, both.candidate))
    if not mine or not theirs:
        return None
    (many, total), (others, added) = (tuple(map(sum, zip(*each, strict=True))) for each in (mine, theirs))
    times = others / many if many else 0.0
    if times >= 1 and times == round(times) and added == times * total:
        return None
    return Cause(
        "order",
        f"the labels are others: {others:g} count, where {many:g} do in the reference, and their sums differ",
        "how labels are shifted, masked and split, and which sampler they come from",
    )


def _own_means(both: TwoRuns, step: int) -> Cause | None:
    """Means over own tokens: the losses, weighed by the tokens that each counted, make up the reference's."""
    wanted = ways(values_of(both.reference, step))
    losses: list[float] = []
    weights: list[float] = []
    for rank, values in values_of(both.candidate, step).items():
        counts_of_rank = [
            float(event["valid"].reshape(-1)[0]) for own, event in both.candidate.events(step, "labels") if own == rank
        ]
        if len(counts_of_rank) != len(values):
            return None
        losses, weights = losses + values, weights + counts_of_rank
    if len({*weights}) < 2:
        return None
    mean = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)
    calls = max(map(len, values_of(both.candidate, step).values()))
    for size in {1, calls, len(losses), len(losses) // calls}:
        if any(abs(mean * size / value - 1.0) < NEAR for value in wanted):
            return Cause(
                "masked_tokens",
                f"the losses of {len(losses)} calls, weighed by their {min(weights):g} to {max(weights):g} tokens, "
                "make up the reference's: each is a mean over its own tokens",
                "whether the mean over tokens is that of the batch, or one of each microbatch, replica or sequence",
            )
    return None


def of_loss(both: TwoRuns, first: Difference) -> Cause | None:
    """The cause that the loss alone tells; None if the gradients must say more."""
    mine, theirs = (values_of(run, first.step) for run in (both.reference, both.candidate))
    if ranks := disagreeing(both, first.step, theirs):
        values = ", ".join(f"{sum(theirs[rank]):.5g}" for rank in ranks)
        return Cause(
            "missing_reduction",
            f"ranks {', '.join(map(str, ranks))} read the same samples and have the losses {values}",
            "what the loss sums or averages over: parts of a vocabulary or sequence need a reduction over their ranks",
        )
    for name, size in counts(both, first.step).items():
        for apart in (told - wanted for told in ways(theirs) for wanted in ways(mine)):
            if abs(abs(apart) / log(size) - 1.0) < NEAR:
                more = "more" if apart > 0 else "less"
                return Cause(
                    "sharding",
                    f"the loss is log({size:g}) {more} than the reference's, {size:g} being the number of {name}",
                    "whether whole logits are taken for parts of the vocabulary, or parts for the whole",
                )
    return _other_labels(both, first.step) or _own_means(both, first.step)
