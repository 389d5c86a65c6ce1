"""A model of transformers, trained as it is and by a Booster."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW

from pipeflow.colossalai.booster import Booster
from pipeflow.colossalai.booster.plugin import HybridParallelPlugin
from pipeflow.colossalai.shardformer.policies.base_policy import Policy
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.sharding import Split, splits_of
from pipeflow.testing import run_threads

TOLERANCE = 1e-9
STEPS = 3
Batch = dict[str, Tensor]
Weights = dict[str, Tensor]


def causal_loss(outputs: Any, inputs: Batch) -> Tensor:
    """Of a language model, in the precision of its logits."""
    logits, labels = outputs.logits[:, :-1], inputs["labels"][:, 1:]
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def plain(
    module: nn.Module, batch: Batch, criterion: Callable[..., Tensor], max_norm: float
) -> tuple[list[float], Weights]:
    """The losses of some steps, and the weights then."""
    optimizer, losses = AdamW(module.parameters(), lr=0.01), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = criterion(module(**batch), batch)
        loss.backward()
        if max_norm:
            nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(module.named_parameters())


def own_part(batch: Batch) -> Batch:
    """This replica's."""
    context = current_context()
    return {name: each.chunk(context.data_size)[context.data_rank] for name, each in batch.items()}


def boosted(
    module: nn.Module,
    batch: Batch,
    criterion: Callable[..., Tensor],
    options: dict[str, Any],
    policy: type[Policy] | None,
) -> tuple[list[float | None], Weights, dict[str, Split], int]:
    """The same on one rank, how its weights are split, and how many entries its optimizer has states of."""
    own = None if policy is None else policy()
    booster = Booster(plugin=HybridParallelPlugin(**{"precision": "fp32", "custom_policy": own, **options}))
    module = copy.deepcopy(module)
    optimizer = AdamW(module.parameters(), lr=0.01)
    model, optimizer, criterion, _, _ = booster.boost(module, optimizer, criterion)
    del module
    losses: list[float | None] = []
    batch = own_part(batch)
    for _ in range(STEPS):
        optimizer.zero_grad()
        if options["pp_size"] > 1:
            loss = booster.execute_pipeline(iter([batch]), model, criterion, optimizer)["loss"]
        else:
            loss = criterion(model(**batch), batch)
            booster.backward(loss, optimizer)
        optimizer.step()
        losses.append(None if loss is None else loss.item())
    splits = splits_of(model)
    named = dict(model.named_parameters())
    states = sum(state["exp_avg"].numel() for state in optimizer.state.values())
    return losses, named, {name: splits[id(each)] for name, each in named.items() if id(each) in splits}, states


def require_as_plain(
    module: nn.Module,
    batch: Batch,
    criterion: Callable[..., Tensor],
    options: dict[str, Any],
    *,
    data: int = 1,
    policy: type[Policy] | None = None,
    deadline: float = 360.0,
    tolerance: float = TOLERANCE,
) -> list[int]:
    """Trains both ways. Returns how many entries the optimizer of each rank has states of."""
    tensor, pipeline = options["tp_size"], options["pp_size"]
    results = run_threads(
        lambda: boosted(module, batch, criterion, options, policy),
        pipeline * tensor * data,
        tensor=tensor,
        data=data,
        deadline=deadline,
    )
    losses, weights = plain(copy.deepcopy(module), batch, criterion, options.get("max_norm", 0.0))
    told = [its for its, _, _, _ in results if its[0] is not None]
    assert len(told) == tensor * data
    for its in told:
        if pipeline > 1 or data == 1:
            torch.testing.assert_close(its, losses, rtol=tolerance, atol=0)
    seen: set[str] = set()
    for first in range(0, len(results), tensor):
        parts: Sequence[Weights] = [each[1] for each in results[first : first + tensor]]
        for name in parts[0]:
            split = results[first][2].get(name)
            whole = parts[0][name] if split is None else split.joined([part[name] for part in parts])
            torch.testing.assert_close(whole, weights[name].detach(), rtol=tolerance, atol=tolerance)
            seen.add(name)
    assert seen == weights.keys()
    return [states for _, _, _, states in results]
