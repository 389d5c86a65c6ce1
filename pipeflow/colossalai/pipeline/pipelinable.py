"""ColossalAI's `colossalai.pipeline.pipelinable`: a model as a list of its modules, cut by a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from threading import RLock, get_ident
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from pipeflow.colossalai.pipeline.listed import SPLIT, Listed
from pipeflow.colossalai.pipeline.model import PipelinableModel
from pipeflow.core.errors import UsageError
from pipeflow.core.partition import Part, partition_balanced, partition_uniform
from pipeflow.core.placement import Placement
from pipeflow.parallel.context import context_if_launched
from pipeflow.training.build import build_stages

__all__ = ["PipelinableContext", "PipelinableModel"]

_ONE_THREAD = RLock()  # all threads share torch's hooks


class PipelinableContext(AbstractContextManager["PipelinableContext"]):
    """Cuts the model that is made inside the `with` block::

        with PipelinableContext() as pipelinable:
            model = Model()
        pipelinable.to_layer_list(["embed", "SPLIT_NODE", "head"])
        pipelinable.policy = "customized"
        stage = pipelinable.partition(1, gpc.pipeline_parallel_size, gpc.get_local_rank(ParallelMode.PIPELINE))

    Attributes:
        policy: "uniform", "balanced" by parameters, "customized" by the SPLIT_NODEs of the list, or a dict with the
            pairs (start, end) of each rank.

    Raises UsageError after the block if it made no model.
    """

    def __init__(self, policy: str | Mapping[int, Sequence[Part]] = "balanced") -> None:
        self.policy = policy
        self._handle: Any = None
        self._thread = 0
        self._parents: dict[int, nn.Module] = {}
        self._children: set[int] = set()
        self._listed = Listed([])

    def __enter__(self) -> PipelinableContext:
        _ONE_THREAD.acquire()
        self._thread = get_ident()
        self._handle = register_module_module_registration_hook(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.remove()
        _ONE_THREAD.release()
        roots = [each for key, each in self._parents.items() if key not in self._children]
        if not roots and error[0] is None:
            raise UsageError("PipelinableContext: the with block made no model that consists of modules")
        self._model = roots[-1] if roots else nn.Module()

    def _note(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if get_ident() == self._thread:
            self._parents.setdefault(id(parent), parent)
            self._children.add(id(child))

    @property
    def layers_count(self) -> int:
        """Number of layers in the list."""
        return len(self._listed.layers)

    @property
    def funcs_count(self) -> int:
        """Number of functions in the list."""
        return sum(map(len, [*self._listed.fronts.values(), *self._listed.behinds.values()]))

    def to_layer_list(self, exec_seq: Sequence[Any] | None = None) -> None:
        """Sets the list of layers, in the order in which they are called.

        Args:
            exec_seq: elements as in `Listed.of`; by default the model's children, and those of its lists, in the order
                in which they were registered.

        Raises UsageError as `Listed.of` does.
        """
        if exec_seq is None:
            lists = nn.ModuleList | nn.Sequential
            children = [each.children() if isinstance(each, lists) else [each] for each in self._model.children()]
            self._listed = Listed([layer for each in children for layer in each])
        else:
            self._listed = Listed.of(exec_seq, self._model)

    def partition(self, num_chunks: int, pipeline_size: int, rank: int) -> nn.Module:
        """Returns this rank's layers: a PipelinableModel, or an nn.ModuleList of one per chunk. All ranks call it
        together.

        Args:
            num_chunks: number of stages per rank.
            pipeline_size, rank: those of the launch.

        Raises UsageError for other sizes, an unknown policy, and a policy that does not fit the layers.
        """
        context = context_if_launched()
        place = (1, 0) if context is None else (context.pipeline_size, context.pipeline_rank)
        if (pipeline_size, rank) != place:
            raise UsageError(f"this is rank {place[1]} of a pipeline of {place[0]}, got {rank} of {pipeline_size}")
        dealt = self._dealt(num_chunks, pipeline_size)
        parts = [part for chunk in zip(*dealt, strict=True) for part in chunk]
        made = build_stages(self._listed.layers, Placement.looped(pipeline_size, num_chunks), partition=parts)
        chunks = nn.ModuleList(PipelinableModel(each, self._listed.fronts, self._listed.behinds) for each in made)
        return chunks[0] if num_chunks == 1 else chunks

    def _dealt(self, num_chunks: int, pipeline_size: int) -> Sequence[Sequence[Part]]:
        """The parts of each rank."""
        if isinstance(self.policy, Mapping):
            if lacking := [rank for rank in range(pipeline_size) if rank not in self.policy]:
                raise UsageError(f"the policy lacks rank {lacking[0]}: give parts to each of {pipeline_size} ranks")
            return [self.policy[rank] for rank in range(pipeline_size)]
        if self.policy == "uniform":
            return partition_uniform(self.layers_count, pipeline_size, num_chunks)
        if self.policy == "balanced":
            counts = [sum(each.numel() for each in layer.parameters()) for layer in self._listed.layers]
            return partition_balanced(counts, pipeline_size, num_chunks)
        if self.policy != "customized":
            raise UsageError(f"policy must be uniform, balanced, customized or a dict, got {self.policy!r}")
        ends = [0, *self._listed.splits, self.layers_count]
        if len(ends) - 1 != pipeline_size or num_chunks != 1:
            raise UsageError(
                f"exec_seq has {len(ends) - 2} {SPLIT}, so {len(ends) - 1} stages, for {pipeline_size} ranks with "
                f"{num_chunks} chunks each"
            )
        return [[part] for part in pairwise(ends)]
