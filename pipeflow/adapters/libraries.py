"""What adapters do with the libraries whose scripts they run: import them when they are first needed, with one error
that says how a missing one is installed; replace attributes for a while; and refuse what no adapter can do, saying what
works instead. Must not contain: options of one library.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS

from pipeflow.core.distributions import install
from pipeflow.core.errors import UsageError

DIVIDED = "pipeline= and tensor= divide the model, and further processes are replicas"
"""Instead of what divides models in other engines."""


@contextmanager
def needed(package: str, extra: str | None = None, who: str = "this") -> Iterator[None]:
    """Raises UsageError if an import inside the `with` block fails.

    Args:
        package: name of the package that is imported there.
        extra: the extra of pipeflow that installs it; None if it is installed by its own name.
        who: what needs it.
    """
    try:
        yield
    except ImportError as error:
        how = f"pip install {package}" if extra is None else install(extra)
        raise UsageError(f"{who} needs the package {package}: {how} (importing it failed with: {error})") from error


def transformers_library() -> Any:
    """Returns the package transformers. Raises UsageError if it is not installed."""
    with needed("transformers", "huggingface"):
        import transformers
    return transformers


@contextmanager
def instead(entries: dict[str, Any], **others: Any) -> Iterator[None]:
    """Inside the `with` block, some entries of a dict, such as the attributes of an object, are others."""
    before = {name: entries[name] for name in others if name in entries}
    entries.update(others)
    try:
        yield
    finally:
        entries.update(before)  # in the same order
        for name in others.keys() - before.keys():
            del entries[name]


def require_unwrapped(module: nn.Module) -> None:
    """Raises UsageError for a module that other engines divide or wrap, or with such a part."""
    for each in module.modules():
        if isinstance(each, DistributedDataParallel | FullyShardedDataParallel | FSDPModule):
            name = type(module).__name__
            where = f"the model is a {name}, which" if each is module else f"{name} has a part that"
            raise UsageError(
                f"{where} DDP or FSDP wraps, but a pipeline needs neither: {DIVIDED}, whose gradients it averages; "
                "pass the module itself"
            )


def require_one_optimizer(optimizers: Sequence[Any], who: str) -> None:
    """Raises UsageError for several optimizers, and for one that computes the loss several times."""
    if len(optimizers) > 1:
        raise UsageError(
            f"{who} has {len(optimizers)} optimizers, but a pipeline steps one: use one optimizer with several "
            'parameter groups, each with its own options, such as AdamW([{"params": first, "lr": 1e-3}, '
            '{"params": second, "lr": 1e-4}])'
        )
    if optimizers and isinstance(optimizers[0], LBFGS):
        raise UsageError(
            "LBFGS is not possible with a pipeline, since a rank has a part of the weights: use AdamW or SGD"
        )
