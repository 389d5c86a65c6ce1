"""Tied weights: one weight of which several ranks hold a copy, like a word embedding that is also the head, or a
stage that a bidirectional schedule has twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from weakref import ref

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.parallel.context import SharedWeight, current_context
from pipeflow.parallel.transport.agreement import exchange
from pipeflow.parallel.transport.protocol import Lane, Transport
from pipeflow.runtime.gradients.sums import Summand, buckets


class PipelineSharedModuleWrapper:
    """Ties weights across ranks of the pipeline: one wrapper per tied module or parameter.

    Each of `ranks` registers its copy before the `Pipeline` is made; the lowest rank's values win, and after every
    step each copy's gradient is the sum over the copies. All copies that one rank registers (as when `ranks` is
    `[0, 0]`, or in a bidirectional schedule) become one object, the first. Make the optimizer from the Pipeline's
    parameters.

    Args:
        ranks: the pipeline ranks that hold a copy.

    Raises UsageError for ranks that the pipeline does not have.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        context = current_context()
        self.ranks = tuple(sorted(set(ranks)))
        if not self.ranks or not set(self.ranks) <= set(range(context.pipeline_size)):
            raise UsageError(f"ranks {list(ranks)} must be among those of the pipeline, 0..{context.pipeline_size - 1}")
        self._rank = context.pipeline_rank
        self._weight = SharedWeight(self.ranks)
        context.shared.append(self._weight)

    def register_module(self, module: nn.Module) -> None:
        """Ties the parameters of `module`.

        Raises UsageError on a rank that is not in `ranks`, and for a copy that is unlike the first.
        """
        self._register(list(module.parameters()))
        _tie_by_object(self._weight, module)

    def register_parameter(self, parameter: nn.Parameter) -> None:
        """Ties `parameter`. Raises UsageError as `register_module` does."""
        self._register([parameter])

    def _register(self, copy: list[nn.Parameter]) -> None:
        copies, first = self._weight.copies, _shapes(self._weight.parameters)
        if self._rank not in self.ranks:
            raise UsageError(f"rank {self._rank} is not among the ranks {list(self.ranks)} that share this weight")
        if copies and _shapes(copy) != first:
            raise UsageError(f"a copy of shapes {_shapes(copy)} cannot be tied to one of shapes {first}")
        copies.append([ref(parameter) for parameter in copy])


def _shapes(parameters: Iterable[nn.Parameter]) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in parameters]


def _tie_by_object(weight: SharedWeight, module: nn.Module) -> None:
    """Puts the first copy wherever `module` holds a further one."""
    further = [(old(), new) for copy in weight.copies[1:] for old, new in zip(copy, weight.parameters, strict=True)]
    first = {id(old): new for old, new in further if old is not None}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if id(parameter) in first:
                owner._parameters[name] = first[id(parameter)]


def shared_in(module: nn.Module, shared: Iterable[SharedWeight]) -> list[SharedWeight]:
    """The shared weights that `module` holds, tied by object where all copies are on this rank."""
    held = {id(parameter) for parameter in module.parameters()}
    found = [weight for weight in shared if weight.parameters and {id(p) for p in weight.parameters} <= held]
    for weight in found:
        _tie_by_object(weight, module)
    return found


def copies_of(modules: Mapping[int, nn.Module], placement: Placement) -> dict[int, SharedWeight]:
    """The stages of which a bidirectional schedule has a copy on two ranks, as shared weights."""
    return {
        stage: SharedWeight(ranks, [[ref(parameter) for parameter in module.parameters()]])
        for stage, module in modules.items()
        if len(ranks := placement.ranks_of(stage)) > 1
    }


Description = list[tuple[tuple[int, ...], list[tuple[int, ...]]]]  # per weight: its ranks, the shapes of its copy


def compare_ties(everyone: list[Description]) -> None:
    """Raises UsageError unless all ranks of each tied weight registered it, with the same shapes."""
    for rank, described in enumerate(everyone):
        for ranks, _ in described:
            for other in ranks:
                mine, its = [[tie for tie in everyone[r] if tie[0] == ranks] for r in (rank, other)]
                if mine != its:
                    raise UsageError(
                        f"ranks {list(ranks)} share a weight, but rank {rank} registered shapes "
                        f"{[tie[1] for tie in mine]} and rank {other} {[tie[1] for tie in its]}"
                    )


class Ties:
    """The tied weights of one pipeline on this rank, copies of whole stages among them.

    Args:
        weights: those that users tied.
        copies: per stage that another rank has a copy of, its weights.
        rank: this one's, in the pipeline.

    Attributes:
        copied: of `copies`, the parameters that users did not tie to anything else.

    Raises UsageError when a parameter is tied twice, to ranks of which neither are all.
    """

    def __init__(self, weights: Sequence[SharedWeight], copies: Mapping[int, SharedWeight], rank: int) -> None:
        self._rank = rank
        every = [*weights, *copies.values()]
        across = sorted((weight for weight in every if len(weight.ranks) > 1), key=lambda weight: weight.ranks)
        self._described = [(weight.ranks, _shapes(weight.parameters)) for weight in across]
        widest: dict[int, _Tie] = {}  # by the parameter's id: a tied weight may be in a stage that has a copy elsewhere
        for weight in sorted(across, key=lambda weight: -len(weight.ranks)):
            for parameter in weight.parameters:
                tie = widest.setdefault(id(parameter), _Tie(parameter, ranks=weight.ranks))
                if not set(weight.ranks) <= set(tie.ranks):
                    raise UsageError(
                        f"a weight is shared by ranks {list(tie.ranks)} and has copies on ranks {list(weight.ranks)}: "
                        "share it among all of them"
                    )
        self._ties = list(widest.values())
        shared = {id(parameter) for weight in weights for parameter in weight.parameters}
        self.copied = {
            stage: [parameter for parameter in copy.parameters if id(parameter) not in shared]
            for stage, copy in copies.items()
        }
        copied = {id(parameter) for parameters in self.copied.values() for parameter in parameters}
        self._summed = [tie for tie in self._ties if tie.parameter.requires_grad and id(tie.parameter) not in copied]
        by_ranks = groupby(self._summed, key=lambda tie: tie.ranks)
        self._buckets = [bucket for _, alike in by_ranks for bucket in buckets(alike, lambda tie: tie.parameter)]

    def describe(self) -> Description:
        """What the ranks compare before they rely on it."""
        return self._described

    @property
    def tied(self) -> set[int]:
        """The ids of the parameters that have copies on other ranks."""
        return {id(tie.parameter) for tie in self._ties}

    @property
    def counted_elsewhere(self) -> set[int]:
        """The ids of the parameters whose copy on a lower rank stands for them."""
        return {id(tie.parameter) for tie in self._ties if tie.ranks[0] != self._rank}

    def share_values(self, transport: Transport) -> None:
        """Gives every copy the lowest rank's values. Raises LinkError."""
        for tie in self._ties:
            value = tie.parameter.data.contiguous()
            others = dict.fromkeys(tie.ranks[1:], value) if self._rank == tie.ranks[0] else {}
            arriving = {} if others else {tie.ranks[0]: value}
            exchange(transport, Lane.TIED, others, arriving, "waiting for the first values of a tied weight")
            tie.parameter.data.copy_(value)

    def begin(self) -> None:
        """Sets the gradients of earlier steps aside, so that this step's part alone is summed. Copies are not begun."""
        for tie in self._summed:
            tie.begin()

    def end(self, transport: Transport) -> None:
        """Sums each gradient over its ranks, in their order, and adds what was set aside. Raises LinkError."""
        for bucket in self._buckets:
            total = _summed(torch.cat([tie.gradient() for tie in bucket]), bucket[0].ranks, transport)
            for tie, part in zip(bucket, total.split([tie.parameter.numel() for tie in bucket]), strict=True):
                tie.end(part)


@dataclass(slots=True)
class _Tie(Summand):
    ranks: tuple[int, ...] = ()


def _summed(mine: Tensor, ranks: tuple[int, ...], transport: Transport) -> Tensor:
    peers = [peer for peer in ranks if peer != transport.rank]
    parts = {peer: torch.empty_like(mine) for peer in peers}
    exchange(transport, Lane.TIED, dict.fromkeys(peers, mine), parts, "waiting for the gradient of a tied weight")
    parts[transport.rank] = mine
    total = parts[ranks[0]]
    for peer in ranks[1:]:
        total += parts[peer]
    return total
