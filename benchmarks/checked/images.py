"""A convolutional net with batch norms over two replicas, whose statistics and gradients are added up by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.checked.split import Copied, Summed
from pipeflow.checking import record

RANKS, STEPS, BATCH = 2, 2, 8


class Norm(nn.BatchNorm2d):
    """A batch norm over all replicas; `over` is how many there are."""

    over, off = 1, ""

    def forward(self, input: Tensor) -> Tensor:
        sums = torch.stack([input.sum((0, 2, 3)), input.square().sum((0, 2, 3))])
        many = input.numel() / len(sums[0])
        if self.over > 1 and self.off != "own statistics":
            sums, many = Summed.apply(Copied.apply(sums)), many * self.over  # type: ignore[no-untyped-call]  # torch's
        mean = sums[0] / many
        spread = sums[1] / many - mean.square()
        with torch.no_grad():
            share = 0.01 if self.off == "other momentum" else 0.1
            self.running_mean.lerp_(mean, share)  # type: ignore[union-attr]  # it has one
            self.running_var.lerp_(spread, share)  # type: ignore[union-attr]  # it has one
        scaled = (input - mean[:, None, None]) * (spread + self.eps).rsqrt()[:, None, None]
        return scaled * self.weight[:, None, None] + self.bias[:, None, None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), Norm(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 12, 3, stride=2), Norm(12)
        self.act, self.head = nn.ReLU(), nn.Linear(12, 5)

    def forward(self, images: Tensor) -> Tensor:
        values = self.act(self.norm1(self.conv1(images)))
        values = self.act(self.norm2(self.conv2(values)))
        found: Tensor = self.head(values.mean((2, 3)))
        return found


def run(folder: str, fault: str = "", ranks: int = RANKS) -> None:
    """A recorded run on this rank."""
    rank = dist.get_rank() if ranks > 1 else 0
    torch.manual_seed(3 + (rank if fault == "own seeds" else 0))
    made: Any = Net()
    made.norm1.over = made.norm2.over = ranks
    made.norm2.off = fault
    optimizer = torch.optim.SGD(made.parameters(), 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(4)
    images, labels = (
        torch.randn(STEPS, BATCH, 3, 8, 8, generator=generator),
        torch.randint(5, (STEPS, BATCH), generator=generator),
    )
    mine = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    with record(Path(folder), made):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(made(images[step, mine]), labels[step, mine], reduction="sum") / BATCH
            loss.backward()
            for parameter in made.parameters() if ranks > 1 else ():
                dist.all_reduce(parameter.grad)
            optimizer.step()


def plain(folder: Path) -> Path:
    """The reference."""
    run(str(folder), ranks=1)
    return folder
