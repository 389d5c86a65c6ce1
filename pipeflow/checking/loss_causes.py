"""Causes of a wrong loss, of outputs that are right."""

from __future__ import annotations

from math import log

from pipeflow.checking.factors import counts
from pipeflow.checking.findings import Cause, Difference
from pipeflow.checking.output_differences import disagreeing, values_of, ways
from pipeflow.checking.two_runs import TwoRuns

NEAR = 1e-3  # relative: what a difference may be off a logarithm


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
    return None
