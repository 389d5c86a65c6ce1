"""Plans of random models, layouts and clusters: what is faster or smaller is never worse, no device computes more than
its peak, and times have the units that they say.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from pipeflow.planning.efficiency import PUBLISHED
from pipeflow.planning.step_plan import Plan
from tests.covering import some
from tests.planning.random_plans import CHANGES, Case, as_fast_as_the_other, random_case, random_mix

GROUPS = 100  # of seeds, so that a run of some of them is spread over all
ROUNDING = 1 + 1e-9
SECONDS = ("forward_launch", "backward_launch", "sync", "collective", "transfer_start")  # coefficients that are times


@pytest.mark.slow
@pytest.mark.parametrize("group", some(range(GROUPS), [0]))
def test_what_is_faster_or_smaller_is_never_worse(group: int) -> None:
    for seed in range(group, 2000, GROUPS):
        case, random = random_case(seed), Random(seed)
        before = case.plan()
        assert before.step_seconds is not None
        for name, change in CHANGES.items():
            after = change(case, random.choice((1.01, 1.1, 1.5, 2, 4))).plan()
            assert after.step_seconds is not None
            assert after.step_seconds <= before.step_seconds * ROUNDING, f"{name} of seed {seed}: {case}"
            if before.cut == after.cut:
                assert kept(after) <= before.peak_bytes * ROUNDING, f"{name} of seed {seed}: {case}"
            assert not (before.fits and name == "more memory") or after.fits


@pytest.mark.slow
@pytest.mark.parametrize("group", some(range(GROUPS), [0]))
def test_what_is_faster_or_smaller_is_never_worse_on_two_kinds_of_devices(group: int) -> None:
    """Both kinds get the same factor. Where both get the better rates of each, the cut stays even: one that is the
    fastest follows the speeds of kinds.
    """
    for seed in range(group, 1000, GROUPS):
        case, random = random_mix(seed), Random(seed)
        before = case.plan()
        assert before.step_seconds is not None
        for name, change in CHANGES.items():
            by = random.choice((1.01, 1.1, 1.5, 2, 4))
            after = change(case, by).plan()
            assert after.step_seconds is not None
            assert after.step_seconds <= before.step_seconds * ROUNDING, f"{name} of seed {seed}: {case}"
            if before.cut == after.cut:
                assert kept(after) <= before.peak_bytes * ROUNDING, f"{name} of seed {seed}: {case}"
        even = replace(case, balanced=False)
        before, after = even.plan(), as_fast_as_the_other(even, 1).plan()
        assert before.step_seconds is not None
        assert after.step_seconds is not None
        assert after.step_seconds <= before.step_seconds * ROUNDING, f"seed {seed}: {case}"


@pytest.mark.slow
@pytest.mark.parametrize("group", some(range(GROUPS), [0]))
def test_no_device_computes_more_than_its_peak_and_units_are_those_of_the_rates(group: int) -> None:
    for seed in range(group, 2000, GROUPS):
        case = random_case(seed)
        found = case.plan()
        assert found.step_seconds is not None
        assert 0 < utilization(case) < 1, f"seed {seed}: {case}"
        twice = in_other_units(case, 2.0).plan()
        assert twice.step_seconds == pytest.approx(found.step_seconds / 2, rel=1e-9), f"seed {seed}: {case}"
        assert twice.peak_bytes == found.peak_bytes


def kept(found: Plan) -> float:
    """Bytes of the fullest device without the copies that a step makes of gradients in 16 bits: smaller gradients have
    copies that larger ones do not need.
    """
    return found.peak_bytes - found.peak_parts.get("step", 0.0)


def utilization(case: Case) -> float:
    """The share of all devices' peak that the model's own operations take (MFU), without what is computed again."""
    found = case.plan()
    assert found.step_seconds is not None
    sequences = found.tokens / found.sequence
    flops = case.model.flops_per_sample(found.sequence) * sequences
    return flops / found.step_seconds / found.devices / max(case.cluster.device.flops.values())


def in_other_units(case: Case, times: float) -> Case:
    """The case with all rates so many times as high, and all times as much shorter: a second is another one."""
    cluster = case.cluster
    device = replace(
        cluster.device,
        flops={name: rate * times for name, rate in cluster.device.flops.items()},
        memory_bandwidth=cluster.device.memory_bandwidth * times,
    )
    return replace(
        case,
        cluster=replace(
            cluster,
            device=device,
            link_bandwidth=cluster.link_bandwidth * times,
            network_bandwidth=cluster.network_bandwidth * times,
            link_latency=cluster.link_latency / times,
            network_latency=cluster.network_latency / times,
            efficiency={name: getattr(PUBLISHED, name) / times for name in SECONDS},
        ),
    )
