"""The diagnosis: where two recorded runs differ, and why."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeflow.checking.comparing import differences
from pipeflow.checking.elements import where, where_in_rows
from pipeflow.checking.factors import fit, told
from pipeflow.checking.findings import Cause, Difference, Result
from pipeflow.checking.gradient_causes import Gradients, norms, precision
from pipeflow.checking.loss_causes import of_loss
from pipeflow.checking.matching import wholes
from pipeflow.checking.output_causes import Outputs, of_batch, of_weight
from pipeflow.checking.rules import of_rule
from pipeflow.checking.runs import load, norm
from pipeflow.checking.two_runs import TwoRuns
from pipeflow.checking.weighing import CLEAR


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
    found = differences(both)
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
        mine = wholes(both.reference, first.step, kind, None).get(first.parameter)
        theirs = both.candidate_wholes(first.step, kind).get(first.parameter)
        if mine is None or theirs is None or (values := mine.values) is None or (others := theirs.values) is None:
            continue
        told, moved = where(values, others, first.allowed * mine.norm)
        name = "sharding" if moved and cause.name == "unknown" else cause.name
        return replace(cause, name=name, evidence=f"{cause.evidence}; {told}")
    if cause.name in ("sharding", "unknown"):
        both.notes.append(f"record both runs with whole={first.parameter!r} to see which elements of it are wrong")
    return cause


def _output_in_detail(both: TwoRuns, first: Difference, cause: Cause) -> Cause:
    mine, theirs = (both.outputs(run, first.step) for run in (both.reference, both.candidate))
    for key, calls in mine.items():
        is_it = key[0] == first.module and key in theirs
        if is_it and (told := where_in_rows(calls, theirs[key], first.allowed)):
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
    explained = of_loss_alone or Gradients(both, found).cause()
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
    if norm(moved) < 0.01 * norm(change):
        return Cause("stale", f"the step does not change {first.parameter}", "which parameters the optimizer has")
    if whole.spread > 0.01 * norm(change):
        listed = ", ".join(str(copy.rank) for copy in whole.copies)
        what = f"after the step, {first.parameter} differs between ranks {listed}, which hold the same part"
        return Cause("stale", what, "who gathers the new weights, and when")
    if {copy.dtype for copy in whole.copies} != {"torch.float32"} and first.error < 0.3:
        return precision(f"the new {first.parameter} is {first.error:.1%} of its change off")
    times, decay = fit(change, moved), fit(whole.sketch - moved, moved - change)
    if decay.error < CLEAR:
        what = f"the step takes {-decay.factor:.3g} times the weight itself off {first.parameter} more than it must"
        return Cause("optimizer", what, "weight decay: its size, and the groups of parameters that have it", None)
    if times.error < CLEAR:
        what = f"the gradients are right, and the step changes {first.parameter} by {told(times.factor)} as much"
        return Cause("optimizer", what, "the learning rate, and who steps its schedule", round(times.factor, 6))
    factor = norm(moved) / norm(change)
    what = f"the gradients are right, and the step changes {first.parameter} by {told(factor)} as much"
    return Cause("unknown", what, "the learning rate, weight decay and the optimizer's state")
