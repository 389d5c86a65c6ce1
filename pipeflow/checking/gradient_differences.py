"""Where gradients differ, in the order of the backward; their norm, and what the optimizer made of them."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, prod, sqrt

from pipeflow.checking.factors import fit
from pipeflow.checking.files import Array
from pipeflow.checking.findings import Difference
from pipeflow.checking.matching import wholes
from pipeflow.checking.rounding import SKETCH, masses, unit
from pipeflow.checking.runs import Whole, norm
from pipeflow.checking.two_runs import TwoRuns
from pipeflow.checking.weighing import CLEAR

LEAST_CHANGE = 0.05  # of a dtype's rounding: a change that is not that of single entries
LARGEST = 0.5  # relative tolerance above which an update is not compared: adaptive optimizers make it of noise
OF_VECTORS = 1.2  # relative tolerance of updates of biases, of which a part, that of keys, is always such noise


def gradients(both: TwoRuns, step: int) -> Iterator[Difference]:
    """Gradients that differ, before they are clipped and after, and their norm."""
    kinds = ("unclipped", "gradient") if _clipped(both, step) else ("gradient",)
    for kind in kinds:
        found = [*_of_gradients(both, step, kind)]
        yield from found
        if found:
            return
        if kind == "unclipped":
            yield from _norms(both, step)


def _clipped(both: TwoRuns, step: int) -> bool:
    return all(any(True for _ in run.events(step, "unclipped")) for run in (both.reference, both.candidate))


def _of_gradients(both: TwoRuns, step: int, kind: str) -> Iterator[Difference]:
    mine, theirs = wholes(both.reference, step, kind, None), both.candidate_wholes(step, kind)
    sizes = masses(both.reference, step, both.names.first)
    total = sqrt(sum(whole.square for whole in mine.values()))
    for name in sorted(mine, key=lambda name: _backward_order(both, name)):
        whole, other = mine[name], theirs.get(name)
        if name in both.names.lacking:
            continue
        both.compared["gradients"] += 1
        terms = max(whole.norm, sizes.get(name, 0.0), 1e-5 * total)
        allowed = both.gradient_tolerance() * terms
        if not both.rounding.given and name in both.rounding.gradients:
            allowed = min(allowed, both.rounding.gradients[name] + 2.0 * both.rounding.drift * terms)
        if other is None:
            if whole.norm > allowed:
                ranks = tuple(sorted(rank for rank, held in both.held.items() if name in held))
                yield Difference(
                    step,
                    "gradient",
                    both.owner(name),
                    name,
                    both.stage_of(ranks, name),
                    ranks,
                    1.0,
                    allowed / whole.norm,
                )
            continue
        if not other.covered:
            both.notes.append(f"the ranks' parts of {name} do not make it up")
            continue
        error = max(norm(whole.sketch - other.sketch), other.spread)
        if not error <= allowed:
            size = max(whole.norm, 1e-300)
            yield both.of_tensor(step, "gradient", name, other, error / size, allowed / size)


def _backward_order(both: TwoRuns, parameter: str) -> tuple[int, str]:
    """Gradients of late modules come first."""
    module = both.owner(parameter)
    while module and module not in both.rounding.order:
        module = both.owner(module)
    return -both.rounding.order.get(module, -1), parameter


def _norms(both: TwoRuns, step: int) -> Iterator[Difference]:
    mine, theirs = (
        [(rank, event) for rank, event in run.events(step, "norm")] for run in (both.reference, both.candidate)
    )
    if not mine or not theirs:
        return
    both.compared["norms"] += 1
    wanted = float(mine[0][1]["value"].reshape(-1)[0])
    allowed = both.gradient_tolerance()
    apart = {rank: abs(float(event["value"].reshape(-1)[0]) / wanted - 1.0) for rank, event in theirs}
    wrong = tuple(rank for rank, error in apart.items() if not error <= allowed)
    if wrong:
        yield Difference(step, "norm", "", "", both.stage_of(wrong), wrong, max(apart.values()), allowed)


def updates(both: TwoRuns, step: int) -> Iterator[Difference]:
    """Weights and buffers that a step changed otherwise."""
    mine, theirs = both.changes(both.reference, step), both.changes(both.candidate, step)
    sizes, gradients = (
        masses(both.reference, step, both.names.first),
        wholes(both.reference, step, "gradient", None),
    )
    total = sqrt(sum(whole.square for whole in gradients.values()))
    for name, (whole, change) in mine.items():
        if name not in theirs or not theirs[name][0].covered:
            continue
        other, moved = theirs[name]
        both.compared["updates"] += 1
        gradient = gradients.get(name)
        allowed = _of_update(both, name, whole, change, gradient, max(sizes.get(name, 0.0), 1e-5 * total))
        error = max(norm(moved - change), other.spread - norm(change) * LARGEST)
        before = whole.sketch - change
        if other.spread > SKETCH * whole.norm and _were_equal(
            both, step, name
        ):  # copies that were equal, with equal gradients
            error, allowed = max(error, other.spread), SKETCH * whole.norm
        if not error <= allowed or (not both.rounding.given and is_other_rule(whole, before, change, moved)):
            size = norm(change) or max(whole.norm, 1e-300)
            yield both.of_tensor(step, "update", name, other, error / size, allowed / size)


def _were_equal(both: TwoRuns, step: int, name: str) -> bool:
    """Whether the ranks' copies of a weight, and of its gradient, are equal to the last bit before a step."""
    before = both.candidate_wholes(step - 1, "after") if step else both.candidate_wholes(0, "before")
    found = before.get(name), both.candidate_wholes(step, "gradient").get(name)
    return all(each is not None and not each.spread for each in found)


def is_other_rule(whole: Whole, before: Array, change: Array, moved: Array) -> bool:
    """Whether a change of a weight is none, a multiple of the right one, or off by a multiple of the weight: what the
    noise of a gradient, however large, does not make of it.
    """
    size = sum(prod(shape) for _, shape in {block for copy in whole.copies for block in copy.blocks})
    least = max(2 * max(unit(copy.dtype) for copy in whole.copies), 4 * SKETCH) * whole.norm
    if norm(change) <= LEAST_CHANGE * least or size < 8:
        return False
    times, decay = fit(change, moved), fit(before, moved - change)
    is_scaled = times.error < CLEAR and abs(times.factor - 1.0) > 2 * CLEAR
    is_decayed = decay.error < CLEAR and norm(moved - change) > max(least, CLEAR * norm(change))
    return not norm(moved) or (norm(change) > least and (is_scaled or is_decayed))


def _of_update(both: TwoRuns, name: str, whole: Whole, change: Array, gradient: Whole | None, terms: float) -> float:
    """How far the changes of a weight may be apart. Optimizers that divide by the gradient's size turn a relative
    error e of gradients into changes of about a share e of the entries.
    """
    rounded = (8 * max(unit(copy.dtype) for copy in whole.copies) + 4 * SKETCH) * whole.norm
    if both.rounding.given:
        return both.rounding.given * norm(change) + rounded
    if not both.is_parameter(name):
        return both.rounding.whole * max(norm(change), whole.norm) + rounded
    if gradient is None or not gradient.norm:
        return rounded
    noise = 2.0 * sqrt(both.gradient_tolerance() * max(terms, gradient.norm) / gradient.norm)
    if noise > LARGEST:
        return inf
    is_vector = all(len(shape) == 1 for copy in whole.copies for _, shape in copy.blocks)
    return (OF_VECTORS if is_vector else noise) * norm(change) + rounded


def drift(both: TwoRuns, step: int) -> float:
    """What the weights may differ by after a step, relative to their size."""
    changes = both.changes(both.reference, step)
    gradient = min(LARGEST, 2.0 * sqrt(both.gradient_tolerance()))
    moved = sum(norm(change) ** 2 for name, (_, change) in changes.items() if both.is_parameter(name))
    size = sum(whole.square for name, (whole, _) in changes.items() if both.is_parameter(name))
    return 4.0 * gradient * sqrt(moved / size) if size else 0.0
