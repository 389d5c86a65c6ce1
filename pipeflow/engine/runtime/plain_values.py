"""Numbers and other plain values that a module returns beside tensors, as values of whole batches. Must not contain:
tensors, which `merge` puts together.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from pipeflow.engine.runtime.microbatch import Batch
from pipeflow.engine.runtime.pipeline import Pipeline
from pipeflow.engine.stages.planner import Planner
from pipeflow.engine.stages.stage import ModuleStage
from pipeflow.engine.stages.trace import PLAIN, Trace
from pipeflow.engine.torch_private.trees import tree_leaves, tree_unflatten

_CONSTANT, _ADDS = "constant", "adds"


_KNOWN: WeakKeyDictionary[Trace, list[str | None]] = WeakKeyDictionary()
"""How the leaves of what a forward returns depend on the number of samples. A forward depends on its entries."""


def whole_values(outputs: Any, batch: Batch, pipeline: Pipeline) -> Any:
    """The outputs of a batch, in which a plain value that is the same for any number of samples is itself, and one that
    is proportional to it, such as a number of samples, is the sum over the microbatches; forwards of two sizes show
    which. Other plain values are a list with one entry per microbatch, as in `merge`.

    Args:
        outputs: those of the last stage, merged over the microbatches.
        batch: the batch, which is not split yet.
        pipeline: the Pipeline of a cut module.
    """
    if all(isinstance(leaf, Tensor) for leaf in tree_leaves(outputs)):
        return outputs
    stage = pipeline.chunks[0]
    assert isinstance(stage, ModuleStage)
    planner, first = stage.planner, batch.split(batch.inputs)[0]
    trace = planner.plan(first, stage.root).trace
    if trace not in _KNOWN:
        has_values = any(leaf is not None and isinstance(leaf, PLAIN) for leaf in trace.returned.leaves)
        other, size = _otherwise(batch, planner) if has_values else (None, 0)
        _KNOWN[trace] = _kinds(trace, batch.sizes[0], other, size)
    try:
        leaves = trace.returned.spec.flatten_up_to(outputs)
    except ValueError:  # another structure than in the trace
        return outputs
    found = zip(leaves, trace.returned.leaves, _KNOWN[trace], strict=True)
    merged = [_merged(leaf, batch.sizes, kind) if isinstance(like, PLAIN) else leaf for leaf, like, kind in found]
    return tree_unflatten(merged, trace.returned.spec)


def _otherwise(batch: Batch, planner: Planner) -> tuple[Trace | None, int]:
    """The forward of a microbatch of another size than the first, and this size. The trace is None if the forward does
    not accept the size, or if the batch is too small for another one.
    """
    samples, size = sum(batch.sizes), batch.sizes[0]
    other = size + 1 if samples > size else size - 1
    if not other:
        return None, 0
    sizes = [other, samples - other] if samples > other else [other]
    part = replace(batch, sizes=sizes, leaves=[]).split(batch.inputs)[0]
    try:
        return planner.observed(part, lambda *_: nullcontext())[0], other
    except Exception:  # whatever the forward raises
        return None, other


def _kinds(trace: Trace, size: int, other: Trace | None, its_size: int) -> list[str | None]:
    """How each leaf depends on the number of samples, as two forwards show; None for those that are unknown."""
    mine = trace.returned
    if other is None or other.returned.spec != mine.spec:
        return [_CONSTANT if leaf is None else None for leaf in mine.leaves]
    return [_kind(one, size, two, its_size) for one, two in zip(mine.leaves, other.returned.leaves, strict=True)]


def _kind(one: Any, size: int, two: Any, its_size: int) -> str | None:
    if not (isinstance(one, PLAIN) and type(one) is type(two)):
        return None
    if one == two:
        return _CONSTANT
    return (
        _ADDS
        if isinstance(one, int | float) and isinstance(two, int | float) and one * its_size == two * size
        else None
    )


def _merged(values: Any, sizes: list[int], kind: str | None) -> Any:
    """A value of the whole batch, or the list of its microbatches' values, as they are given."""
    if not (isinstance(values, list) and len(values) == len(sizes)):
        return values
    if len(sizes) == 1 or (kind == _CONSTANT and all(value == values[0] for value in values)):
        return values[0]
    numbers = zip(values, sizes, strict=True)
    if kind == _ADDS and all(value * sizes[0] == values[0] * size for value, size in numbers):
        return sum(values)
    return values
