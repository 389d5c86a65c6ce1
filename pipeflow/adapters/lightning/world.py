"""World: what the strategies for Lightning's Trainer and for Fabric share: the processes of a pipeline, how values pass
between them, the precision, and Lightning's own values in a checkpoint of pipeflow. Must not contain: models.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.launchers import _SubprocessScriptLauncher
from lightning.fabric.utilities.rank_zero import rank_zero_only as rank_zero_only_of_fabric
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from pipeflow.adapters.cut_model import cut_settings
from pipeflow.adapters.ranks import gathered, launched, numbers_of_all, objects_of_all, reduced, wait_for_all
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context, context_if_launched
from pipeflow.engine.runtime.step import LossOver
from pipeflow.engine.stages.blocks import Blocks, Cuts
from pipeflow.training.checkpoint import state
from pipeflow.training.checkpoint.manifest import verified
from pipeflow.training.checkpoint.plain import loaded as plain
from pipeflow.training.checkpoint.storage import CheckpointStorage

PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed")


class LightningWorld:
    """The processes of a pipeline, with the names of Lightning's strategies.

    Args:
        pipeline, tensor, schedule, microbatches, schedule_options, cuts, blocks, head_slices, head, options: as in the
            strategy for a Trainer.
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
        weigh: Callable[..., float] | None = None,
        loss_over: LossOver = "microbatches",
        head_slices: int | None = None,
        head: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.num_nodes = 1
        self._sizes = pipeline, tensor
        said = schedule, microbatches, schedule_options, cuts, blocks, weigh, loss_over, head_slices, head
        self._settings_for = partial(cut_settings, *said)

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
        return launched(*self._sizes, device=self.root_device)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean, or sum, of a tensor over the replicas."""
        if not isinstance(tensor, Tensor):
            return tensor
        name = str(reduce_op).rpartition(".")[2].lower()
        return reduced(tensor, self._context, name if name in ("max", "min", "sum") else "mean")

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all replicas, stacked."""
        every: Tensor = gathered(tensor[None], self._context)
        return every

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, decide so."""
        told = numbers_of_all(self._context, decision)
        return bool(min(told) if all else max(told))

    def barrier(self, name: str | None = None) -> None:
        """Waits until all ranks have called it."""
        context = context_if_launched()
        if context is not None:
            wait_for_all(context)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of rank `src`, made of plain values."""
        context = context_if_launched()
        if context is None:
            return obj
        return objects_of_all(context, os.fspath(obj) if isinstance(obj, os.PathLike) else obj)[src]


def require_precision(plugin: Any) -> None:
    """Raises UsageError for a precision that is not possible with a pipeline."""
    precision, name = getattr(plugin, "precision", None), type(plugin).__name__
    if precision not in PRECISIONS or "FSDP" in name or "DeepSpeed" in name:
        raise UsageError(
            f"precision {precision!r} of {name} is not possible with a pipeline: use one of "
            f"{', '.join(map(repr, PRECISIONS))}"
        )


def autocast_of(plugin: Any) -> torch.dtype | None:
    """The dtype of the autocast that a precision asks for."""
    return torch.bfloat16 if plugin.precision == "bf16-mixed" else None


def packed(values: Any) -> Tensor:
    """Lightning's own values as one tensor of bytes, as torch saves them."""
    body = io.BytesIO()
    torch.save(values, body)
    return torch.frombuffer(bytearray(body.getvalue()), dtype=torch.uint8)


def unpacked(folder: Path, weights_only: bool | None) -> Any:
    """The values in a checkpoint. Raises UsageError if it has none."""
    kept = state.read_run(CheckpointStorage(folder, verified(folder, 0, 0)))["extra"]
    if not isinstance(kept, Tensor):
        raise UsageError(f"{folder} was not saved with a PipelineStrategy: load it with pipeflow.load_checkpoint")
    stored = kept.numpy().tobytes()
    return plain(stored) if weights_only else torch.load(io.BytesIO(stored), "cpu", weights_only=False)  # as Lightning
