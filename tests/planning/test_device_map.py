"""Clusters of several kinds of nodes: what must hold between plans on them and on one kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeflow import GPT, Placement, Setup, UsageError, make_schedule, plan
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.cuts import cut_by_load
from pipeflow.planning.device_map import map_devices
from pipeflow.planning.layout import Wanted
from pipeflow.planning.layout_cells import Cell, meshes
from pipeflow.planning.layout_trials import least_seconds
from pipeflow.planning.layouts import find_layouts
from pipeflow.planning.physical import physical_costs

MODEL = GPT(layers=24, hidden=4096, heads=32, positions=2048, vocabulary=32000)
FAST, SLOW = Cluster.of("h100-80gb"), Cluster.of("a100-80gb")
LAYOUTS = (
    (4, Setup(tensor=4), "1f1b"),
    (2, Setup(tensor=8), "gpipe"),
    (4, Setup(tensor=4, data=2), "1f1b"),
    (1, Setup(data=16), "1f1b"),
    (4, Setup(tensor=4), "dualpipe-v"),
    (4, Setup(tensor=4, zero=1), "chimera"),
)


def both(first: Cluster, second: Cluster, nodes: int = 1) -> Cluster:
    return replace(first, nodes=nodes, further=(second,))


def renamed(cluster: Cluster) -> Cluster:
    return replace(cluster, device=replace(cluster.device, name="another name"))


def seconds(cluster: Cluster, ranks: int, setup: Setup, name: str, cut: Any = "uniform") -> float:
    found = plan(MODEL, make_schedule(name, ranks=ranks, microbatches=8), setup, cluster=cluster, cut=cut)
    assert found.step_seconds is not None
    return found.step_seconds


@pytest.mark.parametrize(("ranks", "setup", "name"), LAYOUTS)
def test_two_kinds_lie_between_one_and_the_other(ranks: int, setup: Setup, name: str) -> None:
    nodes = 2 if setup.data == 2 else 1
    fast, slow = (seconds(kind, ranks, setup, name) for kind in (FAST, SLOW))
    for mix in (both(FAST, SLOW, nodes), both(SLOW, FAST, nodes)):
        assert fast < seconds(mix, ranks, setup, name) <= slow
    assert seconds(both(FAST, renamed(FAST), nodes), ranks, setup, name) == fast


def test_a_rank_lies_on_one_kind_where_whole_nodes_can_be_listed_in_turn() -> None:
    two = both(FAST, SLOW, 2)
    assert map_devices(two, Setup(tensor=8, data=2), 2).ranks == ((0,), (1,))
    assert map_devices(two, Setup(tensor=4, data=4), 2).ranks == ((0, 1),) * 2
    uneven = both(FAST, replace(FAST, devices_per_node=4), 3)
    assert map_devices(uneven, Setup(tensor=4), 7).ranks == ((0,),) * 6 + ((1,),)
    assert [kind.devices_per_node for kind in map_devices(uneven, Setup(tensor=4, data=7), 1).kinds] == [4, 4]
    four = replace(FAST, nodes=1, devices_per_node=4)
    with pytest.raises(UsageError, match="groups of 8 tensor and context ranks do not divide the 4 devices"):
        map_devices(replace(four, further=(SLOW,)), Setup(tensor=8), 2)


def test_kinds_meet_between_nodes_even_if_a_node_would_have_room_for_both() -> None:
    small, large = replace(FAST, nodes=1, devices_per_node=4), replace(SLOW, devices_per_node=72)
    mapped = map_devices(replace(small, further=(large,)), Setup(), 8)
    meshes = [mapped.mesh(Setup(), kind) for kind in range(2)]
    assert [mesh.crosses(3, 4) for mesh in meshes] == [True, True]
    assert not meshes[1].crosses(4, 7)


def test_devices_that_are_not_used_do_not_matter_and_more_than_there_are_are_refused() -> None:
    uneven = replace(FAST, nodes=3, further=(replace(FAST, nodes=1, devices_per_node=4),))
    assert uneven.used(24) == FAST
    wanted = Wanted(MODEL, uneven, 24, 24)
    one, other = (find_layouts(each, top=2) for each in (wanted, replace(wanted, cluster=FAST)))
    assert [each.plan for each in one.ranked] == [each.plan for each in other.ranked]
    with pytest.raises(UsageError, match="the cluster has 28 devices, not 29"):
        Wanted(MODEL, uneven, 29, 29)


def test_a_search_on_two_kinds_cuts_by_speed_and_lies_between_both() -> None:
    fixed: dict[str, Any] = {"tensor": 4, "pipeline": 4, "schedules": ("1f1b",)}
    mix = find_layouts(Wanted(MODEL, both(FAST, SLOW), 16, 32, **fixed), top=1).ranked[0]
    fast, slow, same = (
        find_layouts(Wanted(MODEL, kind, 16, 32, **fixed), top=1).ranked[0]
        for kind in (FAST, SLOW, both(FAST, renamed(FAST)))
    )
    sizes = [end - start for start, end in mix.layout.cut]
    assert sum(sizes[:2]) > sum(sizes[2:])
    assert fast.step_seconds < mix.step_seconds < slow.step_seconds
    assert mix.step_seconds < seconds(both(FAST, SLOW), 4, mix.layout.setup, "1f1b")  # so much for the even cut
    assert (same.step_seconds, same.layout.cut) == (fast.step_seconds, fast.layout.cut)


def test_each_kind_keeps_its_memory() -> None:
    small = replace(SLOW, device=replace(SLOW.device, memory_bytes=16 * 2**30))
    wanted = Wanted(MODEL, both(FAST, small), 16, 32, tensor=4, pipeline=4, schedules=("1f1b", "gpipe"))
    for each in find_layouts(wanted, top=2).ranked:
        assert each.plan.fits
        for rank in each.plan.ranks:
            assert rank.peak_bytes <= wanted.limit_of(FAST if rank.rank < 2 else small)
    setup = Setup(tensor=4)
    found = plan(MODEL, make_schedule("gpipe", ranks=4, microbatches=16), setup, cluster=both(FAST, small))
    assert found.missing is not None
    assert found.missing[1].device == small.device
    assert not found.fits
    assert replace(wanted, memory=70e9).limit_of(small) == wanted.limit_of(small)


def test_a_file_has_groups(tmp_path: Path) -> None:
    change: Callable[[dict[str, Any]], object]
    path, mix = tmp_path / "cluster.json", both(FAST, replace(SLOW, nodes=3))
    mix.save(path)
    assert Cluster.load(path) == mix
    content = json.loads(path.read_text(encoding="utf-8"))
    for change, message in (
        (lambda it: it["groups"][0].pop("nodes"), "before another one needs its number of nodes"),
        (lambda it: it.update(device="h100"), "a cluster with groups has device, too"),
        (lambda it: it["groups"][0]["device"].update(runs_ahead=False), "must all have the same runs_ahead"),
        (lambda it: it["groups"][1].update(sharing=2), "are planned in nodes of one kind alone"),
        (lambda it: it["groups"].append(1), "each of the groups must be an object"),
    ):
        changed = json.loads(json.dumps(content))
        change(changed)
        path.write_text(json.dumps(changed), encoding="utf-8")
        with pytest.raises(UsageError, match=message):
            Cluster.load(path)


def test_both_ranks_of_a_stage_in_two_directions_count() -> None:
    placement = make_schedule("chimera", ranks=4, microbatches=4).placement
    assert placement != Placement.linear(4)
    setup = Setup(tensor=4)
    assert seconds(both(FAST, SLOW), 4, setup, "chimera") == pytest.approx(seconds(SLOW, 4, setup, "chimera"), rel=1e-3)


def test_a_transfer_between_two_kinds_takes_the_slower_network() -> None:
    slow = replace(SLOW, network_bandwidth=FAST.network_bandwidth / 4)
    cost = physical_costs(MODEL, Placement.linear(4), Setup(tensor=4), both(FAST, slow)).cost
    assert {cost.link(*ends).bandwidth for ends in ((1, 2), (2, 1))} == {
        physical_costs(MODEL, Placement.linear(4), Setup(tensor=8), slow).cost.link(1, 2).bandwidth
    }


def test_the_optimizer_of_each_kind_has_the_weights_of_its_own_ranks() -> None:
    cut, placement = ((0, 23), (23, 24)), Placement.linear(2)
    fast, slow, mix = (
        physical_costs(MODEL, placement, Setup(tensor=8), kind, cut=cut).optimizer
        for kind in (FAST, SLOW, both(FAST, SLOW))
    )
    assert fast == mix < slow


def test_a_fast_kind_of_little_memory_gets_few_layers() -> None:
    small = replace(FAST, device=replace(FAST.device, memory_bytes=6 * 2**30))
    wanted = Wanted(MODEL, both(small, SLOW), 16, 32, tensor=4, pipeline=4, schedules=("1f1b",))
    best = find_layouts(wanted, top=1).ranked[0]
    assert best.plan.fits
    assert [end - start for start, end in best.layout.cut][:2] == [1, 1]


@given(layers=st.integers(3, 12), paces=st.tuples(*[st.floats(1, 4)] * 3), ends=st.tuples(*[st.floats(0, 3)] * 2))
@settings(max_examples=60, deadline=None)
def test_no_other_cut_has_a_lighter_busiest_rank(
    layers: int, paces: tuple[float, ...], ends: tuple[float, float]
) -> None:
    def busiest(sizes: tuple[int, ...]) -> float:
        loads = (sizes[0] + ends[0], sizes[1], sizes[2] + ends[1])
        return max(load * pace for load, pace in zip(loads, paces, strict=True))

    sizes = tuple(end - start for start, end in cut_by_load(layers, Placement.linear(3), *ends, paces))
    every = [each for each in product(range(1, layers), repeat=3) if sum(each) == layers]
    assert busiest(sizes) == pytest.approx(min(map(busiest, every)))


@pytest.mark.parametrize("mix", [both(FAST, SLOW), both(SLOW, FAST)])
def test_no_layout_is_faster_than_its_bound(mix: Cluster) -> None:
    wanted = Wanted(MODEL, mix, 16, 128, tensor=8, pipeline=2, schedules=("zb-v",))
    for each in find_layouts(wanted, top=3).ranked:
        cell = Cell(each.layout.setup, each.layout.pipeline, each.layout.microbatches)
        assert 0.85 * each.step_seconds < least_seconds(wanted, cell) <= each.step_seconds


def test_groups_of_tensor_ranks_that_would_lie_on_two_kinds_are_not_tried() -> None:
    uneven = replace(FAST, nodes=3, further=(replace(FAST, nodes=2, devices_per_node=4),))
    wanted = Wanted(MODEL, uneven, 32, 32, pipeline=1, schedules=("1f1b",))
    assert {each.tensor for each in meshes(wanted)} == {1, 2, 4, 8}


def test_nodes_that_no_group_fits_count_as_small_as_their_common_divisor() -> None:
    mixed = replace(FAST, nodes=3, further=(replace(SLOW, devices_per_node=6),))
    assert [kind.devices_per_node for kind in map_devices(mixed, Setup(data=36), 1).kinds] == [2, 2]


def test_neighbours_that_are_alike_are_one_kind() -> None:
    assert both(FAST, FAST).taken(16) == ((FAST, 16),)


def test_kinds_with_other_kernels_have_none_in_common() -> None:
    schedule = make_schedule("1f1b", ranks=4, microbatches=8)
    found = [plan(MODEL, schedule, Setup(tensor=4), cluster=each) for each in (FAST, both(FAST, SLOW))]
    assert [each.attention for each in found] == ["flash3", None]
