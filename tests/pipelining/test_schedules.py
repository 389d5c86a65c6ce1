"""Every schedule of torch's API computes the losses, outputs and gradients of one process, step after step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeflow import PipelineError
from pipeflow.parallel.context import current_context
from pipeflow.testing import run_processes
from tests.pipelining.work import MICROBATCHES, TOLERANCE, WIDTH, Work, batch, mean_loss, serial, together

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


def in_groups() -> tuple[float, int]:
    """Two pipelines side by side, each in a group of torch; the error of gradients, and the size of the world."""
    current_context().close()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = dist.get_rank() % 2
    work, data = Work("1F1B", group=groups[mine]), batch(seed=10 + mine)
    work.step(*data)
    return work.error(serial(work.layers, *data)[0]), current_context().world_size


def test_a_pipeline_is_the_ranks_of_its_process_group() -> None:
    for error, size in run_processes(in_groups, 4):
        assert error < TOLERANCE
        assert size == 2


def traced() -> tuple[bool, int]:
    """Whether a step was measured, and the number of its actions."""
    work = Work("Interleaved1F1B")
    work.schedule.running.trace = True
    work.step(*batch())
    timeline = work.schedule.running.output.timeline
    return timeline is not None, sum(map(len, work.schedule.schedule.rows))


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


def test_a_stage_may_get_another_module() -> None:
    assert max(run_processes(replaced, 2)) < TOLERANCE
