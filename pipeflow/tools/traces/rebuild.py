"""Rebuild: the timeline of each step from the events of all ranks, on one clock. Must not contain: the formats of
files, what annotations mean, how steps and stages are found, and why a rank was idle.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from pipeflow.core.action import Kind
from pipeflow.core.analysis.measured_step import executed_schedule
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.rows import placement_of
from pipeflow.core.soundness.verification import verify
from pipeflow.core.timeline import Row, Span, Timeline
from pipeflow.tools.traces.action_names import MOST, STEP, Named, Names, marked_steps, recorded_actions
from pipeflow.tools.traces.events import Event, RankEvents
from pipeflow.tools.traces.json_traces import TRANSFERS
from pipeflow.tools.traces.rank_times import computes, sends
from pipeflow.tools.traces.readings import (
    Reading,
    median_step,
    readings_of,
    replayed_steps,
    require_consistent,
)
from pipeflow.tools.traces.steps import Recorded, Step, offsets, steps_of

NAME_THEM = (
    "name the actions with torch.profiler.record_function, and give --names, a regular expression with the groups "
    "kind, stage and microbatch"
)
HOW_TO = "record a step with torch.profiler on every rank and export_chrome_trace, one file per rank"
SAID = 3  # readings of which an error says why they are wrong


class Rebuilt(NamedTuple):
    """A step rebuilt from traces.

    Attributes:
        steps: a timeline per step, in seconds from the start of the step.
        notes: sentences on what was missing or mended.
        outside: the times of each step outside of its actions; empty where the profiler marks no steps.
        hosts: what the hosts of the ranks did in each step; empty for timelines of pipeflow.
    """

    steps: list[Timeline]
    notes: list[str]
    outside: Sequence[Sequence[Outside]] = ()
    hosts: Sequence[Hosts] = ()


class Outside(NamedTuple):
    """The time of a step before its first action, or after its last one.

    Attributes:
        rank: the rank that runs this action.
        is_before: whether it is before the first action.
        seconds: its length.
        named: the seconds that annotations take of it, by name, the longest first.
    """

    rank: int
    is_before: bool
    seconds: float
    named: Mapping[str, float]


class Hosts(NamedTuple):
    """What the hosts of the ranks did in a step.

    Attributes:
        events: the events of each rank.
        shifts: the seconds to subtract from a time of each rank's events for that of the step.
    """

    events: Sequence[RankEvents]
    shifts: Sequence[float]

    def named(self, rank: int, start: float, end: float) -> dict[str, float]:
        """The seconds that outermost annotations and operators of a rank take within a time of the step, by name."""
        events, shift = self.events[rank], self.shifts[rank]
        every = [*(each for each in events.ranges if not each.name.startswith(TRANSFERS)), *events.work]
        return _named_between(every, start + shift, end + shift)


class NoPipelineError(UsageError):
    """What was recorded shows no pipeline.

    Attributes:
        ranks: what was recorded, in the order of ranks.
        notes: sentences on what is missing.
    """

    def __init__(self, message: str, ranks: Sequence[RankEvents], notes: Sequence[str]) -> None:
        super().__init__(message)
        self.ranks, self.notes = ranks, notes


def rebuilt(ranks: Sequence[RankEvents], names: Names) -> Rebuilt:
    """The timelines of the steps that all ranks recorded whole. Raises UsageError where a rank is missing or shows no
    action, with what can be told and how to record the rest, and where all ways to read the traces are contradicted.
    """
    ordered = _ordered(ranks)
    notes = [
        f"{each.source} is cut off: the step in which it ends is not counted" for each in ordered if each.is_cut_off
    ]
    if timeless := sum(each.timeless for each in ordered):
        notes.append(f"events are left out that have no time, or end before they start: {timeless}")
    actions: list[Recorded] = []
    for events in ordered:
        actions.append(found := recorded_actions(events, names))
        if sum(map(len, actions)) > MOST:
            raise UsageError(f"more than {MOST} actions were recorded: record fewer steps, or microbatches")
        if events.is_cut_off:  # the last action may have gone on: without it, its step is not whole
            del found[-1:]
    _require_pipeline(ordered, actions, names, notes)
    ordered, actions = _one_pipeline(ordered, actions)
    for events, own in zip(ordered, actions, strict=True):
        if not own:
            what = "no forward or backward" + " before it is cut off" * events.is_cut_off
            raise UsageError(f"{events.source} shows {what}: {_without_actions(events)}")
    ordered, actions = _one_replica(ordered, actions)
    is_said = _is_said(actions)
    _require_all(ordered, actions)
    cut_off = [each.source for each in ordered if each.is_cut_off]
    if is_said:
        said = _timelines(Reading(range(len(ordered)), None, *steps_of(actions)), ordered, notes)
        if cut_off and verify(executed_schedule(median_step(said.steps))):
            raise UsageError(f"{cut_off[0]} is cut off, and no step is whole before its end: record the steps again")
        return _replayed(said)
    why: dict[str, None] = {}
    messages = any(each.transfers for each in ordered)
    for reading in readings_of(actions, [each.host for each in ordered], messages=messages):
        try:
            read = _timelines(reading, ordered, notes)
            require_consistent(reading, read.steps, ordered, actions)
        except UsageError as error:
            why[f"as {reading}: {error}"] = None
        else:
            return _replayed(read)
    what, then = "what was recorded", NAME_THEM
    if cut_off:
        what, then = f"{cut_off[0]} is cut off, and what was recorded before", "record the steps again"
    raise UsageError(f"{what} fits no pipeline ({'; '.join([*why][:SAID])}); {then}")


def _replayed(read: Rebuilt) -> Rebuilt:
    """The steps to explain: where some differ much from their replay, the others."""
    places = replayed_steps(read.steps)
    if not (left := len(read.steps) - len(places)):
        return read
    note = f"steps are left out that take much more or less time than their replay: {left}"
    outside, hosts = [read.outside[place] for place in places], [read.hosts[place] for place in places]
    return Rebuilt([read.steps[place] for place in places], [*read.notes, note], outside, hosts)


def _require_pipeline(
    ordered: Sequence[RankEvents], actions: Sequence[Recorded], names: Names, notes: Sequence[str]
) -> None:
    """Raises NoPipelineError for ranks that compute, send nothing to a single other rank or only within their own
    forwards and backwards, and of which no annotation names an action. Annotations that say no stage, such as
    "forward_step", are those of a pipeline if there are several ranks, and nothing shows how these communicate.
    """
    is_named = any(each.is_named for own in actions for each in own)
    is_said = is_named and _is_said(actions)
    is_alone = len(ordered) == 1 or any(each.collectives for each in ordered)
    is_pipeline = any(len(each.pipeline) > 1 or sends(each) for each in ordered) and not _sends_within(ordered, actions)
    if is_pipeline or names.is_own or is_said or (is_named and not is_alone) or not all(map(computes, ordered)):
        return
    why = "no rank sends anything to another one: a job without a pipeline has no schedule to explain"
    raise NoPipelineError(f"{why}. If it has one, {NAME_THEM}", ordered, notes)


def _sends_within(ordered: Sequence[RankEvents], actions: Sequence[Recorded]) -> bool:
    """Whether all that ranks send is a part of their own forwards and backwards, as in ring attention: they send within
    nodes of autograd's graph, and none receives anything between its last backward and the first forward of a step.
    """
    for events, own in zip(ordered, actions, strict=True):
        starts = [each.start for each in events.backwards]
        nodes = ((each.start, bisect_right(starts, each.start)) for each in events.sends)
        if not any(place and start < events.backwards[place - 1].end for start, place in nodes):
            return False
        for before, each in zip((None, *own), own, strict=False):
            is_first = before is None or before.step != each.step
            since = -math.inf if before is None else before.end
            if each.kind is Kind.F and is_first and any(since <= one.start < each.start for one in events.receives):
                return False
    return True


def _is_said(actions: Sequence[Recorded]) -> bool:
    """Whether names say all stages and microbatches."""
    named = (each.named for own in actions for each in own)
    return all(each.stage is not None and each.microbatch is not None for each in named)


def _timelines(reading: Reading, ordered: Sequence[RankEvents], notes: Sequence[str]) -> Rebuilt:
    """The timelines of a reading. Raises UsageError if it has no step, or if a stage is on several ranks."""
    chain, places = reading.chain, sorted(reading.chain)
    if not reading.steps:
        raise UsageError(f"no step was recorded on all {len(chain)} ranks at once: record the same steps on each")
    said = [*notes]
    if reading.damaged:
        said.append(f"steps are left out in which a rank has other actions or another order: {reading.damaged}")
    whole = [each for step in reading.steps for own in step for each in own]
    if len(steps := reading.steps) > 1 and all(not each.named.microbatch and each.step is None for each in whole):
        said.append(f"nothing marks steps, so each microbatch is taken for one, of which there are {len(steps)}")
    if alike := len(ordered) - len(chain):
        said.append(f"ranks {', '.join(map(str, places))} are shown; {alike} others do the same in other pipelines")
    order = sorted(range(len(chain)), key=chain.__getitem__)
    steps = [[step[place] for place in order] for step in reading.steps]
    many = sum(map(len, steps[0]))
    if (stage := max(each.action.stage for own in steps[0] for each in own)) >= many:
        raise UsageError(f"{many} actions are too few for a stage {stage}: stages are counted from 0")
    placement = placement_of([[each.action for each in own] for own in steps[0]])
    if placement is None:
        raise UsageError("the stages are on no fixed ranks: stages must have the same rank in every step")
    events = [ordered[place] for place in places]
    shifts = offsets(steps, placement.num_stages, [each.host for each in events])
    if any(shifts):
        said.append("the clocks of the ranks differ, and were aligned by the values that pass between ranks")
    outside = [_outside(step, shifts, events) for step in steps]
    zeros = [_zero(step, shifts) for step in steps]
    hosts = [Hosts(events, [zero - shift for shift in shifts]) for zero in zeros]
    timelines = [_timeline(step, placement, shifts, zero) for step, zero in zip(steps, zeros, strict=True)]
    return Rebuilt(timelines, said, outside, hosts)


def _outside(step: Step, shifts: Sequence[float], events: Sequence[RankEvents]) -> list[Outside]:
    """The times of a step outside of its actions, if the profiler marks it."""
    begins = min(range(len(step)), key=lambda rank: step[rank][0].start + shifts[rank])
    ends = max(range(len(step)), key=lambda rank: max(each.end for each in step[rank]) + shifts[rank])
    found = []
    for rank, is_before in ((begins, True), (ends, False)):
        number = step[rank][0].step
        mark = None if number is None else marked_steps(events[rank]).get(number)
        if mark is not None:
            last = max(each.end for each in step[rank])
            start, end = (mark.start, step[rank][0].start) if is_before else (last, mark.end)
            ranges = [each for each in events[rank].ranges if not each.name.startswith("aten::")]
            found.append(Outside(rank, is_before, max(end - start, 0.0), _named_between(ranges, start, end)))
    return found


def _named_between(events: Sequence[Event], start: float, end: float) -> dict[str, float]:
    """The seconds that the outermost of events within a time take of it, by name."""
    times: defaultdict[str, float] = defaultdict(float)
    for each in sorted(events, key=lambda each: (each.start, -each.end)):
        if start <= each.start and each.end <= end and not each.name.startswith(STEP):
            times[each.name.partition("#")[0]] += each.end - each.start
            start = each.end
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def _ordered(ranks: Sequence[RankEvents]) -> list[RankEvents]:
    """The ranks in order. Files that do not say their rank keep the order in which they are given."""
    known = [each.rank for each in ranks if each.rank is not None]
    if not known:
        return [replace(each, rank=index) for index, each in enumerate(ranks)]
    if len(known) < len(ranks):
        files = ", ".join(each.source for each in ranks if each.rank is None)
        raise UsageError(f"neither these files nor their names say a rank: {files}; name them like rank0.json")
    if twice := sorted({rank for rank in known if known.count(rank) > 1}):
        files = ", ".join(each.source for each in ranks if each.rank == twice[0])
        raise UsageError(f"rank {twice[0]} is in several files ({files}): give the files of one run")
    return sorted(ranks, key=lambda each: each.rank or 0)


def _one_pipeline(ranks: list[RankEvents], actions: list[Recorded]) -> tuple[list[RankEvents], list[Recorded]]:
    """The ranks of the first pipeline, if files say which these are: replicas and tensor ranks do the same."""
    if not (pipeline := ranks[0].pipeline):
        return ranks, actions
    places = {rank: place for place, rank in enumerate(pipeline)}
    own = [(each, found) for each, found in zip(ranks, actions, strict=True) if each.rank in places]
    kept = [replace(each, rank=places[each.rank or 0], ranks=len(pipeline)) for each, _ in own]
    return kept, [found for _, found in own]


def _one_replica(ranks: list[RankEvents], actions: list[Recorded]) -> tuple[list[RankEvents], list[Recorded]]:
    """The first of all ranks that run the same stages for the same microbatches, if names say them: the others are
    replicas or tensor ranks. Raises UsageError if that leaves one rank, although ranks send to each other.
    """
    first: dict[frozenset[Named], int] = {}
    for place, found in enumerate(actions):
        first.setdefault(frozenset(each.named for each in found), place)
    is_said = all(each.named.stage is not None and each.named.microbatch is not None for own in actions for each in own)
    if len(first) == len(ranks) or not is_said:
        return ranks, actions
    if len(first) == 1 and any(each.transfers for each in ranks):
        raise UsageError(
            "names say the same stages on every rank, but ranks send to each other: name stages by their numbers in "
            "the whole model, or leave the group stage out of --names"
        )
    kept = [replace(ranks[place], rank=number, ranks=len(first)) for number, place in enumerate(first.values())]
    return kept, [actions[place] for place in first.values()]


def _without_actions(events: RankEvents) -> str:
    if not events.ranges and not events.operators and not events.kernels:
        return f"it has no annotation and no operator; {HOW_TO}; or {NAME_THEM}"
    if events.is_cut_off:
        return "record the steps again"
    names = (each.name for each in events.ranges if not each.name.startswith("aten::"))
    some = ", ".join(dict.fromkeys(names))[:200]
    named = f"; its annotations are {some}" if some else ""
    return f"{NAME_THEM}{named}"


def _require_all(ranks: Sequence[RankEvents], actions: Sequence[Recorded]) -> None:
    """Raises UsageError if ranks are missing, with what those that are there show."""
    whole = max((each.ranks or 0 for each in ranks), default=0)
    numbers = [each.rank for each in ranks]
    if len(ranks) >= whole and numbers == list(range(len(ranks))):
        return
    told = []
    for events, found in zip(ranks, actions, strict=True):
        busy, length = sum(span.end - span.start for span in _row(found, 0, 0.0)), found[-1].end - found[0].start
        told.append(f"rank {events.rank} runs {len(found)} actions and computes {busy / length:.0%} of {length:.4g} s")
    of = f" of {whole}" if whole else ""
    raise UsageError(
        f"{len(ranks)}{of} ranks were recorded ({'; '.join(told)}), but a schedule shows on all of them alone: {HOW_TO}"
    )


def _zero(step: Step, shifts: Sequence[float]) -> float:
    """When a step begins."""
    return min(each.start + shift for own, shift in zip(step, shifts, strict=True) for each in own)


def _timeline(step: Step, placement: Placement, shifts: Sequence[float], zero: float) -> Timeline:
    rows = tuple(_row(own, rank, shifts[rank] - zero) for rank, own in enumerate(step))
    return Timeline("trace", placement, rows, unit="s")


def _row(own: Recorded, rank: int, shift: float) -> Row:
    """The spans of a rank. Computations of one rank run one after the other, so a span ends where the next one begins
    at the latest.
    """
    spans = []
    for index, each in enumerate(own):
        end = min([each.end, *(later.start for later in own[index + 1 : index + 2])])
        partner = None if each.named.partner is None else each.named.partner.action(Kind.F)
        spans.append(Span(each.action, rank, each.start + shift, max(end, each.start) + shift, partner))
    return tuple(spans)
