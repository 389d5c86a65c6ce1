"""torchtitan#1733: a pipeline divides the gradients by its number of microbatches after each part of an accumulation,
and so divides those of the parts before once more.

    pipeflow check examples/bugs/scaled_in_every_step.py --ranks 2
    pipeflow check examples/bugs/scaled_in_every_step.py --ranks 2 -- --mended
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

WORDS, WIDTH, LENGTH, SAMPLES = 20, 8, 6, 12
ACCUMULATED, MICROBATCHES, STEPS = 3, 2, 2


def layers() -> nn.Sequential:
    """A model of the next word; the same values on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS))


def batches() -> list[tuple[Tensor, Tensor]]:
    """Words and the words after them of each step."""
    words = torch.randint(WORDS, (STEPS, SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return [(step[:, :-1], step[:, 1:]) for step in words]


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Pipeline:
    """Two stages of torch's pipelining.

    Args:
        mended: whether the loss is divided, instead of the gradients.
    """

    def __init__(self, mended: bool) -> None:
        rank = dist.get_rank()
        self.module = part_of(layers(), rank)
        stage = PipelineStage(self.module, rank, 2, torch.device("cpu"))
        parts = ACCUMULATED * MICROBATCHES if mended else ACCUMULATED
        self.schedule = Schedule1F1B(
            stage, MICROBATCHES, lambda logits, labels: mean_loss(logits, labels) / parts, scale_grads=not mended
        )

    def run(self, words: Tensor, labels: Tensor) -> None:
        """The parts of an accumulation, one after the other."""
        for given, wanted in zip(words.chunk(ACCUMULATED), labels.chunk(ACCUMULATED), strict=True):
            if dist.get_rank() == 0:
                self.schedule.step(given)
            else:
                self.schedule.step(target=wanted)


def part_of(whole: nn.Sequential, rank: int) -> nn.Sequential:
    """Two layers of the model, under the names that they have there."""
    found = nn.Sequential()
    for index in (2 * rank, 2 * rank + 1):
        found.add_module(str(index), whole[index])
    return found


def main() -> None:
    dist.init_process_group("gloo")
    pipeline = Pipeline("--mended" in sys.argv) if dist.get_world_size() > 1 else None
    model = pipeline.module if pipeline is not None else layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for words, labels in batches():
        optimizer.zero_grad()
        if pipeline is not None:
            pipeline.run(words, labels)
        else:
            for given, wanted in zip(words.chunk(ACCUMULATED), labels.chunk(ACCUMULATED), strict=True):
                (mean_loss(model(given), wanted) / ACCUMULATED).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
