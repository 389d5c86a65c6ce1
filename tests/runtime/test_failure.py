"""An exception on one rank is one error on every rank, soon, and the step after it is as good as any."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import Pipeline, PipelineError, Schedule, UsageError, execute_pipeline
from pipeflow.core.action import Kind
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.models import PlainModel
from tests.covering import some
from tests.runtime.work import gradients_of, require_near, schedule_of

SOON = 1.0  # seconds
MODEL = PlainModel(8)
MICROBATCHES = 5
ERRORS = {error.__name__: error for error in (ValueError, UsageError, KeyboardInterrupt, RuntimeError)}


@dataclass(frozen=True)
class Case:
    """What goes wrong: in an action, in the criterion, or (with neither) where a rank reads its batch."""

    error: str = "ValueError"
    action: tuple[Kind, int, int] | None = None  # kind, stage, microbatch
    criterion: int | None = None  # microbatch
    reader: int | None = None  # rank


@dataclass
class Trap:
    """Raises what a case says, where it says, and notes when."""

    backward: Kind
    case: Case = field(default_factory=Case)
    seen: dict[tuple[Kind, int], int] = field(default_factory=dict)
    criteria: int = 0
    sprung: float = 0.0

    def set(self, case: Case) -> None:
        self.case, self.seen, self.criteria, self.sprung = case, {}, 0, 0.0

    def spring(self) -> None:
        self.sprung = time.monotonic()
        raise ERRORS[self.case.error](f"a {self.case.error} on purpose")

    def step_on(self, kind: Kind, stage: int) -> None:
        microbatch = self.seen[kind, stage] = self.seen.get((kind, stage), -1) + 1
        if self.case.action == (kind, stage, microbatch):
            self.spring()

    def criterion(self, output: Tensor, labels: Tensor) -> Tensor:
        self.criteria += 1
        if self.case.criterion == self.criteria - 1:
            self.spring()
        return MODEL.criterion(output, labels)

    def read(self, batch: object, rank: int) -> Iterator[object]:
        if self.case.reader == rank:
            self.spring()
        yield batch


class Trapped(nn.Module):
    """A stage with a trap in its forward, its backward, and where a weight's gradient comes."""

    def __init__(self, inner: nn.Module, stage: int, trap: Trap) -> None:
        super().__init__()
        self.inner = inner
        self.stage = stage
        self.trap = trap

    def forward(self, hidden: Tensor) -> Tensor:
        self.trap.step_on(Kind.F, self.stage)
        output: Tensor = TrappedBackward.apply(self.inner(hidden), self)  # type: ignore[no-untyped-call]
        return output


class TrappedDeferral:
    """The Deferral of a layer, with a trap where its product is computed."""

    def __init__(self, plain: Any, module: Trapped) -> None:
        self.plain = plain
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def take(self, product: Any) -> None:
        parameters, make = product
        self.plain.take((parameters, partial(self.compute, make)))

    def compute(self, make: Any) -> Any:
        self.module.trap.step_on(Kind.W, self.module.stage)
        return make()


class TrappedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, module: Trapped) -> Tensor:
        ctx.module = module
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.module.trap.step_on(ctx.module.trap.backward, ctx.module.stage)
        return gradient, None


@dataclass(frozen=True)
class Told:
    """What one rank was told of a case."""

    kind: str
    where: tuple[Any, ...] | None
    message: str
    cause: str
    sprung: float
    caught: float


def build_trapped(schedule: Schedule, trap: Trap) -> Pipeline:
    rank = current_context().pipeline_rank
    chunks = MODEL.chunks(schedule, rank)
    stages = schedule.placement.stages_of(rank)
    trapped = nn.ModuleList(Trapped(inner, stage, trap) for inner, stage in zip(chunks, stages, strict=True))
    pipeline = Pipeline(trapped, schedule, criterion=trap.criterion)
    for module in trapped:
        assert isinstance(module, Trapped)
        layer: Any = next(each for each in module.modules() if isinstance(each, nn.Linear))
        layer.deferral = TrappedDeferral(layer.deferral, module)
    return pipeline


def run_failures(schedule: Schedule, cases: list[Case]) -> list[Told]:
    """Every case in turn on one pipeline, a good step after each."""
    trap, rank = Trap(kinds_of(schedule)[1]), current_context().pipeline_rank
    pipeline, batch = build_trapped(schedule, trap), MODEL.batch(2 * MICROBATCHES + 1)
    loss, gradients = MODEL.plain_step(batch)
    told = []
    for case in cases:
        trap.set(case)
        told.append(fail(trap, pipeline, batch, rank))
        trap.set(Case())
        pipeline.zero_grad()
        output = execute_pipeline(iter([batch]), pipeline, broadcast_loss=True)
        assert output.loss is not None
        assert abs(output.loss - loss) <= 1e-12
        require_near({name.replace("inner.", ""): value for name, value in gradients_of(pipeline).items()}, gradients)
    return told


def fail(trap: Trap, pipeline: Pipeline, batch: object, rank: int) -> Told:
    try:
        execute_pipeline(trap.read(batch, rank), pipeline)
    except BaseException as error:
        caught = time.monotonic()
        where = None
        if isinstance(error, PipelineError):
            where = (error.rank, error.stage, error.microbatch, error.action, error.died)
        return Told(type(error).__name__, where, str(error), type(error.__cause__).__name__, trap.sprung, caught)
    raise AssertionError("nothing went wrong")


def kinds_of(schedule: Schedule) -> list[Kind]:
    kinds = {action.kind for rank in range(len(schedule.rows)) for action in schedule.actions(rank)}
    return sorted(kinds, key="FBIW".index)


def cases_of(schedule: Schedule) -> list[Case]:
    stages, ranks, kinds = schedule.placement.num_stages, schedule.placement.num_ranks, kinds_of(schedule)
    places = [(kind, stage, microbatch) for kind in kinds for stage in range(stages) for microbatch in (0, 2, 4)]
    return [
        *(Case(action=place) for place in places),
        *(Case(criterion=microbatch) for microbatch in (0, 2, 4)),
        *(Case(reader=rank) for rank in range(ranks)),
        *(Case("KeyboardInterrupt", action=(kind, stage, 1)) for kind in kinds for stage in range(stages)),
        *(Case("UsageError", action=(Kind.F, stage, 1)) for stage in range(stages)),
        *(Case("RuntimeError", action=(kinds[-1], stage, 3)) for stage in range(stages)),
        Case("KeyboardInterrupt", criterion=2),
        Case("RuntimeError", reader=ranks - 1),
    ]


def require_told(schedule: Schedule, cases: list[Case], results: list[list[Told]]) -> None:
    last = schedule.placement.num_stages - 1
    where: tuple[object, ...]
    for index, case in enumerate(cases):
        if case.reader is not None:
            origin, where = case.reader, (case.reader, None, None, None, None)
        else:
            kind, stage, microbatch = case.action or (Kind.F, last, case.criterion)
            origin = schedule.placement.rank_of(stage)
            where = (origin, stage, microbatch, f"{stage}{kind.value}{microbatch}", None)
        sprung = results[origin][index].sprung
        for rank, told in enumerate(column[index] for column in results):
            assert told.caught - sprung < SOON, f"{case}, rank {rank}: {told.caught - sprung:.1f} s"
            if rank == origin and case.error in ("KeyboardInterrupt", "UsageError"):
                assert (told.kind, told.message) == (case.error, f"a {case.error} on purpose")
                continue
            expected = "PipelineUsageError" if case.error == "UsageError" else "PipelineError"
            assert (told.kind, told.where) == (expected, where), f"{case}, rank {rank}: {told}"
            assert f"{case.error}: a {case.error} on purpose" in told.message
            assert ("in spring" in told.message) == (case.error != "UsageError")  # the origin's traceback
            assert told.cause == (case.error if rank == origin else "NoneType")


VARIANTS = [("1f1b", 4, 1), ("interleaved-1f1b", 2, 2), ("zb-v", 2, 1), ("gpipe", 3, 1), ("gpipe", 1, 1)]


@pytest.mark.some(1)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_exceptions_on_threads(variant: tuple[str, int, int]) -> None:
    schedule = schedule_of(variant, MICROBATCHES)
    cases = cases_of(schedule)
    require_told(schedule, cases, run_threads(run_failures, variant[1], schedule, cases))


@pytest.mark.parametrize("variant", some(VARIANTS[:3], VARIANTS[2:]), ids=str)
@pytest.mark.exhaustive
def test_exceptions_on_gloo(variant: tuple[str, int, int]) -> None:
    schedule = schedule_of(variant, MICROBATCHES)
    cases = cases_of(schedule)
    require_told(schedule, cases, run_processes(run_failures, variant[1], schedule, cases))


def run_two() -> list[str]:
    """Two pipelines of one context; each fails in turn, and the other goes on."""
    schedules = [schedule_of(("1f1b", 2, 1), MICROBATCHES), schedule_of(("interleaved-1f1b", 2, 2), MICROBATCHES)]
    traps, rank, told = [Trap(Kind.B), Trap(Kind.B)], current_context().pipeline_rank, []
    pipelines = [build_trapped(schedule, trap) for schedule, trap in zip(schedules, traps, strict=True)]
    batch = MODEL.batch(2 * MICROBATCHES + 1)
    _, gradients = MODEL.plain_step(batch)
    for failing in (0, 1, 1, 0):
        traps[failing].set(Case(action=(Kind.B, 1, 2)))
        told.append(fail(traps[failing], pipelines[failing], batch, rank).kind)
        traps[failing].set(Case())
        for pipeline in (pipelines[1 - failing], pipelines[failing]):
            pipeline.zero_grad()
            execute_pipeline(iter([batch]), pipeline)
            own = {name.replace("inner.", ""): value for name, value in gradients_of(pipeline).items()}
            require_near(own, gradients)
    return told


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", [run_threads, run_processes])
def test_a_failure_of_one_pipeline_leaves_another_alone(start: Any) -> None:
    assert start(run_two, 2) == [["PipelineError"] * 4] * 2


def run_in_evaluation() -> tuple[Any, ...]:
    schedule, trap = schedule_of(("1f1b", 3, 1), MICROBATCHES), Trap(Kind.B)
    pipeline = build_trapped(schedule, trap)
    trap.set(Case(action=(Kind.F, 1, 3)))
    with pytest.raises(PipelineError) as caught:
        execute_pipeline(iter([MODEL.batch(MICROBATCHES)]), pipeline, forward_only=True)
    return caught.value.rank, caught.value.stage, caught.value.microbatch


def test_evaluation_fails_like_training() -> None:
    assert run_threads(run_in_evaluation, 3) == [(1, 1, 3)] * 3
