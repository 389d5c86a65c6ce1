"""Where steps of optimizers differ: their numbers, what they keep of each parameter, and how they change weights. Must
not contain: why they differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, prod, sqrt

from pipeflow.checking import limits
from pipeflow.checking.files import Array, Blocks
from pipeflow.checking.findings import Difference
from pipeflow.checking.fits import fit
from pipeflow.checking.runs import RecordedRun, WholeTensor, norm
from pipeflow.checking.two_runs import TwoRuns

Rule = tuple[int, str, dict[str, float]]  # a rank, the kind of its optimizer, and the numbers of a parameter's steps


def rules(run: RecordedRun, step: int) -> dict[str, list[Rule]]:
    """The rules of each parameter's step, of each rank that has it; without numbers if they are not known."""
    found: dict[str, list[Rule]] = {}
    for rank, event in run.events(step, "rules"):
        for own, rule in event["rules"].items():
            if (name := run.ranks[rank].names.get(own)) is not None:
                found.setdefault(name, []).append((rank, event["optimizer"], rule))
    return found


def other_rule(mine: Rule, theirs: Rule) -> tuple[str, float, float] | None:
    """The first number of a step that is another in the candidate: its name, and both values. An optimizer of the same
    kind that has no number of steps has lost its state.
    """
    (_, kind, wanted), (_, other, rule) = mine, theirs
    for name, value in wanted.items():
        told = rule.get(name, 0.0 if name == "step" and kind == other else value)
        if not abs(told - value) <= limits.SAME_RULE * abs(value):
            return name, value, told
    return None


def not_seen(both: TwoRuns, step: int) -> set[str]:
    """Parameters that a run trains, and whose gradients it did not see: their optimizer steps copies of them."""
    found: set[str] = set()
    for run in both.runs:
        changed = {name for name, (_, change) in run.changes(step).items() if norm(change)} & {
            *both.reference.parameters
        }
        copied = {name for name, known in rules(run, step).items() if not any(rule for _, _, rule in known)}
        found |= (changed | copied) - {*run.tensors(step, "gradient")}
    return found


def optimizers(both: TwoRuns, step: int) -> Iterator[Difference]:
    """Parameters whose steps follow other numbers, or for which the optimizer keeps other moments."""
    mine, theirs = (rules(run, step) for run in both.runs)
    trained = both.reference.tensors(step, "gradient")
    for name in [each for each in mine if each in theirs and each in trained]:
        both.compared["rules"] += 1
        known = [each for each in theirs[name] if each[2]]
        wrong = {each[0]: told for each in known if (told := other_rule(mine[name][0], each)) is not None}
        if wrong:
            apart = [1.0 if not value else abs(told / value - 1) for _, value, told in wrong.values()]
            yield both.difference(step, "optimizer", name, wrong, max(apart), limits.SAME_RULE)
    for key in keys_of_moments(both.reference, step):
        yield from _moments(both, step, key)


def keys_of_moments(run: RecordedRun, step: int) -> list[str]:
    """What the optimizers of a run keep of parameters, by their names."""
    return [*dict.fromkeys(event["key"] for _, event in run.events(step, "moment"))]


def apart_in_size(whole: WholeTensor, other: WholeTensor) -> float:
    """How far moments are apart, relative to the reference's: by their sketches, of which later steps have none, by
    their norms, or the norms of copies of one part.
    """
    sizes: dict[Blocks, list[float]] = {}
    for copy in other.copies:
        sizes.setdefault(copy.blocks, []).append(sqrt(copy.square))
    uneven = max(1.0 - min(each) / max(each) if max(each) else 0.0 for each in sizes.values())
    return max(whole.apart(other) / whole.norm, abs(other.norm / whole.norm - 1.0), uneven)


def _moments(both: TwoRuns, step: int, key: str) -> Iterator[Difference]:
    """Moments that are far off: the gradients that make them up are compared, but for those before the recording."""
    mine, theirs = (run.tensors(step, "moment", key) for run in both.runs)
    gradients = both.reference.tensors(step - 1, "gradient") if step else {}
    sizes = both.reference.masses(step - 1) if step else {}
    total = sqrt(sum(whole.square for whole in gradients.values()))
    for name, whole in mine.items():
        if (other := theirs.get(name)) is None or not other.covered or not whole.norm:
            continue
        gradient, terms = gradients.get(name), max(sizes.get(name, 0.0), limits.NO_GRADIENT * total)
        is_noise = gradient is not None and both.rounding.gradient() * terms > limits.OF_MOMENTS * gradient.norm
        both.compared["moments"] += 1
        error = apart_in_size(whole, other)
        if not error <= limits.OF_MOMENTS and not is_noise:
            yield both.difference(step, "optimizer", name, other.ranks, error, limits.OF_MOMENTS)


def updates(both: TwoRuns, step: int) -> Iterator[Difference]:
    """Weights and buffers that a step changed otherwise."""
    mine, theirs = (run.changes(step) for run in both.runs)
    sizes, gradients = both.reference.masses(step), both.reference.tensors(step, "gradient")
    total = sqrt(sum(whole.square for whole in gradients.values()))
    for name, (whole, change) in mine.items():
        if name not in theirs or not theirs[name][0].covered:
            continue
        other, moved = theirs[name]
        both.compared["updates"] += 1
        gradient = gradients.get(name)
        terms = max(sizes.get(name, 0.0), limits.NO_GRADIENT * total)
        allowed = _allowed_of_update(both, name, whole, change, gradient, terms)
        error = max(norm(moved - change), other.spread - norm(change) * limits.LARGEST)
        before = whole.sketch - change
        if other.spread > limits.SKETCH * whole.norm and _were_equal(both, step, name):
            error, allowed = max(error, other.spread), limits.SKETCH * whole.norm
        if not error <= allowed or (not both.rounding.given and is_other_rule(whole, before, change, moved)):
            size = norm(change) or max(whole.norm, limits.TINY)
            yield both.difference(step, "update", name, other.ranks, error / size, allowed / size)


def _were_equal(both: TwoRuns, step: int, name: str) -> bool:
    """Whether the ranks' copies of a weight, and of its gradient, are equal to the last bit before a step."""
    run = both.candidate
    found = run.weights(step).get(name), run.tensors(step, "gradient").get(name)
    return all(each is not None and not each.spread for each in found)


def is_other_rule(whole: WholeTensor, before: Array, change: Array, moved: Array) -> bool:
    """Whether a change of a weight is none, a multiple of the right one, or off by a multiple of the weight: what the
    noise of a gradient, however large, does not make of it.
    """
    size = sum(prod(shape) for _, shape in {block for copy in whole.copies for block in copy.blocks})
    least = max(2 * whole.unit, 4 * limits.SKETCH) * whole.norm
    if norm(change) <= limits.LEAST_CHANGE * least or size < 8:
        return False
    times, decay = fit(change, moved), fit(before, moved - change)
    is_scaled = times.error < limits.CLEAR and abs(times.factor - 1.0) > 2 * limits.CLEAR
    is_decayed = decay.error < limits.CLEAR and norm(moved - change) > max(least, limits.CLEAR * norm(change))
    return not norm(moved) or (norm(change) > least and (is_scaled or is_decayed))


def _allowed_of_update(
    both: TwoRuns, name: str, whole: WholeTensor, change: Array, gradient: WholeTensor | None, terms: float
) -> float:
    """How far the changes of a weight may be apart. Optimizers that divide by the gradient's size turn a relative
    error e of gradients into changes of about a share e of the entries.
    """
    rounded = (8 * whole.unit + 4 * limits.SKETCH) * whole.norm
    if both.rounding.given:
        return both.rounding.given * norm(change) + rounded
    if name not in both.reference.parameters:
        return both.rounding.whole * max(norm(change), whole.norm) + rounded
    if gradient is None or not gradient.norm:
        return rounded
    noise = 2.0 * sqrt(both.rounding.gradient() * max(terms, gradient.norm) / gradient.norm)
    if noise > limits.LARGEST:
        return inf
    is_vector = all(len(shape) == 1 for copy in whole.copies for _, shape in copy.blocks)
    return (limits.OF_VECTORS if is_vector else noise) * norm(change) + rounded
