"""Plain values that a module returns beside tensors, as values of whole batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import Pipeline, execute_pipeline, make_schedule
from pipeflow.engine.runtime.microbatch import as_batch
from pipeflow.engine.runtime.plain_values import whole_values
from pipeflow.testing import run_threads


class Telling(nn.Module):
    """Returns plain values: constants, counts of samples, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.calls = 0

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.calls += 1
        samples = len(x)
        for block in self.blocks:
            x = block(x).tanh()
        constants = {"zero": 0, "two": 2, "yes": True, "half": 0.5, "name": "a", "none": None}
        return {**constants, "samples": samples, "twice": [2.0 * samples], "more": samples + 1, "x": x}


@pytest.mark.parametrize("samples", [8, 7, 1])
def test_plain_values_are_those_of_the_whole_batch(samples: int) -> None:
    """What neither stays nor grows with the samples, such as `samples + 1`, is a list of the microbatches' values."""

    def rank() -> None:
        torch.manual_seed(0)
        module = Telling()
        batch = torch.randn(samples, 4)
        model = Pipeline.from_module(module, make_schedule("gpipe", ranks=1, microbatches=4), (torch.randn(8, 4), None))
        expected = module(batch)
        split = as_batch((batch, None), 4, torch.device("cpu"), model.runner.read)
        told = execute_pipeline(iter([(batch, None)]), model, forward_only=True, return_outputs=True)
        found: Any = whole_values(told.outputs, split, model)
        assert torch.allclose(found.pop("x"), expected.pop("x"), atol=1e-6)
        if samples > 1:
            expected["more"] = [size + 1 for size in split.sizes]
        assert found == expected
        assert all(type(found[name]) is type(value) for name, value in expected.items())

    run_threads(rank, 1)


class Asked(nn.Module):
    """Returns a number that grows with the samples, or the same one, as it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, what: str) -> dict[str, Any]:
        samples = len(x)
        for block in self.blocks:
            x = block(x)
        return {"x": x, "number": samples if what == "grows" else 2}


def test_what_a_value_depends_on_may_depend_on_another_entry() -> None:
    def rank() -> list[int]:
        batches = [{"x": torch.randn(8, 4), "what": what} for what in ("grows", "stays", "grows")]
        schedule = make_schedule("gpipe", ranks=1, microbatches=4)
        model = Pipeline.from_module(Asked(), schedule, batches[0])
        found = []
        for batch in batches:
            told = execute_pipeline(iter([batch]), model, forward_only=True, return_outputs=True)
            split = as_batch(batch, 4, torch.device("cpu"), model.runner.read)
            whole: Any = whole_values(told.outputs, split, model)
            found.append(whole["number"])
        return found

    assert run_threads(rank, 1) == [[8, 2, 8]]
