"""Rebuild: the timeline of each step from the events of all ranks, on one clock: actions are divided into steps, each
gets its microbatch and stage, also where no name says them, and clocks are aligned. Must not contain: the formats of
files, what annotations mean, and why a rank was idle.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from pipeflow.core.action import Action, Kind
from pipeflow.core.analysis.measured_step import executed_schedule, measured_costs
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.dataflow import Key, makers, needs
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.rows import placement_of
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.verification import verify
from pipeflow.core.timeline import Row, Span, Timeline
from pipeflow.schedules.families import schedules_on
from pipeflow.tools.traces.action_names import STEP, Named, Names, RecordedAction, marked_steps, recorded_actions
from pipeflow.tools.traces.events import RankEvents

NAME_THEM = "give --names, a regular expression with the groups kind, stage and microbatch"
HOW_TO = "record a step with torch.profiler on every rank and export_chrome_trace, one file per rank"

Recorded = Sequence[RecordedAction]  # of a rank
Step = list[list[RecordedAction]]  # per rank
Part = list[RecordedAction]  # of one step, on one rank
Label = tuple[int, int]  # number of a step that the profiler marks, and which of the steps in it


class Rebuilt(NamedTuple):
    """A step rebuilt from traces.

    Attributes:
        steps: a timeline per step, in seconds from the start of the step.
        notes: sentences on what was missing or mended.
        outside: the times of each step outside of its actions; empty where the profiler marks no steps.
    """

    steps: list[Timeline]
    notes: list[str]
    outside: Sequence[Sequence[Outside]] = ()


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


# Theory of operation
#
# Where names do not say all, a recording can be read in several ways: some ranks may be replicas of others, stages may
# be in another order than ranks, a rank may have several of them. Each way is tried, the plainest first, and the first
# one that nothing contradicts is told: its order must be one that can end, ranks must have sent what its stages
# exchange, and replayed under its own costs it must take as long as it did. If all are contradicted, none is told.

REPLAYED = 0.1  # by how much a replay may differ from what was recorded, as a share of it
CLOSE = 1e-6  # seconds by which times of one moment may differ
SAID = 3  # readings of which an error says why they are wrong


class Reading(NamedTuple):
    """A way to read a recording.

    Attributes:
        chain: places of the ranks that are read, in the order of their first stages.
        schedule: the schedule that gives stages and microbatches; None: each rank has one stage.
        steps: the actions of each step, by place in the chain.
        damaged: the number of other steps, in which a rank has more or fewer actions.
    """

    chain: Sequence[int]
    schedule: Schedule | None
    steps: list[Step]
    damaged: int

    def __str__(self) -> str:
        if self.schedule is not None:
            return f"{self.schedule.name} with {self.schedule.placement.num_stages} stages"
        return f"{len(self.chain)} stages on ranks {', '.join(map(str, self.chain))}"


def rebuilt(ranks: Sequence[RankEvents], names: Names) -> Rebuilt:
    """The timelines of the steps that all ranks recorded whole. Raises UsageError where a rank is missing or shows no
    action, with what can be told and how to record the rest, and where all ways to read the traces are contradicted.
    """
    ordered = _ordered(ranks)
    notes = [
        f"{each.source} is cut off: what comes after its end is not counted" for each in ordered if each.is_cut_off
    ]
    if timeless := sum(each.timeless for each in ordered):
        notes.append(f"events are left out that have no time, or end before they start: {timeless}")
    actions: list[Recorded] = [recorded_actions(each, names) for each in ordered]
    for events, found in zip(ordered, actions, strict=True):
        if not found:
            raise UsageError(f"{events.source} shows no forward or backward: {_without_actions(events)}")
    ordered, actions = _one_replica(ordered, actions)
    is_said = _is_said(actions)
    if not is_said and any(each.collectives for each in ordered) and not any(each.transfers for each in ordered):
        raise UsageError(
            "no rank sends anything to another one: a job without a pipeline has no schedule to explain. If it has "
            f"one, {NAME_THEM}"
        )
    _require_all(ordered, actions)
    if is_said:
        said = _timelines(Reading(range(len(ordered)), None, *steps_of(actions)), ordered, notes)
        cut_off = [each.source for each in ordered if each.is_cut_off]
        if cut_off and verify(executed_schedule(median_step(said.steps))):
            raise UsageError(f"{cut_off[0]} is cut off, and no step is whole before its end: record the steps again")
        return said
    why: dict[str, None] = {}
    for reading in _readings(actions):
        try:
            read = _timelines(reading, ordered, notes)
            _require_consistent(reading, read.steps, ordered, actions)
        except UsageError as error:
            why[f"as {reading}: {error}"] = None
        else:
            return read
    raise UsageError(f"what was recorded fits no pipeline ({'; '.join([*why][:SAID])}); {NAME_THEM}")


def _is_said(actions: Sequence[Recorded]) -> bool:
    """Whether names say all stages and microbatches."""
    named = (each.named for own in actions for each in own)
    return all(each.stage is not None and each.microbatch is not None for each in named)


def _readings(actions: Sequence[Recorded]) -> Iterator[Reading]:
    """The ways to read a recording, the plainest first. Where the profiler marks no steps, a step ends where the
    optimizer steps, or else where a rank has run the backwards of all its forwards. Raises UsageError if there is no
    step in any way.
    """
    everyone = [each for own in actions for each in own]
    updated = any(each.update for each in everyone) and all(each.step is None for each in everyone)
    errors, is_any = list[UsageError](), False
    for by_updates in (True, False) if updated else (False,):
        marked = [[replace(each, step=each.update) for each in own] for own in actions] if by_updates else actions
        for chain in _chains(marked):
            try:
                steps, damaged = steps_of([list(map(replace, marked[place])) for place in chain])
            except UsageError as error:
                errors.append(error)
                continue
            for schedule in _fitting(steps[0]) if steps else (None,):
                is_any = True
                yield Reading(chain, schedule, [_staged(step, schedule) for step in steps], damaged)
    if errors and not is_any:
        raise errors[0]


def _chains(actions: Sequence[Recorded]) -> Iterator[Sequence[int]]:
    """The ranks of a pipeline, in the order of their stages: all in the order of their numbers, or of their first
    forwards; or one of several pipelines whose ranks do the same at the same time.
    """
    many = len(actions)
    yield range(many)
    try:
        [step, *_], _ = steps_of([list(map(replace, own)) for own in actions])
    except (UsageError, ValueError):  # there is none
        return
    in_turn = sorted(
        range(many),
        key=lambda place: min((each.start for each in step[place] if each.kind is Kind.F), default=math.inf),
    )
    if in_turn != [*range(many)]:
        yield in_turn
    for stages in range(many // 2, 1, -1):
        if many % stages == 0:
            alike = many // stages
            levels = [in_turn[first : first + alike] for first in range(0, many, alike)]
            chain = [min(levels[0])]
            for level in levels[1:]:
                chain.append(min(level, key=lambda place: _lag(step[chain[-1]], step[place])))
            yield chain


def _lag(one: Part, other: Part) -> float:
    """How long forwards of a rank begin after those of the rank before it, and backwards before: infinite if a value
    would be used before it is made.
    """
    total = 0.0
    for kind, maker, user in ((Kind.F, one, other), (Kind.B, other, one)):
        made = {each.named.microbatch: each.end for each in maker if each.kind is kind}
        waits = [each.start - made.get(each.named.microbatch, -math.inf) for each in user if each.kind is kind]
        total += sum(waits) if min(waits, default=0.0) >= 0 else math.inf
    return total


def _timelines(reading: Reading, ordered: Sequence[RankEvents], notes: Sequence[str]) -> Rebuilt:
    """The timelines of a reading. Raises UsageError if it has no step, or if a stage is on several ranks."""
    chain, places = reading.chain, sorted(reading.chain)
    if not reading.steps:
        raise UsageError(f"no step was recorded on all {len(chain)} ranks at once: record the same steps on each")
    said = [*notes]
    if reading.damaged:
        said.append(f"steps are left out in which a rank has more or fewer actions than in others: {reading.damaged}")
    whole = [each for step in reading.steps for own in step for each in own]
    if len(steps := reading.steps) > 1 and all(not each.named.microbatch and each.step is None for each in whole):
        said.append(f"nothing marks steps, so each microbatch is taken for one, of which there are {len(steps)}")
    if alike := len(ordered) - len(chain):
        said.append(f"ranks {', '.join(map(str, places))} are shown; {alike} others do the same in other pipelines")
    order = sorted(range(len(chain)), key=chain.__getitem__)
    steps = [[step[place] for place in order] for step in reading.steps]
    placement = placement_of([[each.action for each in own] for own in steps[0]])
    if placement is None:
        raise UsageError("the stages are on no fixed ranks: stages must have the same rank in every step")
    events = [ordered[place] for place in places]
    shifts = offsets(steps, placement.num_stages, [each.host for each in events])
    if any(shifts):
        said.append("the clocks of the ranks differ, and were aligned by the values that pass between ranks")
    outside = [_outside(step, shifts, events) for step in steps]
    return Rebuilt([_timeline(step, placement, shifts) for step in steps], said, outside)


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
            found.append(Outside(rank, is_before, max(end - start, 0.0), _named_between(events[rank], start, end)))
    return found


def _named_between(events: RankEvents, start: float, end: float) -> dict[str, float]:
    """The seconds that outermost annotations within a time take of it, by name."""
    times: defaultdict[str, float] = defaultdict(float)
    for each in sorted(events.ranges, key=lambda each: (each.start, -each.end)):
        if start <= each.start and each.end <= end and not each.name.startswith((STEP, "aten::")):
            times[each.name.partition("#")[0]] += each.end - each.start
            start = each.end
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def median_step(steps: Sequence[Timeline]) -> Timeline:
    """The step of median length."""
    return sorted(steps, key=lambda each: each.makespan)[(len(steps) - 1) // 2]


def replay(step: Timeline) -> Timeline:
    """A step, simulated under the costs that it shows."""
    return simulate(executed_schedule(step), measured_costs(step))


def is_alike(played: Timeline, step: Timeline) -> bool:
    """Whether a replay takes about as long as the step."""
    return abs(played.makespan - step.makespan) <= REPLAYED * step.makespan


def _require_consistent(
    reading: Reading, steps: Sequence[Timeline], ordered: Sequence[RankEvents], actions: Sequence[Recorded]
) -> None:
    """Raises UsageError if what was recorded contradicts a reading."""
    median = median_step(steps)
    schedule, step = executed_schedule(median), reading.steps[steps.index(median)]
    if wrong := verify(schedule):
        raise UsageError(str(wrong[0]))
    own = [_messages(ordered[place], part, actions[place]) for place, part in zip(reading.chain, step, strict=True)]
    if any(map(any, own)):
        _require_messages(reading, own)
    if not schedule.is_forward_only and not is_alike(played := replay(median), median):
        raise UsageError(f"its replay differs from it by {played.makespan / median.makespan - 1:+.0%}")


def _messages(events: RankEvents, part: Part, actions: Recorded) -> tuple[int, int]:
    """How often a rank sent in a step, and received."""
    first, last = part[0].start, part[-1].end
    before = max((each.end for each in actions if each.end <= first), default=-math.inf)
    after = min((each.start for each in actions if each.start >= last), default=math.inf)
    sent = sum(first <= each.start < after for each in events.sends)
    return sent, sum(before <= each.start + CLOSE < last for each in events.receives)


def _require_messages(reading: Reading, messages: Sequence[tuple[int, int]]) -> None:
    """Raises UsageError if ranks do not send and receive what passes between the stages of a reading. How many tensors
    that is between two stages, nothing says.
    """
    chain, schedule = reading.chain, reading.schedule
    forwards = sum(each.kind is Kind.F for each in reading.steps[0][0])
    passed = returned = 0.0  # tensors per microbatch: forwards from the rank before, and backwards to it
    for place, (sent, got) in enumerate(messages):
        if schedule is None:
            passed, returned = sent / forwards - returned, got / forwards - passed
            is_last = place == len(chain) - 1
            fits = passed == returned == 0 if is_last else passed >= 1 and passed % 1 == returned % 1 == 0 <= returned
        else:
            edges = [_edges(schedule.placement, rank) for rank in (0, place)]
            fits = all(
                count * edges[0] == first * edges[1] for count, first in zip((sent, got), messages[0], strict=True)
            )
        if not fits:
            raise UsageError(f"rank {chain[place]} sent {sent} times and received {got} times")


def _edges(placement: Placement, rank: int) -> int:
    """How many neighbours of the stages of a rank are on other ranks."""
    links = (link for path in placement.paths for link in pairwise(path) if link[0] != link[1])
    return sum(rank in link for link in links)


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
    ordered = sorted(ranks, key=lambda each: each.rank or 0)
    if pipeline := ordered[0].pipeline:  # replicas and tensor ranks do the same: the first pipeline stands for all
        places = {rank: place for place, rank in enumerate(pipeline)}
        own = [each for each in ordered if each.rank in places]
        return [replace(each, rank=places[each.rank or 0], ranks=len(pipeline)) for each in own]
    return ordered


def _one_replica(ranks: list[RankEvents], actions: list[Recorded]) -> tuple[list[RankEvents], list[Recorded]]:
    """The first of all ranks that run the same stages for the same microbatches, if names say them: the others are
    replicas or tensor ranks.
    """
    first: dict[frozenset[Named], int] = {}
    for place, found in enumerate(actions):
        first.setdefault(frozenset(each.named for each in found), place)
    is_said = all(each.named.stage is not None and each.named.microbatch is not None for own in actions for each in own)
    if len(first) == len(ranks) or not is_said:
        return ranks, actions
    kept = [replace(ranks[place], rank=number, ranks=len(first)) for number, place in enumerate(first.values())]
    return kept, [actions[place] for place in first.values()]


def _without_actions(events: RankEvents) -> str:
    if not events.ranges and not events.operators and not events.kernels:
        return f"it has no annotation and no operator; {HOW_TO}"
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


def _timeline(step: Step, placement: Placement, shifts: Sequence[float]) -> Timeline:
    zero = min(each.start + shift for own, shift in zip(step, shifts, strict=True) for each in own)
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


def steps_of(ranks: Sequence[Recorded]) -> tuple[list[Step], int]:
    """Divides the actions of all ranks into steps. Returns those that all ranks recorded whole, or if there is none,
    the one with most actions; and how many others all ranks recorded, but not whole.

    Where names have microbatches, a step begins with the first action that the step before has already. Otherwise
    actions are counted: a step ends where a rank has run the backwards of all its forwards. A step never goes on in the
    next step of the profiler, if these are marked.
    """
    if _are_counted(ranks):
        _number(ranks, _forwards_of_a_step(ranks))
    parts = [_divided(actions) for actions in ranks]
    usual = [_usual(map(len, found)) for found in parts]
    labelled = [_labelled(found, parts[0]) for found in parts]
    common = sorted(set[Label]().union(*labelled).intersection(*labelled))
    steps = [[found[label] for found in labelled] for label in common]
    whole = [step for step in steps if [*map(len, step)] == usual]
    most = sorted(steps, key=lambda step: sum(map(len, step)))[-1:]
    return whole or most, len(steps) - len(whole or most)


def _usual(sizes: Sequence[int] | map[int]) -> int:
    counts = Counter(sizes)
    return max(counts, key=lambda size: (counts[size], size))


def _are_counted(ranks: Sequence[Recorded]) -> bool:
    """Whether names do not say the microbatches, or not which of several stages of a rank has them."""
    named = [each.named for actions in ranks for each in actions]
    if any(each.microbatch is None for each in named):
        return True
    if all(each.stage is not None for each in named):
        return False
    return _forwards_of_a_step(ranks) > len({each.microbatch for each in named})


def _divided(actions: Recorded) -> list[Part]:
    parts: list[Part] = []
    seen: set[object] = set()
    for each in actions:
        key = each.kind, each.named.stage, each.named.microbatch
        if not parts or key in seen or each.step != parts[-1][-1].step:
            parts.append([])
            seen = set()
        seen.add(key)
        parts[-1].append(each)
    return parts


def _labelled(parts: Sequence[Part], first: Sequence[Part]) -> Mapping[Label, Part]:
    """The parts of a rank, so that those of one step have the same label on all ranks: that of the profiler, or else
    their place. A rank may lack steps of the `first` one; then the places are moved to where most of its time fits.
    """
    if all(part[0].step is not None for part in parts):
        counts: Counter[int] = Counter()
        found: dict[Label, Part] = {}
        for part in parts:
            number = part[0].step or 0
            found[number, counts[number]] = part
            counts[number] += 1
        return found
    moves = range(-len(parts), len(first) + 1) if len(parts) != len(first) else (0,)
    move = max(moves, key=lambda each: (_shared(parts, first, each), -abs(each)))
    return {(0, place + move): part for place, part in enumerate(parts)}


def _shared(parts: Sequence[Part], first: Sequence[Part], move: int) -> float:
    """The time that parts have in common with those of another rank that are `move` places later."""
    pairs = [(part, first[place + move]) for place, part in enumerate(parts) if 0 <= place + move < len(first)]
    return sum(max(0.0, min(a[-1].end, b[-1].end) - max(a[0].start, b[0].start)) for a, b in pairs)


def _number(ranks: Sequence[Recorded], size: int) -> None:
    """Gives each action its microbatch: actions of a kind and stage are in the order of microbatches, unless operators
    show which backward belongs to which forward.
    """
    for actions in ranks:
        counts: defaultdict[object, int] = defaultdict(int)
        base: dict[int | None, int] = {}
        for each in actions:
            key = each.step, each.kind, each.named.stage
            if each.index is not None and each.step is not None:
                base.setdefault(each.step, each.index)
            index = counts[key] if each.index is None else each.index - base.get(each.step, 0)
            each.named = each.named._replace(microbatch=index % size)
            counts[key] += 1


def _forwards_of_a_step(ranks: Sequence[Recorded]) -> int:
    """The number of forwards of a rank in a step, as the rank shows it on which most forwards wait for their backwards
    at once. Raises UsageError if no rank has a whole step.
    """
    most = size = 0
    for actions in ranks:
        waiting, sizes = _waiting(actions)
        if waiting > most and sizes:
            most, size = waiting, _usual(sizes)
    if not most:
        raise UsageError(
            "no step is there from its first forward to its last backward: record at least one whole training step"
        )
    return size


def _waiting(actions: Recorded) -> tuple[int, list[int]]:
    """The most forwards that waited for their backwards at once, and the numbers of forwards after which none did."""
    waiting = forwards = most = 0
    sizes: list[int] = []
    last: int | None = None
    for each in sorted(actions, key=attrgetter("start")):
        if each.step != last:
            waiting, forwards, last = 0, 0, each.step
        if each.kind is Kind.F:
            waiting, forwards = waiting + 1, forwards + 1
            most = max(most, waiting)
        elif each.kind in (Kind.B, Kind.I):
            waiting -= 1
            if waiting == 0:
                sizes.append(forwards)
                forwards = 0
    return most, sizes


def _staged(step: Step, schedule: Schedule | None) -> Step:
    """The actions of a step with stages where names do not say them: their places in the chain of ranks, or those of
    the schedule, which gives microbatches, too.
    """
    if schedule is None:
        return [
            [
                each
                if each.named.stage is not None
                else _named(each, Action(each.kind, place, each.named.microbatch or 0))
                for each in own
            ]
            for place, own in enumerate(step)
        ]
    return [_as_in(own, [*schedule.actions(place)]) for place, own in enumerate(step)]


def _as_in(own: Recorded, row: Sequence[Action]) -> Part:
    """The actions of a rank, of which `_shown` chose those that are recorded, as those of a row; the others take no
    time, when the next one begins.
    """
    found, left = Part(), [*own]
    chosen = {*(_shown(own, row) or row)}
    for action in row:
        if action in chosen:
            found.append(_named(left.pop(0), action))
        else:
            moment = left[0].start if left else found[-1].end
            found.append(replace(_named(own[0], action), start=moment, end=moment))
    return found


def _named(recorded: RecordedAction, action: Action) -> RecordedAction:
    named = recorded.named._replace(kind=action.kind, stage=action.stage, microbatch=action.microbatch)
    return replace(recorded, kind=action.kind, named=named)


def _fitting(step: Step) -> Iterator[Schedule | None]:
    """The schedules that a step may show: None for one stage per rank, and named ones of several stages. Those come
    first if they have a name and one stage does not.
    """
    forwards, found = sum(each.kind is Kind.F for each in step[0]), list[Schedule | None]()
    is_said = all(each.named.stage is not None for own in step for each in own)
    for chunks in () if is_said else (each for each in range(1, forwards + 1) if forwards % each == 0):
        placements = [Placement.looped(len(step), chunks)]
        if chunks == 2 and len(step) > 1:
            placements.append(Placement.vee(len(step)))
        for placement in placements:
            for schedule in schedules_on(placement, forwards // chunks):
                rows = [list(schedule.actions(rank)) for rank in range(len(step))]
                if all(_shown(own, row) is not None for own, row in zip(step, rows, strict=True)):
                    is_plain = chunks == 1 and [*map(len, rows)] == [*map(len, step)]
                    found.append(None if is_plain else schedule)
    yield from dict.fromkeys([*found, None])


def _shown(own: Recorded, row: Sequence[Action]) -> list[Action] | None:
    """The actions of a row that a rank recorded, if it shows this row: all of them, or those without the halves I of
    the first stage, which some engines leave to W. None if it shows another row.
    """
    some = [each for each in row if (each.kind, each.stage) != (Kind.I, 0)]
    for actions in (row, some):
        kinds = [
            Kind.B if (actions is some) and each.kind is Kind.W and not each.stage else each.kind for each in actions
        ]
        if [each.kind for each in own] == kinds and _agrees(own, actions):
            return [*actions]
    return None


def _agrees(own: Recorded, row: Sequence[Action]) -> bool:
    """Whether backwards belong to the same forwards in a schedule, where operators show these."""
    forwards: dict[int | None, tuple[int, int]] = {}
    for each, action in zip(own, row, strict=True):
        place = action.stage, action.microbatch
        if each.index is not None and forwards.setdefault(each.index, place) != place:
            return False
    return True


def offsets(steps: Sequence[Step], num_stages: int, hosts: Sequence[str]) -> list[float]:
    """Per rank, the seconds to add to its times. None are added to ranks of one machine, whose clock they share, unless
    they contradict it.

    Values that pass between ranks tell how far the clocks of two machines are apart: nothing is used before it was
    made, in either direction. The shortest delay from rank to rank is taken as equal in both directions, so half of the
    difference between the two shortest ones that were measured is the difference between the clocks.
    """
    delays = _shortest(steps, num_stages)
    shifts = [0.0] * len(hosts)
    known, waiting = {0}, [0]
    while waiting:
        rank = waiting.pop()
        for other in range(len(hosts)):
            there, back = delays.get((rank, other)), delays.get((other, rank))
            if other in known or there is None or back is None:
                continue
            known.add(other)
            waiting.append(other)
            apart = hosts[rank] != hosts[other] or not hosts[rank] or min(there, back) < 0
            shifts[other] = shifts[rank] + (back - there) / 2 * apart
    return shifts


def _shortest(steps: Sequence[Step], num_stages: int) -> dict[tuple[int, int], float]:
    """The shortest time from when one rank made a value until another one used it, by (maker, user)."""
    found: dict[tuple[int, int], float] = {}
    for step in steps:
        made: dict[Key, tuple[int, float]] = {}
        for rank, actions in enumerate(step):
            for each in actions:
                made[each.action.kind, each.action.stage, each.action.microbatch] = rank, each.end
        for rank, actions in enumerate(step):
            for each in actions:
                others = [value for value in needs(each.action, num_stages) if value.stage != each.action.stage]
                for key in (key for value in others for key in makers(value)):
                    if key in made and (maker := made[key])[0] != rank:
                        place = maker[0], rank
                        found[place] = min(found.get(place, math.inf), each.start - maker[1])
    return found
