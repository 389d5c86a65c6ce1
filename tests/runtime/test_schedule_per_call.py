"""One Pipeline runs any sound schedule of its placement, with any number of microbatches, from one step to the next."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from torch import nn

from pipeflow import (
    Pipeline,
    PipelineError,
    Placement,
    Schedule,
    ScheduleError,
    UsageError,
    execute_pipeline,
    make_schedule,
    simulate,
    verify,
)
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.runtime.program.compile import KEPT
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.models import PlainModel, TiedModel, TinyModel, TreeModel
from tests.families import accepts
from tests.runtime.work import build, gradients_of, plain, require_near, schedule_of, variants

PLACEMENTS = [
    Placement.linear(3),
    Placement.looped(2, 2),
    Placement.vee(2),
    Placement.bidirectional(4),
]


def family_of(placement: Placement) -> list[Schedule]:
    """Schedules of the registry that have this placement, with several numbers of microbatches."""
    found = [
        schedule
        for variant in variants(max_ranks=4, max_chunks=2)
        for microbatches in (4, 7, 2)
        if variant[1] == placement.num_ranks and (schedule := schedule_of(variant, microbatches)).placement == placement
    ]
    assert len(found) >= 3
    return found


def run_alternating(model: TinyModel, family: list[Schedule]) -> None:
    """Each schedule twice, in turns, on batches of two lengths; now and then an evaluation. Exact after every step."""
    pipeline = build(model, family[0])
    for step, schedule in enumerate(islice(cycle(family), 2 * len(family))):
        batch = model.batch(schedule.num_microbatches + 2, length=2 + step % 2, seed=step)
        loss, expected = model.plain_step(batch)
        if step % 3 == 1:
            evaluated = execute_pipeline(iter([batch]), pipeline, forward_only=True, schedule=schedule)
            require_loss(evaluated.loss, loss)
        pipeline.zero_grad()
        require_loss(execute_pipeline(iter([batch]), pipeline, schedule=schedule).loss, loss)
        require_near(gradients_of(pipeline), expected)


def require_loss(loss: Any, expected: torch.Tensor) -> None:
    assert loss is None or abs(loss.item() - expected.item()) <= 1e-12 * abs(expected.item())


@pytest.mark.some(2)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("model", [TiedModel(6), TreeModel(6)], ids=str)
def test_gradients_are_exact_when_schedules_alternate(placement: Placement, model: TinyModel) -> None:
    run_threads(run_alternating, placement.num_ranks, model, family_of(placement))


@pytest.mark.exhaustive
def test_gradients_are_exact_when_schedules_alternate_over_gloo() -> None:
    run_processes(run_alternating, 4, TiedModel(6), family_of(Placement.bidirectional(4)))


def run_many() -> int:
    """More schedules than are kept, twice."""
    model, first = PlainModel(), schedule_of(("1f1b", 2, 1), 2)
    pipeline = build(model, first)
    for microbatches in (*range(1, KEPT + 3), *range(1, KEPT + 3)):
        schedule = schedule_of(("zb-h1", 2, 1), microbatches)
        batch = model.batch(microbatches, seed=microbatches)
        pipeline.zero_grad()
        execute_pipeline(iter([batch]), pipeline, schedule=schedule)
        require_near(gradients_of(pipeline), model.plain_step(batch)[1])
    return len(pipeline.runner.programs._kept)


def test_so_many_programs_are_kept() -> None:
    assert run_threads(run_many, 2) == [KEPT, KEPT]


def run_equal() -> bool:
    """The same schedule made anew is the same program."""
    model, pipeline = PlainModel(), build(PlainModel(), schedule_of(("1f1b", 2, 1), 2))
    for _ in range(3):
        execute_pipeline(iter([model.batch(4)]), pipeline, schedule=schedule_of(("1f1b", 2, 1), 2))
    return len(pipeline.runner.programs._kept) == 1


def test_an_equal_schedule_is_compiled_once() -> None:
    assert all(run_threads(run_equal, 2))


# what one may not pass
def crossed() -> Schedule:
    return Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0", name="crossed")


def elsewhere() -> Schedule:
    return schedule_of(("interleaved-1f1b", 2, 2), 2)


WRONG = [
    (crossed, ScheduleError, r"schedule 'crossed' is not sound:\n  rank ., position .: deadlock: "),
    (elsewhere, UsageError, r"schedule 'interleaved-1f1b' has another placement than this Pipeline's stages"),
    (lambda: "1f1b", UsageError, r"schedule must be a pipeflow.Schedule, got str: make_schedule\('1f1b', \.\.\.\)"),
]


TAKING: list[Callable[[Any], object]] = [
    verify,
    simulate,
    lambda schedule: Pipeline(nn.Linear(1, 1), schedule),
    lambda schedule: Pipeline.from_module(nn.Linear(1, 1), schedule, example=None),
]


@pytest.mark.parametrize("which", range(len(TAKING)))
def test_the_name_of_a_schedule_is_no_schedule(which: int) -> None:
    with pytest.raises(UsageError, match=WRONG[-1][2]):
        TAKING[which]("1f1b")


def run_wrong(which: int) -> None:
    make, kind, message = WRONG[which]
    model = PlainModel()
    pipeline = build(model, schedule_of(("1f1b", 2, 1), 2))
    with pytest.raises((kind, PipelineError), match=message):
        execute_pipeline(iter([model.batch(4)]), pipeline, schedule=make())  # type: ignore[arg-type]
    execute_pipeline(iter([model.batch(4)]), pipeline)
    require_near(gradients_of(pipeline), model.plain_step(model.batch(4))[1])


@pytest.mark.parametrize("which", range(len(WRONG)))
def test_a_schedule_that_does_not_fit_is_an_error(which: int) -> None:
    run_threads(run_wrong, 2, which)


def run_few(model: TinyModel, variant: tuple[str, int, int], samples: int) -> Any:
    pipeline = build(model, schedule_of(variant, 4))
    for count in (samples, 9, samples):
        batch = model.batch(count)
        output = execute_pipeline(iter([batch]), pipeline, forward_only=True, return_outputs=True)
    return None if output.loss is None else output.loss.item(), plain(output.outputs)


@pytest.mark.some(34)
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("variant", [each for each in variants(3, 2) if accepts(each[0], each[1])], ids=str)
def test_fewer_samples_than_microbatches_are_evaluated(variant: tuple[str, int, int], samples: int) -> None:
    model = PlainModel(6)
    loss, _ = model.plain_step(model.batch(samples))
    told = [each for each in run_threads(run_few, variant[1], model, variant, samples) if each[0] is not None]
    assert len(told) in (1, 2)  # two ranks have the last stage of a bidirectional schedule
    for its_loss, outputs in told:
        assert its_loss == pytest.approx(loss.item(), rel=1e-12)
        assert outputs.shape == model.batch(samples)[0].shape


def run_few_in_training(model: TinyModel, variant: tuple[str, int, int], samples: int) -> Any:
    pipeline = build(model, schedule_of(variant, 4))
    for count in (samples, 9, samples):
        pipeline.zero_grad()
        loss = execute_pipeline(iter([model.batch(count)]), pipeline, broadcast_loss=True).loss
    assert loss is not None
    return loss.item(), gradients_of(pipeline)


@pytest.mark.some(17)
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("variant", [each for each in variants(3, 2) if accepts(each[0], each[1])], ids=str)
def test_fewer_samples_than_microbatches_are_trained(variant: tuple[str, int, int], samples: int) -> None:
    """As the last batch of an epoch may have."""
    model = PlainModel(6)
    expected, wanted = model.plain_step(model.batch(samples))
    for loss, gradients in run_threads(run_few_in_training, variant[1], model, variant, samples):
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        require_near(gradients, wanted)


@pytest.mark.parametrize("name", ["chimera", "dualpipe"])
def test_copies_of_which_one_computes_nothing_are_summed_in_one_order(name: str) -> None:
    """The batch has one sample: a rank then has gradients of the copies of one path alone, and reduces these first."""
    model = PlainModel(6)
    _, wanted = model.plain_step(model.batch(1))
    for _, gradients in run_threads(run_few_in_training, 2, model, (name, 2, 1), 1):
        require_near(gradients, wanted)


def run_uneven_replicas(variant: tuple[str, int, int], training: bool) -> tuple[float, Any]:
    """One replica has fewer samples than microbatches."""
    model = PlainModel(4)
    pipeline, first = build(model, schedule_of(variant, 4)), current_context().data_rank == 0
    batch = model.batch(2) if first else model.batch(5, seed=1)
    output = execute_pipeline(iter([batch]), pipeline, forward_only=not training, broadcast_loss=True)
    assert output.loss is not None
    return output.loss.item(), gradients_of(pipeline)


@pytest.mark.parametrize(
    ("variant", "training"),
    [(("1f1b", 2, 1), False), (("interleaved-1f1b", 2, 2), True), (("zb-v", 2, 2), True), (("dualpipe", 2, 1), True)],
)
def test_replicas_run_batches_of_their_own_size(variant: tuple[str, int, int], training: bool) -> None:
    model = PlainModel(4)
    batches = zip(*(model.batch(2), model.batch(5, seed=1)), strict=True)
    inputs, labels = (torch.cat(parts) for parts in zip(*zip(*batches, strict=True), strict=True))
    expected, wanted = model.plain_step((inputs, labels))
    for loss, gradients in run_threads(run_uneven_replicas, 4, variant, training, data=2):
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        if training:
            require_near(gradients, wanted)


def run_empty_path() -> None:
    model = PlainModel(4)
    pipeline = build(model, schedule_of(("dualpipe", 2, 1), 4))
    with pytest.raises(UsageError, match="a batch of 1 samples leaves one of the 2 paths of 'dualpipe' empty"):
        execute_pipeline(iter([model.batch(1)]), pipeline)


def test_replicas_refuse_a_batch_that_leaves_a_path_empty() -> None:
    run_threads(run_empty_path, 4, data=2)


def test_the_first_microbatches_of_a_sound_schedule_are_one() -> None:
    for variant in variants(max_ranks=4, max_chunks=3):
        schedule = schedule_of(variant, 6)
        for microbatches in range(1, 6):
            fewer = schedule.forward_only().first(microbatches)
            assert fewer.num_microbatches == microbatches
            assert verify(fewer) == []
            assert verify(schedule.first(microbatches)) == []
    assert make_schedule("1f1b", ranks=2, microbatches=3).first(3) == make_schedule("1f1b", ranks=2, microbatches=3)


def run_default() -> None:
    model, schedule = PlainModel(), schedule_of(("1f1b", 2, 1), 4)
    pipeline = build(model, schedule)
    assert pipeline.schedule == schedule
    output = execute_pipeline(
        iter([model.batch(4)]), pipeline, schedule=make_schedule("gpipe", ranks=2, microbatches=2), trace=True
    )
    assert output.timeline is not None
    assert output.timeline.name == "gpipe"
    assert {span.action.microbatch for span in output.timeline.rows[0]} == {0, 1}


def test_what_was_traced_has_the_name_of_what_ran() -> None:
    run_threads(run_default, 2)
