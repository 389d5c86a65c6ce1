"""Criteria that are hard to read: each is that of the whole batch, or an error that says what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow import Pipeline, UsageError, execute_pipeline, make_schedule
from pipeflow.testing import RankError, run_threads
from tests.losses.forms import IGNORED

CLASSES, LENGTH, WIDTH, PARTS = 5, 4, 3, 3
Loss = Callable[[Tensor, Tensor], Tensor]


def each(z: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(z.transpose(1, 2), y, reduction="none", ignore_index=IGNORED)


def mask(y: Tensor) -> Tensor:
    return (y != IGNORED).double()


def count(y: Tensor) -> Tensor:
    return (y != IGNORED).sum()


def entropy(z: Tensor, y: Tensor) -> Tensor:
    return each(z, y).sum() / count(y)


def zero_without_labels(z: Tensor, y: Tensor) -> Tensor:
    return entropy(z, y) if count(y) != 0 else z.sum() * 0


def sum_without_labels(z: Tensor, y: Tensor) -> Tensor:
    number = count(y)
    return each(z, y).sum() / number if number.item() > 0 else each(z, y).sum()


def mean_if_all_count(z: Tensor, y: Tensor) -> Tensor:
    return entropy(z, y) if (y == IGNORED).any() else each(z, y).mean()


def more_if_any(z: Tensor, y: Tensor) -> Tensor:
    return entropy(z, y) + (z.square().mean() if (y == CLASSES - 1).any() else 0)


def twice_if_many(z: Tensor, y: Tensor) -> Tensor:
    return each(z, y).mean() * (2 if count(y).item() > 10 else 1)


def at_least(least: int) -> Loss:
    return lambda z, y: each(z, y).sum() / max(least, int(count(y)))


def balanced(z: Tensor, y: Tensor) -> Tensor:
    share = mask(y).mean()
    return share * each(z, y).mean() + (1 - share) * (z[..., 0].square() * (1 - mask(y))).mean()


def scaled_by_mask(z: Tensor, y: Tensor) -> Tensor:
    return each(z, y).mean() + z.square().mean() * mask(y).mean()


def one_of_two(z: Tensor, y: Tensor) -> Tensor:
    return torch.where(count(y) > 7, entropy(z, y), each(z, y).mean())


def cancelled(z: Tensor, y: Tensor) -> Tensor:
    """In the first microbatch the weights add up to 0."""
    weights = torch.where(torch.arange(LENGTH) % 2 == 0, 1.0, torch.where(y[:, :1] == y[0, 0], 3.0, -1.0).double())
    return (each(z, y) * weights).sum() / weights.sum()


def truncated(z: Tensor, y: Tensor) -> Tensor:
    return each(z, y).sum() / (count(y) * 0.3).long().clamp(min=1)


def as_bool(z: Tensor, y: Tensor) -> Tensor:
    return each(z, y).sum() / count(y).clamp(min=1) * count(y).bool()


def inverted(z: Tensor, y: Tensor) -> Tensor:
    return each(z, y).sum() / (count(y) + (1 - (y != IGNORED).any().float()) + (count(y) & 1))


def mean_and_sum(z: Tensor, y: Tensor) -> Tensor:
    """The mean is not finite in a microbatch without labels."""
    return functional.cross_entropy(z.flatten(0, 1), y.flatten()) + 0.1 * z.square().sum()


def of_the_worst(z: Tensor, y: Tensor) -> Tensor:
    losses = each(z, y)
    return losses[losses > 1].mean()


def transposed(z: Tensor, y: Tensor) -> Tensor:
    return each(z, y).flatten() @ y.double().t().reshape(-1)


def outer_and_inner(z: Tensor, y: Tensor) -> Tensor:
    return torch.bmm(z.reshape(-1, 1, CLASSES), z.transpose(0, 1).reshape(-1, CLASSES, 1)).mean()


def less_the_mean(z: Tensor, y: Tensor) -> Tensor:
    return functional.linear(z[:, 0], torch.eye(CLASSES, dtype=z.dtype), -z[:, 0].mean(0)).square().mean()


def scaled_product(z: Tensor, y: Tensor) -> Tensor:
    return torch.addmm(z[:, 0], z[:, 0], torch.eye(CLASSES, dtype=z.dtype), beta=0, alpha=1 / len(z)).sum()


def added_to_a_product(z: Tensor, y: Tensor) -> Tensor:
    ones = torch.ones(len(z), CLASSES, dtype=z.dtype)
    return torch.addmm(z[:, 0], ones[:, :2], ones[:2]).square().mean()


def pairs(z: Tensor, y: Tensor) -> Tensor:
    return functional.conv1d(z[:, 0, :, None], z[:, 1, :, None]).square().mean()


def numbered(z: Tensor, y: Tensor) -> Tensor:
    return torch.stack([each(z, y).mean(1), torch.arange(len(y), dtype=z.dtype)], 1).prod(1).sum()


def running(z: Tensor, y: Tensor) -> Tensor:
    return (each(z, y).mean(1) * torch.ones(len(y), dtype=z.dtype).cumsum(0)).sum()


def scattered(z: Tensor, y: Tensor) -> Tensor:
    return torch.zeros(20, CLASSES, dtype=z.dtype).scatter_add(1, y.clamp(min=0), each(z, y)).mean()


def scattered_shares(z: Tensor, y: Tensor) -> Tensor:
    return (torch.zeros_like(z[:, 0]).scatter(1, y[:, :1].clamp(min=0), 1 / len(y)) * z[:, 0]).sum()


def at_values(z: Tensor, y: Tensor) -> Tensor:
    return z.reshape(-1, CLASSES)[y[y != IGNORED]].square().mean()


def at_other_places(z: Tensor, y: Tensor) -> Tensor:
    return z.reshape(-1, CLASSES)[(y[:, 0] > 1).nonzero()[:, 0]].square().mean()


def backwards(z: Tensor, y: Tensor) -> Tensor:
    return (z[torch.arange(0, -len(z), -1)] * z).mean()


def shifted(z: Tensor, y: Tensor) -> Tensor:
    return (z - functional.pad(z, (0, 0, 0, 0, 1, -1))).square().mean()


def present(z: Tensor, y: Tensor) -> Tensor:
    found = torch.zeros(2, dtype=z.dtype)
    found[y[:, 0].clamp(0, 1)] = 1
    return each(z, y).sum() / found.sum()


def power(z: Tensor, y: Tensor) -> Tensor:
    return each(z, y).pow(len(y)).mean()


def over_boxes(z: Tensor, y: Tensor) -> Tensor:
    """DETR's: in a microbatch with as many boxes as samples, their number looks like that of the samples."""
    boxes = y == 0
    number = torch.as_tensor([int(boxes.sum())], dtype=torch.float).clamp(min=1).item()
    return z[boxes].abs().sum() / number


def signed(z: Tensor, y: Tensor) -> Tensor:
    signs = mask(y) * torch.where(y == 0, 1.0, -1.0)
    return (each(z, y) * signs).sum() / signs.sum()


def written(z: Tensor, y: Tensor) -> Tensor:
    weights = mask(y)
    torch._foreach_mul_([weights], 1 / len(y))
    return (each(z, y) * weights).sum()


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.linspace(0, 1, 20, dtype=torch.float64))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return (each(z, y).mean(1) * self.get_buffer("weights")[: len(y)]).sum()


def normalized(z: Tensor, y: Tensor) -> Tensor:
    rows = nn.functional.batch_norm(z.flatten(0, 1), None, None, training=True)
    return (rows.sigmoid() * z.flatten(0, 1)).mean()


class Centered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.center: Tensor
        self.register_buffer("center", torch.zeros(CLASSES, dtype=torch.float64))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        loss = (z - self.center).square().mean()
        self.center = 0.9 * self.center + 0.1 * z.detach().mean((0, 1))
        return loss


class Weighted(nn.Module):
    """Two tasks with learned weights (Kendall et al., 2018), a parameter as a term, or one parameter for both tasks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.logs = nn.Parameter(torch.tensor([0.3, -0.2], dtype=torch.float64))
        self.log = nn.Parameter(torch.tensor(0.1, dtype=torch.float64))
        self.kind = self.__name__ = kind

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        tasks = entropy(z, y), z.square().mean()
        match self.kind:
            case "learned":
                return sum(
                    ((-self.logs[at]).exp() * task + self.logs[at] for at, task in enumerate(tasks)), z.sum() * 0
                )
            case "term":
                return tasks[0] + self.log
            case "written":
                return (tasks[0] + self.log * 1) + tasks[1] * self.log.exp()
        return (tasks[0] + tasks[1]) * self.log.exp()


def batch_of(kind: str) -> tuple[Tensor, Tensor]:
    """Labels of 9 samples of which all count that are not in the first microbatch, or fewer of each sample, or none or
    all in the first one.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(9, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES - 1, (9, LENGTH), generator=generator)
    labels[8, 0] = CLASSES - 1
    lengths = LENGTH - torch.arange(9) % 3
    if kind != "fewer":
        lengths[:3] = LENGTH if kind == "all" else 0
    return inputs, torch.where(torch.arange(LENGTH) < lengths[:, None], labels, IGNORED)


def steps(loss: Loss, batches: list[tuple[Tensor, Tensor]]) -> list[Any]:
    """The losses of steps, with those of the whole batches, and the gradients likewise."""
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)
    pipeline = Pipeline(layer, make_schedule("1f1b", ranks=1, microbatches=PARTS), criterion=loss)
    found = []
    for batch in batches:
        expected = loss(layer(batch[0]), batch[1])
        own = [layer.weight, *(loss.parameters() if isinstance(loss, nn.Module) else ())]
        gradients = torch.autograd.grad(expected, own, allow_unused=True)
        for each in own:
            each.grad = None
        output = execute_pipeline(iter([batch]), pipeline)
        assert output.loss is not None
        found.append((output.loss.item(), expected.item(), [each.grad for each in own], [*gradients]))
    return found


def require_right(found: list[Any]) -> None:
    for loss, expected, mine, gradients in found:
        assert loss == pytest.approx(expected, rel=1e-9)
        torch.testing.assert_close(mine, gradients, rtol=1e-9, atol=1e-11)


def require_refused(loss: Loss, batch: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(UsageError, match=r'Pass weigh=.*loss_over="batch"'):
        steps(loss, [batch])


RIGHT: list[tuple[Loss, str]] = [
    *((zero_without_labels, kind) for kind in ("fewer", "all")),
    *((sum_without_labels, kind) for kind in ("fewer", "all")),
    *((mean_if_all_count, kind) for kind in ("none",)),
    *((at_least(1), kind) for kind in ("fewer", "all")),
    *((loss, kind) for loss in (truncated, inverted, mean_and_sum) for kind in ("fewer", "none", "all")),
    *((loss, kind) for loss in (as_bool, scaled_by_mask) for kind in ("fewer", "all")),
    *((Weighted(kind), "all") for kind in ("learned", "written")),
]
REFUSED: list[tuple[Loss, str]] = [
    *((loss, "none") for loss in (zero_without_labels, sum_without_labels, at_least(1), as_bool, scaled_by_mask)),
    *((loss, "all") for loss in (mean_if_all_count, more_if_any, balanced)),
    *((loss, "fewer") for loss in (more_if_any, twice_if_many, at_least(12), one_of_two, cancelled)),
    *((loss, "fewer") for loss in (of_the_worst, transposed, outer_and_inner, less_the_mean, scaled_product)),
    *(
        (loss, "fewer")
        for loss in (added_to_a_product, pairs, numbered, running, scattered, scattered_shares, normalized)
    ),
    *((loss, "fewer") for loss in (at_values, at_other_places, backwards, shifted, present, power, written)),
    *((loss, "fewer") for loss in (Sliced(), Centered())),
    (at_least(10), "all"),
]


def name_of(value: object) -> str:
    return value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__)


@pytest.mark.parametrize(("loss", "kind"), RIGHT, ids=name_of)
def test_it_is_that_of_the_whole_batch(loss: Loss, kind: str) -> None:
    [found] = run_threads(steps, 1, loss, [batch_of(kind)])
    require_right(found)


@pytest.mark.parametrize(("loss", "kind"), REFUSED, ids=name_of)
def test_it_is_an_error(loss: Loss, kind: str) -> None:
    run_threads(require_refused, 1, loss, batch_of(kind))


@pytest.mark.parametrize("kind", ["term", "both"])
def test_a_parameter_whose_gradient_would_be_lost_is_told(kind: str) -> None:
    with pytest.raises(RankError, match=r"write `parameter \* 1` where it is added, and multiply each term alone"):
        run_threads(steps, 1, Weighted(kind), [batch_of("all")])


def test_a_divisor_may_be_0_for_the_whole_batch_alone() -> None:
    labels = torch.tensor([0] * 3 + [1] * 3 + [IGNORED] * 3)[:, None].expand(9, LENGTH)
    with pytest.raises(RankError, match="adds up to 0 over the microbatches"):
        run_threads(steps, 1, signed, [(batch_of("all")[0], labels)])


def test_a_number_of_one_microbatch_may_look_like_another() -> None:
    labels = torch.ones(7, LENGTH, dtype=torch.long)
    labels[0, 0] = labels[3:5, 0] = labels[5:, :2] = 0
    with pytest.raises(RankError, match="it is another one for some microbatches"):
        run_threads(steps, 1, over_boxes, [(batch_of("all")[0][:7], labels)])


def test_later_batches_may_be_read_otherwise() -> None:
    [found] = run_threads(steps, 1, mean_if_all_count, [batch_of("none"), batch_of("fewer")])
    require_right(found)
