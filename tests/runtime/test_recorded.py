"""With graph=True, steps that repeat have the bits of steps without it, and what cannot be recorded is one clear error.
A stand-in records and replays on CPUs, since no GPU is needed for what the engine does around its graphs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow import (
    Pipeline,
    Schedule,
    UsageError,
    Zero,
    clip_grad_norm_,
    execute_pipeline,
    make_schedule,
)
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.runtime.program.graphs import WARM
from pipeflow.testing import RankError, run_threads
from pipeflow.testing.models import WIDTH, KeywordModel, Layer, PlainModel, TiedModel, TinyModel, TreeModel, Words
from tests.losses.forms import Loss, mean_ce, with_z_loss_of_all
from tests.losses.words import Words as WordsModule
from tests.losses.words import batch_of
from tests.runtime.recorder import recorders
from tests.runtime.work import build, plain, schedule_of

MICROBATCHES, STEPS = 4, WARM + 4


class Ignoring(TiedModel):
    """A language model, in each of whose batches other labels do not count."""

    def batch(self, samples: int, *, length: int = 3, seed: int = 0) -> tuple[Any, Any]:
        words, labels = super().batch(samples, length=length, seed=seed)
        ignored = torch.rand(labels.shape, generator=torch.Generator().manual_seed(seed)) < 0.3
        ignored[:, 0] = False
        return words, labels.masked_fill(ignored, -100)


class Turned(Ignoring):
    """Whose tied weight is not contiguous, so that its gradient lies in no row when it is summed."""

    def stage(self, start: int, end: int) -> nn.Module:
        made = super().stage(start, end)
        for module in made.modules():
            if isinstance(module, Words):
                module.weight.data = module.weight.data.t().contiguous().t()
        return made


def train(
    pipeline: Pipeline, batch: Callable[[int], Any], shards: bool = False, steps: int = STEPS, **call: Any
) -> list[Any]:
    """What each step leaves: loss, norm, gradients, weights and buffers. Some add the gradients of two calls, and some
    keep the tensors of gradients.
    """
    inner = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    optimizer = Zero(pipeline, inner) if shards else inner
    found = []
    for step in range(steps):
        for part in range(1 + step % 2):
            told = execute_pipeline(iter([batch(2 * step + part)]), pipeline, broadcast_loss=True, **call)
        norm = clip_grad_norm_(pipeline, 0.05)
        state = [plain(each) for each in (*pipeline.parameters(), *pipeline.buffers())]
        found.append([plain(told.loss), plain(told.losses), plain(norm), gradients_of(pipeline), state])
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 3 != 0)
    return found


def gradients_of(pipeline: Pipeline) -> Any:
    """This rank's gradients, by name."""
    return {name: plain(each.grad) for name, each in pipeline.named_parameters() if each.grad is not None}


def same(one: Any, other: Any) -> bool:
    """Whether all numbers have the same bits."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and same(list(one.values()), list(other.values()))
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool((one == other).all())


def require_bits(run: Callable[..., Any], ranks: int, *arguments: Any, data: int = 1) -> Any:
    """`run(*arguments, graph)` returns the same on all ranks with graphs and without."""
    wanted = run_threads(run, ranks, *arguments, False, data=data)
    with recorders() as counted:
        found = run_threads(run, ranks, *arguments, True, data=data)
    assert same(found, wanted)
    assert counted["replays"] >= 3 * counted["graphs"] > 0
    return found


def of_model(model: TinyModel, schedule: Schedule, shards: bool, options: dict[str, Any], graph: bool) -> list[Any]:
    replica = current_context().data_rank
    pipeline = build(model, schedule, graph=graph, **options)
    return train(pipeline, lambda step: model.batch(8, seed=2 * step + replica), shards)


@pytest.mark.parametrize(
    ("model", "variant"),
    [
        (PlainModel(), ("1f1b", 3, 1)),
        (PlainModel(), ("dualpipe-v", 2, 2)),
        (PlainModel(), ("chimera", 2, 1)),
        (Ignoring(), ("zb-v", 2, 2)),
        (Ignoring(), ("gpipe", 2, 1)),
        (Turned(), ("1f1b", 2, 1)),
        (KeywordModel(), ("interleaved-1f1b", 2, 2)),
        (TreeModel(), ("zb-v", 2, 2)),
    ],
    ids=str,
)
def test_schedules(model: TinyModel, variant: tuple[str, int, int]) -> None:
    require_bits(of_model, variant[1], model, schedule_of(variant, MICROBATCHES), False, {})


@pytest.mark.parametrize(
    "options",
    [
        {"autocast": torch.bfloat16},
        {"gradient_accumulation_fusion": True},
        {"tensor_shape": (None, 3, WIDTH)},
        {"weigh": lambda labels: (labels != -100).sum()},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options(options: dict[str, Any]) -> None:
    require_bits(of_model, 2, Ignoring(dtype=torch.float32), schedule_of(("zb-h1", 2, 1), MICROBATCHES), False, options)


def in_a_region(graph: bool) -> list[Any]:
    """Steps of two calls within one region of autocast, which keeps converted weights from call to call."""
    model, found = Ignoring(dtype=torch.float32), list[Any]()
    pipeline = build(model, schedule_of(("zb-h1", 2, 1), MICROBATCHES), graph=graph)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    for step in range(WARM + 1):
        with torch.autocast("cpu", torch.bfloat16):
            for part in range(2):
                execute_pipeline(iter([model.batch(8, seed=2 * step + part)]), pipeline)
        found.append(gradients_of(pipeline))
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_a_region_around_calls() -> None:
    require_bits(in_a_region, 2)


@pytest.mark.parametrize("shards", [False, True])
def test_replicas(shards: bool) -> None:
    require_bits(of_model, 4, Ignoring(), schedule_of(("1f1b", 2, 1), MICROBATCHES), shards, {}, data=2)


def of_words(loss: Loss, own: bool, graph: bool) -> list[Any]:
    """A module that is cut, and may compute its own loss."""
    words, targets = batch_of(8)

    def batch(step: int) -> Any:
        pair = words.roll(step, 1), targets.roll(step, 0)
        return dict(zip(("idx", "targets"), pair, strict=True)) if own else pair

    schedule, criterion = schedule_of(("zb-h1", 2, 1), MICROBATCHES), None if own else loss
    pipeline = Pipeline.from_module(WordsModule(loss), schedule, batch(0), criterion=criterion, graph=graph)
    return train(pipeline, batch)


@pytest.mark.parametrize("own", [False, True])
def test_a_module_that_is_cut(own: bool) -> None:
    require_bits(of_words, 2, mean_ce, own)


def test_terms_with_divisors_of_their_own_are_computed_without_graphs() -> None:
    require_bits(of_words, 2, with_z_loss_of_all, False)


class Noisy(nn.Module):
    """Draws random numbers, keeps running statistics, and has a weight that is not used and one that is frozen."""

    highest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused, self.frozen = (Layer(index, torch.float64) for index in range(3))
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
        self.register_buffer("highest", torch.zeros(1, dtype=torch.float64))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.norm(self.frozen(self.layer(hidden)))
        self.highest.copy_(torch.maximum(self.highest, hidden.detach().max()))
        return functional.dropout(hidden, 0.3) + self.highest


def of_noise(ranks: int, graph: bool) -> list[Any]:
    if ranks == 1:  # else threads would share the generator
        torch.manual_seed(0)
    stage = Noisy() if ranks == 1 else nn.Sequential(Noisy().norm, Layer(5, torch.float64))
    schedule = make_schedule("1f1b", ranks=1, microbatches=MICROBATCHES)
    pipeline = Pipeline(stage, schedule, criterion=functional.mse_loss, graph=graph)
    place = current_context().data_rank
    return train(pipeline, lambda step: PlainModel().batch(8, seed=2 * step + place))


def test_random_numbers_buffers_and_unused_weights() -> None:
    [steps] = require_bits(of_noise, 1, 1)
    assert not [name for name in steps[-1][3] if "unused" in name or "frozen" in name]


def test_replicas_share_buffers_that_graphs_change() -> None:
    require_bits(of_noise, 2, 2, data=2)


class Handing(nn.Module):
    """Hands on what it received, as it is and as a view, and gives the gradient on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, hidden: Any) -> Any:
        first, second = hidden if isinstance(hidden, tuple) else (hidden, hidden * self.weight)
        return first, second.view(-1, WIDTH).view(second.shape)


def of_handing(graph: bool) -> list[Any]:
    schedule = schedule_of(("zb-v", 2, 2), MICROBATCHES)
    chunks = nn.ModuleList(Handing() for _ in range(2))

    def criterion(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        return functional.mse_loss(output[0] + output[1], labels)

    pipeline = Pipeline(chunks, schedule, criterion=criterion, graph=graph)
    return train(pipeline, lambda step: PlainModel().batch(8, seed=step))


def test_what_is_handed_on() -> None:
    require_bits(of_handing, 2)


BETWEEN = "", "no weight", "", "outputs", "", "trace", "evaluation", "", "longer", "replaced", "", "", "", "", ""


def between(graph: bool) -> list[Any]:
    """Steps that graphs were not made for, between others. Graphs are recorded again after weights were replaced, and
    after texts of another length.
    """
    model, found = Ignoring(), list[Any]()
    pipeline = build(model, schedule_of(("1f1b", 2, 1), MICROBATCHES), graph=graph)
    for step, kind in enumerate([""] * (WARM + 2) + [*BETWEEN]):
        words, labels = model.batch(8, length=4 if kind == "longer" else 3, seed=step)
        if kind == "no weight":
            labels[:2] = -100  # of the first microbatch
        if kind == "replaced":
            for parameter in pipeline.parameters():
                parameter.data = parameter.data * 2
        told = execute_pipeline(
            iter([(words, labels)]),
            pipeline,
            return_outputs=kind == "outputs",
            trace=kind == "trace",
            forward_only=kind == "evaluation",
            broadcast_loss=True,
        )
        outputs = [] if told.outputs is None else plain(told.outputs)
        found.append([plain(told.loss), outputs, gradients_of(pipeline)])
    return found


def test_other_steps_between() -> None:
    require_bits(between, 2)


class Scaling(nn.Module):
    """Reads a number that a script changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = Layer(0, torch.float64), 1.0

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden) * self.factor  # type: ignore[no-any-return]  # as torch has it


def of_changes(graph: bool) -> list[Any]:
    """Steps between which a script changes a number, how an input is made, and whether it is the label, too."""
    pipeline = Pipeline(Scaling(), make_schedule("1f1b", ranks=1, microbatches=2), criterion=functional.mse_loss)
    pipeline = stage_with(Scaling()) if graph else pipeline
    source, found = torch.ones(4, 3, WIDTH, dtype=torch.float64, requires_grad=True), list[Any]()
    for step in range(WARM + 8):
        values, labels = PlainModel().batch(4, seed=step)
        labels = values if step <= WARM else labels
        pipeline.chunks[0].factor = 2.0 if step % 4 == 1 else 1.0  # type: ignore[assignment]  # a tensor for mypy
        execute_pipeline(iter([(values * source if step % 4 == 2 else values, labels)]), pipeline)
        found.append([gradients_of(pipeline), plain(source.grad if source.grad is not None else source)])
    return found


def test_what_a_script_changes_between() -> None:
    require_bits(of_changes, 1)


def of_what_is_kept(graph: bool) -> list[Any]:
    """Losses and gradients of earlier steps stay what they were."""
    model = PlainModel()
    pipeline = build(model, schedule_of(("1f1b", 2, 1), MICROBATCHES), graph=graph)
    told, gradients = [], []
    for step in range(STEPS):
        pipeline.zero_grad()
        told.append(execute_pipeline(iter([model.batch(8, seed=step)]), pipeline, broadcast_loss=True))
        gradients.append([plain(each.grad) for each in pipeline.parameters()])
    return [[[plain(each.loss), plain(each.losses)] for each in told], gradients]


def test_losses_of_earlier_steps_stay() -> None:
    require_bits(of_what_is_kept, 2)


# What cannot be recorded


def stage_with(module: nn.Module, name: str = "1f1b", criterion: Any = functional.mse_loss, **options: Any) -> Pipeline:
    schedule = make_schedule(name, ranks=1, microbatches=2)
    return Pipeline(module, schedule, criterion=criterion, graph=True, **options)


def layer() -> nn.Module:
    return nn.Sequential(Layer(0, torch.float64))


def compiled_before() -> None:
    module = layer()
    module._compiled_call_impl = module._call_impl  # as module.compile() does
    stage_with(module)


def compiled_later() -> None:
    stage_with(layer()).compile()


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(RankError, match=r"UsageError: graph=True records CUDA graphs, but this rank computes on cpu: "):
        run_threads(lambda: stage_with(layer()), 1)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: stage_with(layer(), "gpipe", loss_over="batch"), 'because loss_over="batch" computes the loss'),
        (lambda: stage_with(layer(), overlap=lambda forward, backward: None), "because overlap= runs computations"),
        (compiled_before, "because torch.compile was applied to modules"),
        (compiled_later, "records its stages itself: compile one without it"),
    ],
)
def test_a_pipeline_that_cannot_be_recorded(make: Callable[[], object], why: str) -> None:
    with recorders(), pytest.raises(RankError, match=f"UsageError: .*{why}"):
        run_threads(make, 1)


def tensor_ranks() -> None:
    stage_with(layer())


def test_tensor_ranks_cannot_be_recorded() -> None:
    with recorders(), pytest.raises(RankError, match="because layers of tensor ranks communicate"):
        run_threads(tensor_ranks, 2, tensor=2)


class Waiting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(0, torch.float64)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden) * (1 if hidden.sum().item() else 2)  # type: ignore[no-any-return]  # as torch has it


class Counting(Waiting):
    calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.layer(hidden)  # type: ignore[no-any-return]  # as torch has it


class Replacing(Waiting):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, dtype=torch.float64))

    def forward(self, hidden: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + hidden.detach().mean()
        return self.layer(hidden) + self.mean  # type: ignore[no-any-return]  # as torch has it


class _Scale(torch.autograd.Function):
    """Gives a weight a new gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(hidden)
        return hidden * weight.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        added = (gradient * ctx.saved_tensors[0]).sum()
        ctx.weight.grad = added if ctx.weight.grad is None else ctx.weight.grad + added
        return gradient * ctx.weight.detach(), None


class Moving(Waiting):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, hidden: Tensor) -> Tensor:
        return _Scale.apply(self.layer(hidden), self.weight)  # type: ignore[no-any-return, no-untyped-call]  # as torch has it


def hooked() -> nn.Module:
    module = Layer(0, torch.float64)
    module.scale.register_hook(lambda gradient: 2 * gradient)
    return module


def until_recorded(make: Callable[[], nn.Module]) -> list[str]:
    """The error of the step that was to be recorded, in which no gradient and no buffer has changed."""
    pipeline, told = stage_with(make()), []
    for step in range(WARM + 2):
        pipeline.zero_grad()
        before = [plain(each) for each in pipeline.state_dict().values()]
        try:
            execute_pipeline(iter([PlainModel().batch(4, seed=step)]), pipeline)
        except UsageError as error:
            told.append(f"step {step}: {error}")
            assert not gradients_of(pipeline)
            assert same([plain(each) for each in pipeline.state_dict().values()], before)
            break
    return told


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            Waiting,
            r"^step 3: 0F0 cannot be recorded as a CUDA graph \(operation not permitted when stream is capturing\)",
        ),
        (Counting, "^step 3: forwards put another object into calls of stage 0, which graphs would not do: "),
        (Replacing, "^step 3: forwards put another object into _buffers of stage 0, which graphs would not do: "),
        (
            Moving,
            r"^step 3: 0B0 cannot be recorded as a CUDA graph \(the gradient of a weight of shape \(\) is not ",
        ),
        (hooked, "^step 3: a weight has a hook on its gradient, which graphs do not call: "),
    ],
)
def test_a_step_that_cannot_be_recorded_changes_nothing(make: Callable[[], nn.Module], why: str) -> None:
    with recorders():
        [[told]] = run_threads(until_recorded, 1, make)
    assert re.search(why, told), told


def keep_what_comes(kept: list[Tensor]) -> None:
    model = PlainModel()
    pipeline = build(model, schedule_of(("1f1b", 2, 1), 2), graph=True)
    if current_context().pipeline_rank == 1:
        pipeline.chunks[0].register_forward_hook(lambda _, given, __: kept.append(given[0].detach()))
    for step in range(WARM + 1):
        execute_pipeline(iter([model.batch(4, seed=step)]), pipeline)


def test_what_somebody_holds_is_not_overwritten() -> None:
    with recorders(), pytest.raises(RankError, match="UsageError: something holds what a stage received, which graphs"):
        run_threads(keep_what_comes, 2, [])


def keep_in_another_step(graph: bool) -> list[Any]:
    """What the last stage received in a step that it computes without graphs, since it returns its outputs."""
    model, kept = PlainModel(), list[Tensor]()
    pipeline = build(model, schedule_of(("1f1b", 2, 1), MICROBATCHES), graph=graph)
    for step in range(WARM + 4):
        others = step == WARM + 1
        if others and current_context().pipeline_rank == 1:
            hook = pipeline.chunks[0].register_forward_hook(lambda _, given, __: kept.append(given[0].detach()))
        execute_pipeline(iter([model.batch(8, seed=step)]), pipeline, return_outputs=others)
        if others and current_context().pipeline_rank == 1:
            hook.remove()
    return [plain(each) for each in kept]


def test_what_other_steps_received_stays() -> None:
    require_bits(keep_in_another_step, 2)
