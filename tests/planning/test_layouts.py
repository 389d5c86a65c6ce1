from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest

from pipeflow import GPT, SCHEDULES, Cluster, CostModel, Placement, UsageError, make_schedule, plan, simulate, verify
from pipeflow.core.dataflow import Content
from pipeflow.core.schedule import Schedule
from pipeflow.planning import layout_trials
from pipeflow.planning.cuts import cut_by_load, even_cut, least_makespan
from pipeflow.planning.layout import SEARCHED, Layout, Wanted
from pipeflow.planning.layout_cells import Cell, Sizes, cells, heavier, lighter, meshes
from pipeflow.planning.layout_ties import TIE, plainer, plainest, plainness, ranking
from pipeflow.planning.layout_trials import LayoutTrial, families, least_seconds, trials
from pipeflow.planning.layouts import faster_on_fewer, find_layouts
from pipeflow.planning.rank_memory import peaks
from pipeflow.planning.setup import Setup
from pipeflow.planning.step_plan import Plan

MODEL = GPT(4, 512, 4, 512, 8192)
CLUSTER = Cluster.of("a100-40gb", devices_per_node=2)
NAMED = [name for name in SCHEDULES if name != "zb-auto"]


def wanted(devices: int = 4, batch: int = 8, **given: Any) -> Wanted:
    return Wanted(MODEL, CLUSTER, devices, batch, **given)


def planned(layout: Layout, task: Wanted) -> Plan:
    return plan(MODEL, layout.make_schedule(), layout.setup, cluster=CLUSTER, cut=layout.cut)


def everything(task: Wanted) -> Iterator[tuple[float, Layout]]:
    """All layouts within memory with the seconds of a step, by plans alone."""
    for cell in cells(task):
        for _, trial in trials(task, cell):
            found = planned(trial.layout, task)
            if found.peak_bytes <= task.limit:
                assert found.step_seconds is not None
                yield found.step_seconds, trial.layout


def picked(timed: list[tuple[float, Layout]]) -> list[tuple[float, Layout]]:
    """The best layout of all for each choice of sizes, ranked."""
    groups: dict[tuple[int, ...], list[tuple[float, Layout]]] = {}
    for seconds, layout in timed:
        groups.setdefault((layout.tensor, layout.pipeline, layout.data), []).append((seconds, layout))
    return ranking(ranking(group)[0] for group in groups.values())


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.parametrize("memory", [None, 170e6, 145e6])
def test_the_search_finds_what_brute_force_finds(memory: float | None) -> None:
    task = wanted(memory=memory)
    timed = list(everything(task))
    expected, found = picked(timed), find_layouts(task, top=100).ranked
    assert [each.step_seconds for each in found] == pytest.approx([seconds for seconds, _ in expected])
    assert [plainness(each.layout) for each in found] == [plainness(layout) for _, layout in expected]
    few = find_layouts(task, top=2)
    assert [each.step_seconds for each in few.ranked] == [each.step_seconds for each in found[:2]]
    assert plainness(few.recommended.layout) == plainness(plainest(timed)[1])


@pytest.mark.slow
def test_the_search_finds_the_slices_that_brute_force_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_trials, "SLICE", 128)
    task = wanted(batch=4, memory=145e6, schedules=("1f1b", "zb-h1"))
    timed = list(everything(task))
    expected, found = picked(timed), find_layouts(task, top=100).ranked
    assert {layout.options.get("slices") for _, layout in timed} == {None, 2, 4}
    assert [each.step_seconds for each in found] == pytest.approx([seconds for seconds, _ in expected])
    assert [plainness(each.layout) for each in found] == [plainness(layout) for _, layout in expected]


@pytest.mark.slow
@pytest.mark.parametrize("slices", [1, 3])
def test_bounds_are_below_what_they_bound_and_zero_1_costs_no_time(slices: int) -> None:
    task = wanted(batch=4, slices=slices)
    for cell in cells(task):
        for least, trial in trials(task, cell):
            found = planned(trial.layout, task)
            assert found.schedule.slices == (slices if trial.layout.pipeline > 1 else 1)
            assert found.step_seconds is not None
            assert max(least, least_seconds(task, cell)) <= found.step_seconds * (1 + 1e-9)
            assert trial.least_bytes() <= trial.peak_bytes() == pytest.approx(found.peak_bytes)
            if trial.layout.zero > 1:
                continue
            whole = planned(replace(trial.layout, setup=replace(trial.layout.setup, zero=0)), task)
            assert whole.step_seconds is not None
            assert (found.step_seconds, found.peak_bytes) <= (whole.step_seconds * (1 + 1e-9), whole.peak_bytes)


@pytest.mark.slow
def test_a_heavier_rung_is_not_faster() -> None:
    """On several pipeline ranks, ZeRO-3 may be: its gathers hide where ZeRO-1 gathers at the end of a step. It is no
    rung there.
    """
    task = wanted(batch=4, setup=Setup(overlap=True))
    for cell in cells(task):
        above = [(each, dict(kinds(task, each))) for each in heavier(task, cell)]
        assert all(cell in lighter(task, each) for each, _ in above)
        for kind, trial in kinds(task, cell):
            found = planned(trial.layout, task)
            for _, trials_above in above:
                other = planned(trials_above[kind].layout, task)
                assert found.step_seconds is not None
                assert other.step_seconds is not None
                assert found.step_seconds <= other.step_seconds * (1 + 1e-9)


def kinds(task: Wanted, cell: Cell) -> Iterator[tuple[object, LayoutTrial]]:
    """The evenly cut trials of a cell by what they have in common with those of other rungs."""
    for _, trial in trials(task, cell):
        if trial.cut == even_cut(task.model.layers, len(trial.cut)):
            yield (trial.family.kept, trial.family.options), trial


def test_context_and_expert_ranks_are_tried_where_there_is_use_for_them() -> None:
    long = replace(wanted(devices=8, batch=8), model=replace(MODEL, positions=16384))
    assert {sizes.context for sizes in meshes(long)} == {1, 2, 4}
    assert {sizes.context for sizes in meshes(replace(long, context=2))} == {2}
    mixture = replace(MODEL, experts=6, experts_per_token=2)
    task = Wanted(mixture, CLUSTER, 8, 8)
    assert {cell.setup.expert for cell in cells(task)} == {1, 2}
    assert {cell.setup.expert for cell in cells(replace(task, devices=12, batch=12))} == {1, 2, 3, 6}
    found = find_layouts(replace(task, expert=2, memory=400e6), top=2).ranked
    assert {each.layout.expert for each in found} == {2}
    with pytest.raises(UsageError, match="expert=4 does not divide 6 experts: the nearest"):
        replace(task, expert=4)
    with pytest.raises(UsageError, match="3 expert ranks of 1 devices divide no stage of 8 devices"):
        find_layouts(replace(task, expert=3))


def test_all_ways_to_attend_to_other_context_ranks_are_tried_where_heads_divide() -> None:
    long = replace(wanted(devices=8, batch=8), model=replace(MODEL, positions=16384))
    kinds = {(cell.setup.tensor, cell.setup.context): set[str]() for cell in cells(long)}
    for cell in cells(long):
        kinds[cell.setup.tensor, cell.setup.context].add(cell.setup.context_kind)
    every = {"ring", "all-to-all", "gather"}
    assert (kinds[1, 1], kinds[1, 4], kinds[2, 2]) == ({"ring"}, every, every)
    assert kinds[2, 4] == kinds[4, 2] == {"ring", "gather"}  # a rank has less than four heads
    fixed = replace(long, context_kind="all-to-all", context=2)
    assert {cell.setup.context_kind for cell in cells(fixed)} == {"all-to-all"}
    assert {cell.setup.tensor for cell in cells(fixed)} == {1, 2}
    assert find_layouts(fixed, top=1).ranked[0].layout.setup.context_kind == "all-to-all"


def test_stages_are_tried_that_are_equal_with_or_without_the_ends_of_the_model() -> None:
    def chunks(ranks: int, layers: int) -> list[object]:
        return [dict(family.options)["chunks"] for family in families(("interleaved-1f1b",), ranks, layers)]

    assert chunks(4, 80) == [2, 4, 5, 10]
    assert chunks(9, 126) == [2, 7]
    assert chunks(8, 126) == [2, 4, 8]  # 126 layers, an embedding and a head are 128


def test_what_needs_more_memory_is_divided_among_replicas() -> None:
    deep = replace(MODEL, layers=16)
    task = Wanted(deep, CLUSTER, 4, 4, tensor=1, pipeline=1, microbatch_size=1, checkpoint="none")
    [plain] = find_layouts(task).ranked
    assert plain.layout.zero == 1
    [tight] = find_layouts(replace(task, memory=0.9 * plain.plan.peak_bytes)).ranked
    assert tight.layout.zero > 1
    assert tight.plan.peak_bytes <= 0.9 * plain.plan.peak_bytes


def test_sequence_parallelism_and_overlap_are_tried_where_they_are_possible() -> None:
    wide = replace(MODEL, hidden=8192, heads=64)  # whose layers take longer to compute than to launch
    task = Wanted(wide, CLUSTER, 4, 8, tensor=2, pipeline=1, checkpoint="none", zero=1, memory=1e12)
    first = find_layouts(task, top=1).ranked[0]
    for parallel, overlap in product((False, True), repeat=2):
        fixed = find_layouts(replace(task, sequence_parallel=parallel, overlap=overlap), top=1).ranked[0]
        assert (fixed.layout.sequence_parallel, fixed.layout.overlap) == (parallel, overlap)
        assert (fixed.step_seconds > first.step_seconds) == (not (parallel and overlap))
    odd = find_layouts(replace(task, setup=Setup(sequence=511)), top=1).ranked[0]
    assert (odd.layout.sequence_parallel, odd.layout.overlap) == (False, True)


def test_a_program_whose_buffers_to_overlap_do_not_fit_does_without_them() -> None:
    task = wanted(tensor=1, pipeline=1, microbatch_size=2, checkpoint="full", zero=1, setup=Setup(engine="deepspeed"))
    free = find_layouts(task, top=1).ranked[0]
    tight = find_layouts(replace(task, memory=free.plan.peak_bytes - 1), top=1).ranked[0]
    assert (free.layout.overlap, tight.layout.overlap) == (True, False)
    assert free.step_seconds < tight.step_seconds


def test_buffers_for_all_microbatches_of_a_step_count_in_a_search() -> None:
    task = wanted(
        devices=4, batch=256, pipeline=4, zero=0, tensor=1, microbatch_size=1, setup=Setup(engine="torchtitan")
    )
    found = find_layouts(task, top=20).ranked
    least = min(each.plan.peak_bytes for each in found)
    for each in find_layouts(replace(task, memory=1.01 * least), top=20).ranked:
        assert each.plan.peak_bytes <= 1.01 * least


def test_fewer_devices_are_faster_over_a_slow_network() -> None:
    slow = replace(CLUSTER, network_bandwidth=1e7)
    found = find_layouts(Wanted(MODEL, slow, 8, 8), top=1)
    fewer = faster_on_fewer(found)
    assert fewer is not None
    assert fewer.wanted.devices == 2  # a node
    assert fewer.ranked[0].step_seconds < found.ranked[0].step_seconds
    large = Wanted(replace(MODEL, hidden=4096, layers=8), replace(CLUSTER, devices_per_node=8), 8, 64)
    assert faster_on_fewer(find_layouts(large, top=1)) is None


def test_fewer_devices_than_shards_are_left_out() -> None:
    slow = replace(CLUSTER, network_bandwidth=1e7)
    found = find_layouts(Wanted(MODEL, slow, 8, 8, zero=1, shard_ranks=8), top=1)
    assert faster_on_fewer(found) is None


def test_all_sizes_that_fit_are_tried() -> None:
    task = wanted(devices=8, batch=24)
    expected = {
        Sizes(tensor, pipeline, data, 1)
        for tensor, pipeline, data in product(range(1, 9), repeat=3)
        if tensor * pipeline * data == 8 and 4 % tensor == 0 and pipeline <= 4
    }
    assert set(meshes(task)) == expected
    sizes = {cell.setup.microbatch_size for cell in cells(task) if (cell.setup.tensor, cell.pipeline) == (1, 2)}
    assert sizes == {1, 2, 3, 6}
    assert {cell.microbatches * cell.setup.microbatch_size * cell.setup.data for cell in cells(task)} == {24}


@pytest.mark.parametrize("given", [{}, {"tensor": 1, "pipeline": 2}, {"checkpoint": "full", "zero": 0}])
def test_all_that_is_listed_is_sound_within_memory_and_as_wanted(given: dict[str, Any]) -> None:
    task = wanted(memory=170e6, **given)
    found = find_layouts(task)
    assert found.ranked
    for each in found.ranked:
        layout = each.layout
        assert not verify(layout.make_schedule())
        assert each.plan.peak_bytes <= task.limit
        assert each.step_seconds == pytest.approx(sum(each.parts))
        assert layout.tensor * layout.pipeline * layout.data == task.devices
        assert layout.data * layout.microbatches * layout.microbatch_size == task.batch
        assert all(getattr(layout, name) == value for name, value in given.items())
        gained = sum(each.grown(found.ranked[0]).values())
        assert gained == pytest.approx(each.step_seconds - found.ranked[0].step_seconds)
    if "pipeline" in given:  # then schedules are compared
        assert len({each.layout.schedule for each in found.ranked}) == len(found.ranked) > 1


def test_less_memory_gives_slower_steps_and_then_an_error() -> None:
    roomy, tight = (find_layouts(wanted(batch=16, memory=memory)).ranked[0] for memory in (None, 145e6))
    assert roomy.layout.pipeline == 1  # no pipeline is an answer, too
    assert tight.step_seconds > roomy.step_seconds
    with pytest.raises(UsageError, match=r"no layout fits: the closest one, tensor 4.* more than the limit of") as no:
        find_layouts(wanted(memory=60e6, checkpoint="none"))
    assert "it fits with" in str(no.value)
    assert " devices" in str(no.value)


def test_a_layout_that_recomputes_would_fit() -> None:
    task = wanted(devices=1, batch=8, microbatch_size=8, checkpoint="none", memory=640e6)
    with pytest.raises(
        UsageError, match=r"it fits with recomputation, or with smaller microbatches, or with 2 devices"
    ):
        find_layouts(task)
    assert find_layouts(replace(task, checkpoint=None)).ranked[0].layout.checkpoint == "full"


def test_a_schedule_that_keeps_more_with_every_microbatch_is_counted_whole() -> None:
    task = wanted(devices=2, batch=32, tensor=1, pipeline=2, microbatch_size=1, schedules=("gpipe",))
    [(_, trial)] = [each for cell in cells(task) for each in trials(task, cell) if cell.setup.checkpoint == "none"]
    needed = trial.peak_bytes()
    assert trial.least_bytes() < 0.9 * needed
    fixed = replace(task, checkpoint="none")
    assert find_layouts(replace(fixed, memory=needed)).ranked[0].plan.peak_bytes == pytest.approx(needed)
    with pytest.raises(UsageError, match="no layout fits"):
        find_layouts(replace(fixed, memory=0.99 * needed))


@pytest.mark.parametrize("name", NAMED)
def test_families_know_whether_backwards_are_split(name: str) -> None:
    deep = Wanted(replace(MODEL, layers=32), CLUSTER, 8, 8, schedules=(name,))
    for ranks in (2, 4, 8):
        rows = made(name, ranks, 4 * ranks)
        splits = any(action.kind == "W" for rank in range(ranks) for action in rows.actions(rank))
        assert {family.split for family in families(deep.schedules, ranks, deep.model.layers)} == {splits}


def layout(tensor: int, pipeline: int, checkpoint: Any) -> Layout:
    cut = tuple(even_cut(4, pipeline))
    return Layout(Setup(tensor=tensor, checkpoint=checkpoint), pipeline, 1, "1f1b", {}, cut)


def test_the_fastest_is_first_and_ties_are_told_apart_by_what_they_need() -> None:
    """Fewer kinds of ranks, then 1F1B, then fewer stages per rank, then less recomputation, ZeRO and ranks, and last
    fewer replicas that divide the weights.
    """
    one = layout(1, 2, "none")
    other = [
        layout(1, 4, "none"),
        replace(one, setup=Setup(zero=3, data=4, shard_ranks=2)),
        replace(one, setup=Setup(zero=3, data=4)),
        replace(one, setup=Setup(checkpoint="full")),
        replace(one, schedule="zb-h1"),
        replace(one, schedule="interleaved-1f1b", cut=tuple(even_cut(4, 4))),
        replace(one, setup=Setup(tensor=2)),
    ]
    tied = [one, other[0], layout(2, 1, "none"), *other[1:]]
    slower = layout(1, 1, "none")
    timed = [(1 + TIE - 0.001 * place, each) for place, each in enumerate(tied)]
    ranked = ranking([(1 + 2 * TIE, slower), *timed])
    assert [each for _, each in ranked] == [*reversed(tied), slower]
    assert [each for _, each in ranking((1.0, each) for each in reversed(tied))] == tied
    for each in tied:
        assert plainest(ranked)[1] == each
        ranked = [other for other in ranked if other[1] != each]


def test_the_plainest_of_the_ties_is_found_where_another_schedule_is_faster_with_the_same_sizes() -> None:
    wide = replace(MODEL, hidden=4096, layers=16)
    node, names = replace(CLUSTER, devices_per_node=8), ("1f1b", "interleaved-1f1b")
    task = Wanted(wide, node, 4, 128, pipeline=2, microbatch_size=1, schedules=names, memory=1e12)
    found = find_layouts(task, top=1)
    first, plain = found.ranked[0], found.recommended
    assert (first.layout.schedule, plain.layout.schedule) == ("interleaved-1f1b", "1f1b")
    assert first.step_seconds < plain.step_seconds <= (1 + TIE) * first.step_seconds
    assert (found.ranked, found.listed, found.preferred) == ((first,), (first, plain), (plain, first))
    chunks = first.layout.options["chunks"]
    assert chunks > 2
    assert list(plainer(plain.layout, first.layout)) == ["the schedule 1f1b", f"1 stage per rank, not {chunks}"]
    assert list(plainer(first.layout, plain.layout)) == []


def test_weights_are_divided_within_a_node_or_among_all_without_a_pipeline() -> None:
    def divided(**given: Any) -> dict[tuple[int, int], set[tuple[int, int | None]]]:
        found: dict[tuple[int, int], set[tuple[int, int | None]]] = {}
        for cell in cells(wanted(devices=8, **given)):
            key = cell.setup.tensor, cell.pipeline
            found.setdefault(key, set()).add((cell.setup.zero, cell.setup.shard_ranks))
        return found

    every, among_all = divided(), {(1, None), (2, None), (3, None)}
    assert every[1, 1] == among_all | {(3, 2)}  # nodes have two devices
    assert every[2, 1] == among_all  # a node has one replica
    assert every[1, 2] == {(1, None), (3, None)}
    assert divided(zero=3)[1, 1] == {(3, None), (3, 2)}
    assert divided(zero=1)[1, 1] == {(1, None)}
    assert divided(zero=3, shard_ranks=4)[1, 1] == {(3, 4)}
    one_node = replace(wanted(), cluster=replace(CLUSTER, devices_per_node=4))
    assert {cell.setup.shard_ranks for cell in cells(one_node)} == {None}


def test_what_makes_a_layout_plainer_names_the_replicas_that_divide_the_weights() -> None:
    near, all_ = (Layout(Setup(zero=3, data=8, shard_ranks=each), 1, 1, "1f1b", {}, ((0, 4),)) for each in (2, None))
    fewer = replace(all_, setup=Setup(zero=3, data=4))  # more tensor ranks, say, and so other sizes
    assert list(plainer(near, all_)) == ["ZeRO-3 over 2 replicas, not 8"]
    assert list(plainer(all_, near)) == list(plainer(fewer, all_)) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"devices": 7, "tensor": 2}, "7 devices do not divide into layouts with tensor 2; .* works is 6"),
        ({"devices": 6, "tensor": 4, "pipeline": 2}, "with tensor 4 and pipeline 2; .* works is 8"),
        ({"devices": 13, "batch": 16}, "batch of 16 .* 13 replicas: the nearest that works? are 13 and 26; .* is 12"),
        (
            {"devices": 2, "batch": 7, "microbatch_size": 4, "tensor": 1, "pipeline": 1},
            "over 2 replicas in microbatches of 4: the nearest that works is 8",
        ),
        ({"pipeline": 5}, "4 layers cannot fill 5 pipeline ranks: use at most 4"),
        ({"tensor": 3}, "tensor=3 does not divide 4 heads"),
        ({"schedules": ("1f1c",)}, "unknown schedule '1f1c'; did you mean '1f1b'"),
        ({"schedules": ()}, "name at least one"),
        ({"memory": 0}, "memory must be a positive number"),
        ({"batch": 0}, "batch must be an integer of at least 1"),
        ({"zero": 4}, "zero must be one of 0, 1, 2, 3; got 4"),
        ({"zero": 2, "pipeline": 2}, "zero=2 needs one pipeline rank, got 2"),
        ({"zero": 0, "shard_ranks": 2}, "shard_ranks=2 divides nothing with zero=0"),
        ({"shard_ranks": 3}, "shard_ranks=3 does not divide 4 devices: the nearest that work are 2 and 4"),
        ({"shard_ranks": 4, "tensor": 2}, "no layout has replicas in groups of shard_ranks=4: leave other sizes open"),
    ],
)
def test_what_cannot_be_searched_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find_layouts(wanted(**given))


def test_searched_schedules_come_only_when_asked_for() -> None:
    assert set(SEARCHED) == set(NAMED) - {"naive", "seq1f1b"}
    found = find_layouts(wanted(devices=2, batch=4, tensor=1, pipeline=2, schedules=("zb-auto", "1f1b")))
    assert {each.layout.schedule for each in found.ranked} == {"zb-auto", "1f1b"}


def test_orders_that_save_memory_are_weighed_against_recomputing_all() -> None:
    task = wanted(batch=16, tensor=1, pipeline=4, microbatch_size=1, memory=160e6)
    plain, first = (find_layouts(each).ranked[0] for each in (task, replace(task, kinds="both")))
    assert (plain.layout.checkpoint, first.layout.checkpoint, first.layout.schedule) == ("full", "none", "zb-auto")
    assert first.step_seconds < 0.7 * plain.step_seconds
    assert first.plan.peak_bytes <= 160e6
    with pytest.raises(UsageError, match=r"no layout fits: the closest one, .* with (?!zb-auto)"):
        find_layouts(replace(task, kinds="both", memory=100e6))
    with pytest.raises(UsageError, match="kinds must be one of none, offload, recompute, both; got 'swap'"):
        replace(task, kinds="swap")


def uneven(placement: Placement, random: Random, **given: Any) -> CostModel:
    def numbers() -> tuple[float, ...]:
        return tuple(random.uniform(0.5, 2) for _ in range(placement.num_stages))

    return CostModel(numbers(), numbers(), numbers(), saved_bytes=numbers(), deferred_bytes=numbers(), **given)


def made(name: str, ranks: int, microbatches: int) -> Schedule:
    try:
        return make_schedule(name, ranks=ranks, microbatches=microbatches)
    except UsageError:
        pytest.skip("it needs an even number of ranks")


@pytest.mark.some(24)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", NAMED)
def test_peaks_are_those_of_a_timeline_and_a_shorter_step_has_no_higher_ones(name: str, ranks: int) -> None:
    for seed, microbatches in enumerate((1, 2 * ranks, 2 * ranks + 1, 4 * ranks, 4 * ranks + 1)):
        schedule = made(name, ranks, microbatches)
        cost = uneven(schedule.placement, Random(seed))
        sizes = {Content.SAVED: cost.saved_bytes, Content.DEFERRED: cost.deferred_bytes}
        found = [each.bytes(sizes) for each in peaks(schedule)]
        assert found == pytest.approx(simulate(schedule, cost).peak_bytes)
        few = min(microbatches, 2 * ranks + microbatches % len(schedule.placement.paths))
        shorter = [each.bytes(sizes) for each in peaks(made(name, ranks, few))]
        assert all(less <= more * (1 + 1e-9) for less, more in zip(shorter, found, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", NAMED)
def test_no_schedule_is_shorter_than_the_least_makespan(name: str, ranks: int) -> None:
    for seed, microbatches in enumerate((1, 2, 5, 8)):
        schedule, random = made(name, ranks, microbatches), Random(seed)
        stages = schedule.placement.num_stages
        sent = tuple(random.uniform(0, 1) for _ in range(stages))
        reduce = tuple(random.uniform(0, 9) for _ in range(stages))
        cost = uneven(schedule.placement, random, latency=0.1, bandwidth=5.0, activation_bytes=sent, reduce=reduce)
        split = any(action.kind == "W" for rank in range(ranks) for action in schedule.actions(rank))
        least = least_makespan(cost, schedule.placement, microbatches, split=split)
        assert least <= simulate(schedule.with_reductions(), cost).makespan * (1 + 1e-9)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b"])
def test_equal_stages_reach_the_least_makespan(name: str) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=8)
    cost = CostModel.even(schedule.placement)
    assert least_makespan(cost, schedule.placement, 8, split=False) == pytest.approx(simulate(schedule).makespan)


@pytest.mark.parametrize(("first", "last"), [(0, 0), (0.1, 2.4), (1.5, 0.3), (0, 7)])
def test_no_cut_has_a_lighter_busiest_rank(first: float, last: float) -> None:
    layers, stages = 9, 4

    def busiest(sizes: tuple[int, ...]) -> float:
        return max(size + first * (stage == 0) + last * (stage == stages - 1) for stage, size in enumerate(sizes))

    sizes = tuple(end - start for start, end in cut_by_load(layers, Placement.linear(stages), first, last))
    every = [each for each in product(range(1, layers), repeat=stages) if sum(each) == layers]
    assert sum(sizes) == layers
    assert busiest(sizes) == pytest.approx(min(map(busiest, every)))


def test_a_heavy_head_takes_layers_from_its_stage() -> None:
    task = Wanted(
        replace(MODEL, layers=8, vocabulary=40_000), CLUSTER, 2, 64, tensor=1, pipeline=2, schedules=("1f1b",)
    )
    [best] = find_layouts(task).ranked
    before, after = (end - start for start, end in best.layout.cut)
    assert before > after
    even = replace(best.layout, cut=((0, 4), (4, 8)))
    whole = plan(task.model, even.make_schedule(), even.setup, cluster=CLUSTER, cut=even.cut)
    assert whole.step_seconds is not None
    assert best.step_seconds < 0.9 * whole.step_seconds
