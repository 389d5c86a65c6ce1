"""What the page asks and gets, without a browser."""

from __future__ import annotations

import json

import pytest

from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.draw.captions import Unit
from pipeflow.draw.page.timeline_data import page_data
from pipeflow.schedules import SCHEDULES, make_schedule
from pipeflow.tools.explore.answers import csv, search, start
from pipeflow.tools.explore.state import State
from pipeflow.tools.explore.views import plan


@pytest.mark.some(7)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_plan_is_the_simulation_under_the_costs_of_the_link(name: str) -> None:
    answer = plan({"schedule": name, "ranks": "4", "microbatches": "8", "latency": "0.25", "forward": "2"})
    schedule = make_schedule(name, ranks=4, microbatches=8)
    cost = CostModel.even(schedule.placement, 2, transfer=0.25)
    if name == "zb-auto":
        schedule = make_schedule(name, ranks=4, microbatches=8, cost=cost)
    assert answer["data"] == page_data((simulate(schedule, cost),), Unit())


def test_options_go_to_the_schedules_that_have_them() -> None:
    answer = plan({"schedule": "1f1b,interleaved-1f1b", "chunks": "4"})
    assert [len(timeline["rows"][0]["chunks"]) for timeline in answer["data"]["timelines"]] == [1, 4]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", ["zb-v", "gpipe", "zb-auto"])
def test_stages_to_recompute_and_to_offload_are_those_of_make_schedule(name: str, own: bool) -> None:
    costs = {"offload": "0.5", "recompute": "2", "saved_bytes": "8", "input_bytes": "1"}
    stages = {"recompute_stages": "0,2-3", "offload_stages": "all"}
    if own:
        text = f"{name}:recompute_stages=0_2-3:offload_stages=all,1f1b"
        answer = plan({"schedule": text, **costs})
        assert answer["data"]["timelines"][1] == plan({"schedule": "1f1b", **costs})["data"]["timelines"][0]
        kept = {"schedule": name, **stages}
        assert plan(kept | costs)["own"] == [f"{name}:recompute_stages=0_2_3:offload_stages=all"]
    else:
        answer = plan({"schedule": name, **stages, **costs})
    placement = make_schedule(name, ranks=4, microbatches=1).placement
    cost = CostModel.even(placement, offload=0.5, recompute=2, saved_bytes=8, input_bytes=1)
    made = make_schedule(name, ranks=4, microbatches=8, recompute=[0, 2, 3], offload=True, cost=cost)
    expected = page_data((simulate(made, cost),), Unit())["timelines"][0]
    assert answer["data"]["timelines"][0] == expected


def test_stages_of_files_are_those_of_the_link_and_rows_have_their_own() -> None:
    made = make_schedule("gpipe", ranks=2, microbatches=3)
    shown = {"schedule": "file:mine.csv", "files": json.dumps({"mine.csv": made.to_csv()})}
    assert "0C2" in csv({**shown, "recompute_stages": "0"})["text"]
    begun = start({"schedule": "gpipe", "ranks": "2", "recompute_stages": "1"})["fields"]
    assert begun["rows"].count("C") == 8
    assert plan({**begun, "recompute_stages": "all"})["custom"]["entries"] == [
        row.split() for row in begun["rows"].split("\n")
    ]


def test_a_bound_under_a_cap_is_one_for_orders_that_save_memory() -> None:
    begun = start({"schedule": "gpipe", "recompute_stages": "all"})["fields"]
    cap = {"memory_cap": "1", "input_bytes": "0.1", "saved_bytes": "1"}
    plain = start({"schedule": "gpipe"})["fields"]
    least, most = (plan(each | cap)["custom"]["bound"]["makespan"] for each in (begun, plain))
    assert least < most
    found = search({"schedule": "gpipe", "recompute_stages": "all", "bytes_cap": "2", **cap, "memory_cap": ""})
    assert "C" in found["fields"]["rows"]
    assert found["bound"] == least


def test_factors_follow_the_depth_of_the_model() -> None:
    state = State.of({"factors": "1,3"})
    assert state.prices.cost_model(Placement.linear(2)).forward == (1, 3)
    assert state.prices.cost_model(Placement.linear(4)).backward_weight == (1, 1, 3, 3)
    assert state.prices.cost_model(Placement.linear(1)).forward == (2,)
    assert state.prices.cost_model(Placement.linear(3)).forward == pytest.approx((1, 2, 3))


def test_a_transfer_takes_latency_and_bytes_over_bandwidth() -> None:
    model = State.of({"latency": "0.5", "activation_bytes": "6", "bandwidth": "4"}).prices.cost_model(
        Placement.linear(4)
    )
    assert model.transfer(0, 0, 1) == 2.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shade": "red", "rank": "4"}, "unknown field 'shade'"),
        ({"ranks": "4.5"}, "ranks must be a whole number of at least 1, got '4.5'"),
        ({"ranks": "0"}, "ranks must be a whole number of at least 1"),
        ({"ranks": "1000000"}, "at most 256 ranks"),
        ({"schedule": "looped-bfs", "ranks": "32", "microbatches": "1024", "chunks": "64"}, "too large for the page"),
        ({"schedule": "1f1b,gpipe", "ranks": "64", "microbatches": "1024"}, "65,536 for 2 schedules together"),
        ({"schedule": "zb-auto", "ranks": "64", "microbatches": "1024"}, "a search or an offload counts 4 times"),
        ({"ranks": "64", "microbatches": "512", "offload_stages": "0"}, "a search or an offload counts 4 times"),
        ({"recompute_stages": "0,"}, "recompute_stages: it must be all, or stages such as 0,2-3, got '0,'"),
        ({"schedule": "1f1b:recompute_stages=4"}, "there is no stage 4"),
        ({"offload_stages": "all"}, "the costs have no time of a copy to the host"),
        ({"schedule": "hanayo", "waves": "1e308"}, "too large for the page"),
        ({"schedule": "gis", "microbatches": "1", "chunks": "1025"}, "4 ranks may have 4,096 together"),
        ({"schedule": "custom", "rows": "0F0\n" * 600}, "at most 256 ranks"),
        ({"schedule": "custom", "rows": "0F0," * 200_000}, "at most 65,536 cells"),
        ({"schedule": "custom", "rows": "0F0 " * 200_000}, "at most 65,536 cells"),
        ({"schedule": "custom", "placement": ".".join(map(str, range(1000)))}, "at most 256 ranks"),
        ({"factors": "1," * 60_000}, "factors may have at most 100,000 characters"),
        ({"forward": "nan"}, "forward must be a number"),
        ({"rows_file": "../rows"}, "not the name of a file"),
        ({"latency": "-1"}, "latency must be a number"),
        ({"bandwidth": "0"}, "bandwidth must be positive"),
        ({"schedule": "1f1c"}, "did you mean '1f1b'"),
        ({"schedule": "custom"}, "no schedule of your own yet"),
        ({"schedule": "custom", "rows": "0F0,0G1"}, "cell 2"),
        ({"schedule": "custom", "rows": "0F0,0B0", "placement": "x"}, "placement must be like"),
        ({"schedule": "chimera", "ranks": "3"}, "even"),
    ],
)
def test_a_wrong_field_is_one_clear_error(fields: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(fields)
