"""The fit of the planner's coefficients, on rows whose times are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks import measured_steps
from benchmarks.measured_steps import Row, coefficients, rows
from benchmarks.planner_fit import (
    FEW,
    NAMES,
    Near,
    errors_at,
    fitted,
    fitted_without,
    own_coefficients,
    point_of,
    thinned,
)
from pipeflow import GPT, Cluster, Setup
from pipeflow.planning import efficiency

MODEL = GPT(4, 2048, 16, 2048, 8192)


def row(source: str, size: int, seconds: float = 1.0) -> Row:
    return Row(source, MODEL, Setup(microbatch_size=size), 1, 1, 4, seconds)


def test_coefficients_hold_for_plans_while_they_are_given() -> None:
    given = own_coefficients() | {"products": 0.5, "h100 fp8": 0.6}
    usual = efficiency.PUBLISHED, efficiency.REACHES
    with coefficients(given):
        assert efficiency.Efficiency.of({}, "h100", "fp8").products == 0.5 * 0.6
    assert usual == (efficiency.PUBLISHED, efficiency.REACHES)
    assert row("here", 2).predicted(given) > 1.2 * row("here", 2).predicted({})


def test_the_fit_ends_where_no_coefficient_makes_the_sum_of_squares_smaller() -> None:
    """Also where launches and computations take the same time, from which one turn alone goes too far."""
    known = own_coefficients() | {"forward_launch": 2e-3, "backward_launch": 3e-3}
    true = [row("one", size, row("one", size).predicted(known)) for size in (1, 2, 3, 4, 8)]
    point = point_of(fitted(true))
    best = Near.of(true, point)
    for axis in 0.05 * np.eye(len(NAMES)):
        for other in (point + axis, point - axis):
            assert best.at(other, errors_at(true, other)).cost > best.cost * (1 - 1e-3)


def test_a_part_that_is_left_out_does_not_move_the_coefficients() -> None:
    known = own_coefficients()
    slower = known | {"products": 0.9 * known["products"]}
    true = [row("one", size, row("one", size).predicted(known)) for size in (4, 8, 16)]
    slow = [row("two", size, row("two", size).predicted(slower)) for size in (4, 8, 16)]
    both, without = fitted_without([*true, *slow], known, [lambda _: False, lambda each: each.source == "two"])
    assert both["products"] < without["products"]


def test_large_sources_do_not_outweigh_small_ones() -> None:
    point = point_of(own_coefficients())
    slopes = np.zeros((10 * FEW + FEW, len(NAMES)))
    slopes[:, 0] = -1.0  # all errors fall with the first coefficient alone
    errors = np.array([0.02] * 10 * FEW + [-0.02] * FEW)
    moved = Near(["large"] * 10 * FEW + ["small"] * FEW, point, errors, slopes).solved() - point
    assert abs(moved[0]) < 0.01


def test_rows_of_commands_have_the_cluster_and_the_layout_of_their_words() -> None:
    found = next(each for each in rows() if each.source == "nemo-24.07" and each.pipeline == 8)
    assert (found.setup.tensor, found.chunks, found.devices) == (4, 6, 128)
    assert found.cluster == Cluster.of("h100-80gb", network_bandwidth=50e9)
    assert found.setup.precision.name == "fp8"
    assert measured_steps.COMMANDS.exists()


def test_rows_of_commands_are_planned_with_the_layers_of_their_words() -> None:
    """nanotron's head counts as four layers of this model, so its rank has 5 of 16."""
    found = next(each for each in rows() if each.source == "nanotron" and each.model.layers == 16)
    assert found.layout.cut == ((0, 11), (11, 16))
    even = replace(found, cut="uniform")
    assert even.layout.cut == ((0, 8), (8, 16))
    assert even.estimated({}) > 1.1 * found.estimated({})


def test_a_large_source_is_thinned() -> None:
    many = [row("large", 1)] * 500 + [row("small", 1)] * 3
    assert [each.source for each in thinned(many)].count("small") == 3
    assert len(thinned(many)) < 100
