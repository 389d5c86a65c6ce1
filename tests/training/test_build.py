"""Stages of a list of layers: every layer once, under its name of the whole model, and they train as the whole does."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow import LayerCosts, Pipeline, Schedule, UsageError, build_stages, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.tensor import ColumnParallelLinear, VocabParallelEmbedding
from pipeflow.testing import RankError, run_threads
from pipeflow.testing.models import WIDTH, WORDS, Layer, PlainModel, Words
from pipeflow.training import cut_layers
from pipeflow.training.checkpoint.pieces import local_tensors

LAYERS, MICROBATCHES = 9, 4
MODEL = PlainModel(LAYERS)
MAKERS = [partial(Layer, index, torch.float64) for index in range(LAYERS)]
SCHEDULES: dict[str, tuple[str, dict[str, int]]] = {
    "1f1b": ("1f1b", {}),
    "interleaved": ("interleaved-1f1b", {"chunks": 2}),
    "zb-v": ("zb-v", {}),
    "chimera": ("chimera", {}),
}
WEIGHTS = (9, 1, 1, 1, 1, 1, 1, 1, 9)
PARTITIONS: dict[str, Callable[[int], Any]] = {  # of so many stages
    "uniform": lambda stages: "uniform",
    "parameters": lambda stages: "parameters",
    "weights": lambda stages: WEIGHTS,
    "costs": lambda stages: LayerCosts(WEIGHTS, WEIGHTS, WEIGHTS, WEIGHTS),
    "pairs": lambda stages: list(pairwise([*range(stages), LAYERS])),
}


def schedule_of(name: str, ranks: int) -> Schedule:
    family, options = SCHEDULES[name]
    return make_schedule(family, ranks=ranks, microbatches=MICROBATCHES, **options)


def whole() -> nn.Sequential:
    return nn.Sequential(*(make() for make in MAKERS))


def train(layers: Callable[[], Any], name: str, how: str) -> tuple[list[list[str]], float, dict[str, Any]]:
    """Of this rank: the names in each chunk, the loss, and every gradient by the name that checkpoints give it."""
    context = current_context()
    schedule = schedule_of(name, context.pipeline_size)
    stages = schedule.placement.num_stages
    chunks = build_stages(layers(), schedule.placement, partition=PARTITIONS[how](stages))
    names = [list(chunk.state_dict()) for chunk in chunks]
    pipeline = Pipeline(chunks, schedule, criterion=functional.mse_loss)
    output = execute_pipeline(iter([MODEL.batch(8)]), pipeline, broadcast_loss=True)
    assert output.loss is not None
    told = {each.name for each in local_tensors(pipeline, context, None)}
    gradients = {
        name: parameter.grad.numpy()
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if parameter.grad is not None
    }
    assert set(gradients) <= told
    return names, output.loss.item(), gradients


@pytest.mark.some(14)
@pytest.mark.parametrize("how", PARTITIONS)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("layers", [whole, lambda: MAKERS], ids=["modules", "callables"])
def test_stages_are_the_whole_model_and_train_as_it_does(layers: Callable[[], Any], name: str, how: str) -> None:
    model = whole()
    inputs, labels = MODEL.batch(8)
    loss = functional.mse_loss(model(inputs), labels)
    loss.backward()
    results, placement = run_threads(train, 2, layers, name, how), schedule_of(name, 2).placement
    held: dict[int, list[str]] = {}
    for rank, (names, found, gradients) in enumerate(results):
        for stage, own in zip(placement.stages_of(rank), names, strict=True):
            assert held.setdefault(stage, own) == own  # a bidirectional schedule has a stage twice, the same one
        assert abs(found - loss.item()) <= 1e-12
        assert set(gradients) == {key for own in names for key in own}
        for key, gradient in gradients.items():
            expected = model.get_parameter(key).grad
            torch.testing.assert_close(torch.from_numpy(gradient), expected, rtol=0, atol=1e-12)
    assert [key for stage in sorted(held) for key in held[stage]] == list(model.state_dict())
    assert all(held[stage] for stage in range(placement.num_stages))


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7, 9])
@pytest.mark.parametrize("how", PARTITIONS)
def test_parts_follow_each_other_and_cover_all(how: str, stages: int) -> None:
    parts = cut_layers(MAKERS, stages, PARTITIONS[how](stages))
    assert [start for start, _ in parts] == [0, *(end for _, end in parts[:-1])]
    assert parts[-1][1] == LAYERS
    assert all(start < end for start, end in parts)
    assert len(parts) == stages


def test_parameters_weigh_what_they_are_also_where_nothing_is_made_yet() -> None:
    sizes = (100, 10, 10, 10, 10, 60)
    makers = [partial(nn.Linear, 1, size, bias=False) for size in sizes]
    expected = [(0, 1), (1, 6)]
    assert cut_layers(makers, 2, "parameters") == expected
    assert cut_layers([make() for make in makers], 2, "parameters") == expected
    assert cut_layers(makers, 2) == [(0, 3), (3, 6)]


def test_parameters_are_counted_without_memory_for_them() -> None:
    makers = [partial(nn.Linear, 10**6, size, bias=False) for size in (10**9, 10**6, 10**6)]
    assert cut_layers(makers, 2, "parameters") == [(0, 1), (1, 3)]


def test_a_rank_makes_its_own_layers_alone() -> None:
    made: list[int] = []

    def maker(index: int) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            made.append(index)
            return nn.Linear(2, 2)

        return make

    def build() -> list[str]:
        schedule = schedule_of("interleaved", 2)
        return [
            name for name, _ in build_stages([maker(index) for index in range(8)], schedule.placement).named_children()
        ]

    assert run_threads(build, 2) == [["0", "1"], ["0", "1"]]
    assert sorted(made) == list(range(8))


def test_names_of_a_sequential_are_kept() -> None:
    model = nn.Sequential(OrderedDict([("first", nn.Linear(2, 3)), ("act", nn.Tanh()), ("last", nn.Linear(3, 1))]))
    [chunk] = build_stages(model)
    assert chunk.state_dict().keys() == model.state_dict().keys()
    inputs = torch.ones(1, 2)
    assert torch.equal(chunk(inputs), model(inputs))


def first_weights(name: str, seed: int | None) -> dict[str, Any]:
    schedule = schedule_of(name, current_context().pipeline_size)
    makers = [partial(nn.Linear, WIDTH, WIDTH)] * 8
    chunks = build_stages(makers, schedule.placement, seed=seed)
    return {key: value.numpy() for chunk in chunks for key, value in chunk.state_dict().items()}


def test_first_weights_follow_from_the_seed_and_the_layer_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    [expected] = run_threads(first_weights, 1, "1f1b", 3)
    assert torch.equal(before, torch.get_rng_state())
    for name, ranks in (("1f1b", 4), ("interleaved", 2), ("zb-v", 2), ("chimera", 4)):
        for of_rank in run_threads(first_weights, ranks, name, 3):
            assert of_rank
            for key, value in of_rank.items():
                assert (value == expected[key]).all(), key
    [other] = run_threads(first_weights, 1, "1f1b", 4)
    assert all((other[key] != value).any() for key, value in expected.items())
    assert (expected["0.weight"] != expected["1.weight"]).any()


class Head(nn.Module):
    """Scores words with the embedding's weight."""

    def __init__(self, words: Words) -> None:
        super().__init__()
        self.weight = words.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.weight)


def tied() -> nn.Sequential:
    words = Words(torch.float64)
    return nn.Sequential(words, *(make() for make in MAKERS[:6]), Head(words))


def text() -> tuple[Tensor, Tensor]:
    words = torch.randint(WORDS, (8, 4), generator=torch.Generator().manual_seed(0))
    return words[:, :-1], words[:, 1:]


def score(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def train_tied(name: str) -> dict[str, Any]:
    """The weights after three steps."""
    schedule = schedule_of(name, current_context().pipeline_size)
    chunks = build_stages(tied(), schedule.placement)
    pipeline = Pipeline(chunks, schedule, criterion=score)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.3)
    for _ in range(3):
        optimizer.zero_grad()
        execute_pipeline(iter([text()]), pipeline)
        optimizer.step()
    return {key: value.numpy() for chunk in chunks for key, value in chunk.state_dict().items()}


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("name", "ranks"), [("1f1b", 1), ("interleaved", 1), *((name, ranks) for name in SCHEDULES for ranks in (2, 4))]
)
def test_what_layers_of_several_stages_share_is_tied(name: str, ranks: int) -> None:
    model, (inputs, labels) = tied(), text()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(3):
        optimizer.zero_grad()
        score(model(inputs), labels).backward()
        optimizer.step()
    expected, found = model.state_dict(), set()
    for of_rank in run_threads(train_tied, ranks, name):
        found |= set(of_rank)
        for key, value in of_rank.items():
            torch.testing.assert_close(torch.from_numpy(value), expected[key], rtol=0, atol=1e-12)
    assert found == set(expected)


def log_numbers() -> list[str]:
    schedule = schedule_of("zb-v", 2)
    handler = Keeping(current_context().rank)
    logging.getLogger("pipeflow").addHandler(handler)
    try:
        words = partial(VocabParallelEmbedding, WORDS, WIDTH)  # an odd number, which two tensor ranks pad
        build_stages([words, *MAKERS[:2], partial(ColumnParallelLinear, WIDTH, 4)], schedule.placement)
    finally:
        logging.getLogger("pipeflow").removeHandler(handler)
    return handler.kept


class Keeping(logging.Handler):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.kept: list[str] = []
        self.addFilter(lambda _: current_context().rank == rank)

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("number of parameters"):
            self.kept.append(record.getMessage())


def test_the_parameters_of_each_stage_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pipeflow")
    told = run_threads(log_numbers, 8, tensor=2, data=2)
    layer = WIDTH * WIDTH + 2 * WIDTH
    assert told[0] == [
        f"number of parameters: {WORDS * WIDTH} on pipeline stage 0 (layers 0 to 0)",
        f"number of parameters: {4 * WIDTH + 4} on pipeline stage 3 (layers 3 to 3)",
    ]
    assert told[2] == [f"number of parameters: {layer} on pipeline stage {s} (layers {s} to {s})" for s in (1, 2)]
    assert [told[rank] for rank in (1, 3, 4, 5, 6, 7)] == [[]] * 6


class OwnForward(nn.Sequential):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


class OwnScale(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Tanh())
        self.scale = nn.Parameter(torch.ones(1))


def broken() -> nn.Module:
    raise KeyError("width")


@pytest.mark.parametrize(
    ("layers", "options", "message"),
    [
        (7, {}, "layers must be an nn.Sequential, or a list of modules and of callables that make them, got int"),
        ([nn.Tanh(), "Tanh"], {}, "layer 1 must be a module or a callable that makes one, got 'Tanh'"),
        ([dict], {}, "layer 0: <class 'dict'> must return a module, but returned a dict"),
        (OwnForward(nn.Tanh()), {}, "OwnForward has its own forward"),
        (OwnScale(), {}, "scale belongs to the OwnScale, not to one of its layers"),
        ([], {}, "num_layers must be an integer of at least 1, got 0"),
        (
            [nn.Tanh()],
            {"placement": schedule_of("1f1b", 2).placement},
            "the placement is for 2 ranks, but the pipeline has 1",
        ),
        ([nn.Tanh()], {"partition": "parameter"}, 'partition must be "uniform", "parameters", .* got \'parameter\''),
        ([nn.Tanh()], {"partition": [1, 2]}, r"needs one number for each of the 1 layers, got \[1, 2\]"),
        ([nn.Tanh()], {"partition": [-1.0]}, "must not be negative"),
        ([nn.Tanh()], {"partition": [(0, 2)]}, r"1 stages of 1 layers need 1 pairs \(start, end\).* got \[\(0, 2\)\]"),
        ([nn.Tanh()], {"partition": [(0, 0), (0, 1)]}, "1 stages of 1 layers need 1 pairs"),
        ([nn.LazyLinear(3)], {"partition": "parameters"}, "layer 0 has lazy parameters without a shape"),
    ],
)
def test_bad_layers_are_refused(layers: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_stages(layers, **options)


def test_an_error_of_a_callable_says_which_layer_it_was_to_make() -> None:
    with pytest.raises(KeyError, match="width") as caught:
        build_stages([nn.Tanh, broken])
    assert "while making layer 1" in caught.value.__notes__[0]


def build_too_few() -> None:
    build_stages([nn.Tanh()])


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(RankError, match="1 layers cannot fill 2 stages"):
        run_threads(build_too_few, 2)
