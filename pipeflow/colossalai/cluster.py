"""ColossalAI's `colossalai.cluster`: prints on one rank."""

from __future__ import annotations

from pipeflow.parallel.context import current_context

__all__ = ["DistCoordinator"]


class DistCoordinator:
    """The place of this process among all processes. Raises UsageError before `launch`."""

    @property
    def rank(self) -> int:
        return current_context().rank

    @property
    def world_size(self) -> int:
        return current_context().world_size

    def is_master(self) -> bool:
        """Returns True on rank 0."""
        return self.rank == 0

    def print_on_master(self, msg: str) -> None:
        """Prints on rank 0."""
        if self.is_master():
            print(msg, flush=True)  # noqa: T201  # what it is for
