"""A plugin's information about ranks: their groups, and which ranks have the first and the last stage."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import torch.distributed as dist

from pipeflow.colossalai.process_group_mesh import ProcessGroupMesh
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.parallel.context import Context


class Groups:
    """The ranks of `context`, and the stages of `placement` on them."""

    context: Context
    placement: Placement
    num_layers_per_stage: Sequence[int] | None = None

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

    @cached_property
    def pg_mesh(self) -> ProcessGroupMesh:
        """The processes as a grid of replicas, pipeline ranks and tensor ranks, which keeps the groups that it made."""
        return ProcessGroupMesh(self.dp_size, self.pp_size, self.tp_size)

    @property
    def stage_manager(self) -> StageManager:
        return StageManager(self, self.num_layers_per_stage)


class StageManager:
    """The place of this rank in the pipeline, and the layers of its stages. In ColossalAI, a stage is a pipeline rank.

    Attributes:
        num_stages: number of pipeline ranks.
        stage: index of this rank.
        num_model_chunks: number of stages per rank.
        num_layers_per_stage: number of layers of each stage, if the plugin has it.
    """

    def __init__(self, groups: Groups, num_layers_per_stage: Sequence[int] | None = None) -> None:
        self._placement = groups.placement
        self.num_stages = groups.pp_size
        self.stage = groups.context.pipeline_rank
        self.num_model_chunks = self._placement.num_stages // self.num_stages
        self.num_layers_per_stage = num_layers_per_stage

    def is_first_stage(self, ignore_chunk: bool = True) -> bool:
        """True if this rank has the model's first block."""
        return self.stage in self._placement.ranks_of(0)

    def is_last_stage(self, ignore_chunk: bool = True) -> bool:
        """True if this rank has the loss and the outputs."""
        return self.stage in self._placement.ranks_of(self._placement.num_stages - 1)

    def distribute_layers(self, num_layers: int) -> list[int]:
        """Returns the number of layers of each stage, in the order of stages: `num_layers_per_stage`, else equal
        numbers, where stages in the middle get one more if there is a remainder. Raises UsageError for another number
        of layers.
        """
        if self.num_layers_per_stage is not None:
            if sum(self.num_layers_per_stage) != num_layers:
                raise UsageError(
                    f"num_layers_per_stage is for {sum(self.num_layers_per_stage)} layers, not {num_layers}"
                )
            return list(self.num_layers_per_stage)
        stages = self._placement.num_stages
        each, more = divmod(num_layers, stages)
        start = stages // 2 - more // 2
        return [each + (start <= stage < start + more) for stage in range(stages)]

    def get_stage_index(
        self, layers_per_stage: Sequence[int], stage: int | None = None
    ) -> tuple[int, int] | list[tuple[int, int]]:
        """Returns the first layer of a rank's stage and the one after its last; a list of them for several stages.

        Args:
            layers_per_stage: as `distribute_layers` returns it.
            stage: index of the rank; by default this one.
        """
        ends = [0, *accumulate(layers_per_stage)]
        own = self._placement.stages_of(self.stage if stage is None else stage)
        found = [(ends[each], ends[each + 1]) for each in own]
        return found[0] if len(found) == 1 else found
