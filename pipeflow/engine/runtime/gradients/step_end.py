"""Gradients: sums and averages the gradients of a rank's stages over other ranks in a step, also when parameters
change. Before, ranks tell each other about their parameters and buffers, which must match; those that several ranks
hold get the same values, sent as bytes, whatever the dtype.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.sharding import (
    expert_splits_of,
    is_distributed,
    is_first_holder,
    local_part,
    own_buffers_of,
    splits_of,
)
from pipeflow.engine.parallel.transport.agreement import all_gather, all_gather_object, exchange, told_alike
from pipeflow.engine.parallel.transport.protocol import Channel, Group, Tag, Transport, Work
from pipeflow.engine.runtime.devices import named_tensors
from pipeflow.engine.runtime.gradients.comparison import Description, TensorProperties, compare
from pipeflow.engine.runtime.gradients.fully_sharded import forget_step, fully_sharded_in
from pipeflow.engine.runtime.gradients.sums import Orders, Sums, widen_gradient
from pipeflow.engine.runtime.gradients.weights import Owners, Tie, Watch, Weight, tie, weights_of
from pipeflow.engine.torch_private.tensors import foreach_copy_


def share_in_group(tensors: Mapping[str, Tensor], group: Group) -> list[str]:
    """Copies the tensors of the group's rank 0, or this rank's parts of them, to every rank; tensors on the meta device
    are skipped.

    Returns the names of tensors whose values changed on this rank. Raises LinkError.
    """
    if group.size == 1:
        return []
    parts = {name: local_part(tensor) for name, tensor in tensors.items() if tensor.numel() and not tensor.is_meta}
    arrived = {name: part.clone(memory_format=torch.contiguous_format) for name, part in parts.items()}
    works = [group.broadcast(_bytes_of(values), 0) for values in arrived.values()]
    for work in works:
        work.wait()
    others = [
        name for name, part in parts.items() if not torch.equal(_bytes_of(part.contiguous()), _bytes_of(arrived[name]))
    ]
    for name, part in parts.items():
        part.copy_(arrived[name])
    return others


def share_in_pipeline(tensor: Tensor, ranks: tuple[int, ...], transport: Transport) -> None:
    """Copies the values of `tensor` on the lowest of `ranks` to all of them; this rank must be one of them. Raises
    LinkError.
    """
    if tensor.is_meta or not tensor.numel():
        return
    values = local_part(tensor).clone(memory_format=torch.contiguous_format)
    row, (first, *others) = _bytes_of(values), ranks
    sent = dict.fromkeys(others, row) if transport.rank == first else {}
    arriving = {} if transport.rank == first else {first: row}
    exchange(transport, Tag.TIED, sent, arriving, "waiting for the first values of a tied weight")
    local_part(tensor).copy_(values)


@torch.no_grad()
def share_row(
    tensors: Sequence[Tensor], values: Sequence[Tensor], group: Group, source: int, room: Tensor | None = None
) -> Tensor:
    """Gives `tensors` on every rank the `values` of rank `source`, in one message; all are of one dtype and device.
    Returns the row that they were in, as `room` for the next ones. Raises LinkError.
    """
    sizes, first = [each.numel() for each in tensors], tensors[0]
    if room is None or room.dtype is not first.dtype or len(room) < sum(sizes):
        room = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
    row = room[: sum(sizes)]
    if group.rank == source:
        torch.cat([each.detach().flatten() for each in values], out=row)
    group.broadcast(_bytes_of(row), source).wait()
    if group.rank != source:
        parts = zip(row.split(sizes), tensors, strict=True)
        foreach_copy_(list(tensors), [part.view(each.shape) for part, each in parts])
    return room


def _bytes_of(values: Tensor) -> Tensor:
    """A view of the same memory as bytes."""
    return values.view(-1).view(torch.uint8)


class Buffers:
    """The buffers in the state dict of a module, and whether they were changed since they were last `seen`.

    They depend on the data, as running statistics do, so they would drift apart where ranks see different samples. The
    copies of a stage in a bidirectional schedule must leave them unchanged. Replicas all get those of the first one
    after a step, as with DistributedDataParallel.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (f"{path}.{name}".lstrip("."), layer, name)
            for path, layer in module.named_modules()
            for name, buffer in layer._buffers.items()
            if buffer is not None and name not in layer._non_persistent_buffers_set
        ]
        self.see()

    def see(self) -> None:
        """Notes what they are now."""
        self._seen = self._now()

    @property
    def are_changed(self) -> bool:
        """True if a buffer was changed or replaced on this rank."""
        return self._now() != self._seen

    def require_unchanged(self, stage: int) -> None:
        """Raises UsageError if a buffer of a stage of which another rank has a copy was changed."""
        for (path, layer, _), before, now in zip(self._places, self._seen, self._now(), strict=True):
            if before != now:
                raise UsageError(
                    f"stage {stage} changed its buffer {path!r}, of a {type(layer).__name__}: under a bidirectional "
                    "schedule the two copies of a stage see different microbatches, so buffers would drift apart: use "
                    "a layer without running statistics (LayerNorm, GroupNorm, track_running_stats=False), its eval(), "
                    "or a schedule that has each stage once"
                )

    @torch.no_grad()
    def share(self, group: Group, source: int = 0) -> None:
        """Copies the buffers of the group's rank `source` to all, all of one dtype at once. Raises LinkError."""
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
        for _, layer, name in self._places:
            if (buffer := layer._buffers[name]) is not None and not buffer.is_meta:
                alike[buffer.dtype, buffer.device].append(buffer)
        for each in alike.values():
            share_row(each, each, group, source)
        self.see()

    def _now(self) -> list[tuple[int, int]]:
        """The identity of each buffer, and how often it was written in place."""
        buffers = [layer._buffers[name] for _, layer, name in self._places]
        return [(id(buffer), getattr(buffer, "_version", 0)) for buffer in buffers]


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
        owners: the weights that single replicas own.

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
        self._new: Sums | None = None  # of parameters that were replaced since
        self.owners = Owners(context.copies, context.expert_copies)
        self._agree()

    @property
    def weights(self) -> list[Weight]:
        """The weights of this rank, also those that were replaced since the last step."""
        changed = self._watch.notices()
        return weights_of(self._model, self._stages, self._tied(), self._placement) if changed else self._weights

    def counted(self) -> set[nn.Parameter]:
        """The parameters whose gradients this rank counts in a norm; other parts, and copies, another rank counts."""
        layout, rank, place = self._context.layout, self._context.rank, self._context.pipeline_rank
        own = [each for each in self.weights if each.ranks[0] == place]
        return {
            w.parameter
            for w in own
            if is_first_holder(w.parameter, layout, rank, is_split=w.is_split, is_expert=w.is_expert)
        }

    def parameters_of(self, stage: int) -> list[nn.Parameter]:
        """The parameters of a stage; those that other stages of the rank hold, too, belong to the first."""
        return [weight.parameter for weight in self._weights if weight.stages[0] == stage]

    def divide(self, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, int]:
        """The replica that owns each of these weights from now on, as in `Owners.divide`. All ranks call it with the
        same weights.
        """
        experts = {weight.parameter for weight in self._weights if weight.is_expert}
        owners = self.owners.divide(parameters, experts)
        if self._context.copies.size > 1:
            self._sums = Sums(self._weights, self._context, self.owners)
        return owners

    def addresses(self) -> list[int]:
        """Where the parameters and buffers of this rank are."""
        return [tensor.data_ptr() for _, tensor in named_tensors(self._model)]

    def keep_aside(self, parameter: nn.Parameter, own: Tensor) -> None:
        """Call after `begin`, for memory that becomes the parameter's gradient of this step."""
        self._sums.keep_aside(parameter, own)

    def prepare(self) -> None:
        """Call before every step. If parameters were on the meta device when ranks last compared theirs, they compare
        again.
        """
        if self._unmade:
            self._agree()

    def join(self, placement: Placement) -> None:
        """Goes on with the ranks of the context, which hold equal weights, under this placement; all of them call it
        together.
        """
        context, self._placement = self._context, placement
        self.owners = Owners(context.copies, context.expert_copies)
        self._weights = self._survey()
        self._compare(values=False)
        self.connect()
        self._adopt()
        peers = context.holding([context.launched.place(context.living[context.rank]).pipeline])
        first = next((place for place, rank in enumerate(peers) if rank in context.alarm.ahead), 0)
        self.buffers.share(context.peers, first)

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
            self._new = Sums(
                [each for each in weights if each.parameter not in self._sums.parameters], self._context, self.owners
            )
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
        context.connect_grid()
        context.context.connect()
        context.peers.connect()
        context.experts.connect()
        context.expert_copies.connect()

    def reduce(self, stage: int) -> list[Work]:
        """Starts the sums that can begin when all backwards of `stage` are done; none in a step after a change."""
        return [] if self.change else self._sums.start(stage)

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
        self._ties = self._tied()
        weights = weights_of(self._model, self._stages, self._ties, self._placement)
        for weight in weights:
            if weight.is_sharded and self._context.copies.size > self._context.data_size:
                others = "context ranks" if self._context.context_size > 1 else "the layers of tensor_depth"
                raise UsageError(
                    f"fully_shard splits {weight.name!r} over replicas alone, so {others} would not sum its gradient: "
                    "use pipeflow.Zero, or launch with context=1 and tensor_depth=1"
                )
            if weight.is_sharded and self._context.elastic:
                raise UsageError(
                    f"fully_shard splits {weight.name!r} over replicas, and elastic=True would lose the part of a rank "
                    "that dies: leave fully_shard out, or launch without elastic=True"
                )
            if weight.is_sharded and weight.is_expert:
                raise UsageError(
                    f"fully_shard splits {weight.name!r} over replicas, each of which has other experts: leave the "
                    "experts out of fully_shard, or launch with experts=1"
                )
            if self._dtype is not None and not weight.is_sharded:
                widen_gradient(weight.parameter, self._dtype)
        return weights

    def _tied(self) -> list[Tie]:
        return [(self._context.holding(ranks), copies) for ranks, copies in tie(self._model)]

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
        self._sums = Sums(self._weights, self._context, self.owners)
        trained = {weight.parameter for weight in self._weights if weight.parameter.requires_grad}
        self._watch = Watch(self._model, self._sums.summed if self._dtype is None else trained)
        copied = [] if self._context.is_joined else self._copied
        self._copied_buffers = {stage: Buffers(self._stages[stage]) for stage in copied}
        self.buffers = Buffers(self._model if self._context.peers.size > 1 else nn.Module())
        self.change, self._new = ParameterChange.NONE, None

    @property
    def _copied(self) -> list[int]:
        """The stages of which another rank has a copy."""
        return [stage for stage in self._stages if len(self._placement.ranks_of(stage)) > 1]

    def _compare(self, *, values: bool) -> None:
        described = partial(
            TensorProperties.of,
            values=values,
            new=set() if self._new is None else self._new.parameters,
            experts=expert_splits_of(self._model),
        )
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
        experts = {weight.parameter for weight in self._weights if weight.is_expert}
        others = {name: each for name, each in named_tensors(self._model) if each not in sharded | experts}
        share_in_group(others, context.copies)
        share_in_group(
            {name: each for name, each in named_tensors(self._model) if each in experts}, context.expert_copies
        )

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
