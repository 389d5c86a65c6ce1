"""Balance losses of experts, computed from the tokens of all replicas and context ranks. Must not contain: routers, and
how the losses of microbatches are weighed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import keep, kept
from pipeflow.engine.parallel.transport.protocol import Alone, Group
from pipeflow.engine.tensor.regions import exchanged, summed
from pipeflow.engine.torch_private.modes import FakeTensor

NAME = "load_balancing_loss_func"
"""The function of transformers that computes the balance loss, in the file of each model that has one."""
RANKS, FOUND = "ranks of balance losses", "balance losses"  # what a rank keeps meanwhile
_PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


def balance_loss(logits: tuple[Tensor, ...], experts: int, top_k: int, mask: Tensor | None, *, group: Group) -> Tensor:
    """The balance loss of the tokens of all ranks of `group`, a scalar. It is that of transformers: the number of
    experts times the sum over experts of two means over all tokens and layers. These are how often a token chose the
    expert, and its mean probability (Switch Transformers, 2101.03961, equations 4 to 6).

    Args:
        logits: the router logits of each layer, [tokens, experts].
        experts: number of experts.
        top_k: number of experts of a token.
        mask: 0 for each token that does not count, as many entries as tokens; None if all count.
        group: the ranks, which call it together, and its backward too.
    """
    device, dtype = logits[0].device, torch.promote_types(logits[0].dtype, torch.float32)
    chosen, likely, tokens = (torch.zeros(size, dtype=dtype, device=device) for size in (experts, experts, 1))
    for layer in logits:
        probabilities = layer.to(device).softmax(-1)
        counts = torch.ones(len(layer), dtype=dtype, device=device) if mask is None else mask.reshape(-1).to(chosen)
        which = probabilities.topk(top_k, -1).indices.flatten()
        chosen = chosen.scatter_add(0, which, counts.repeat_interleave(top_k))
        likely = likely + (probabilities.to(dtype) * counts[:, None]).sum(0)
        tokens = tokens + counts.sum()
    chosen, likely, tokens = exchanged(torch.cat([chosen, likely, tokens]), group, summed, summed).split(
        [experts, experts, 1]
    )
    loss: Tensor = (chosen / tokens * (likely / tokens)).sum() * experts
    return loss


@contextmanager
def balanced_over(group: Group) -> Iterator[None]:
    """Within it, the balance losses that `balance_losses` has found are those of the tokens of all ranks of `group`."""
    keep(RANKS, group)
    try:
        yield
    finally:
        keep(RANKS, None)


@contextmanager
def balance_losses(module: nn.Module) -> Iterator[list[bool]]:
    """Finds the balance losses that transformers computes for `module`, and makes them follow `balanced_over`. A
    function of another form than `balance_loss` stays as it is.

    Yields a list, which gets an entry for each balance loss that is computed meanwhile: whether it has this form.
    """
    for file in {base.__module__ for each in module.modules() for base in type(each).__mro__} & sys.modules.keys():
        stock = vars(sys.modules[file]).get(NAME)
        if inspect.isfunction(stock) and not hasattr(stock, "is_alike"):
            vars(sys.modules[file])[NAME] = _over_ranks(stock, is_alike=_is_alike(stock))
    found = list[bool]()
    keep(FOUND, found)
    try:
        yield found
    finally:
        keep(FOUND, None)


def _over_ranks(stock: Callable[..., Any], *, is_alike: bool) -> Callable[..., Any]:
    signature = inspect.signature(stock)

    @wraps(stock)
    def loss(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        found, group = _kept(FOUND), _kept(RANKS)
        if found is not None:
            found.append(is_alike)
        logits = given.args[0]
        is_planned = isinstance(logits, tuple) and any(isinstance(each, FakeTensor) for each in logits)
        if group is None or not is_alike or not isinstance(logits, tuple) or is_planned:
            return stock(*args, **kwargs)
        return balance_loss(*given.args, group=group)

    vars(loss)["is_alike"] = is_alike
    return loss


def _kept(key: str) -> Any:
    """What this rank keeps; None on a thread that is no rank."""
    with suppress(UsageError):
        return kept(key)
    return None


def _is_alike(stock: Callable[..., Any]) -> bool:
    """Whether a function computes what `balance_loss` does, tried with small logits: their value and gradients."""
    if [*inspect.signature(stock).parameters] != _PARAMETERS:
        return False
    generator = torch.Generator("cpu").manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    values = torch.randn(2, 6, 5, **options).requires_grad_()
    for mask in (None, (torch.rand(2, 3, **options) > 0.3).long()):
        found = list[Tensor]()
        with torch.enable_grad():
            for each in (stock, lambda *given: balance_loss(*given, group=Alone())):
                try:
                    loss = each(values.unbind(), 5, 2, mask)
                    found.append(torch.cat([loss.reshape(1), torch.autograd.grad(loss, values)[0].flatten()]))
                except Exception:  # whatever a function of another form raises
                    return False
        if not torch.allclose(found[0], found[1], rtol=1e-4, atol=1e-6):
            return False
    return True
