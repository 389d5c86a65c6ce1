"""Where two runs differ: the differences of the first step that has any, in the order in which a step comes to them.
Must not contain: why they differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite, prod, sqrt

import numpy as np

from pipeflow.checking import limits
from pipeflow.checking.files import INPUT, INSIDE, MOST_TENSORS, Blocks
from pipeflow.checking.findings import Difference
from pipeflow.checking.optimizer_steps import not_seen, optimizers, updates
from pipeflow.checking.runs import (
    Called,
    Key,
    OutputRows,
    RecordedRun,
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
from pipeflow.checking.two_runs import TwoRuns, names_listed

Outputs = Mapping[Key, Sequence[Called]]


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
    later ones are wrong, too: they may be terms of a sum, or those of a stage. Functions and inputs within a module
    count only if it, or what follows, is wrong: another way to compute the same is none.
    """
    mine, theirs = (run.outputs(step) for run in both.runs)
    partial: Difference | None = None
    waiting: list[tuple[str | None, Difference]] = []  # with the module that is still to come, in which they are
    after = ""  # what is right
    for key, events in mine.items():
        if key not in theirs or not _as_often(key[0], mine, theirs):
            continue
        name, inside, _ = key[0].partition(INSIDE)
        found = output(both, step, key, events, theirs[key])
        if found is None and (step, key[0]) in both.alike and not key[0].endswith(INPUT):
            after = key[0]
        if inside:
            if found is not None:
                spot = next((event["where"] for _, event in theirs[key]), "")
                waiting.append((name, replace(found, after=after, where=spot)))
            continue
        if both.is_whole(name, theirs[key]):
            if found is None:
                waiting = [(owner, each) for owner, each in waiting if owner not in (None, name)]
            elif found.partial:
                partial = found
            else:
                if partial is not None and _ranks_disagree(both, theirs[key], both.places(partial.module)):
                    yield partial
                yield from (each for _, each in waiting)
                yield from _given_otherwise(both, step, name, mine, theirs)
                yield from given_scalars(both, step, name)
                partial, waiting = None, []
                yield found
        elif found is not None and found.lacking:
            waiting.append((None, found))
        waiting = [(None if owner == name else owner, each) for owner, each in waiting]


def _given_otherwise(both: TwoRuns, step: int, name: str, mine: Outputs, theirs: Outputs) -> Iterator[Difference]:
    """A module that is given a right output, but not the one that the reference gives it."""
    pairs = zip(both.inputs(mine[name, 0], both.reference), both.inputs(theirs[name, 0], both.candidate), strict=False)
    for one, other in pairs:
        if one != other and (step, other) in both.alike and (one, 0) in mine and (other, 0) in theirs:
            found = output(both, step, (one, 0), mine[one, 0], theirs[other, 0])
            if found is not None:
                told = both.difference(
                    step, "output", f"{name}{INSIDE}{INPUT}", found.ranks, found.error, found.allowed
                )
                yield replace(told, after=other)


def _as_often(name: str, mine: Outputs, theirs: Outputs) -> bool:
    """Whether both runs call a function of a module equally often: otherwise they compute in other ways."""
    name, number, _ = name.partition("#")
    if not number:
        return True
    one, other = (
        {each for each, _ in calls if each.startswith(f"{name}#") and not each.endswith(INPUT)}
        for calls in (mine, theirs)
    )
    return len(one) == len(other)


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
        both.alike.add((step, module))
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
        both.alike.add((step, module))
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


def given_scalars(both: TwoRuns, step: int, module: str) -> Iterator[Difference]:
    """Numbers that a module is given, if the reference has none like them: only a wrong output makes them count."""
    for (name, _), (known, told, ranks) in other_scalars(both, step).items():
        if name == module:
            error = max(min(abs(value - each) / max(abs(each), limits.TINY) for each in known) for value in told)
            yield both.difference(step, "scalar", module, ranks, error, both.rounding.output(module))


def other_scalars(both: TwoRuns, step: int) -> dict[Key, tuple[list[float], list[float], list[int]]]:
    """For modules and places of arguments, the numbers of the reference, those of the candidate that are unlike them,
    and the candidate's ranks.
    """
    mine, theirs = (_scalars(run, step, "given") for run in both.runs)
    found = {}
    for key in [each for each in mine if each in theirs]:
        known, told = (sorted({value for values in run[key].values() for value in values}) for run in (mine, theirs))
        allowed = both.rounding.output(key[0])
        if other := [value for value in told if all(abs(value - each) > allowed * abs(each) for each in known)]:
            found[key] = known, other, [*theirs[key]]
    return found


def returned_scalars(both: TwoRuns, step: int) -> Iterator[Difference]:
    """Numbers that modules return, if no way of adding up those of microbatches and ranks gives the right one."""
    mine, theirs = (_scalars(run, step, "returned") for run in both.runs)
    for key in [each for each in mine if each in theirs]:
        both.compared["scalars"] += 1
        error, allowed = nearest(mine[key], theirs[key]), both.rounding.output(key[0]) + limits.LOSS
        if not error <= allowed:
            yield both.difference(step, "scalar", key[0], theirs[key], error, allowed)


def _scalars(run: RecordedRun, step: int, way: str) -> dict[Key, dict[int, list[float]]]:
    """The numbers that modules are given, or return: of each module and place, those of each rank."""
    found: dict[Key, dict[int, list[float]]] = {}
    for rank, event in run.events(step, "scalar"):
        if event["way"] == way and isfinite(event["value"]):
            key = run.ranks[rank].module(event["module"]), event["place"]
            found.setdefault(key, {}).setdefault(rank, []).append(event["value"])
    return found


def losses(both: TwoRuns, step: int) -> Iterator[Difference]:
    """The loss, if no way of adding up those of microbatches and ranks gives the reference's."""
    mine, theirs = (run.losses(step) for run in both.runs)
    if not mine or not theirs:
        return
    both.compared["losses"] += 1
    if ranks := disagreeing(both, step, theirs):
        sums = [sum(theirs[rank]) for rank in ranks]
        apart = (max(sums) - min(sums)) / max(map(abs, sums))
        yield both.difference(step, "loss", "loss", ranks, apart, 0.0)
        return
    error = nearest(mine, theirs)
    allowed = both.rounding.output("") + limits.LOSS
    if not error <= allowed:
        yield both.difference(step, "loss", "loss", theirs, error, allowed)


def _ranks(rows: OutputRows, indices: Sequence[int]) -> set[int]:
    return {rank for index in indices for rank in rows.ranks[index]}


def disagreeing(both: TwoRuns, step: int, losses: dict[int, list[float]]) -> tuple[int, ...]:
    """Ranks of one stage that read the same samples and have different losses."""
    read: defaultdict[int, list[bytes]] = defaultdict(list)
    for rank, event in both.candidate.events(step, "batch"):
        read[rank].append(event["rows"].tobytes())
    same: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank, rows in read.items():
        if rank in losses:
            same[(both.stage_of([rank]), *rows)].append(rank)
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


def nearest(mine: dict[int, list[float]], theirs: dict[int, list[float]]) -> float:
    """How far the losses of two runs are apart at least, relative to the reference's."""
    return min(abs(one - other) / max(abs(one), 1e-12) for one in ways(mine) for other in ways(theirs))


def gradients(both: TwoRuns, step: int) -> Iterator[Difference]:
    """Gradients that differ, before they are clipped and after, and their norm."""
    if unseen := sorted(not_seen(both, step)):
        both.notes.append(
            f"the gradients of {names_listed(unseen)} were not seen in step {step}, and are not compared: they may lie "
            "in copies of other precision that the optimizer steps"
        )
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
    unseen = not_seen(both, step)
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
            if whole.norm > allowed and name not in unseen:
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
    apart = {rank: abs(event["value"] - wanted) / max(abs(wanted), limits.TINY) for rank, event in theirs}
    wrong = [rank for rank, error in apart.items() if not error <= allowed]
    if wrong:
        yield both.difference(step, "norm", "", wrong, max(apart.values()), allowed)


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
    of_losses, of_gradients = [*returned_scalars(both, step), *losses(both, step)], [*gradients(both, step)]
    if of_losses and not of_gradients:
        both.notes.append("the losses differ, the gradients do not: the loops report the loss in two ways")
    yield from of_losses if of_gradients else ()
    yield from of_gradients
    yield from optimizers(both, step)
    yield from updates(both, step)
