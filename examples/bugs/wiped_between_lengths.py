"""NeMo Automodel#3530: a pipeline is set up anew for each length of sequences, which wipes the gradients that the parts
of the accumulation before have left.

    pipeflow check examples/bugs/wiped_between_lengths.py --ranks 2
    pipeflow check examples/bugs/wiped_between_lengths.py --ranks 2 -- --mended
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

WORDS, WIDTH, SAMPLES, MICROBATCHES, STEPS = 20, 8, 4, 2, 2
LENGTHS = (4, 6, 5)  # of the parts of an accumulation


def layers() -> nn.Sequential:
    """A model of the next word; the same values on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS))


def batches() -> list[list[tuple[Tensor, Tensor]]]:
    """Words and the words after them, of each part of each step."""
    generator = torch.Generator().manual_seed(1)
    steps = [[torch.randint(WORDS, (SAMPLES, length + 1), generator=generator) for length in LENGTHS]] * STEPS
    return [[(words[:, :-1], words[:, 1:]) for words in step] for step in steps]


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """What tokens add to the mean over all tokens of a step."""
    total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / (SAMPLES * sum(LENGTHS))


class Pipeline:
    """Two stages of torch's pipelining under `fully_shard`, each on a group of one rank.

    Args:
        mended: whether gradients are put aside while the stages are set up.
    """

    def __init__(self, mended: bool) -> None:
        self.rank, self.mended = dist.get_rank(), mended
        self.module = part_of(layers(), self.rank)
        mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline", "data"))
        fully_shard(self.module, mesh=mesh["data"])

    def set_up(self, length: int) -> ScheduleGPipe:
        """The schedule for sequences of this length."""
        words = torch.empty(SAMPLES // MICROBATCHES, length, dtype=torch.long)
        hidden, logits = (torch.empty(*words.shape, width, requires_grad=True) for width in (WIDTH, WORDS))
        inputs, outputs = (words, hidden) if self.rank == 0 else (hidden, logits)
        stage = PipelineStage(self.module, self.rank, 2, torch.device("cpu"), inputs, outputs)
        return ScheduleGPipe(stage, MICROBATCHES, loss_of, scale_grads=False)

    def run(self, parts: list[tuple[Tensor, Tensor]]) -> None:
        """The parts of an accumulation, one after the other."""
        for words, labels in parts:
            schedule = self.set_up(words.shape[1])  # its first step wipes gradients
            kept = [parameter.grad for parameter in self.module.parameters()]
            if self.rank == 0:
                schedule.step(words)
            else:
                schedule.step(target=labels)
            for parameter, before in zip(self.module.parameters(), kept if self.mended else (), strict=False):
                if before is not None:
                    parameter.grad = before if parameter.grad is None else parameter.grad + before


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
    for parts in batches():
        optimizer.zero_grad()
        if pipeline is not None:
            pipeline.run(parts)
        else:
            for words, labels in parts:
                loss_of(model(words), labels).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
