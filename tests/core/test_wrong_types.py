"""Values of another type than a public function takes: each is one sentence that says what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import pipeflow
from pipeflow import Action, Cluster, CostModel, Kind, Placement, Schedule, UsageError, make_schedule

PLANNED = make_schedule("1f1b", ranks=2, microbatches=2)
LINE = Placement.linear(2)
COST = CostModel.even(LINE)
MODEL = pipeflow.model_named("gpt2-small")
P: Any = pipeflow  # its functions are called with what their types forbid
C: Any = CostModel


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: P.simulate(PLANNED, cost=3), "cost must be a pipeflow.CostModel, got int: CostModel.even"),
        (lambda: P.with_recompute("1f1b"), r"schedule must be a pipeflow.Schedule, got str: make_schedule\('1f1b'"),
        (lambda: P.dependency_graph("1f1b"), "schedule must be a pipeflow.Schedule, got str"),
        (lambda: P.critical_path(PLANNED), r"timeline must be a pipeflow.Timeline, got Schedule: simulate\(schedule"),
        (lambda: P.replan(PLANNED), "timeline must be a pipeflow.Timeline, got Schedule"),
        (lambda: P.measured_costs(PLANNED), "timeline must be a pipeflow.Timeline, got Schedule"),
        (lambda: P.plan("gpt2-small", PLANNED), r"GPT or pipeflow.ViT, got str: model_named\('gpt2-small'\)"),
        (lambda: P.plan(MODEL, PLANNED, cluster="a100"), r"must be a pipeflow.Cluster, got str: Cluster.of\('a100'\)"),
        (lambda: P.plan(MODEL, PLANNED, "bf16"), "setup must be a pipeflow.Setup, got str"),
        (lambda: P.Wanted("llama3-8b", Cluster.of("h100-80gb"), 8, 8), r"got str: model_named\('llama3-8b'\)"),
        (lambda: P.Wanted(MODEL, "h100-80gb", 8, 8), r"got str: Cluster.of\('h100-80gb'\)"),
        (lambda: P.find_layouts(MODEL), "wanted must be a pipeflow.Wanted, got GPT"),
        (lambda: P.Setup(precision="fp16"), r"must be a pipeflow.Precision, got str: PRECISIONS\['fp16'\]"),
        (lambda: P.search(2, 3, COST), r"placement must be a pipeflow.Placement, got int: Placement.linear\(2\)"),
        (lambda: P.search(LINE, "3", COST), "microbatches must be an integer of at least 1, got '3'"),
        (lambda: P.order_for("34", LINE, COST, 2), "lengths must be a list with the length of each sample, got '34'"),
        (lambda: C(1, 1, 1), "forward must be a list of numbers, got 1"),
        (lambda: C((1,), (1,), ("1",)), "backward_weight of stage 0 must be a number, got '1'"),
        (lambda: C((1, 1), (1, 1), (1, 1), copy_groups=(0, 1)), "copy_groups is a list of lists of ranks"),
        (lambda: P.Placement((0, 1, 2)), "a placement is a list of paths, each with the rank of every stage"),
        (lambda: P.Action("F", 0, 0), r"the kind of an action must be a Kind, got 'F': write Kind\.F$"),
        (lambda: P.Action("X", 0, 0), r"the kind of an action must be a Kind, got 'X': the kinds are Kind\.F "),
        (lambda: P.Action(Kind.F, 0, 1.0), r"stage and microbatch of an action must be whole numbers from 0, got 1\.0"),
        (lambda: P.make_schedule(3, ranks=2, microbatches=2), "name must be a str, got int"),
        (lambda: P.partition_balanced(3, 2), "weights must be a list with one number per layer, got 3"),
        (lambda: P.draw.svg(PLANNED), "timeline must be a pipeflow.Timeline, got Schedule"),
    ],
)
def test_another_type_is_one_sentence(call: Callable[[], object], said: str) -> None:
    import pipeflow.draw  # noqa: F401  # not loaded with pipeflow

    with pytest.raises(UsageError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_lists_are_as_good_as_tuples() -> None:
    lists = C([1, 2], [1, 1], [1, 1], saved_bytes=[3, 3], copy_groups=[[0, 1]])
    tuples = CostModel((1, 2), (1, 1), (1, 1), saved_bytes=(3, 3), copy_groups=((0, 1),))
    placed = P.Placement([[0, 1]])
    assert (lists, hash(lists), placed, hash(placed)) == (tuples, hash(tuples), LINE, hash(LINE))
    assert (
        pipeflow.order_for([3, 4, 5], placed, lists, 2).groups == pipeflow.order_for([3, 4, 5], LINE, tuples, 2).groups
    )


def test_a_cap_of_memory_with_a_microbatch_that_does_not_exist() -> None:
    row = tuple(Action(kind, 0, microbatch) for microbatch in (0, 9) for kind in (Kind.F, Kind.B))
    problems = [each.problem for each in pipeflow.verify(Schedule("x", Placement.linear(1), 1, (row,)), memory_cap=2)]
    assert problems == ["0F9 does not exist", "0B9 does not exist"]
