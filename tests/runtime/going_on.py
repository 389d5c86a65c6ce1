"""What the ranks of the tests of elastic worlds do: train some steps, in one of which ranks die."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow import Divided, Pipeline, Schedule, clip_grad_norm_, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.transport.protocol import Tag
from pipeflow.testing import die
from pipeflow.testing.models import TinyModel
from tests.runtime.work import plain

STEPS = 4
MICROBATCHES = 4


@dataclass(frozen=True)
class Death:
    """When a rank dies: in which step, from 0, and where in it."""

    rank: int
    step: int = 1
    when: str = "forward"


@dataclass
class Trained:
    """What a rank has after training: its stages before each step, the losses and norms, and its stages at the end."""

    losses: list[float | None] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    before: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    stages: dict[str, Any] = field(default_factory=dict)
    living: tuple[int, ...] = ()
    read: tuple[int, int] = (0, 0)


class Dying(nn.Module):
    """A stage that calls `die` in one of its next forwards or backwards."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.forwards = self.backwards = -1

    def forward(self, hidden: Tensor) -> Any:
        self.forwards -= 1
        if self.forwards == 0:
            die()
        output = self.inner(hidden)
        if output.requires_grad:
            output.register_hook(self.step_back)
        return output

    def step_back(self, _: Tensor) -> None:
        self.backwards -= 1
        if self.backwards == 0:
            die()


def of_replica(ranks: int) -> Schedule:
    return make_schedule("1f1b", ranks=ranks, microbatches=MICROBATCHES)


def batch_of(model: TinyModel, step: int, replica: int) -> Any:
    return model.batch(2 * MICROBATCHES, seed=100 * step + replica)


def build(model: TinyModel, schedule: Schedule, stages: dict[str, Any] | None = None) -> Pipeline:
    chunks = nn.ModuleList(map(Dying, model.chunks(schedule, current_context().pipeline_rank)))
    if stages is not None:
        chunks.load_state_dict({name: torch.from_numpy(each) for name, each in stages.items()})
    model.tie(chunks, schedule)
    return Pipeline(chunks, schedule, criterion=model.criterion, weigh=_count)


def _count(labels: Any) -> float:
    return float(labels.numel())


def train(
    model: TinyModel, deaths: tuple[Death, ...] = (), *, momentum: float = 0.0, clips: bool = False, ends: bool = False
) -> Trained:
    """Some steps of a loop; at the end the outputs of a batch, if it `ends` with that."""
    context = current_context()
    rank, found = context.rank, Trained()
    pipeline = build(model, of_replica(context.pipeline_size))
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=momentum)
    for step in range(STEPS):
        own = [death.when for death in deaths if (death.rank, death.step) == (rank, step)]
        prepare_to_die(pipeline, own)
        found.before.append(stages_of(pipeline))
        optimizer.zero_grad()
        output = execute_pipeline(_batches(model, step, own, context.data_rank), pipeline)
        found.losses.append(None if output.loss is None else output.loss.item())
        if clips:
            if "clip" in own:
                die()
            found.norms.append(clip_grad_norm_(pipeline, 0.05).item())
        optimizer.step()
    if ends:
        batch = iter([batch_of(model, STEPS, context.data_rank)])
        found.outputs.append(plain(execute_pipeline(batch, pipeline, forward_only=True, return_outputs=True).outputs))
    found.stages, found.living, found.read = stages_of(pipeline), context.living, (context.data_rank, context.data_size)
    return found


def train_table(
    model: TinyModel, schedule: Schedule, replicas: int, stages: list[dict[str, Any]], begin: int
) -> Trained:
    """The steps from number `begin` on of a world that had this schedule from its start, whose ranks have these
    `stages` then.
    """
    rank, found = current_context().rank, Trained()
    pipeline = build(model, schedule, stages[rank])
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    for step in range(begin, STEPS):
        read = [[each.chunk(MICROBATCHES) for each in batch_of(model, step, replica)] for replica in range(replicas)]
        parts = [tuple(each[index] for each in its) for index in range(MICROBATCHES) for its in read]
        optimizer.zero_grad()
        output = execute_pipeline(iter([Divided(parts)]), pipeline)
        found.losses.append(None if output.loss is None else output.loss.item())
        optimizer.step()
    found.stages = stages_of(pipeline)
    return found


def prepare_to_die(pipeline: Pipeline, own: list[str]) -> None:
    """Lets this rank die in the next step, in the second forward or backward, or instead of a later part."""
    stage: Any = pipeline.chunks[0]
    stage.forwards, stage.backwards = (2 if when in own else -1 for when in ("forward", "backward"))
    if "sums" in own:
        pipeline.gradients.end = _die  # type: ignore[method-assign]
    if "agreement" in own:
        pipeline.runner._agree = _die  # type: ignore[assignment,method-assign]

    if "recovery" in own:
        pipeline.tables.join = _die  # type: ignore[method-assign]
    if "half of the agreement" in own:
        pipeline.runner._agree = _die_half_way(pipeline, pipeline.runner._agree)  # type: ignore[method-assign]


def _die_half_way(pipeline: Pipeline, agree: Any) -> Any:
    """The agreement, in which this rank dies after the first round: the rank before it ends the step, that two places
    before does not.
    """
    transport: Any = pipeline.context.whole
    send, seen = transport.sender, count(1)

    def sender(peer: int, tag: Tag) -> Any:
        if tag is Tag.CONTROL and next(seen) == 2:
            time.sleep(0.3)  # the first message has left
            die()
        return send(peer, tag)

    def run(*arguments: Any) -> Any:
        transport.sender = sender
        return agree(*arguments)

    return run


def _die(*_: object, **__: object) -> None:
    die()


def _batches(model: TinyModel, step: int, own: list[str], replica: int) -> Iterator[Any]:
    if "read" in own:
        die()
    yield batch_of(model, step, replica)


def stages_of(pipeline: Pipeline) -> dict[str, Any]:
    """The tensors of this rank's stages, as `build` takes them."""
    return {name: plain(each) for name, each in pipeline.chunks.state_dict().items()}
