"""Optimizers, clipping and learning rates: a short path for `pipeflow.training.optim`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeflow.training.optim import *  # noqa: F403  # all its names
else:
    from pipeflow.core.face import stand_for

    stand_for(__name__, "pipeflow.training.optim")
