"""The examples' GPT, which is `pipeflow.models` under the tutorials' names, and its optimizer. Must not contain:
which rank holds which stage, or initial weights (see `pipeflow.models.build_stage`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from pipeflow.models import GPTBlock, GPTEmbedding, GPTLMHead, GPTLMLoss
from pipeflow.models import GPTStage as PipelineGPTHybrid

__all__ = ["GPTBlock", "GPTEmbedding", "GPTLMHead", "GPTLMLoss", "PipelineGPTHybrid", "make_optimizer"]


def make_optimizer(
    parameters: Iterable[nn.Parameter], rate: float, steps: int
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """Adam, with a learning rate that rises to `rate` in the first twentieth of the steps, then a cosine to a tenth."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    rise = max(1, steps // 20)

    def factor(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        return 0.55 + 0.45 * math.cos(math.pi * (step - rise) / max(1, steps - rise))

    return optimizer, LambdaLR(optimizer, factor)
