"""Layouts: the search for the fastest layouts of a model on a cluster, within memory; and the error for a model that
fits in none: how much memory is missing, and which changes would make it fit. Must not contain: what a layout costs,
and how the result is shown.
"""

from __future__ import annotations

import gc
import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from pipeflow.core.analysis.in_time import LateError
from pipeflow.core.errors import ScheduleError, UsageError, require_type
from pipeflow.core.soundness.verification import verify
from pipeflow.core.text import bytes_text
from pipeflow.planning.estimate import plan
from pipeflow.planning.layer_kinds import routed_layers
from pipeflow.planning.layout import Layout, Wanted
from pipeflow.planning.layout_cells import Cell, heavier, leanest_cells, lighter, lightest_cells
from pipeflow.planning.layout_ties import TIE, Timed, plainest, plainness, ranking
from pipeflow.planning.layout_trials import (
    ROUNDING,
    Choice,
    Kept,
    LayoutTrial,
    choices,
    families_of,
    least_seconds,
    priced,
    trials,
)
from pipeflow.planning.rank_memory import ALLOCATOR, kept_of_model
from pipeflow.planning.step_plan import Plan, StepParts

# Theory of operation
#
# A simulation of a step takes milliseconds to seconds, and there are thousands of layouts. So it is a best-first
# search: a heap has nodes by a lower bound on their step time, and the node with the lowest bound is opened first.
#
# 1. A `Cell` (sizes, microbatches, what saves memory) has the average time that its ranks compute as its bound.
#    If even its share of the weights and of one microbatch does not fit, all its families go to the next rung at once.
#    Opened, it becomes a `Choice` per schedule and cut, with the bound of the computations of its busiest rank.
# 2. A `Choice` gets its costs, and so a sharper bound: it becomes a `LayoutTrial`. Most choices never get them, since
#    a faster layout of the same sizes is known before.
# 3. A `LayoutTrial` is checked for memory with few microbatches. If its step is long, it is estimated from two short
#    steps. Both are cheap, and it goes back into the heap with the higher bound.
#    A trial that does not fit brings those of its family on the next rung (`layout_cells`).
# 4. A trial that was checked is simulated, as long as its step may still be short enough to be listed. Its time is
#    exact, and it enters its group.
#
# The search ends when the lowest bound exceeds the time of the last layout that would be listed. All bounds are proved
# but the estimate, which TRUST corrects. What is listed is the fastest, not the plainest of those that are about as
# fast: then a cluster that makes each layout faster makes no listed step longer.
#
# The plainest within TIE of the fastest is what a search recommends. When a layout has a bound above the best of its
# sizes, the fastest is known, since all others have higher bounds. So it is simulated only if it is plainer than what
# is known within TIE.

MORE = (2, 4, 8, 16, 32, 64)  # times as many devices are tried
TRUST = 0.98  # an estimate of a long step may be too long by this share; of 334 layouts, the worst was by 1.8 %


@dataclass(frozen=True, slots=True)
class Ranked:
    """A layout that was found.

    Attributes:
        layout: its sizes, schedule and cut.
        plan: its cost, from a simulation of the whole step.
    """

    layout: Layout
    plan: Plan

    @property
    def step_seconds(self) -> float:
        """The time of a step, in seconds."""
        assert self.plan.step_seconds is not None
        return self.plan.step_seconds

    @property
    def parts(self) -> StepParts:
        """The parts of the step time, in seconds."""
        assert self.plan.step_parts is not None
        return self.plan.step_parts

    def grown(self, best: Ranked) -> dict[str, float]:
        """Per part of the step time, the seconds by which it is longer than in `best`, the largest first."""
        more = {name: seconds - getattr(best.parts, name) for name, seconds in self.parts._asdict().items()}
        return {name: more[name] for name in sorted(more, key=lambda name: -more[name])}


@dataclass(frozen=True, slots=True)
class Layouts:
    """The result of `find_layouts`.

    Attributes:
        wanted: the task of the search.
        ranked: the layouts by time, the fastest first. They have different sizes, or different schedules if the sizes
            were given.
        recommended: the plainest layout within TIE of the fastest, by `plainness`; the fastest, if it is that itself.
            It may have the sizes of one in `ranked`, and then it is not there.
        simulated: how many layouts were simulated.
    """

    wanted: Wanted
    ranked: tuple[Ranked, ...]
    recommended: Ranked
    simulated: int

    @property
    def fastest(self) -> Ranked:
        """The layout with the shortest step."""
        return self.ranked[0]

    @property
    def listed(self) -> tuple[Ranked, ...]:
        """Those in `ranked` and the recommended one, by time."""
        further = [] if any(each is self.recommended for each in self.ranked) else [self.recommended]
        return tuple(sorted((*self.ranked, *further), key=lambda each: each.step_seconds))

    @property
    def preferred(self) -> tuple[Ranked, ...]:
        """The recommended layout, then the others by time: in this order they are to be used."""
        return self.recommended, *(each for each in self.listed if each is not self.recommended)


def find_layouts(wanted: Wanted, *, top: int = 5, progress: Callable[[float], None] | None = None) -> Layouts:
    """The `top` best layouts. Each one is sound, within memory, and priced by a simulation of its whole step.
    `progress` is called now and then with a rough share of the work that is done, from 0 to 1.

    One layout is listed for each choice of tensor, pipeline and data sizes. If `wanted` sets the tensor and the
    pipeline size, one layout is listed for each schedule. The fastest comes first. Of equal times, the plainest one
    does, by `plainness`. The recommended layout is the plainest of all that are within TIE of the fastest.

    Layouts are tried sorted by a lower bound on their step time, until the bound exceeds the times found. So no layout
    that is left out is better, with one exception. Steps with many more microbatches than stages are first estimated
    from two shorter steps. Such a layout may be left out wrongly, if its estimate is more than 2 % too long.

    Raises UsageError if no layout divides the devices or the batch; the error names the nearest numbers that work. Also
    raises it if the model fits nowhere; the error says how much memory is missing and which changes would make it fit.
    """
    require_type("wanted", wanted, Wanted)
    search = _Search(wanted, top, progress)
    with _no_collections():
        search.run()
    if not search.groups:
        raise _no_room(wanted.without_kinds)
    found = [_planned(wanted, layout) for _, layout in ranking(search.groups.values())[:top]]
    plain = plainest(search.tied)[1]
    known = (each for each in found if each.layout is plain)
    return Layouts(wanted, tuple(found), next(known, None) or _planned(wanted, plain), search.simulated)


def _planned(wanted: Wanted, layout: Layout) -> Ranked:
    """The layout with its plan. Raises ScheduleError if its schedule is unsound, which is a bug of pipeflow."""
    schedule = layout.make_schedule()
    if wrong := verify(schedule):
        raise ScheduleError(f"{layout.schedule} is unsound: this is a bug of pipeflow", wrong)
    return Ranked(layout, plan(wanted.model, schedule, layout.setup, cluster=wanted.cluster, cut=layout.cut))


def faster_on_fewer(found: Layouts) -> Layouts | None:
    """The layouts on a half, a quarter and so on of the devices, if the fastest of them is faster than that of `found`
    by more than a tie. None if there is none, as for most models: half of the devices compute twice as long.
    """
    best, fewer = found.fastest.step_seconds, None
    devices = found.wanted.devices
    while devices % 2 == 0:
        devices //= 2
        try:
            wanted = replace(found.wanted, devices=devices)
            search = _Search(wanted, 1, None, below=best / (1 + TIE))
        except UsageError:  # these devices, their shards or the batch do not divide
            continue
        with _no_collections():
            search.run()
        if not search.groups:
            break
        fewer = find_layouts(wanted, top=1)
        best = fewer.fastest.step_seconds
    return fewer


@contextmanager
def _no_collections() -> Iterator[None]:
    """Disables garbage collection. Simulations make millions of objects without cycles, and each collection would visit
    all of them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Search:
    """Tries layouts sorted by their lower bound. The heap has what to do next, which is called with the bound: open a
    cell or a family in one that saves memory, price a choice, check a trial, or simulate one that was checked.
    """

    def __init__(
        self, wanted: Wanted, top: int, progress: Callable[[float], None] | None, below: float = math.inf
    ) -> None:
        self._progress, self._below = progress, below
        self.groups: dict[tuple[object, ...], Timed] = {}  # the best of each choice of sizes
        self.tied: list[Timed] = []  # what is within TIE of the fastest so far
        self.simulated = 0
        self._first = math.inf
        self._wanted, self._limit, self._top, self._number = wanted, wanted.limit, top, count()
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._misfits: set[tuple[Cell, Kept]] = set()
        for cell in lightest_cells(wanted):
            self._push(least_seconds(wanted, cell), partial(self._open, cell, None))

    def run(self) -> None:
        """Runs the search, which fills `groups`."""
        while self._heap and self._heap[0][0] <= self._highest():
            bound, _, go_on = heapq.heappop(self._heap)
            self._report(bound)
            go_on(bound)

    def _open(self, cell: Cell, only: Collection[Kept] | None, bound: float) -> None:
        if _least(self._wanted, cell) > self._limit:
            self._climb(bound, cell, [family.kept for family in families_of(self._wanted, cell, only)])
            return
        for least, choice in choices(self._wanted, cell, only=only):
            self._push(max(bound, least), partial(self._price, choice))

    def _price(self, choice: Choice, bound: float) -> None:
        if bound > self._longest(choice):
            return
        if (found := priced(self._wanted, choice, self._limit)) is None:
            self._climb(bound, choice.cell, [choice.family.kept])
        else:
            least, trial = found
            self._push(max(bound, least), partial(self._check, trial))

    def _climb(self, bound: float, cell: Cell, families: Iterable[Kept]) -> None:
        """Layouts of these families do not fit: tries what saves more memory, if nothing that saves less fits."""
        fresh = [kept for kept in dict.fromkeys(families) if (cell, kept) not in self._misfits]
        self._misfits.update((cell, kept) for kept in fresh)
        for other in heavier(self._wanted, cell) if fresh else ():
            below = list(lighter(self._wanted, other))
            ready = [kept for kept in fresh if all((each, kept) in self._misfits for each in below)]
            if ready:
                self._push(max(bound, least_seconds(self._wanted, other)), partial(self._open, other, ready))

    def _report(self, bound: float) -> None:
        """Tells how far the bound of what is tried has come, from the first one to the one that ends the search."""
        self._first = min(self._first, bound)
        if self._progress is None:
            return
        if self._first < (end := self._highest()) < math.inf:
            self._progress((bound - self._first) / (end - self._first))

    def _push(self, bound: float, go_on: Callable[[float], None]) -> None:
        heapq.heappush(self._heap, (bound, next(self._number), go_on))

    def _highest(self) -> float:
        """The bound above which nothing can be listed, and nothing can be a tie of the fastest."""
        times = sorted(seconds for seconds, _ in self.groups.values())
        listed = times[self._top - 1] if len(times) >= self._top else math.inf
        return min(max(listed, self._tie), self._below)

    @property
    def _tie(self) -> float:
        """The longest step that is a tie of the fastest one so far."""
        return (1 + TIE) * min((seconds for seconds, _ in self.tied), default=math.inf)

    def _check(self, trial: LayoutTrial, bound: float) -> None:
        if bound > self._longest(trial):
            return
        if trial.least_bytes() > self._limit:
            self._climb(bound, trial.cell, [trial.family.kept])
        else:
            estimate = trial.estimated_seconds()
            known = bound if estimate is None else max(bound, TRUST * estimate)
            self._push(known, partial(self._simulate, trial))

    def _simulate(self, trial: LayoutTrial, bound: float) -> None:
        longest = self._longest(trial)
        if bound > longest:
            return
        self.simulated += 1
        try:
            seconds, needed = trial.simulated(longest)
        except LateError:
            return
        if longest < seconds < math.inf:
            return  # without its memory: what needs less is no faster
        if needed() > self._limit:
            self._climb(bound, trial.cell, [trial.family.kept])
            return
        key, timed = self._key(trial), (seconds, trial.layout)
        self.groups[key] = ranking([timed, self.groups.get(key, timed)])[0]
        self.tied.append(timed)
        self.tied = [each for each in self.tied if each[0] <= self._tie]

    def _longest(self, choice: Choice) -> float:
        """The longest step with which a layout may be the best of its sizes, or the plainest of the ties."""
        best, highest = self.groups.get(self._key(choice)), self._highest()
        if best is None:
            return highest
        if best[0] < self._tie and plainness(choice.layout) < plainness(plainest(self.tied)[1]):
            return self._tie
        return min(best[0], highest)

    def _key(self, choice: Choice) -> tuple[object, ...]:
        cell, are_given = choice.cell, self._wanted.tensor is not None and self._wanted.pipeline is not None
        sizes = cell.setup.tensor, cell.pipeline, cell.setup.data, cell.setup.context
        return (*sizes, choice.family.name) if are_given else sizes


def _no_room(wanted: Wanted) -> UsageError:
    """The error for a model that fits nowhere."""
    layout, least = smallest(wanted)
    missing = least - wanted.limit
    needs = f"needs {bytes_text(least)} on its fullest device, which is {bytes_text(missing)} more than the limit of "
    needs += bytes_text(wanted.limit)
    if len(wanted.cluster.taken(wanted.devices)) > 1:
        needs = f"lacks {bytes_text(missing)} on one kind of devices"
    return UsageError(f"no layout fits: the closest one, {described(layout)}, {needs}; {_advice(wanted)}")


def described(layout: Layout) -> str:
    """The layout in a few words."""
    kept = {
        "none": "without recomputation",
        "selective": "recomputing scores",
        "op": "recomputing every other product",
        "full": "recomputing layers",
    }
    shards = f" over {layout.shard_ranks} replicas" if layout.shard_ranks else ""
    zero = f", ZeRO-{layout.zero}{shards}" if layout.zero else ""
    further = {"context": layout.context, "expert": layout.expert}
    others = "".join(f" x {name} {ranks}" for name, ranks in further.items() if ranks > 1)
    sizes = f"tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}{others}"
    return (
        f"{sizes} with {layout.schedule} and microbatches of {layout.microbatch_size}, {kept[layout.checkpoint]}{zero}"
    )


def smallest(wanted: Wanted, enough: float = 0.0) -> tuple[Layout, float]:
    """The layout whose fullest device needs the fewest bytes, and these bytes. What a device has less than `limit`
    counts as needed. The search ends at the first layout that needs at most `enough`.
    """
    number = count()
    heap: list[tuple[float, int, Cell | LayoutTrial]] = [
        (_least(wanted, cell), next(number), cell) for cell in leanest_cells(wanted)
    ]
    heapq.heapify(heap)
    best: tuple[Layout, float] | None = None
    while heap and (best is None or heap[0][0] < best[1]):
        _, _, node = heapq.heappop(heap)
        if isinstance(node, LayoutTrial):
            needed = node.peak_bytes() if node.least_bytes() < (best[1] if best else float("inf")) else float("inf")
            if best is None or needed < best[1]:
                best = node.layout, needed
                if needed <= enough:
                    break
        else:
            for _, trial in trials(wanted, node, best[1] if best else float("inf")):
                heapq.heappush(heap, (max(trial.state), next(number), trial))
    if best is None:
        raise UsageError(_undivided(wanted))
    return best


def _undivided(wanted: Wanted) -> str:
    """The error for expert ranks or shards that divide no layout."""
    if wanted.expert is not None or wanted.expert_tensor is not None:
        free = (cell.setup.expert for cell in leanest_cells(replace(wanted, expert=None, expert_tensor=None)))
        asked = f"{wanted.expert or 1} expert ranks of {wanted.expert_tensor or 1} devices"
        works = " or ".join(map(str, sorted(set(free))))
        return f"{asked} divide no stage of {wanted.devices} devices: expert {works} works"
    return f"no layout has replicas in groups of shard_ranks={wanted.shard_ranks}: leave other sizes open"


def _least(wanted: Wanted, cell: Cell) -> float:
    """A lower bound on the bytes of the fullest device of a cell: its share of the weights, gradients and optimizer,
    and of what one microbatch keeps, with what the backward of its lightest layer needs.
    """
    setup, precision = cell.setup, cell.setup.precision
    weight = precision.weight / (setup.shards if setup.zero == 3 else 1)
    gradient = precision.gradient / (setup.shards if setup.zero > 1 and cell.pipeline == 1 else 1)
    model, states = wanted.model, (1 - setup.offload_optimizer) * (precision.master + precision.moments)
    routed = routed_layers(model.kinds + model.further_kinds) * model.expert_parameters(1, 1)
    others = (model.parameters - routed) / (setup.tensor * cell.pipeline)
    own = routed / (setup.expert * setup.expert_split * cell.pipeline)
    divided = others * states / setup.shards + own * states / setup.expert_shards
    kept, backward = kept_of_model(model, setup)
    used = (others + own) * (weight + gradient) + divided + kept / cell.pipeline + backward
    return (1 - ROUNDING) * (1 + ALLOCATOR) * used


def _advice(wanted: Wanted) -> str:
    """The changes, each alone, with which a layout fits."""
    found = [words for words, change in _changes(wanted) if _fits(wanted, **change)]
    more = next((times for times in MORE if _fits(wanted, devices=wanted.devices * times)), None)
    if more is not None:
        found.append(f"{wanted.devices * more} devices")
    return (
        f"it fits with {', or with '.join(found)}" if found else "it needs devices with more memory, or a smaller model"
    )


def _changes(wanted: Wanted) -> Iterator[tuple[str, dict[str, Any]]]:
    given = {
        "checkpoint": "recomputation",
        "zero": "ZeRO-1",
        "tensor": "another number of tensor ranks",
        "pipeline": "another number of pipeline ranks",
        "context": "another number of context ranks",
        "expert": "another number of expert ranks",
        "microbatch_size": "smaller microbatches",
    }
    yield from ((words, {name: None}) for name, words in given.items() if getattr(wanted, name) is not None)
    if wanted.sequence_parallel is False:
        yield "sequence parallelism", {"sequence_parallel": None}


def _fits(wanted: Wanted, **change: Any) -> bool:
    try:
        changed = replace(wanted, **change)
        return smallest(changed, changed.limit)[1] <= changed.limit
    except UsageError:  # nothing divides, or there are no more devices
        return False
