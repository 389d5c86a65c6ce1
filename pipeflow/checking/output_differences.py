"""Where outputs differ: batches, weights as a run begins, the modules in the order of the forward, and the loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import isfinite, prod, sqrt

import numpy as np

from pipeflow.checking.findings import Difference
from pipeflow.checking.matching import wholes
from pipeflow.checking.rounding import SKETCH, unit
from pipeflow.checking.rows import Called, Rows, by_group, joined, numel, square, summed, tail_of, unmatched
from pipeflow.checking.runs import Blocks, Run, norm
from pipeflow.checking.two_runs import Key, TwoRuns


def batches(both: TwoRuns, step: int) -> Iterator[Difference]:
    """Batches whose samples are not the same, in any order."""
    for place in range(4):
        mine, theirs = (
            [(rank, event) for rank, event in run.events(step, "batch") if event["place"] == place]
            for run in (both.reference, both.candidate)
        )
        if not mine or not theirs or {tail_of(each) for _, each in mine} != {tail_of(each) for _, each in theirs}:
            continue
        rows = joined([(rank, event) for rank, event in mine], tail_of(mine[0][1]))
        others = joined([(rank, event) for rank, event in theirs], tail_of(mine[0][1]))
        if rows is None or others is None:
            continue
        both.compared["batches"] += 1
        apart = unmatched(rows, others, both.rounding.given or SKETCH)
        if apart.reference or apart.candidate:
            ranks = _ranks(others, apart.candidate) or tuple(sorted({rank for rank, _ in theirs}))
            lacking = not apart.candidate and len(others.values) < len(rows.values)
            stage = both.stage_of(ranks)
            yield Difference(step, "batch", "", "", stage, ranks, apart.error, SKETCH, lacking=lacking)


def weights(both: TwoRuns) -> Iterator[Difference]:
    """Weights and buffers that differ as a run begins."""
    mine, theirs = wholes(both.reference, 0, "before", None), both.candidate_wholes(0, "before")
    for name, whole in mine.items():
        other = theirs.get(name)
        if other is None or not other.covered:
            continue
        both.compared["weights"] += 1
        rounded = 4 * max(unit(each.dtype) for each in (*whole.copies, *other.copies)) + SKETCH
        allowed, size = both.rounding.given or rounded, max(whole.norm, 1e-30)
        error = max(norm(whole.sketch - other.sketch), other.spread) / size
        if not error <= allowed:
            yield both.of_tensor(0, "weight", name, other, error, allowed)


def outputs(both: TwoRuns, step: int) -> Iterator[Difference]:
    """Outputs that differ, in the order of the forward. Those of a module of which a rank has a part count only if
    later ones are wrong, too: they may be terms of a sum, or those of a stage.
    """
    mine, theirs = both.outputs(both.reference, step), both.outputs(both.candidate, step)
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
    ranks = _ranks(others, apart.candidate) or tuple(sorted({rank for rank, _ in theirs}))
    partial, stage = _adds_up(both, module, rows, theirs, allowed), both.stage_of(ranks, module)
    lacking = bool(apart.reference)
    return Difference(step, "output", module, "", stage, ranks, apart.error, allowed, partial, lacking)


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
    ranks = tuple(sorted({rank for rank, _ in theirs}))
    return Difference(step, "output", module, "", both.stage_of(ranks, module), ranks, error, 2 * allowed)


def _adds_up(both: TwoRuns, module: str, rows: Rows, theirs: Sequence[Called], allowed: float) -> bool:
    """Whether the outputs of ranks with different parts of the module's weight add up to the reference's, up to a
    bias that each of them adds.
    """
    places = both.places(module)
    if len(set(places.values())) < 2 or not {rank for rank, _ in theirs} <= set(places):
        return False
    total = summed(by_group(theirs, places), rows.tail)
    if total is None or len(total.values) % len(rows.values):
        return False
    apart = total.values[: len(rows.values), :8] - rows.values[:, :8]
    shifted = Rows(total.values - np.append(np.median(apart, axis=0), 0.0), total.ranks, total.calls, rows.tail)
    alike = unmatched(rows, total, 4 * allowed)
    biased = unmatched(rows, shifted, 4 * allowed)
    return not alike.reference or (not biased.reference and _has_bias(both, module))


def _has_bias(both: TwoRuns, module: str) -> bool:
    return f"{module}.bias" in both.names.first


def _ranks_disagree(both: TwoRuns, theirs: Sequence[Called], places: dict[int, Blocks]) -> bool:
    """Whether ranks with different parts of a weight have different outputs in the same call."""
    if not {rank for rank, _ in theirs} <= set(places):
        return False
    groups = ([event["rows"] for _, event in group] for group in by_group(theirs, places))
    return any(
        each.shape != group[0].shape or norm(each - group[0]) > 1e-3 * norm(group[0])
        for group in groups
        for each in group[1:]
    )


def losses(both: TwoRuns, step: int) -> Iterator[Difference]:
    """The loss, if no way of adding up those of microbatches and ranks gives the reference's."""
    mine, theirs = (values_of(run, step) for run in (both.reference, both.candidate))
    if not mine or not theirs:
        return
    both.compared["losses"] += 1
    if ranks := disagreeing(both, step, theirs):
        apart = max(sum(theirs[rank]) for rank in ranks) / min(sum(theirs[rank]) for rank in ranks) - 1.0
        yield Difference(step, "loss", "loss", "", both.stage_of(ranks), ranks, abs(apart), 0.0)
        return
    wanted, told = ways(mine), ways(theirs)
    error = min(abs(one - other) / max(abs(one), 1e-12) for one in wanted for other in told)
    allowed = both.rounding.output("") + 1e-6
    if not error <= allowed:
        ranks = tuple(theirs)
        yield Difference(step, "loss", "loss", "", both.stage_of(ranks), ranks, error, allowed)


def _ranks(rows: Rows, indices: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({rank for index in indices for rank in rows.ranks[index]}))


def disagreeing(both: TwoRuns, step: int, losses: dict[int, list[float]]) -> tuple[int, ...]:
    """Ranks that read the same samples and have different losses."""
    read: defaultdict[int, list[bytes]] = defaultdict(list)
    for rank, event in both.candidate.events(step, "batch"):
        read[rank].append(event["rows"].tobytes())
    same: defaultdict[tuple[bytes, ...], list[int]] = defaultdict(list)
    for rank, rows in read.items():
        if rank in losses:
            same[tuple(rows)].append(rank)
    allowed = both.rounding.output("") + 1e-6
    for ranks in same.values():
        sums = [sum(losses[rank]) for rank in ranks]
        if max(sums) - min(sums) > allowed * max(map(abs, sums)):
            return tuple(ranks)
    return ()


def values_of(run: Run, step: int) -> dict[int, list[float]]:
    """The losses of each rank that has any."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for rank, event in run.events(step, "loss"):
        found[rank].append(float(event["value"].reshape(-1)[0]))
    return {rank: values for rank, values in found.items() if all(map(isfinite, values))}


def ways(losses: dict[int, list[float]]) -> set[float]:
    """A step's loss as loops may mean it: each rank's losses added up or their mean, over ranks the mean or the sum."""
    sums = [sum(values) for values in losses.values()]
    means = [sum(values) / len(values) for values in losses.values()]
    return {sum(sums) / len(sums), sum(sums), sum(means) / len(means)}
