"""accelerate's Accelerator: a short path for `pipeflow.adapters.accelerate`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeflow.adapters.accelerate import *  # noqa: F403  # all its names

    def __getattr__(name: str) -> Any: ...

else:
    from pipeflow.core.face import stand_for

    stand_for(__name__, "pipeflow.adapters.accelerate")
