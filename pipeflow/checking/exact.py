"""Rounding that is measured: how far the plain run is from the same run in a finer dtype."""

from __future__ import annotations

from collections import defaultdict
from math import inf, sqrt

from pipeflow.checking.matching import wholes
from pipeflow.checking.rounding import FLOAT32, SAFETY, SKETCH, Rounding, unit
from pipeflow.checking.rows import Called, joined, tail_of, unmatched
from pipeflow.checking.runs import Run, norm
from pipeflow.core.errors import UsageError


def measure(rounding: Rounding, reference: Run, exact: Run) -> None:
    """Lowers the tolerances of a run to SAFETY times its distance from the exact run, in their first steps.

    Raises UsageError if the exact run is of another model, or no finer.
    """
    mine, theirs = (_calls(run) for run in (reference, exact))
    gradients, others = (wholes(run, 0, "gradient", None) for run in (reference, exact))
    if mine.keys() != theirs.keys() or gradients.keys() != others.keys():
        raise UsageError(f"{exact.folder} is a run of another model than {reference.folder}: record the same job")
    if not _coarsest(exact) < _coarsest(reference):
        raise UsageError(f"{exact.folder} is no finer than {reference.folder}: record it with a model of more bits")
    for key, calls in mine.items():
        rows, finer = joined(calls, tail_of(calls[0][1])), joined(theirs[key], tail_of(calls[0][1]))
        if rows is not None and finer is not None and rows.size and len(rows.values) == len(finer.values):
            error = SAFETY * unmatched(rows, finer, inf).error + SKETCH
            rounding.outputs[key[0]] = min(rounding.outputs[key[0]], error)
    errors = {name: norm(whole.sketch - others[name].sketch) for name, whole in gradients.items()}
    total = sqrt(
        sum(error**2 for error in errors.values()) / max(1e-300, sum(each.square for each in gradients.values()))
    )
    for name, whole in gradients.items():
        rounding.gradients[name] = SAFETY * max(errors[name], total * whole.norm) + SKETCH * whole.norm


def _calls(run: Run) -> dict[tuple[str, int], list[Called]]:
    found: defaultdict[tuple[str, int], list[Called]] = defaultdict(list)
    for rank, event in run.events(0, "output"):
        found[event["module"], event["place"]].append((rank, event))
    return dict(found)


def _coarsest(run: Run) -> float:
    return max((unit(event["dtype"]) for _, event in run.events(0, "output")), default=FLOAT32)
