"""The mean loss where some of a batch does not count, and what the ranks of a bidirectional schedule's last stage tell
each other.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow import Pipeline, PipelineError, UsageError, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.transport import agreement
from pipeflow.engine.parallel.transport.plain import pack
from pipeflow.engine.runtime.program import wires
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.models import PlainModel, TiedModel
from tests.runtime.work import build, gradients_of, plain, require_near, schedule_of

IGNORED = -100
MODEL = TiedModel()


def tokens(labels: Tensor) -> float:
    return float((labels != IGNORED).sum())


def batch_of(ignored: slice, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    words, labels = MODEL.batch(4, seed=seed)
    labels = labels.clone()
    labels[ignored] = IGNORED
    return words, labels


def run_ignoring(batches: list[Any], evaluate: bool) -> tuple[float, Any]:
    """Each replica has its own batch; the mean is over the tokens that count."""
    pipeline = build(MODEL, schedule_of(("1f1b", 2, 1), 4), weigh=tokens)
    batch = batches[current_context().data_rank]
    output = execute_pipeline(iter([batch]), pipeline, broadcast_loss=True, forward_only=evaluate)
    assert output.loss is not None
    return output.loss.item(), gradients_of(pipeline)


@pytest.mark.parametrize("evaluate", [False, True])
@pytest.mark.parametrize("batches", [[batch_of(slice(1, 2))], [batch_of(slice(0, 4)), batch_of(slice(2, 3), seed=1)]])
def test_what_has_no_label_that_counts_adds_nothing(batches: list[Any], evaluate: bool) -> None:
    whole = [torch.cat(parts) for parts in zip(*batches, strict=True)]
    loss, gradients = MODEL.plain_step((whole[0], whole[1]))
    results = run_threads(run_ignoring, 2 * len(batches), batches, evaluate, data=len(batches))
    for told, found in results:
        assert told == pytest.approx(loss.item(), rel=1e-12)
        if not evaluate:
            require_near(found, gradients)


MASKED = PlainModel()


def masked_mean(output: Tensor, labels: Tensor) -> Tensor:
    """The mean over the samples whose labels are numbers; 0 / 0 without any."""
    mask = labels.isfinite().all(dim=-1)
    errors = (output - labels.nan_to_num()).square().mean(dim=-1)
    return (errors * mask).sum() / mask.sum()


def kept(labels: Tensor) -> float:
    return float(labels.isfinite().all(dim=-1).sum())


def masked_batch(ignored: slice, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    inputs, labels = MASKED.batch(8, seed=seed)
    labels = labels.clone()
    labels[ignored] = math.nan
    return inputs, labels


class Whole(nn.Module):
    """Layers that compute the loss themselves; as their only output, or beside another."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.alone = alone
        self.layers = nn.ModuleList(MASKED.stage(0, MASKED.layers).layers.values())  # type: ignore[operator]  # it is a ModuleDict

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        hidden = inputs
        for layer in self.layers:
            hidden = layer(hidden)
        loss = masked_mean(hidden, labels)
        return loss if self.alone else (loss, hidden)


def run_masked(name: str, batches: list[Any], own: bool | None) -> tuple[float, Any]:
    """With the module's own loss if `own` is not None."""
    ranks = current_context().pipeline_size
    schedule, batch = schedule_of((name, ranks, 1), 4), batches[current_context().data_rank]
    if own is None:
        chunks = MASKED.chunks(schedule, current_context().pipeline_rank)
        pipeline = Pipeline(chunks, schedule, criterion=masked_mean, weigh=kept)
    else:
        pipeline = Pipeline.from_module(Whole(own), schedule, batch, weigh=kept)
    output = execute_pipeline(iter([batch]), pipeline, broadcast_loss=True)
    assert output.loss is not None
    if own is None:
        return output.loss.item(), gradients_of(pipeline)
    return output.loss.item(), {name: plain(each.grad) for name, each in pipeline.named_parameters()}


@pytest.mark.some(6)
@pytest.mark.parametrize("own", [None, True, False], ids=["criterion", "loss", "loss-and-output"])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipe"])
@pytest.mark.parametrize(
    "batches",
    [[masked_batch(slice(6, 8))], [masked_batch(slice(0, 8)), masked_batch(slice(4, 6), seed=1)]],
    ids=["microbatch", "replica"],
)
def test_a_microbatch_that_does_not_count_has_no_gradient(name: str, batches: list[Any], own: bool | None) -> None:
    inputs, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    stage = MASKED.stage(0, MASKED.layers)
    loss = masked_mean(stage(inputs), labels)
    loss.backward()
    expected = {name: each.grad for name, each in stage.named_parameters() if each.grad is not None}
    results = run_threads(run_masked, 2 * len(batches), name, batches, own, data=len(batches))
    for told, gradients in results:
        assert told == pytest.approx(loss.item(), rel=1e-12)
        require_near(gradients, expected)


def run_all_ignored(evaluate: bool, broadcast: bool) -> None:
    pipeline = build(MODEL, schedule_of(("1f1b", 2, 1), 4), weigh=tokens)
    batch = batch_of(slice(0, 4))
    with pytest.raises((UsageError, PipelineError), match="no label of this batch counts"):
        execute_pipeline(iter([batch]), pipeline, forward_only=evaluate, broadcast_loss=broadcast)


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("evaluate", [False, True])
@pytest.mark.parametrize("broadcast", [False, True])
def test_a_batch_without_any_label_that_counts_is_an_error(evaluate: bool, broadcast: bool, data: int) -> None:
    run_threads(run_all_ignored, 2 * data, evaluate, broadcast, data=data)


def run_weighing(weight: float) -> None:
    pipeline = build(MODEL, schedule_of(("1f1b", 2, 1), 4), weigh=lambda labels: weight)
    with pytest.raises((UsageError, PipelineError), match=r"weigh\(labels\) returned .* for microbatch 0"):
        execute_pipeline(iter([MODEL.batch(4)]), pipeline)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_that_is_none_is_an_error(weight: float) -> None:
    run_threads(run_weighing, 2, weight)


class Wide(nn.Module):
    def forward(self, hidden: Tensor) -> dict[str, Tensor]:
        return {"wide": hidden.repeat(1, 1, 50), "sum": hidden.sum(dim=(1, 2))}


def run_returning(name: str) -> Any:
    """The outputs that this rank returns."""
    model, schedule = PlainModel(), make_schedule(name, ranks=4, microbatches=4)
    chunks = model.chunks(schedule, current_context().pipeline_rank)
    for stage, index in zip(schedule.placement.stages_of(current_context().pipeline_rank), range(2), strict=False):
        if stage == schedule.placement.num_stages - 1:
            chunks[index] = nn.Sequential(chunks[index], Wide())
    pipeline = Pipeline(chunks, schedule)
    batch = iter([(model.batch(8)[0], None)] * 2)
    for _ in range(2):
        output = execute_pipeline(batch, pipeline, forward_only=True, return_outputs=True)
    return plain(output.outputs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", [run_threads, run_processes])
def test_outputs_of_both_last_ranks_are_whole(start: Any) -> None:
    model = PlainModel()
    hidden = model.stage(0, model.layers)(model.batch(8)[0])
    expected = plain(Wide()(hidden))
    found = [outputs for outputs in start(run_returning, 4, "dualpipe") if outputs is not None]
    assert len(found) == 2
    for outputs in found:
        assert abs(outputs["wide"] - expected["wide"]).max() <= 1e-14
        assert abs(outputs["sum"] - expected["sum"]).max() <= 1e-13


def test_ranks_that_return_no_outputs_get_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs travel as tensors between the two ranks that return them; no rank packs them into bytes."""
    packed: list[int] = []

    def packing(value: object) -> bytes:
        body = pack(value)
        packed.append(len(body))
        return body

    for module in (agreement, wires):
        monkeypatch.setattr(module, "pack", packing)
    found = run_threads(run_returning, 4, "dualpipe")
    assert max(packed) < found[0]["wide"].nbytes / 10


def test_cross_entropy_of_nothing_is_no_number() -> None:
    """Why such microbatches need care."""
    assert functional.cross_entropy(torch.randn(2, 3), torch.tensor([IGNORED] * 2)).isnan()
