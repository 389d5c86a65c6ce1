"""Why two recorded runs differ: the cause of the first difference, of batches, of weights as a run begins, of losses,
and of updates. Those of outputs and gradients have files of their own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite, log
from pathlib import Path

import numpy as np

from pipeflow.checking import limits
from pipeflow.checking.differences import disagreeing, first_differences, other_scalars, ways
from pipeflow.checking.findings import Cause, Difference, Result, explained
from pipeflow.checking.fits import DTYPES, as_times, fit, root_named, spread_of, wrong_elements, wrong_entries
from pipeflow.checking.gradient_causes import MEANS, NORM, Gradients
from pipeflow.checking.optimizer_steps import apart_in_size, keys_of_moments, other_rule, rules
from pipeflow.checking.output_causes import Outputs
from pipeflow.checking.runs import RecordedRun, load, norm
from pipeflow.checking.two_runs import TwoRuns


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
    with np.errstate(invalid="ignore", over="ignore"):  # of values that are not finite, which are told
        found = first_differences(both)
        cause = _in_detail(both, found[0], _cause(both, found)) if found else None
    left_out = len(both.reference.weights(0)) - len(both.weights)
    return Result(found, cause, both.notes, dict(both.compared), [*both.rounding.order], left_out)


def _in_detail(both: TwoRuns, first: Difference, cause: Cause) -> Cause:
    """The cause with the elements that are wrong, if the tensor was recorded whole; otherwise a note that it can be."""
    if first.what == "output" and first.module:
        return _output_in_detail(both, first, cause)
    if first.what not in ("weight", "gradient") or not first.parameter:
        return cause
    kinds = ("before",) if first.what == "weight" else ("unclipped", "gradient")
    for kind in kinds:
        mine, theirs = (run.tensors(first.step, kind).get(first.parameter) for run in both.runs)
        if mine is None or theirs is None or (values := mine.values) is None or (others := theirs.values) is None:
            continue
        told, moved = wrong_elements(values, others, first.allowed * mine.norm)
        name = "sharding" if moved and cause.name == "unknown" else cause.name
        return replace(cause, name=name, evidence=f"{cause.evidence}; {told}")
    if cause.name in ("sharding", "unknown"):
        both.notes.append(f"record both runs with whole={first.parameter!r} to see which elements of it are wrong")
    return cause


def _output_in_detail(both: TwoRuns, first: Difference, cause: Cause) -> Cause:
    mine, theirs = (run.outputs(first.step) for run in both.runs)
    for key, calls in mine.items():
        is_it = key[0] == first.module and key in theirs
        if is_it and (told := wrong_entries(calls, theirs[key], first.allowed)):
            return replace(cause, evidence=f"{cause.evidence}; {told}")
    if cause.name in ("sharding", "unknown"):
        both.notes.append(f"record both runs with whole={first.module!r} to see where its output is wrong")
    return cause


def _cause(both: TwoRuns, found: Sequence[Difference]) -> Cause:
    first = found[0]
    what, name = first.what, first.parameter or first.module
    if not isfinite(first.error):
        return _not_finite(both, first)
    if what == "batch":
        return _of_batch(first)
    if what == "weight":
        return _of_weight(both, first)
    if what == "buffer":
        return Cause("stale", f"the buffer {name} has other values", "who updates this buffer, and when")
    if what == "norm":
        return _of_norm(both, first)
    if what == "update":
        return _of_update(both, first)
    if what == "optimizer":
        return _other_rule(both, first) or _of_moments(both, first)
    if what == "input" and not first.where:
        evidence = f"{name} is given the output of {first.after} in the candidate, and another value in the reference"
        return Cause("formula", evidence, f"what the code before {name} computes")
    if what in ("output", "function", "input"):
        outputs = Outputs(both, first)
        return explained(outputs) or _of_output(first, outputs.inputs)
    of_value = {"loss": _of_loss, "scalar": _of_scalar}.get(what)
    cause = (of_value(both, first) if of_value is not None else None) or explained(Gradients(both, found))
    if cause is not None:
        return cause
    if what == "scalar":
        whose = name or "the whole model"
        return Cause("unknown", f"a number that {whose} returns is {first.error:.2%} off", f"how {whose} computes it")
    if what == "loss":
        evidence, look = f"the loss is {first.error:.2%} off", "the loss: what it sums over, and over which ranks"
        return Cause("unknown", f"all outputs that were compared are right, and {evidence}", look)
    evidence = f"the gradient of {name} is {first.error:.1%} off, and all outputs that were compared are right"
    return Cause("unknown", evidence, f"the backward from the loss to {name}")


def _not_finite(both: TwoRuns, first: Difference) -> Cause:
    """What is said of infinite values and of those that are no numbers: all that follow from them are, too."""
    kinds = {"gradient": ("unclipped", "gradient"), "update": ("after",), "weight": ("before",), "loss": ("loss",)}
    names = [
        name
        for name, run in zip(("reference", "candidate"), both.runs, strict=True)
        for _, event in run.events(first.step, *kinds.get(first.what, ("output", "norm", "moment", "after")))
        if not all(np.all(np.isfinite(event.get(key, 0.0))) for key in ("value", "sketch", "rows"))
    ]
    whose = " of ".join(filter(None, (f"the {first.what}", first.parameter or first.module.removesuffix("loss"))))
    where = " and in the ".join(dict.fromkeys(names))
    look = "what is computed there and just before: divisions, roots, logarithms, and numbers too large for their dtype"
    return Cause("unknown", f"{whose} has values in the {where} that are not finite", look)


def _of_output(first: Difference, inputs: str) -> Cause:
    """What is said of an output without a known cause."""
    if first.what == "input":
        before = f"; {first.after} is right" if first.after else ""
        what = f"what {first.module} is given is {first.error:.1%} off{before}"
        return Cause("unknown", what, f"the code before {first.module}: scales, masks, positions, sums")
    what = f"the output of {first.module} is {first.error:.1%} off; {inputs}"
    return Cause("unknown", what, f"the forward of {first.module}, and what its parallel form does otherwise")


def _of_scalar(both: TwoRuns, first: Difference) -> Cause | None:
    """The cause of a number that a module is given, or of one that it returns, such as its loss; None if the gradients
    must say more.
    """
    for (module, _), values in other_scalars(both, first.step).items():
        if module == first.module:
            wanted, wrong = (", ".join(f"{value:.6g}" for value in each[:4]) for each in values[:2])
            what = f"{module or 'the whole model'} is given {wrong} in the candidate, and {wanted} in the reference"
            return Cause("formula", what, "what its caller computes or passes")
    return _of_loss(both, first)


def _of_norm(both: TwoRuns, first: Difference) -> Cause:
    """The cause of a wrong norm, of gradients that are right."""
    values = [event["value"] for _, event in both.reference.events(first.step, "norm")]
    others = {rank: event["value"] for rank, event in both.candidate.events(first.step, "norm")}
    factor = others[first.ranks[0]] / max(values[0], limits.TINY)
    why = root_named(factor, both.counts(first.step))
    apart = " and differs between ranks" if spread_of([*others.values()]) > limits.DISAGREES else ""
    how = f"{as_times(factor)} the reference's{f', {why}' if why else ''}{apart}"
    return Cause("norm", f"the gradients are right, and their norm is {how}", NORM, round(factor, 6))


def _of_update(both: TwoRuns, first: Difference) -> Cause:
    """Why an optimizer changed weights otherwise, although the gradients are right."""
    name = first.parameter
    (_, change), (whole, moved) = (run.changes(first.step)[name] for run in both.runs)
    if norm(moved) < limits.ABSENT * norm(change):
        return Cause("stale", f"the step does not change {name}", "which parameters the optimizer has")
    if whole.spread > limits.ABSENT * norm(change):
        what = f"{name} differs between ranks {', '.join(map(str, whole.ranks))}, which hold the same part"
        return Cause("stale", f"after the step, {what}", "who gathers the new weights, and when")
    if {copy.dtype for copy in whole.copies} != {"torch.float32"} and first.error < limits.COARSE_UPDATE:
        return Cause("precision", f"the new {name} is {first.error:.1%} of its change off", DTYPES)
    times, decay = fit(change, moved), fit(whole.sketch - moved, moved - change)
    if decay.error < limits.CLEAR:
        what = f"the step takes {-decay.factor:.3g} times the weight itself off {name} more than it must"
        return Cause("optimizer", what, "weight decay: its size, and the groups of parameters that have it")
    factor = times.factor if times.error < limits.CLEAR else norm(moved) / max(norm(change), limits.TINY)
    what = f"the gradients are right, and the step changes {name} by {as_times(factor)} as much"
    if times.error < limits.CLEAR:
        return Cause("optimizer", what, "the learning rate, and who steps its schedule", round(factor, 6))
    return Cause("unknown", what, "the learning rate, weight decay and the optimizer's state")


def _of_batch(first: Difference) -> Cause:
    """The cause of batches that differ."""
    if first.lacking:
        what = "all samples that are read are of the reference's batch, and some of these are not read"
        look = "whether the last microbatch or a part of it is dropped, and how a batch is split over replicas"
        return Cause("missing_microbatch", what, look)
    what = f"the samples that ranks {', '.join(map(str, first.ranks))} read are not those of the reference's batch"
    look = "samplers, seeds of shuffling, and how a batch is split over replicas and microbatches"
    return Cause("order", what, look)


def _of_weight(both: TwoRuns, first: Difference) -> Cause:
    """The cause of weights that differ as the runs begin."""
    name, others = first.parameter, both.reference.weights(0)
    mine, theirs = others[name], both.candidate.weights(0)[name]
    if theirs.spread > max(first.allowed, limits.CLEAR) * mine.norm:
        cause = "missing_tie" if len({copy.name for copy in theirs.copies}) > 1 else "sharding"
        what = f"{name} differs between ranks {', '.join(map(str, first.ranks))}, which hold the same part"
        return Cause(cause, what, "the broadcast of initial weights, and the seeds of ranks")
    if theirs.is_as_large(mine):
        look = "how parts are cut from the whole: along which dimension, in which order of ranks, and in which blocks"
        return Cause("sharding", f"{name} has the reference's values, but at other places", look)
    limit = first.allowed * theirs.norm
    same = [other for other, each in others.items() if norm(each.sketch - theirs.sketch) <= limit]
    if same and mine.copies[0].blocks == others[same[0]].copies[0].blocks:
        look = "which layers, stages or experts a rank takes for its own, and the order in which they are counted"
        return Cause("sharding", f"{name} has the values that {same[0]} has in the reference", look)
    cause = "sharding" if both.stages or theirs.kinds > 1 else "unknown"
    look = "which layers and parts a rank takes, the seeds, and the checkpoint that is loaded"
    return Cause(cause, f"{name} has other values than in the reference as the run begins", look)


def _of_loss(both: TwoRuns, first: Difference) -> Cause | None:
    """The cause that the loss alone tells; None if the gradients must say more."""
    mine, theirs = (run.losses(first.step) for run in both.runs)
    if ranks := disagreeing(both, first.step, theirs):
        values = ", ".join(f"{sum(theirs[rank]):.5g}" for rank in ranks)
        what = f"ranks {', '.join(map(str, ranks))} read the same samples and have the losses {values}"
        look = (
            "what the loss sums or averages over: parts of a vocabulary or sequence need a reduction over their ranks"
        )
        return Cause("missing_reduction", what, look)
    for name, size in both.counts(first.step).items():
        for apart in (value - wanted for value in ways(theirs) for wanted in ways(mine)):
            if abs(abs(apart) / log(size) - 1.0) < limits.NEAR_LOGARITHM:
                more = f"log({size:g}) {'more' if apart > 0 else 'less'} than the reference's"
                what = f"the loss is {more}, {size:g} being the number of {name}"
                look = "whether whole logits are taken for parts of the vocabulary, or parts for the whole"
                return Cause("sharding", what, look)
    if (numbers := _other_numbers(both, first.step)) is not None:
        return Cause("formula", numbers, "the arguments of the loss")
    if (labels := _other_labels(both, first.step)) is not None:
        return Cause("order", labels, "how labels are shifted, masked and split, and which sampler they come from")
    means = _own_means(both, first.step)
    return None if means is None else Cause("masked_tokens", means, MEANS)


def _other_numbers(both: TwoRuns, step: int) -> str | None:
    """Another smoothing, or another label that is ignored, if each run uses one of them."""
    for name in ("label_smoothing", "ignore_index"):
        mine, theirs = ({event["numbers"].get(name) for _, event in run.events(step, "labels")} for run in both.runs)
        if len(mine) == 1 and theirs - mine:
            wrong, wanted = (", ".join(f"{value:g}" for value in sorted(each)) for each in (theirs, mine))
            return f"the cross entropy has {name} {wrong} in the candidate, and {wanted} in the reference"
    return None


def _other_labels(both: TwoRuns, step: int) -> str | None:
    """Labels that do not add up to the reference's, or to a multiple, as those of ranks that read the same do."""
    mine, theirs = (_labels(run, step) for run in both.runs)
    if not mine or not theirs:
        return None
    (many, total), (others, added) = (tuple(map(sum, zip(*each, strict=True))) for each in (mine, theirs))
    times = others / many if many else 0.0
    if times >= 1 and times == round(times) and added == times * total:
        return None
    return f"the labels are others: {others:g} count, where {many:g} do in the reference, and their sums differ"


def _labels(run: RecordedRun, step: int) -> list[tuple[float, float]]:
    """How many labels each cross entropy of a step counted, and their sum."""
    return [(event["valid"], float(event["rows"][0])) for _, event in run.events(step, "labels")]


def _own_means(both: TwoRuns, step: int) -> str | None:
    """Means over own tokens: the losses, weighed by the tokens that each counted, make up the reference's."""
    wanted, theirs = ways(both.reference.losses(step)), both.candidate.losses(step)
    losses: list[float] = []
    weights: list[float] = []
    for rank, values in theirs.items():
        counts_of_rank = [event["valid"] for own, event in both.candidate.events(step, "labels") if own == rank]
        if len(counts_of_rank) != len(values):
            return None
        losses, weights = losses + values, weights + counts_of_rank
    if len({*weights}) < 2:
        return None
    mean = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)
    calls = max(map(len, theirs.values()))
    for size in {1, calls, len(losses), len(losses) // calls}:
        if any(abs(mean * size / value - 1.0) < limits.NEAR_LOGARITHM for value in wanted):
            return (
                f"the losses of {len(losses)} calls, weighed by their {min(weights):g} to {max(weights):g} tokens, "
                "make up the reference's: each is a mean over its own tokens"
            )
    return None


RULE = {  # the numbers of a rule: what they are, and what to look at
    "lr": ("the learning rate", "who steps the schedule of the rate, and on which ranks"),
    "weight_decay": ("the weight decay", "the groups of parameters that have a weight decay"),
    "step": ("the number of steps before", "whether the optimizer has lost its state, or steps twice"),
}


def _other_rule(both: TwoRuns, first: Difference) -> Cause | None:
    """The number of a parameter's step that is another in the candidate, on any rank; None if none is known."""
    name = first.parameter
    mine, theirs = (rules(run, first.step).get(name, []) for run in both.runs)
    for each in theirs if mine else ():
        if (told := other_rule(mine[0], each)) is not None:
            number, wanted, value = told
            what, look = RULE.get(number, (number, "the arguments of the optimizer and of its groups of parameters"))
            evidence = f"{what} of {name} is {value:.6g} on rank {each[0]}, and {wanted:.6g} in the reference"
            return Cause("optimizer", f"the gradients are right, and {evidence}", look)
    return None


def _of_moments(both: TwoRuns, first: Difference) -> Cause:
    """The cause of what an optimizer keeps of a parameter."""
    name, look = first.parameter, "what a checkpoint has of the optimizer, and what is loaded into which rank"
    for key in keys_of_moments(both.reference, first.step):
        mine, theirs = (run.tensors(first.step, "moment", key).get(name) for run in both.runs)
        if mine is None or theirs is None or apart_in_size(mine, theirs) <= limits.OF_MOMENTS:
            continue
        zeros = [copy.rank for copy in theirs.copies if not copy.square]
        how = f"zero on ranks {', '.join(map(str, zeros))}" if zeros else f"{first.error:.0%} off"
        return Cause("optimizer", f"the gradients so far are right, and the optimizer's {key} of {name} is {how}", look)
    return Cause("optimizer", f"what the optimizer keeps of {name} is {first.error:.0%} off", look)
