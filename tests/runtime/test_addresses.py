"""A step that repeats receives everything where the last one did, and nothing that somebody still holds is written."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor, UntypedStorage, nn

from pipeflow import Pipeline, Schedule, execute_pipeline, lower
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.transport.protocol import Start, Tag, Work
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.models import PlainModel, TinyModel, TreeModel
from tests.runtime.work import build, gradients_of, require_near, schedule_of

VARIANTS = [("1f1b", 2, 1), ("zb-v", 2, 2), ("interleaved-1f1b", 2, 2), ("gpipe", 3, 1), ("chimera", 2, 1)]
BODIES = Tag.ACTIVATION, Tag.REDIRECTED, Tag.GRADIENT


@contextmanager
def received() -> Iterator[dict[tuple[int, Tag], list[int]]]:
    """The addresses at which this rank receives tensors within its pipeline, by peer and tag, from Pipelines that are
    made meanwhile.
    """
    transport, found = current_context().transport, defaultdict[tuple[int, Tag], list[int]](list)
    plain = transport.receiver

    def receiver(peer: int, tag: Tag) -> Start:
        start = plain(peer, tag)

        def receive(tensors: list[Tensor]) -> Work:
            found[peer, tag] += [tensor.data_ptr() for tensor in tensors if tag in BODIES]
            return start(tensors)

        return receive

    vars(transport)["receiver"] = receiver
    try:
        yield found
    finally:
        vars(transport).pop("receiver")


def addresses(model: TinyModel, schedule: Schedule) -> list[dict[tuple[int, Tag], list[int]]]:
    """Where each of some steps on the same batch receives."""
    steps = []
    with received() as found:
        pipeline = build(model, schedule)
        for step in range(7):
            found.clear()
            pipeline.zero_grad(set_to_none=step % 2 == 0)
            execute_pipeline(iter([model.batch(8)]), pipeline)
            steps.append({key: [*each] for key, each in found.items()})
    return steps


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("model", [PlainModel(), TreeModel()], ids=str)
def test_what_is_received_lies_where_it_did_in_the_last_step(model: TinyModel, variant: tuple[str, int, int]) -> None:
    schedule = schedule_of(variant, 4)
    for program, steps in zip(lower(schedule), run_threads(addresses, variant[1], model, schedule), strict=True):
        assert any(steps[-1].values())
        for step in steps[4:]:
            assert step == steps[3]
        if isinstance(model, PlainModel):
            assert len({address for each in steps[-1].values() for address in each}) <= program.receive_buffers


@pytest.mark.slow
def test_on_gloo_too() -> None:
    for steps in run_processes(addresses, 2, PlainModel(), schedule_of(("1f1b", 2, 1), 4)):
        assert steps[3] == steps[4] == steps[5] == steps[6]


class Keeping(nn.Module):
    """Keeps what it received, as a tensor, its storage, or memory that another process may have, too; and gives the
    gradient of its output to a weight as it is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 3, dtype=torch.float64))
        self.kept: list[tuple[Callable[[], Tensor], Tensor]] = []

    def forward(self, hidden: Tensor) -> Tensor:
        own, way = hidden.detach(), len(self.kept) % 3
        if way == 0:
            self.kept.append((lambda: own, own.clone()))
        elif way == 1:
            self.kept.append((partial(_of_storage, own.untyped_storage(), int(own.storage_offset())), own.clone()))
        else:
            passed = ForkingPickler.dumps(own)  # as a queue to another process does; it moves it into shared memory
            self.kept.append((partial(pickle.loads, passed), own.clone()))
        return hidden + self.weight


def _of_storage(storage: UntypedStorage, offset: int) -> Tensor:
    return torch.empty(0, dtype=torch.float64).set_(storage, offset, torch.Size([1, 3]), (3, 1))


class Freeing(nn.Module):
    """Frees the memory of what it received when it has used it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, hidden: Tensor) -> Tensor:
        output = hidden.detach() + self.weight
        if hidden.requires_grad:  # else it is of the batch
            hidden.untyped_storage().resize_(0)
        return output


def run_freeing() -> list[float]:
    pipeline = Pipeline(Freeing(), schedule_of(("gpipe", 2, 1), 4), criterion=lambda output, _: output.mean())
    values, losses = torch.ones(4, 3, dtype=torch.float64), []
    for _ in range(4):
        loss = execute_pipeline(iter([(values, values)]), pipeline, broadcast_loss=True).loss
        assert loss is not None
        losses.append(loss.item())
    return losses


def test_memory_that_a_stage_has_freed_is_not_used_again() -> None:
    assert run_threads(run_freeing, 2) == [[3.0] * 4] * 2


def run_keeping() -> dict[str, Any]:
    rank = current_context().pipeline_rank
    stage = Keeping()
    pipeline = Pipeline(stage, schedule_of(("1f1b", 3, 1), 4), criterion=lambda output, _: output.square().mean())
    for step in range(5):
        values = torch.arange(12.0, dtype=torch.float64).view(4, 3) * (step + 1)
        execute_pipeline(iter([(values, values)]), pipeline)
    assert len(stage.kept) == 20
    for kept, copy in stage.kept:
        assert torch.equal(kept(), copy)
    return {name.replace("chunks.0", str(rank)): each for name, each in gradients_of(pipeline).items()}


def test_what_somebody_holds_is_not_overwritten() -> None:
    """Neither a received activation nor a received gradient that has become that of a weight."""
    values = torch.arange(12.0, dtype=torch.float64).view(4, 3)
    total = sum(range(1, 6)) * values.sum(0, keepdim=True) * 2 / 12
    for found in run_threads(run_keeping, 3):
        [gradient] = found.values()
        require_near({"weight": gradient}, {"weight": total})
