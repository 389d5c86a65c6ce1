"""Cuts: the layers of each stage, evenly, by what they cost, or with the shortest step; and the least time of a step
under a placement. Must not contain: what layers cost, and searches for other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise, product
from math import inf
from typing import NamedTuple

from pipeflow.core.action import Kind
from pipeflow.core.analysis.difference import has_halves
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.partition import Part, stage_parts
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.planning.blocks import Transformer
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.device_map import map_devices
from pipeflow.planning.layer_kinds import ROUTED, LayerKind
from pipeflow.planning.physical import Physical, physical_costs, stage_costs
from pipeflow.planning.setup import Setup

FIRST = (0.0, 0.5, 1.0, 2.0)  # layers that the part before them is worth
LAST = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0)  # and the part after them
ROUNDING = 1e-9  # by which a sum of times may be off
PACES = (1.15, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0, 20.0)  # times of a layer on a slower kind of devices
DENSE = (1.0, 0.8, 0.6, 0.4)  # times of a layer with experts, that a layer without takes


@lru_cache(maxsize=4096)
def cut_by_load(
    layers: int,
    placement: Placement,
    first: float,
    last: float,
    paces: tuple[float, ...] = (),
    weights: tuple[float, ...] = (),
) -> tuple[Part, ...]:
    """Per stage its layers [start, end). A layer costs 1, or its one of `weights`, whose mean is 1. The part before the
    layers costs `first`, and the part after them costs `last`. `paces` say per rank how many times as long it takes; by
    default all ranks are alike.

    Each stage gets a layer. Each other layer goes to the stage whose rank has the least work with it. Ties go to the
    lightest stage, then to the last one. With one stage per rank, no other cut of layers that cost 1 has a lighter
    busiest rank. With weights, borders then move to where as much work is before them. After that, neighbouring borders
    move together by one layer, as long as the busiest ranks get lighter.

    >>> cut_by_load(32, Placement.linear(8), 0.0, 2.4)
    ((0, 4), (4, 8), (8, 12), (12, 16), (16, 20), (20, 25), (25, 30), (30, 32))
    >>> cut_by_load(6, Placement.linear(2), 0.0, 0.0, weights=(0.5, 0.5, 0.5, 1.5, 1.5, 1.5))
    ((0, 4), (4, 6))
    """
    stages = placement.num_stages
    share = 1 / len(placement.paths)  # of the microbatches, that a path has
    loads = [1.0] * stages
    loads[0] += first
    loads[-1] += last
    holders = [[path[stage] for path in placement.paths] for stage in range(stages)]
    one = [share * pace for pace in paces or (1.0,) * placement.num_ranks]  # a layer, per rank
    ranks = [0.0] * placement.num_ranks
    for stage, load in enumerate(loads):
        for rank in holders[stage]:
            ranks[rank] += load * one[rank]
    sizes = [1] * stages
    slower = [each - share for each in one]  # so that a rank counts as it is with one layer more
    for _ in range(layers - stages):
        stage = min(
            range(stages),
            key=lambda each: (max(ranks[rank] + slower[rank] for rank in holders[each]), loads[each], -each),
        )
        sizes[stage] += 1
        loads[stage] += 1
        for rank in holders[stage]:
            ranks[rank] += one[rank]
    borders = [*accumulate(sizes, initial=0)]
    if weights and stages <= layers:
        borders = _weighed(borders, [0.0, *accumulate(weights)], holders, one, (first, last))
    return tuple(pairwise(borders))


def _weighed(
    even: list[int],
    work: Sequence[float],
    holders: Sequence[Sequence[int]],
    one: Sequence[float],
    ends: tuple[float, float],
) -> list[int]:
    """The borders of stages whose layers do not cost the same. `even` are those for layers that cost 1, and `work` is
    that of all layers before each layer. `holders` are the ranks of each stage, and `one` is the time of a mean layer
    on each rank.
    """
    stages = len(holders)

    def loads(borders: list[int]) -> list[float]:
        ranks = [0.0] * len(one)
        for stage, (start, end) in enumerate(pairwise(borders)):
            more = ends[0] * (stage == 0) + ends[1] * (stage == stages - 1)
            for rank in holders[stage]:
                ranks[rank] += (work[end] - work[start] + more) * one[rank]
        return ranks

    def busy(borders: list[int]) -> list[float]:
        return sorted(loads(borders), reverse=True)

    near = [0]
    for stage, border in enumerate(even[1:-1], start=1):
        possible = range(near[-1] + 1, even[-1] - stages + stage + 1)
        near.append(min(possible, key=lambda layer: abs(work[layer] - border)))
    best = min([*near, even[-1]], even, key=busy)
    while True:
        least = busy(best)
        moves = list(_moves(best, work, holders, one, loads(best)))
        most = min((highest for *_, highest in moves), default=0.0)
        moved = [
            [*best[:first], *(border + by for border in best[first:end]), *best[end:]]
            for first, end, by, highest in moves
            if highest <= min(most, least[0]) * (1 + ROUNDING)
        ]
        better = min([best, *moved], key=busy)
        if busy(better) >= least:
            return best
        best = better


def _moves(
    borders: list[int],
    work: Sequence[float],
    holders: Sequence[Sequence[int]],
    one: Sequence[float],
    loads: Sequence[float],
) -> Iterator[tuple[int, int, int, float]]:
    """All ways to move neighbouring borders `first` to `end` - 1 together by one layer, each with the work of the
    busiest rank after it. `loads` is the work of each rank before; the others are as in `_weighed`.
    """
    for first in range(1, len(holders)):
        shifted = {by: [*loads] for by in (-1, 1)}
        for end in range(first + 1, len(holders) + 1):
            border = borders[end - 1]
            for by, ranks in shifted.items():
                more = work[border + by] - work[border]
                for rank in holders[end - 2]:
                    ranks[rank] += more * one[rank]
                for rank in holders[end - 1]:
                    ranks[rank] -= more * one[rank]
                if borders[first - 1] < borders[first] + by and border + by < borders[end]:
                    yield first, end, by, max(ranks)


@lru_cache(maxsize=4096)
def even_cut(layers: int, stages: int) -> tuple[Part, ...]:
    """Per stage its layers [start, end), with numbers of layers that are as equal as possible."""
    return tuple(stage_parts(layers, stages))


def cut_with_ends(layers: int, placement: Placement, first: int | None, last: int | None) -> tuple[Part, ...]:
    """Per stage its layers [start, end), where the first and the last pipeline rank have so many layers, spread evenly
    over their stages, and the other ranks share the rest evenly. These are Megatron-LM's
    --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers. None: as many as the other ranks.

    >>> cut_with_ends(14, Placement.linear(4), 3, 1)
    ((0, 3), (3, 8), (8, 13), (13, 14))

    Raises UsageError unless the placement has stage i on rank i modulo its ranks, and for layers that do not divide.
    """
    ranks, stages = placement.num_ranks, placement.num_stages
    chunks = max(1, stages // ranks)
    if placement != Placement.looped(ranks, chunks):
        raise UsageError(
            "layers of the first and the last rank need a schedule with stage i on rank i modulo its ranks"
        )
    given = {rank: size for rank, size in ((0, first), (ranks - 1, last)) if size is not None}
    if ranks == 1 and first is not None and last is not None and first != last:
        raise UsageError(f"one pipeline rank is the first and the last: it cannot have {first} and {last} layers")
    others, rest = ranks - len(given), layers - sum(given.values())
    for name, size in (("first", first), ("last", last)):
        if size is not None and size % chunks:
            raise UsageError(f"{size} layers of the {name} rank do not divide over its {chunks} stages: use a multiple")
    if rest < 0 or (rest and not others) or (others and rest % (others * chunks)):
        raise UsageError(
            f"{layers} layers leave {rest} for {others} other ranks of {chunks} stages each, which do not divide: give "
            f"other numbers, such that the rest is a multiple of {max(1, others * chunks)}"
        )
    sizes = [given.get(stage % ranks, rest // others if others else 0) // chunks for stage in range(stages)]
    return tuple(pairwise(accumulate(sizes, initial=0)))


Times = tuple[float, float, float]  # of a part's F, I and W for one microbatch


class Profile(NamedTuple):
    """The time of one microbatch in the whole model, of the parts before and after the layers, in mean layers, and of a
    mean layer. `weights`: per layer its time, as a multiple of that; empty if all layers are alike. `before`, `after`
    and `layers`: the times of the parts before and after the layers, and of one layer of each kind.
    """

    time: float
    first: float
    last: float
    layer: float
    weights: tuple[float, ...]
    before: Times
    after: Times
    layers: Mapping[LayerKind, Times]


def profile(model: Transformer, setup: Setup, cluster: Cluster | None) -> Profile:
    """The profile under a setup: in seconds on a cluster of one kind, else in forwards of a layer, with communication
    free. Raises UsageError for a model that the setup does not fit, and as `physical_costs`.
    """
    runs, (before, *parts, after) = _part_times(model, setup, cluster)
    first, *times, last = map(sum, (before, *parts, after))
    layer = sum(times) / model.layers
    layers: dict[LayerKind, Times] = {}
    for (start, end), (forward, backward_input, weight) in zip(runs, parts, strict=True):
        number = end - start
        layers[model.kinds[start]] = forward / number, backward_input / number, weight / number
    each = {kind: sum(taken) for kind, taken in layers.items()}
    weights = _weights(model.kinds, {kind: round(time / max(each.values()), 1) for kind, time in each.items()})
    ends = round(first / layer, 1), round(last / layer, 1)
    return Profile(first + sum(times) + last, *ends, layer, weights, before, after, layers)


def _part_times(model: Transformer, setup: Setup, cluster: Cluster | None) -> tuple[list[Part], list[Times]]:
    """The longest parts of layers that are of one kind, and the times of what is before the layers, of each of these
    parts, and of what is after the layers.
    """
    changes = [layer for layer, (one, other) in enumerate(pairwise(model.kinds), start=1) if one != other]
    runs = list(pairwise([0, *changes, model.layers]))
    cut = [(0, 0), *runs, (model.layers, model.layers)]
    setup = setup if setup.expert > 1 else replace(setup, data=1)
    cost = stage_costs(model, Placement.linear(len(cut)), setup, cluster, cut=cut)
    return runs, list(zip(cost.forward, cost.backward_input, cost.backward_weight, strict=True))


class Loads(NamedTuple):
    """What cuts by costs start from: the parts before and after the layers, in layers of their ranks, and per rank the
    time of a layer, as a multiple of the shortest; no times where all ranks are alike. `weights` are those of a
    profile, on the slowest kind of devices.
    """

    first: float
    last: float
    paces: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()


def loads_of(ranks: Sequence[tuple[int, ...]], profiles: Sequence[Profile]) -> Loads:
    """The loads of ranks that lie on several kinds of devices: per rank, its kinds as places in `profiles`."""
    if len(profiles) == 1:
        return Loads(profiles[0].first, profiles[0].last, weights=profiles[0].weights)
    slowest = [max((profiles[kind] for kind in kinds), key=lambda each: each.layer) for kinds in ranks]
    least = min(each.layer for each in profiles)
    weights = max(profiles, key=lambda each: each.layer).weights
    return Loads(slowest[0].first, slowest[-1].last, tuple(each.layer / least for each in slowest), weights)


def _loads(model: Transformer, placement: Placement, setup: Setup, cluster: Cluster | None) -> Loads:
    if cluster is None:
        return loads_of([(0,)] * placement.num_ranks, [profile(model, setup, None)])
    mapped = map_devices(cluster, setup, placement.num_ranks)
    return loads_of(mapped.ranks, [profile(model, setup, kind) for kind in mapped.kinds])


@lru_cache(maxsize=1024)
def part_shares(model: Transformer, setup: Setup, kind: Cluster) -> tuple[float, ...]:
    """The share of the time of a microbatch that each part of a model takes on one kind of devices. Layers of a part
    are alike.
    """
    times = [sum(each) for each in _part_times(model, setup, kind)[1]]
    return tuple(each / sum(times) for each in times)


def cut_by_cost(
    model: Transformer, placement: Placement, setup: Setup, cluster: Cluster | None = None
) -> tuple[Part, ...]:
    """Per stage its layers [start, end), so that the busiest rank has little to do: head and embedding count as what
    they cost. Raises UsageError as `profile`.

    >>> from pipeflow import GPT
    >>> cut_by_cost(GPT.named("llama3-8b"), Placement.linear(4), Setup())
    ((0, 8), (8, 16), (16, 25), (25, 32))
    """
    return cut_by_load(model.layers, placement, *_loads(model, placement, setup, cluster))


def cuts_to_try(
    layers: int, placement: Placement, paces: Sequence[tuple[float, ...]] = (), kinds: Sequence[LayerKind] = ()
) -> Iterator[tuple[Part, ...]]:
    """Cuts for heads and embeddings of different weights, each once; also for ranks of these `paces`. With the `kinds`
    of the layers, also for layers of different weights.
    """
    heavy = {kind for kind in kinds if kind in ROUTED} or {kind for kind in kinds if kind == "MLP alone"}
    weighed = dict.fromkeys(
        _weights(kinds, {kind: 1.0 if kind in heavy else dense for kind in {*kinds}}) for dense in DENSE
    )
    given = list(product(weighed, dict.fromkeys(((), *paces)), LAST, FIRST))
    loads = (cut_by_load(layers, placement, first, last, pace, weights) for weights, pace, last, first in given)
    yield from dict.fromkeys((even_cut(layers, placement.num_stages), *loads))


def _weights(kinds: Sequence[LayerKind], times: Mapping[LayerKind, float]) -> tuple[float, ...]:
    """Weights of layers of kinds that take these times; none if all layers are of one kind."""
    whole = sum(times[kind] for kind in kinds)
    return tuple(times[kind] * len(kinds) / whole for kind in kinds) if len({*kinds}) > 1 else ()


def _paces(ranks: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
    """Paces to try for ranks that lie on these kinds of devices, whatever their speeds: those of PACES, by which each
    kind may be slower than the one before it, or faster.
    """
    kinds = [max(own) for own in ranks]
    ratios = [ratio for pace in PACES for ratio in (pace, 1 / pace)] if len({*kinds}) > 1 else []
    every = [[ratio**kind for kind in kinds] for ratio in ratios]
    return [tuple(pace / min(own) for pace in own) for own in every]


def fastest_cut(model: Transformer, schedule: Schedule, setup: Setup, cluster: Cluster) -> tuple[Part, ...]:
    """The one of `cuts_to_try` whose step is shortest; of several, the first. These are the same for every cluster
    whose ranks lie on as many kinds. So on a faster cluster, on which each of them is at least as fast, the best of
    them is, too. A single cut by the costs of a cluster does not have this property: rounding may make it worse. Raises
    UsageError as `physical_costs`.
    """
    placement = schedule.placement
    paces = _paces(map_devices(cluster, setup, placement.num_ranks).ranks)
    is_split, reducing = has_halves(schedule), schedule.with_reductions()

    def least(physical: Physical) -> float:
        return physical.after + least_makespan(physical.cost, placement, schedule.num_microbatches, split=is_split)

    cuts = cuts_to_try(model.layers, placement, paces, model.kinds)
    costs = {cut: physical_costs(model, placement, setup, cluster, cut=cut) for cut in cuts}
    best: tuple[float, tuple[Part, ...]] | None = None
    for bound, cut in sorted(((least(physical), cut) for cut, physical in costs.items()), key=lambda each: each[0]):
        if best is not None and bound >= best[0]:
            break
        seconds = costs[cut].after + costs[cut].timeline(reducing).makespan
        best = (seconds, cut) if best is None or seconds < best[0] else best
    assert best is not None
    return best[1]


def least_makespan(cost: CostModel, placement: Placement, microbatches: int, *, split: bool) -> float:
    """A lower bound on the makespan of all schedules with this placement, including reductions. It assumes that pairs
    save no time.

    A rank cannot start before a first forward has reached one of its stages. It then computes all of its work. After
    the last whole backward of a stage, the stages before it still have to run their backwards. With `split` backwards,
    the last action may be a weight-gradient half, which no other action waits for. A reduction follows the last weight
    gradient of its stage. With whole backwards, free transfers and equal stages, the bound is the makespan of 1F1B,
    interleaved 1F1B and GPipe.
    """
    times = {kind: cost.durations[kind] for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)}
    return _least_of(times, placement, microbatches, cost.transfer, split=split)


def least_of_cut(
    profiles: Sequence[Profile],
    ranks: Sequence[tuple[int, ...]],
    placement: Placement,
    cut: Sequence[Part],
    kinds: Sequence[LayerKind],
    microbatches: int,
) -> tuple[float, float]:
    """`least_makespan` with whole backwards and with split backwards, as if transfers and reductions took no time. The
    times are those of `profiles`, one for each kind of devices. `ranks` are per rank its kinds of devices as places in
    `profiles`, and `kinds` are those of all layers.
    """
    counted = {kind: [0, *accumulate(each == kind for each in kinds)] for kind in sorted({*kinds}, reverse=True)}
    none: Times = (0.0, 0.0, 0.0)
    stages, known = [], dict[object, list[float]]()  # the times of stages that are alike
    for stage, (start, end) in enumerate(cut):
        counts = tuple((kind, before[end] - before[start]) for kind, before in counted.items())
        own = frozenset(kind for path in placement.paths for kind in ranks[path[stage]])
        key = stage == 0, stage == len(cut) - 1, counts, own
        if key not in known:
            each = []
            for part in (profiles[kind] for kind in own):
                before, after = part.before if stage == 0 else none, part.after if stage == len(cut) - 1 else none
                layers = [(many, part.layers[kind]) for kind, many in counts]
                each.append([before[i] + after[i] + sum(many * times[i] for many, times in layers) for i in range(3)])
            known[key] = [max(times) for times in zip(*each, strict=True)]
        stages.append(known[key])
    forward, gradient, weight = zip(*stages, strict=True)
    backward = [one + other for one, other in zip(gradient, weight, strict=True)]
    times = {Kind.F: forward, Kind.B: backward, Kind.I: gradient, Kind.W: weight, Kind.R: (0.0,) * len(cut)}
    whole, split = (_least_of(times, placement, microbatches, _at_once, split=each) for each in (False, True))
    return whole, split


def _at_once(stage: int, one: int, other: int) -> float:
    """A transfer that takes no time."""
    return 0.0


def _least_of(
    times: Mapping[Kind, Sequence[float]],
    placement: Placement,
    microbatches: int,
    transfer: Callable[[int, int, int], float],
    *,
    split: bool,
) -> float:
    """As `least_makespan`, for times per stage of F, B, I, W and R."""
    forward, backward, weight, reduce = (times[kind] for kind in (Kind.F, Kind.B, Kind.W, Kind.R))
    gradient = times[Kind.I] if split else backward  # what a stage before waits for
    work = [0.0] * placement.num_ranks
    start, end = [inf] * placement.num_ranks, [inf] * placement.num_ranks
    through = 0.0
    for number, path in enumerate(placement.paths[:microbatches]):
        links = [(stage, one, other) for stage, (one, other) in enumerate(pairwise(path))]
        down = [0.0 if one == other else transfer(stage, one, other) for stage, one, other in links]
        up = [0.0 if one == other else transfer(stage, other, one) for stage, one, other in links]
        first, after = _before(forward, down), _before(gradient, up)
        many = len(range(number, microbatches, len(placement.paths)))
        for stage, rank in enumerate(path):
            work[rank] += many * (forward[stage] + backward[stage])
            start[rank] = min(start[rank], first[stage])
            end[rank] = min(end[rank], max(0.0 if split else after[stage], reduce[stage]))
        alone = first[-1] + forward[-1] + gradient[-1] + after[-1] + (weight[0] if split else 0.0)
        through = max(through, alone)
    return max(through, *map(sum, zip(start, work, end, strict=True)))


def _before(times: Sequence[float], transfers: Sequence[float]) -> list[float]:
    """Per stage, the time of all stages before it and of the transfers up to it."""
    return [0.0, *accumulate(time + transfer for time, transfer in zip(times, transfers, strict=False))]
