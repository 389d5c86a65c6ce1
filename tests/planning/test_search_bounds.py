"""The bounds by which a search leaves layouts out before it knows their costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeflow import GPT, Cluster, Setup, UsageError
from pipeflow.core.analysis.in_time import LateError
from pipeflow.planning import layout_trials, layouts
from pipeflow.planning.cuts import profile
from pipeflow.planning.layout import Wanted
from pipeflow.planning.layout_cells import cells, lightest_cells
from pipeflow.planning.layout_trials import (
    LayoutTrial,
    _of_one,
    _of_one_replica,
    choices,
    families,
    least_seconds,
    priced,
)
from pipeflow.planning.layouts import _least, find_layouts
from pipeflow.planning.rank_memory import kept_by_stages
from pipeflow.schedules.orders.additions import gathering

MODEL = GPT(6, 512, 4, 512, 8192)
MIXTURE = replace(MODEL, experts=4, experts_per_token=2, expert_layers=2, dense_ffn=4096, mtp=1)
SCANS = replace(MODEL, pattern="M-M*-M", parts_alone=True, scan_state=16, scan_heads=8)
H100, A100 = Cluster.of("h100-80gb"), Cluster.of("a100-80gb")
TWO_KINDS = replace(H100, devices_per_node=2, nodes=1, further=(replace(A100, devices_per_node=2),))
TASKS: dict[str, Wanted] = {
    "one kind": Wanted(MODEL, A100, 4, 8),
    "experts": Wanted(MIXTURE, H100, 4, 8, tensor=1),
    "two kinds of devices": Wanted(MIXTURE, TWO_KINDS, 4, 8, schedules=("1f1b", "zb-v", "dualpipe"), zero=1),
    "slices": Wanted(MODEL, A100, 4, 8, slices=3),
    "offloads": Wanted(MODEL, H100, 4, 8, setup=Setup(offload_layers=4), schedules=("1f1b", "zb-v")),
    "scans": Wanted(SCANS, H100, 4, 8, schedules=("1f1b", "zb-v", "interleaved-1f1b")),
    "an optimizer on the host": Wanted(MIXTURE, H100, 4, 8, setup=Setup(offload_optimizer=0.5), tensor=1),
    "buffers of an engine": Wanted(MODEL, H100, 4, 8, setup=Setup(engine="deepspeed"), schedules=("1f1b", "hanayo")),
    "gradients of an engine": Wanted(MODEL, H100, 4, 8, setup=Setup(engine="torchtitan"), schedules=("1f1b", "zb-v")),
    "scores": Wanted(MODEL, A100, 2, 8, setup=Setup(keep_scores=True), checkpoint="selective"),
}


@pytest.mark.some(2)
@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_bounds_before_costs_are_below_those_with_costs(task: str) -> None:
    wanted = TASKS[task]
    bounded = 0
    for cell in cells(wanted):
        for bound, choice in choices(wanted, cell):
            found = priced(wanted, choice)
            assert found is not None
            assert bound <= found[0], choice
            assert _least(wanted, cell) <= found[1].least_bytes(), choice
            bounded += bound > least_seconds(wanted, cell)
    assert (bounded > 0) == (task != "offloads")


@pytest.mark.parametrize("task", ["one kind", "experts", "slices"])
def test_a_layout_without_room_for_one_microbatch_has_no_costs(task: str) -> None:
    """Such a layout is left out by the same bytes as with its costs."""
    wanted = replace(TASKS[task], schedules=("1f1b",), microbatch_size=1, tensor=1, expert=1, context=1)
    for cell in lightest_cells(wanted):
        for _, choice in choices(wanted, cell):
            found = priced(wanted, choice)
            assert found is not None
            _, trial = found
            kept = kept_by_stages(wanted.model, cell.setup, choice.cut)
            one = trial._fullest(_of_one(kept, choice.family.placement))
            assert one >= trial.least_bytes() or cell.microbatches > 1
            assert priced(wanted, choice, one * (1 + 1e-9)) is not None
            assert priced(wanted, choice, one * (1 - 1e-9)) is None


@pytest.mark.parametrize("task", ["one kind", "experts", "gradients of an engine"])
def test_simulations_that_stop_when_a_step_is_late_find_the_same(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, late = find_layouts(TASKS[task], top=2), list[float]()
    simulated = LayoutTrial.simulated

    def whole(trial: LayoutTrial, within: float) -> Any:
        try:
            simulated(trial, within)
        except LateError:
            late.append(simulated(trial)[0] - within)
        return simulated(trial)

    monkeypatch.setattr(LayoutTrial, "simulated", whole)
    assert find_layouts(TASKS[task], top=2) == found
    assert late
    assert min(late) > 0


def test_schedules_are_kept_for_other_costs_unless_they_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    [family] = families(("1f1b",), 2, 4)
    kept, gathered = (family.step(6, gathers) for gathers in (False, True))
    assert family.step(6, gathers=False) is kept
    assert kept == family.make(6).with_reductions()
    assert gathered == gathering(kept) != kept
    monkeypatch.setattr(layout_trials, "REMEMBERED", family.actions(6) - 1)
    assert family.step(6, gathers=False) is not kept
    assert family.step(6, gathers=False) == kept


def test_without_replicas_computations_are_nearly_all_of_the_bound() -> None:
    """Of the largest rank of a cut, not of the mean one."""
    wanted = Wanted(replace(MIXTURE, hidden=2048), H100, 4, 8, tensor=1, pipeline=4, zero=0, expert=1)
    for cell in lightest_cells(wanted):
        for bound, choice in choices(wanted, cell):
            found = priced(wanted, choice)
            assert found is not None
            least, trial = found
            assert bound > 0.9 * (least - trial.physical.after), choice


@pytest.mark.parametrize("given", [{"expert": 4}, {"expert": 2, "expert_tensor": 2}, {"tensor": 2}, {"context": 2}])
def test_a_microbatch_takes_as_long_with_any_number_of_replicas(given: dict[str, Any]) -> None:
    """The bounds of all numbers of replicas come from one profile."""
    setups = [Setup(data=data, zero=1, **given) for data in (4, 8, 32)]
    assert len({_of_one_replica(each) for each in setups}) == 1
    model = replace(MIXTURE, hidden=2048)
    one, *others = (profile(model, replace(each, zero=0), H100) for each in (_of_one_replica(setups[0]), *setups))
    assert one.layers["experts"] != one.layers["dense"]
    assert all(each == one for each in others)


@pytest.fixture(name="asked")
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What a search asks the costs of."""
    asked: list[object] = []

    def counted(*given: Any) -> Any:
        asked.append(given)
        return priced(*given)

    monkeypatch.setattr(layouts, "priced", counted)
    return asked


def test_weights_and_a_microbatch_that_do_not_fit_need_no_costs(asked: list[object]) -> None:
    """One that is a little below the limit does."""
    wanted = Wanted(replace(MODEL, hidden=1024), A100, 1, 1, schedules=("1f1b",), checkpoint="none")
    [best] = find_layouts(wanted).ranked
    least, needed = min(_least(wanted, cell) for cell in lightest_cells(wanted)), best.plan.peak_bytes
    assert 0.85 * needed < least < needed
    assert find_layouts(replace(wanted, memory=needed)).ranked[0].layout == best.layout
    asked.clear()
    with pytest.raises(UsageError, match="no layout fits"):
        find_layouts(replace(wanted, memory=0.99 * least))
    assert not asked


def test_most_layouts_are_left_out_before_they_have_costs(asked: list[object]) -> None:
    wanted = TASKS["one kind"]
    find_layouts(wanted, top=1)
    every = sum(1 for cell in lightest_cells(wanted) for _ in choices(wanted, cell))
    assert 0 < len(asked) < every / 4
