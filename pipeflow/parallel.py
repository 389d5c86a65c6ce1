"""This process among the others: a short path for `pipeflow.engine.parallel`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeflow.engine.parallel import *  # noqa: F403  # all its names
else:
    from pipeflow.core.face import stand_for

    stand_for(__name__, "pipeflow.engine.parallel")
