"""Every schedule of torch's API computes the losses, outputs and gradients of one process, step after step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining.schedules as theirs
from torch import nn
from torch.distributed.pipelining.schedules import _ComputationType

from pipeflow import PipelineError, UsageError
from pipeflow.adapters.pipelining import stage as stage_file
from pipeflow.adapters.pipelining.schedules import get_schedule_class
from pipeflow.engine.parallel.context import current_context
from pipeflow.pipelining import PipelineStage
from pipeflow.testing import run_processes
from tests.pipelining.work import (
    CPU,
    MICROBATCHES,
    TOLERANCE,
    WIDTH,
    Work,
    batch,
    difference,
    mean_loss,
    serial,
    together,
)

pytestmark = pytest.mark.slow
NAMES = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
    "ZBH1",
    "v-half",
)


def train() -> list[str]:
    """Two steps that accumulate, an evaluation between them, and a batch of another size; what differed, in words."""
    wrong = []
    for name in NAMES:
        work, (inputs, targets) = Work(name), batch()
        whole, loss = serial(work.layers, inputs, targets)
        for count in (1, 2):
            losses: list[Any] = [None]
            output = work.step(inputs, targets, losses=losses)
            if work.error(whole, count) > TOLERANCE:
                wrong.append(f"{name}: gradients of step {count}")
            if work.last in work.own and not math.isclose(together(losses), loss, rel_tol=TOLERANCE):
                wrong.append(f"{name}: losses {losses}, not {loss}")
            if (output is not None) != (work.last in work.own):
                wrong.append(f"{name}: output {output}")
            evaluated: list[Any] = []
            work.step(inputs, targets, "eval", losses=evaluated)
            if work.error(whole, count) > TOLERANCE:
                wrong.append(f"{name}: gradients after an evaluation")
            if evaluated and not math.isclose(together(evaluated), loss, rel_tol=TOLERANCE):
                wrong.append(f"{name}: losses of an evaluation {evaluated}")
        larger = batch(3 * MICROBATCHES)
        work.layers.zero_grad()
        work.step(*larger)
        if work.error(serial(work.layers, *larger)[0]) > TOLERANCE:
            wrong.append(f"{name}: gradients of another size")
    return wrong


def test_gradients_are_those_of_one_process() -> None:
    assert run_processes(train, 2) == [[], []]


def ways_to_call() -> list[float]:
    """Microbatches that are split already, a sum, keywords of the loss, and targets that are a tree."""
    inputs, targets = batch()
    whole, _ = serial(Work("1F1B").layers, inputs, targets)
    split = Work("1F1B")
    first, last = 0 in split.own, split.last in split.own
    split.schedule.step(
        arg_mbs=[(each,) for each in inputs.chunk(MICROBATCHES)] if first else None,
        target_mbs=list(targets.chunk(MICROBATCHES)) if last else None,
        return_outputs=last,
    )
    added = Work("1F1B", scale_grads=False)
    added.step(inputs, targets)
    keyed = Work("1F1B", loss_fn=lambda output, target, factor: factor * mean_loss(output, target["y"]))
    keyed.schedule.step(
        *((inputs,) if first else ()), target={"y": targets} if last else None, loss_kwargs={"factor": 5.0}
    )
    return [split.error(whole), added.error(whole, MICROBATCHES), keyed.error(whole, 5.0)]


def test_microbatches_sums_and_keywords_of_the_loss() -> None:
    assert max(map(max, run_processes(ways_to_call, 2))) < TOLERANCE


def fail() -> list[str]:
    """The errors of a bad target on one rank, then of a bad loss; and the error of gradients in the step after them."""
    work, (inputs, targets) = Work("ZBVZeroBubble"), batch()
    found = []
    losses: Any = [] if dist.get_rank() else ()  # no list, on rank 0
    for options in ({"losses": losses}, {"loss_kwargs": {"unknown": 1}}):
        try:
            work.step(inputs, targets, **options)
        except (PipelineError, TypeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    work.layers.zero_grad()
    work.step(inputs, targets)
    return [*found, str(work.error(serial(work.layers, inputs, targets)[0]) < TOLERANCE)]


def test_what_fails_on_one_rank_is_told_on_all_and_the_next_step_works() -> None:
    first, second = run_processes(fail, 2)
    assert first[0].startswith("TypeError: losses must be a list")
    assert "rank 0 failed: TypeError: losses must be a list" in second[0]
    assert all("unknown" in its[1] and its[1].startswith("PipelineError") for its in (first, second))
    assert first[2] == second[2] == "True"


def in_groups() -> tuple[str, float, int]:
    """Two pipelines side by side, each in a group of torch: what is said while the world is one pipeline, the error of
    gradients after that, and the size of the world.
    """
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = dist.get_rank() % 2
    work, data = Work("1F1B", group=groups[mine]), batch(seed=10 + mine)
    with pytest.raises(UsageError) as caught:
        work.step(*data)
    current_context().close()
    work.step(*data)
    return str(caught.value), work.error(serial(work.layers, *data)[0]), current_context().world_size


@pytest.mark.exhaustive
def test_a_pipeline_is_the_ranks_of_its_process_group() -> None:
    for said, error, size in run_processes(in_groups, 4):
        assert "pipeflow.launch made a pipeline of the ranks [0, 1, 2, 3]: pass launch(pipeline=2)" in said
        assert error < TOLERANCE
        assert size == 2


def traced() -> tuple[bool, int]:
    """Whether a step was measured, and the number of its actions."""
    work = Work("Interleaved1F1B")
    work.schedule.running.trace = True
    work.step(*batch())
    timeline = work.schedule.running.output.timeline
    return timeline is not None, sum(map(len, work.schedule.schedule.rows))


@pytest.mark.exhaustive
def test_steps_are_measured_and_schedules_are_values() -> None:
    assert run_processes(traced, 2) == [(True, 2 * 4 * MICROBATCHES)] * 2


def replaced() -> float:
    """The error of gradients after the module of a stage was replaced."""
    work, data = Work("1F1B"), batch()
    work.step(*data)
    for index in range(len(work.layers)):
        torch.manual_seed(20 + index)
        work.layers[index] = nn.Linear(WIDTH, WIDTH).double()
    for stage in work.schedule.own_stages:
        stage.submod = work.layers[stage.stage_index]
    whole = serial(work.layers, *data)[0]
    work.step(*data)
    return work.error(whole)


@pytest.mark.exhaustive
def test_a_stage_may_get_another_module() -> None:
    assert max(run_processes(replaced, 2)) < TOLERANCE


class Later(nn.Module):
    """A linear layer whose backward leaves the gradient of its weight to `compute`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH, dtype=torch.float64) + 0.1)
        self.left: list[Any] = []

    def forward(self, value: Any) -> Any:
        layer = self

        class Product(torch.autograd.Function):
            @staticmethod
            def forward(context: Any, value: Any) -> Any:
                context.save_for_backward(value)
                return value @ layer.weight.detach().t()

            @staticmethod
            def backward(context: Any, gradient: Any) -> Any:
                layer.left.append(gradient.t() @ context.saved_tensors[0])
                return gradient @ layer.weight.detach()

        return Product.apply(value)  # type: ignore[no-untyped-call]  # torch's

    def builder(self) -> Any:
        """Takes what the last backward has left, and returns what adds it to the gradient."""
        left = self.left.pop()

        def add() -> None:
            self.weight.grad = left if self.weight.grad is None else self.weight.grad + left

        return add


def build_weight_gradients(name: str) -> tuple[float, int]:
    """The error of gradients that a `dw_builder` computes, and what is left of them."""
    work, (inputs, targets) = Work(name), batch()
    later = {stage: Later() for stage in work.own}
    for stage in work.schedule.own_stages:
        stage.submod = nn.Sequential(later[stage.stage_index], nn.Tanh())
        stage.dw_builder = later[stage.stage_index].builder
    work.step(inputs.requires_grad_(), targets)
    value, weights = inputs, [Later().weight for _ in range(work.last + 1)]
    for weight in weights:
        value = torch.tanh(value @ weight.t())
    mean_loss(value, targets).backward()
    errors = [difference(later[stage].weight.grad, weights[stage].grad) for stage in work.own]
    return max(errors), sum(len(each.left) for each in later.values())


@pytest.mark.parametrize("name", ["1F1B", "InterleavedZeroBubble"])
def test_a_builder_of_weight_gradients(name: str) -> None:
    for error, left in run_processes(build_weight_gradients, 2, name):
        assert error < TOLERANCE
        assert left == 0


def register() -> tuple[float, int]:
    """Gradients of torch's own runtime, which runs a schedule with a function for an action, and its calls."""
    work, data, calls = Work("Interleaved1F1B"), batch(), list[str]()
    work.schedule.register_custom_function(_ComputationType.UNSHARD, lambda action, _: calls.append(str(action)))
    work.step(*data)
    if "arg_mbs" not in inspect.signature(theirs.PipelineScheduleMulti.step).parameters:
        with pytest.raises(UsageError, match=r"before torch 2\.14 it takes no arg_mbs: pass the whole batch"):
            work.schedule.step(arg_mbs=[(data[0],)])
        with pytest.raises(UsageError, match=r"before torch 2\.15 it takes no finalize_gradients: leave it out"):
            work.schedule.step(data[0], finalize_gradients=False)
    return work.error(serial(work.layers, *data)[0]), len(calls)


@pytest.mark.exhaustive
def test_functions_for_actions_run_on_torchs_runtime() -> None:
    for error, calls in run_processes(register, 2):
        assert error < TOLERANCE
        assert calls


def within_contexts() -> tuple[float, list[tuple[int, int]], list[int]]:
    """Gradients of stages with a context, as torch 2.15 registers it; which forwards ran in it, and the own stages."""
    work, data, seen = Work("Interleaved1F1B"), batch(), list[tuple[int, int]]()

    @contextmanager
    def around(info: Any) -> Iterator[None]:
        seen.append((info.stage_index, info.microbatch_index))
        yield
        seen.append((info.stage_index, info.microbatch_index))

    stages: list[Any] = work.schedule.own_stages
    for stage in stages:
        if hasattr(stage, "register_forward_context"):
            stage.register_forward_context(around)
        else:
            stage._forward_contexts = {0: around}
            vars(stage_file).update(StageInfo=SimpleNamespace)
    work.step(*data)
    return work.error(serial(work.layers, *data)[0]), seen, [stage.stage_index for stage in stages]


@pytest.mark.exhaustive
def test_a_forward_runs_in_the_context_of_its_stage() -> None:
    for error, seen, stages in run_processes(within_contexts, 2):
        assert error < TOLERANCE
        assert seen[::2] == seen[1::2]
        assert sorted(seen[::2]) == sorted((stage, index) for stage in stages for index in range(MICROBATCHES))


@pytest.mark.exhaustive
def test_a_context_that_hides_an_error_is_refused() -> None:
    stage = SimpleNamespace(submod=Failing(), stage_index=0, is_first=True, is_last=True)
    stage._forward_contexts = {0: lambda info: suppress(ZeroDivisionError)}
    call = stage_file.StageCall(stage)
    with patch.object(stage_file, "StageInfo", SimpleNamespace), pytest.raises(UsageError, match="suppressed an error"):
        call(own=stage_file.Own(((1,), {}, 0)))


class Failing(nn.Module):
    def forward(self, value: int) -> float:
        return value / 0


def test_names_that_newer_releases_of_torch_add_are_there() -> None:
    package: Any = import_module("pipeflow.pipelining")
    with patch.object(torch.distributed.pipelining, "PipelineStageInfo", "new", create=True):
        assert package.PipelineStageInfo == "new"
    with pytest.raises(AttributeError, match="_never"):
        _ = package._never


class Indexed(nn.Module):
    """Records the indices that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int | None, int | None]] = []

    def forward(self, value: Any, stage_idx: int | None = None, mb_idx: int | None = None) -> Any:
        self.calls.append((stage_idx, mb_idx))
        return value


def index() -> tuple[list[Any], list[Any], str]:
    """The indices that a module is told, if it is and if not, and what is said about a keyword with their name."""
    kind, value, calls = get_schedule_class("GPipe"), torch.ones(2), []
    for options in ({}, {"pass_stage_and_microbatch_indices": True}):
        module = Indexed()
        schedule = kind(PipelineStage(module, 0, 1, CPU), 2, **options)
        schedule.step(value)
        calls.append(module.calls)
    with pytest.raises(UsageError) as caught:
        schedule.step(value, mb_idx=3)
    return calls[0], calls[1], str(caught.value)


@pytest.mark.exhaustive
def test_modules_are_told_their_stage_and_microbatch() -> None:
    [(without, told, said)] = run_processes(index, 1)
    assert without == [(None, None)] * 2
    assert told == [(0, 0), (0, 1)]
    assert "the schedule reserves the keyword mb_idx" in said


def refuse() -> list[str]:
    """What is said about what cannot work; one rank alone."""
    stage, found = PipelineStage(nn.Linear(2, 2), 0, 1, CPU), list[str]()
    value, function = torch.ones(4, 2), cast(nn.Module, print)
    asked: list[Any] = [
        lambda: get_schedule_class("GPipe")(stage, 2, loss_fn=mean_loss).step(value),
        lambda: get_schedule_class("GPipe")(stage, 2).step(value, target_mbs=[value]),
        lambda: get_schedule_class("GPipe")(stage, 2).step(arg_mbs=[value, value]),
        lambda: get_schedule_class("GPipe")(stage, 2, loss_fn=lambda *_: value).step(value, target=value),
        lambda: get_schedule_class("GPipe")(PipelineStage(function, 0, 1, CPU), 2).step(value),
        lambda: get_schedule_class("PipelineScheduleMulti")([stage], 2).step(value),
    ]
    for ask in asked:
        with pytest.raises((PipelineError, UsageError, TypeError)) as caught:
            ask()
        found.append(str(caught.value))
    with torch.no_grad(), pytest.raises(RuntimeError) as disabled:
        get_schedule_class("GPipe")(stage, 2, loss_fn=mean_loss).step(value, target=value)
    return [*found, str(disabled.value)]


def test_bad_input_is_one_sentence() -> None:
    [found] = run_processes(refuse, 1)
    for said, expected in zip(
        found,
        [
            "step() needs target= on the rank with the last stage, because the schedule has a loss_fn",
            "microbatches are split already: pass pre-split positional inputs through arg_mbs",
            "arg_mbs must be a list of tuples, one per microbatch, with the arguments of the model",
            "criterion must return a scalar tensor, got of shape (4, 2): take the mean over its samples",
            "stage 0 holds builtin_function_or_method, not a module: pass PipelineStage an nn.Module",
            "PipelineScheduleMulti has no order yet: set pipeline_order, or load one with _load_csv",
            "step() requires gradients to be enabled: call eval() where they are not",
        ],
        strict=True,
    ):
        assert expected in said
