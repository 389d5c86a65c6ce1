from __future__ import annotations

from itertools import chain, combinations

import pytest

from pipeflow.core.action import Action, Kind
from pipeflow.core.analysis.order import Order
from pipeflow.core.dataflow import DATAFLOW, KEPT, MAKERS, PASSING, WHOLE, Content, End, Stream, flows, sources
from pipeflow.core.liveness import memory_changes
from pipeflow.core.route import Route, routes_among
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.verification import verify
from pipeflow.core.timeline import Row, kept
from pipeflow.schedules import SCHEDULES, make_schedule
from tests.families import make_near


def test_every_kind_has_a_row() -> None:
    assert set(DATAFLOW) == set(Kind)


def test_contents_pass_or_are_kept() -> None:
    assert {Content.ACTIVATION: 1, Content.GRADIENT: -1} == PASSING
    assert {Content.SAVED, Content.DEFERRED} <= KEPT
    making = {kind for kind, flow in DATAFLOW.items() if flow.makes and not flow.joint}
    assert set(chain.from_iterable(MAKERS.values())) == making


def test_only_computations_pass_values_on_and_what_is_joint_makes_nothing_new() -> None:
    for flow in DATAFLOW.values():
        contents = {content for content, _ in (*flow.needs, *flow.makes)}
        assert flow.stream is Stream.COMPUTE or not contents & PASSING.keys()
        assert not flow.joint or {*flow.makes} <= {*flow.needs}


def test_a_backward_is_whole_or_in_two_halves() -> None:
    passes = {Kind.F, Kind.B, Kind.I, Kind.W}
    assert [way for way in WHOLE if passes.issuperset(way)] == [(Kind.F, Kind.B), (Kind.F, Kind.I, Kind.W)]
    for number in range(1, 5):
        for kinds in combinations((Kind.F, Kind.B, Kind.I, Kind.W), number):
            text = ",".join(f"0{kind}0" for kind in kinds)
            assert (verify(Schedule.from_csv(text)) == []) == (kinds in WHOLE or kinds == (Kind.F,))


def test_what_is_kept_for_backwards_is_gone_after_them() -> None:
    ends = Kind.B, Kind.I, Kind.W
    for kinds in WHOLE:
        row = sorted(kinds, key=lambda kind: (kind is not Kind.F, kind in ends))
        changes = memory_changes([Action(kind, 0, 0) for kind in row])
        for content in KEPT | {Content.INPUT}:
            assert sum(change.net(content) for change in changes) == 0
    empty: Row = ()
    assert kept(empty, {Content.SAVED: (1.0,)}) == ()


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_the_ends_of_the_pipeline_have_no_values(stages: int) -> None:
    table = flows(stages)
    made = {end for flow in table.values() for end in flow.makes}
    used = {end for flow in table.values() for end in flow.needs}
    assert made == used
    assert End(Content.GRADIENT, 0) not in made
    assert End(Content.ACTIVATION, stages - 1) not in made


def test_routes_add_what_passes_on_them_and_change_nothing_else() -> None:
    plain, routed = flows(4), flows(4, (Route(0, 2), Route(0, 3)))
    for place, row in routed.items():
        for mine, its in zip(plain[place], row, strict=True):
            assert its[: len(mine)] == mine
            for end in its[len(mine) :]:
                assert end.to is not None
                assert {*sorted((end.stage, end.to))} in ({0, 2}, {0, 3})
    made = [end for flow in routed.values() for end in flow.makes if end.to is not None]
    used = [end for flow in routed.values() for end in flow.needs if end.to is not None]
    forward = {End(Content.ACTIVATION, 0, 2), End(Content.ACTIVATION, 0, 3)}
    back = {End(Content.GRADIENT, 2, 0), End(Content.GRADIENT, 3, 0)}
    assert {*made} == {*used} == forward | back
    assert routed[Kind.F, 3, None].needs[1:] == (End(Content.ACTIVATION, 0, 3),)
    assert routed[Kind.I, 2, None].makes[2:] == (End(Content.GRADIENT, 2, 0),)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_is_sound_is_sound_with_routes(name: str) -> None:
    schedule = make_near(name, ranks=3, microbatches=5)
    stages = range(schedule.placement.num_stages)
    order = Order(
        schedule, routes_among(len(stages), [pair for pair in combinations(stages, 2) if pair[1] > pair[0] + 1])
    )
    assert len(list(order)) == sum(map(len, schedule.rows))
    assert order.stuck == []


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_an_action_waits_for_stands_before_it(name: str) -> None:
    schedule = make_schedule(name, ranks=2, microbatches=4)
    kinds = {action.kind for rank in range(2) for action in schedule.actions(rank)}
    for kinds_ in WHOLE:
        if kinds == set(kinds_):
            makers = sources(kinds_, schedule.placement.num_stages)
            assert [place for place, maker in makers.items() if maker is None] == [(Kind.F, 0)]
            for rank in range(2):
                places = {action: index for index, action in enumerate(schedule.actions(rank))}
                for action, index in places.items():
                    maker = makers[action.kind, action.stage]
                    same = [each for each in places if (each.kind, each.stage) == maker]
                    assert all(places[each] < index for each in same if each.microbatch == action.microbatch)
