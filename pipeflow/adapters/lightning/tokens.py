"""Training steps over context ranks, which share the tokens of each batch: the loss must be that which a model of
transformers computes of the whole batch. Must not contain: which tokens a rank has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from pipeflow.adapters.libraries import instead
from pipeflow.core.errors import UsageError
from pipeflow.engine.runtime.context_ranks import ALONE
from pipeflow.engine.stages.criterion import loss_in


def require_divisible(method: str, batch: object) -> None:
    """Raises UsageError for a step that does not train, and for a batch that is no dict of tokens."""
    if method != "training_step":
        raise UsageError(
            f"over context ranks, a LightningModule trains only, since each rank has the outputs of its own tokens: "
            f"leave {method} out, as with limit_val_batches=0, {ALONE}"
        )
    if not isinstance(batch, dict) or "input_ids" not in batch:
        raise UsageError(
            "a step of a LightningModule does not say which tensors of its batch have tokens, so context ranks cannot "
            f"divide them: use batches that are dicts with input_ids, position_ids and labels, {ALONE}"
        )


def _models(module: nn.Module) -> list[nn.Module]:
    """The models in a module that `share_tokens` has changed."""
    return [each for each in module.modules() if each is not module and vars(each).get("shares_tokens")]


def share_tokens_of(module: nn.Module) -> None:
    """Lets a LightningModule say how its model shares tokens. Raises UsageError unless it has one that does."""
    models = _models(module)
    if len(models) != 1 or "shifted" not in vars(models[0]):
        raise UsageError(
            f"context ranks need one model of transformers with a loss in a LightningModule, and {len(models)} of "
            f"{type(module).__name__} are known to share tokens: call share_tokens(model) in its "
            f"constructor, {ALONE}"
        )
    vars(module).update(shares_tokens=True, shifted=vars(models[0])["shifted"])


@contextmanager
def losses_of_model(module: nn.Module, batch: Mapping[str, Any]) -> Iterator[list[Tensor | None]]:
    """Inside the `with` block, the losses that the model in a module computes of the whole batch are listed."""
    losses: list[Tensor | None] = []
    [model] = _models(module)
    own: Any = model.forward

    def forward(*arguments: Any, **entries: Any) -> Any:
        output = own(*arguments, **entries)
        if all(entries.get(name) is entry for name, entry in batch.items()):
            losses.append(loss_in(output))
        return output

    with instead(vars(model), forward=forward):
        yield losses


def require_own_loss(loss: Tensor, losses: list[Tensor | None], others: Mapping[str, object]) -> None:
    """Raises UsageError for a loss that is not the model's own of the whole batch, and for other results of a step.

    Args:
        loss: what the step returned.
        losses: those of the model.
        others: what the step returned and logged beside the loss.
    """
    if not any(loss is each for each in losses):
        raise UsageError(
            "over context ranks, whose labels are shifted before tokens are divided, training_step returns the loss of "
            f"its model as it is, as in self.model(**batch).loss: return that, {ALONE}"
        )
    if others:
        raise UsageError(
            "over context ranks, training_step returns and logs its loss alone, since each rank has the outputs of its "
            f"own tokens: leave the rest out, {ALONE}"
        )
