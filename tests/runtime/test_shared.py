"""Tied weights: one weight, whichever ranks hold copies of it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow import (
    Pipeline,
    PipelineSharedModuleWrapper,
    Placement,
    Schedule,
    UsageError,
    execute_pipeline,
    make_schedule,
)
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.models import WIDTH, WORDS, PlainModel, TiedModel, Words, initial
from tests.runtime.work import Gradients, build, gradients_of, plain, require_near, schedule_of

Variant = tuple[str, int, int]
EVERYWHERE = [("1f1b", 1, 1), ("interleaved-1f1b", 1, 2), ("1f1b", 2, 1), ("interleaved-1f1b", 2, 2), ("gpipe", 4, 1)]
MODEL = TiedModel()


def run_training(variant: Variant) -> tuple[list[float], dict[str, Any], list[Any]]:
    """Three steps of Adam; the losses, every weight, and the tied gradient after each step."""
    pipeline = build(MODEL, schedule_of(variant, 3))
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.1)
    losses, tied = [], []
    for seed in range(3):
        optimizer.zero_grad()
        output = execute_pipeline(iter([MODEL.batch(7, seed=seed)]), pipeline, broadcast_loss=True)
        optimizer.step()
        assert output.loss is not None
        losses.append(output.loss.item())
        tied.append(gradients_of(pipeline).get("words.weight"))
    return losses, {name.split(".", 2)[2]: plain(value) for name, value in pipeline.named_parameters()}, tied


def train_plain() -> tuple[list[float], dict[str, Tensor]]:
    module = MODEL.stage(0, MODEL.layers)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    losses = []
    for seed in range(3):
        optimizer.zero_grad()
        losses.append(MODEL.plain_step(MODEL.batch(7, seed=seed), module)[0].item())
        optimizer.step()
    return losses, dict(module.named_parameters())


def require_trained(results: list[tuple[list[float], dict[str, Any], list[Any]]]) -> None:
    losses, weights = train_plain()
    for told, mine, _ in results:
        assert told == pytest.approx(losses, rel=1e-10)
        for name, weight in mine.items():
            assert abs(weight - plain(weights[name])).max() < 1e-10
    copies = [mine["words.weight"].tobytes() for _, mine, _ in results if "words.weight" in mine]
    assert len(set(copies)) == 1
    for gradients in zip(*(tied for _, _, tied in results), strict=True):
        assert len({gradient.tobytes() for gradient in gradients if gradient is not None}) == 1


@pytest.mark.parametrize("variant", EVERYWHERE, ids=str)
def test_training_is_that_of_the_plain_model(variant: Variant) -> None:
    require_trained(run_threads(run_training, variant[1], variant))


@pytest.mark.slow
def test_training_over_gloo_is_too() -> None:
    require_trained(run_processes(run_training, 4, ("1f1b", 4, 1)))


def vee() -> Schedule:
    """Rank 0 holds the first and the last stage."""
    rows = ("0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1", "1F0,1F1,2F0,2F1,2B0,1B0,2B1,1B1")
    return Schedule.from_csv("\n".join(rows), Placement.vee(2))


def run_vee() -> tuple[Gradients, int]:
    pipeline = build(MODEL, vee())
    execute_pipeline(iter([MODEL.batch(5)]), pipeline)
    return gradients_of(pipeline), len({id(p) for p in pipeline.parameters() if p.shape == (WORDS, WIDTH)})


def test_both_copies_on_one_rank_of_several_are_one_object() -> None:
    _, expected = MODEL.plain_step(MODEL.batch(5))
    (first, copies), (second, none) = run_threads(run_vee, 2)
    assert (copies, none) == (1, 0)
    require_near(first, expected)
    require_near(second, expected)


class Bare(nn.Module):
    """A stage whose tied weight is a parameter of its own."""

    def __init__(self, *, first: bool, scale: float = 1.0) -> None:
        super().__init__()
        self.first = first
        self.weight = nn.Parameter(initial(1, WORDS, WIDTH, dtype=torch.float64).detach() * scale)

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.embedding(hidden, self.weight) if self.first else functional.linear(hidden, self.weight)


@pytest.mark.parametrize("by_module", [False, True])
def test_a_single_rank_ties_by_object(by_module: bool) -> None:
    def run() -> None:
        stages = [Bare(first=True), Bare(first=False, scale=5.0)]
        wrapper = PipelineSharedModuleWrapper([0, 0])
        for stage in stages:
            wrapper.register_module(stage) if by_module else wrapper.register_parameter(stage.weight)
        schedule = schedule_of(("interleaved-1f1b", 1, 2), 2)
        pipeline = Pipeline(nn.ModuleList(stages), schedule, criterion=MODEL.criterion)
        assert stages[0].weight is stages[1].weight
        assert len(list(pipeline.parameters())) == 1
        execute_pipeline(iter([MODEL.batch(5)]), pipeline)
        weight = initial(1, WORDS, WIDTH, dtype=torch.float64)
        words, labels = MODEL.batch(5)
        MODEL.criterion(functional.linear(functional.embedding(words, weight), weight), labels).backward()
        assert weight.grad is not None
        require_near({"weight": plain(stages[0].weight.grad)}, {"weight": weight.grad})

    run_threads(run, 1)


def test_a_parameter_that_is_replaced_before_the_pipeline_is_missed(caplog: pytest.LogCaptureFixture) -> None:
    def run() -> None:
        stages = [Bare(first=True), Bare(first=False)]
        wrapper = PipelineSharedModuleWrapper([0, 0])
        for stage in stages:
            wrapper.register_parameter(stage.weight)
        stages[0].weight = nn.Parameter(stages[0].weight.detach())
        gc.collect()
        assert "a parameter that PipelineSharedModuleWrapper([0, 0]) registered was replaced" in caplog.text
        caplog.clear()
        wrapper.register_parameter(stages[0].weight)
        Pipeline(nn.ModuleList(stages), schedule_of(("interleaved-1f1b", 1, 2), 2), criterion=MODEL.criterion)
        assert stages[0].weight is stages[1].weight

    run_threads(run, 1)
    gc.collect()
    assert caplog.text == ""


def run_lowest_rank_wins() -> list[float]:
    rank = current_context().pipeline_rank
    stage = PlainModel().stage(rank, rank + 1)
    wrapper = PipelineSharedModuleWrapper([2, 1])
    other = PipelineSharedModuleWrapper((0, 1, 2))
    layer = stage.get_submodule(f"layers.{rank}.linear")
    parameters = list(layer.parameters())
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(rank)
    if rank in (1, 2):
        wrapper.register_parameter(parameters[0])
    other.register_parameter(parameters[1])
    Pipeline(stage, schedule_of(("1f1b", 3, 1), 2), criterion=PlainModel().criterion)
    return [parameter.flatten()[0].item() for parameter in parameters]


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", [run_threads, run_processes])
def test_the_lowest_ranks_values_win(start: Any) -> None:
    assert start(run_lowest_rank_wins, 3) == [[0.0, 0.0], [1.0, 0.0], [1.0, 0.0]]


def run_several() -> dict[str, Any]:
    """Three ranks share a bias, two of them a weight as well; one copy is not used by its stage."""
    rank = current_context().pipeline_rank
    layer, unused = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
    stage = nn.Sequential(layer)
    stage.unused = unused
    with torch.no_grad():
        for seed, parameter in enumerate(stage.parameters()):
            parameter.copy_(initial(seed, *parameter.shape, dtype=torch.float64))
    bias, weight = PipelineSharedModuleWrapper([0, 1, 2]), PipelineSharedModuleWrapper([0, 2])
    bias.register_parameter(stage.get_parameter("0.bias"))
    if rank in (0, 2):
        weight.register_parameter(stage.get_parameter("unused.weight" if rank == 2 else "0.weight"))
    stage.forward = layer.forward  # type: ignore[method-assign]
    pipeline = Pipeline(stage, schedule_of(("1f1b", 3, 1), 2), criterion=PlainModel().criterion)
    for _ in range(2):
        execute_pipeline(iter([PlainModel().batch(4)]), pipeline)
    return {name: plain(parameter.grad) for name, parameter in stage.named_parameters() if parameter.grad is not None}


def test_several_weights_are_tied_and_a_copy_may_have_no_gradient() -> None:
    layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(initial(0, WIDTH, WIDTH, dtype=torch.float64))
            layer.bias.copy_(initial(1, WIDTH, dtype=torch.float64))
    bias = layers[0].bias
    layers[1].bias = layers[2].bias = bias
    values, labels = PlainModel().batch(4)
    (2 * PlainModel().criterion(nn.Sequential(*layers)(values), labels)).backward()
    results = run_threads(run_several, 3)
    for layer, gradients in zip(layers, results, strict=True):
        wanted = {"0.bias": bias.grad, "0.weight": layer.weight.grad, "unused.weight": layers[0].weight.grad}
        require_near(gradients, {name: gradient for name, gradient in wanted.items() if gradient is not None})
    assert len({gradients["0.bias"].tobytes() for gradients in results}) == 1
    assert [sorted(gradients) for gradients in results] == [
        ["0.bias", "0.weight"],
        ["0.bias", "0.weight"],
        ["0.bias", "0.weight", "unused.weight"],
    ]


def run_all_alike() -> list[bytes]:
    """Every rank has the same layer, and its weight, which is stored the other way round, is one."""
    layer: Any = PlainModel(dtype=torch.float32).stage(0, 1).get_submodule("layers.0.linear")
    rank = current_context().pipeline_rank
    with torch.no_grad():
        layer.weight = nn.Parameter(layer.weight.t() * (rank + 1))
    PipelineSharedModuleWrapper(range(4)).register_module(layer)
    pipeline = Pipeline(layer, schedule_of(("1f1b", 4, 1), 3), criterion=PlainModel().criterion)
    told = [plain(layer.weight).tobytes()]
    for _ in range(2):
        execute_pipeline(iter([PlainModel(dtype=torch.float32).batch(7)]), pipeline)
        told.append(plain(layer.weight.grad).tobytes())
    return told


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", [run_threads, run_processes])
def test_four_copies_agree_to_the_bit(start: Any) -> None:
    first, *others = start(run_all_alike, 4)
    assert all(other == first for other in others)


def run_disagreeing(what: str) -> str:
    rank = current_context().pipeline_rank
    stage = Words(torch.float64)
    if not (what == "missing" and rank == 1):
        wrapper = PipelineSharedModuleWrapper([0, 1])
        rows = WORDS + 1 if what == "shape" and rank == 1 else WORDS
        stage.weight = nn.Parameter(torch.zeros(rows, WIDTH))
        wrapper.register_module(stage)
    with pytest.raises(UsageError) as caught:
        Pipeline(stage, schedule_of(("1f1b", 2, 1), 2))
    return str(caught.value)


@pytest.mark.some(2)
@pytest.mark.parametrize("start", [run_threads, run_processes])
@pytest.mark.parametrize(("what", "its"), [("missing", "[]"), ("shape", "[[(12, 6)]]")])
def test_ranks_that_disagree_are_told(start: Any, what: str, its: str) -> None:
    told = start(run_disagreeing, 2, what)
    assert told[0] == told[1]
    assert told[0] == f"ranks [0, 1] share a weight, but rank 0 registered shapes [[(11, 6)]] and rank 1 {its}"


def test_registrations_that_cannot_be() -> None:
    def run() -> None:
        rank = current_context().pipeline_rank
        with pytest.raises(UsageError, match=r"must be among those of the pipeline, 0..1"):
            PipelineSharedModuleWrapper([0, 2])
        with pytest.raises(UsageError, match="must be among those of the pipeline"):
            PipelineSharedModuleWrapper([])
        wrapper = PipelineSharedModuleWrapper([0, 1])
        wrapper.register_parameter(nn.Parameter(torch.ones(2)))
        with pytest.raises(UsageError, match=r"shapes \[\(3,\)\] cannot be tied to one of shapes"):
            wrapper.register_parameter(nn.Parameter(torch.ones(3)))
        single = PipelineSharedModuleWrapper([0])
        if rank == 1:
            with pytest.raises(UsageError, match=r"rank 1 is not among the ranks \[0\]"):
                single.register_parameter(nn.Parameter(torch.ones(2)))
        else:
            first = nn.Parameter(torch.ones(2))
            single.register_parameter(first)
            with pytest.raises(UsageError, match=r"shapes \[\(3,\)\] cannot be tied to one of shapes \[\(2,\)\]"):
                single.register_parameter(nn.Parameter(torch.ones(3)))

    run_threads(run, 2)


def test_without_a_context_there_is_nothing_to_share_in() -> None:
    with pytest.raises(UsageError, match=r"call pipeflow.launch\(pipeline=...\) first"):
        PipelineSharedModuleWrapper([0])


def test_a_second_pipeline_over_the_same_modules_is_tied_as_the_first() -> None:
    def run() -> float:
        context = current_context()
        rank, schedule = context.pipeline_rank, make_schedule("1f1b", ranks=2, microbatches=2)
        layer = nn.Linear(2, 2, bias=False)
        PipelineSharedModuleWrapper([0, 1]).register_module(layer)
        Pipeline(layer, schedule)
        with torch.no_grad():
            layer.weight.fill_(rank + 1.0)
        model = Pipeline(layer, schedule, criterion=lambda output, _: output.sum())
        assert float(layer.weight.detach().max()) == 1.0
        execute_pipeline(iter([(torch.ones(2, 2), None)]), model)
        assert layer.weight.grad is not None
        return float(layer.weight.grad.sum())

    first, second = run_threads(run, 2)
    assert first == second == 2 * (8.0 + 8.0)  # of two samples
