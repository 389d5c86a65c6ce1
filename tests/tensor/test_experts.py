"""Layers of experts that are divided over expert ranks compute what the whole layer computes: outputs, and gradients of
tokens, of their weights and of the experts.
"""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeflow import Pipeline, UsageError, execute_pipeline, make_schedule, measured_costs
from pipeflow.core.action import Kind
from pipeflow.core.timeline import Timeline
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.sharding import expert_splits_of, splits_of
from pipeflow.engine.parallel.transport.protocol import Unconnected
from pipeflow.engine.tensor.layer import cut
from pipeflow.tensor import divide_experts, shard
from pipeflow.testing import RankError, run_processes, run_threads
from tests.huggingface.over_experts import FAMILIES, ExpertWork

EXPERTS, WIDTH, CHOSEN, RANKS = 4, 16, 2, 2


class OneLayer(nn.Module):
    """Experts that scale tokens, of the form that is divided."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.has_gate, self.has_bias, self.is_transposed = RANKS, False, False, False
        self.scale = nn.Parameter(torch.arange(1.0, RANKS + 1)[:, None])

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return tokens * self.scale[indices[:, 0]] * weights


class OneStage(nn.Module):
    """A stage with such experts, whose tokens choose them in turn."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.experts, self.dropout = OneLayer(), dropout

    def forward(self, tokens: Tensor) -> Tensor:
        if not self.dropout:
            return self.computed(tokens)
        dropped = nn.functional.dropout(tokens, self.dropout)
        return nn.functional.dropout(checkpoint(self.recomputed, dropped, use_reentrant=False), self.dropout)

    def recomputed(self, tokens: Tensor) -> Tensor:
        dropped = nn.functional.dropout(torch.tanh(tokens), self.dropout)
        return nn.functional.dropout(self.computed(dropped), self.dropout) ** 2

    def computed(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.experts(tokens, torch.arange(len(tokens))[:, None] % RANKS, torch.ones(len(tokens), 1))
        return output


def traced() -> Timeline:
    stage = OneStage()
    divide_experts(stage)
    schedule = make_schedule("1f1b", ranks=1, microbatches=2)
    pipeline = Pipeline(stage, schedule, criterion=nn.functional.mse_loss)
    batch = torch.ones(8, 3, requires_grad=True), torch.ones(8, 3)
    timeline = execute_pipeline(iter([batch]), pipeline, trace=True).timeline
    assert timeline is not None
    return timeline


def test_a_trace_says_how_long_a_rank_waits_for_tokens() -> None:
    for timeline in run_threads(traced, RANKS, data=RANKS, experts=RANKS):
        spans = {str(span.action): span for span in timeline if span.action.kind is not Kind.R}
        assert list(spans) == ["0F0", "0B0", "0F1", "0B1"]
        assert all(0 < span.exchange < span.end - span.start for span in spans.values())
        assert 0 < measured_costs(timeline).exchange[0] < 1


def layer_of(kind: str, computed_by: str) -> nn.Module:
    """The experts of the last layer of a model in float64, with initial weights that are large enough to matter."""
    model = ExpertWork(kind, computed_by=computed_by).model()
    [*_, layer] = [each for name, each in model.named_modules() if name.endswith("mlp.experts")]
    found: nn.Module = layer
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return found


def input_of(rank: int, experts: int, *, idle: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens of a rank, the experts of each token, their weights, and a gradient of the output. With `idle`, no token
    has an expert of the last rank.
    """
    generator = torch.Generator().manual_seed(rank)
    tokens = 5 + 2 * rank
    scores = torch.rand(tokens, experts // RANKS if idle else experts, generator=generator)
    rows = torch.randn(2, tokens, WIDTH, dtype=torch.float64, generator=generator)
    weights = torch.rand(tokens, CHOSEN, dtype=torch.float64, generator=generator)
    return rows[0].requires_grad_(), scores.topk(CHOSEN).indices, weights.requires_grad_(), rows[1]


def dropped(pairs: bool) -> list[Any]:
    """The gradients of a step with dropout in blocks that are computed again."""
    schedule = make_schedule("dualpipe-v", ranks=2, microbatches=6)
    stages = nn.ModuleList([OneStage(0.3) for _ in range(2)])
    divide_experts(stages)
    pipeline = Pipeline(stages, schedule, criterion=nn.functional.mse_loss)
    torch.manual_seed(current_context().data_rank)
    batch = torch.rand(24, 3).requires_grad_(), torch.rand(24, 3)
    torch.manual_seed(current_context().rank)
    execute_pipeline(iter([batch]), pipeline, schedule=schedule if pairs else schedule.without_pairs())
    return [parameter.grad.tolist() for parameter in pipeline.parameters() if parameter.grad is not None]


@pytest.mark.slow
def test_pairs_in_turns_drop_what_forwards_and_backwards_drop_one_after_the_other() -> None:
    together, apart = (run_processes(dropped, 4, pairs, data=2, experts=2) for pairs in (True, False))
    assert together == apart
    assert [len(gradients) for gradients in together] == [2] * 4


def computed(layer: nn.Module, rank: int, *, idle: bool, recomputed: bool = False) -> tuple[Tensor, ...]:
    """The output for a rank's tokens, and the gradients of these and of their weights."""
    experts: int = vars(layer).get("_experts_whole") or vars(layer)["num_experts"]
    tokens, indices, weights, gradient = input_of(rank, experts, idle=idle)
    output = (
        checkpoint(layer, tokens, indices, weights, use_reentrant=False)
        if recomputed
        else layer(tokens, indices, weights)
    )
    output.backward(gradient)
    assert tokens.grad is not None
    assert weights.grad is not None
    return output.detach(), tokens.grad, weights.grad


def compare(kind: str, computed_by: str, *, idle: bool, tensor: bool, recomputed: bool) -> int:
    """On one rank; returns how many parameters were compared."""
    context, whole = current_context(), layer_of(kind, computed_by)
    holder = nn.ModuleDict({"experts": deepcopy(whole)})
    if tensor:
        shard(holder)
    divide_experts(holder)
    expected = [computed(whole, rank, idle=idle) for rank in range(RANKS)][context.data_rank]
    found = computed(holder["experts"], context.data_rank, idle=idle, recomputed=recomputed)
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)
    own = dict(holder["experts"].named_parameters())
    over = (splits_of(holder), context.tensor), (expert_splits_of(holder), context.experts)
    for name, parameter in whole.named_parameters():
        gradient = own[name].grad
        assert parameter.grad is not None
        assert gradient is not None, name
        for values, part in ((gradient * RANKS, parameter.grad), (own[name].detach(), parameter.detach())):
            for splits, group in over:
                part = cut(part, splits.get(id(own[name])), group)
            torch.testing.assert_close(values, part, rtol=1e-12, atol=1e-12)
        assert own[name].shape[0] * RANKS == parameter.shape[0]
    return len(own)


CASES = [
    ("mixtral", "batched_mm", False, False, False),
    ("mixtral", "eager", True, False, True),
    ("gpt_oss", "eager", False, False, False),
    ("gpt_oss", "batched_mm", True, False, False),
    ("qwen3_moe", "batched_mm", False, True, False),
    ("mixtral", "eager", True, True, True),
]


@pytest.mark.parametrize(("kind", "computed_by", "idle", "tensor", "recomputed"), CASES)
def test_a_divided_layer_computes_what_the_whole_layer_computes(
    kind: str, computed_by: str, idle: bool, tensor: bool, recomputed: bool
) -> None:
    sizes: dict[str, Any] = {"data": RANKS, "experts": RANKS, "tensor": 1 + tensor}
    options = {"idle": idle, "tensor": tensor, "recomputed": recomputed}
    counts = run_threads(_compare, RANKS * (1 + tensor), kind, computed_by, options, **sizes)
    assert counts == [4 if kind == "gpt_oss" else 2] * len(counts)


def _compare(kind: str, computed_by: str, options: dict[str, bool]) -> int:
    return compare(kind, computed_by, **options)


def wrong_index() -> None:
    holder = nn.ModuleDict({"experts": layer_of("mixtral", "batched_mm")})
    divide_experts(holder)
    tokens, indices, weights, _ = input_of(0, EXPERTS, idle=False)
    holder["experts"](tokens, indices + 1, weights)


def test_an_index_of_no_expert_is_an_error() -> None:
    with pytest.raises(RankError, match="the indices of experts must be from 0 to 3, got 1 to 4"):
        run_threads(wrong_index, 2, data=2, experts=2)


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_ranks_that_do_not_divide_the_experts_change_nothing(kind: str) -> None:
    model = ExpertWork(kind).model()
    before = {name: parameter.shape for name, parameter in model.named_parameters()}
    with pytest.raises(UsageError, match=r"experts has \d experts, which 3 expert ranks cannot share equally: .*=1, 2"):
        divide_experts(model, group=Unconnected(0, 3))
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == before


def test_other_layers_stay_whole() -> None:
    """A layer whose parameters have no entry per expert, and one that is divided already."""
    model = ExpertWork("mixtral").model()
    other = model.model.layers[0].mlp.experts
    other.scale = nn.Parameter(torch.ones(3))
    divide_experts(model, group=Unconnected(1, 2))
    divide_experts(model, group=Unconnected(1, 2))
    shapes = {name: each.shape[0] for name, each in model.named_parameters() if re.search(r"experts", name)}
    assert set(shapes.values()) == {2, 3, 4}
    assert [size for name, size in shapes.items() if ".0." in name] == [4, 4, 3]


def test_a_divided_layer_is_not_compiled() -> None:
    holder = nn.ModuleDict({"experts": layer_of("mixtral", "batched_mm")})
    divide_experts(holder, group=Unconnected(0, 2))
    layer: Any = holder["experts"]
    assert not layer.compiles
    layer.leave_eager()
    seen = list[bool]()
    vars(layer)["_eager"] = lambda *_: seen.append(True)
    torch.compile(lambda: layer(None, None, None), backend="eager")()
    assert seen == [True]
