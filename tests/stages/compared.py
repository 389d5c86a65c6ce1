"""Steps of a model of transformers in a pipeline, and how they are compared with the model itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeflow import Pipeline, Schedule, execute_pipeline
from tests.covering import some
from tests.stages.families import EVERY, make
from tests.stages.family import criterion
from tests.tensor.ranks import gradients

transformers = pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)

HERE = [name for name, each in EVERY.items() if hasattr(transformers, each.model)]
SPLIT = [name for name in HERE if not EVERY[name].is_alone]


def each_but(*quick: str, among: list[str] = HERE) -> list[Any]:
    """All families, of which the quick ones alone are not exhaustive."""
    return some(among, quick)


class Step(NamedTuple):
    """What a rank has after a step: the loss and the outputs where the last stage is, and gradients of its parameters,
    which are whole where tensor ranks have parts of them.
    """

    loss: float | None
    gradients: dict[str, Tensor]
    outputs: Any
    model: Pipeline


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """Those of all parameters that have one, which is taken away."""
    found = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    module.zero_grad(set_to_none=True)
    return found


def require_near(
    found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, *, floor: float = 1e-6
) -> None:
    """Compares each gradient by its largest entry. Some are 0 but for rounding, so that entry counts as `floor` times
    the largest one of all gradients at least.
    """
    largest = max(float(each.abs().max()) for each in expected.values() if each.numel())
    for key, gradient in found.items():
        if gradient.numel():
            scale = max(float(expected[key].abs().max()), floor * largest)
            assert (gradient - expected[key]).abs().max() <= tolerance * scale, key


def seeded() -> None:
    """Some models draw masks with NumPy."""
    np.random.seed(0)
    torch.manual_seed(0)


def has_loss(name: str) -> bool:
    """Whether the model computes one."""
    return not {"labels", "start_positions", "return_loss", "future_values", "noise"}.isdisjoint(EVERY[name].batch())


def samples(name: str) -> int:
    """Into how many microbatches a family's batch may be split."""
    return 1 if EVERY[name].is_together else 3


def step(name: str, schedule: Schedule) -> Step:
    """One step of a family's model."""
    module, batch = make(transformers, name)
    seeded()
    loss = {"weigh": EVERY[name].weigh} if has_loss(name) else {"criterion": criterion}
    model = Pipeline.from_module(module, schedule, batch, **loss)
    output = execute_pipeline(iter([batch]), model, return_outputs=True)
    return Step(None if output.loss is None else output.loss.item(), gradients(model), output.outputs, model)


def plain(name: str) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of the module itself, a sample at a time, each weighed by what its mean is over: many
    models compute their loss in float32, in which the order of a mean is seen, and that of experts is one over the
    words of a microbatch.
    """
    module, batch = make(transformers, name)
    family = EVERY[name]
    seeded()
    parts = [batch]
    if not (family.is_together or family.is_whole):
        parts = [{key: entry[sample : sample + 1] for key, entry in batch.items()} for sample in range(3)]
    weights = [family.weight(part) for part in parts]
    losses = [criterion(module(**part)).double() * weight for part, weight in zip(parts, weights, strict=True)]
    loss = torch.stack(losses).sum() / sum(weights)
    loss.backward()
    return loss.item(), gradients_of(module)


def require_equal(name: str, steps: Sequence[Step], *, tolerance: float = 0.0, floor: float = 1e-6) -> None:
    """Compares what ranks found with the model itself: by the family's tolerance, or by a larger one."""
    tolerance = max(tolerance, EVERY[name].tolerance)
    expected_loss, expected = plain(name)
    found = [each.loss for each in steps if each.loss is not None]
    assert found
    assert found == pytest.approx([expected_loss] * len(found), rel=max(tolerance, 1e-7))
    for each in steps:
        require_near(each.gradients, expected, tolerance, floor=floor)
    assert set().union(*(each.gradients for each in steps)) == set(expected)
    logits = [each.outputs["logits"] for each in steps if each.outputs is not None and "logits" in each.outputs]
    if logits and not EVERY[name].is_together:
        module, batch = make(transformers, name)
        plain_logits = torch.cat([module(**{k: each[i : i + 1] for k, each in batch.items()}).logits for i in range(3)])
        for mine in logits:
            assert torch.allclose(mine, plain_logits, rtol=tolerance, atol=tolerance)
