"""DeepSpeed#8152: each stage of a pipeline divides the gradients that it receives by the number of microbatches, which
the stages after it have done before.

    pipeflow check examples/bugs/scaled_at_every_stage.py --ranks 3
    pipeflow check examples/bugs/scaled_at_every_stage.py --ranks 3 -- --mended
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH, SAMPLES, MICROBATCHES, STEPS = 8, 8, 4, 2


def layers() -> nn.Sequential:
    """The model; the same values on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))


def batches() -> list[tuple[Tensor, Tensor]]:
    """Inputs and labels of each step."""
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(2, STEPS, SAMPLES, WIDTH, generator=generator)
    return [*zip(inputs, labels, strict=True)]


class Stage(nn.Module):
    """The layer that a rank has of the model, under its name there.

    Args:
        index: of the layer.
        mended: whether the last stage alone divides gradients.
    """

    def __init__(self, index: int, mended: bool) -> None:
        super().__init__()
        self.add_module(str(index), layers()[index])
        self.previous = index - 1 if index > 0 else None
        self.next = index + 1 if index + 1 < dist.get_world_size() else None
        self.divides = self.next is None or not mended

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.children():
            values = layer(values)
        if self.divides:
            values.register_hook(lambda gradient: gradient / MICROBATCHES)
        return values

    def run(self, inputs: Tensor, labels: Tensor) -> None:
        """All forwards, then all backwards."""
        kept = []
        for values, wanted in zip(inputs.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True):
            received = values.clone()
            if self.previous is not None:
                dist.recv(received, self.previous)
                received.requires_grad_()
            outputs = self(received)
            if self.next is not None:
                dist.send(outputs.detach(), self.next)
            kept.append((received, outputs, wanted))
        for received, outputs, wanted in kept:
            if self.next is None:
                nn.functional.mse_loss(outputs, wanted).backward()
            else:
                gradient = torch.empty_like(outputs)
                dist.recv(gradient, self.next)
                outputs.backward(gradient)
            if self.previous is not None:
                assert received.grad is not None
                dist.send(received.grad, self.previous)


def main() -> None:
    dist.init_process_group("gloo")
    is_plain = dist.get_world_size() == 1
    model: nn.Module = layers() if is_plain else Stage(dist.get_rank(), "--mended" in sys.argv)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in batches():
        optimizer.zero_grad()
        if isinstance(model, Stage):
            model.run(inputs, labels)
        else:
            nn.functional.mse_loss(model(inputs), labels).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
