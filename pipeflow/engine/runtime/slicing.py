"""Slicing: a batch whose microbatches are cut into slices of their sequences, for schedules with slices; and what can
be cut. Must not contain: what slices keep for each other, which `past` has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import mul
from typing import Any

from torch import Tensor

from pipeflow.core.action import Kind
from pipeflow.core.cost import CostModel, require_ends
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.core.slices import attention_of_longer, equal_slices
from pipeflow.engine.deferral.compile_backend import is_compiled
from pipeflow.engine.runtime.microbatch import Along, Batch, EntryParts, Whole
from pipeflow.engine.runtime.original import root_of
from pipeflow.engine.runtime.sharing import DOCUMENTS, SLICES
from pipeflow.engine.runtime.stage import Stage
from pipeflow.engine.torch_private.trees import tree_flatten, tree_unflatten


def ends_of(
    tokens: int, times: float, slices: int, cost: CostModel | None, *, multiple_of: int = 1, unit: int = 1
) -> tuple[int, ...]:
    """Where a sequence is cut: the end of each slice, in tokens. The costs of the Pipeline say it: `slice_ends`, or
    else slices of equal cost by the share of `attention`. Without costs, slices are equally long.

    Args:
        tokens: the length of the sequence.
        times: its length over that of the batch's mean sequence, whose share of attention the costs have.
        slices: the number of slices.
        cost: the costs of the Pipeline.
        multiple_of: all ends but the last one are multiples of this and of `unit`, if `tokens` is one.
        unit: all ends are multiples of this, as `tokens` is.

    Raises UsageError if there are too few tokens, and if `slice_ends` are not as many as slices.
    """
    if cost is None or not cost.slice_ends:
        multiple_of = unit if tokens % (unit * multiple_of) else unit * multiple_of
        attention = 0.0 if cost is None else attention_of_longer(cost.attention, times)
        return equal_slices(tokens, slices, attention=attention, multiple_of=multiple_of)
    require_ends(cost.slice_ends, slices)
    ends = [round(end / cost.slice_ends[-1] * tokens / unit) * unit for end in cost.slice_ends]
    if any(end <= start for start, end in pairwise([0, *ends])):
        raise UsageError(f"slice_ends={cost.slice_ends} leave a slice of {tokens} tokens empty: use fewer slices")
    return tuple(ends)


def sliced(batch: Batch, ends: Callable[[int, float], Sequence[int]], criterion: Any, ranks: int = 1) -> Batch:
    """The batch with each microbatch cut into slices. All tensors but those in Whole are cut along dim 1, labels after
    the criterion has shifted them. Each slice gets the documents of its whole microbatch.

    Args:
        batch: the batch.
        ends: the ends of the slices of a sequence, of so many tokens and so many times as long as the mean one. The
            mean is over all tokens of the batch, so it has the share of attention of the whole batch.
        criterion: the criterion of the Pipeline, whose `shifted` is applied to labels. None: they are shifted.
        ranks: among how many context ranks the tokens of each slice are divided. The batch has those of this one.

    Raises UsageError for tensors without tokens along dim 1, and for lengths that differ within a microbatch.
    """
    inputs, inputs_spec = tree_flatten(batch.inputs, _is_entry)
    labels, labels_spec = tree_flatten(batch.labels, _is_entry)
    documents = batch.named.get(DOCUMENTS)
    columns = {id(leaf): batch.divided(leaf) for leaf in (*inputs, *labels) if _has_tokens(leaf)}
    measured = [parts for key, parts in columns.items() if key != id(documents)]
    lengths = [ranks * _length(parts) for parts in zip(*measured, strict=True)]
    tokens, squares = (sum(map(mul, batch.sizes, (length**power for length in lengths))) for power in (1, 2))
    cuts = [ends(length, length * tokens / max(squares, 1)) for length in lengths]
    places = [[end // ranks for end in cut] for cut in cuts]

    def cut(leaf: object, *, shift: bool) -> object:
        if (parts := columns.get(id(leaf))) is None:
            return leaf
        found = list[object]()
        for part, ends in zip(parts, places, strict=True):
            if leaf is documents or not isinstance(part, Tensor) or not part.dim():
                found += [part] * len(ends)
            else:
                whole = criterion.shifted(part) if shift and criterion is not None else part
                found += whole.tensor_split(ends[:-1], dim=1)
        return EntryParts(found)

    return replace(
        batch,
        inputs=tree_unflatten([cut(leaf, shift=False) for leaf in inputs], inputs_spec),
        labels=tree_unflatten([cut(leaf, shift=True) for leaf in labels], labels_spec),
        sizes=[size for size, cut in zip(batch.sizes, cuts, strict=True) for _ in cut],
        cuts=cuts,
        whole=batch,
    )


def _is_entry(tree: object) -> bool:
    if isinstance(tree, Along):
        raise UsageError("pipeflow.Along entries cannot be cut into slices: use a schedule with slices=1")
    return isinstance(tree, Whole | EntryParts)


def _has_tokens(leaf: object) -> bool:
    """Whether an entry has a part for each slice: tensors, also of a divided batch."""
    return isinstance(leaf, EntryParts) or (isinstance(leaf, Tensor) and bool(leaf.dim()))


def _length(parts: Iterable[object]) -> int:
    """The number of tokens of a microbatch."""
    shapes = [tuple(part.shape) for part in parts if isinstance(part, Tensor) and part.dim()]
    lengths = {shape[1] if len(shape) > 1 else None for shape in shapes}
    if len(lengths) != 1 or None in lengths:
        raise UsageError(
            "slices are cut along dim 1, so each tensor of a batch needs its tokens there, and as many as the others; "
            f"got shapes {shapes}: wrap what has no tokens in pipeflow.Whole, or use a schedule with slices=1"
        )
    [length] = lengths
    assert length is not None
    return length


def require_sliceable(
    schedule: Schedule, stages: Mapping[int, Stage], criterion: object, refused: Mapping[str, object]
) -> None:
    """Raises UsageError unless schedule, stages and criterion can compute slices, and for an argument of `refused` that
    is given.
    """
    SLICES.require_stages(stage.module for stage in stages.values())
    for index, stage in stages.items():
        module = root_of(stage.module)
        named = f"of stage {index}, a {module._get_name()},"
        if getattr(module, "sees_later_tokens", False):
            raise UsageError(f"tokens {named} see later ones, which no earlier slice has: {SLICES.whole}")
        if any(map(is_compiled, module.modules())):
            raise UsageError(f"modules {named} are compiled: pass them as they are, or {SLICES.whole}")
    if criterion is not None:
        SLICES.require_loss(criterion)
    others = {Kind.S, Kind.O, Kind.L} & schedule.kinds or schedule.has_pairs or len(schedule.placement.paths) > 1
    SLICES.require_none({"optimizer steps, offload, pairs or several paths in the schedule": others, **refused})
