"""Results: what steps compute for microbatches, as results of whole batches on every rank. Must not contain: steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from pipeflow.parallel.transport.agreement import all_gather
from pipeflow.parallel.trees import shared_outputs
from pipeflow.runtime.from_module import traced_otherwise
from pipeflow.runtime.microbatch import Batch, as_batch
from pipeflow.runtime.pipeline import Pipeline
from pipeflow.stages.loss import Made, weigh_by
from pipeflow.stages.stage import ModuleStage


@dataclass(frozen=True)
class _Known:
    """What a trace tells of a step's result.

    Attributes:
        spec: its tree.
        weighings: for each leaf, by its place, what weighs its microbatches: a function, None for their numbers of
            samples, or False for a leaf that is no scalar.
    """

    spec: Any
    weighings: Mapping[str, Any]


class Results:
    """Results of whole batches.

    Args:
        pipeline: the Pipeline that runs the steps.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._known: dict[str, _Known] = {}

    def whole(self, outputs: Any, entries: dict[str, Any], microbatches: int) -> Any:
        """The result of a batch without its loss, on every rank of the pipeline, which call it together.

        Args:
            outputs: those of the last stage, merged over the microbatches; None on other ranks.
            entries: the batch, with the method that ran it.
            microbatches: how many microbatches it had at most.

        """
        pipeline = self._pipeline
        batch = as_batch((entries, None), microbatches, pipeline.context.device)
        method = entries["method"]
        if method not in self._known:
            self._known[method] = self._traced(batch)
        known = self._known[method]
        with pipeline.alarm.raised_everywhere():
            shared = self._shared(_without_loss(outputs), known, len(batch.sizes))
        on_host = replace(batch, device=torch.device("cpu"), leaves=[])  # one copy, where labels are on a GPU
        parts = cache(lambda: on_host.split(entries["labels"]))

        def merged(path: str, leaf: Any) -> Any:
            weigh = known.weighings.get(path)
            if weigh is False or not isinstance(leaf, Tensor) or leaf.shape != (len(batch.sizes),):
                return leaf
            weights = batch.sizes if weigh is None else [weigh(part) for part in parts()]
            return _mean(leaf, weights, adds=getattr(weigh, "adds", False))

        leaves, spec = tree_flatten_with_path(shared)
        return tree_unflatten([merged(keystr(path), leaf) for path, leaf in leaves], spec)

    def is_empty(self, method: str) -> bool:
        """True if the step `method`, which has run, has no result beside the loss."""
        return not self._known[method].weighings

    def _traced(self, batch: Batch) -> _Known:
        stage = self._pipeline.chunks[0]
        assert isinstance(stage, ModuleStage)
        planner, part = stage.planner, batch.split(batch.inputs)[0]
        other = cache(lambda: traced_otherwise(batch, planner, planner.module))
        trace = planner.plan(part, stage.root).trace

        def weighing(index: int, made: Made | None) -> Any:
            def otherwise() -> tuple[Made | None, int]:
                found, size = other()
                return None if found is None else found.scalars[index], size

            return False if made is None else weigh_by(made, part["labels"], batch.sizes[0], otherwise)[0]

        weighings = [weighing(*each) for each in enumerate(trace.scalars)]
        leaves, spec = tree_flatten_with_path(_without_loss(tree_unflatten(weighings, trace.returned.spec)))
        return _Known(spec, {keystr(path): weigh for path, weigh in leaves})

    def _shared(self, outputs: Any, known: _Known, microbatches: int) -> Any:
        """The outputs, on every rank. If all are numbers, as the trace says, one message is enough."""
        transport, many = self._pipeline.context.transport, len(known.weighings)
        if any(weigh is False for weigh in known.weighings.values()):
            return shared_outputs(outputs, self._pipeline.context)
        leaves = None if outputs is None else tree_flatten_with_path(outputs)[0]
        if not many:
            return {}
        mine = [0.0] * (1 + many * microbatches)
        if leaves is not None:
            is_known = [keystr(path) for path, _ in leaves] == [*known.weighings]
            mine[0] = 1.0 if is_known else 2.0
            if is_known and leaves:
                mine[1:] = (
                    torch.stack([leaf.to(transport.device, torch.float64) for _, leaf in leaves]).flatten().tolist()
                )
        told = all_gather(transport, mine)
        if any(row[0] == 2.0 for row in told):
            return shared_outputs(outputs, self._pipeline.context)
        row = next(row for row in told if row[0])
        numbers = torch.tensor(row[1:], device=transport.device).view(many, microbatches)
        return tree_unflatten([*numbers], known.spec)


def _without_loss(result: Any) -> Any:
    """The result without the loss, which the training step itself tells all ranks."""
    return result if result is None else {name: each for name, each in result.items() if name != "loss"}


def _mean(values: Tensor, weights: Sequence[float], *, adds: bool) -> Tensor:
    """The mean, or sum, of a number of each microbatch; those without weight, such as without labels, may be nan."""
    factors = torch.tensor(weights, dtype=torch.float64, device=values.device)
    total = torch.where(factors == 0, 0.0, values.double() * factors).sum()
    return (total if adds else total / factors.sum()).to(values.dtype)
