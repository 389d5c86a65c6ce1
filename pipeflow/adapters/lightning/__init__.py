"""Lightning's Trainer for a pipeline: a strategy that cuts the training step of an unmodified LightningModule. The
library is an optional extra, `lightning`; it is imported when a name here is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeflow.adapters.libraries import needed

if TYPE_CHECKING:
    from pipeflow.adapters.lightning.strategy import PipelineStrategy

__all__ = ["PipelineStrategy"]


def __getattr__(name: str) -> Any:
    """The strategies, which derive from Lightning's. Raises UsageError if Lightning is not installed."""
    if name not in __all__:
        raise AttributeError(f"module 'pipeflow.lightning' has no attribute {name!r}")
    with needed("lightning", "lightning"):
        import lightning  # noqa: F401  # to say what is missing
    from pipeflow.adapters.lightning import strategy

    return strategy.PipelineStrategy
