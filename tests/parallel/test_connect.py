"""Channels are connected before the first step, in an order in which ranks that block cannot wait in a circle."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.launch import connected, rounds_of
from pipeflow import Pipeline, PipelineSharedModuleWrapper, UsageError, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.transport.agreement import exchange
from pipeflow.engine.parallel.transport.local import LocalGroup, LocalTransport
from pipeflow.engine.parallel.transport.protocol import Channel, Tag, to_connect
from pipeflow.schedules import SCHEDULES
from pipeflow.testing import RankError, run_threads
from pipeflow.testing.models import PlainModel
from tests.families import make_near
from tests.runtime.skips import all_routes, batch_of
from tests.runtime.test_routes import made
from tests.runtime.work import build

MODEL = PlainModel(layers=8)


class Blocking(LocalTransport):
    """Connects as NCCL does: a rank goes on when the other end of the channel has come."""

    def connect(self, channels: Iterable[Channel]) -> None:
        new = to_connect(channels, self._connected)
        for channel in self.turns(new):
            self.meet(channel)
        super().connect(new)

    def turns(self, channels: list[Channel]) -> list[Channel]:
        return channels

    def meet(self, channel: Channel) -> None:
        mine, its = torch.tensor(channel), torch.zeros(len(channel), dtype=torch.int64)
        peer = channel.destination if channel.source == self.rank else channel.source
        exchange(self, Tag.CONTROL, {peer: mine}, {peer: its}, f"connecting {channel}")
        assert torch.equal(mine, its), f"rank {self.rank} connects {channel}, but rank {peer} connects {Channel(*its)}"


def block() -> None:
    current_context().world.__class__ = Blocking


def train(name: str, ranks: int, shape: tuple[int, ...] | None) -> float:
    """Evaluates and trains with outputs, fails in between, and trains again."""
    block()
    schedule = make_schedule(name, ranks=ranks, microbatches=4)
    pipeline = build(MODEL, schedule, tensor_shape=shape, tensor_dtype=MODEL.dtype)
    batch = MODEL.batch(8)
    execute_pipeline(iter([batch]), pipeline, forward_only=True, return_outputs=True)
    execute_pipeline(iter([batch]), pipeline, return_outputs=True)
    with pytest.raises(UsageError):
        execute_pipeline(iter([] if current_context().rank == 0 else [batch]), pipeline)
    loss = execute_pipeline(iter([batch]), pipeline, broadcast_loss=True).loss
    assert loss is not None
    return float(loss)


@pytest.mark.some(4)
@pytest.mark.parametrize("shape", [None, (2, 3, 6)], ids=["headers", "known"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_connects_what_it_uses(name: str, shape: tuple[int, ...] | None) -> None:
    ranks = make_near(name, ranks=3, microbatches=4).placement.num_ranks
    expected, _ = MODEL.plain_step(MODEL.batch(8))
    assert run_threads(train, ranks, name, ranks, shape) == pytest.approx([float(expected)] * ranks, rel=1e-12)


def train_on_routes(name: str) -> None:
    block()
    schedule = make_near(name, ranks=4, microbatches=4)
    model = made(schedule, all_routes(schedule.placement.num_stages))
    for _ in range(2):
        execute_pipeline(iter([batch_of(7, 3)]), model)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_routes_are_connected(name: str) -> None:
    run_threads(train_on_routes, 4, name)


def train_tied() -> None:
    """Three ranks hold one weight, two another, and the replicas of each average them."""
    block()
    context = current_context()
    stage = nn.ModuleDict({"all": nn.Linear(6, 6), "ends": nn.Linear(6, 6)})
    PipelineSharedModuleWrapper([0, 1, 2]).register_module(stage["all"])
    if context.pipeline_rank != 1:
        PipelineSharedModuleWrapper([0, 2]).register_module(stage["ends"])
    both = nn.Sequential(stage["all"], stage["ends"])
    schedule = make_schedule("1f1b", ranks=3, microbatches=3)
    model = Pipeline(both, schedule, criterion=nn.functional.mse_loss)
    execute_pipeline(iter([(torch.ones(6, 6), torch.zeros(6, 6))]), model)


def test_ties_over_three_ranks_are_connected() -> None:
    run_threads(train_tied, 6, data=2)


@pytest.mark.parametrize(("name", "most"), [("1f1b", 4), ("zb-v", 4), ("dualpipe", 6)])
def test_a_rank_has_a_communicator_per_neighbour_and_direction_and_connects_all_at_the_same_time(
    name: str, most: int
) -> None:
    """And for DualPipe, two for the copy of its weights."""
    orders = connected(name, "known")
    assert max(map(len, orders)) == most
    assert len(rounds_of(orders)) == most


class InOrderOfUse(Blocking):
    """Each rank begins with its own receives."""

    def turns(self, channels: list[Channel]) -> list[Channel]:
        return sorted(channels, key=lambda channel: channel.destination != self.rank)


def connect_all(kind: type[LocalTransport]) -> None:
    world: Any = current_context().world
    world.__class__ = kind
    ends = [(source, (source + 1) % world.size) for source in range(world.size)]
    world.connect(Channel(*pair, Tag.TIED) for pair in ends if world.rank in pair)


def test_another_order_waits_in_a_circle() -> None:
    run_threads(connect_all, 3, Blocking, timeout=1.0)
    with pytest.raises(RankError, match="connecting"):
        run_threads(connect_all, 3, InOrderOfUse, timeout=0.3)


def infer_then_train(told: list[int]) -> None:
    context = current_context()
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    pipeline = build(MODEL, schedule)
    before = told.count(context.rank)
    if context.data_rank == 0:
        pipeline.runner.infer(iter([MODEL.batch(8)]), schedule)
    assert told.count(context.rank) == before
    execute_pipeline(iter([MODEL.batch(8)]), pipeline)
    assert told.count(context.rank) > before


def test_a_replica_that_infers_alone_connects_nothing_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(LocalGroup, "connect", lambda group: told.append(group._transport.rank))
    monkeypatch.setattr(
        "pipeflow.engine.runtime.program.compile.connect_devices", lambda world: told.append(world.rank)
    )
    run_threads(infer_then_train, 4, told, data=2)
