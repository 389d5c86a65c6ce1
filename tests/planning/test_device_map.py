"""Clusters of several kinds of nodes: what must hold between plans on them and on one kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeflow import GPT, Placement, Setup, UsageError, make_schedule, plan
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.device_map import map_devices
from pipeflow.planning.layout import Wanted
from pipeflow.planning.layouts import find_layouts

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
