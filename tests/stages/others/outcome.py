"""Runs a form in a pipeline, compares it with the plain module, and says what came of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import RLock
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from pipeflow import Pipeline, Whole, execute_pipeline, make_schedule
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.sharding import splits_of
from pipeflow.engine.parallel.transport.protocol import Unconnected
from pipeflow.engine.stages.blocks import blocks_of, labels_of
from pipeflow.engine.stages.criterion import loss_in
from pipeflow.engine.stages.plan import CutPlan
from pipeflow.engine.stages.planner import Planner
from pipeflow.engine.tensor.module_sharding import shard
from pipeflow.testing import run_threads
from pipeflow.testing.ranks import RankError
from tests.stages.others.form import Form
from tests.tensor.ranks import gradients

SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-v")
TENSOR = "1f1b, tensor 2"
SEEDS = (1, 2)
Kind = Literal["right", "refused", "wrong", "error", "-"]


class Outcome(NamedTuple):
    """What came of one form.

    Attributes:
        kind: "right": equal to the plain module; "refused": a UsageError; "wrong": another result; "error": any other
            error; "-": nothing to try.
        said: the error, or what differs most.
        distance: the largest difference of a loss, an output, a gradient or a buffer, relative to the largest entry.
    """

    kind: Kind
    said: str = ""
    distance: float = 0.0


class Record(NamedTuple):
    """The results of one rank, or of the plain module: for each batch, by name."""

    batches: list[dict[str, Tensor]]
    labels: list[str]
    error: Exception | None = None


def outcomes(form: Form) -> dict[str, Outcome]:
    """What came of a form under each schedule, each with two cuts, and with two tensor ranks. Nothing is dropped: ranks
    that are threads would draw from one generator in any order.
    """
    with mock.patch("torch.nn.functional.dropout", lambda input, *_, **__: input):
        return _outcomes(form)


def _outcomes(form: Form) -> dict[str, Outcome]:
    module = form.made()
    try:
        expected = plain(copy.deepcopy(module), form)
    except Exception as error:
        return {"plain": Outcome("error", f"{type(error).__name__}: {error}")}
    found = {name: of_cuts(form, module, expected, name) for name in SCHEDULES}
    found[TENSOR] = of_tensor_ranks(form, module, expected)
    return found


def of_tensor_ranks(form: Form, module: nn.Module, expected: Record) -> Outcome:
    """What came of a form on two tensor ranks, if the default rules split a layer."""
    whole = copy.deepcopy(module)
    with suppress(UsageError):  # which the run shows
        shard(whole, group=Unconnected(1, 2))
        if not splits_of(whole):
            return Outcome("-", "no default rule splits a layer")
    return outcome(form, module, expected, "1f1b", None, tensor=2)[0]


def of_cuts(form: Form, module: nn.Module, expected: Record, schedule: str) -> Outcome:
    """What came of a form with the default cut, and with one after the first blocks: the first that is not right."""
    first, records = outcome(form, module, expected, schedule, None)
    if first.kind != "right":
        return first
    stages = make_schedule(schedule, ranks=2, microbatches=form.microbatches).placement.num_stages
    second, _ = outcome(form, module, expected, schedule, records[0].labels[: stages - 1])
    return second if second.kind != "right" or second.distance > first.distance else first


def outcome(
    form: Form, module: nn.Module, expected: Record, schedule: str, cuts: list[str] | None, tensor: int = 1
) -> tuple[Outcome, list[Record]]:
    """What came of one run, with the records of its ranks."""
    torch.manual_seed(0)
    planner = _OnePlanner()  # planning takes most of the time
    try:
        with mock.patch("pipeflow.engine.runtime.from_module.Planner", planner):
            records: list[Record] = run_threads(
                steps, 2 * tensor, form, module, schedule, cuts, tensor=tensor, deadline=300.0, timeout=120.0
            )
    except RankError as error:
        return Outcome("error", str(error).strip()), []
    errors = [each.error for each in records if each.error is not None]
    if errors:
        usage = [error for error in errors if isinstance(error, UsageError)]
        origin = min(usage or errors, key=lambda error: len(str(error)))
        where = "" if tensor == 1 and cuts is None else f" [{schedule}, cuts={cuts}, tensor={tensor}]"
        kind: Kind = "refused" if usage else "error"
        return Outcome(kind, f"{'' if usage else type(origin).__name__ + ': '}{origin}{where}"), records
    return compared(records, expected, form.tolerance), records


class _SharedPlanner(Planner):
    """A planner for several threads."""

    lock = RLock()

    def plan(self, entries: Mapping[str, Any], like: nn.Module | None = None) -> CutPlan:
        with self.lock:
            return super().plan(entries, like)


class _OnePlanner:
    """Makes one planner for all ranks: they are threads and would make equal ones."""

    def __init__(self) -> None:
        self._made = list[Planner]()

    def __call__(self, *arguments: Any, **options: Any) -> Planner:
        with _SharedPlanner.lock:
            if not self._made:
                self._made.append(_SharedPlanner(*arguments, **options))
            return self._made[0]


def steps(form: Form, module: nn.Module, name: str, cuts: list[str] | None) -> Record:
    """A rank's results: two steps, with different batches."""
    schedule = make_schedule(name, ranks=2, microbatches=form.microbatches)
    batches: list[dict[str, Tensor]] = []
    try:
        model = Pipeline.from_module(
            copy.deepcopy(module),
            schedule,
            form.batch(SEEDS[0]),
            criterion=criterion,
            cuts=cuts,
            blocks=form.blocks,
        )
        for seed in SEEDS:
            model.zero_grad(set_to_none=True)
            output = execute_pipeline(iter([form.batch(seed)]), model, return_outputs=True)
            batches.append(results(output.loss, gradients(model), output.outputs))
    except Exception as error:
        return Record(batches, [], error)
    assert model.cut is not None
    labels = labels_of(blocks_of(model.cut.trace, module, form.blocks, schedule.placement.num_stages))
    return Record(batches, labels)


def plain(module: nn.Module, form: Form) -> Record:
    """The results of the module itself, a microbatch at a time."""
    torch.manual_seed(0)
    batches = []
    for seed in SEEDS:
        module.zero_grad(set_to_none=True)
        outputs, losses = [], []
        for part in split(form.batch(seed)[0], form.microbatches):
            output = called(module, part)
            loss = criterion(output) / form.microbatches
            loss.backward()
            losses.append(loss.detach())
            outputs.append(tree_map(lambda each: each.detach() if isinstance(each, Tensor) else each, output))
        own = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
        batches.append(results(torch.stack(losses).sum(), own, merged(outputs)))
    return Record(batches, [])


def criterion(output: Any, labels: object = None) -> Tensor:
    """The model's own loss; without one, the mean of a function of all that it returned."""
    loss = loss_in(output)
    if loss is not None:
        return loss
    leaves = [each for each in tree_leaves(output) if isinstance(each, Tensor) and each.requires_grad]
    return torch.stack([each.sin().double().mean() for each in leaves]).sum()


def called(module: nn.Module, inputs: Any) -> Any:
    """The output for some inputs."""
    if isinstance(inputs, dict):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)


def split(inputs: Any, microbatches: int) -> list[Any]:
    """The inputs of each microbatch."""
    leaves, spec = tree_flatten(inputs, is_leaf=lambda each: isinstance(each, Whole))
    parts = [each.chunk(microbatches) if isinstance(each, Tensor) else [each] * microbatches for each in leaves]
    values = [[each.value if isinstance(each, Whole) else each for each in part] for part in zip(*parts, strict=True)]
    return [tree_unflatten(part, spec) for part in values]


def merged(outputs: Sequence[Any]) -> Any:
    """The outputs of all microbatches in one."""

    def joined(*parts: Any) -> Any:
        if not isinstance(parts[0], Tensor):
            return parts[0]
        return torch.cat(parts) if parts[0].dim() else torch.stack(parts)

    return tree_map(joined, *outputs)


def results(loss: Tensor | None, own: dict[str, Tensor], outputs: Any) -> dict[str, Tensor]:
    """The results of a step by name."""
    found = {f"gradient of {name}": each.clone() for name, each in own.items()}
    if loss is not None:
        found["loss"] = loss.detach().double().clone()
    leaves = [each for each in tree_leaves(outputs) if isinstance(each, Tensor)]
    return found | {f"output {index}": each.detach().clone() for index, each in enumerate(leaves)}


def compared(records: Sequence[Record], expected: Record, tolerance: float) -> Outcome:
    """Compares the ranks' results with those of the plain module. Gradients that are 0 but for rounding are compared
    with a millionth of the largest one.
    """
    worst, said = 0.0, ""
    for index, its in enumerate(expected.batches):
        missing = its.keys() - set().union(*(each.batches[index] for each in records))
        largest = max((float(each.abs().max()) for name, each in its.items() if name.startswith("gradient")), default=0)
        if missing:
            return Outcome("wrong", f"step {index}: no {min(missing)}", float("inf"))
        for record in records:
            for name, mine in record.batches[index].items():
                if name not in its or mine.shape != its[name].shape:
                    return Outcome("wrong", f"step {index}: {name} is not that of the plain module", float("inf"))
                if mine.numel():
                    scale = max(float(its[name].abs().max()), 1e-6 * largest)
                    apart = float((mine - its[name]).abs().max()) / (scale or 1.0)
                    if not apart <= worst:
                        worst, said = apart, f"step {index}: {name}"
    return Outcome("right", "", worst) if worst <= tolerance else Outcome("wrong", said, worst)
