"""Published training steps beside their plans, and what the documents say of them."""

from __future__ import annotations

import json
from statistics import fmean, median

import numpy as np
import pytest

from benchmarks.measured_steps import Row, device_commands, memory_commands, memory_rows, rows
from benchmarks.planner import _regrets, allocator_shares
from benchmarks.planner_fit import own_coefficients
from benchmarks.planner_tables import ROOT, tables, written
from pipeflow import GPT, Setup, plan
from pipeflow.planning.layout import Wanted
from pipeflow.planning.layout_ties import TIE
from pipeflow.planning.layouts import find_layouts
from pipeflow.planning.rank_memory import ALLOCATOR, LEAST_ALLOCATOR

MODEL = GPT(4, 512, 4, 512, 8192)


def row(tensor: int, data: int, seconds: float) -> Row:
    return Row("somewhere", MODEL, Setup(tensor=tensor, data=data), 1, 1, 8 // data, seconds)


def test_the_documents_have_the_tables_of_the_benchmark() -> None:
    data = json.loads((ROOT / "benchmarks" / "results" / "planner.json").read_text(encoding="utf-8"))["data"]
    for path, table in tables(data).items():
        assert written(path.read_text(encoding="utf-8")) == table, (
            f"{path.name}: python -m benchmarks planner --save writes it anew"
        )


def test_the_planner_has_the_coefficients_of_the_last_fit_on_all_sources() -> None:
    """To the digits that it gives."""
    found = json.loads((ROOT / "benchmarks" / "results" / "planner.json").read_text(encoding="utf-8"))["data"]["fitted"]
    assert own_coefficients() == pytest.approx(found, rel=0.02)


def test_the_regret_is_that_of_the_plainest_layout_among_ties() -> None:
    """Of ties, the one with fewer tensor ranks; the fastest one beyond that."""
    chosen = [row(4, 1, 1.0), row(2, 2, 1.2), row(1, 4, 1.5)]
    measured = np.array([each.seconds for each in chosen])
    for second, regret in ((1 + 0.9 * TIE, 0.2), (1 + 1.1 * TIE, 0.0)):
        regrets, plain, _ = _regrets(chosen, np.array([1.0, second, 9.0]), measured)
        assert regrets == pytest.approx([regret])
        assert plain == [0.0]


BEST = [  # of NVIDIA's and nanotron's jobs: source, layers, devices, and the schedules that the program has
    ("dgxc-h100", 32, 64, ("1f1b", "interleaved-1f1b")),
    ("dgxc-h100", 126, 576, ("1f1b", "interleaved-1f1b")),
    ("nanotron", 32, 8, ("1f1b",)),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("source", "layers", "devices", "schedules"), BEST)
def test_the_best_published_sizes_are_among_the_first_five_within_5_percent(
    source: str, layers: int, devices: int, schedules: tuple[str, ...]
) -> None:
    found = [each for each in rows() if (each.source, each.model.layers, each.devices) == (source, layers, devices)]
    best = min((each for each in found if each.setup.precision.products == "bf16"), key=lambda each: each.seconds)
    setup, batch = best.setup, best.microbatches * best.setup.microbatch_size * best.setup.data
    given = Setup(sequence=setup.sequence, precision=setup.precision, attention=setup.attention)
    task = Wanted(best.model, best.cluster, devices, batch, setup=given, schedules=schedules, overlap=setup.overlap)
    layouts = find_layouts(task).ranked
    sizes = setup.tensor, best.pipeline, setup.data, setup.context
    times = {
        (each.layout.tensor, each.layout.pipeline, each.layout.data, each.layout.context): each for each in layouts
    }
    assert times[sizes].step_seconds <= 1.05 * layouts[0].step_seconds


@pytest.mark.exhaustive
def test_every_published_step_is_planned_to_fit() -> None:
    largest: dict[object, Row] = {}
    for each in rows():  # where only the number of microbatches differs, the most of them take most
        key = each.model, each.setup, each.pipeline, each.chunks, each.cluster.device.name
        if key not in largest or each.microbatches > largest[key].microbatches:
            largest[key] = each
    assert len(largest) > 500
    for each in largest.values():
        found = plan(each.model, each.layout.make_schedule(), each.setup, cluster=each.cluster)
        assert found.fits, (each.source, each.setup)


@pytest.mark.slow
def test_the_memory_of_the_formula_is_planned_within_7_percent() -> None:
    errors = [each.error for each in memory_rows()]
    assert len(errors) == 8
    assert fmean(errors) < 0.04
    assert 0 < min(errors) < max(errors) < 0.07  # what ran is not planned to be smaller than it was


def test_the_guide_has_the_memory_of_other_programs_as_it_is_planned() -> None:
    guide, found = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8"), memory_commands()
    for each in found:
        line = f"| {each.label} | {each.planned / 2**30:.1f} GiB | {each.gib:.1f} GiB | {100 * each.error:+.1f} % |"
        assert line in guide, line
    errors = sorted(abs(each.error) for each in found)
    assert fmean(errors) < 0.04
    assert errors[-2] < 0.08 < errors[-1] < 0.09


def test_trials_of_bloom_are_planned_too_low_as_the_guide_says() -> None:
    errors = [each.error for each in device_commands()]
    assert len(errors) == 22
    assert max(errors) < 0
    assert fmean(errors) == pytest.approx(-0.15, abs=0.005)


def test_the_allowance_of_the_allocator_is_the_median_of_published_logs() -> None:
    shares = allocator_shares()
    assert len(shares) >= 10
    assert pytest.approx(median(shares), abs=0.005) == ALLOCATOR
    assert pytest.approx(min(shares), abs=0.001) == LEAST_ALLOCATOR
