"""The loop of every simulation.

A clock is an iterator over turns with their starts and ends. The loop takes each turn that has ended, writes its spans,
and sets the times when its values arrive at their users. The clock reads these times when it continues. `unlimited` is
the clock of ranks that do not share processors. Must not contain: which turns can run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from pipeflow.analysis.order import Order, Turn
from pipeflow.core.action import Kind
from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import DATAFLOW, End, Stream
from pipeflow.core.route import Route
from pipeflow.core.schedule import Schedule
from pipeflow.core.span import Row, Span

Ran = tuple[Turn, float, float, float]
"""A turn, its start and its end, and the end of its first action, which is another one for a pair alone."""

Durations = Mapping[Kind, Sequence[float] | Mapping[int, float]]
"""The time of an action per kind and stage."""


class Transfer(NamedTuple):
    """The transfer of a value to the rank that uses it: it occupies `link` for the time `held`, and arrives a `latency`
    later.
    """

    link: tuple[int, int]
    held: float = 0.0
    latency: float = 0.0


def loop(clock: Iterable[Ran], there: list[float], transfers: Sequence[Transfer], ranks: int) -> tuple[Row, ...]:
    """Per rank, its spans in the order of their starts.

    Args:
        clock: turns that ran, each after the turns that made its values.
        there: per value, the time when it arrives at its user. The loop writes these times.
        transfers: per value, its transfer to its user.
        ranks: number of ranks.
    """
    left: defaultdict[tuple[int, int], float] = defaultdict(float)  # per link, when its last value has left
    spans: list[list[Span]] = [[] for _ in range(ranks)]
    for (rank, actions, _, makes), start, end, middle in clock:
        if len(actions) == 1:
            spans[rank].append(Span(actions[0], rank, start, end))
        else:
            forward, backward = actions
            spans[rank] += Span(forward, rank, start, middle, backward), Span(backward, rank, middle, end, forward)
        for value in makes:
            link, held, latency = transfers[value]
            if held:
                left[link] = there[value] = max(left[link], end) + held
                there[value] += latency
            else:
                there[value] = end + latency
    return tuple(tuple(sorted(row, key=attrgetter("start"))) for row in spans)


def unlimited(
    turns: Iterable[Turn],
    there: list[float],
    durations: Durations,
    overlap: float,
    varied: Sequence[Durations] = (),
    *,
    joint: bool = True,
    begin: float = 0.0,
) -> Iterator[Ran]:
    """The clock of ranks that compute as fast as the costs say: from `begin` on, a turn runs as soon as its values have
    arrived and its stream is free. `turns` come in an order in which their values are made. Joint actions run at the
    same time on all ranks that have them, unless `joint` is false. `varied` has the durations of each microbatch, if
    microbatches differ.
    """
    free: defaultdict[int, float] = defaultdict(lambda: begin)
    beside: defaultdict[tuple[int, Stream], float] = defaultdict(float)  # when each other stream is free
    reached: defaultdict[tuple[Kind, int], list[tuple[float, Turn]]] = defaultdict(list)
    for turn in turns:
        rank, actions, needs, _ = turn
        action, start = actions[0], free[rank]
        kind = action.kind
        if varied:
            durations = varied[action.microbatch]  # joint actions have the same time in all of them
        for value in needs:
            if there[value] > start:
                start = there[value]
        if len(actions) > 1:
            other = actions[1]
            its = varied[other.microbatch] if varied else durations
            whole, first = paired(durations[kind][action.stage], its[other.kind][other.stage], overlap)
            end = free[rank] = start + whole
            yield turn, start, end, start + first
        elif kind not in _BESIDE:
            end = free[rank] = start + durations[kind][action.stage]
            yield turn, start, end, end
        elif joint and DATAFLOW[kind].joint:
            reached[kind, action.stage].append((start, turn))
        else:
            lane = rank, _BESIDE[kind]
            start = max(start, beside[lane])
            end = beside[lane] = start + durations[kind][action.stage]
            yield turn, start, end, end
    yield from _together(reached, durations, beside)


_BESIDE = {kind: flow.stream for kind, flow in DATAFLOW.items() if flow.stream is not Stream.COMPUTE}


def _together(
    reached: Mapping[tuple[Kind, int], list[tuple[float, Turn]]],
    durations: Durations,
    free: defaultdict[tuple[int, Stream], float],
) -> Iterator[Ran]:
    """When joint actions run, from the times at which their ranks reach them in their rows. All ranks that hold the
    stage run one at the same time. On one stream they run one at a time, in the order in which their last rank reaches
    them.
    """
    for (kind, stage), parts in sorted(reached.items(), key=lambda each: max(time for time, _ in each[1])):
        stream = DATAFLOW[kind].stream
        start = max(max(time, free[turn.rank, stream]) for time, turn in parts)
        for _, turn in parts:
            end = free[turn.rank, stream] = start + durations[kind][stage]
            yield turn, start, end, end


def paired(one: float, other: float, overlap: float) -> tuple[float, float]:
    """The time of a pair whose actions take these times alone, and the part of it that the span of its forward gets: in
    proportion to the time that it takes alone.
    """
    whole = one + other - overlap * min(one, other)
    return whole, whole * one / (one + other) if one + other else 0.0


def transfers(schedule: Schedule, cost: CostModel, order: Order) -> list[Transfer]:
    """The transfer of each value of `order`."""
    return [transfer for end in order.ends for transfer in _of_end(schedule, cost, end)]


def _of_end(schedule: Schedule, cost: CostModel, end: End) -> list[Transfer]:
    """The transfer of a value, per microbatch. A gradient is as large as the activation it belongs to."""
    paths, source, target = schedule.placement.paths, *sorted((end.stage, end.of(0).user))
    route = None if end.to is None else Route(source, target)
    by_path = []
    for path in paths:
        link = path[end.stage], path[end.of(0).user]
        stays = source == target or link[0] == link[1]
        costs = (0.0, 0.0) if stays else (cost.holding(source, *link, route), cost.link(*link).latency)
        by_path.append(Transfer(link, *costs))
    each = [by_path[microbatch % len(paths)] for microbatch in range(schedule.num_microbatches)]
    factors = cost.microbatch_factors
    if not factors or not any(move.held for move in by_path):
        return each
    return [Transfer(link, held * factor, latency) for (link, held, latency), factor in zip(each, factors, strict=True)]
