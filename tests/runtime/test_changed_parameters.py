"""Parameters that are unfrozen, frozen, replaced or made after the Pipeline: gradients are those of the plain model."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipeflow import Pipeline, PipelineError, UsageError, execute_pipeline
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.models import WIDTH, Layer, TiedModel, Words, initial
from tests.runtime.work import Gradients, build, gradients_of, plain, require_near, schedule_of

MODEL = TiedModel()
VARIANTS = [(("1f1b", 2, 1), 2), (("interleaved-1f1b", 2, 2), 1), (("chimera", 2, 1), 1), (("dualpipe", 2, 1), 2)]
Change = Callable[[Pipeline], object]


def unfreeze(pipeline: Pipeline) -> None:
    pipeline.requires_grad_(True)


def assign(pipeline: Pipeline) -> None:
    pipeline.load_state_dict({name: value.clone() for name, value in pipeline.state_dict().items()}, assign=True)


def replace_layers(pipeline: Pipeline) -> None:
    for stage in pipeline.chunks:
        layers = stage.get_submodule("layers")
        assert isinstance(layers, nn.ModuleDict)
        for index in list(layers):
            layers[index] = Layer(int(index), MODEL.dtype)


def replace_words(pipeline: Pipeline) -> None:
    """The tied weight, by one of the same values."""
    for module in pipeline.modules():
        if isinstance(module, Words):
            module.weight = initial(1, *module.weight.shape, dtype=MODEL.dtype)


def widen(pipeline: Pipeline) -> None:
    """Until here, parameters were in bfloat16."""
    pipeline.to(MODEL.dtype)
    fresh = dict(MODEL.stage(0, MODEL.layers).named_parameters())
    with torch.no_grad():
        for name, parameter in pipeline.named_parameters():
            parameter.copy_(fresh[name.split(".", 2)[2]])


def assign_data(pipeline: Pipeline) -> None:
    """Until here, the words had other shapes."""
    for module in pipeline.modules():
        if isinstance(module, Words):
            module.weight.grad = None
            module.weight.data = initial(1, len(module.weight) // 2, WIDTH, dtype=MODEL.dtype).data


CHANGES = {
    "widen": widen,
    "assign data": assign_data,
    "unfreeze": unfreeze,
    "assign": assign,
    "replace layers": replace_layers,
    "replace words": replace_words,
}


def change_and_step(variant: tuple[str, int, int], change: Change, steps: int) -> list[Gradients]:
    """The gradients of this rank after each step that follows the change."""
    schedule = schedule_of(variant, 3)
    chunks = MODEL.chunks(schedule, current_context().pipeline_rank)
    MODEL.tie(chunks, schedule)
    if change is unfreeze:
        chunks.requires_grad_(False)
        for module in chunks.modules():
            if isinstance(module, Layer):
                module.scale.requires_grad_(True)
    if change is widen:
        chunks.to(torch.bfloat16)
    if change is assign_data:
        for module in chunks.modules():
            if isinstance(module, Words):
                module.weight.data = module.weight.data.repeat(2, 1)
    pipeline = Pipeline(chunks, schedule, criterion=MODEL.criterion)
    batch = MODEL.batch(4, seed=current_context().data_rank)
    execute_pipeline(iter([batch]), pipeline)
    change(pipeline)
    told = []
    for _ in range(steps):
        pipeline.zero_grad()
        execute_pipeline(iter([batch]), pipeline)
        told.append(gradients_of(pipeline))
    return told


def expected(replicas: int) -> dict[str, Any]:
    module = MODEL.stage(0, MODEL.layers)
    for replica in range(replicas):
        _, summed = MODEL.plain_step(MODEL.batch(4, seed=replica), module)
    return {name: gradient / replicas for name, gradient in summed.items()}


@pytest.mark.some(3)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_summed_from_the_next_step_on(change: str, variant: tuple[tuple[str, int, int], int]) -> None:
    schedule, replicas = variant
    whole = expected(replicas)
    results = run_threads(change_and_step, 2 * replicas, schedule, CHANGES[change], 2, data=replicas)
    for steps in results:
        for gradients in steps:
            require_near(gradients, whole)
    assert {name for steps in results for name in steps[0]} == set(whole)


def test_over_gloo() -> None:
    whole = expected(2)
    for steps in run_processes(change_and_step, 4, ("dualpipe", 2, 1), replace_layers, 2, data=2):
        for gradients in steps:
            require_near(gradients, whole)


def replace_and_look(schedule: tuple[str, int, int]) -> None:
    """What defers before the change, right after it, and after one step more."""
    pipeline = build(MODEL, schedule_of(schedule, 3))
    seen = []
    for change in (None, replace_layers, None):
        if change is not None:
            change(pipeline)
        execute_pipeline(iter([MODEL.batch(4)]), pipeline)
        seen.append({index: sorted(deferral.deferred) for index, deferral in pipeline.deferrals.items()})
        layers = [each for each in pipeline.modules() if isinstance(each, nn.Linear)]
        assert layers
        for layer in layers:
            assert getattr(layer, "deferral", None) in pipeline.deferrals.values()
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("schedule", [("zb-h1", 2, 1), ("dualpipe", 2, 1)], ids=str)
def test_replaced_layers_defer_from_the_next_step_on(schedule: tuple[str, int, int]) -> None:
    run_threads(replace_and_look, 2, schedule)


def make_from_meta(variant: tuple[str, int, int], evaluates: bool) -> list[Gradients]:
    context, schedule = current_context(), schedule_of(variant, 3)
    with torch.device("meta"):
        chunks = MODEL.chunks(schedule, context.pipeline_rank).to_empty(device="meta")
    MODEL.tie(chunks, schedule)
    pipeline = Pipeline(chunks, schedule, criterion=MODEL.criterion)
    pipeline.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in pipeline.parameters():
            parameter.fill_(context.rank + 0.5)  # but the lowest rank's values win
        if context.rank < context.pipeline_size:
            fresh = MODEL.chunks(schedule, context.pipeline_rank)
            for parameter, value in zip(pipeline.chunks.parameters(), fresh.parameters(), strict=True):
                parameter.copy_(value)
    batch, told = MODEL.batch(4, seed=context.data_rank), []
    if evaluates:
        execute_pipeline(iter([batch]), pipeline, forward_only=True)
    for _ in range(2):
        pipeline.zero_grad()
        execute_pipeline(iter([batch]), pipeline)
        told.append(gradients_of(pipeline))
    return told


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("variant", [("1f1b", 2, 1), ("chimera", 2, 1)], ids=str)
def test_a_model_that_is_made_after_its_pipeline(variant: tuple[str, int, int], evaluates: bool) -> None:
    whole = expected(2)
    for steps in run_threads(make_from_meta, 4, variant, evaluates, data=2):
        for gradients in steps:
            require_near(gradients, whole)


def freeze_one_copy(when: str) -> tuple[str, float]:
    """The tied weight of rank 1 alone is frozen, before the Pipeline or after a step."""
    schedule, rank = schedule_of(("1f1b", 2, 1), 2), current_context().pipeline_rank
    chunks = MODEL.chunks(schedule, rank)
    MODEL.tie(chunks, schedule)
    [words] = [module for module in chunks.modules() if isinstance(module, Words)]
    words.requires_grad_(rank == 0 or when != "before")
    if when == "before":
        return refused(lambda: Pipeline(chunks, schedule, criterion=MODEL.criterion))
    pipeline = Pipeline(chunks, schedule, criterion=MODEL.criterion)
    execute_pipeline(iter([MODEL.batch(4)]), pipeline)
    words.requires_grad_(rank == 0)
    return refused(lambda: execute_pipeline(iter([MODEL.batch(4)]), pipeline))


def refused(call: Callable[[], object]) -> tuple[str, float]:
    """What it is refused with, and after how many seconds."""
    begun = time.monotonic()
    with pytest.raises(UsageError) as caught:
        call()
    return str(caught.value), time.monotonic() - begun


@pytest.mark.some(2)
@pytest.mark.parametrize("run", [run_threads, run_processes])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_tie_that_is_frozen_on_one_rank_is_refused_at_once(run: Any, when: str) -> None:
    for message, seconds in run(freeze_one_copy, 2, when):
        assert "ranks [0, 1] share a weight, but rank 0 has" in message
        assert "requires_grad=True" in message
        assert "requires_grad=False" in message
        assert seconds < 30  # of the 60 that a wait takes


def tie_unlike_dtypes() -> str:
    rank, schedule = current_context().pipeline_rank, schedule_of(("1f1b", 2, 1), 2)
    chunks = MODEL.chunks(schedule, rank).to(torch.float32 if rank else torch.float64)
    MODEL.tie(chunks, schedule)
    with pytest.raises(UsageError) as caught:
        Pipeline(chunks, schedule, criterion=MODEL.criterion)
    return str(caught.value)


def test_a_tie_of_unlike_dtypes_is_refused() -> None:
    for message in run_threads(tie_unlike_dtypes, 2):
        assert "share a weight" in message
        assert "torch.float64" in message
        assert "torch.float32" in message


def replace_by_others() -> str:
    pipeline = build(MODEL, schedule_of(("1f1b", 1, 1), 2))
    batch, rank = MODEL.batch(4), current_context().rank
    execute_pipeline(iter([batch]), pipeline)
    pipeline.chunks[0].get_submodule("layers.1").linear = nn.Linear(WIDTH, WIDTH, dtype=MODEL.dtype)
    with torch.no_grad():
        pipeline.chunks[0].get_submodule("layers.1.linear").get_parameter("weight").fill_(rank)
    first, second = (refused(lambda: execute_pipeline(iter([batch]), pipeline))[0] for _ in range(2))
    assert first == second
    return second


def test_a_layer_that_is_replaced_by_unlike_ones_is_refused() -> None:
    for message in run_threads(replace_by_others, 2, data=2):
        assert "rank 1 is a replica of rank 0, but has 'chunks.0.layers.1.linear.weight'" in message
        assert "values" in message


def replace_on(*replicas: int) -> tuple[str, list[float]]:
    """Some replicas replace the weights of a layer by equal ones. The step after the error, all have."""
    pipeline = build(MODEL, schedule_of(("1f1b", 1, 1), 2))
    layer = pipeline.chunks[0].get_submodule("layers.1.linear")
    assert isinstance(layer, nn.Linear)
    execute_pipeline(iter([MODEL.batch(4)]), pipeline)
    rank = current_context().rank
    if rank in replicas:
        layer.weight = nn.Parameter(layer.weight.detach().clone())
    told = refused(lambda: execute_pipeline(iter([MODEL.batch(4)]), pipeline))[0]
    if rank not in replicas:
        layer.weight = nn.Parameter(layer.weight.detach().clone())
    pipeline.zero_grad()
    execute_pipeline(iter([MODEL.batch(4)]), pipeline)
    return told, plain(layer.weight.grad).flatten().tolist()


def test_a_weight_that_some_replicas_replace_is_refused() -> None:
    found = run_threads(replace_on, 3, 1, data=3)
    for message, gradient in found:
        assert "rank 1 is a replica of rank 0, but has 'chunks.0.layers.1.linear.weight'" in message
        assert "replaced since the last step" in message
        assert gradient == found[0][1]


def convert_one_replica() -> str:
    pipeline = build(MODEL, schedule_of(("1f1b", 1, 1), 2))
    execute_pipeline(iter([MODEL.batch(4)]), pipeline)
    if current_context().rank == 1:
        pipeline.float()
    return refused(lambda: execute_pipeline(iter([MODEL.batch(4)]), pipeline))[0]


def test_replicas_of_unlike_dtypes_are_refused() -> None:
    for message in run_threads(convert_one_replica, 2, data=2):
        assert "rank 1 is a replica of rank 0, but has 'chunks.0.layers.0.scale': shape (6,), torch.float32" in message


def replace_before_the_pipeline() -> list[Any]:
    schedule, rank = schedule_of(("1f1b", 2, 1), 2), current_context().pipeline_rank
    chunks = MODEL.chunks(schedule, rank)
    MODEL.tie(chunks, schedule)
    [words] = [module for module in chunks.modules() if isinstance(module, Words)]
    words.weight = nn.Parameter(torch.full_like(words.weight, rank + 1.0))
    pipeline = Pipeline(chunks, schedule, criterion=MODEL.criterion)
    execute_pipeline(iter([MODEL.batch(4)]), pipeline)
    return [plain(words.weight).tolist(), plain(words.weight.grad).tolist()]


def test_a_tie_outlives_its_parameter() -> None:
    first, second = run_threads(replace_before_the_pipeline, 2)
    assert first == second
    assert first[0][0][0] == 1.0


def fail(*_: object) -> torch.Tensor:
    raise ValueError("on purpose")


def fail_in_a_step(change: Change) -> list[Gradients]:
    """A step after a change that fails is followed by one that works."""
    pipeline = build(MODEL, schedule_of(("1f1b", 2, 1), 2))
    batch = MODEL.batch(4)
    change(pipeline)
    if current_context().pipeline_rank:
        pipeline.runner.criterion = fail
    with pytest.raises(PipelineError):
        execute_pipeline(iter([batch]), pipeline)
    pipeline.runner.criterion = MODEL.criterion
    pipeline.zero_grad()
    execute_pipeline(iter([batch]), pipeline)
    return [gradients_of(pipeline)]


def test_a_failed_step_forgets_no_change() -> None:
    for [gradients] in run_threads(fail_in_a_step, 2, replace_words):
        require_near(gradients, expected(1))
