"""Zero: the states of an optimizer spread over the data ranks, stage 1 of ZeRO (Rajbhandari et al., 2020,
arXiv:1910.02054, section 5.1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeflow.core.errors import UsageError
from pipeflow.optim.optimizer import Wrapper
from pipeflow.parallel.sharding import is_distributed
from pipeflow.parallel.transport.work import Work
from pipeflow.runtime.gradients.bucket import in_buckets
from pipeflow.runtime.pipeline import Pipeline

BUCKET = 2**25  # bytes of weights that are sent at once
_UNDER_WAY = 4  # buckets


class Zero(Wrapper):
    """Steps on each data rank the parameters that it owns, then gives the new values to the others; a rank keeps the
    states of its own alone. All data ranks step together.

    Parameters are owned whole, by the data rank that owns least so far, the largest first: an optimizer that looks
    at a whole weight works as ever, and every weight gets the bits that one rank would give it. For float32 masters
    of those that are owned only, wrap it: `MasterWeights(model, Zero(model, optimizer))`.

    torch.distributed.optim.ZeroRedundancyOptimizer is not used: it needs torch's process groups, so no threads, no
    channels that start afresh after a failure, no name for a lost rank; it makes its optimizer itself, so no
    masters for what it owns; and its states are gathered on one rank to be saved.

    Args:
        model: the pipeline; its gradients are the same on all data ranks.
        optimizer: made from its parameters, on every rank with the same groups.

    Attributes:
        owners: which data rank owns each parameter.

    Raises UsageError when `optimizer` is a wrapper, steps other parameters, or those of a module under fully_shard.
    """

    model: Pipeline

    def __init__(self, model: Pipeline, optimizer: Optimizer) -> None:
        if isinstance(optimizer, Wrapper):
            raise UsageError("Zero goes inside: MasterWeights(model, Zero(model, optimizer))")
        super().__init__(model, optimizer)
        if any(map(is_distributed, self.parameters)):
            raise UsageError("fully_shard spreads the optimizer's states itself: leave Zero out")
        self._group = model.context.data
        self.owners = owners_of(self.parameters, self._group.size)
        self.stepped = {p: p for p in self.parameters if self.owners[p] == self._group.rank}
        for group in optimizer.param_groups:
            _keep_only(group, self.stepped)
        for parameter in self.parameters:
            if parameter not in self.stepped:
                optimizer.state.pop(parameter, None)
        self._buckets = list(_buckets(self.owners, self._group.size))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no closure, so no loss
        """Steps what is owned here and exchanges the new values. Raises PipelineError when a rank fails."""
        self.refuse_closure(closure)
        with self.model.alarm.raised_everywhere():
            self.inner.step()
            self._exchange()

    def _exchange(self) -> None:
        if self._group.size == 1:
            return
        under_way: deque[tuple[_Bucket, Tensor, Work]] = deque()
        for bucket in self._buckets:
            values = bucket.packed(self.stepped if bucket.owner == self._group.rank else {})
            under_way.append((bucket, values, self._group.broadcast(values, bucket.owner)))
            if len(under_way) == _UNDER_WAY:
                _finish(*under_way.popleft())
        for each in under_way:
            _finish(*each)


def owners_of(parameters: Sequence[nn.Parameter], ranks: int) -> dict[nn.Parameter, int]:
    """Per parameter, the data rank that owns it: the largest first, each to the rank that owns least so far."""
    loads = [0] * ranks
    owners = {}
    for parameter in sorted(parameters, key=lambda parameter: -parameter.numel()):
        owner = loads.index(min(loads))
        owners[parameter] = owner
        loads[owner] += parameter.numel()
    return owners


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Parameters of one owner and dtype that are sent at once."""

    owner: int
    parameters: list[nn.Parameter]

    def packed(self, stepped: dict[nn.Parameter, nn.Parameter]) -> Tensor:
        """A row for their values, in the parameters' dtype; filled with those of what was `stepped`."""
        first, sizes = self.parameters[0], [parameter.numel() for parameter in self.parameters]
        values = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        for parameter, part in zip(self.parameters, values.split(sizes), strict=True):
            if parameter in stepped:
                part.copy_(stepped[parameter].flatten())
        return values

    def unpack(self, values: Tensor) -> None:
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, part in zip(self.parameters, values.split(sizes), strict=True):
            parameter.copy_(part.view_as(parameter))


def _finish(bucket: _Bucket, values: Tensor, work: Work) -> None:
    work.wait()
    bucket.unpack(values)


def _buckets(owners: dict[nn.Parameter, int], ranks: int) -> Iterator[_Bucket]:
    """All parameters in buckets, the owners taking turns, so that all of them send at the same time."""
    ordered = sorted(owners, key=lambda parameter: str(parameter.dtype))
    of_each = [list(_alike_in_buckets([p for p in ordered if owners[p] == owner])) for owner in range(ranks)]
    for turn in zip_longest(*of_each):
        yield from (_Bucket(owner, bucket) for owner, bucket in enumerate(turn) if bucket is not None)


def _alike_in_buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Of one dtype each: their gradients' may be wider."""
    for _, alike in groupby(parameters, key=lambda parameter: parameter.dtype):
        yield from in_buckets(list(alike), BUCKET)


def _keep_only(group: dict[str, list[object]], kept: dict[nn.Parameter, nn.Parameter]) -> None:
    """Leaves in a group of an optimizer only those parameters."""
    places = [index for index, parameter in enumerate(group["params"]) if parameter in kept]
    for key in ("params", "param_names"):
        if key in group:
            group[key] = [group[key][index] for index in places]
