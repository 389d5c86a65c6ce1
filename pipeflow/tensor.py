"""Tensor-parallel layers: a short path for `pipeflow.engine.tensor`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeflow.engine.tensor import *  # noqa: F403  # all its names
else:
    from pipeflow.core.face import stand_for

    stand_for(__name__, "pipeflow.engine.tensor")
