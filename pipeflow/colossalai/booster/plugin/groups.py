"""Groups: a plugin's information about ranks: their groups, and which ranks have the first and the last stage."""

from __future__ import annotations

import torch.distributed as dist

from pipeflow.core.placement import Placement
from pipeflow.parallel.context import Context


class Groups:
    """The ranks of `context`, and the stages of `placement` on them."""

    context: Context
    placement: Placement

    @property
    def tp_size(self) -> int:
        return self.context.tensor_size

    @property
    def pp_size(self) -> int:
        return self.context.pipeline_size

    @property
    def dp_size(self) -> int:
        return self.context.data_size

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """torch.distributed's group of the tensor ranks. All ranks get it together; likewise the groups below."""
        return self.context.mesh.get_group("tensor")

    @property
    def pp_group(self) -> dist.ProcessGroup:
        return self.context.mesh.get_group("pipeline")

    @property
    def dp_group(self) -> dist.ProcessGroup:
        return self.context.mesh.get_group("data")

    @property
    def pg_mesh(self) -> ProcessGroupMesh:
        return ProcessGroupMesh()

    @property
    def stage_manager(self) -> StageManager:
        return StageManager(self)


class ProcessGroupMesh:
    """ColossalAI's mesh of process groups, with the methods that programs use."""

    def get_ranks_in_group(self, group: dist.ProcessGroup) -> list[int]:
        """Returns the ranks in the world of the group's members."""
        return dist.get_process_group_ranks(group)


class StageManager:
    """The place of this rank in the pipeline."""

    def __init__(self, groups: Groups) -> None:
        self._placement = groups.placement
        self.num_stages = groups.pp_size  # ColossalAI's name for pipeline ranks
        self.stage = groups.context.pipeline_rank

    def is_first_stage(self, ignore_chunk: bool = True) -> bool:
        """True if this rank has the model's first block."""
        return self.stage in self._placement.ranks_of(0)

    def is_last_stage(self, ignore_chunk: bool = True) -> bool:
        """True if this rank has the loss and the outputs."""
        return self.stage in self._placement.ranks_of(self._placement.num_stages - 1)
