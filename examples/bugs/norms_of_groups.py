"""NeMo Automodel#3816: each group of experts clips by a norm of its own, which lacks the experts of the others. What
all groups share is then clipped by different factors.

    pipeflow check examples/bugs/norms_of_groups.py --ranks 2
    pipeflow check examples/bugs/norms_of_groups.py --ranks 2 -- --mended
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

WIDTH, EXPERTS, SAMPLES, STEPS, MOST = 8, 4, 16, 2, 0.05


class Mixture(nn.Module):
    """A layer whose samples go to one expert each. A rank has some of the experts, and computes their share of the
    output for all samples; ranks add these up.
    """

    def __init__(self, own: range) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        experts = [nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)]
        self.experts = nn.ModuleDict({str(index): experts[index] for index in own})
        self.head = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        values = self.first(values)
        shares = self.router(values).softmax(-1)
        chosen = shares.argmax(-1)
        found = torch.zeros_like(values)
        for index, expert in self.experts.items():
            found = found + expert(values) * (shares[:, int(index)] * (chosen == int(index)))[:, None]
        outputs: Tensor = self.head(Summed.apply(found))  # type: ignore[no-untyped-call]  # torch's
        return outputs


class Summed(torch.autograd.Function):
    """The sum over ranks; each rank has the whole gradient of it."""

    @staticmethod
    def forward(_: object, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_: object, gradient: Tensor) -> Tensor:
        return gradient


def batches() -> list[tuple[Tensor, Tensor]]:
    """Inputs and labels of each step."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS, SAMPLES, WIDTH, generator=generator)
    return [*zip(inputs, 4 * inputs[..., :1].relu(), strict=True)]


def clip(model: Mixture, mended: bool) -> None:
    """Clips by the norm of the gradients that this rank has or, mended, by that of the whole model."""
    if not mended:
        clip_grad_norm_(model.parameters(), MOST)
        return
    experts = [each.grad for each in model.experts.parameters() if each.grad is not None]
    shared = [
        each.grad for name, each in model.named_parameters() if not name.startswith("experts") and each.grad is not None
    ]
    square = get_total_norm(experts) ** 2
    dist.all_reduce(square)
    clip_grads_with_norm_(model.parameters(), MOST, (square + get_total_norm(shared) ** 2).sqrt())


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    each = EXPERTS // ranks
    model = Mixture(range(rank * each, (rank + 1) * each))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in batches():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), labels).backward()
        for parameter in (*model.first.parameters(), *model.router.parameters()):  # own experts alone add to these
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        clip(model, "--mended" in sys.argv)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
