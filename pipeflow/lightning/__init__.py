"""Lightning's Trainer for a pipeline: a strategy that cuts the training step of an unmodified LightningModule. The
library is an optional extra, `lightning`; it is imported when a name here is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeflow.core.errors import UsageError
from pipeflow.core.extras import install

if TYPE_CHECKING:
    from pipeflow.lightning.strategy import PipelineStrategy

__all__ = ["PipelineStrategy"]


def __getattr__(name: str) -> Any:
    """The strategies, which derive from Lightning's. Raises UsageError if Lightning is not installed."""
    if name not in __all__:
        raise AttributeError(f"module 'pipeflow.lightning' has no attribute {name!r}")
    try:
        import lightning  # noqa: F401  # to say what is missing
    except ImportError as error:
        raise UsageError(
            f"this needs the package lightning: {install('lightning')} (importing it failed with: {error})"
        ) from error
    from pipeflow.lightning import strategy

    return strategy.PipelineStrategy
