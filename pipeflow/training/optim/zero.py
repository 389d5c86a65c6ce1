"""Zero: an optimizer whose states are distributed over the data ranks, as in stage 1 of ZeRO (Rajbhandari et al., 2020,
arXiv:1910.02054, section 5.1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, zip_longest

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.sharding import is_distributed
from pipeflow.engine.parallel.transport.protocol import Work
from pipeflow.engine.runtime.gradients.sums import in_buckets
from pipeflow.engine.runtime.pipeline import Pipeline
from pipeflow.training.optim.optimizer import Wrapper

BUCKET = 2**25  # bytes of weights that are sent together
_UNDER_WAY = 4  # buckets in transfer at once


class Zero(Wrapper):
    """Distributes an optimizer's states over the data ranks. Each data rank owns some parameters: it keeps their
    states, steps them, and sends the new values to the other data ranks. All data ranks call `step` together.

    Each parameter has one owner, which has all of it. So optimizers that need whole weights work, such as Muon, and
    results are bit-identical to those of one rank. For float32 masters of only the owned parameters, wrap it:
    `MasterWeights(model, Zero(model, optimizer))`.

    Args:
        model: this rank's Pipeline; its gradients must be the same on all data ranks.
        optimizer: an optimizer of its parameters, with the same groups on every rank.

    Attributes:
        owners: the data rank that owns each parameter.

    Raises UsageError if `optimizer` is a wrapper, if it has parameters that are not in the model, or if the model uses
    fully_shard. `step` raises it for an optimizer that computes a weight's step from all weights, such as LBFGS.
    """

    # torch.distributed.optim.ZeroRedundancyOptimizer is not used: it needs torch's process groups (no threads, no fresh
    # channels after a failure, no name of a lost rank), makes its optimizer itself (no masters of owned parameters
    # only), and gathers its states on one rank to save them.

    model: Pipeline

    def __init__(self, model: Pipeline, optimizer: Optimizer) -> None:
        if isinstance(optimizer, Wrapper):
            raise UsageError("Zero must be the inner wrapper: MasterWeights(model, Zero(model, optimizer))")
        super().__init__(model, optimizer)
        if any(map(is_distributed, self.parameters)):
            raise UsageError("fully_shard already distributes the optimizer's states: use the optimizer without Zero")
        self._group = model.context.data
        self.owners = owners_of(self.parameters, self._group.size)
        self.stepped = {p: p for p in self.parameters if self.owners[p] == self._group.rank}
        for group in optimizer.param_groups:
            _keep_only(group, self.stepped)
        for parameter in self.parameters:
            if parameter not in self.stepped:
                optimizer.state.pop(parameter, None)
        self._buckets = list(_buckets(self.owners, self._group.size))
        self.share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no closure, so no loss
        """Steps this rank's own parameters and exchanges the new values. Raises PipelineError if a rank fails."""
        self.refuse_closure(closure)
        with self.model.alarm.raised_everywhere():
            self.inner.step()
            self._exchange()

    def _exchange(self) -> None:
        if self._group.size == 1:
            return
        under_way: deque[tuple[list[tuple[nn.Parameter, Tensor]], Work]] = deque()
        for owner, parameters in self._buckets:
            sizes = [parameter.numel() for parameter in parameters]
            values = torch.empty(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
            parts = [(each, part.view_as(each)) for each, part in zip(parameters, values.split(sizes), strict=True)]
            if owner == self._group.rank:
                for parameter, part in parts:
                    part.copy_(self.stepped[parameter])
            under_way.append((parts, self._group.broadcast(values, owner)))
            if len(under_way) == _UNDER_WAY:
                _finish(*under_way.popleft())
        for each in under_way:
            _finish(*each)


def _finish(parts: list[tuple[nn.Parameter, Tensor]], work: Work) -> None:
    """Waits for the new values of parameters and writes them."""
    work.wait()
    for parameter, part in parts:
        parameter.copy_(part)


def owners_of(parameters: Sequence[nn.Parameter], ranks: int) -> dict[nn.Parameter, int]:
    """The data rank that owns each parameter: from the largest on, each goes to the rank that owns least so far."""
    loads = [0] * ranks
    owners = {}
    for parameter in sorted(parameters, key=lambda parameter: -parameter.numel()):
        owner = loads.index(min(loads))
        owners[parameter] = owner
        loads[owner] += parameter.numel()
    return owners


def _buckets(owners: dict[nn.Parameter, int], ranks: int) -> Iterator[tuple[int, list[nn.Parameter]]]:
    """All parameters in buckets of one owner and dtype, each after its owner, who take turns, so that all of them send
    at the same time.
    """
    ordered = sorted(owners, key=lambda parameter: str(parameter.dtype))
    of_each = [list(_alike_in_buckets([p for p in ordered if owners[p] == owner])) for owner in range(ranks)]
    for turn in zip_longest(*of_each):
        yield from ((owner, bucket) for owner, bucket in enumerate(turn) if bucket is not None)


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
