"""Gradients: sums and averages the gradients of a rank's stages over other ranks in a step, also when parameters
change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.sharding import is_distributed, own_buffers_of, splits_of
from pipeflow.engine.parallel.transport.agreement import all_gather, all_gather_object, told_alike
from pipeflow.engine.parallel.transport.protocol import Channel, Tag, Work
from pipeflow.engine.runtime.devices import named_tensors
from pipeflow.engine.runtime.gradients.fully_sharded import forget_step, fully_sharded_in
from pipeflow.engine.runtime.gradients.sums import Orders, Sums, widen_gradient
from pipeflow.engine.runtime.gradients.values import (
    Buffers,
    Description,
    TensorProperties,
    compare,
    share_in_group,
    share_in_pipeline,
)
from pipeflow.engine.runtime.gradients.weights import Watch, Weight, tie, weights_of


class ParameterChange(IntEnum):
    """The change of a rank's parameters since the ranks last compared theirs."""

    NONE = 0
    TRAINED = 1  # frozen, or unfrozen
    REPLACED = 2  # by others, or by others' data


class Gradients:
    """The gradients of a pipeline's stages on this rank.

    All ranks make theirs together: they compare their parameters, and tensors that several ranks hold get the values of
    the lowest of these ranks. A step runs the sums that the ranks agreed on. If parameters were replaced, converted or
    unfrozen since, this rank reports so in the agreement that ends the step; then all ranks compare again, and new
    gradients are summed, too. A step without a change only checks the parameters and exchanges nothing more.

    Args:
        model: module that gives tensors their names.
        stages: modules by stage index; a module with parameters beside them, such as a criterion, belongs to the stage
            that uses it.
        placement: placement of all stages.
        context: context of this rank.
        dtype: dtype in which gradients are added up, for parameters of a narrower dtype; None for the parameter's own.

    Attributes:
        change: change of this rank's parameters since the ranks last compared theirs, as of the last `begin`.
        buffers: buffers of which other replicas have copies.

    Raises UsageError if the tensors of the ranks do not match.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Mapping[int, nn.Module],
        placement: Placement,
        context: Context,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._model = model
        self._stages = stages
        self._placement = placement
        self._context = context
        self._dtype = dtype
        self.change = ParameterChange.NONE
        self._agree()

    @property
    def counted_elsewhere(self) -> set[int]:
        """Ids of the parameters that a lower rank of the pipeline holds, too, and counts in a norm."""
        return {id(weight.parameter) for weight in self._weights if weight.ranks[0] != self._context.pipeline_rank}

    def parameters_of(self, stage: int) -> list[nn.Parameter]:
        """The parameters of a stage; those that other stages of the rank hold, too, belong to the first."""
        return [weight.parameter for weight in self._weights if weight.stages[0] == stage]

    def prepare(self) -> None:
        """Call before every step. If parameters were on the meta device when ranks last compared theirs, they compare
        again.
        """
        if self._unmade:
            self._agree()

    def begin(self, orders: Orders) -> None:
        """Call before the first backward of a step, in which ranks reduce their stages in `orders`."""
        self.change, self._new = ParameterChange.NONE, None
        if self._watch.notices():
            weights = self._survey()
            self._require_none_sharded_since(weights)
            replaced = {weight.parameter for weight in weights} - {weight.parameter for weight in self._weights}
            reformed = self._watch.reformed()
            self._sums.leave_out(reformed)
            self.change = ParameterChange.REPLACED if replaced or reformed else ParameterChange.TRAINED
            self._new = Sums([each for each in weights if each.parameter not in self._sums.parameters], self._context)
            self._new.begin(orders)
        self._sums.begin(orders)
        for buffers in self._copied_buffers.values():
            buffers.see()

    def connect(self) -> None:
        """Connects the channels and groups of all sums, before a step. All ranks call it together. Raises LinkError."""
        context, rank = self._context, self._context.pipeline_rank
        holders = [weight.ranks for weight in self._weights] + [
            self._placement.ranks_of(stage) for stage in self._copied
        ]
        peers = {peer for ranks in holders for peer in ranks if peer != rank}
        ways = [way for peer in peers for way in ((rank, peer), (peer, rank))]
        context.transport.connect(Channel(*way, Tag.TIED) for way in ways)
        context.tensor.connect()
        context.data.connect()

    def reduce(self, stage: int) -> list[Work]:
        """Starts the sums that can begin when all backwards of `stage` are done; none in a step after a change."""
        return [] if self.change else self._sums.start(stage)

    def writing(self, stage: int) -> float:
        """Seconds in which the last `end` wrote the sums of `stage` into its gradients."""
        return self._sums.writing(stage)

    def end(self, *, reduce: bool) -> None:
        """Call after the last backward. If `reduce` is False, each replica accumulates its own gradients. Raises
        LinkError.
        """
        self._sums.end(reduce=reduce)
        for stage, buffers in self._copied_buffers.items():
            buffers.require_unchanged(stage)

    def renew(self, change: ParameterChange, *, reduce: bool) -> None:
        """Call on all ranks after the agreement that ends a step, if the largest `change` of a rank is not NONE:
        compares parameters again and sums new gradients. Raises UsageError if the tensors of the ranks no longer match.
        """
        weights = self._survey()
        self._compare(values=change is ParameterChange.REPLACED)
        self._weights = weights
        self.connect()
        if self._new is not None:
            self._new.end(reduce=reduce)
        self._adopt()
        all_gather(self._context.world, [0.0])

    def forget(self) -> None:
        """Discards the sums that are not complete, after a failed step."""
        for stage in self._stages.values():
            forget_step(fully_sharded_in(stage))
        self._sums.forget()
        if self._new is not None:
            self._new.forget()

    def _survey(self) -> list[Weight]:
        self._ties = tie(self._model)
        weights = weights_of(self._model, self._stages, self._ties, self._placement)
        for weight in weights:
            if self._dtype is not None and not weight.is_sharded:
                widen_gradient(weight.parameter, self._dtype)
        return weights

    def _require_none_sharded_since(self, weights: list[Weight]) -> None:
        """Raises UsageError if fully_shard was applied after the ranks last compared their parameters."""
        known = {weight.parameter for weight in self._weights if weight.is_sharded}
        for weight in weights:
            if weight.is_sharded and weight.parameter not in known:
                raise UsageError(
                    f"fully_shard was applied to {weight.name!r} after the Pipeline was made: apply it to the stages "
                    "first, and then make the Pipeline"
                )

    def _agree(self) -> None:
        self._weights = self._survey()
        self._compare(values=False)
        self.connect()
        self._share_values()
        self._adopt()

    def _adopt(self) -> None:
        self._sums = Sums(self._weights, self._context)
        trained = {weight.parameter for weight in self._weights if weight.parameter.requires_grad}
        self._watch = Watch(self._model, self._sums.summed if self._dtype is None else trained)
        self._copied_buffers = {stage: Buffers(self._stages[stage]) for stage in self._copied}
        self.buffers = Buffers(self._model if self._context.data.size > 1 else nn.Module())
        self.change, self._new = ParameterChange.NONE, None

    @property
    def _copied(self) -> list[int]:
        """The stages of which another rank has a copy."""
        return [stage for stage in self._stages if len(self._placement.ranks_of(stage)) > 1]

    def _compare(self, *, values: bool) -> None:
        described = partial(TensorProperties.of, values=values)
        description = Description(
            [described(name, tensor) for name, tensor in named_tensors(self._model)],
            [described(name, tensor) for name, tensor in self._whole()],
            {stage: [described(*named) for named in named_tensors(self._stages[stage])] for stage in self._copied},
            [
                (ranks, [described(f"copy {index}", each) for index, each in enumerate(parameters)])
                for ranks, parameters in self._ties
            ],
        )
        everyone: list[Any] = all_gather_object(self._context.world, description)
        with told_alike(self._context.world):
            compare(everyone, self._context.layout)
        self._unmade = any(properties.is_meta for each in everyone for properties in each.all)

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that every tensor rank has in full, by name."""
        own = splits_of(self._model).keys() | own_buffers_of(self._model)
        for name, tensor in named_tensors(self._model):
            if id(tensor) not in own and not is_distributed(tensor):
                yield name, tensor

    @torch.no_grad()
    def _share_values(self) -> None:
        context = self._context
        for weight in sorted(self._weights, key=lambda weight: (weight.ranks, weight.order)):
            if len(weight.ranks) > 1:
                share_in_pipeline(weight.parameter, weight.ranks, context.transport)
        for stage in self._copied:
            for buffer in self._stages[stage].buffers():
                share_in_pipeline(buffer, self._placement.ranks_of(stage), context.transport)
        self._require_equal_buffers()
        share_in_group(dict(self._whole()), context.tensor)
        sharded = {weight.parameter for weight in self._weights if weight.is_sharded}
        share_in_group({name: each for name, each in named_tensors(self._model) if each not in sharded}, context.data)

    def _require_equal_buffers(self) -> None:
        """Raises UsageError if a buffer that every tensor rank has in full has other values than on the first one. It
        may be meant to, so it is not overwritten, as parameters are, which are drawn without a common seed.
        """
        names = {name for name, _ in self._model.named_buffers()}
        copies = {name: buffer.clone() for name, buffer in self._whole() if name in names}
        for name in share_in_group(copies, self._context.tensor):
            raise UsageError(
                f"buffer {name!r} of tensor rank {self._context.tensor_rank} differs from that of tensor rank 0: if "
                "they should be equal, make them equal, for example with one seed; if every tensor rank should keep "
                "its own buffer, name it in the layer's own_buffers() and register it with persistent=False; if it is "
                "a part of a whole, name it in splits()"
            )
