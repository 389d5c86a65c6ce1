"""The device that a process computes on, and what is set before CUDA begins, with torch.cuda as on other machines."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from pipeflow import Pipeline, UsageError, execute_pipeline, launch, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.device import DEFAULTS, own_device, prepare
from pipeflow.engine.parallel.transport.agreement import all_gather
from pipeflow.testing import run_processes
from pipeflow.testing.models import PlainModel
from pipeflow.testing.ranks import free_port

Machine = Callable[[int, int | None], list[int]]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes this process one that sees `count` GPUs and has a LOCAL_RANK; returns the devices that become current."""

    def make(count: int, local_rank: int | None = None) -> list[int]:
        current: list[int] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if local_rank is not None:
            monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        return current

    return make


@pytest.mark.parametrize(
    ("count", "local_rank", "asked", "index"),
    [
        (4, 2, None, 2),
        (4, 2, "cuda", 2),
        (4, None, "cuda", 0),
        (4, 2, "cuda:3", 3),
        (1, 5, None, 0),  # srun gives each task one GPU
        (1, 5, "cuda", 0),
    ],
)
def test_a_gpu_becomes_the_current_device(
    machine: Machine, count: int, local_rank: int | None, asked: str | None, index: int
) -> None:
    current = machine(count, local_rank)
    assert own_device(asked) == torch.device("cuda", index)
    assert current == [index]


@pytest.mark.parametrize(("count", "asked"), [(0, None), (0, "cpu"), (4, "cpu")])
def test_the_cpu_needs_no_gpu(machine: Machine, count: int, asked: str | None) -> None:
    assert machine(count, 0) == []
    assert own_device(asked) == torch.device("cpu")


@pytest.mark.parametrize(
    ("count", "local_rank", "asked", "message"),
    [
        (4, 5, None, "LOCAL_RANK 5 but sees 4 GPUs: start at most one process per GPU"),
        (4, 0, "cuda:4", "'cuda:4' was given, but this process sees 4 GPUs"),
        (0, 0, "cuda", "'cuda' was given, but torch finds no GPU"),
        (4, 0, "xpu", "pipeflow computes on 'cpu' and on 'cuda', not on 'xpu'"),
        (0, 0, "meta", "not on 'meta'"),
    ],
)
def test_a_device_that_is_not_there_is_an_error(
    machine: Machine, count: int, local_rank: int, asked: str | None, message: str
) -> None:
    machine(count, local_rank)
    with pytest.raises(UsageError, match=message):
        launch(device=asked)


@pytest.fixture
def built_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    for name in (*DEFAULTS, "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "")  # so that it is as before after the test
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("built_for_cuda")
def test_variables_are_set_unless_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    prepare("cpu")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ
    prepare(None)
    assert {name: os.environ[name] for name in DEFAULTS} == {**DEFAULTS, "CUDA_MODULE_LOADING": "LAZY"}


@pytest.mark.usefixtures("built_for_cuda")
@pytest.mark.parametrize("queues", ["1", "8", ""])
def test_few_connections_are_refused(queues: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=f"CUDA_DEVICE_MAX_CONNECTIONS is {queues}, so a send may wait forever"):
        launch()


@pytest.mark.usefixtures("built_for_cuda")
@pytest.mark.parametrize(("value", "run", "kept"), [("1", True, "0"), ("1", False, "1"), ("3", True, "3")])
def test_a_users_error_handling_stays_but_not_torchruns(
    value: str, run: bool, kept: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", value)
    if run:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "torchrun")
    with caplog.at_level(logging.WARNING, "pipeflow"):
        prepare("cuda:1")
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == kept
    assert ("torch may end this process before it raises the error" in caplog.text) == (kept != "0")


@pytest.mark.usefixtures("built_for_cuda")
def test_a_launch_after_cuda_began_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with caplog.at_level(logging.WARNING, "pipeflow"):
        prepare(None)
    assert "CUDA was used before launch" in caplog.text


def train_in_a_group_of_gpus(port: int) -> float:
    """As after init_process_group("nccl"): the default group moves no tensor of the CPU."""
    all_gather(current_context().world, [0.0])  # when all have been launched
    current_context().close()
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)  # where no store is being closed
    dist.init_process_group("cuda:gloo")
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.zeros(1))
    context = launch()
    assert dist.get_backend_config() == "cuda:gloo"
    model, schedule = PlainModel(), make_schedule("1f1b", ranks=2, microbatches=2)
    pipeline = Pipeline(model.chunks(schedule, context.pipeline_rank), schedule, criterion=model.criterion)
    loss = execute_pipeline(iter([model.batch(4)]), pipeline, broadcast_loss=True).loss
    assert loss is not None
    return float(loss)


@pytest.mark.exhaustive
def test_a_default_group_of_gpus_alone_is_enough() -> None:
    expected, _ = PlainModel().plain_step(PlainModel().batch(4))
    assert run_processes(train_in_a_group_of_gpus, 2, free_port()) == pytest.approx([float(expected)] * 2)
