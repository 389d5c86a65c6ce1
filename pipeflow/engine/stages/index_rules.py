"""Index rules: what operators make of samples that pick or set entries at places, or where a mask is true."""

from __future__ import annotations

from dataclasses import replace

import torch

from pipeflow.engine.stages.samples import SampleAxis, UnprovedError, mixes
from pipeflow.engine.stages.tape import TapeNode
from pipeflow.engine.stages.terms import Reading, Rule, Values
from pipeflow.engine.stages.values import ONE, Known, Rows, Same, TermSum, Value


def _index(reading: Reading, node: TapeNode, values: Values) -> Value:
    """Entries at places, or where a mask is true."""
    of, value = node.argument("self"), values[node.argument("self")]
    indices = node.argument("indices")
    at = [dim for dim, each in enumerate(indices) if each is not None]
    given = [indices[dim] for dim in at]
    numbers = all(each.dtype not in _MASKS for each in given)
    if (
        isinstance(value, Same)
        and (numbers or not value.varies)
        and len(given) == len(indices)
        and _axes(given, values)
    ):
        [axis] = _axes(given, values) if len(_axes(given, values)) == 1 else [None]
        if axis is None or any(len(each.shape) != len(given[0].shape) for each in given):
            raise mixes("an index")
        return Rows(axis)  # a table that is the same for all microbatches
    if not isinstance(value, Rows):
        raise UnprovedError("an index of a sum over samples")
    mask = values[given[0]]
    if len(given) == 1 and given[0].dtype in _MASKS and at[0] == 0 and isinstance(mask, Rows):
        return _picked(value, mask, given[0])
    if value.axis.dim not in at:
        if len(given) == 1 and isinstance(mask, Same):
            return Rows(
                value.axis.at(value.axis.dim + (len(given[0].shape) - 1) * (at[0] < value.axis.dim)), value.factor
            )
        raise mixes("an index")
    place = indices[value.axis.dim]
    if all(_picks_of(each, values) is not None for each in given) and at == list(range(len(given))):
        [*picks] = {_picks_of(each, values) for each in given}
        if len(picks) == 1 and picks[0] is not None and _counts_samples(reading, place, value, of):
            return Rows(SampleAxis(0, picks=picks[0]), reading.plain(value, node))
    others = [each for each in given if each is not place]
    if _numbers_all(place, of.shape[value.axis.dim]) and value.axis.outer == 1 and at == list(range(len(at))):
        axis = replace(value.axis, dim=len(node.shape) - len(of.shape) + len(at) - _rank(given))
        rows = [values[each] for each in others]
        if all(isinstance(each, Rows) and each.axis.alike(value.axis) for each in rows):
            return Rows(replace(axis, dim=_place_of(place, given)), value.factor)
    raise mixes("an index")


_MASKS = (torch.bool, torch.uint8)


def _axes(given: list[TapeNode], values: Values) -> set[SampleAxis]:
    return {value.axis for each in given if isinstance(value := values[each], Rows)}


def _rank(given: list[TapeNode]) -> int:
    return max(len(each.shape) for each in given)


def _place_of(place: TapeNode, given: list[TapeNode]) -> int:
    """The dimension of a broadcast index along which `place` counts."""
    sizes = [dim for dim, size in enumerate(place.shape) if size > 1] or [0]
    return sizes[0] + _rank(given) - len(place.shape)


def _numbers_all(place: TapeNode, size: int) -> bool:
    """Returns True if an index is arange(size), in any shape."""
    while place.name in ("view", "unsqueeze", "expand", "_unsafe_view", "alias", "detach"):
        place = place.nodes()[0]
    is_whole = place.name == "arange" and place.shape.numel() == size
    return is_whole and not place.argument("start", 0) and place.argument("step", 1) == 1


def _counts_samples(reading: Reading, place: TapeNode, value: Rows, of: TapeNode) -> bool:
    """Returns True if an index is where a mask is true along its samples, which are those of a tensor."""
    column = 0
    while place.name in ("view", "squeeze", "select", "unbind", "alias", "detach"):
        if place.name == "select":
            column = place.argument("index")
        elif place.name == "unbind":
            column = place.index or 0
        place = place.nodes()[0]
    if place.name != "nonzero":
        return False
    mask = place.nodes()[0]
    its = reading.value(mask)
    is_along = isinstance(its, Rows) and column % len(mask.shape) == its.axis.dim and its.axis.alike(value.axis)
    return is_along and mask.shape[column] == of.shape[value.axis.dim]


def _picks_of(place: TapeNode, values: Values) -> tuple[TapeNode, ...] | None:
    value = values[place]
    return (
        value.axis.picks if isinstance(value, Rows) and value.axis.picks and not place.dtype.is_floating_point else None
    )


def _picked(value: Rows, mask: Rows, node: TapeNode) -> Rows:
    """Entries of samples where a mask is true."""
    if value.axis != mask.axis or mask.factor != ONE or value.axis.picks:
        raise mixes("a mask")
    return Rows(SampleAxis(0, picks=(node,)), value.factor)


def _masked_select(reading: Reading, node: TapeNode, values: Values) -> Value:
    of, mask = node.argument("self"), node.argument("mask")
    value, its = values[of], values[mask]
    if not isinstance(value, Rows) or not isinstance(its, Rows) or mask.shape != of.shape:
        raise mixes("masked_select")
    return _picked(value, its, mask)


def _nonzero(reading: Reading, node: TapeNode, values: Values) -> Value:
    of = node.argument("self")
    value = values[of]
    if not isinstance(value, Rows) or value.axis.picks:
        raise mixes("nonzero of what is picked")
    return Rows(SampleAxis(0, picks=(of,)))


def _index_put(reading: Reading, node: TapeNode, values: Values) -> Value:
    """Entries that are set to a number where a mask of samples is true, or at places that are the same for all."""
    of, [mask, *others], new = node.argument("self"), node.argument("indices"), node.argument("values")
    value, its = values[of], values[mask] if isinstance(mask, TapeNode) else None
    if not isinstance(values[new], Same) or new.shape.numel() != 1 or isinstance(value, TermSum | Known):
        raise mixes(node.name)
    reading.fix([reading.number_of(new)])
    if isinstance(value, Rows):
        reading.plain(value, node)
        is_same = all(each is None or isinstance(values[each], Same) for each in (mask, *others))
        if is_same and all(each is None for each in (mask, *others)[: value.axis.dim + 1]):
            return Rows(value.axis)
    is_mine = value.axis == its.axis if isinstance(value, Rows) and isinstance(its, Rows) else value == Same()
    if others or not isinstance(its, Rows) or mask.dtype not in _MASKS or not is_mine:
        raise mixes(node.name)
    return Rows(its.axis)


INDEX_RULES: dict[str, Rule] = {
    "index": _index,
    "masked_select": _masked_select,
    "nonzero": _nonzero,
    "index_put": _index_put,
}
