"""Compiled stages of tensor-parallel layers: these are left as they are between compiled parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from pipeflow import Pipeline, UsageError, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.tensor import Dropout, checkpoint, manual_seed
from pipeflow.testing import run_threads
from pipeflow.training.models import GPTLMLoss, build_gpt_pipeline
from tests.compiling import COMPILED

WORDS = torch.randint(32, (8, 9), generator=torch.Generator().manual_seed(1))
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 8,
    "seed": 1,
}

pytestmark = COMPILED


def train(compiling: dict[str, Any] | None, options: dict[str, Any]) -> tuple[dict[str, Tensor], str]:
    """This rank's gradients, and which of them wait for W."""
    manual_seed(7)
    schedule = make_schedule("zb-h1", ranks=current_context().pipeline_size, microbatches=4)
    pipeline = Pipeline(
        build_gpt_pipeline(4, placement=schedule.placement, **SIZES, **options), schedule, criterion=GPTLMLoss()
    )
    if compiling is not None:
        pipeline.compile(**compiling)
    for _ in range(2):
        pipeline.zero_grad()
        execute_pipeline(iter([({"input_ids": WORDS[:, :-1]}, WORDS[:, 1:])]), pipeline)
    [deferral] = pipeline.deferrals.values()
    gradients = {name: each.grad.clone() for name, each in pipeline.named_parameters() if each.grad is not None}
    return gradients, ", ".join(deferral.deferred)


@pytest.mark.parametrize(
    "options",
    [
        {"drop_rate": 0.5, "sequence_parallel": True},
        pytest.param({}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_gpt_over_two_tensor_ranks(options: dict[str, Any]) -> None:
    expected = run_threads(train, 4, None, options, tensor=2)
    found = run_threads(train, 4, {"backend": "aot_eager"}, options, tensor=2, deadline=300.0, timeout=120.0)
    assert counters["stats"]["unique_graphs"] > 0
    for (mine, late), (its, _) in zip(found, expected, strict=True):
        assert "query_key_value.weight" in late
        assert mine.keys() == its.keys()
        for name, gradient in its.items():
            assert float((mine[name] - gradient).abs().max()) <= 1e-6 * float(gradient.abs().max()), name


def compile_in_one_graph() -> None:
    with pytest.raises(UsageError, match=r"attention\.\w+ waits for other ranks.*use fullgraph=False"):
        train({"fullgraph": True}, {})


@pytest.mark.exhaustive
def test_a_layer_that_waits_for_other_ranks_is_in_no_one_graph() -> None:
    run_threads(compile_in_one_graph, 4, tensor=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "tensor"), [(4, 2), (2, 1), (1, 1)])
def test_a_checkpoint_within_a_block_stays_eager(ranks: int, tensor: int) -> None:
    """Ranks that are threads compile at the same time, so each pair of runs meets in another place."""
    options = {"drop_rate": 0.5, "checkpoint": True}
    expected = run_threads(train, ranks, None, options, tensor=tensor)
    for _ in range(3):
        torch._dynamo.reset()
        found = run_threads(train, ranks, {"backend": "aot_eager"}, options, tensor=tensor, deadline=120.0)
        for (mine, late), (its, _) in zip(found, expected, strict=True):
            assert "query_key_value.weight" in late
            assert mine.keys() == its.keys()
            assert all(torch.equal(mine[name], gradient) for name, gradient in its.items())


class Recomputing(nn.Module):
    """Two layers, and dropout between them that is computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout, self.second = nn.Linear(8, 8), Dropout(0.5), nn.Linear(8, 8)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.second(checkpoint(self._drop, self.first(input).sin())).cos()
        return output

    def _drop(self, input: Tensor) -> Tensor:
        dropped: Tensor = self.dropout(input).sin()
        return dropped


@pytest.mark.exhaustive
def test_a_module_is_compiled_before_and_after_a_checkpoint() -> None:
    torch.manual_seed(0)
    module, input = Recomputing(), torch.randn(16, 8)

    def gradients(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        manual_seed(3)
        module.zero_grad()
        call(input).sum().backward()
        return [each.grad for each in module.parameters() if each.grad is not None]

    expected, compiled = gradients(module), torch.compile(module, backend="aot_eager")
    for _ in range(3):
        assert all(torch.equal(mine, its) for mine, its in zip(gradients(compiled), expected, strict=True))
    assert counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()  # what it has found so far it would use again
    with pytest.raises(torch._dynamo.exc.Unsupported, match="function `checkpoint`"):
        torch.compile(module, backend="aot_eager", fullgraph=True)(input)
