"""ColossalAI's hook for TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence

import pipeflow.training as native
from pipeflow.colossalai.context import ParallelMode


class TensorboardHook(native.TensorBoardHook):
    """pipeflow's TensorBoardHook: rank 0 writes metrics of the whole job; `ranks` and `parallel_mode` do nothing."""

    def __init__(
        self,
        log_dir: str,
        ranks: Sequence[int] | None = None,
        parallel_mode: ParallelMode = ParallelMode.GLOBAL,
        priority: int = native.TensorBoardHook.priority,
    ) -> None:
        super().__init__(log_dir, every=1)
        self.priority = priority
