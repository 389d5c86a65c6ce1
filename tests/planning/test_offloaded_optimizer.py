"""An optimizer on the host: what devices no longer hold, what a step pays for it, and options of other libraries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeflow import GPT, Cluster, Setup, UsageError, Wanted, find_layouts, make_schedule, plan
from pipeflow.planning.layout_cells import leanest_cells
from pipeflow.planning.layouts import _least
from pipeflow.planning.libraries import LIBRARIES
from pipeflow.planning.libraries.own import script
from pipeflow.planning.physical import physical_costs
from pipeflow.planning.rank_memory import ALLOCATOR
from pipeflow.planning.setup import PRECISIONS
from pipeflow.planning.similar import unpriced
from pipeflow.planning.step_plan import Plan

MODEL = GPT(8, 1024, 8, 1024, 50304)
H100 = Cluster.of("h100-80gb")


def planned(share: float, ranks: int = 2, **given: Any) -> Plan:
    setup = Setup(**{"data": 4, "zero": 1} | given, offload_optimizer=share)
    return plan(MODEL, make_schedule("1f1b", ranks=ranks, microbatches=4), setup, cluster=H100)


@pytest.mark.parametrize(
    "given", [{}, {"zero": 0}, {"precision": PRECISIONS["bf16-mixed"]}, {"lora_rank": 8, "zero": 0}]
)
def test_states_leave_the_device_and_nothing_else_does(given: dict[str, Any]) -> None:
    none, half, whole = (planned(share, **given) for share in (0, 0.5, 1))
    for before, middle, after in zip(none.ranks, half.ranks, whole.ranks, strict=True):
        assert after.optimizer_bytes == after.step_bytes == 0
        assert middle.optimizer_bytes == pytest.approx(before.optimizer_bytes / 2, abs=1)
        kept = {"weights", "gradients", "activations", "recomputed", "backward", "transfers", "buffers"}
        assert all(before.peak_parts[name] == after.peak_parts[name] for name in kept)
        less = before.peak_parts["optimizer"] + before.peak_parts["step"]
        assert before.peak_bytes - after.peak_bytes == pytest.approx((1 + ALLOCATOR) * less)


def test_a_step_pays_two_copies_and_the_adam_of_the_host() -> None:
    """Per parameter of a device: two bytes of gradient there, two of weight back, and 1 / 5e8 s of the host."""
    placement, setup = make_schedule("1f1b", ranks=1, microbatches=4).placement, Setup(data=4, zero=1)
    before, after = (
        physical_costs(MODEL, placement, replace(setup, offload_optimizer=share), H100).optimizer for share in (0, 1)
    )
    own = MODEL.parameters / 4
    assert before > rest(placement, setup)
    assert after == pytest.approx(rest(placement, setup) + own * (4 / 64e9 + 1 / 5e8))
    fast = replace(H100, device=replace(H100.device, host_step=5e9, host_bandwidth=640e9))
    tenth = physical_costs(MODEL, placement, replace(setup, offload_optimizer=1), fast).optimizer
    assert tenth - rest(placement, setup) == pytest.approx((after - rest(placement, setup)) / 10)


def rest(placement: Any, setup: Setup) -> float:
    """Seconds in which the device still reads gradients and writes weights."""
    free = replace(setup.precision, master=0, moments=0)
    return physical_costs(MODEL, placement, replace(setup, precision=free), H100).optimizer


def test_a_search_finds_room_with_it() -> None:
    large = replace(MODEL, layers=48, hidden=4096, heads=32)
    wanted = Wanted(large, H100, 8, 8, memory=14e9, zero=0, tensor=8, pipeline=1)
    with pytest.raises(UsageError, match="no layout fits"):
        find_layouts(wanted)
    offloaded = replace(wanted, setup=Setup(offload_optimizer=1.0))
    found = find_layouts(offloaded, top=1).recommended
    assert found.layout.setup.offload_optimizer == 1
    assert found.plan.fits
    for cell in leanest_cells(offloaded):
        assert _least(offloaded, cell) <= found.plan.peak_bytes
    assert any("host_step" in each for each in unpriced(MODEL, offloaded.setup))
    assert "100% of the optimizer on the host" in "\n".join(found.plan.heading())


def test_libraries_have_its_options_or_refuse_it() -> None:
    flags = LIBRARIES["megatron"].options(planned(0.5)).text
    assert "--optimizer-cpu-offload --use-precision-aware-optimizer\n--optimizer-offload-fraction 0.5" in flags
    alone = planned(1, ranks=1, precision=PRECISIONS["bf16-mixed"])
    assert '"offload_optimizer": {\n      "device": "cpu"' in LIBRARIES["deepspeed"].options(alone).text
    partly = planned(0.5, ranks=1, precision=PRECISIONS["bf16-mixed"])
    refused = (
        ("megatron", planned(1, zero=0), "offloads an optimizer with master weights"),
        ("deepspeed", partly, "offloads a whole optimizer with ZeRO and no pipeline"),
        ("torchtitan", alone, "torchtitan steps the optimizer on the device"),
    )
    for name, found, message in refused:
        with pytest.raises(UsageError, match=message):
            LIBRARIES[name].options(found)
    with pytest.raises(UsageError, match="pipeflow steps the optimizer on the device"):
        script(alone, {})


@pytest.mark.parametrize("share", [-0.1, 1.1, True, "all"])
def test_a_share_is_from_0_to_1(share: Any) -> None:
    with pytest.raises(UsageError, match="offload_optimizer must be a share from 0 to 1"):
        Setup(offload_optimizer=share)


def test_a_device_whose_host_is_not_known_is_refused() -> None:
    unknown = replace(H100, device=replace(H100.device, host_bandwidth=0.0))
    with pytest.raises(UsageError, match="has no host_bandwidth, which copies to the host take"):
        plan(MODEL, make_schedule("1f1b", ranks=2, microbatches=4), Setup(offload_optimizer=1), cluster=unknown)
    with pytest.raises(UsageError, match="host_step is 5, less than 1e"):
        replace(H100.device, host_step=5.0)
