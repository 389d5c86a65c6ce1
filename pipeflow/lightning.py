"""Lightning's Trainer and Fabric: a short path for `pipeflow.adapters.lightning`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeflow.adapters.lightning import *  # noqa: F403  # all its names
else:
    from pipeflow.core.face import stand_for

    stand_for(__name__, "pipeflow.adapters.lightning")
