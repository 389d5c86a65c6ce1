"""Ranks measure: with a clock that is counted on, on a second type of device, and in processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from itertools import count

import pytest
import torch

from pipeflow import UsageError
from pipeflow.engine.parallel.context import current_context
from pipeflow.planning.efficiency import Efficiency
from pipeflow.planning.rates import RankGroup
from pipeflow.planning.work import MatrixProduct
from pipeflow.testing import run_threads
from pipeflow.tools.calibration import computing, links
from pipeflow.tools.calibration.fit import fitted, mean_errors
from pipeflow.tools.calibration.machine import Stopwatch, device_name, memory_bytes, precisions, products_in
from pipeflow.tools.calibration.machine_times import Measured, SizeTime, StepTime, SumTime
from pipeflow.tools.calibration.measurement import measure


class Clock:
    """A clock that only moves when it is told to, and by as much as a look at it takes."""

    def __init__(self, look: float = 0.0) -> None:
        self.now = 0.0
        self.look = look

    def __call__(self) -> float:
        self.now += self.look
        return self.now


def time_unevenly(budget: float) -> tuple[float, float, int]:
    """Measures work that takes rank 0 one second and rank 1 three, except for every tenth call."""
    clock, calls, each = Clock(), count(1), 1.0 + 2.0 * current_context().rank
    watch = Stopwatch(current_context(), clock=clock)

    def work() -> None:
        clock.now += 50.0 if next(calls) == 20 else each

    seconds = watch.seconds(work, budget)
    return seconds, watch.seconds(work, budget, launch=True), next(calls)


def test_the_mean_over_ranks_of_the_median_over_rounds() -> None:
    found = run_threads(time_unevenly, 2, 60.0)
    assert {each[:2] for each in found} == {(2.0, 2.0)}
    assert len({calls for *_, calls in found}) == 1  # or collectives would not match
    assert 60 / 2 <= found[0][2] <= 120 / 2  # of two measurements with a mean of 2 s


def test_work_that_takes_no_time_ends() -> None:
    def idle() -> float:
        return Stopwatch(current_context(), rounds=2, clock=Clock()).seconds(lambda: None, 1.0)

    assert run_threads(idle, 1) == [0.0]


def tiny_computations() -> tuple[list[object], ...]:
    clock = Clock(look=1e-3)
    watch = Stopwatch(current_context(), rounds=1, clock=clock)
    products = [MatrixProduct(4, 8, 16), MatrixProduct(8, 8, 16), MatrixProduct(8, 16, 16), MatrixProduct(64, 64, 64)]
    return (
        list(computing.products(watch, ["float32", "bf16"], 0.02, products)),
        [*computing.moved(watch, "float32", 0.01, [2**16])],
        list(computing.attention(watch, "float32", 0.02, [(64, 8), (128, 16)])),
        list(computing.layers(watch, "float32", 0.01, [(64, 8)])),
        list(computing.launches(watch, "float32", 0.01)),
        list(computing.optimizer(watch, 0.01, [64])),
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["cpu", pytest.param("meta", marks=pytest.mark.slow)])
def test_computations(device: str) -> None:
    for products, moved, attended, layers, launches, stepped in run_threads(tiny_computations, 2, device=device):
        assert [(each.precision, each.product.rows) for each in products][:2] == [("float32", 4), ("float32", 8)]
        assert {each.precision for each in products} == {"float32", "bf16"}
        assert max(each.product.rows for each in products) == 8  # 64 take too long
        [[copied], [operated]] = moved
        assert copied.size == 2 * 2**16
        assert operated.size == 18 * 2**14  # a quarter of it is as wide as the hidden size
        assert [each.size for each in attended] == [8 * 4 * 8 * 64 / 2, 16 * 4 * 16 * 128 / 2]
        assert (layers[0].model.hidden, layers[0].model.positions) == (64, 8)
        assert [each.size for each in stepped] == [12 * 64**2 + 13 * 64]
        everything = [each.seconds for each in (*products, copied, operated, *attended, *stepped)]
        assert min(*everything, layers[0].forward, layers[0].backward, *launches) > 0


def whole_steps() -> list[StepTime]:
    watch = Stopwatch(current_context(), rounds=1, clock=Clock(look=1e-3))
    return list(computing.steps(watch, 0.01, [(64, 8)]))


@pytest.mark.slow
def test_whole_steps() -> None:
    first, *others = run_threads(whole_steps, 2)
    assert others == [first]
    [step] = first
    assert (step.model.layers, step.model.hidden, step.model.positions) == (6, 64, 8)
    assert (len(step.schedule.rows), step.schedule.num_microbatches) == (2, 4)
    assert step.seconds > 0


def phases() -> list[float]:
    """Measures work of one second beside work of three."""
    clock = Clock()

    def work(seconds: float) -> None:
        clock.now += seconds

    return Stopwatch(current_context(), clock=clock).phases([lambda: work(1.0), lambda: work(3.0)], 100.0)


def test_phases_that_take_turns() -> None:
    assert run_threads(phases, 2) == [[1.0, 3.0]] * 2


def long_ones() -> list[MatrixProduct]:
    """Which sizes are measured if each call takes a second per million operations."""
    clock = Clock()
    watch = Stopwatch(current_context(), rounds=1, clock=clock)
    sizes = [
        MatrixProduct(100, 100, 100),
        MatrixProduct(100, 100, 200),
        MatrixProduct(100, 200, 4000),
        MatrixProduct(100, 300, 100),
    ]

    def slow(size: MatrixProduct, *_: object) -> Callable[[], None]:
        def work() -> None:
            clock.now += 3 * size.flops / 1e6

        return work

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(computing, "_products", slow)
        return [each.product for each in computing.products(watch, ["float32"], 100.0, sizes)]


def test_sizes_that_take_too_long_are_left_out() -> None:
    [found] = run_threads(long_ones, 1)
    assert [(each.columns, each.depth) for each in found] == [(100, 100), (100, 200), (300, 100)]


def communicate(per_node: int) -> tuple[list[SumTime], list[SumTime], tuple[list[SizeTime], list[SizeTime]], float]:
    watch = Stopwatch(current_context(), rounds=1)
    return (
        list(links.sums(watch, per_node, 0.01, [64, 1024])),
        list(links.gradient_sums(watch, per_node, 0.01, [1024])),
        links.transfers(watch, per_node, 0.01, [64]),
        links.sync_seconds(watch, per_node, 0.01),
    )


@pytest.mark.parametrize(
    ("ranks", "per_node", "sums", "gradients", "crossing"),
    [
        (2, 2, [(2, 2)], [(2, 2)], [False]),
        (3, 3, [(3, 3)], [(3, 3)], [False]),  # one rank has no neighbour
        (4, 4, [(2, 2), (4, 4)], [(2, 2), (4, 4)], [False]),
        (4, 2, [(2, 2), (4, 2)], [(2, 2), (2, 1)], [False, True]),
        (6, 2, [(2, 2), (6, 2)], [(2, 2), (3, 1)], [False, True]),  # one node has no neighbour
    ],
)
def test_groups_and_pairs(
    ranks: int,
    per_node: int,
    sums: list[tuple[int, int]],
    gradients: list[tuple[int, int]],
    crossing: list[bool],
) -> None:
    found = run_threads(communicate, ranks, per_node)
    assert all(each == found[0] for each in found)
    summed, reduced, (near, far), sync = found[0]
    assert list(dict.fromkeys(each.group for each in summed)) == [RankGroup(*each) for each in sums]
    assert list(dict.fromkeys(each.group for each in reduced)) == [RankGroup(*each) for each in gradients]
    assert [False] * len(near) + [True] * len(far) == crossing
    assert min(sync, *(each.seconds for each in (*summed, *reduced, *near, *far))) > 0


def measure_two_nodes() -> Measured:
    return measure(current_context(), 0.2, per_node=2)


@pytest.mark.exhaustive
def test_all_of_a_machine() -> None:
    """Every coefficient that a CPU has is found, and every kind of time has an error. Half a minute, whatever the
    seconds to measure for; the test of the command does it for one node.
    """
    measured, *others = run_threads(measure_two_nodes, 4, deadline=300.0)
    assert all(each == measured for each in others)
    cluster = fitted(measured)
    of_gpus = {"fused", "contention"}  # of fused kernels, and of NCCL beside computations
    assert set(cluster.efficiency) == {each.name for each in fields(Efficiency)} - of_gpus
    errors = mean_errors(measured, cluster)
    assert {kind for kind in errors if "nodes" in kind} == {
        f"{kind} between nodes" for kind in ("sums", "gradient sums", "transfers")
    }
    assert all(math.isfinite(error) and number > 0 for error, number in errors.values())


def wrong(per_node: int) -> str:
    with pytest.raises(UsageError) as caught:
        measure(current_context(), 1.0, per_node=per_node)
    return str(caught.value)


def test_what_cannot_be_measured() -> None:
    for per_node in (1, 3):
        said = set(run_threads(wrong, 4, per_node))
        assert len(said) == 1
        assert f"4 ranks with {per_node} in each node" in said.pop()


def test_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert device_name(cpu, 4).startswith(f"cpu, 4 processes of {torch.get_num_threads()} thread")
    assert device_name(torch.device("meta"), 4) == "meta"
    monkeypatch.delattr("os.sched_getaffinity", raising=False)  # as on macOS
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    assert device_name(cpu, 4).endswith("on 3 cores")
    assert memory_bytes(cpu, 4) == memory_bytes(cpu, 1) / 4 > 1e6
    assert precisions(cpu)[0] == "float32"
    before = torch.get_float32_matmul_precision()
    with products_in("tf32") as dtype:
        assert (dtype, torch.get_float32_matmul_precision()) == (torch.float32, "high")
    assert torch.get_float32_matmul_precision() == before


class Constant(Stopwatch):
    """A stopwatch that finds the same time for all work."""

    def seconds(self, work: Callable[[], object], budget: float, *, launch: bool = False) -> float:
        return 1.0


def time_sums_beside() -> list[float]:
    return [each.seconds for each in links.sums(Constant(current_context()), 2, 60.0, [2**10, 2**12])]


def test_a_sum_beside_computations_takes_no_less_than_by_itself() -> None:
    """Also where the computations seem to take all of the time, as on a machine that others use, too."""
    for found in run_threads(time_sums_beside, 2, tensor=2):
        assert found
        assert set(found) == {1.0}
