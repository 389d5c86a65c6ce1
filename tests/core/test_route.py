"""On which way a tensor gets to the stages that need it: with as few transfers as there can be, by trying all ways."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, permutations, product

import pytest

from pipeflow.core.dataflow import Content, Value
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.route import Route, routes_among, sources_of, targets_of, way

PLACEMENTS = {
    "linear": Placement.linear(5),
    "looped": Placement.looped(2, 3),
    "three chunks": Placement.looped(3, 2),
    "vee": Placement.vee(3),
    "zigzag": Placement.zigzag(2, 2),
    "bidirectional": Placement.bidirectional(4),
    "one rank": Placement.looped(1, 4),
    "any": Placement(((1, 0, 2, 0, 2, 1),)),
}


def subsets(stages: range) -> Iterator[tuple[int, ...]]:
    for size in range(1, len(stages) + 1):
        yield from combinations(stages, size)


def cases(placement: Placement) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Every maker with all sets of later stages that may need what it makes."""
    for maker in range(placement.num_stages - 1):
        for users in subsets(range(maker + 1, placement.num_stages)):
            yield maker, users


def least_transfers(maker: int, users: tuple[int, ...], path: tuple[int, ...]) -> int:
    """Of all ways in which each stage from the maker on either does without the tensor or gets it from an earlier one
    that has it: the fewest transfers between ranks.
    """
    others = range(maker + 1, max(users) + 1)
    best = len(path)
    for sources in product(*([*range(maker, stage), *([None] if stage not in users else [])] for stage in others)):
        having, transfers = {maker}, 0
        for stage, source in zip(others, sources, strict=True):
            if source is None:
                continue
            if source not in having:
                break
            having.add(stage)
            transfers += path[source] != path[stage]
        else:
            best = min(best, transfers)
    return best


@pytest.mark.some(3)
@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.slow
def test_no_way_takes_fewer_transfers(name: str) -> None:
    placement = PLACEMENTS[name]
    for maker, users in cases(placement):
        found = way(maker, users, placement)
        assert tuple(found) == users
        assert all(source == maker or source in found for source in found.values())
        assert all(source < stage for stage, source in found.items())
        for path in placement.paths:
            receivers = [path[stage] for stage, source in found.items() if path[source] != path[stage]]
            assert sorted(receivers) == sorted({path[user] for user in users} - {path[maker]})
            assert len(receivers) == least_transfers(maker, users, path)


def test_a_tensor_goes_straight_to_who_needs_it_and_stays_on_its_rank() -> None:
    assert way(0, {3}, Placement.linear(4)) == {3: 0}
    assert way(0, {1, 3, 4}, Placement.linear(5)) == {1: 0, 3: 1, 4: 3}
    assert way(0, {5}, Placement.vee(3)) == {5: 0}  # of its own rank
    assert way(0, {1, 3, 4}, Placement.vee(3)) == {1: 0, 3: 1, 4: 1}
    assert way(1, {2, 4, 5}, Placement.looped(3, 2)) == {2: 1, 4: 1, 5: 2}


def test_where_a_route_is_missing_stages_between_hand_it_on() -> None:
    line = Placement.linear(5)
    assert way(0, {4}, line, ()) == {1: 0, 2: 1, 3: 2, 4: 3}
    assert way(0, {4}, line, {(0, 3)}) == {3: 0, 4: 3}
    assert way(0, {2, 4}, line, {(0, 4)}) == {1: 0, 2: 1, 4: 0}
    for maker, users in cases(line):
        for allowed in combinations([Route(*pair) for pair in combinations(range(5), 2) if pair[1] > pair[0] + 1], 2):
            found = way(maker, users, line, allowed)
            assert {*users} <= {*found}
            assert all(source + 1 == stage or (source, stage) in allowed for stage, source in found.items())
            assert all(source == maker or source in found for source in found.values())


def test_inputs_and_outputs_are_in_the_order_of_their_stages() -> None:
    for given in permutations([(0, 2), (0, 3), (1, 3)]):
        routes = routes_among(4, given)
        assert routes == ((0, 2), (0, 3), (1, 3))
        assert [sources_of(stage, routes) for stage in range(4)] == [[], [0], [1, 0], [2, 0, 1]]
        assert [targets_of(stage, 4, routes) for stage in range(4)] == [[1, 2, 3], [2, 3], [3], []]


@pytest.mark.parametrize("route", [(0, 1), (1, 1), (2, 0), (1, 4), (-1, 2)])
def test_what_is_no_route(route: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="a route must skip at least one stage, among stages 0 to 3, got"):
        routes_among(4, [route])


def test_values_of_routes() -> None:
    there, back = Value(Content.ACTIVATION, 0, 5, 3), Value(Content.GRADIENT, 3, 5, 0)
    assert str(there) == "activation of stage 0 for stage 3, microbatch 5"
    assert str(back) == "gradient of stage 3 for stage 0, microbatch 5"
    assert (there.user, back.user) == (3, 0)
    assert back.answered == there
    near = Value(Content.GRADIENT, 3, 5)
    assert (near.user, near.answered) == (2, Value(Content.ACTIVATION, 2, 5))
    assert Value(Content.SAVED, 2, 0).user == 2
