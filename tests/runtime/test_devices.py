"""Stages are where their rank computes. The second type of device here is the meta device, which every torch has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import Pipeline, PipelineError, UsageError, Whole, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.runtime.microbatch import as_batch
from pipeflow.testing import run_threads


class Scale(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, **options))
        self.register_buffer("offset", torch.ones(2, **options))
        self.offset: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.weight + self.offset


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, output: Tensor, labels: Tensor) -> Tensor:
        return ((output - labels) * self.weight).square().mean()


def pipeline_of(stage: nn.Module) -> Pipeline:
    schedule = make_schedule("1f1b", ranks=current_context().pipeline_size, microbatches=2)
    return Pipeline(stage, schedule, criterion=Loss())


BATCH = torch.ones(4, 2), torch.zeros(4, 2)


def run_elsewhere() -> set[str]:
    """As on a machine with GPUs: the batch goes to the context's device, and the stages were made on the CPU."""
    stage = Scale()
    parameters = list(stage.parameters())
    pipeline = pipeline_of(stage)
    execute_pipeline(iter([BATCH]), pipeline)
    execute_pipeline(iter([BATCH]), pipeline, forward_only=True)
    assert all(parameter.grad is not None for parameter in pipeline.parameters())
    assert len(parameters) == 1
    return {tensor.device.type for tensor in (*pipeline.parameters(), *pipeline.buffers())}


def test_stages_and_criterion_go_where_the_rank_computes() -> None:
    assert run_threads(run_elsewhere, 1, device="meta") == [{"meta"}]


def test_an_entry_is_copied_once_for_all_stages() -> None:
    """Each stage has leaves of its own for entries whose gradient is wanted."""
    entries = {"mask": torch.ones(4, 2), "whole": Whole(torch.ones(3)), "leaf": torch.ones(4, requires_grad=True)}
    batch = as_batch((entries, None), 2, torch.device("meta"))
    first, second = batch.split(entries), batch.split(batch.named["mask"])
    assert all(one["mask"] is other for one, other in zip(first, second, strict=True))
    assert batch.split(entries["whole"])[1] is first[0]["whole"]
    leaves = [*batch.split(entries["leaf"]), *(each["leaf"] for each in first)]
    assert len(set(map(id, leaves))) == 4
    assert all(each.is_leaf and each.requires_grad for each in leaves)


class Masked(Scale):
    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden) * mask


def run_whole_entry() -> str:
    batch = {"hidden": BATCH[0], "mask": Whole(torch.ones(2))}, BATCH[1]
    output = execute_pipeline(iter([batch]), pipeline_of(Masked()), forward_only=True, return_outputs=True).outputs
    assert isinstance(output, Tensor)
    return output.device.type


def test_entries_that_are_whole_go_where_the_rank_computes() -> None:
    assert run_threads(run_whole_entry, 1, device="meta") == ["meta"]


def run_unmade() -> None:
    pipeline = pipeline_of(Scale(device="meta"))
    with pytest.raises((UsageError, PipelineError), match=r"weight is on the meta device: call to_empty\("):
        execute_pipeline(iter([BATCH]), pipeline)
    pipeline.chunks.to_empty(device=pipeline.context.device)
    for tensor in (*pipeline.chunks.parameters(), *pipeline.chunks.buffers()):
        nn.init.ones_(tensor)
    output = execute_pipeline(iter([BATCH]), pipeline, broadcast_loss=True)
    assert output.loss is not None
    assert output.loss.item() > 0


def test_stages_without_values_are_an_error_until_they_are_made() -> None:
    run_threads(run_unmade, 1)


class Elsewhere(Tensor):
    """Says that it is on a device that this machine does not have."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("xpu", 3)


def run_on_another() -> None:
    stage = Scale()
    stage.register_buffer("far", torch.ones(1).as_subclass(Elsewhere))
    with pytest.raises(UsageError, match=r"chunks.0.far is on xpu:3, but this rank computes on cpu: move it there, or"):
        pipeline_of(stage)


def test_stages_on_another_device_are_an_error() -> None:
    run_threads(run_on_another, 1)


def run_moved_away() -> None:
    pipeline = pipeline_of(Scale())
    pipeline.to("meta")
    with pytest.raises(UsageError, match=r"chunks.0.weight|weight is on the meta device"):
        execute_pipeline(iter([BATCH]), pipeline)


def test_stages_that_were_moved_away_are_an_error() -> None:
    run_threads(run_moved_away, 1)
