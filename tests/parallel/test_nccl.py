"""What the transport asks of NCCL, told to a stub of its process groups: options, order, devices, and aborts."""

from __future__ import annotations

import os
import signal
import time
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeflow import Pipeline, PipelineError, PipelineSharedModuleWrapper, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.control.monitor import MonitorStore
from pipeflow.engine.parallel.transport.protocol import Channel, Tag
from pipeflow.testing import conformance, run_processes
from pipeflow.testing.models import PlainModel
from tests.parallel.stub import TOLD, Stub, launch_over_stub
from tests.runtime.work import Stepped, build, gradients_of, plain, require_step

MODEL = PlainModel(layers=8)
SOON = 1.5  # seconds


def conform() -> None:
    conformance.conform(launch_over_stub(timeout=2.0).world)
    current_context().close()
    assert not TOLD.wrong


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_transport_conforms(ranks: int) -> None:
    run_processes(conform, ranks, deadline=120.0)


def train(name: str, shape: tuple[int, ...] | None) -> tuple[Stepped, list[str]]:
    context = launch_over_stub(pipeline=4)
    pipeline = build(MODEL, make_schedule(name, ranks=4, microbatches=4), tensor_shape=shape, tensor_dtype=MODEL.dtype)
    batch = MODEL.batch(8)
    for _ in range(4):
        pipeline.zero_grad()
        step = execute_pipeline(iter([batch]), pipeline, return_outputs=True)
    result = Stepped([None if step.loss is None else step.loss.item()], [plain(step.outputs)], gradients_of(pipeline))
    store = MonitorStore(context.world.monitor, "nccl")  # type: ignore[attr-defined]  # of a distributed transport
    assert not dist.PrefixStore("", store).check(["exception_dump"])  # as a thread of torch's asks, every second
    for _, config in TOLD.made:
        assert (config.max_ctas, config.cga_cluster_size) == (4, 0)
    context.close()
    assert TOLD.finished == 1
    assert not TOLD.wrong
    assert not TOLD.live
    return result, TOLD.connected


def channel_of(name: str) -> Channel:
    _, source, destination, tag = name.split("-")
    return Channel(int(source), int(destination), Tag[tag])


@pytest.mark.some(2)
@pytest.mark.slow
@pytest.mark.parametrize("shape", [None, (2, 3, 6)], ids=["headers", "known"])
@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_a_schedule_connects_first_and_in_order(name: str, shape: tuple[int, ...] | None) -> None:
    results = run_processes(train, 4, name, shape)
    require_step([step for step, _ in results], MODEL.plain_step(MODEL.batch(8)))
    for _, connected in results:
        channels = [channel_of(each) for each in connected]
        assert len(set(channels)) == len(channels) > 1
        for tags in ({Tag.TIED}, {Tag.ACTIVATION, Tag.REDIRECTED}) if name == "1f1b" else ():
            of_one_call = [channel for channel in channels if channel.tag in tags]
            assert all(first.turn < second.turn for first, second in pairwise(of_one_call))


def train_tied() -> list[str]:
    """Three ranks hold a weight, and two replicas of two tensor ranks average it."""
    context = launch_over_stub(pipeline=3)
    stage = nn.Linear(6, 6)
    PipelineSharedModuleWrapper([0, 1, 2]).register_module(stage)
    model = Pipeline(stage, make_schedule("1f1b", ranks=3, microbatches=3), criterion=nn.functional.mse_loss)
    for _ in range(2):
        execute_pipeline(iter([(torch.ones(6, 6), torch.zeros(6, 6))]), model)
    context.close()
    assert not TOLD.wrong
    return TOLD.connected


@pytest.mark.exhaustive
def test_ties_and_replicas_connect_channels_then_groups() -> None:
    for rank, connected in enumerate(run_processes(train_tied, 6)):
        first = 3 * (rank // 3)
        tied = [Channel(first + one, first + two, Tag.TIED) for one in range(3) for two in range(3) if one != two]
        turns = sorted((channel for channel in tied if rank in channel[:2]), key=lambda channel: channel.turn)
        mine = [f"nccl-{source}-{destination}-TIED" for source, destination, _ in turns]
        group = f"group-{rank % 3}-{rank % 3 + 3}"
        assert connected[: len(mine) + 1] == [*mine, group]


def exchange_rows() -> list[float]:
    context = launch_over_stub(tensor=2)
    group = context.tensor
    group.connect()
    counts = [[1, 2], [0, 3]]  # that each rank sends to each
    receive = [each[group.rank] for each in counts]
    rows, received = torch.tensor([1.0, 2.0, 3.0]) + 10 * group.rank, torch.empty(sum(receive))
    group.all_to_all(received, rows, receive, counts[group.rank]).wait()
    context.close()
    assert not TOLD.wrong
    return received.tolist()


@pytest.mark.slow
def test_rows_of_unequal_numbers_are_exchanged() -> None:
    assert run_processes(exchange_rows, 2) == [[1.0], [2.0, 3.0, 11.0, 12.0, 13.0]]


def fail(*_: object) -> None:
    raise ValueError("on purpose")


def fail_and_go_on() -> tuple[float, str]:
    context = launch_over_stub()
    pipeline = build(MODEL, make_schedule("1f1b", ranks=3, microbatches=4))
    batch = MODEL.batch(8)
    execute_pipeline(iter([batch]), pipeline)
    before = list(TOLD.connected)
    hooks = [pipeline.chunks[0].register_forward_pre_hook(fail)] if context.rank == 1 else []
    started = time.monotonic()
    with pytest.raises(PipelineError, match="rank 1 failed") as caught:
        execute_pipeline(iter([batch]), pipeline)
    took = time.monotonic() - started
    for hook in hooks:
        hook.remove()
    execute_pipeline(iter([batch]), pipeline)
    assert TOLD.connected == before * 2
    context.close()
    assert not TOLD.wrong
    return took, str(caught.value)


@pytest.mark.exhaustive
def test_a_failure_aborts_all_groups_at_once_and_the_next_step_connects_again() -> None:
    for took, message in run_processes(fail_and_go_on, 3):
        assert "on purpose" in message
        assert took < SOON


def die_while_connecting(victim: int) -> tuple[int, float]:
    def dying(self: Stub, device: torch.device) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        if int(os.environ["RANK"]) == victim:
            monkeypatch.setattr(Stub, "eager_connect_single_device", dying)

    launch_over_stub(patch)
    pipeline = build(MODEL, make_schedule("1f1b", ranks=3, microbatches=4))
    started = time.monotonic()
    with pytest.raises(PipelineError) as caught:
        execute_pipeline(iter([MODEL.batch(8)]), pipeline)
    assert caught.value.died == victim
    return caught.value.rank, time.monotonic() - started


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", [0, 1])
def test_who_dies_while_channels_connect_is_named(victim: int) -> None:
    told = run_processes(die_while_connecting, 3, victim, may_die=[victim])
    for named, took in [each for rank, each in enumerate(told) if rank != victim]:
        assert named == victim
        assert took < SOON
