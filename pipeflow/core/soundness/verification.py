"""Verify: everything that is wrong with a schedule, with place and reason. Must not contain: the search for deadlocks,
which is in `deadlocks`, and checks of sends and receives, which `transfers` has.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import product

from pipeflow.core.action import Action, Entry, Kind, Work, actions_of
from pipeflow.core.dataflow import DATAFLOW, HANDLING_LASTING, SEVERAL, WHOLE, Content, Value, makes, needs
from pipeflow.core.errors import Violation
from pipeflow.core.factors import FactorsLike, factors_of, require_factors, table_of
from pipeflow.core.liveness import MemoryCap, cap_per_rank, memory_changes
from pipeflow.core.rows import ENDING, HANDLING, MAKING, Last, Lasting, last_made
from pipeflow.core.schedule import Schedule, require_schedule
from pipeflow.core.soundness.deadlock_search import Place, deadlocks
from pipeflow.core.text import listed

Ran = dict[Work, list[tuple[Kind, int, int]]]  # work -> (kind, rank, position)


def verify(
    schedule: Schedule, *, memory_cap: MemoryCap | None = None, microbatch_factors: FactorsLike = ()
) -> list[Violation]:
    """Every violation of `schedule`. An empty list proves that it is sound:

    - Every action is on the rank that holds its stage, and its stage and microbatch exist.
    - Every microbatch runs forward once on every stage, and backward once, whole or in two halves. Or the schedule has
      only forwards. Every value that an action keeps is used by another action.
    - Either no stage is reduced, or each stage is reduced once on each rank that makes weight gradients of it. The
      reduction comes after the last of these gradients, and has its microbatch.
    - If weights of a stage are gathered, all computations of the stage on that rank run while they are whole, and what
      is gathered is freed.
    - No rank waits for ever: the order has no cycle. For this check, actions in a wrong place are left out and missing
      actions count as present, so each cycle is a separate violation. Of deadlocks that hide one
      behind the other, the first twenty are found.
    - With a `memory_cap`, no rank keeps more activations than that, counted as in `Timeline.peak_activations`. Slices
      are taken to be equally long.

    Args:
        schedule: the schedule to check.
        memory_cap: one number or one per rank, in microbatches of a rank's whole share of the model. None: not checked.
        microbatch_factors: how much each microbatch keeps, as in `CostModel`. Empty: all keep the same.

    Raises UsageError if `memory_cap` is not positive, or if it has several numbers but not one per rank. Also raises it
    for another number of factors than microbatches, or of rows than stages.
    """
    require_schedule(schedule)
    ran: Ran = {}
    for rank, row in enumerate(schedule.rows):
        for position, entry in enumerate(row):
            for action in actions_of(entry):
                ran.setdefault(action.work, []).append((action.kind, rank, position))
    violations = [*_foreign(schedule, ran), *_misplaced(schedule, ran), *_not_once(schedule, ran)]
    violations += [*_wrong_joint(schedule), *_wrong_lasting(schedule)]
    if not violations:
        violations += deadlocks(schedule)
    else:
        rest, positions = _without_faults(schedule)
        violations += deadlocks(rest, schedule, positions, given=_unmade(rest))
    return violations if memory_cap is None else [*violations, *_over_cap(schedule, memory_cap, microbatch_factors)]


def _foreign(schedule: Schedule, ran: Ran) -> Iterator[Violation]:
    stages, microbatches = schedule.placement.num_stages, schedule.num_microbatches
    among = f"stages 0..{stages - 1} and microbatches 0..{microbatches - 1}"
    if schedule.slices > 1:
        among += f", each of slices 0..{schedule.slices - 1}"
    for work, runs in ran.items():
        for kind, rank, position in runs:
            if work[0] >= stages or work[1] >= microbatches or not _has_its_slice(schedule, kind, work[2]):
                yield Violation(f"{Action(kind, *work)} does not exist", among, rank, position)


def _has_its_slice(schedule: Schedule, kind: Kind, part: int | None) -> bool:
    """Whether an action of a kind may have this slice: None if microbatches are whole, and for whole weights."""
    if schedule.slices == 1 or kind in HANDLING_LASTING:
        return part is None
    return part is not None and part < schedule.slices


def _parts(schedule: Schedule) -> Iterable[int | None]:
    """The slices of each microbatch; None alone if it is whole."""
    return [None] if schedule.slices == 1 else range(schedule.slices)


def _misplaced(schedule: Schedule, ran: Ran) -> Iterator[Violation]:
    stages, paths = schedule.placement.num_stages, schedule.placement.paths
    for (stage, microbatch, part), runs in ran.items():
        if stage >= stages:
            continue
        holder = paths[microbatch % len(paths)][stage]
        for kind, rank, position in runs:
            if rank != holder and not DATAFLOW[kind].joint:
                wants = f"it on rank {holder}, which holds its stage"
                yield Violation(f"{Action(kind, stage, microbatch, part)} is on rank {rank}", wants, rank, position)


def _not_once(schedule: Schedule, ran: Ran) -> Iterator[Violation]:
    ways = ((Kind.F,),) if schedule.is_forward_only else ways_of(schedule)
    wanted = [frozenset(kinds) for kinds in ways]
    stages, microbatches = range(schedule.placement.num_stages), range(schedule.num_microbatches)
    for work in product(stages, microbatches, _parts(schedule)):
        stage, microbatch, _ = work
        runs = [run for run in ran.get(work, ()) if run[0] not in SEVERAL]
        seen: dict[Kind, Place] = {}
        for kind, rank, position in runs:
            if kind in seen:
                again = f"{Action(kind, *work)} runs again"
                yield Violation(again, "every action once", rank, position, earlier=seen[kind])
            seen[kind] = rank, position
        if seen.keys() not in wanted:
            holder = schedule.placement.rank_of(stage, microbatch)
            way = nearest(seen.keys(), ways)
            yield Violation(_incomplete(seen.keys(), way, work), listed(way), holder, incomplete=(stage, microbatch))


def _incomplete(seen: Set[Kind], way: Sequence[Kind], work: Work) -> str:
    """The faults of the actions of a microbatch on a stage, compared with the `way` that they should follow."""

    def said(kinds: Sequence[Kind]) -> str:
        return listed([str(Action(kind, *work)) for kind in kinds])

    has = [kind for kind in Kind if kind in seen]
    lacking, surplus = [kind for kind in way if kind not in has], [kind for kind in has if kind not in way]
    parts = [f"{said(lacking)} {'is' if len(lacking) == 1 else 'are'} missing"] * bool(lacking)
    parts += [f"{said(surplus)} should not be there"] * bool(surplus)
    return f"{', and '.join(parts)}: stage {work[0]} runs {said(has) or 'nothing'} for microbatch {work[1]}"


Ways = Sequence[tuple[Kind, ...]]


def missing(schedule: Schedule) -> list[tuple[int, Action]]:
    """The actions that a step of training still needs, each with the rank that holds its stage, by rank and microbatch.
    A schedule with only forwards lacks its backwards.

    A stage lacks what the nearest way to complete its work needs (`nearest`). Reductions do not count.
    """
    stages, many = schedule.placement.num_stages, schedule.num_microbatches
    seen: dict[Work, set[Kind]] = {}
    for action in _each(schedule):
        seen.setdefault(action.work, set()).add(action.kind)
    ways = ways_of(schedule)
    found = []
    for microbatch, part, stage in product(range(many), _parts(schedule), range(stages)):
        has = seen.get((stage, microbatch, part), set())
        rank = schedule.placement.rank_of(stage, microbatch)
        lacking = (kind for kind in nearest(has, ways) if kind not in has)
        found += [(rank, Action(kind, stage, microbatch, part)) for kind in lacking]
    return sorted(found, key=lambda each: each[0])


def ways_of(schedule: Schedule) -> Ways:
    """The ways to do the work of a microbatch on a stage, such as (F, B). The first is the way of most backwards of the
    schedule.
    """
    number = Counter(action.kind for action in _each(schedule))
    common = set.intersection(*map(set, WHOLE))
    return sorted(WHOLE, key=lambda kinds: -max(number[kind] for kind in kinds if kind not in common))


def nearest(has: Set[Kind], ways: Ways) -> tuple[Kind, ...]:
    """The way for which the fewest kinds must be removed from `has`. If some must be removed, ties go to the way for
    which the fewest must be added. Further ties go to the first way.
    """

    def distance(way: tuple[Kind, ...]) -> tuple[int, int]:
        surplus = len(has - set(way))
        return surplus, len(set(way) - has) if surplus else 0

    return min(ways, key=distance)


def _each(schedule: Schedule) -> Iterable[Action]:
    """The actions that run once per stage and microbatch."""
    rows = (schedule.actions(rank) for rank in range(len(schedule.rows)))
    return (action for row in rows for action in row if action.kind not in SEVERAL)


def _wrong_joint(schedule: Schedule) -> Iterator[Violation]:
    """Every violation of the joint actions of a schedule, at most one per action whose stage and microbatch exist.

    A schedule reduces no stage, or each stage once on each rank that makes weight gradients of it. If one rank did not
    take part, the others would wait for it; if one stage was left out, its copies would drift apart. A reduction comes
    after all weight gradients of its stage on its rank, and has the microbatch of the last one.
    """
    for kind, flow in DATAFLOW.items():
        if flow.joint and kind in schedule.kinds:
            for rank, row in enumerate(schedule.rows):
                yield from _wrong_joint_in(schedule, kind, rank, row)


def _wrong_joint_in(schedule: Schedule, kind: Kind, rank: int, row: tuple[Entry, ...]) -> Iterator[Violation]:
    flow = DATAFLOW[kind]
    [(content, _)] = flow.needs
    stages, microbatches = schedule.placement.num_stages, schedule.num_microbatches
    again = {other for other, its in DATAFLOW.items() if its.joint and other is not kind and (content, 0) in its.makes}
    actions = [(position, entry) for position, entry in enumerate(row) if isinstance(entry, Action)]
    made_again = {action.stage: position for position, action in actions if action.kind in again}
    last, seen = last_made(row, content), set[int]()
    for position, action in ((position, action) for position, action in actions if action.kind is kind):
        wanted = _wanted(row, position, action, last.get(action.stage), action.stage in seen)
        if wanted is None and not flow.makes and position < (made := made_again.get(action.stage, -1)):
            wanted = f"it after {row[made]}"
        if wanted and action.stage < stages and action.microbatch < microbatches:
            yield Violation(f"{action} is wrong here", wanted, rank, position)
        seen.add(action.stage)
    for stage, its in last.items():
        if stage not in seen:
            wanted = f"{its.used_by(kind, stage)} after {row[its.position]}, since others have one"
            yield Violation(f"stage {stage} has no {flow.name}", wanted, rank)


def _wanted(row: tuple[Entry, ...], position: int, action: Action, last: Last | None, again: bool) -> str | None:
    """The expected entry in the place of a joint action; None if the action is right."""
    flow = DATAFLOW[action.kind]
    [(content, _)] = flow.needs
    if last is None:
        return f"a {flow.name} only of a stage with a {content} on this rank"
    if again:
        return f"one {flow.name} per stage on a rank"
    if position < last.position:
        return f"it after {row[last.position]}, the last {content} of its stage"
    if action != (right := last.used_by(action.kind, action.stage)):
        return f"{right}, with the microbatch of the last {content} of its stage"
    return None


def _wrong_lasting(schedule: Schedule) -> Iterator[Violation]:
    """Every violation of the lasting values of a schedule, such as whole weights. In a row, a stage has one such value
    at a time, and what makes it is ended by the action of its number. If a row makes the value for a stage, all actions
    that can run within it do so: others would need it twice.
    """
    for rank, row in enumerate(() if HANDLING.isdisjoint(schedule.kinds) else schedule.rows):
        actions = [(position, action) for position, entry in enumerate(row) for action in actions_of(entry)]
        for position, problem, expected in _wrong_lasting_in(actions):
            yield Violation(problem, expected, rank, position)


def _wrong_lasting_in(actions: Sequence[tuple[int, Action]]) -> Iterator[tuple[int, str, str]]:
    """The violations in a row, as the position, the problem and what is expected."""
    handling = MAKING | ENDING
    handled = {(handling[action.kind], action.stage) for _, action in actions if action.kind in handling}
    there: dict[Lasting, tuple[int, Action]] = {}
    outside: set[Lasting] = set()  # told since the last value ended
    seen: set[Action] = set()
    for position, action in actions:
        if content := MAKING.get(action.kind):
            key = content, action.stage
            if key in there:
                before = there[key][1]
                yield position, f"{action} comes while {before} lasts", f"{_like(before, ENDING, content)} before it"
            elif action in seen:
                yield position, f"{action} runs again", "another number for each of a stage"
            seen.add(action)
            there[key] = position, action
            outside.discard(key)
        elif content := ENDING.get(action.kind):
            _, made = there.pop((content, action.stage), (0, None))
            if made is None:
                yield position, f"{action} ends nothing", f"{_like(action, MAKING, content)} before it"
            elif made.microbatch != action.microbatch:
                yield position, f"{action} is wrong here", f"{_like(made, ENDING, content)}, the end of {made}"
        elif content := DATAFLOW[action.kind].within:
            key = content, action.stage
            if key in handled and key not in there and key not in outside:
                outside.add(key)
                problem = f"{action} runs without the {content} of stage {action.stage}"
                yield position, problem, "it after what makes them and before what ends them"
    for (content, stage), (position, action) in there.items():
        wanted = f"{_like(action, ENDING, content)} after the last action of stage {stage}"
        yield position, f"{action} is never ended", wanted


def _like(action: Action, kinds: Mapping[Kind, Content], content: Content) -> Action:
    """The action of one of `kinds` for this content, with the stage and number of `action`."""
    return Action(next(kind for kind, its in kinds.items() if its is content), action.stage, action.microbatch)


def _without_faults(schedule: Schedule) -> tuple[Schedule, list[list[int]]]:
    """The schedule without reductions and wrong actions: those that do not exist, are on another rank, run again or are
    too many. And per rank, the positions of the remaining entries.
    """
    seen: set[Action] = set()
    kinds: defaultdict[Work, set[Kind]] = defaultdict(set)
    kept: list[list[tuple[int, list[Action]]]] = []
    for rank, row in enumerate(schedule.rows):
        kept.append([])
        for position, entry in enumerate(row):
            actions = [each for each in actions_of(entry) if each not in seen and _belongs(schedule, each, rank)]
            seen.update(actions)
            kept[-1].append((position, actions))
            for action in actions:
                kinds[action.work].add(action.kind)
    ways = ways_of(schedule)
    right = {place: nearest(has, ways) for place, has in kinds.items()}
    rows: list[tuple[Entry, ...]] = []
    positions: list[list[int]] = []
    for row, entries in zip(schedule.rows, kept, strict=True):
        left = [
            (position, [each for each in actions if each.kind in right[each.work]]) for position, actions in entries
        ]
        left = [(position, actions) for position, actions in left if actions]
        positions.append([position for position, _ in left])
        rows.append(tuple(row[position] if len(actions) > 1 else actions[0] for position, actions in left))
    return replace(schedule, rows=tuple(rows)), positions


def _belongs(schedule: Schedule, action: Action, rank: int) -> bool:
    placement = schedule.placement
    exists = action.stage < placement.num_stages and action.microbatch < schedule.num_microbatches
    exists = exists and _has_its_slice(schedule, action.kind, action.slice)
    return exists and action.kind not in SEVERAL and placement.rank_of(action.stage, action.microbatch) == rank


def _unmade(schedule: Schedule) -> set[Value]:
    """The values that actions of a schedule need and none makes."""
    stages, slices = schedule.placement.num_stages, schedule.slices
    actions = [action for rank in range(len(schedule.rows)) for action in schedule.actions(rank)]
    made = {value for action in actions for value in makes(action, stages, slices)}
    return {value for action in actions for value in needs(action, stages, slices)} - made


def _over_cap(schedule: Schedule, cap: MemoryCap, given: FactorsLike = ()) -> Iterator[Violation]:
    """One violation per rank that exceeds its cap, at the first action that does.

    `cap` is in microbatches of a rank's whole share of the model: one number for all ranks, or one per rank.
    Activations are counted as in `Timeline.peak_activations`: from an F to its B or I, and one at a time in a schedule
    without backwards. Each counts as often as the factor of its microbatch says, and slices are taken as equal.

    Raises UsageError unless every rank has a positive cap.
    """
    stages = schedule.placement.num_stages
    factors = factors_of(given, stages)
    require_factors(factors, schedule.num_microbatches)
    most = max(
        (action.microbatch for rank in range(len(schedule.rows)) for action in schedule.actions(rank)), default=0
    )
    table = table_of(factors, stages) or ((),) * stages
    ones = (1.0,) * (most + 1)  # of microbatches and stages that do not exist, too
    each = defaultdict(lambda: ones, {stage: (*row, *ones[len(row) :]) for stage, row in enumerate(table)})
    counts = [_alive(schedule, rank, each) for rank in range(len(schedule.rows))]
    share = schedule.placement.chunks_per_rank * schedule.slices
    least = [max(count, default=0) / share for count in counts]
    for rank, (count, limit) in enumerate(zip(counts, cap_per_rank(cap, least), strict=True)):
        for position, alive in enumerate(count):
            if alive / share > limit * (1 + 1e-9):
                kept = f"{alive / share:g} microbatches of activations"
                has = f"with {schedule.rows[rank][position]} the rank keeps {kept}"
                wants = f"at most {limit:g}; the least cap that works here is {least[rank]:g}"
                yield Violation(has, wants, rank, position)
                break


def _alive(schedule: Schedule, rank: int, factors: Mapping[int, Sequence[float]]) -> list[float]:
    """Per entry of a row, the most chunk activations that are kept during it. `factors` are by stage and microbatch."""
    row, actions = schedule.rows[rank], [*schedule.actions(rank)]
    changes = [
        change.net(Content.SAVED) * factors[action.stage][action.microbatch]
        for action, change in zip(actions, memory_changes(actions), strict=True)
    ]
    if not any(change < 0 for change in changes):  # no activation is kept for later
        return [max(factors[action.stage][action.microbatch] for action in actions_of(entry)) for entry in row]
    alive, counts, each = 0.0, list[float](), iter(changes)
    for entry in row:
        most = alive
        for _ in actions_of(entry):
            alive += next(each)
            most = max(most, alive)
        counts.append(most)
    return counts
