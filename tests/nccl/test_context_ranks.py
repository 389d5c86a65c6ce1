"""Context ranks gather keys and values, or exchange heads, inside of forwards and backwards, and sum gradients beside
them: no order of these deadlocks under NCCL's rules.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import Pipeline, Zero, clip_grad_norm_, execute_pipeline
from pipeflow.engine.parallel.context import current_context
from pipeflow.training import models
from pipeflow.training.models import GPTLMLoss, build_gpt_pipeline
from tests.nccl.device import moved
from tests.nccl.recorder import recorded
from tests.nccl.replay import Start
from tests.nccl.test_programs import require_sound
from tests.training.over_context import LAYERS, Gpt, adamw


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Of operators alone: torch chooses a kernel by the device, which is pretended."""
    scores = query @ key.transpose(-1, -2)
    earlier = key.shape[2] - query.shape[2]
    seen = torch.ones_like(scores, dtype=torch.bool).tril(earlier)
    return scores.masked_fill(~seen, -1e9).softmax(-1) @ value


def steps(work: Gpt) -> None:
    context, schedule = current_context(), work.schedule
    made = build_gpt_pipeline(
        LAYERS, device="cpu", placement=schedule.placement, checkpoint=work.checkpoint, **work.options
    )
    stages = [*made] if isinstance(made, nn.ModuleList) else [made]
    model = Pipeline(nn.ModuleList(map(moved, stages)), schedule, criterion=GPTLMLoss())
    optimizer = adamw(model.parameters())
    optimizer = Zero(model, optimizer) if work.zero else optimizer
    calls: list[dict[str, Any]] = [{}, {"forward_only": True}, {"trace": True}, {}]
    for step, call in enumerate(calls):
        execute_pipeline(iter([work.batch(context.data_rank, step)]), model, **call)
        if "forward_only" not in call:
            clip_grad_norm_(model, 1.0)
            optimizer.step()


PROGRAMS = [
    Gpt("zb-v", 2, (3, 5), checkpoint=True, zero=True),
    Gpt("1f1b", 2),
    Gpt("interleaved-1f1b", 2, checkpoint=True),
    Gpt("interleaved-1f1b", 2, (3, 5)),
    Gpt("zb-v", 2, (3, 5), checkpoint=True, context_attention="ring"),
    Gpt("zb-v", 2, (3, 5), checkpoint=True, zero=True, context_attention="all_to_all"),
]


@pytest.mark.slow
@pytest.mark.parametrize("work", PROGRAMS, ids=str)
def test_no_program_over_context_ranks_deadlocks(work: Gpt, monkeypatch: pytest.MonkeyPatch) -> None:
    if work.context_attention != "ring":  # whose operators do not depend on the device
        monkeypatch.setattr(models, "masked_attention", plain_attention)
    data = len(work.samples)
    logs = recorded(steps, 4 * data, work, context=2, data=data, context_attention=work.context_attention)
    require_sound(logs)
    gathers = [each for each in logs[0] if isinstance(each, Start) and each.exchange.channel.ranks == (0, 1)]
    assert len(gathers) > 4 * LAYERS
