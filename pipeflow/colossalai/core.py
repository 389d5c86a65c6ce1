"""ColossalAI's `colossalai.core`: the global context, on `current_context()` and `current_config()`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeflow.colossalai.context.parallel_mode import ParallelMode
from pipeflow.parallel.context import current_context, is_launched
from pipeflow.parallel.layout import Layout
from pipeflow.training.launch import current_config, keep_config


class GlobalContext:
    """The global context. All methods except `is_initialized` raise UsageError before `launch`."""

    @property
    def config(self) -> Any:
        """The job's configuration; None if it was launched without one."""
        return current_config() if is_launched() else None

    def load_config(self, config: object) -> None:
        """Sets the configuration; for launchers."""
        keep_config(config)

    def is_initialized(self, mode: ParallelMode) -> bool:
        """Returns True once the job is launched, for every mode."""
        return is_launched()

    def get_global_rank(self) -> int:
        """Returns this process's rank in the world."""
        return current_context().rank

    def get_ranks_in_group(self, mode: ParallelMode) -> list[int]:
        """Returns the world ranks of the mode's ranks, including this one, in ascending order."""
        context = current_context()
        return list(_RANKS[mode](context.layout, context.rank))

    def get_world_size(self, mode: ParallelMode) -> int:
        """Returns the number of the mode's ranks."""
        return len(self.get_ranks_in_group(mode))

    def get_local_rank(self, mode: ParallelMode) -> int:
        """Returns this rank's index among the mode's ranks, from 0."""
        return self.get_ranks_in_group(mode).index(self.get_global_rank())

    def is_first_rank(self, mode: ParallelMode) -> bool:
        """Returns True if this is the first of the mode's ranks."""
        return self.get_local_rank(mode) == 0

    def is_last_rank(self, mode: ParallelMode) -> bool:
        """Returns True if this is the last of the mode's ranks."""
        return self.get_local_rank(mode) == self.get_world_size(mode) - 1

    def is_pipeline_first_stage(self) -> bool:
        """Returns True if this is the first rank of its pipeline."""
        return self.is_first_rank(ParallelMode.PIPELINE)

    def is_pipeline_last_stage(self) -> bool:
        """Returns True if this is the last rank of its pipeline."""
        return self.is_last_rank(ParallelMode.PIPELINE)

    @property
    def tensor_parallel_size(self) -> int:
        return current_context().tensor_size

    @property
    def pipeline_parallel_size(self) -> int:
        return current_context().pipeline_size

    @property
    def data_parallel_size(self) -> int:
        return current_context().data_size

    def destroy(self) -> None:
        """Closes the channels and drops the configuration. Does nothing if nothing was launched."""
        if is_launched():
            current_context().close()


_RANKS: Mapping[ParallelMode, Callable[[Layout, int], Sequence[int]]] = {
    ParallelMode.GLOBAL: lambda layout, _: range(layout.world_size),
    ParallelMode.DATA: Layout.data_ranks,
    ParallelMode.PIPELINE: Layout.pipeline_ranks,
    ParallelMode.TENSOR: Layout.tensor_ranks,
    ParallelMode.MODEL: Layout.replica_ranks,
}

global_context = GlobalContext()
