"""ColossalAI's DistCoordinator: the place of this process, and what runs where and when."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist

from pipeflow.parallel.context import current_context
from pipeflow.parallel.transport.agreement import all_gather


class DistCoordinator:
    """The place of this process among all processes. Raises UsageError before `launch`. Methods with an argument
    `process_group` mean the ranks of that group of torch.distributed; by default all ranks.
    """

    @property
    def rank(self) -> int:
        return current_context().rank

    @property
    def world_size(self) -> int:
        return current_context().world_size

    @property
    def local_rank(self) -> int:
        """Index of this process on its machine, from torchrun's environment; 0 without it."""
        return int(os.environ.get("LOCAL_RANK") or 0)

    def is_master(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Returns True on the first rank."""
        return self._ranks(process_group)[0] == self.rank

    def is_last_process(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Returns True on the last rank."""
        return self._ranks(process_group)[-1] == self.rank

    def is_node_master(self) -> bool:
        """Returns True on the first rank of this machine."""
        return self.local_rank == 0

    def print_on_master(self, msg: str, process_group: dist.ProcessGroup | None = None) -> None:
        """Prints on the first rank."""
        if self.is_master(process_group):
            print(msg, flush=True)  # noqa: T201  # what it is for

    def print_on_node_master(self, msg: str) -> None:
        """Prints on the first rank of each machine."""
        if self.is_node_master():
            print(msg, flush=True)  # noqa: T201  # what it is for

    def block_all(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Waits until all ranks have come here. Without a group, raises PipelineError if a rank has left."""
        if process_group is None:
            context = current_context()
            with context.alarm.raised_everywhere("DistCoordinator.block_all"):  # which opens channels after an error
                all_gather(context.world, [0.0])
        else:
            dist.barrier(process_group)

    @contextmanager
    def priority_execution(
        self, executor_rank: int = 0, process_group: dist.ProcessGroup | None = None
    ) -> Iterator[None]:
        """The rank with index `executor_rank` runs the `with` block first; then the others run it."""
        is_first = self._ranks(process_group)[executor_rank] == self.rank
        if not is_first:
            self.block_all(process_group)
        yield
        if is_first:
            self.block_all(process_group)

    def on_master_only(
        self, process_group: dist.ProcessGroup | None = None
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Returns a decorator of functions that then run on the first rank alone, and return None elsewhere."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(function)
            def called(*arguments: Any, **options: Any) -> Any:
                return function(*arguments, **options) if self.is_master(process_group) else None

            return called

        return decorate

    def _ranks(self, process_group: dist.ProcessGroup | None) -> Sequence[int]:
        return range(self.world_size) if process_group is None else dist.get_process_group_ranks(process_group)
