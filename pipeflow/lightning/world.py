"""World: the part of a strategy that knows this rank's place among the others, and how values pass between them. Must
not contain: models.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.fabric.strategies.launchers import _SubprocessScriptLauncher
from lightning.fabric.utilities.rank_zero import rank_zero_only as rank_zero_only_of_fabric
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.parallel.context import Context, context_if_launched
from pipeflow.parallel.launcher import launch
from pipeflow.parallel.transport.agreement import all_gather, all_gather_object
from pipeflow.parallel.trees import gathered
from pipeflow.schedules.registry import make_schedule
from pipeflow.stages.blocks import Blocks, Cuts


class World:
    """The processes of a pipeline, with the names of Lightning's strategies.

    Args:
        pipeline, tensor, schedule, microbatches, schedule_options, cuts, blocks, options: as in the strategy for a
            Trainer.
    """

    cluster_environment: Any
    parallel_devices: Any
    node_rank: int
    local_rank: int
    global_rank: int
    world_size: int
    _launcher_class: Any = _SubprocessScriptLauncher  # Fabric's

    def __init__(
        self,
        pipeline: int | None = None,
        tensor: int = 1,
        schedule: str = "1f1b",
        microbatches: int = 4,
        *,
        schedule_options: dict[str, Any] | None = None,
        cuts: Cuts = None,
        blocks: Blocks = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.num_nodes = 1
        self._sizes, self._cut = (pipeline, tensor), {"cuts": cuts, "blocks": blocks}
        self._schedule = schedule, {"microbatches": microbatches, **(schedule_options or {})}

    def _made_schedule(self) -> Schedule:
        name, options = self._schedule
        return make_schedule(name, ranks=self._context.pipeline_size, **options)

    @property
    def _context(self) -> Context:
        context = context_if_launched()
        assert context is not None, "setup_environment launches it"
        return context

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        device: torch.device = self.parallel_devices[self.local_rank]
        return device

    @property
    def num_processes(self) -> int:
        """The number of processes on this machine."""
        return len(self.parallel_devices or ())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which part of the data this rank reads: that of its replica."""
        return {"num_replicas": self._context.data_size, "rank": self._context.data_rank}

    def set_world_ranks(self) -> None:
        """Tells Lightning this rank's place."""
        environment = self.cluster_environment
        environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = rank_zero_only_of_fabric.rank = self.global_rank

    def _configure_launcher(self) -> None:
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = self._launcher_class(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Connects the ranks, and gives torch's generator the state that it has on rank 0, so that ranks of a pipeline
        read the same batches.
        """
        super().setup_environment()  # type: ignore[misc]  # Lightning's
        self.set_world_ranks()
        context = context_if_launched() or self._launch()
        if context.world_size != self.world_size:
            raise UsageError(
                f"{context.world_size} processes are launched, but {self.world_size} devices are asked for: start as "
                "many processes as devices= times num_nodes= says"
            )
        torch.set_rng_state(torch.tensor(self.broadcast(torch.get_rng_state().tolist()), dtype=torch.uint8))

    def _launch(self) -> Context:
        environment = self.cluster_environment
        places = {"RANK": self.global_rank, "WORLD_SIZE": self.world_size, "LOCAL_RANK": self.local_rank}
        os.environ.update({name: str(place) for name, place in places.items()})
        os.environ.update(MASTER_ADDR=environment.main_address, MASTER_PORT=str(environment.main_port))
        return launch(*self._sizes, device=self.root_device)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean, or sum, of a tensor over the replicas."""
        if not isinstance(tensor, Tensor):
            return tensor
        every = gathered(tensor[None], self._context)
        name = str(reduce_op).rpartition(".")[2].lower()
        if name in ("max", "min"):
            return getattr(every, f"a{name}")(0)
        return (
            every.sum(0) if name == "sum" else every.mean(0, dtype=None if every.is_floating_point() else torch.float)
        )

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all replicas, stacked."""
        every: Tensor = gathered(tensor[None], self._context)
        return every

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, decide so."""
        told = [bool(each) for [each] in all_gather(self._context.world, [float(decision)])]
        return min(told) if all else max(told)

    def barrier(self, name: str | None = None) -> None:
        """Waits until all ranks have called it."""
        context = context_if_launched()
        if context is not None:
            all_gather(context.world, [0.0])

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of rank `src`, made of plain values."""
        context = context_if_launched()
        plain = os.fspath(obj) if isinstance(obj, os.PathLike) else obj
        return obj if context is None else all_gather_object(context.world, plain)[src]
