"""Models of transformers, and its Trainer: a short path for `pipeflow.adapters.huggingface`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeflow.adapters.huggingface import *  # noqa: F403  # all its names
else:
    from pipeflow.core.face import stand_for

    stand_for(__name__, "pipeflow.adapters.huggingface")
