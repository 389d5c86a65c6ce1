"""Where the time of a plan goes: parts that add up, and that grow with what they are made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeflow import GPT, PRECISIONS, Cluster, Setup, UsageError, make_schedule, plan
from pipeflow.planning.estimate import MEANINGS, Breakdown, breakdown

MODEL = GPT(layers=8, hidden=2048, heads=16, positions=2048, vocabulary=512, tied=False)
A100 = Cluster.of("a100-80gb")


def broken(setup: Setup | None = None, *, name: str = "1f1b", cluster: Cluster = A100, **options: Any) -> Breakdown:
    schedule = make_schedule(name, ranks=4, microbatches=8, **options)
    found = plan(MODEL, schedule, setup, cluster=cluster)
    parts = breakdown(found)
    assert parts.seconds == pytest.approx(found.step_seconds, rel=1e-12)
    assert list(parts.parts) == [name for name in MEANINGS if name in parts.parts]
    assert min(parts.parts.values()) > 0
    return parts


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b", "dualpipe"])
def test_parts_add_up_to_the_step(name: str) -> None:
    found = broken(Setup(tensor=2, data=2, checkpoint="full"), name=name)
    assert {"products", "attention", "elementwise", "recomputation", "tensor", "bubble", "optimizer"} <= set(
        found.parts
    )


def test_without_tensor_ranks_replicas_and_recomputation_they_have_no_part() -> None:
    assert not {"tensor", "recomputation", "reduction", "sharding", "processors"} & set(broken().parts)


def test_each_part_grows_with_what_it_is_made_of() -> None:
    setup = Setup(tensor=4, data=2)
    base = broken(setup).parts
    slower = {"products": {"products": 0.4}, "attention": {"attention": 0.1}, "elementwise": {"memory": 0.3}}
    for part, given in {**slower, "tensor": {"link": 0.1}, "launches": {"forward_launch": 1.0}}.items():
        parts = broken(setup, cluster=replace(A100, efficiency=given)).parts
        assert parts[part] > 1.5 * base.get(part, 1e-9), part
        unchanged = {"products", "attention"} - {part}
        assert all(parts[each] == pytest.approx(base[each]) for each in unchanged)


def test_recomputing_layers_costs_a_forward_and_recomputing_scores_costs_less() -> None:
    kept = broken(Setup(keep_scores=True)).parts
    scores, layers = (
        broken(Setup(keep_scores=True, checkpoint=kind, early_stop=False)).parts["recomputation"]
        for kind in ("selective", "full")
    )
    computed = sum(kept[kind] for kind in ("products", "attention", "elementwise"))
    assert 0 < scores < 0.5 * layers
    assert 0.2 * computed < layers < computed / 3


def test_a_schedule_that_recomputes_has_it_in_the_same_part() -> None:
    assert "recomputation" in broken(name="gpipe", recompute=True).parts


def test_communication_beside_computation_is_hidden() -> None:
    assert broken(Setup(data=4), name="interleaved-1f1b").hidden["reduction"] > 0
    slow_host = {"forward_launch": 0.02, "backward_launch": 0.04}
    assert broken(Setup(tensor=4), cluster=replace(A100, efficiency=slow_host)).hidden["tensor"] > 0


def test_ranks_that_share_processors_wait_for_them() -> None:
    shared = replace(A100, sharing=2.0, device=replace(A100.device, runs_ahead=False))
    assert broken(Setup(data=2), cluster=shared).parts["processors"] > 0


def test_half_precision_with_stored_scores_counts_them_as_attention() -> None:
    stored = broken(Setup(precision=PRECISIONS["fp16"])).parts
    assert stored["attention"] > 2 * broken().parts["attention"]


def test_a_plan_without_a_device_has_no_seconds() -> None:
    with pytest.raises(UsageError, match="no seconds to break down: say which one, with --device"):
        breakdown(plan(MODEL, make_schedule("1f1b", ranks=4, microbatches=8)))
