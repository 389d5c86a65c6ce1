"""What a timeline shows: the schedule that it ran, and its costs. Must not contain: measuring, which the engine does,
and checks of the schedule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from statistics import fmean, median
from typing import Any

from pipeflow.core.action import Action, Entry, Kind, Pair
from pipeflow.core.analysis.idle_time import Usual, awaited, pauses
from pipeflow.core.cost import CostModel, Link, costs_of
from pipeflow.core.dataflow import DATAFLOW, SEVERAL, Stream, Value, makes, needs
from pipeflow.core.errors import UsageError
from pipeflow.core.factors import Factors, factors_of, table_of
from pipeflow.core.schedule import Schedule
from pipeflow.core.slices import attention_of_slices
from pipeflow.core.timeline import Row, Span, Timeline, require_timeline


def executed_schedule(timeline: Timeline) -> Schedule:
    """The schedule that a timeline ran: per rank, its actions in the order of their starts.

    A joint action beside the computations starts when the last rank reaches it, so its start does not show its position
    in a row. It is put directly after the action that made what it needs.

    Raises UsageError if the numbers of the microbatches cannot be right.
    """
    require_timeline(timeline)
    actions = [span.action for span in timeline]
    microbatches = max((action.microbatch for action in actions), default=0) + 1
    if microbatches > max(len(actions), 1):
        raise UsageError(f"{len(actions)} actions are too few for {microbatches} microbatches")
    rows = tuple(tuple(_entries(row, timeline.placement.num_stages, timeline.slices)) for row in timeline.rows)
    return Schedule(timeline.name, timeline.placement, microbatches, rows, timeline.slices)


def _entries(row: Row, num_stages: int, slices: int) -> Iterator[Entry]:
    """The entries of a row. Joint actions whose inputs nothing in the row made come last."""
    joint = [span.action for span in row if _is_beside(span)]
    waiting: dict[Value, Action] = {value: action for action in joint for value in needs(action, num_stages, slices)}
    for span in (span for span in row if not _is_beside(span)):
        if span.partner is None:
            yield span.action
        elif span.action.kind is Kind.F:
            yield Pair(span.action, span.partner)
        yield from (waiting.pop(value) for value in makes(span.action, num_stages, slices) if value in waiting)
    yield from dict.fromkeys(waiting.values())


def _is_beside(span: Span) -> bool:
    return DATAFLOW[span.action.kind].joint and span.stream is not Stream.COMPUTE


ALIKE = 1.15  # up to how many times as long as another time is alike
_PASSES = (Kind.F, Kind.B, Kind.I, Kind.W)
COPIED = (Kind.O, Kind.L)
"""The kinds of action whose time is that of a copy between a device and its host."""


def measured_costs(timeline: Timeline, *, late_apart: bool = False, by_microbatch: bool = False) -> CostModel:
    """The costs that a timeline shows. The time of an action is the mean over the actions of its kind and stage. It
    includes the time before an action in which the rank has all inputs, since the engine itself works then. The latency
    of a link is the median time from when a value was made until the action began that waited for it, without what the
    engine worked then. The time of a whole backward is divided between its halves in the proportion of the backwards
    that ran in halves, or equally if there are none. When several ranks reduce a stage together, the last one to start
    waits least, so its time is the cost of the reduction.

    If microbatches are cut, times are those of all slices of a microbatch together. `CostModel.slice_ends` says where
    they end, and `attention` is the share with which they take the times they took. `CostModel.exchange` has the waits
    for tokens of experts outside of pairs, so trace a step of `schedule.without_pairs()`.

    Args:
        timeline: the timeline.
        late_apart: whether actions that took much longer than is usual for their kind and stage are no part of the
            means, but `CostModel.late`.
        by_microbatch: whether the costs have the factors of `measured_factors`. All other times are then those of
            factor 1.

    Raises UsageError for slices whose lengths the timeline does not have.
    """
    require_timeline(timeline)
    ends, slices = _slice_ends(timeline), timeline.slices
    late, times = dict[Action, float](), dict[tuple[Kind, int], list[float]]()
    known = Usual(timeline)
    factors = measured_factors(timeline) if by_microbatch else ()
    table = table_of(factors, timeline.placement.num_stages)
    for span in timeline:
        stage, several = span.action.stage, not table or span.action.kind in SEVERAL
        factor, took = 1.0 if several else table[stage][span.action.microbatch], span.end - span.start
        if late_apart and factor == 1 and span.stream is Stream.COMPUTE and known.late(span):
            late[span.action] = took
            if slices == 1:
                continue
            took = known.of(span.action)  # each slice has a share of the mean
        whole = 1 if span.action.kind in SEVERAL else slices
        times.setdefault((span.action.kind, stage), []).append(whole * took / factor)

    engine = _Engine(timeline)

    def mean(kind: Kind, stage: int) -> float:
        found = times.get((kind, stage))
        whole = 1 if kind in SEVERAL else slices
        return fmean(found) + whole * engine.pause(kind, stage) if found else 0.0

    def first_part(stage: int) -> float:
        """The part of a backward that is its first half."""
        first, second = mean(Kind.I, stage), mean(Kind.W, stage)
        return first / (first + second) if first + second else 0.5

    def halves(stage: int) -> tuple[float, float]:
        """The times of the two halves of the mean backward on `stage`."""
        whole, apart = len(times.get((Kind.B, stage), ())), len(times.get((Kind.I, stage), ()))
        both = whole * mean(Kind.B, stage) + apart * (mean(Kind.I, stage) + mean(Kind.W, stage))
        both, part = both / max(whole + apart, 1), first_part(stage)
        return both * part, both * (1 - part)

    def extras() -> dict[str, float]:
        """The late actions; of a whole backward, its halves. That of a slice counts for its microbatch."""
        found = dict[str, float]()
        for action, time in late.items():
            kind, stage, microbatch = action.kind, action.stage, action.microbatch
            extra = time - (fmean(times[kind, stage]) if slices == 1 else known.of(action))
            part = first_part(stage)
            for half, share in ((Kind.I, part), (Kind.W, 1 - part)) if kind is Kind.B else ((kind, 1.0),):
                name = str(Action(half, stage, microbatch))
                found[name] = found.get(name, 0.0) + extra * share
        return found

    def copy(stage: int) -> float:
        """The mean time of the copies of a stage; of all stages if it has none."""
        own = [time for kind in COPIED for time in times.get((kind, stage), ())]
        return fmean(own or [time for (kind, _), each in times.items() if kind in COPIED for time in each])

    stages = range(timeline.placement.num_stages)
    kinds = {kind for kind, _ in times}
    backward_input, backward_weight = zip(*map(halves, stages), strict=True)
    found = {kind: tuple(mean(kind, stage) for stage in stages) for kind in sorted(kinds) if not DATAFLOW[kind].takes}
    found |= {Kind.F: tuple(mean(Kind.F, stage) for stage in stages), Kind.I: backward_input, Kind.W: backward_weight}
    if Kind.R in kinds:
        found[Kind.R] = tuple(min(times.get((Kind.R, stage), [0.0])) for stage in stages)
    if Kind.C in kinds:
        found[Kind.C] = tuple(mean(Kind.C, stage) or mean(Kind.F, stage) for stage in stages)
    if kinds & {*COPIED}:
        found[Kind.O] = tuple(map(copy, stages))
    usual, links = engine.latencies()
    others: dict[str, Any] = {"late": extras(), "microbatch_factors": factors, "unit": timeline.unit}
    others["exchange"] = _exchange(timeline)
    if ends:
        others |= {"slice_ends": ends, "attention": attention_of_slices(_slice_works(timeline), ends)}
    return costs_of(found, latency=usual, links=links, **others)


def _exchange(timeline: Timeline) -> tuple[float, ...]:
    """Per stage, the share of its forwards and backwards outside of pairs in which its rank waited for tokens of
    experts; empty if none did.
    """
    took, waited = ([0.0] * timeline.placement.num_stages for _ in range(2))
    for span in (span for span in timeline if span.action.kind in _PASSES and span.partner is None):
        took[span.action.stage] += span.end - span.start
        waited[span.action.stage] += span.exchange
    shares = tuple(part / whole if whole else 0.0 for part, whole in zip(waited, took, strict=True))
    return shares if any(shares) else ()


def _slice_ends(timeline: Timeline) -> tuple[float, ...]:
    """Where slices end, as shares of their sequence; empty if microbatches are whole."""
    if timeline.slices == 1:
        return ()
    if not timeline.slice_lengths:
        raise UsageError("the timeline does not say how long its slices are: give it slice_lengths, or trace it again")
    return tuple(accumulate(timeline.slice_lengths))


def _slice_works(timeline: Timeline) -> list[float]:
    """The share of each slice in the time of all computations."""
    works = [0.0] * timeline.slices
    for span in (span for row in timeline.on(Stream.COMPUTE) for span in row):
        if span.action.slice is not None:
            works[span.action.slice] += span.end - span.start
    total = sum(works) or 1.0
    return [work / total for work in works]


def measured_factors(timeline: Timeline) -> Factors:
    """The factors of the microbatches that a timeline shows: how much longer each takes on a stage than is usual there,
    as a table, or as a sequence where all stages agree on each microbatch. Empty if all are alike.

    A factor is only taken where all computations of the microbatch on the stage show it, of which there must be two or
    more: a forward and its backward then differ from the usual ones in the same proportion. Elsewhere it is 1.
    """
    require_timeline(timeline)
    usual, stages = Usual(timeline), timeline.placement.num_stages
    cells: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for span in (span for row in timeline.on(Stream.COMPUTE) for span in row if span.action.kind not in SEVERAL):
        its = span.end - span.start, usual.of(span.action)
        cells[span.action.stage, span.action.microbatch].append(its)
    many = 1 + max((microbatch for _, microbatch in cells), default=-1)
    table = [[_factor(cells[stage, microbatch]) for microbatch in range(many)] for stage in range(stages)]
    columns = [*zip(*table, strict=True)]
    if all(factor == 1 for column in columns for factor in column):
        return ()
    if all(max(column) <= ALIKE * min(column) for column in columns):
        return tuple(map(fmean, columns))
    return factors_of(table, stages)


def _factor(times: Sequence[tuple[float, float]]) -> float:
    """The factor of computations with these times and usual times; 1 if they do not agree, or hardly differ from 1."""
    whole, usual = map(sum, zip(*times, strict=True)) if times else (0.0, 0.0)
    factor = whole / usual if usual else 1.0
    agree = (
        len(times) > 1
        and factor > 0
        and all(factor * its <= ALIKE * time <= ALIKE**2 * factor * its for time, its in times)
    )
    return factor if agree and not 1 / ALIKE <= factor <= ALIKE else 1.0


class _Engine:
    """What a timeline shows of the work of the engine and of transfers."""

    def __init__(self, timeline: Timeline) -> None:
        self._awaited = awaited(timeline)
        delays = {link: median(each.delay for each in found) for link, found in self._awaited.items()}
        usual = fmean(delays.values()) if delays else 0.0
        self._pauses: dict[tuple[Kind, int], list[float]] = defaultdict(list)
        self._of_kind: dict[Kind, list[float]] = defaultdict(list)
        for span, pause in pauses(timeline, lambda link: delays.get(link, usual)):
            self._pauses[span.action.kind, span.action.stage].append(pause)
            self._of_kind[span.action.kind].append(pause)
        self._delays: dict[tuple[Kind, int], list[float]] = defaultdict(list)
        for each in (arrival for own in self._awaited.values() for arrival in own):
            self._delays[each.span.action.kind, each.span.action.stage].append(max(each.delay, 0.0))
        self._means: dict[tuple[Kind, int], float] = {}

    def pause(self, kind: Kind, stage: int) -> float:
        """The mean pause before an action that has all its inputs. Where it waits for one, the pause is a part of the
        delay: if delays are shorter, they count as pauses, too.
        """
        if (kind, stage) not in self._means:
            found = self._pauses.get((kind, stage)) or self._of_kind.get(kind) or [0.0]
            delays = self._delays.get((kind, stage))
            joined = [*found, *delays] if delays and fmean(delays) < fmean(found) else found
            self._means[kind, stage] = fmean(joined)
        return self._means[kind, stage]

    def latencies(self) -> tuple[float, dict[tuple[int, int], Link]]:
        """The mean latency, and the links of another one."""
        found = {
            link: max(
                median(each.delay - self.pause(each.span.action.kind, each.span.action.stage) for each in own), 0.0
            )
            for link, own in self._awaited.items()
        }  # clocks of ranks differ a little, so delays may be negative
        usual = fmean(found.values()) if found else 0.0
        return usual, {link: Link(time) for link, time in found.items() if time != usual}
