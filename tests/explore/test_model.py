"""Models on clusters as costs."""

from __future__ import annotations

import re

import pytest

from pipeflow.core.errors import UsageError
from pipeflow.core.text import bytes_text
from pipeflow.planning.catalog import MODELS, model_named
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.estimate import plan as estimate
from pipeflow.planning.setup import Setup
from pipeflow.schedules import SCHEDULES, make_schedule
from pipeflow.tools.explore.views import MEMORY, model, plan
from tests.browser import MARKS
from tests.explore.explorer import Explorer

GPT3 = {"model": "gpt3-175b", "ranks": "8", "tensor": "8", "microbatches": "16"}


@pytest.mark.some(5)
@pytest.mark.parametrize("name", SCHEDULES)
def test_gpt3_on_64_devices_is_drawn_in_seconds_and_bytes(name: str) -> None:
    answer = plan(GPT3 | {"schedule": name})
    timeline = answer["data"]["timelines"][0]
    assert (answer["data"]["unit"], answer["data"]["factor"]) == ("s", 1)
    schedule = make_schedule(name, ranks=8, microbatches=16)
    expected = estimate(model_named("gpt3-175b"), schedule, Setup(tensor=8), cluster=Cluster.of("a100-80gb"))
    if name != "zb-auto":  # which is made for these costs
        assert timeline["makespan"] == pytest.approx(expected.timeline.makespan)
        assert timeline["highest"] == pytest.approx(max(expected.timeline.peak_bytes))
    assert "iB" in timeline["rows"][0]["peak"]


def test_replicas_reduce_their_gradients() -> None:
    streams = [plan(GPT3 | {"data": data})["data"]["timelines"][0]["streams"] for data in ("1", "2")]
    assert [len(each) for each in streams] == [1, 2]


def test_shared_out_weights_are_gathered() -> None:
    fields = GPT3 | {"data": "8", "zero": "3"}
    timeline = plan(fields)["data"]["timelines"][0]
    expected = estimate(
        model_named("gpt3-175b"),
        make_schedule("1f1b", ranks=8, microbatches=16),
        Setup(tensor=8, data=8, zero=3),
        cluster=Cluster.of("a100-80gb"),
    )
    assert expected.step_parts is not None
    assert expected.step_seconds is not None
    share = expected.step_parts.sharding / expected.step_seconds
    assert f"<td>{share:.1%}</td>" in model(fields)["tables"]
    assert timeline["streams"] != plan(fields | {"zero": "1"})["data"]["timelines"][0]["streams"]


@pytest.mark.parametrize(
    ("fields", "setup"),
    [
        ({}, Setup(tensor=8)),
        ({"data": "8", "zero": "3"}, Setup(tensor=8, data=8, zero=3)),
        ({"checkpoint": "full"}, Setup(tensor=8, checkpoint="full")),
    ],
)
def test_the_columns_of_a_rank_s_memory_add_up_to_its_peak(fields: dict[str, str], setup: Setup) -> None:
    schedule, cluster = make_schedule("1f1b", ranks=8, microbatches=16), Cluster.of("a100-80gb")
    rank = estimate(model_named("gpt3-175b"), schedule, setup, cluster=cluster).ranks[0]
    assert sorted(part for each in MEMORY.values() for part in each) == sorted(rank.peak_parts)
    columns = [sum(rank.peak_parts[part] for part in each) for each in MEMORY.values()]
    cells = "".join(f"<td>{bytes_text(each)}</td>" for each in (*columns, rank.peak_bytes))
    assert cells in model(GPT3 | fields)["tables"]


def test_factors_slow_parts_of_a_model() -> None:
    makespans = [plan(GPT3 | {"factors": factors})["data"]["timelines"][0]["makespan"] for factors in ("1", "1,2")]
    assert makespans[1] > 1.4 * makespans[0]


@pytest.mark.parametrize("name", MODELS)
def test_every_model_of_the_catalogue(name: str) -> None:
    fields = {"model": name, "ranks": "2", "schedule": "1f1b,zb-h1", "zero": "1", "data": "2"}
    tables = model(fields)["tables"]
    assert tables.count("<table>") == 3
    assert "1f1b, 2 ranks" in tables


def test_the_tables_say_what_does_not_fit() -> None:
    assert "fits" in model(GPT3 | {"data": "8", "zero": "1", "checkpoint": "full"})["tables"]
    assert "GiB too much" in model(GPT3 | {"tensor": "4"})["tables"]
    assert model({"schedule": "1f1b"}) == {"tables": "", "misfits": []}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "gpt4"}, "model must be one of"),
        ({"device": "abacus"}, "device must be one of"),
        ({"tensor": "7"}, "7"),
        ({"ranks": "99"}, "layers"),
        ({"link_bandwidth": "300"}, "bytes/s, not in GB/s"),
        ({"zero": "yes"}, "zero must be one of 0, 1, 2, 3"),
        ({"zero": "2", "data": "2"}, "zero=2 needs one pipeline rank"),
        ({"device": "v100-32gb", "precision": "fp8"}, "fp8"),
    ],
)
def test_a_wrong_layout_is_one_clear_error(fields: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(GPT3 | fields)


class TestOnThePage:
    pytestmark = MARKS

    @pytest.mark.exhaustive
    def test_a_model_replaces_the_costs(self, explorer: Explorer) -> None:
        explorer.open(ranks=8, microbatches=16).unfold()
        assert explorer.find("#field-forward").is_displayed()
        explorer.set("tensor", 8).set("model", "gpt3-175b")
        assert not explorer.find("#field-forward").is_displayed()
        assert re.search(r"makespan [\d.]+ m?s", explorer.text(".said"))
        assert explorer.text("#modelled caption") == "Time of a step on 64 x a100-80gb, by what it is made of"
        assert explorer.find("#field-link_bandwidth").get_attribute("placeholder") == "auto"
        assert not [each for each in explorer.texts("summary") if each.startswith("Ranks of")]  # another table has them
        explorer.set("model", "")
        assert explorer.text("#modelled") == ""
