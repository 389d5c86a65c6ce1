"""ColossalAI's `colossalai.nn.metric`."""

from __future__ import annotations

from torch import Tensor, nn


class Accuracy(nn.Module):
    """Number of samples in a batch whose label has the largest score, an integer scalar."""

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Takes whole logits [batch, classes] as `outputs`, and `labels` [batch]."""
        return (outputs.argmax(-1) == labels.to(outputs.device)).sum()
