"""Where two runs differ: the differences of the first step that has any, in the order in which a step comes to them.
Must not contain: why they differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import inf, prod, sqrt

import numpy as np

from pipeflow.checking import limits
from pipeflow.checking.files import MOST_TENSORS, Array, Blocks
from pipeflow.checking.findings import Difference
from pipeflow.checking.fits import fit
from pipeflow.checking.runs import (
    Called,
    Key,
    OutputRows,
    WholeTensor,
    by_group,
    joined,
    norm,
    numel,
    owner,
    square,
    summed,
    tail_of,
    unmatched,
)
from pipeflow.checking.two_runs import TwoRuns


def batches(both: TwoRuns, step: int) -> Iterator[Difference]:
    """Batches whose samples are not the same, in any order. What another stage is given, such as positions that the
    plain model makes itself, is no batch, if the reference has nothing of it and the readers have all that it has.
    """
    for place in range(MOST_TENSORS):
        mine, theirs = (
            [(rank, event) for rank, event in run.events(step, "batch") if event["place"] == place] for run in both.runs
        )
        if not mine or not theirs or {tail_of(each) for _, each in mine} != {tail_of(each) for _, each in theirs}:
            continue
        rows, others = joined(mine, tail_of(mine[0][1])), joined(theirs, tail_of(mine[0][1]))
        if rows is None or others is None:
            continue
        both.compared["batches"] += 1
        apart = unmatched(rows, others, both.rounding.given or limits.SKETCH)
        ranks = _ranks(others, apart.candidate)
        readers = _ranks(others, [index for index in range(len(others.values)) if index not in apart.candidate])
        stages = [both.held[rank] for rank in readers]
        if apart.reference or any(rank in readers or both.held[rank] in stages for rank in ranks):
            ranks = ranks or {rank for rank, _ in theirs}
            lacking = not apart.candidate and len(others.values) < len(rows.values)
            yield both.difference(step, "batch", "", ranks, apart.error, limits.SKETCH, lacking=lacking)


def weights(both: TwoRuns) -> Iterator[Difference]:
    """Weights and buffers that differ as a run begins."""
    mine, theirs = (run.weights(0) for run in both.runs)
    for name, whole in mine.items():
        other = theirs.get(name)
        if other is None or not other.covered:
            continue
        both.compared["weights"] += 1
        rounded = 4 * max(whole.unit, other.unit) + limits.SKETCH
        allowed, size = both.rounding.given or rounded, max(whole.norm, 1e-30)
        error = whole.apart(other) / size
        if not error <= allowed:
            yield both.difference(0, "weight", name, other.ranks, error, allowed)


def outputs(both: TwoRuns, step: int) -> Iterator[Difference]:
    """Outputs that differ, in the order of the forward. Those of a module of which a rank has a part count only if
    later ones are wrong, too: they may be terms of a sum, or those of a stage.
    """
    mine, theirs = (run.outputs(step) for run in both.runs)
    partial: Difference | None = None
    of_parts: list[Difference] = []
    for key, events in mine.items():
        if key not in theirs:
            continue
        is_whole = both.is_whole(key[0], theirs[key])
        found = output(both, step, key, events, theirs[key])
        if not is_whole:
            of_parts += [found] if found is not None and found.lacking else []
        elif found is None:
            of_parts = []
        elif found.partial:
            partial = found
        else:
            if partial is not None and _ranks_disagree(both, theirs[key], both.places(partial.module)):
                yield partial
            yield from of_parts
            partial, of_parts = None, []
            yield found


def output(both: TwoRuns, step: int, key: Key, mine: Sequence[Called], theirs: Sequence[Called]) -> Difference | None:
    """How an output differs; with `partial` if the ranks' outputs add up to it; None if it is alike."""
    module, _ = key
    allowed = both.rounding.output(module)
    tail = max((tuple((event.get("whole") or event["shape"])[1:]) for _, event in mine), key=prod)
    rows, others = joined(mine, tail), joined(theirs, tail)
    if rows is None or others is None or not rows.size:
        return _total(both, step, module, mine, theirs, allowed)
    both.compared["outputs"] += 1
    apart = unmatched(rows, others, allowed)
    if not apart.reference and not apart.candidate:
        return None
    ranks = _ranks(others, apart.candidate) or {rank for rank, _ in theirs}
    partial, lacking = _adds_up(both, module, rows, theirs, allowed), bool(apart.reference)
    return both.difference(step, "output", module, ranks, apart.error, allowed, partial=partial, lacking=lacking)


def _total(
    both: TwoRuns, step: int, module: str, mine: Sequence[Called], theirs: Sequence[Called], allowed: float
) -> Difference | None:
    """Compares norms alone, of outputs whose parts lie at places that are not known."""
    times = numel(theirs) / max(1, numel(mine))
    if (
        abs(times - round(times)) > 1e-9
        or times < 1
        or any(event.get("partial") for _, event in theirs)
        or not square(mine)
    ):
        return None
    error = abs(sqrt(square(theirs) / times / square(mine)) - 1.0)
    both.compared["outputs"] += 1
    if error <= 2 * allowed:
        return None
    return both.difference(step, "output", module, (rank for rank, _ in theirs), error, 2 * allowed)


def _adds_up(both: TwoRuns, module: str, rows: OutputRows, theirs: Sequence[Called], allowed: float) -> bool:
    """Whether the outputs of ranks with different parts of the module's weight add up to the reference's, up to a
    bias that each of them adds.
    """
    places = both.places(module)
    if len(set(places.values())) < 2 or not {rank for rank, _ in theirs} <= set(places):
        return False
    groups = by_group(theirs, places)
    total = summed(groups, rows.tail)
    if total is None or min(map(len, groups)) < 2 or len(total.values) % len(rows.values):
        return False
    apart = total.values[: len(rows.values), :8] - rows.values[:, :8]
    shifted = OutputRows(total.values - np.append(np.median(apart, axis=0), 0.0), total.ranks, total.calls, rows.tail)
    alike = unmatched(rows, total, limits.SUMMED * allowed)
    biased = unmatched(rows, shifted, limits.SUMMED * allowed)
    return not alike.reference or (not biased.reference and f"{module}.bias" in both.reference.first)


def _ranks_disagree(both: TwoRuns, theirs: Sequence[Called], places: dict[int, Blocks]) -> bool:
    """Whether ranks with different parts of a weight have different outputs in the same call."""
    if not {rank for rank, _ in theirs} <= set(places):
        return False
    groups = ([event["rows"] for _, event in group] for group in by_group(theirs, places))
    return any(
        each.shape != group[0].shape or norm(each - group[0]) > limits.DISAGREES * norm(group[0])
        for group in groups
        for each in group[1:]
    )


def losses(both: TwoRuns, step: int) -> Iterator[Difference]:
    """The loss, if no way of adding up those of microbatches and ranks gives the reference's."""
    mine, theirs = (run.losses(step) for run in both.runs)
    if not mine or not theirs:
        return
    both.compared["losses"] += 1
    if ranks := disagreeing(both, step, theirs):
        apart = max(sum(theirs[rank]) for rank in ranks) / min(sum(theirs[rank]) for rank in ranks) - 1.0
        yield both.difference(step, "loss", "loss", ranks, abs(apart), 0.0)
        return
    wanted, told = ways(mine), ways(theirs)
    error = min(abs(one - other) / max(abs(one), 1e-12) for one in wanted for other in told)
    allowed = both.rounding.output("") + limits.LOSS
    if not error <= allowed:
        yield both.difference(step, "loss", "loss", theirs, error, allowed)


def _ranks(rows: OutputRows, indices: Sequence[int]) -> set[int]:
    return {rank for index in indices for rank in rows.ranks[index]}


def disagreeing(both: TwoRuns, step: int, losses: dict[int, list[float]]) -> tuple[int, ...]:
    """Ranks that read the same samples and have different losses."""
    read: defaultdict[int, list[bytes]] = defaultdict(list)
    for rank, event in both.candidate.events(step, "batch"):
        read[rank].append(event["rows"].tobytes())
    same: defaultdict[tuple[bytes, ...], list[int]] = defaultdict(list)
    for rank, rows in read.items():
        if rank in losses:
            same[tuple(rows)].append(rank)
    allowed = both.rounding.output("") + limits.LOSS
    for ranks in same.values():
        sums = [sum(losses[rank]) for rank in ranks]
        if max(sums) - min(sums) > allowed * max(map(abs, sums)):
            return tuple(ranks)
    return ()


def ways(losses: dict[int, list[float]]) -> set[float]:
    """A step's loss as loops may mean it: each rank's losses added up or their mean, over ranks the mean or the sum."""
    sums = [sum(values) for values in losses.values()]
    means = [sum(values) / len(values) for values in losses.values()]
    return {sum(sums) / len(sums), sum(sums), sum(means) / len(means)}


def gradients(both: TwoRuns, step: int) -> Iterator[Difference]:
    """Gradients that differ, before they are clipped and after, and their norm."""
    both_clip = all(any(run.events(step, "unclipped")) for run in both.runs)
    for kind in ("unclipped", "gradient") if both_clip else ("gradient",):
        found = [*_gradients_of(both, step, kind)]
        yield from found
        if found:
            return
        if kind == "unclipped":
            yield from _norms(both, step)


def _gradients_of(both: TwoRuns, step: int, kind: str) -> Iterator[Difference]:
    mine, theirs = (run.tensors(step, kind) for run in both.runs)
    sizes = both.reference.masses(step)
    total = sqrt(sum(whole.square for whole in mine.values()))
    for name in sorted(mine, key=lambda name: _backward_order(both, name)):
        whole, other = mine[name], theirs.get(name)
        if name in both.lacking:
            continue
        both.compared["gradients"] += 1
        terms = max(whole.norm, sizes.get(name, 0.0), limits.NO_GRADIENT * total)
        allowed = both.rounding.gradient() * terms
        if not both.rounding.given and name in both.rounding.gradients:
            allowed = min(allowed, both.rounding.gradients[name] + 2.0 * both.rounding.drift * terms)
        if other is None:
            if whole.norm > allowed:
                ranks = [rank for rank, held in both.held.items() if name in held]
                yield both.difference(step, "gradient", name, ranks, 1.0, allowed / whole.norm)
            continue
        if not other.covered:
            both.notes.append(f"the ranks' parts of {name} do not make it up")
            continue
        error = whole.apart(other)
        if not error <= allowed:
            size = max(whole.norm, limits.TINY)
            yield both.difference(step, "gradient", name, other.ranks, error / size, allowed / size)


def _backward_order(both: TwoRuns, parameter: str) -> tuple[int, str]:
    """Gradients of late modules come first."""
    module = owner(parameter)
    while module and module not in both.rounding.order:
        module = owner(module)
    return -both.rounding.order.get(module, -1), parameter


def _norms(both: TwoRuns, step: int) -> Iterator[Difference]:
    mine, theirs = ([*run.events(step, "norm")] for run in both.runs)
    if not mine or not theirs:
        return
    both.compared["norms"] += 1
    wanted = mine[0][1]["value"]
    allowed = both.rounding.gradient()
    apart = {rank: abs(event["value"] / wanted - 1.0) for rank, event in theirs}
    wrong = [rank for rank, error in apart.items() if not error <= allowed]
    if wrong:
        yield both.difference(step, "norm", "", wrong, max(apart.values()), allowed)


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


def drift(both: TwoRuns, step: int) -> float:
    """What the weights may differ by after a step, relative to their size."""
    changes = both.reference.changes(step)
    gradient = min(limits.LARGEST, 2.0 * sqrt(both.rounding.gradient()))
    moved = sum(norm(change) ** 2 for name, (_, change) in changes.items() if name in both.reference.parameters)
    size = sum(whole.square for name, (whole, _) in changes.items() if name in both.reference.parameters)
    return 4.0 * gradient * sqrt(moved / size) if size else 0.0


def first_differences(both: TwoRuns) -> list[Difference]:
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
