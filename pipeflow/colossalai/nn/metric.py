"""ColossalAI's `colossalai.nn.metric`."""

from __future__ import annotations

from torch import Tensor, nn


class Accuracy(nn.Module):
    """How many samples of a batch score their label highest, an integer tensor without dimensions."""

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """`outputs` are whole logits (batch, classes), `labels` (batch)."""
        return (outputs.argmax(-1) == labels.to(outputs.device)).sum()
