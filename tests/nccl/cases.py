"""Cases: what is trained, and how, in a program that NCCL must not deadlock on; and enough of them to have each pair of
choices together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pipeflow import Pipeline, Schedule, UsageError, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.runtime.gradients.weights import PipelineSharedModuleWrapper
from pipeflow.optim import Zero, clip_grad_norm_
from pipeflow.schedules import SCHEDULES
from pipeflow.tensor import ColumnParallelLinear, RowParallelLinear
from pipeflow.testing.models import WIDTH
from tests.covering import covering
from tests.families import accepts
from tests.nccl.device import moved
from tests.nccl.recorder import recorded
from tests.nccl.replay import Issued
from tests.runtime.skips import Given, all_routes, batch_of, modules_of

LENGTH = 3


@dataclass(frozen=True)
class Case:
    """A program.

    Attributes:
        schedule: its name.
        ranks: of the pipeline.
        shapes: "known", or "dynamic" with headers.
        links: "plain"; "routes" between some stages; "tied" and "tied-three" with a layer that the first
            and the last rank share, or one between, too.
        grid: "alone"; "replicas", or "zero" with two replicas; "tensor" with two tensor ranks.
        calls: "same" steps, or "mixed": traced, evaluating, with batches of other sizes and with other schedules.
    """

    schedule: str
    ranks: int
    shapes: str = "dynamic"
    links: str = "plain"
    grid: str = "alone"
    calls: str = "same"

    def __str__(self) -> str:
        return "-".join(map(str, (self.schedule, self.ranks, self.shapes, self.links, self.grid, self.calls)))

    @property
    def is_possible(self) -> bool:
        """Routes have shapes that are not known."""
        return accepts(self.schedule, self.ranks) and not (self.links == "routes" and self.shapes == "known")

    def recorded(self) -> list[list[Issued]]:
        """What each rank issues."""
        data, tensor = 1 + (self.grid in ("replicas", "zero")), 1 + (self.grid == "tensor")
        schedule = make_schedule(self.schedule, ranks=self.ranks, microbatches=self.ranks + 1)
        calls = [{}, {}, {}] if self.calls == "same" else _mixed(schedule)
        return recorded(self._run, self.ranks * data * tensor, schedule, calls, data=data, tensor=tensor)

    def _run(self, schedule: Schedule, calls: Sequence[dict[str, Any]]) -> None:
        """Makes this rank's Pipeline, and takes some steps."""
        model = self._pipeline(schedule)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = Zero(model, optimizer) if self.grid == "zero" else optimizer
        for call in calls:
            given = {"samples": 2 * self.ranks + 2, **call}
            execute_pipeline(iter([batch_of(given.pop("samples"), LENGTH)]), model, **given)
            if "forward_only" not in call:
                clip_grad_norm_(model, 1.0)
                optimizer.step()

    def _pipeline(self, schedule: Schedule) -> Pipeline:
        placement, rank = schedule.placement, current_context().pipeline_rank
        given = _routes(placement.num_stages) if self.links == "routes" else []
        modules = modules_of(schedule, given)
        if self.grid == "tensor":
            for module in modules:
                wide = ColumnParallelLinear(WIDTH, 2 * WIDTH, dtype=torch.float64)
                narrow = RowParallelLinear(2 * WIDTH, WIDTH, dtype=torch.float64)
                module.layer = nn.Sequential(wide, nn.Tanh(), narrow)  # type: ignore[assignment]  # as a Layer
        own = {stage: moved(modules[stage]) for stage in placement.stages_of(rank)}
        tied = {"tied": {0, self.ranks - 1}, "tied-three": {0, self.ranks // 2, self.ranks - 1}}.get(self.links, set())
        stages = [placement.stages_of(each)[0] for each in sorted(tied)]
        holders = sorted({holder for stage in stages for holder in placement.ranks_of(stage)})
        if rank in holders and len(holders) > 1:
            wrapper = PipelineSharedModuleWrapper(holders)
            for stage in set(stages) & set(own):
                wrapper.register_module(own[stage].layer)
        shape = (None, LENGTH, WIDTH) if self.shapes == "known" else None
        return Pipeline(
            nn.ModuleList(own.values()),
            schedule,
            criterion=functional.mse_loss,
            tensor_shape=shape,
            tensor_dtype=torch.float64,
            routes=given,
        )


def _routes(stages: int) -> Given:
    """Some that start together, some that end together, and one over all stages, where there are so many stages."""
    last = stages - 1
    return [route for route in [(0, 2), (0, last), (1, last)] if route in all_routes(stages)]


def _mixed(schedule: Schedule) -> list[dict[str, Any]]:
    """Arguments of calls that follow each other."""
    ranks = schedule.placement.num_ranks
    evaluating = {"forward_only": True, "return_outputs": True, "broadcast_loss": True}
    longer = make_schedule(schedule.name, ranks=ranks, microbatches=2 * ranks)
    other = next(_on_the_same_placement(longer), longer)
    return [
        {},
        evaluating,
        {"trace": True, "schedule": other, "samples": 3 * ranks},
        {"reduce": False, "schedule": longer},
        {},
        {**evaluating, "samples": 1},
    ]


def _on_the_same_placement(schedule: Schedule) -> Iterator[Schedule]:
    for name in sorted(set(SCHEDULES) - {schedule.name, "zb-auto"}):  # which searches
        try:
            other = make_schedule(name, ranks=schedule.placement.num_ranks, microbatches=schedule.num_microbatches)
        except UsageError:
            continue
        if other.placement == schedule.placement:
            yield other


CHOICES: dict[str, Sequence[Any]] = {
    "schedule": tuple(SCHEDULES),
    "ranks": (2, 3, 4, 6),
    "shapes": ("known", "dynamic"),
    "links": ("plain", "routes", "tied", "tied-three"),
    "grid": ("alone", "replicas", "zero", "tensor"),
    "calls": ("same", "mixed"),
}


def pairwise(*, by_schedule: bool) -> list[Case]:
    """Cases in which any two choices that are possible together stand together; if not `by_schedule`, any two besides
    that of the schedule, and each schedule in one.
    """
    singly = [] if by_schedule else [list(CHOICES).index("schedule")]
    rows = covering(*CHOICES.values(), possible=lambda *choices: Case(*choices).is_possible, singly=singly)
    return sorted((Case(*row) for row in rows), key=str)


def whole(name: str, ranks: int) -> list[Case]:
    """A schedule on so many ranks, in as many ways as need to be tried."""
    ways: tuple[dict[str, Any], ...] = (
        {"shapes": "known"},
        {"shapes": "dynamic"},
        {"links": "routes"},
        {"links": "tied", "shapes": "known"},
        {"links": "tied-three"},
        {"grid": "replicas"},
        {"grid": "zero", "links": "tied", "shapes": "known"},
        {"calls": "mixed", "links": "tied"},
        {"calls": "mixed", "grid": "replicas", "links": "tied-three"},
        {"grid": "tensor", "shapes": "known"},
    )
    return [case for way in ways if (case := replace(Case(name, ranks), **way)).is_possible]
