"""The names of torch.distributed.pipelining: a short path for `pipeflow.adapters.pipelining`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeflow.adapters.pipelining import *  # noqa: F403  # all its names

    def __getattr__(name: str) -> Any: ...

else:
    from pipeflow.core.face import stand_for

    stand_for(__name__, "pipeflow.adapters.pipelining")
