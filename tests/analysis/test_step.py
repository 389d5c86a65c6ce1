from __future__ import annotations

from math import ceil, log2

import pytest

from pipeflow.core.action import Action, Kind
from pipeflow.core.agreement_rounds import rounds, step_time
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel, Link
from pipeflow.core.placement import Placement
from pipeflow.core.timeline import Span, Timeline
from pipeflow.schedules import make_schedule

FREE = CostModel((1,) * 4, (0,) * 4, (0,) * 4)


def ending(*ends: float) -> Timeline:
    """A rank each."""
    rows = tuple((Span(Action(Kind.F, rank, 0), rank, 0.0, end),) for rank, end in enumerate(ends))
    return Timeline("ends", Placement.linear(len(ends)), rows)


def test_where_links_take_no_time_a_step_is_over_when_its_last_rank_is() -> None:
    assert step_time(ending(3, 9, 1, 4), FREE) == 9


def test_the_agreement_of_four_ranks_on_two_sides_of_a_slow_link() -> None:
    """The sides are {0, 1} and {2, 3}, and 1 apart. The first round goes from rank r to r - 1: what 0 sends to 3 leaves
    at 11, when 0 knows of the receive that 3 posted at 10; what 1 sends leaves at 10, 2's at 8 and 3's at 10. So the
    ranks go on at 10, 9, 10 and 12. The second round goes from r to r - 2, over the link: 0's leaves at 10, 1's at 11,
    2's at 11, since 0 posted at 10, and 3's at 12. That of 3 arrives last, at rank 1.
    """
    far = dict.fromkeys([(one, other) for one in (0, 1) for other in (2, 3)], Link(1.0))
    cost = CostModel((1,) * 4, (0,) * 4, (0,) * 4, links=far | {(to, of): link for (of, to), link in far.items()})
    assert step_time(ending(10, 7, 8, 10), cost) == 13


def test_a_rank_sends_no_sooner_than_its_receiver_has_posted() -> None:
    """Rank 2 ends at 20, so rank 3 sends to it at 25, and it goes on at 30; what it then sends arrives at 35."""
    assert step_time(ending(0, 0, 20, 0), CostModel((1,) * 4, (0,) * 4, (0,) * 4, latency=5)) == 35


@pytest.mark.parametrize("ranks", range(1, 20))
def test_ranks_that_end_together_take_a_latency_a_round_and_one_more(ranks: int) -> None:
    """Only the first round waits for its receiver."""
    cost = CostModel((1,) * ranks, (0,) * ranks, (0,) * ranks, latency=5)
    assert step_time(ending(*[10.0] * ranks), cost) == 10 + (5 * (ceil(log2(ranks)) + 1) if ranks > 1 else 0)


@pytest.mark.parametrize("ranks", range(1, 70))
def test_after_the_rounds_every_rank_knows_all(ranks: int) -> None:
    known = [[rank] for rank in range(ranks)]
    for distance, count in rounds(ranks):
        known = [mine + known[(rank + distance) % ranks][:count] for rank, mine in enumerate(known)]
    assert known == [[(rank + far) % ranks for far in range(ranks)] for rank in range(ranks)]


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved-1f1b"])
def test_nobody_goes_on_before_the_news_of_the_last_rank_can_have_come(name: str) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=8)
    cost = CostModel.even(schedule.placement, transfer=2)
    timeline = simulate(schedule, cost)
    assert timeline.makespan + 2 <= step_time(timeline, cost) <= timeline.makespan + 3 * 2
