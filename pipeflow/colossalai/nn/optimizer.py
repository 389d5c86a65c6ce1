"""ColossalAI's `colossalai.nn.optimizer`."""

from __future__ import annotations

from typing import Any

from torch.optim import Adam, AdamW

from pipeflow.optim.lamb import Lamb

__all__ = ["HybridAdam", "Lamb"]


def HybridAdam(  # noqa: N802  # its name there
    model_params: Any, lr: float = 1e-3, *, weight_decay: float = 0.0, adamw_mode: bool = True, **options: Any
) -> Adam:
    """Makes torch's AdamW, or its Adam with `adamw_mode=False`. `options` are theirs."""
    return (AdamW if adamw_mode else Adam)(model_params, lr=lr, weight_decay=weight_decay, **options)
