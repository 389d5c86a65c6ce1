"""Stages that hand tensors to later ones, on routes: as without a pipeline, and nothing is sent that need not be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow import Pipeline, PipelineError, Placement, Schedule, UsageError, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.transport.protocol import Tag
from pipeflow.schedules import SCHEDULES
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.models import WIDTH
from tests.families import make_near
from tests.runtime.skips import Given, all_routes, batch_of, counted, modules_of, serial_step, some_routes
from tests.runtime.work import drawn_at_random

SIZES = [(7, 3), (7, 3), (7, 3), (8, 2), (7, 3)]


def made(schedule: Schedule, given: Given, **options: Any) -> Pipeline:
    """This rank's Pipeline."""
    modules = modules_of(schedule, given)
    own = [modules[stage] for stage in schedule.placement.stages_of(current_context().pipeline_rank)]
    return Pipeline(nn.ModuleList(own), schedule, criterion=functional.mse_loss, routes=given, **options)


def steps(schedule: Schedule, given: Given, sizes: list[tuple[int, int]]) -> tuple[list[float], list[Any], Any]:
    """Training on batches of these sizes, then evaluation of each; losses, outputs and the sum of the gradients."""
    model = made(schedule, given)
    batches = [batch_of(*size) for size in sizes]
    losses = [execute_pipeline(iter([batch]), model, broadcast_loss=True).loss for batch in batches]
    outputs = [
        execute_pipeline(iter([batch]), model, forward_only=True, return_outputs=True).outputs for batch in batches
    ]
    own = schedule.placement.stages_of(current_context().pipeline_rank)
    gradients = {
        f"{stage}.{name}": parameter.grad
        for stage, chunk in zip(own, model.chunks, strict=True)
        for name, parameter in chunk.named_parameters()
    }
    return [loss.item() for loss in losses if loss is not None], outputs, gradients


def require_serial(schedule: Schedule, given: Given, sizes: list[tuple[int, int]] = SIZES[:1]) -> None:
    losses, outputs, gradients = serial_step(schedule, given, [batch_of(*size) for size in sizes])
    results = run_threads(steps, schedule.placement.num_ranks, schedule, given, sizes)
    assert set().union(*(named for _, _, named in results)) == set(gradients)
    for told, evaluated, named in results:
        assert told == pytest.approx(losses, rel=1e-12)
        for found, expected in zip(evaluated, outputs, strict=True):
            assert found is None or torch.allclose(found, expected, rtol=1e-12)
        for name, gradient in named.items():
            assert torch.allclose(gradient, gradients[name], rtol=1e-11, atol=1e-13), name


@pytest.mark.some(7)
@pytest.mark.parametrize("name", SCHEDULES)
def test_all_to_all_later_under_every_schedule(name: str) -> None:
    """Also where microbatches are no multiple of the ranks, and where the last ones are smaller."""
    schedule = make_near(name, ranks=2, microbatches=5)
    if schedule.placement.num_stages < 3:
        schedule = make_near(name, ranks=3, microbatches=5)
    require_serial(schedule, all_routes(schedule.placement.num_stages))


@pytest.mark.some(12)
@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [3, 4])
def test_some_routes_under_every_schedule(name: str, ranks: int) -> None:
    schedule = make_near(name, ranks=ranks, microbatches=6)
    require_serial(schedule, some_routes(schedule.placement.num_stages, ranks))


@pytest.mark.some(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(12, 80))]
)
def test_any_schedule_with_any_routes(seed: int) -> None:
    schedule = drawn_at_random(seed)
    require_serial(schedule, some_routes(schedule.placement.num_stages, seed))


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-v", "dualpipe"])
def test_batches_of_any_size(name: str) -> None:
    schedule = make_near(name, ranks=2, microbatches=4)
    stages = schedule.placement.num_stages
    if stages < 3:
        schedule = make_near(name, ranks=4, microbatches=4)
    require_serial(schedule, all_routes(schedule.placement.num_stages), SIZES)


def over_gloo(schedule: Schedule, given: Given) -> tuple[list[float], dict[str, Any]]:
    losses, _, gradients = steps(schedule, given, SIZES)
    return losses, {name: gradient.numpy() for name, gradient in gradients.items()}


@pytest.mark.exhaustive
def test_processes() -> None:
    schedule = make_schedule("interleaved-1f1b", ranks=2, microbatches=4)
    given = all_routes(schedule.placement.num_stages)
    losses, _, gradients = serial_step(schedule, given, [batch_of(*size) for size in SIZES])
    for told, named in run_processes(over_gloo, 2, schedule, given):
        assert told == pytest.approx(losses, rel=1e-12)
        for name, gradient in named.items():
            assert torch.allclose(torch.from_numpy(gradient), gradients[name], rtol=1e-11, atol=1e-13), name


def test_pairs_that_are_overlapped() -> None:
    def rank(schedule: Schedule) -> float:
        def backward_first(forward: Any, backward: Any) -> None:
            backward()
            forward()

        model = made(schedule, all_routes(4), overlap=backward_first)
        loss = execute_pipeline(iter([batch_of(8)]), model, broadcast_loss=True).loss
        assert loss is not None
        return loss.item()

    schedule = make_schedule("dualpipe", ranks=4, microbatches=8)
    [expected], _, _ = serial_step(schedule, all_routes(4), [batch_of(8)])
    assert run_threads(rank, 4, schedule) == pytest.approx([expected] * 4, rel=1e-12)


class First(nn.Module):
    """Hands the same tensor to the next stage and to the last one."""

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:
        made = values + 1
        return made, made


class Writing(nn.Module):
    """Writes to what it is given."""

    def forward(self, values: Tensor) -> Tensor:
        return values.mul_(3)


class Adding(nn.Module):
    """Adds what came on the route."""

    def forward(self, values: Tensor, skipped: Tensor) -> Tensor:
        return values + skipped


@pytest.mark.parametrize("path", [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 2)])
def test_a_stage_that_writes_to_its_input_changes_no_other_s(path: tuple[int, ...]) -> None:
    rows = [[stage for stage in range(3) if path[stage] == rank] for rank in sorted({*path})]
    cells = [[f"{stage}F{microbatch}" for microbatch in range(2) for stage in row] for row in rows]
    schedule = Schedule.from_csv("\n".join(map(",".join, cells)), Placement((path,)))

    def rank() -> Any:
        kinds = (First, Writing, Adding)
        own = schedule.placement.stages_of(current_context().pipeline_rank)
        model = Pipeline(nn.ModuleList(kinds[stage]() for stage in own), schedule, routes=[(0, 2)])
        batch = torch.arange(4.0), None
        return execute_pipeline(iter([batch]), model, forward_only=True, return_outputs=True).outputs

    [output] = [found for found in run_threads(rank, schedule.placement.num_ranks) if found is not None]
    assert output.tolist() == [4.0, 8.0, 12.0, 16.0]


@pytest.mark.parametrize("path", [(0, 1, 2), (0, 1, 0)])
def test_what_passes_on_a_route_is_sent_once_and_stays_on_its_rank(path: tuple[int, ...]) -> None:
    """Three floats a sample; stage 1 gets two of them, stage 2 the third from stage 0."""

    class Splitting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, values: Tensor) -> Any:
            return values[:, :2] * self.scale, values[:, 2:] * self.scale

    class Joining(nn.Module):
        def forward(self, values: Tensor, skipped: Tensor) -> Tensor:
            return torch.cat([values, skipped], 1)

    rows = ["0F0,0F1,0B0,0B1", "1F0,1F1,1B0,1B1", "2F0,2B0,2F1,2B1"]
    if path[2] == 0:
        rows = ["0F0,0F1,2F0,2B0,2F1,2B1,0B0,0B1", rows[1]]
    schedule = Schedule.from_csv("\n".join(rows), Placement((path,)))

    def rank() -> tuple[int, int, dict[Any, int]]:
        kinds = (Splitting, nn.Identity, Joining)
        own = schedule.placement.stages_of(current_context().pipeline_rank)
        with counted() as sent:
            model = Pipeline(
                nn.ModuleList(kinds[stage]() for stage in own), schedule, criterion=functional.mse_loss, routes=[(0, 2)]
            )
            execute_pipeline(iter([(torch.ones(6, 3), torch.zeros(6, 3))]), model)
        back = {key: size for key, size in sent.bytes.items() if key[0] is Tag.GRADIENT}
        return sent.activations, sent.gradients, back

    results = run_threads(rank, schedule.placement.num_ranks)
    one = 6 * 4  # bytes of a column
    if path[2] == 0:
        assert [each[:2] for each in results] == [(2 * one, 2 * one), (2 * one, 2 * one)]
    else:
        assert [each[:2] for each in results] == [(3 * one, 0), (2 * one, 2 * one), (0, 3 * one)]
        assert results[2][2] == {(Tag.GRADIENT, 0): one, (Tag.GRADIENT, 1): 2 * one}


def refused(given: Any, error: Any = UsageError, modules: Any = None, **options: Any) -> list[str]:
    """What the ranks of 1f1b on 3 are told when they make a Pipeline and train a step."""
    schedule = make_schedule("1f1b", ranks=3, microbatches=2)

    def make_and_train(index: int) -> None:
        module = (modules or modules_of(schedule, [(0, 2)]))[index]
        routes = given if isinstance(given, list) else given(index)
        model = Pipeline(module, schedule, criterion=functional.mse_loss, routes=routes, **options)
        execute_pipeline(iter([batch_of(4)]), model)

    def rank() -> str:
        with pytest.raises(error) as caught:
            make_and_train(current_context().pipeline_rank)
        return str(caught.value)

    return run_threads(rank, 3)


def test_routes_that_are_refused() -> None:
    assert all("a route must skip at least one stage" in told for told in refused([(0, 1)]))
    assert all("leave it None" in told for told in refused([(0, 2)], tensor_shape=(2, 3, WIDTH)))
    told = refused(lambda rank: [(0, 2)] if rank else [])
    assert all("rank 1 was given another routes than rank 0" in each for each in told)


def test_a_stage_that_returns_too_little() -> None:
    wrong = (UsageError, PipelineError)  # on the rank itself, and on the others
    for told in refused([(0, 2)], wrong, [nn.Identity() for _ in range(3)]):
        assert "stage 0 sends its output to stages 1, 2, so it must return a tuple with an entry for each" in told
