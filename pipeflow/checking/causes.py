"""Why two recorded runs differ: the cause of the first difference."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import log
from pathlib import Path

from pipeflow.checking.differences import disagreeing, first_differences, values_of, ways
from pipeflow.checking.files import RecordedRun, load
from pipeflow.checking.findings import Cause, Difference, Result
from pipeflow.checking.fits import as_times, fit, wrong_elements, wrong_entries
from pipeflow.checking.gradient_causes import StepGradients, norms, precision
from pipeflow.checking.limits import ABSENT, CLEAR, COARSE_UPDATE, NEAR_LOGARITHM, SAME_RULE, SAME_VALUES, TINY
from pipeflow.checking.output_causes import Outputs
from pipeflow.checking.two_runs import TwoRuns, norm


def check(
    reference: str | os.PathLike[str],
    candidate: str | os.PathLike[str],
    *,
    tolerance: float | None = None,
    exact: str | os.PathLike[str] | None = None,
) -> Result:
    """Compares two recordings: where the second differs from the first by more than rounding, and why.

    Args:
        reference: the folder of the plain run.
        candidate: the folder of the run that is checked.
        tolerance: relative difference to allow; by default one is derived for each value from sizes and dtypes.
        exact: the folder of the plain run in a finer dtype. What rounding explains is then measured with it.

    Raises UsageError if a recording is damaged or cut off, or if the two are of different models or steps.
    """
    finer = None if exact is None else load(Path(exact))
    both = TwoRuns(load(Path(reference)), load(Path(candidate)), tolerance, finer)
    found = first_differences(both)
    cause = _in_detail(both, found[0], _cause(both, found)) if found else None
    return Result(found, cause, both.notes, dict(both.compared), [*both.rounding.order])


def _in_detail(both: TwoRuns, first: Difference, cause: Cause) -> Cause:
    """The cause with the elements that are wrong, if the tensor was recorded whole; otherwise a note that it can be."""
    if first.what == "output" and first.module:
        return _output_in_detail(both, first, cause)
    if first.what not in ("weight", "gradient") or not first.parameter:
        return cause
    kinds = ("before",) if first.what == "weight" else ("unclipped", "gradient")
    for kind in kinds:
        mine = both.mine(first.step, kind).get(first.parameter)
        theirs = both.theirs(first.step, kind).get(first.parameter)
        if mine is None or theirs is None or (values := mine.values) is None or (others := theirs.values) is None:
            continue
        told, moved = wrong_elements(values, others, first.allowed * mine.norm)
        name = "sharding" if moved and cause.name == "unknown" else cause.name
        return replace(cause, name=name, evidence=f"{cause.evidence}; {told}")
    if cause.name in ("sharding", "unknown"):
        both.notes.append(f"record both runs with whole={first.parameter!r} to see which elements of it are wrong")
    return cause


def _output_in_detail(both: TwoRuns, first: Difference, cause: Cause) -> Cause:
    mine, theirs = (both.outputs(run, first.step) for run in (both.reference, both.candidate))
    for key, calls in mine.items():
        is_it = key[0] == first.module and key in theirs
        if is_it and (told := wrong_entries(calls, theirs[key], first.allowed)):
            return replace(cause, evidence=f"{cause.evidence}; {told}")
    if cause.name in ("sharding", "unknown"):
        both.notes.append(f"record both runs with whole={first.module!r} to see where its output is wrong")
    return cause


def _cause(both: TwoRuns, found: Sequence[Difference]) -> Cause:
    first = found[0]
    match first.what:
        case "batch":
            return of_batch(first, both)
        case "weight":
            return of_weight(first, both, "before")
        case "buffer":
            return Cause("stale", f"the buffer {first.parameter} has other values", "who updates this buffer, and when")
        case "output":
            return Outputs(both, first).cause()
        case "norm":
            return norms(both, first)
        case "update":
            return _of_update(both, first)
        case _:
            return _of_gradients(both, found)


def _of_gradients(both: TwoRuns, found: Sequence[Difference]) -> Cause:
    of_loss_alone = of_loss(both, found[0]) if found[0].what == "loss" else None
    explained = of_loss_alone or StepGradients(both, found).cause()
    if explained is not None:
        return explained
    if found[0].what == "loss":
        what, look = f"the loss is {found[0].error:.2%} off", "the loss: what it sums over, and over which ranks"
        return Cause("unknown", f"all outputs are right, and {what}", look)
    name = found[0].parameter
    what = f"the gradient of {name} is {found[0].error:.1%} off, and all outputs are right"
    return Cause("unknown", what, f"the backward from the loss to {name}")


def _of_update(both: TwoRuns, first: Difference) -> Cause:
    """Why an optimizer changed weights otherwise, although the gradients are right."""
    whole, moved = both.changes(both.candidate, first.step)[first.parameter]
    _, change = both.changes(both.reference, first.step)[first.parameter]
    if (rule := of_rule(both, first)) is not None:
        return rule
    if norm(moved) < ABSENT * norm(change):
        return Cause("stale", f"the step does not change {first.parameter}", "which parameters the optimizer has")
    if whole.spread > ABSENT * norm(change):
        listed = ", ".join(map(str, whole.ranks))
        what = f"after the step, {first.parameter} differs between ranks {listed}, which hold the same part"
        return Cause("stale", what, "who gathers the new weights, and when")
    if {copy.dtype for copy in whole.copies} != {"torch.float32"} and first.error < COARSE_UPDATE:
        return precision(f"the new {first.parameter} is {first.error:.1%} of its change off")
    times, decay = fit(change, moved), fit(whole.sketch - moved, moved - change)
    if decay.error < CLEAR:
        what = f"the step takes {-decay.factor:.3g} times the weight itself off {first.parameter} more than it must"
        return Cause("optimizer", what, "weight decay: its size, and the groups of parameters that have it", None)
    if times.error < CLEAR:
        what = f"the gradients are right, and the step changes {first.parameter} by {as_times(times.factor)} as much"
        return Cause("optimizer", what, "the learning rate, and who steps its schedule", round(times.factor, 6))
    factor = norm(moved) / norm(change)
    what = f"the gradients are right, and the step changes {first.parameter} by {as_times(factor)} as much"
    return Cause("unknown", what, "the learning rate, weight decay and the optimizer's state")


def of_batch(first: Difference, both: TwoRuns) -> Cause:
    """The cause of batches that differ."""
    ranks = ", ".join(map(str, first.ranks))
    if first.lacking:
        return Cause(
            "missing_microbatch",
            "all samples that are read are of the reference's batch, and some of these are not read",
            "whether the last microbatch or a part of it is dropped, and how a batch is split over replicas",
        )
    return Cause(
        "order",
        f"the samples that ranks {ranks} read are not those of the reference's batch",
        "samplers, seeds of shuffling, and how a batch is split over replicas and microbatches",
    )


def of_weight(first: Difference, both: TwoRuns, when: str) -> Cause:
    """The cause of weights that differ as the runs begin."""
    mine = both.mine(first.step, when)[first.parameter]
    theirs = both.theirs(first.step, when)[first.parameter]
    listed: Sequence[int] = first.ranks
    if theirs.spread > max(first.allowed * mine.norm, CLEAR * mine.norm):
        tied = len({copy.name for copy in theirs.copies}) > 1
        return Cause(
            "missing_tie" if tied else "sharding",
            f"{first.parameter} differs between ranks {', '.join(map(str, listed))}, which hold the same part",
            "the broadcast of initial weights, and the seeds of ranks",
        )
    if abs(theirs.square / max(mine.square, TINY) - 1.0) < SAME_VALUES:
        return Cause(
            "sharding",
            f"{first.parameter} has the reference's values, but at other places",
            "how parts are cut from the whole: along which dimension, in which order of ranks, and in which blocks",
        )
    others = both.mine(first.step, when)
    same = [name for name, each in others.items() if norm(each.sketch - theirs.sketch) <= first.allowed * theirs.norm]
    if same and mine.copies[0].blocks == others[same[0]].copies[0].blocks:
        return Cause(
            "sharding",
            f"{first.parameter} has the values that {same[0]} has in the reference",
            "which layers, stages or experts a rank takes for its own, and the order in which they are counted",
        )
    return Cause(
        "sharding" if both.stages or theirs.kinds > 1 else "unknown",
        f"{first.parameter} has other values than in the reference as the run begins",
        "which layers and parts a rank takes, the seeds, and the checkpoint that is loaded",
    )


def _labels(run: RecordedRun, step: int) -> list[tuple[float, float]]:
    """How many labels each cross entropy of a step counted, and their sum."""
    return [(event["valid"], float(event["rows"][0])) for _, event in run.events(step, "labels")]


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
        counts_of_rank = [event["valid"] for own, event in both.candidate.events(step, "labels") if own == rank]
        if len(counts_of_rank) != len(values):
            return None
        losses, weights = losses + values, weights + counts_of_rank
    if len({*weights}) < 2:
        return None
    mean = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)
    calls = max(map(len, values_of(both.candidate, step).values()))
    for size in {1, calls, len(losses), len(losses) // calls}:
        if any(abs(mean * size / value - 1.0) < NEAR_LOGARITHM for value in wanted):
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
    for name, size in both.counts(first.step).items():
        for apart in (value - wanted for value in ways(theirs) for wanted in ways(mine)):
            if abs(abs(apart) / log(size) - 1.0) < NEAR_LOGARITHM:
                more = "more" if apart > 0 else "less"
                return Cause(
                    "sharding",
                    f"the loss is log({size:g}) {more} than the reference's, {size:g} being the number of {name}",
                    "whether whole logits are taken for parts of the vocabulary, or parts for the whole",
                )
    return _other_labels(both, first.step) or _own_means(both, first.step)


KEYS = ("lr", "weight_decay", "step")
WORDS = {
    "lr": ("the learning rate", "who steps the schedule of the rate, and on which ranks"),
    "weight_decay": ("the weight decay", "the groups of parameters that have a weight decay"),
    "step": ("the number of steps before", "whether the optimizer has lost its state, or steps twice"),
}
Rule = Mapping[str, float]


def of_rule(both: TwoRuns, first: Difference) -> Cause | None:
    """The rule of a weight's step that is another in the candidate, of any rank; None if they are alike or unknown."""
    mine = [rule for _, rule in _rules(both.reference, first)]
    for rank, rule in _rules(both.candidate, first, both):
        for key in KEYS if mine else ():
            if key in rule and key in mine[0] and abs(rule[key] - mine[0][key]) > SAME_RULE * abs(mine[0][key]):
                what, look = WORDS[key]
                told = f"{what} of {first.parameter} is {rule[key]:.6g} on rank {rank}, and {mine[0][key]:.6g} in the "
                return Cause("optimizer", f"the gradients are right, and {told}reference", look)
    return None


def _rules(run: RecordedRun, first: Difference, both: TwoRuns | None = None) -> Iterable[tuple[int, Rule]]:
    """The rules of the first difference's parameter, by rank; `both` has the names of the candidate."""
    for rank, event in run.events(first.step, "rules"):
        for name, rule in event["rules"].items():
            known = name if both is None else both.names.tensors.get((rank, name))
            if known == first.parameter:
                yield rank, dict(zip(KEYS, rule, strict=True))
