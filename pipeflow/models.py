"""Models for every layout: a short path for `pipeflow.training.models`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeflow.training.models import *  # noqa: F403  # all its names
else:
    from pipeflow.core.face import stand_for

    stand_for(__name__, "pipeflow.training.models")
