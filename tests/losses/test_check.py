"""What a reading overlooks, made-up outputs tell; and a term with a divisor of its own has a gradient of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import UsageError
from pipeflow.testing import run_threads
from tests.losses.forms import IGNORED, each_token, mean_ce
from tests.losses.test_forms import case, with_criterion
from tests.losses.test_refused import batch_of as batch_in_which
from tests.losses.test_refused import each, entropy, require_right, steps
from tests.losses.words import batch_of


def less_than_the_batch(z: Tensor, y: Tensor) -> Tensor:
    return each_token(z, y).sum() / (len(y) - 1)


def counted_in_python(z: Tensor, y: Tensor) -> Tensor:
    count: int = sum(label != IGNORED for row in y.tolist() for label in row)
    return each_token(z, y).sum() / count


def size_in_a_constant(z: Tensor, y: Tensor) -> Tensor:
    return each_token(z, y).sum() / torch.tensor(y.numel()).clamp(min=1)


def ones_as_weights(z: Tensor, y: Tensor) -> Tensor:
    weights = torch.ones_like(y, dtype=z.dtype)
    return (each_token(z, y) * weights).sum() / weights.sum()


def truncated_count(z: Tensor, y: Tensor) -> Tensor:
    return each_token(z, y).sum() / ((y != IGNORED).sum() * 0.3).long()


def share_in_a_where(z: Tensor, y: Tensor) -> Tensor:
    return (each_token(z, y) * torch.where(y != IGNORED, 1 / len(y), 0.0)).sum()


def without_gradient(z: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        bonus = z.square().mean()
    return mean_ce(z, y) + bonus


def a_detached_term(z: Tensor, y: Tensor) -> Tensor:
    return 0.1 * z.square().mean() + mean_ce(z, y).detach()


def a_term_twice(z: Tensor, y: Tensor) -> Tensor:
    loss = mean_ce(z, y)
    return loss + 0.1 * z.square().mean() + 0.5 * loss


def a_term_less_itself(z: Tensor, y: Tensor) -> Tensor:
    loss = mean_ce(z, y)
    return loss + z.square().mean() + (loss - loss.detach())


class Fused(torch.autograd.Function):
    """A mean whose gradient is computed in its forward, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            given = z.detach().requires_grad_()
            loss = mean_ce(given, y)
            ctx.save_for_backward(*torch.autograd.grad(loss, given))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        [saved] = ctx.saved_tensors
        return gradient * saved, None


def fused_beside_another(z: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = Fused.apply(z, y)  # type: ignore[no-untyped-call]
    return loss + 0.1 * z.square().mean()


REFUSED = [
    *(less_than_the_batch, counted_in_python, size_in_a_constant, ones_as_weights, truncated_count, share_in_a_where),
    *(without_gradient, a_detached_term, a_term_twice, a_term_less_itself, fused_beside_another),
]


@pytest.mark.some(5)
@pytest.mark.parametrize("loss", REFUSED, ids=case)
def test_what_does_not_add_up_is_refused(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    def rank() -> str:
        with pytest.raises(UsageError) as caught:
            with_criterion(loss, batch_of(6))
        return str(caught.value)

    assert all("it is not known what the criterion's loss is divided by" in each for each in run_threads(rank, 2))


class Settings(nn.Module):
    """Means over samples or labels, as what it keeps in a dict or a tensor says."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = {"labels": kept}

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return entropy(z, y) if self.kept["labels"] else each(z, y).mean()


SETTING = False


def by_global(z: Tensor, y: Tensor) -> Tensor:
    return entropy(z, y) if SETTING else each(z, y).mean()


@pytest.mark.parametrize("kind", ["dict", "tensor", "global"])
def test_settings_may_change(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = torch.tensor(0)
    settings = Settings(setting if kind == "tensor" else False)

    def batches() -> Any:
        yield batch_in_which("fewer")
        settings.kept["labels"] = settings.kept["labels"] if kind == "tensor" else True
        setting.fill_(1)
        monkeypatch.setitem(globals(), "SETTING", True)
        yield batch_in_which("fewer")

    [found] = run_threads(steps, 1, by_global if kind == "global" else settings, batches())
    require_right(found)
