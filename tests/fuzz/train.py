"""Both sides of the comparison: a configuration trained on one rank of its spread, and with torch alone."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow import (
    MasterWeights,
    Pipeline,
    PipelineSharedModuleWrapper,
    Zero,
    clip_grad_norm_,
    execute_pipeline,
    load_checkpoint,
    save_checkpoint,
)
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.sharding import splits_of
from pipeflow.tensor import VocabParallelCrossEntropy
from pipeflow.testing import run_threads
from tests.fuzz.configuration import EVALUATION, IGNORED, Configuration, Spread, Task
from tests.fuzz.model import Stage, make_stage
from tests.training.hybrid import VOCABULARY, WIDTH, part_of

TOLERANCE = {torch.float64: 1e-9, torch.bfloat16: 0.05}  # of the largest value, or of 1

Values = dict[str, Tensor | None]
Part = list[tuple[int, int, int]] | None  # dimension, start, length of each that is split


@dataclass
class Trained:
    """What is there after a phase: per call its loss, the evaluation's last; per step the norm; the last step's
    gradients before they were clipped, and the weights, by global name; and of each weight that is split, which part.
    """

    losses: list[float | None] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: Values = field(default_factory=dict)
    weights: Values = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)


class Calls(NamedTuple):
    """What a side does, by phase and call; train is told whether to reduce."""

    train: Callable[[int, int, bool], float | None]
    evaluate: Callable[[int, int], float | None]
    clip: Callable[[float], float]


def compare(configuration: Configuration) -> None:
    """Raises AssertionError where what ranks have after a phase is not what torch alone has."""
    with tempfile.TemporaryDirectory() as folder:
        for phase, expected in enumerate(plain(configuration)):
            spread = configuration.spreads[phase]
            results: list[Trained] = run_threads(
                pipelined,
                spread.ranks,
                configuration,
                phase,
                Path(folder),
                deadline=300.0,
                tensor=spread.tensor,
                data=spread.data,
            )
            assert any(result.losses[0] is not None for result in results)
            if spread.zero and spread.data > 1:
                _require_owned(results, expected, spread.data)
            for result in results:
                _require_same(result, expected, TOLERANCE[configuration.task.dtype], f"phase {phase}, ")


def plain(configuration: Configuration) -> list[Trained]:
    """After each phase, with stock layers and torch alone."""
    task = configuration.task
    model = make_stage(task, 0, 1)
    if task.numbers == "half":
        model.double()
    if task.tied != "no":
        _tie_by_object([model])
    optimizer = task.make_optimizer(model)

    def run(phase: int, call: int) -> Tensor:
        batches = [configuration.batch(phase, call, replica) for replica in range(configuration.spreads[phase].data)]
        inputs, labels = zip(*batches, strict=True)
        whole = {name: torch.cat([each[name] for each in inputs]) for name in inputs[0]} if task.named else None
        logits = model(torch.cat(inputs)) if whole is None else model(**whole)
        return functional.cross_entropy(logits.flatten(0, 1), torch.cat(labels).flatten(), ignore_index=IGNORED)

    def train(phase: int, call: int, reduce: bool) -> float:
        loss = run(phase, call)
        loss.backward()
        return loss.item()

    def evaluate(phase: int, call: int) -> float:
        with torch.no_grad():
            return run(phase, call).item()

    def clip(max_norm: float) -> float:
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()

    results = []
    for phase in range(len(configuration.spreads)):
        trained = _train(configuration, phase, model, optimizer, Calls(train, evaluate, clip))
        trained.weights = {name: value.detach().clone() for name, value in _named(model)}
        results.append(trained)
    return results


def pipelined(configuration: Configuration, phase: int, folder: Path) -> Trained:
    """After a phase, on one rank of its spread: the first saves, the others load."""
    spread, context = configuration.spreads[phase], current_context()
    model = _build(configuration.task, spread)
    optimizer = configuration.task.make_optimizer(model)
    optimizer = Zero(model, optimizer) if spread.zero else optimizer
    masters = MasterWeights(model, optimizer) if spread.masters else None
    if phase > 0:
        load_checkpoint(folder / "saved", model, masters or optimizer)

    def run(call: int, *, forward_only: bool = False, reduce: bool = True) -> float | None:
        output = execute_pipeline(
            iter([configuration.batch(phase, call, context.data_rank)]),
            model,
            forward_only=forward_only,
            trace=spread.traced and call % 2 == 0,
            reduce=reduce,
            schedule=configuration.schedule(phase, call),
        )
        return None if output.loss is None else output.loss.item()

    def clip(max_norm: float) -> float:
        return clip_grad_norm_(model, max_norm).item()

    def train(phase: int, call: int, reduce: bool) -> float | None:
        return run(call, reduce=reduce)

    def evaluate(phase: int, call: int) -> float | None:
        return run(call, forward_only=True)

    trained = _train(configuration, phase, model, masters or optimizer, Calls(train, evaluate, clip))
    trained.weights = {_global(name): value.detach() for name, value in _named(model)}
    splits = splits_of(model)
    trained.parts = {_global(name): part_of(value, splits, context.tensor_rank) for name, value in _named(model)}
    if phase < len(configuration.spreads) - 1:
        save_checkpoint(folder / "saved", model, masters or optimizer, step=1)
    return trained


def _train(
    configuration: Configuration,
    phase: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    calls: Calls,
) -> Trained:
    """The loop of both sides."""
    task, trained = configuration.task, Trained()
    for step in range(configuration.steps[phase]):
        task.freeze(model, phase + step)
        optimizer.zero_grad(set_to_none=step == 0 or not task.zeroes)
        if task.evaluates:
            trained.losses.append(calls.evaluate(phase, EVALUATION - 1 - step))
        for micro in range(task.accumulation):
            reduce = micro == task.accumulation - 1
            trained.losses.append(calls.train(phase, step * task.accumulation + micro, reduce))
        gradients = {_global(name): value.grad for name, value in _named(model)}
        trained.gradients = {name: None if grad is None else grad.clone() for name, grad in gradients.items()}
        if task.max_norm is not None:
            trained.norms.append(calls.clip(task.max_norm))
        optimizer.step()
    trained.losses.append(calls.evaluate(phase, EVALUATION))
    return trained


def _build(task: Task, spread: Spread) -> Pipeline:
    """This rank's Pipeline."""
    context, placement = current_context(), spread.schedule.placement
    stages = placement.stages_of(context.pipeline_rank)
    pieces = [make_stage(task, stage, placement.num_stages).split(spread) for stage in stages]
    if task.tied == "object":
        _tie_by_object(pieces)
    task.freeze(nn.ModuleList(pieces), 0)
    if task.tied != "no":
        wrapper = PipelineSharedModuleWrapper([*placement.ranks_of(0), *placement.ranks_of(placement.num_stages - 1)])
        for module in (module for piece in pieces for module in (piece.words, piece.head) if module is not None):
            wrapper.register_module(module)
    length = 4 // spread.tensor if spread.sequence_parallel else 4
    microbatch = spread.samples[0] // spread.schedule.num_microbatches
    loss_of = VocabParallelCrossEntropy(vocab_size=VOCABULARY, ignore_index=IGNORED)
    return Pipeline(
        nn.ModuleList(pieces),
        spread.schedule,
        criterion=lambda logits, labels: loss_of(logits, labels),
        tensor_shape=(microbatch, length, WIDTH) if spread.known else None,
        tensor_dtype=task.dtype,
        gradient_dtype=torch.float32,
        weigh=(lambda labels: float((labels != IGNORED).sum())) if task.ignored else None,
        overlap=_in_turn if spread.overlap == "in turn" else None,
    )


def _in_turn(forward: Callable[[], None], backward: Callable[[], None]) -> None:
    forward()
    backward()


def _tie_by_object(pieces: list[Stage]) -> None:
    """Makes words and heads of these stages one parameter."""
    modules = [module for piece in pieces for module in (piece.words, piece.head) if module is not None]
    for module in modules[1:]:
        module.weight = modules[0].weight


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """A weight of two names comes under both."""
    return list(model.named_parameters(remove_duplicate=False))


def _global(name: str) -> str:
    """A parameter's name in the whole model: without chunks and their numbers."""
    return name.split(".", 2)[2] if name.startswith("chunks.") else name


def _require_owned(results: list[Trained], expected: Trained, replicas: int) -> None:
    """Of each weight, one replica has the gradient. Leaves the others' out of the comparison."""
    for name, whole in expected.gradients.items():
        holders = [result.gradients for result in results if name in result.gradients]
        having = [gradients for gradients in holders if gradients[name] is not None]
        assert len(having) * replicas == (0 if whole is None else len(holders)), f"{len(having)} have that of {name}"
        for gradients in holders:
            if whole is not None and gradients[name] is None:
                del gradients[name]


def _require_same(mine: Trained, expected: Trained, tolerance: float, where: str) -> None:
    if mine.losses[0] is not None:
        _require_near(_numbers(mine.losses), _numbers(expected.losses), tolerance, where + "losses")
    _require_near(_numbers(mine.norms), _numbers(expected.norms), tolerance, where + "norms")
    for what in ("gradients", "weights"):
        whole: Values = getattr(expected, what)
        for name, value in getattr(mine, what).items():
            _require_part(value, whole[name], mine.parts.get(name), tolerance, f"{where}{what} {name}")


def _numbers(values: Sequence[float | None]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _require_part(mine: Tensor | None, whole: Tensor | None, part: Part, tolerance: float, where: str) -> None:
    assert (mine is None) == (whole is None), f"{where}: {mine} for {whole}"
    if mine is not None and whole is not None:
        assert mine.layout is whole.layout, f"{where}: {mine.layout} for {whole.layout}"
        for dim, start, length in part or ():
            mine, whole = mine.narrow(dim, 0, length), whole.narrow(dim, min(start, whole.shape[dim]), length)
        _require_near(mine.to_dense(), whole.to_dense(), tolerance, where)


def _require_near(mine: Tensor, whole: Tensor, tolerance: float, where: str) -> None:
    assert mine.shape == whole.shape, f"{where}: shape {tuple(mine.shape)} for {tuple(whole.shape)}"
    if mine.numel():
        off = float((mine - whole).abs().max())
        assert off <= tolerance * max(1.0, float(whole.abs().max())), f"{where}: {mine} for {whole}"
