"""Recomputation, offload and unshards as options of make_schedule."""

from __future__ import annotations

from typing import Any

import pytest

from pipeflow import SCHEDULES, CostModel, UsageError, make_schedule, verify, with_offload, with_recompute, with_unshard
from tests.families import make_near


def test_every_schedule_takes_them() -> None:
    for name in SCHEDULES:
        plain = make_near(name, ranks=4, microbatches=4)
        cost = CostModel.even(plain.placement, offload=0.1)
        sizes: dict[str, Any] = {"ranks": plain.placement.num_ranks, "microbatches": 4}
        costs: dict[str, Any] = {"cost": cost} if name == "zb-auto" else {}
        plain = make_schedule(name, **sizes, **costs)
        assert make_schedule(name, **sizes, **costs, recompute=True) == with_recompute(plain)
        assert make_schedule(name, **sizes, cost=cost, offload=range(2)) == with_offload(plain, cost, [0, 1])
        both = make_schedule(name, **sizes, cost=cost, offload=[0], recompute=iter([1]))
        assert both == with_offload(with_recompute(plain, [1]), cost, [0])
        assert make_schedule(name, **sizes, **costs, unshard=True) == with_unshard(plain)
        every = make_schedule(name, **sizes, cost=cost, offload=[0], unshard=[1], recompute=[1])
        assert every == with_offload(with_unshard(with_recompute(plain, [1]), [1]), cost, [0])
        assert verify(every) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": True}, r"an offload is planned by the time of its copies: give cost=CostModel\(...\)"),
        ({"offload": [0], "cost": 3}, "the time of a copy per stage; got 3"),
        ({"recompute": 1}, r"recompute is True, for all stages, or a list of stages such as \[0, 1\], got 1"),
        ({"recompute": "all"}, "recompute is True, for all stages, or a list"),
        ({"unshard": 0}, r"unshard is True, for all stages, or a list of stages such as \[0, 1\], got 0"),
        ({"recompute": [2]}, "there is no stage 2: the schedule has stages 0 to 1"),
        ({"cost": 3}, "schedule '1f1b' does not take cost"),
    ],
    ids=str,
)
def test_what_they_cannot_mean_is_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_schedule("1f1b", ranks=2, microbatches=2, **options)
