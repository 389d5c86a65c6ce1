"""The search for layouts of a module, against plans of all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeflow import Cluster, Setup, UsageError, find_module_layouts, make_schedule, plan_module
from tests.pricing.test_operators import Decoder

CLUSTER = Cluster.of("a100-40gb")
EXAMPLES = {size: (torch.zeros(size, 64, dtype=torch.long), None) for size in (1, 2)}


def module() -> Decoder:
    with torch.device("meta"):
        return Decoder(4, 256, 4, 1000)


def searched(**options: Any) -> Any:
    usual: dict[str, Any] = {"cluster": CLUSTER, "devices": 2, "batch": 8, "schedules": ("1f1b", "zb-h1")}
    return find_module_layouts(module(), EXAMPLES, **usual | options)


@pytest.mark.exhaustive
def test_the_search_finds_the_fastest_of_all_plans() -> None:
    """Of each choice of sizes one is listed, no slower than any plan, and it can be planned again."""
    found = searched()
    assert {(each.layout.pipeline, each.layout.data) for each in found} == {(1, 2), (2, 1)}
    for each in found:
        layout, least = each.layout, float("inf")
        for size, example in EXAMPLES.items():
            for checkpoint in ("none", "full"):
                for name in ("1f1b", "zb-h1"):
                    schedule = make_schedule(name, ranks=layout.pipeline, microbatches=8 // layout.data // size)
                    setup = Setup(data=layout.data, zero=int(layout.data > 1), checkpoint=checkpoint)
                    seconds = plan_module(module(), schedule, example, setup, cluster=CLUSTER).step_seconds
                    assert seconds is not None
                    least = min(least, seconds)
        assert each.step_seconds == pytest.approx(least)
        setup = replace(layout.setup, microbatch_size=1)
        example = EXAMPLES[layout.microbatch_size]
        again = plan_module(
            module(), layout.make_schedule(), example, setup, cluster=CLUSTER, cuts=list(each.plan.cuts) or None
        )
        assert again.step_seconds == pytest.approx(each.step_seconds)
        assert again.peak_bytes == pytest.approx(each.plan.peak_bytes)
    assert [each.layout for each in searched(top=1)] == [found[0].layout]


def test_the_recommended_layout_comes_first_and_the_others_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over slow links, two pipeline ranks are faster than two replicas, which are plainer."""
    slow: dict[str, Any] = {"cluster": replace(CLUSTER, link_bandwidth=1e7), "schedules": ("1f1b",)}
    assert [each.layout.pipeline for each in searched(**slow)] == [2, 1]
    monkeypatch.setattr("pipeflow.planning.layout_ties.TIE", 1e9)
    plain, fast = searched(**slow)
    assert (plain.layout.pipeline, fast.layout.pipeline) == (1, 2)
    assert plain.step_seconds > fast.step_seconds


def test_every_layout_takes_the_whole_batch() -> None:
    found = searched(schedules=("1f1b",), batch=4)
    assert [each.layout.data * each.layout.microbatches * each.layout.microbatch_size for each in found] == [4, 4]


@pytest.mark.exhaustive
def test_less_memory_leaves_layouts_out_and_then_none() -> None:
    roomy = searched()
    limit = 0.999 * max(each.plan.peak_bytes for each in roomy)
    tight = searched(memory=limit)
    assert tight
    assert all(each.plan.peak_bytes <= limit for each in tight)
    assert tight[0].step_seconds >= roomy[0].step_seconds
    with pytest.raises(UsageError, match=r"no layout fits: the closest one, pipeline 2 x data 1 .* limit of 1 MiB"):
        searched(memory=2**20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"batch": 7, "schedules": ("1f1b",), "devices": 16},
            "no layout divides a batch of 7 into microb",
        ),
        ({"devices": 0}, "devices must be an integer of at least 1, got 0"),
        ({"setup": Setup(tensor=2)}, "not split over tensor ranks"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        searched(**options)
    with pytest.raises(UsageError, match="examples is empty"):
        find_module_layouts(module(), {}, cluster=CLUSTER, devices=2, batch=2)
