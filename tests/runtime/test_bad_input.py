"""What cannot work is one clear error, on every rank: a UsageError where it was noticed."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeflow import (
    CostModel,
    Pipeline,
    PipelineError,
    Schedule,
    ScheduleError,
    UsageError,
    execute_pipeline,
    launch,
    make_schedule,
)
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.models import WIDTH, PlainModel
from tests.runtime.work import build, gradients_of, require_near, schedule_of

MODEL = PlainModel()
TWO = schedule_of(("1f1b", 2, 1), 2)

# What rank `rank` of two does wrong when it makes its Pipeline; and what it is told (other ranks: as the last entry).
Making = Callable[[int], Pipeline]


def chunks(rank: int) -> nn.ModuleList:
    return MODEL.chunks(TWO, rank)


def too_few_chunks(rank: int) -> Pipeline:
    return Pipeline(chunks(rank)[0], schedule_of(("interleaved-1f1b", 2, 2), 2))


def too_many_chunks(rank: int) -> Pipeline:
    return Pipeline(nn.ModuleList([chunks(rank)[0], nn.Linear(2, 2)]), TWO)


def another_number_of_ranks(rank: int) -> Pipeline:
    return Pipeline(chunks(rank), schedule_of(("1f1b", 3, 1), 2))


def unsound(rank: int) -> Pipeline:
    return Pipeline(chunks(rank), Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0", name="crossed"))


def incomplete(rank: int) -> Pipeline:
    return Pipeline(chunks(rank), Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1", name="incomplete"))


def other_schedules(rank: int) -> Pipeline:
    return Pipeline(chunks(rank), schedule_of((("1f1b", "gpipe")[rank], 2, 1), 2))


def other_microbatches(rank: int) -> Pipeline:
    return Pipeline(chunks(rank), schedule_of(("1f1b", 2, 1), 2 + rank))


def other_shapes(rank: int) -> Pipeline:
    return Pipeline(chunks(rank), TWO, tensor_shape=(1, 3, WIDTH + rank))


def other_dtypes(rank: int) -> Pipeline:
    return Pipeline(chunks(rank), TWO, tensor_shape=(1, 3), tensor_dtype=(torch.float32, torch.float64)[rank])


def shape_on_one_rank(rank: int) -> Pipeline:
    return Pipeline(chunks(rank), TWO, tensor_shape=(1, 3) if rank else None)


def other_costs(rank: int) -> Pipeline:
    return Pipeline(chunks(rank), TWO, cost=CostModel.even(TWO.placement, transfer=rank))


def costs_of_other_stages(rank: int) -> Pipeline:
    return Pipeline(chunks(rank), TWO, cost=CostModel((1,) * 3, (1,) * 3, (1,) * 3))


def replicas_inside(rank: int) -> Pipeline:
    module = chunks(rank)[0]
    module.replicated = object.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(module.replicated)
    return Pipeline(module, TWO)


MAKING: list[tuple[Making, type[UsageError], str]] = [
    (too_few_chunks, UsageError, r"rank . holds stages \[., .\] under 'interleaved-1f1b': it needs 2 chunks, got 1"),
    (too_many_chunks, UsageError, r"rank . holds stages \[.\] under '1f1b': it needs 1 chunks, got 2"),
    (another_number_of_ranks, UsageError, "schedule '1f1b' is for 3 ranks, the pipeline has 2"),
    (unsound, ScheduleError, r"schedule 'crossed' is not sound:\n  rank ., position .: deadlock: "),
    (incomplete, ScheduleError, "rank 1: 1B1 is missing: stage 1 runs 1F1 for microbatch 1"),
    (other_schedules, UsageError, "rank 1 was given another schedule than rank 0: "),
    (other_microbatches, UsageError, "rank 1 was given another schedule than rank 0: "),
    (other_shapes, UsageError, r"rank 1 was given another tensor_shape or tensor_dtype than rank 0: .*\(1, 3, 7\)"),
    (other_dtypes, UsageError, "rank 1 was given another tensor_shape or tensor_dtype than rank 0: .*torch.float64"),
    (shape_on_one_rank, UsageError, "rank 1 was given another tensor_shape .*, not None"),
    (other_costs, UsageError, r"rank 1 was given another cost than rank 0: CostModel\(.*latency=1"),
    (costs_of_other_stages, UsageError, "the cost model has 3 stages, schedule '1f1b' has 2: give one cost per stage"),
    (replicas_inside, UsageError, "DistributedDataParallel inside a stage would average .*: unwrap it"),
]


def make_badly(which: int) -> None:
    """The error; and then a good pipeline, in the same context."""
    making, kind, message = MAKING[which]
    rank = current_context().pipeline_rank
    with pytest.raises(kind, match=message):
        making(rank)
    train_well()


def train_well() -> None:
    pipeline, batch = build(MODEL, TWO), MODEL.batch(5)
    execute_pipeline(iter([batch]), pipeline)
    require_near(gradients_of(pipeline), MODEL.plain_step(batch)[1])


@pytest.mark.parametrize("which", range(len(MAKING)), ids=[making.__name__ for making, _, _ in MAKING])
def test_pipelines_that_cannot_be_made(which: int) -> None:
    run_threads(make_badly, 2, which)


def make_all_badly() -> None:
    for which in range(len(MAKING)):
        make_badly(which)


@pytest.mark.exhaustive
def test_pipelines_that_cannot_be_made_over_gloo() -> None:
    run_processes(make_all_badly, 2)


def run_one_wrong() -> str:
    """Only rank 1 has built the wrong stages."""
    rank = current_context().pipeline_rank
    schedule = schedule_of(("interleaved-1f1b", 2, 2), 2)
    stages = (2, 3) if rank == 1 else (0, 2)
    kind = UsageError if rank == 1 else PipelineError
    with pytest.raises(kind, match=r"rank 1 holds stages \[1, 3\] .*; its chunks are for .*\[2, 3\]") as caught:
        Pipeline(MODEL.chunks(schedule, rank), schedule, stages=stages)
    if isinstance(caught.value, PipelineError):
        assert (caught.value.rank, caught.value.died) == (1, None)
    good = Pipeline(MODEL.chunks(schedule, rank), schedule, stages=schedule.placement.stages_of(rank))
    return type(good).__name__


@pytest.mark.parametrize("start", [run_threads, run_processes])
def test_one_rank_with_the_wrong_stages_is_told_to_all(start: Any) -> None:
    assert start(run_one_wrong, 2) == ["Pipeline", "Pipeline"]


class Returning(nn.Module):
    """A stage that returns what it is told to."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor) -> Any:
        return hidden * self.weight if self.value is None else self.value


def step(
    batch: object = None,
    *,
    iterator: Any = None,
    stage: object = None,
    last: object = None,
    criterion: Any = None,
    **options: Any,
) -> None:
    """A step of a pipeline of two, whose stages may return something else, that may have something wrong with it."""
    value = stage if current_context().pipeline_rank == 0 else last
    pipeline = Pipeline(Returning(value), TWO, criterion=criterion or (lambda output, _: output.mean()))
    iterator = iter([(torch.ones(4, 2), torch.ones(4)) if batch is None else batch]) if iterator is None else iterator
    execute_pipeline(iterator, pipeline, **options)


ONES = torch.ones(4, 2)

# on both ranks alike: what is done, and what each is told
STEPS: list[tuple[str, Callable[[], None], str]] = [
    ("no batch left", lambda: step(iterator=iter([])), r"data_iter has no batch left: make a new one, iter\(loader\)"),
    (
        "no iterator",
        lambda: step(iterator=[(ONES, ONES)]),
        r"data_iter must be an iterator, got list: pass iter\(loader\)",
    ),
    (
        "no pair",
        lambda: step(ONES),
        r"batch must be \(inputs, labels\), got Tensor; without labels pass \(inputs, None\)",
    ),
    (
        "three",
        lambda: step((ONES, ONES, ONES)),
        r"got a tuple of 3: several inputs are one tuple or a dict, as in \(\(input1, input2\), labels\)",
    ),
    ("a batch", lambda: step(iterator=(ONES, ONES)), r"got the batch itself, a tuple: pass iter\(\[batch\]\)"),
    ("a dict", lambda: step(iterator={"hidden": ONES}), r"got the batch itself, a dict: pass iter\(\[batch\]\)"),
    ("lengths", lambda: step((ONES, ONES[:3])), r"tensors of a batch differ in dim 0: \[3, 4\]; each needs one"),
    (
        "no tensor",
        lambda: step(("words", 3)),
        r"a batch needs a tensor with one entry per sample, got str, int: convert with torch.as_tensor",
    ),
]


def run_step_badly(which: int) -> None:
    _, call, message = STEPS[which]
    with pytest.raises(UsageError, match=message):
        call()
    train_well()


@pytest.mark.parametrize("which", range(len(STEPS)), ids=[name for name, _, _ in STEPS])
def test_batches_that_do_not_fit(which: int) -> None:
    run_threads(run_step_badly, 2, which)


# noticed by one rank: (what, rank, action, what is done, what both are told)
NOTICED: list[tuple[str, int, str | None, Callable[[], None], str]] = [
    (
        "loss with a shape",
        1,
        "1F0",
        lambda: step(criterion=lambda out, _: out),
        r"a scalar tensor, got of shape \(2, 2\)",
    ),
    (
        "loss no tensor",
        1,
        "1F0",
        lambda: step(criterion=lambda *_: 1.5),
        "criterion must return a scalar tensor, got float",
    ),
    (
        "no labels",
        1,
        "1F0",
        lambda: step((ONES, None), criterion=nn.MSELoss()),
        r"the criterion got None as labels, since the batch has none .*: pass \(inputs, labels\), .* dict 'labels'",
    ),
    (
        "a dict for a tensor",
        1,
        "1F0",
        lambda: step(last={"a": 1, "logits": ONES}, criterion=nn.MSELoss()),
        r"returned a dict, which the criterion does not take .*: .*=lambda output, labels: loss\(output\['logits'\], l",
    ),
    (
        "a tuple for a tensor",
        1,
        "1F0",
        lambda: step(last=(None, ONES), criterion=nn.functional.cross_entropy),
        r"returned a tuple, which the criterion does not take .*: .*=lambda output, labels: loss\(output\[1\], l",
    ),
    ("no tensor", 0, "0F0", lambda: step(stage="text"), "must return a tensor or a tree of tensors, got a str in it"),
    ("None in a tuple", 0, "0F0", lambda: step(stage=(ONES, None)), "a stage must return .*, got a NoneType in it"),
    ("number in a dict", 0, "0F0", lambda: step(stage={"a": ONES, "b": 2}), "a stage must return .*, got a int in it"),
]


def run_noticed(which: int) -> None:
    _, origin, action, call, message = NOTICED[which]
    rank = current_context().pipeline_rank
    with pytest.raises(UsageError if rank == origin else PipelineError, match=message) as caught:
        call()
    if isinstance(caught.value, PipelineError):
        assert (caught.value.rank, caught.value.action, caught.value.failure.trace) == (origin, action, "")
    train_well()


@pytest.mark.parametrize("which", range(len(NOTICED)), ids=[name for name, *_ in NOTICED])
def test_what_one_rank_notices_all_are_told(which: int) -> None:
    run_threads(run_noticed, 2, which)


def run_different_sizes(forward_only: bool, weigh: Any) -> str:
    rank = current_context().pipeline_rank
    pipeline = Pipeline(chunks(rank), TWO, criterion=lambda output, _: output.mean(), weigh=weigh)
    with pytest.raises(UsageError) as caught:
        execute_pipeline(iter([MODEL.batch(4 + 2 * rank)]), pipeline, forward_only=forward_only)
    train_well()
    return str(caught.value)


@pytest.mark.exhaustive
@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("start", [run_threads, run_processes])
def test_batches_of_different_sizes_are_told_to_all(start: Any, forward_only: bool) -> None:
    message = "the ranks read batches of different sizes, 4, 6: all need the same data in the same order"
    assert start(run_different_sizes, 2, forward_only, len) == [message, message]


@pytest.mark.parametrize("forward_only", [False, True])
def test_batches_of_different_sizes_are_told_before_what_comes_of_them(forward_only: bool) -> None:
    """The loss cannot be read from outputs and labels of different sizes."""
    for said in run_threads(run_different_sizes, 2, forward_only, None):
        assert said.startswith(
            "rank 1 failed: it reads a batch of 6 samples, but rank 0 reads a batch of 4 samples: all ranks of a "
            "replica need the same data in the same order; "
        )


def run_missing_criterion() -> None:
    pipeline = Pipeline(chunks(current_context().pipeline_rank), TWO)
    with pytest.raises((UsageError, PipelineError), match="training needs a loss: give the Pipeline a criterion"):
        execute_pipeline(iter([MODEL.batch(4)]), pipeline)
    execute_pipeline(iter([MODEL.batch(4)]), pipeline, forward_only=True)


def run_forwards_alone() -> None:
    forwards = TWO.forward_only()
    pipeline = Pipeline(chunks(current_context().pipeline_rank), forwards, criterion=MODEL.criterion)
    with pytest.raises((UsageError, PipelineError), match="has no backwards: pass forward_only=True"):
        execute_pipeline(iter([MODEL.batch(4)]), pipeline)
    execute_pipeline(iter([MODEL.batch(4)]), pipeline, forward_only=True)


def run_misused() -> None:
    pipeline = build(MODEL, TWO)
    with pytest.raises(UsageError, match=r"a Pipeline cannot be called: run it with pipeflow.execute_pipeline"):
        pipeline(torch.ones(2))
    with pytest.raises(UsageError, match=r"execute_pipeline runs a pipeflow.Pipeline, got Linear"):
        execute_pipeline(iter([]), nn.Linear(2, 2))  # type: ignore[arg-type]
    with torch.no_grad(), pytest.raises(UsageError, match="gradients are disabled here: pass forward_only=True"):
        execute_pipeline(iter([MODEL.batch(4)]), pipeline)
    train_well()


@pytest.mark.parametrize("call", [run_missing_criterion, run_forwards_alone, run_misused])
def test_calls_that_cannot_work(call: Callable[[], None]) -> None:
    run_threads(call, 2)


class Unmerged(nn.Module):
    """Its outputs cannot be put together: each microbatch has another width."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden[:, : len(hidden)]


def run_unmerged() -> str:
    rank = current_context().pipeline_rank
    chunk = Unmerged() if rank == 1 else nn.Identity()
    pipeline = Pipeline(chunk, TWO)
    with pytest.raises((UsageError, PipelineError)) as caught:
        execute_pipeline(iter([(torch.ones(3, 4), None)]), pipeline, forward_only=True, return_outputs=True)
    train_well()
    return str(caught.value).splitlines()[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", [run_threads, run_processes])
def test_outputs_that_cannot_be_put_together_fail_everywhere(start: Any) -> None:
    told = start(run_unmerged, 2)
    reason = (
        "the last stage returned shape (1, 1) for microbatch 1, but (2, 2) for microbatch 0: outputs are concatenated"
    )
    assert told[1].startswith(reason)
    assert told[0].startswith(f"rank 1 failed: UsageError: {reason}")


class Reader:
    """Iterates, and yet is none: a loader."""

    def __iter__(self) -> Iterator[object]:
        return iter([MODEL.batch(4)])


def test_a_loader_is_no_iterator() -> None:
    def run() -> None:
        with pytest.raises(UsageError, match="data_iter must be an iterator, got Reader"):
            execute_pipeline(Reader(), build(MODEL, TWO))  # type: ignore[arg-type]

    run_threads(run, 2)


def test_without_launch_there_is_no_context() -> None:
    with pytest.raises(UsageError, match=r"there is no context: call pipeflow.launch\(pipeline=...\) first"):
        Pipeline(nn.Linear(2, 2), make_schedule("1f1b", ranks=1, microbatches=1))


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (4, r"a world of 6 processes is not divisible into replicas of 4 .* --nproc-per-node 4"),
        (12, "a world of 6 processes is not divisible into replicas of 12"),
        (0, "pipeline must be an integer of at least 1, got 0"),
    ],
)
def test_a_world_that_does_not_fit(pipeline: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 6, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UsageError, match=message):
        launch(pipeline)
    assert not dist.is_initialized()


ALONE = """
import torch, pipeflow
context = pipeflow.launch(pipeline=1)
assert (context.rank, context.world_size, context.device.type) == (0, 1, "cpu"), context
schedule = pipeflow.make_schedule("1f1b", ranks=1, microbatches=2)
model = pipeflow.Pipeline(torch.nn.Linear(2, 1), schedule, criterion=torch.nn.functional.mse_loss)
print(pipeflow.execute_pipeline(iter([(torch.ones(4, 2), torch.ones(4, 1))]), model).loss.shape)
try:
    pipeflow.launch(pipeline=2)
except pipeflow.UsageError as error:
    print(error)
"""


def test_a_process_alone_is_told_how_to_start_the_others() -> None:
    def alone() -> str:
        with pytest.raises(UsageError) as raised:
            Pipeline(chunks(0), TWO)
        return str(raised.value)

    [said] = run_threads(alone, 1)
    assert said.endswith("the pipeline has 1; start 2 processes: torchrun --nproc-per-node 2")


@pytest.mark.exhaustive
def test_a_single_process_needs_no_launcher() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run([sys.executable, "-c", ALONE], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.startswith("torch.Size([])\na world of 1 processes is not divisible into replicas of 2")


class Padded(nn.Module):
    """Its outputs are as long as the longest sample of a microbatch; `mode` says how they differ."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode

    def forward(self, hidden: Tensor) -> Any:
        longest = int(hidden[:, 0, 0].max())
        if self.mode == "length":
            return hidden[:, :longest]
        return (hidden,) * longest


def run_padded(mode: str) -> str:
    schedule = make_schedule("gpipe", ranks=1, microbatches=2)
    pipeline = Pipeline(Padded(mode), schedule)
    batch = torch.ones(4, 5, 2)
    batch[2:] = 3
    with pytest.raises(UsageError) as raised:
        execute_pipeline(iter([(batch, None)]), pipeline, forward_only=True, return_outputs=True)
    execute_pipeline(iter([(batch, None)]), pipeline, forward_only=True)
    return str(raised.value)


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("length", "shape (2, 3, 2) for microbatch 1, but (2, 1, 2) for microbatch 0: outputs are concatenated"),
        ("entries", "3 entries for microbatch 1, but 1 for microbatch 0"),
    ],
)
def test_outputs_that_cannot_be_joined(mode: str, told: str) -> None:
    [message] = run_threads(run_padded, 1, mode)
    assert told in message
    assert "return_outputs=False" in message


def run_backward_again() -> tuple[str, Any]:
    rank = current_context().pipeline_rank
    pipeline = Pipeline(chunks(rank), TWO, criterion=MODEL.criterion)
    loss = execute_pipeline(iter([MODEL.batch(4)]), pipeline, broadcast_loss=True).loss
    assert type(loss) is Tensor
    with pytest.raises(UsageError) as raised:
        loss.backward()
    file = io.BytesIO()
    torch.save({"loss": loss}, file)
    file.seek(0)
    copies = [float(torch.load(file)["loss"]), float(copy.deepcopy(loss)), float(loss.numpy()), loss.item()]
    assert copies == [float(loss)] * 4
    assert not (loss + 1).requires_grad
    evaluated = execute_pipeline(iter([MODEL.batch(4)]), pipeline, broadcast_loss=True, forward_only=True).loss
    assert evaluated is not None
    assert not vars(evaluated)
    return str(raised.value), type(vars(loss + 1).get("backward"))


def test_the_backward_of_a_loss_was_run() -> None:
    for message, kept in run_threads(run_backward_again, 2):
        assert "execute_pipeline ran the backward of this loss already" in message
        assert kept is type(None)
