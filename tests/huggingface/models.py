"""Models of transformers on disk, and what serial training makes of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

RATE = 0.05


def saved(module: Any, folder: Path, **options: Any) -> Path:
    """The folder, with the model in it."""
    module.save_pretrained(folder, **options)
    return folder


def trained(module: nn.Module, batch: dict[str, Any], steps: int) -> nn.Module:
    """A copy after so many steps."""
    made = copy.deepcopy(module)
    optimizer = torch.optim.SGD(made.parameters(), lr=RATE)
    for _ in range(steps):
        made(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return made


@torch.no_grad()
def logits(module: nn.Module, batch: dict[str, Any]) -> Tensor:
    """What the model says in evaluation mode."""
    found: Tensor = module.eval()(**batch).logits
    return found
