"""The cut with the shortest step, and what it must take into account."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeflow import GPT, Cluster, Setup, make_schedule, plan
from pipeflow.planning.cuts import cut_by_cost, cuts_to_try, fastest_cut

A100 = Cluster.of("a100-80gb")


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b", "dualpipe"])
def test_no_cut_that_is_tried_has_a_shorter_step(name: str) -> None:
    model = GPT(layers=16, hidden=1024, heads=8, vocabulary=100_000)
    schedule, setup = make_schedule(name, ranks=4, microbatches=8), Setup(data=2)

    def seconds(cut: tuple[tuple[int, int], ...]) -> float:
        found = plan(model, schedule, setup, cluster=A100, cut=cut).step_seconds
        assert found is not None
        return found

    times = {cut: seconds(cut) for cut in cuts_to_try(16, schedule.placement)}
    assert seconds(fastest_cut(model, schedule, setup, A100)) == pytest.approx(min(times.values()))


def test_reductions_count_which_a_cut_by_load_leaves_out() -> None:
    """Over a slow network, the reduction of the head's stage ends the step, so this stage gets fewer layers."""
    model, setup = GPT(layers=16, hidden=4096, heads=32, vocabulary=200_000, tied=False), Setup(data=8)
    schedule, slow = make_schedule("gpipe", ranks=4, microbatches=4), replace(A100, network_bandwidth=3e8)
    by_load, fastest = cut_by_cost(model, schedule.placement, setup, slow), fastest_cut(model, schedule, setup, slow)
    one, other = (plan(model, schedule, setup, cluster=slow, cut=cut).step_seconds for cut in (by_load, fastest))
    assert one is not None
    assert other is not None
    assert other < 0.99 * one
