"""Trials: the layouts that a search may try, and what each of them costs: bounds first, then exactly. Must not contain:
in which order they are tried, and which are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from operator import add
from typing import Any, NamedTuple

from pipeflow.core.analysis.difference import has_halves
from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import Content
from pipeflow.core.errors import UsageError
from pipeflow.core.partition import Part
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline
from pipeflow.planning.blocks import Transformer
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.cuts import (
    Profile,
    cut_by_load,
    even_cut,
    least_makespan,
    least_of_cut,
    loads_of,
    part_shares,
    profile,
)
from pipeflow.planning.device_map import map_devices
from pipeflow.planning.layout import Layout, Wanted
from pipeflow.planning.layout_cells import Cell
from pipeflow.planning.physical import Physical, physical_costs
from pipeflow.planning.rank_memory import ALLOCATOR, RankPeaks, kept_by_stages, peaks, state_bytes
from pipeflow.planning.setup import Setup
from pipeflow.planning.shares import sequence_of
from pipeflow.planning.transformer import GPT
from pipeflow.schedules import make_schedule, options_of
from pipeflow.schedules.orders.additions import gathering
from pipeflow.schedules.orders.memory_search import NoOrderError

CHUNKS = (2, 3, 4, 5, 6, 7, 8, 10, 12)  # stages per rank that are tried
ENDS = (0, 2)  # layers that the parts before and after them are worth, where stages are to be equal
ACTIONS = 2_000_000  # of one schedule at most; larger ones are not tried
REMEMBERED = 50_000  # actions of a schedule that is kept for its next simulation
SAVING_ACTIONS = 12_000  # of one that is searched for with kinds that save memory
ROUNDING = 1e-8  # by which the bytes of an order may exceed what a search was given
ENOUGH = 8  # microbatches with which every schedule that ever splits backwards does so

Cut = tuple[Part, ...]
Kept = tuple[str, Placement, int]  # the name of a family, the placement of its stages, and its slices
SLICES = (1, 2, 4, 8)  # of a sequence that are tried
SLICE = 8192  # tokens of a slice at least: products of fewer lose more than slices gain


@dataclass(frozen=True, slots=True)
class Family:
    """A schedule with its options, for a number of ranks.

    Attributes:
        name, options: as in `Layout`.
        placement: of its stages.
        split: whether some of its backwards come in two halves.
    """

    name: str
    options: tuple[tuple[str, Any], ...]
    placement: Placement
    split: bool

    def under(self, cost: CostModel, kinds: str, room: tuple[float, ...]) -> Family:
        """The family with an order for these costs, if it is searched for given costs; otherwise the family itself.
        With `kinds` the order keeps within the `room` of each rank, in bytes.
        """
        if "cost" not in options_of(self.name):
            return self
        saving = (("kinds", kinds), ("bytes_cap", room)) if kinds != "none" else ()
        return replace(self, options=(*self.options, ("cost", cost), *saving))

    @property
    def kept(self) -> Kept:
        """The parts that are the same under any costs."""
        return self.name, self.placement, self.slices

    @property
    def saves(self) -> bool:
        """Whether its orders may offload or recompute, to keep within a room."""
        return any(name == "kinds" for name, _ in self.options)

    @property
    def slices(self) -> int:
        """Into how many slices it cuts each microbatch."""
        return int(dict(self.options).get("slices", 1))

    def make(self, microbatches: int) -> Schedule:
        """Makes the schedule of this family with so many microbatches."""
        return make_schedule(self.name, ranks=self.placement.num_ranks, microbatches=microbatches, **dict(self.options))

    def step(self, microbatches: int, gathers: bool) -> Schedule:
        """The same schedule with reductions, and with gathers of its stages if it `gathers`. Raises UsageError as
        `gathering`.
        """
        step = _step if self.actions(microbatches) <= REMEMBERED else _step.__wrapped__
        return step(self, microbatches, gathers)

    def actions(self, microbatches: int) -> int:
        """An upper bound of the number of actions."""
        return self.placement.num_stages * microbatches * self.slices * (3 if self.split else 2)

    def peaks(self, microbatches: int) -> tuple[RankPeaks, ...]:
        """The most that its ranks keep."""
        return _peaks(self.name, self.placement.num_ranks, microbatches, self.options)


@lru_cache(maxsize=64)
def _step(family: Family, microbatches: int, gathers: bool) -> Schedule:
    """As `Family.step`: a search simulates a schedule under the costs of many sizes and cuts."""
    made = family.make(microbatches).with_reductions()
    return gathering(made) if gathers else made


@lru_cache(maxsize=2048)
def _peaks(name: str, ranks: int, microbatches: int, options: tuple[tuple[str, Any], ...]) -> tuple[RankPeaks, ...]:
    return peaks(make_schedule(name, ranks=ranks, microbatches=microbatches, **dict(options)))


@lru_cache(maxsize=4096)
def _family(name: str, ranks: int, options: tuple[tuple[str, Any], ...]) -> Family | None:
    """None where the schedule cannot have so many ranks."""
    try:
        schedule = make_schedule(name, ranks=ranks, microbatches=ENOUGH, **dict(options))
    except UsageError:
        return None
    return Family(name, options, schedule.placement, has_halves(schedule))


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout before its costs.

    Attributes:
        cell, family, cut: the layout.
    """

    cell: Cell
    family: Family
    cut: Cut

    @property
    def layout(self) -> Layout:
        """The sizes, schedule and cut as a `Layout`."""
        return Layout(*self.cell, self.family.name, dict(self.family.options), self.cut)


@dataclass(frozen=True, slots=True)
class LayoutTrial(Choice):
    """A layout with its costs, before its simulation.

    Attributes:
        physical: its costs in seconds.
        state: per rank, the bytes that it holds besides activations, and those that its devices have less than others.
        step: the same during the optimizer's step, or more.
    """

    physical: Physical
    state: tuple[float, ...]
    step: tuple[float, ...]

    def least_bytes(self) -> float:
        """A lower bound on the bytes of its fullest device: the bytes with few microbatches. With more microbatches, no
        schedule of the registry keeps less. An order that may save memory, and one of slices, keeps at least one
        microbatch of a stage.
        """
        if self.family.saves or self.family.slices > 1:
            return self._fullest(_of_one(self.physical.cost.sizes[Content.SAVED], self.family.placement))
        ranks, many = self.cell.pipeline, self.cell.microbatches
        odd = many % len(self.family.placement.paths)  # two directions keep other amounts for odd numbers
        return self._peak_bytes(min(many, 2 * ranks + odd))

    def peak_bytes(self) -> float:
        """The highest memory of a device, in bytes."""
        if self.family.slices > 1:
            return self.simulated()[1]()
        return self._peak_bytes(self.cell.microbatches)

    def _peak_bytes(self, microbatches: int) -> float:
        sizes = self.physical.cost.sizes
        return self._fullest(each.bytes(sizes) for each in self.family.peaks(microbatches))

    def _fullest(self, kept: Iterable[float]) -> float:
        return max(*self.step, *(state + (1 + ALLOCATOR) * most for state, most in zip(self.state, kept, strict=True)))

    def simulated(self, within: float = inf) -> tuple[float, Callable[[], float]]:
        """Simulates one step and returns its seconds, and a function for the bytes of the fullest device: infinite if
        no order within the room is found, or its stages would be gathered too often. Raises LateError for a step that
        takes longer than `within` seconds, where a rank shows it before the end.
        """
        try:
            timeline = self._timeline(self.cell.microbatches, within - self.physical.after)
        except (NoOrderError, UsageError):
            return inf, lambda: inf
        return timeline.makespan + self.physical.after, lambda: self._fullest(timeline.peak_bytes)

    def estimated_seconds(self) -> float | None:
        """The estimated seconds of one step, from two steps with fewer microbatches. It assumes that each group of
        microbatches adds the same time. None if the two steps are not much shorter. An estimate may be too high or too
        low.
        """
        ranks, many = self.cell.pipeline, self.cell.microbatches
        few = 2 * ranks + many % ranks
        if 2 * few + ranks > many // 2 or "cost" in options_of(self.family.name):
            return None
        try:
            one, other = (self._timeline(number).makespan for number in (few, few + ranks))
        except UsageError:  # of a gather too often
            return None
        return one + (many - few) / ranks * (other - one) + self.physical.after

    def _timeline(self, microbatches: int, within: float = inf) -> Timeline:
        step = self.family.step(microbatches, gathers=bool(self.physical.cost.unshard))
        return self.physical.timeline(step, within=within)


def families(names: tuple[str, ...], ranks: int, layers: int, slices: int = 1) -> Iterator[Family]:
    """The schedules among `names` to try on so many ranks, of several those that cut microbatches into so many slices.
    On one rank all are the same, so only one is tried.
    """
    cut = (("slices", slices),) if slices > 1 < ranks else ()
    if ranks == 1:
        names = ("1f1b",) if "1f1b" in names else names[:1]
    for name in names:
        for options in _options(name, ranks, layers) if not cut or "slices" in options_of(name) else ():
            found = _family(name, ranks, (*options, *cut))
            if found is not None and found.placement.num_stages <= layers:
                yield found


@lru_cache(maxsize=512)
def _families(names: tuple[str, ...], ranks: int, layers: int, slices: int) -> tuple[Family, ...]:
    return tuple(families(names, ranks, layers, slices))


def _options(name: str, ranks: int, layers: int) -> Iterator[tuple[tuple[str, int], ...]]:
    known = options_of(name)
    if "chunks" in known:
        yield from ((("chunks", chunks),) for chunks in CHUNKS if chunks == 2 or _divides(ranks * chunks, layers))
    elif "waves" in known:
        yield from ((("waves", waves),) for waves in (1, 2, 3) if waves == 1 or layers % (2 * ranks * waves) == 0)
    else:
        yield ()


def _divides(stages: int, layers: int) -> bool:
    """Whether so many stages are equal, with the parts before and after the layers or without."""
    return any((layers + ends) % stages == 0 for ends in ENDS)


def trials(wanted: Wanted, cell: Cell, limit: float = inf) -> Iterator[tuple[float, LayoutTrial]]:
    """The layouts of a cell whose devices hold at most `limit` bytes besides activations. Each comes with a lower bound
    on its step time, in seconds.
    """
    yield from filter(None, (priced(wanted, choice, limit) for _, choice in choices(wanted, cell)))


def choices(wanted: Wanted, cell: Cell, *, only: Collection[Kept] | None = None) -> Iterator[tuple[float, Choice]]:
    """All layouts of a cell, each with a lower bound on its step time, in seconds, from its computations alone. With
    `only`, those of these families.
    """
    for family in families_of(wanted, cell, only):
        for cut, whole, split in _bounds(wanted, cell, family.placement, family.slices):
            yield split if family.split else whole, Choice(cell, family, cut)


def _slices(wanted: Wanted, cell: Cell) -> Iterator[int]:
    """Into how many slices the layouts of a cell cut each microbatch: into none in a ring of context ranks, and with
    ZeRO-3 over context ranks.
    """
    setup, model = cell.setup, wanted.model
    shares_tokens = setup.context > 1 and (setup.context_kind == "ring" or setup.zero > 1)
    can_cut = cell.pipeline > 1 and not shares_tokens
    if cell.pipeline == 1 or wanted.slices is None:
        yield 1
    elif can_cut or wanted.slices == 1:
        yield wanted.slices
    if can_cut and wanted.slices is None and isinstance(model, GPT):
        tokens = sequence_of(model, setup)
        yield from (slices for slices in SLICES if slices > 1 and tokens >= slices * SLICE)


def families_of(wanted: Wanted, cell: Cell, only: Collection[Kept] | None = None) -> Iterator[Family]:
    """The families that are tried in a cell, or those of them that are `only`."""
    many = [each for each in _slices(wanted, cell) if only is None or any(each == slices for _, _, slices in only)]
    names, ranks, layers = wanted.schedules, cell.pipeline, wanted.model.layers
    for family in (family for slices in many for family in _families(names, ranks, layers, slices)):
        saves = wanted.kinds != "none" and "cost" in options_of(family.name)
        is_short = family.actions(cell.microbatches) <= (SAVING_ACTIONS if saves else ACTIONS)
        if is_short and (only is None or family.kept in only):
            yield family


@lru_cache(maxsize=512)
def _bounds(wanted: Wanted, cell: Cell, placement: Placement, slices: int) -> tuple[tuple[Cut, float, float], ...]:
    """The cuts of a placement, each with lower bounds on the makespan with whole and with split backwards. Where layers
    of a kind differ in what they copy or recompute, as the number of layers of a stage says, there is no such bound.
    """
    setup, model = cell.setup, wanted.model
    mapped = map_devices(wanted.cluster, setup, cell.pipeline)
    profiles = [_profile(model, _of_one_replica(setup), kind) for kind in mapped.kinds]
    are_alike = setup.checkpoint_layers is None and not setup.offload_layers
    found = list[tuple[Cut, float, float]]()
    for cut in dict.fromkeys(_cuts(wanted, cell, placement)):
        least = (0.0, 0.0)
        if are_alike:
            many = slices * cell.microbatches  # each slice counts as a microbatch of that part
            least = least_of_cut(profiles, mapped.ranks, placement, cut, model.kinds, many)
        whole, split = ((1 - ROUNDING) * each / slices for each in least)
        found.append((cut, whole, split))
    return tuple(found)


def priced(wanted: Wanted, choice: Choice, limit: float = inf) -> tuple[float, LayoutTrial] | None:
    """A layout with its costs, and a sharper lower bound on its step time, in seconds; None if its devices hold more
    than `limit` bytes besides activations.
    """
    cell, family, cut = choice.cell, choice.family, choice.cut
    if (found := _costs_of(wanted, cell, family.placement, limit, cut, family.slices)) is None:
        return None
    room = tuple((limit - state) / (1 + ALLOCATOR) * (1 - ROUNDING) for state in found.state)
    ordered = family.under(found.physical.cost, wanted.kinds, room)
    least = found.split if family.split else found.whole
    return least + found.physical.after, LayoutTrial(cell, ordered, cut, found.physical, found.state, found.step)


class _Costs(NamedTuple):
    """The costs of all layouts of a cell that share a placement and a cut. `whole` and `split` are lower bounds on the
    makespan with whole backwards and with split backwards.
    """

    physical: Physical
    state: tuple[float, ...]
    step: tuple[float, ...]
    whole: float
    split: float


def _cuts(wanted: Wanted, cell: Cell, placement: Placement) -> Iterator[Cut]:
    """Evenly, and by what layers cost on each kind of devices alone. Layers of several kinds count alike once, since a
    first stage with many light layers keeps much, and once by what each costs. With several kinds of devices also by
    what layers cost where they lie, by the memory there, and halfway.
    """
    layers, mapped = wanted.model.layers, map_devices(wanted.cluster, cell.setup, cell.pipeline)
    yield even_cut(layers, placement.num_stages)
    profiles = [_profile(wanted.model, _of_one_replica(cell.setup), kind) for kind in mapped.kinds]
    for each in profiles:
        yield from (cut_by_load(layers, placement, each.first, each.last, (), own) for own in ((), each.weights))
    if len(profiles) > 1 and not mapped.is_mixed:
        first, last, paces, weights = loads_of(mapped.ranks, profiles)
        lacking = wanted.lacking(cell.setup, cell.pipeline)
        memory = tuple(wanted.limit / (wanted.limit - less) for less in lacking)
        halfway = tuple((pace * more) ** 0.5 for pace, more in zip(paces, memory, strict=True))
        yield from (cut_by_load(layers, placement, first, last, each, weights) for each in (paces, memory, halfway))


@lru_cache(maxsize=1024)
def _costs_of(wanted: Wanted, cell: Cell, placement: Placement, limit: float, cut: Cut, slices: int) -> _Costs | None:
    """None if devices hold more than `limit`."""
    model, setup = wanted.model, cell.setup
    lacking = wanted.lacking(setup, cell.pipeline)
    state, step = (
        tuple(map(add, each, lacking)) for each in state_bytes(model, setup, placement, cut, cell.microbatches)
    )
    if max(*state, *step) > limit:
        return None
    of_one = zip(state, _of_one(kept_by_stages(model, setup, cut), placement), strict=True)
    if max(held + (1 + ALLOCATOR) * kept for held, kept in of_one) > limit:
        return None
    physical = physical_costs(model, placement, setup, wanted.cluster, cut=cut, slices=slices)
    least = (least_of_slices(physical.cost, placement, cell.microbatches, slices, split) for split in (False, True))
    return _Costs(physical, state, step, *least)


def least_of_slices(cost: CostModel, placement: Placement, microbatches: int, slices: int, split: bool) -> float:
    """`least_makespan` for microbatches of so many slices, which all take the same time: that of as many more
    microbatches, which need not wait for each other. A slice is sent in no time.
    """
    if slices > 1:
        kinds = "forward", "backward_input", "backward_weight"
        parts: dict[str, Any] = {kind: tuple(time / slices for time in getattr(cost, kind)) for kind in kinds}
        cost = replace(cost, activation_bytes=(), route_bytes={}, **parts)
    return least_makespan(cost, placement, microbatches * slices, split=split)


def _of_one(saved: Sequence[float], placement: Placement) -> list[float]:
    """Per rank, the bytes that one microbatch takes, from those per stage. Each rank keeps at least these before its
    first backward.
    """
    kept = [0.0] * placement.num_ranks
    for stage, rank in enumerate(placement.paths[0]):
        kept[rank] += saved[stage]
    return kept


@lru_cache(maxsize=4096)
def _profile(model: Transformer, setup: Setup, kind: Cluster) -> Profile:
    return profile(model, setup, kind)


@lru_cache(maxsize=16384)
def _of_one_replica(setup: Setup) -> Setup:
    """The key of `_profile`, which depends on replicas only as far as experts lie on them: with the fewest that have
    room for the expert ranks.
    """
    asked = setup.expert * setup.expert_split
    data = asked // math.gcd(asked, setup.tensor * setup.context)
    return replace(setup, data=data, zero=0, shard_ranks=None, overlap=setup.overlaps and setup.zero < 3)


def least_seconds(wanted: Wanted, cell: Cell) -> float:
    """A lower bound on the step time of all layouts of the cell: the average time that its ranks compute. On several
    kinds of devices, each part of the model counts as the least share of the whole that it takes on any of them.
    """
    mapped, setup = map_devices(wanted.cluster, cell.setup, cell.pipeline), _of_one_replica(cell.setup)
    times = [_profile(wanted.model, setup, kind).time for kind in mapped.kinds]
    if len(times) == 1 or mapped.is_mixed:
        return max(times) * cell.microbatches / cell.pipeline
    parts = [part_shares(wanted.model, setup, kind) for kind in mapped.kinds]
    share: float = sum(map(min, zip(*parts, strict=True)))
    together = sum(1 / times[kinds[0]] for kinds in mapped.ranks)
    return share * cell.microbatches / together
