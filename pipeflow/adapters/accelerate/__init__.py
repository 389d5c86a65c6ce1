"""accelerate's Accelerator for a pipeline: the usual loop, in which a prepared model is cut into stages at its first
call. The library is an optional extra, `accelerate`; it is imported when a name here is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeflow.adapters.libraries import needed

if TYPE_CHECKING:
    from pipeflow.adapters.accelerate.accelerator import Accelerator
    from pipeflow.adapters.accelerate.options import ParallelismConfig

__all__ = ["Accelerator", "ParallelismConfig"]


def __getattr__(name: str) -> Any:
    """The classes, which derive from accelerate's, and its other names. Raises UsageError if accelerate is not
    installed.
    """
    if name.startswith("__"):
        raise AttributeError(f"module 'pipeflow.accelerate' has no attribute {name!r}")
    with needed("accelerate", "accelerate"):
        import accelerate
    if name == "utils":  # the module of this package, not accelerate's
        import pipeflow.adapters.accelerate.utils as found

        return found
    if name not in __all__:
        return getattr(accelerate, name)
    from pipeflow.adapters.accelerate.accelerator import Accelerator
    from pipeflow.adapters.accelerate.options import ParallelismConfig

    return Accelerator if name == "Accelerator" else ParallelismConfig
