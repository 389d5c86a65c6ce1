"""What layers take, by a clock that the layers themselves advance; and what follows for stages."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import LayerCosts, PipelineError, Schedule, UsageError, make_schedule, measure_layers, simulate
from pipeflow.engine.parallel.context import current_context
from pipeflow.tensor import ColumnParallelLinear, RowParallelLinear
from pipeflow.testing import run_threads
from pipeflow.training import build


class Clock:
    """Goes on when a layer says so."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


class Work(torch.autograd.Function):
    """The identity; its backward takes so long for the gradient of the input, and for that of the weight."""

    @staticmethod
    def forward(context: Any, value: Tensor, weight: Tensor, clock: Clock, times: tuple[float, float]) -> Tensor:
        context.clock, context.times = clock, times
        return value * 1

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        wanted = context.needs_input_grad[:2]
        context.clock.time += sum(time for time, needed in zip(context.times, wanted, strict=True) if needed)
        return gradient, gradient.new_zeros(1), None, None


class Timed(nn.Module):
    """Its runs take longer and longer, by as much as `drift`, and the first one far longer."""

    def __init__(self, clock: Clock, forward: float, backward: tuple[float, float], drift: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.clock, self.times, self.drift = clock, (forward, backward), drift
        self.calls = 0

    def __deepcopy__(self, memo: object) -> Timed:
        return Timed(self.clock, self.times[0], self.times[1], self.drift)

    def forward(self, value: Tensor) -> Tensor:
        first = 100.0 if self.calls == 0 else 0.0
        self.clock.time += self.times[0] + first + self.drift * self.calls
        self.calls += 1
        result: Tensor = Work.apply(value, self.weight, self.clock, self.times[1])  # type: ignore[no-untyped-call]
        return result


TIMES = [(1.0, (2.0, 3.0)), (4.0, (0.5, 8.0)), (2.0, (1.0, 1.0))]


def test_the_times_of_each_layer() -> None:
    clock = Clock()
    layers = [Timed(clock, *times) for times in TIMES]
    costs = measure_layers(layers, torch.ones(3, 2), clock=clock)
    assert costs.forward == (1.0, 4.0, 2.0)
    assert costs.backward_input == (0.0, 0.5, 1.0)  # a batch wants no gradient
    assert costs.backward_weight == (3.0, 8.0, 1.0)
    assert costs.output_bytes == (24.0,) * 3
    assert costs.weights == (4.0, 12.5, 4.0)
    assert all(layer.weight.grad is None and layer.calls == 0 for layer in layers)


def test_what_each_layer_saves() -> None:
    """A linear layer saves its input, unless that is of the batch; Tanh its output, which is the input of the next; a
    dropout its mask.
    """
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 8), nn.Linear(8, 2), nn.Dropout()]
    costs = measure_layers(layers, torch.ones(3, 4), runs=1)
    assert costs.saved_bytes == (0, 0, 48, 96, costs.saved_bytes[-1])
    assert costs.saved_bytes[-1] in (6, 24)  # bools or floats
    assert costs.input_bytes == (0, 48, 48, 96, 24)
    assert all(seconds >= 0 for seconds in costs.offload)
    model = costs.cost_model([(0, 2), (2, 5)])
    assert model.saved_bytes == (0, sum(costs.saved_bytes))
    assert model.input_bytes == (0, 48)
    assert model.offload == pytest.approx((sum(costs.offload[:2]), sum(costs.offload[2:])))
    offloaded = make_schedule("1f1b", ranks=2, microbatches=4, recompute=[0], offload=[1], cost=model)
    assert simulate(offloaded, model).peak_bytes[1] > 0


def test_a_batch_that_wants_a_gradient_has_its_time() -> None:
    clock = Clock()
    costs = measure_layers([partial(Timed, clock, *TIMES[0])], torch.ones(1, requires_grad=True), clock=clock)
    assert (costs.backward_input, costs.backward_weight) == ((2.0,), (3.0,))


def test_times_are_medians_and_the_first_run_does_not_count() -> None:
    clock = Clock()
    costs = measure_layers([partial(Timed, clock, 1.0, (0.0, 0.0), 1.0)], torch.ones(1), runs=3, clock=clock)
    assert costs.forward == (1.0 + 4.0,)  # calls 2, 4 and 6: each run calls the layer twice


def test_layers_of_all_sorts_are_measured_and_stay_as_they_are() -> None:
    norm = nn.BatchNorm1d(4)
    embedding = nn.Embedding(5, 4, dtype=torch.float64).requires_grad_(False)
    linear = nn.Linear(4, 2, dtype=torch.float64)
    layers = [embedding, nn.Flatten(0, 1), norm.double(), nn.ReLU(inplace=True), nn.Dropout(), linear]
    torch.manual_seed(0)
    before, state = norm.state_dict(), torch.get_rng_state()
    kept = {key: value.clone() for key, value in before.items()}
    costs = measure_layers(layers, torch.tensor([[0, 1, 2], [3, 4, 0]]), runs=2)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, norm.state_dict()[key]) for key, value in kept.items())
    assert costs.output_bytes == (192.0, 192.0, 192.0, 192.0, 192.0, 96.0)
    assert all(time > 0 for time in costs.forward)
    assert costs.backward_input[:2] == costs.backward_weight[:2] == (0.0, 0.0)
    assert all(time > 0 for time in costs.backward_input[3:])
    assert all(parameter.grad is None for layer in layers for parameter in layer.parameters())


def test_trees_pass_between_layers() -> None:
    class Fork(nn.Module):
        def forward(self, value: Tensor) -> dict[str, Tensor]:
            return {"one": value * 2, "other": (value > 0)}

    class Join(nn.Module):
        def forward(self, tree: dict[str, Tensor]) -> Tensor:
            return tree["one"] * tree["other"]

    costs = measure_layers([nn.Linear(2, 2), Fork(), Join()], torch.ones(3, 2), runs=1)
    assert costs.output_bytes == (24.0, 24.0 + 6.0, 24.0)
    assert costs.backward_input[1] > 0


def test_a_device_has_done_its_work_before_the_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", seen.append)

    def clock() -> float:
        seen.append("clock")
        return 0.0

    device = torch.device("cuda", 1)
    build._after_work(clock, device)
    build._after_work(clock, torch.device("cpu"))
    assert seen == [device, "clock", "clock"]


def test_nothing_is_measured_where_nothing_is_computed() -> None:
    with pytest.raises(UsageError, match="meta device, where nothing is computed"):
        measure_layers([nn.Tanh()], torch.ones(1, device="meta"))
    with pytest.raises(UsageError, match="runs must be an integer of at least 1"):
        measure_layers([nn.Tanh()], torch.ones(1), runs=0)


def measured_everywhere() -> LayerCosts:
    """Each rank's clock runs at another speed."""
    clock, speed = Clock(), 1 + current_context().rank
    layers = [Timed(clock, speed * forward, (speed * first, speed * second)) for forward, (first, second) in TIMES]
    return measure_layers(layers, torch.ones(3, 2), clock=clock)


@pytest.mark.parametrize(("pipeline", "data"), [(3, 1), (2, 2)])
def test_all_ranks_are_told_what_the_first_one_measured(pipeline: int, data: int) -> None:
    found = run_threads(measured_everywhere, pipeline * data, data=data)
    assert [costs.weights for costs in found] == [(4.0, 12.5, 4.0)] * (pipeline * data)


def measure_split_layers() -> LayerCosts:
    return measure_layers([partial(ColumnParallelLinear, 4, 6), partial(RowParallelLinear, 6, 4)], torch.ones(2, 4))


def test_tensor_ranks_measure_together() -> None:
    found = run_threads(measure_split_layers, 4, tensor=2)
    assert all(costs == found[0] for costs in found)
    assert found[0].output_bytes == (2 * 3 * 4.0, 2 * 4 * 4.0)


def fail_on_the_first() -> str:
    def make() -> nn.Module:
        raise ValueError("no such width")

    try:
        measure_layers([make], torch.ones(1))
    except PipelineError as error:
        return str(error)
    return ""


def test_an_error_in_a_layer_is_raised_everywhere() -> None:
    assert all("no such width" in said for said in run_threads(fail_on_the_first, 2))


# What follows from the numbers.


COSTS = LayerCosts((3, 1, 1, 1, 2), (2, 1, 1, 1, 2), (1, 1, 1, 1, 3), (80, 40, 20, 10, 5))


def planned(schedule: Schedule, parts: list[tuple[int, int]]) -> float:
    return simulate(schedule, COSTS.cost_model(parts)).makespan


def test_costs_of_layers_become_costs_of_stages() -> None:
    parts = COSTS.parts(3)
    assert parts == [(0, 1), (1, 4), (4, 5)]
    cost = COSTS.cost_model([(0, 1), (1, 4), (4, 5)])
    assert cost.forward == (3, 3, 2)
    assert cost.backward_input == (2, 3, 2)
    assert cost.backward_weight == (1, 3, 3)
    assert cost.activation_bytes == (80, 10, 5)


def test_a_plan_of_balanced_stages_is_no_longer_than_of_uniform_ones() -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=8)
    assert planned(schedule, COSTS.parts(2)) < planned(schedule, [(0, 1), (1, 5)])


def test_costs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="costs are per layer: got 2, 1, 1, 1 of them"):
        LayerCosts((1, 2), (1,), (1,), (1,))
    with pytest.raises(UsageError, match="5 layers cannot fill 6 stages"):
        COSTS.parts(6)
    with pytest.raises(UsageError, match="2 stages of 5 layers need 2 pairs"):
        COSTS.cost_model([(0, 2), (3, 5)])
